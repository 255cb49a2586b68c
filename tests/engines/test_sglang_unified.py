"""SGLang's unified memory pool, out of its wheel: pages that its own allocator moves, adopted where they lie."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import ShapeError, SpecError
from kvcore.interop import sglang
from kvcore.interop.sglang_tensors import hybrid_from, tensors_from, unified_from
from tests.engines.test_sglang_pools import Saver, plain  # noqa: F401
from tests.engines.wheels import own_modules
from tests.support import stories

unified, base = own_modules("sglang", "srt.mem_cache.unified_memory_pool", "srt.mem_cache.allocator.base")
# Which the package's own __init__ would import.
package = importlib.import_module("sglang.srt.mem_cache.allocator")
package.BaseTokenToKVPoolAllocator = base.BaseTokenToKVPoolAllocator
allocators, paged, swa = own_modules(
    "sglang", "srt.mem_cache.allocator.unified_sub_pool", "srt.mem_cache.allocator.paged", "srt.mem_cache.allocator.swa"
)
(hybrid,) = own_modules("sglang", "srt.mem_cache.allocator.unified_hybrid_swa")

PAGE, LAYERS, BYTES = 16, 2, 1 << 18
TOKENS = list(range(100))


def new_pages(seq_lens, page_size, prefix_lens=None, decode=False):
    """As its kernels count them."""
    before = seq_lens - 1 if decode else prefix_lens
    return int(((seq_lens + page_size - 1) // page_size - (before + page_size - 1) // page_size).sum())


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch, plain):  # noqa: F811, ARG001
    """What its kernels do, and what a process of one rank is asked."""

    def copy(raw, targets, sources, count, size):
        pages = raw[: count * size].view(count, size)
        pages[targets] = pages[sources].clone()

    def zero(raw, places, count, size):
        raw[: count * size].view(count, size)[places] = 0

    def bind(numbers, to_physical, to_virtual, start):
        places = torch.arange(start, start + len(numbers))
        to_physical[numbers], to_virtual[places] = places, numbers
        return places

    monkeypatch.setattr(unified, "TorchMemorySaverAdapter", Saver)
    monkeypatch.setattr(unified, "copy_pages", copy)
    monkeypatch.setattr(unified, "zero_pages", zero)
    monkeypatch.setattr(allocators, "alloc_bind_inplace", bind)
    monkeypatch.setattr(hybrid, "get_num_new_pages", new_pages)
    told = {"SGLANG_COMPACTION_MAX_PAGES_PER_MOVE": 8, "SGLANG_DEBUG_POISON_POOL": True}
    for name, value in told.items():
        for module in (unified, allocators):
            monkeypatch.setattr(module.envs, name, SimpleNamespace(get=lambda value=value: value), raising=False)


def built(kind):
    """(pool, its allocator) of the lower end of a buffer, whose other end has another model's keys and values."""
    rows = {"layer_num": LAYERS, "store_dtype": torch.float32}
    if kind == "UnifiedMHATokenToKVPool":
        one = unified.MHASubPoolSpec(name="full", grow_direction="up", head_num=2, head_dim=8, v_head_dim=4, **rows)
    else:
        one = unified.MLASubPoolSpec(name="full", grow_direction="up", kv_lora_rank=16, qk_rope_head_dim=8, **rows)
    other = unified.MHASubPoolSpec(name="other", grow_direction="down", head_num=1, head_dim=8, **rows)
    buffer = unified.UnifiedKVPool(
        total_bytes=BYTES, sub_pool_specs=[one, other], device="cpu", enable_memory_saver=False, page_size=PAGE
    )
    options = {"kv_cache_dtype": torch.float32} if kind == "UnifiedMLATokenToKVPool" else {}
    pool = getattr(unified, kind)(unified_buffer=buffer, sub_pool_name="full", page_size=PAGE, **options)
    allocator = allocators.MultiEndedAllocator(
        kvcache=pool, unified_buffer=buffer, sub_pool_name="full", device="cpu", is_id_owner=True, page_size=PAGE
    )
    return pool, allocator


def told(cache, own, allocator):
    """Three requests in both caches, 37 tokens each: (slots, pages, requests, those of ``own``).

    The allocator hands pages out in turns, so that a request that goes leaves holes.
    """
    slots = [allocator.alloc(PAGE) for _ in range(9)]
    pages = [int(some[0]) // PAGE for some in slots]
    requests = [cache.admit(blocks=pages[first::3]) for first in range(3)]
    others = [own.admit() for _ in requests]
    for where, some in ((cache, requests), (own, others)):
        stories.tell(where, {one: TOKENS[10 * n : 10 * n + 37] for n, one in enumerate(some)})
    assert cache.digest(requests) == own.digest(others)
    return slots, pages, requests, others


@pytest.mark.parametrize("kind", ["UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool"])
def test_requests_stay_theirs_while_the_pool_is_compacted(kind):
    pool, allocator = built(kind)
    spec = sglang.spec_from(pool)
    tensors, descriptor, maps = unified_from(pool, allocator)
    cache = kvcore.adopt(spec, tensors, layout=descriptor, maps=maps, max_requests=3)
    own = kvcore.create_cache(spec, backend="reference", max_requests=3, max_tokens=512)
    slots, pages, requests, others = told(cache, own, allocator)
    # The first goes: the last pages that are held come down into the places that it leaves.
    cache.release(requests[0])
    before = allocator.virtual_to_physical.clone()
    for some in slots[::3]:
        allocator.free(some)
    kept = [page for n, page in enumerate(pages) if n % 3]
    assert (before[kept] != allocator.virtual_to_physical[kept]).any()
    assert allocator.watermark_physical == allocator.min_page_index + len(kept)
    assert cache.digest(requests[1:]) == own.digest(others[1:])
    # Steps go on where the rows are now, and the pool's own views have what the library reads.
    for where, some in ((cache, requests[1:]), (own, others[1:])):
        stories.tell(where, {one: TOKENS[50 + n : 54 + n] for n, one in enumerate(some)})
    assert cache.digest(requests[1:]) == own.digest(others[1:])
    place = int(allocator.virtual_to_physical[pages[1]])
    with cache.step({requests[1]: 0}) as step:
        if kind == "UnifiedMHATokenToKVPool":
            keys, values, _ = step.layer(1).gather_kv()
            found = {"k_buffer": keys[0, :PAGE], "v_buffer": values[0, :PAGE]}
        else:
            rows = step.layer(1).gather_rows("entries").rows[0, :PAGE]
            found = {"kv_buffer": rows.contiguous().view(torch.float32)[:, None]}
    for name, rows in found.items():
        assert torch.equal(getattr(pool, name)[1][place * PAGE :][:PAGE], rows)
    # New pages for one that comes out of the other cache.
    fresh = [int(some[0]) // PAGE for some in (allocator.alloc(PAGE) for _ in range(3))]
    again = cache.import_request(own.export_request(others[0]), into=cache.admit(blocks=fresh))
    assert cache.digest([again]) == own.digest([others[0]])
    assert cache.digest(requests[1:]) == own.digest(others[1:])


def test_windows_have_pages_of_their_own_that_move():
    """Full and sliding layers at the two ends of a buffer: one number of a page, and two places of it."""
    rows = {"store_dtype": torch.float32, "kv_cache_dtype": torch.float32}
    full = unified.MHASubPoolSpec(name="full", grow_direction="down", layer_num=1, head_num=2, head_dim=8, **rows)
    sliding = unified.MHASubPoolSpec(name="swa", grow_direction="up", layer_num=2, head_num=2, head_dim=8, **rows)
    buffer = unified.UnifiedKVPool(
        total_bytes=BYTES, sub_pool_specs=[full, sliding], device="cpu", enable_memory_saver=False, page_size=PAGE
    )
    pool = unified.UnifiedSWAKVPool(
        unified_buffer=buffer, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1], page_size=PAGE
    )
    allocator = hybrid.UnifiedSWATokenToKVPoolAllocator(
        unified_buffer=buffer, kvcache=pool, device="cpu", page_size=PAGE
    )
    spec = sglang.spec_from(pool, window=20)
    tensors, descriptor, maps = unified_from(pool, allocator, spec)
    cache = kvcore.adopt(spec, tensors, layout=descriptor, maps=maps, max_requests=3)
    own = kvcore.create_cache(spec, backend="torch_triton", max_requests=3, max_tokens=512)
    slots, pages, requests, others = told(cache, own, allocator)
    # What is behind the second's window goes back alone, and the first request: pages of both kinds move.
    cache.release(requests[0])
    before = [table.clone() for table in maps.values()]
    allocator.free_swa(slots[1])
    for some in slots[::3]:
        allocator.free(some)
    for table, was in zip(maps.values(), before, strict=True):
        kept = [page for n, page in enumerate(pages) if n % 3 and int(table[page]) >= 0]
        assert (was[kept] != table[kept]).any()
    assert int(maps["full_to_swa"][pages[1]]) < 0
    assert cache.digest(requests[1:]) == own.digest(others[1:])
    # Steps go on where the rows are now, and SGLang reads them by its own translation.
    for where, some in ((cache, requests[1:]), (own, others[1:])):
        stories.tell(where, {one: TOKENS[50 + n : 54 + n] for n, one in enumerate(some)})
    assert cache.digest(requests[1:]) == own.digest(others[1:])
    numbers = torch.cat(slots[2::3])[:41]
    for layer in range(3):
        owner = allocator.full_attn_allocator if layer == 1 else allocator.swa_attn_allocator
        with own.step({others[2]: 0}) as step:
            keys, values, positions = step.layer(layer).gather_kv()
        live = positions[0] >= 0
        at = pool._virt_tokens_to_phys_tokens(numbers[positions[0][live].long()], owner)
        assert torch.equal(keys[0][live], pool.get_key_buffer(layer)[at])
        assert torch.equal(values[0][live], pool.get_value_buffer(layer)[at])
    assert int(live.sum()) == 20
    # New pages for one that comes out of the other cache; one page in two places is refused.
    fresh = [int(some[0]) // PAGE for some in (allocator.alloc(PAGE) for _ in range(3))]
    again = cache.import_request(own.export_request(others[0]), into=cache.admit(blocks=fresh))
    assert cache.digest([again]) == own.digest([others[0]])
    cache.release(again)
    maps["full_to_swa"][fresh[2]] = maps["full_to_swa"][fresh[1]]
    with pytest.raises(ShapeError, match="not that of token"):
        cache.admit(blocks=fresh, length=37)


def linear():
    """A hybrid linear model: states and inputs of two layers at one end of a buffer, keys and values at the other."""
    rows = {"store_dtype": torch.float32, "kv_cache_dtype": torch.float32}
    full = unified.MHASubPoolSpec(name="full", grow_direction="down", layer_num=1, head_num=2, head_dim=8, **rows)
    states = unified.MambaSubPoolSpec(
        name="mamba", grow_direction="up", layer_num=2, conv_state_shapes=((6, 3),), conv_dtype=torch.bfloat16,
        temporal_state_shape=(2, 4, 5), temporal_dtype=torch.float32,
    )  # fmt: skip
    buffer = unified.UnifiedKVPool(
        total_bytes=BYTES // 8, sub_pool_specs=[full, states], device="cpu", enable_memory_saver=False, page_size=PAGE
    )
    held = unified.UnifiedMHATokenToKVPool(unified_buffer=buffer, sub_pool_name="full", page_size=PAGE)
    carried = unified.UnifiedMambaPool(
        unified_buffer=buffer, sub_pool_name="mamba", spec_state_size=0, mamba_layer_ids=[0, 2]
    )
    pool = unified.UnifiedHybridLinearKVPool(
        size=held.size, dtype=torch.float32, page_size=PAGE, head_num=2, head_dim=8, full_attention_layer_ids=[1],
        device="cpu", mamba_pool=carried, full_kv_pool=held,
    )  # fmt: skip
    mine = {"unified_buffer": buffer, "device": "cpu", "is_id_owner": True}
    pages = allocators.MultiEndedAllocator(kvcache=held, sub_pool_name="full", page_size=PAGE, **mine)
    slots = allocators.MultiEndedAllocator(kvcache=carried, sub_pool_name="mamba", page_size=1, **mine)
    given = unified.UnifiedMambaSlotAllocator(slots, carried.size, "cpu")
    # What a pool of requests asks it.
    asked = unified.UnifiedHybridReqToTokenPool.mamba_v2p_table.fget(SimpleNamespace(mamba_allocator=given))
    return pool, SimpleNamespace(mamba_v2p_table=asked), pages, given


def carry(world, counts, seed, *, fail=False):
    """Tokens of several requests in one step, the same in every cache."""
    rng, count = np.random.default_rng(seed), sum(counts)
    rows = [
        [rng.standard_normal(shape).astype(np.float32) for shape in ((count, 2, 4, 5), (count, 6), (count, 2, 8))]
        for _ in range(3)
    ]
    for where, some in world:
        with where.step(dict(zip(some, counts, strict=True))) as step:
            for number, (states, inputs, heads) in enumerate(rows):
                layer = step.layer(number)
                if number == 1:
                    layer.append_kv(heads, -heads)
                else:
                    layer.append_state(states)
                    layer.append_conv(inputs)
            if fail:
                step.abort()


def test_states_and_inputs_move_and_stay_the_requests():
    pool, requests, allocator, slots = linear()
    spec = sglang.spec_from(pool)
    assert [layer.roles for layer in spec.layers] == [("state", "conv"), ("kv",), ("state", "conv")]
    tensors, descriptor, maps = hybrid_from(pool, requests, allocator)
    cache = kvcore.adopt(spec, tensors, layout=descriptor, maps=maps, max_requests=len(maps["states"]))
    own = kvcore.create_cache(spec, backend="torch_triton", max_requests=4, max_tokens=512)
    numbers = [int(slots.alloc(1)) for _ in range(4)]
    pages = [int(allocator.alloc(PAGE)[0]) // PAGE for _ in range(9)]
    mine = [cache.admit(blocks=pages[first::3], slot=numbers[first]) for first in range(3)]
    others = [own.admit() for _ in mine]
    # The last has fewer tokens than the convolution looks back at.
    lengths = [7, 37, 2]
    carry(((cache, mine), (own, others)), lengths, 1)
    assert cache.digest(mine) == own.digest(others)

    def check(number, request, length):
        """State and inputs are where SGLang's kernels look: the newest input last, zeros before the first."""
        place = int(maps["states"][number])
        for layer, at in ((0, 0), (2, 1)):
            with own.step({request: 0}) as step:
                state, inputs = step.layer(layer).read_state()[0], step.layer(layer).gather_rows("conv")
            assert torch.equal(pool.mamba_pool.mamba_cache.temporal[at, place], state.view(2, 4, 5))
            rows = inputs.rows[0].contiguous().view(torch.bfloat16)[inputs.positions[0] >= 0]
            there = pool.mamba_pool.mamba_cache.conv[0][at, place].T
            assert torch.equal(there[3 - len(rows) :], rows)
            assert not there[: 3 - len(rows)].any()
            assert len(rows) == min(3, length)

    for number, request, length in zip(numbers, others, lengths, strict=False):
        check(number, request, length)
    # The first goes: what the last slot has comes down into its place, with its bytes.
    cache.release(mine[0])
    before = maps["states"].clone()
    slots.free(torch.tensor([numbers[0]]))
    assert (before[numbers[1:]] != maps["states"][numbers[1:]]).any()
    assert cache.digest(mine[1:]) == own.digest(others[1:])
    for seed, count in enumerate((1, 1, 4)):
        world = (cache, mine[1:]), (own, others[1:])
        carry(world, (2, 3), 10 + seed, fail=True)
        carry(world, (count, count), 20 + seed)
    for number, request, length in zip(numbers[1:], others[1:], (43, 8), strict=False):
        check(number, request, length)
    assert cache.digest(mine[1:]) == own.digest(others[1:])
    # Out and back, into another slot; what SGLang has there is a request by its length alone.
    fresh = [int(allocator.alloc(PAGE)[0]) // PAGE for _ in range(3)]
    again = cache.import_request(cache.export_request(mine[1]), into=cache.admit(blocks=fresh, slot=numbers[3]))
    check(numbers[3], others[1], 43)
    assert cache.digest([again]) == own.digest([others[1]])
    cache.release(again)
    known = cache.admit(blocks=fresh, slot=numbers[3], length=43)
    assert cache.digest([known]) == own.digest([others[1]])


def test_what_is_no_pool_of_its_kind_is_refused_by_name():
    pool, allocator = built("UnifiedMHATokenToKVPool")
    with pytest.raises(SpecError, match=r"UnifiedMHATokenToKVPool.*unified_from"):
        tensors_from(pool)
    with pytest.raises(SpecError, match="UnifiedMLATokenToKVPool, UnifiedSWAKVPool") as caught:
        unified_from(type("UnifiedMambaPool", (), {})(), allocator)
    assert caught.value.where == "unified_from"
    windows = type("UnifiedSWAKVPool", (), {"page_size": PAGE})()
    for one, wrong, name in (
        (windows, allocator, "UnifiedSWATokenToKVPoolAllocator"),
        (windows, None, "UnifiedSWATokenToKVPoolAllocator"),
        (pool, SimpleNamespace(full_attn_allocator=allocator, swa_attn_allocator=allocator), "MultiEndedAllocator"),
        (pool, None, "got no allocator.*MultiEndedAllocator"),
    ):
        with pytest.raises(SpecError, match=name) as caught:
            unified_from(one, wrong)
        assert caught.value.where == "unified_from: allocator"
    allocator.page_size *= 2
    with pytest.raises(SpecError, match="a slot for every token") as caught:
        unified_from(pool, allocator)
    assert caught.value.where == "unified_from"


def test_a_hybrid_model_has_the_allocator_of_its_full_layers():
    pool, requests, allocator, _ = linear()
    for wrong in (None, SimpleNamespace()):
        with pytest.raises(SpecError, match="MultiEndedAllocator") as caught:
            hybrid_from(pool, requests, wrong)
        assert caught.value.where == "hybrid_from: allocator"
    allocator.page_size *= 2
    with pytest.raises(SpecError, match="a slot for every token") as caught:
        hybrid_from(pool, requests, allocator)
    assert caught.value.where == "hybrid_from"
