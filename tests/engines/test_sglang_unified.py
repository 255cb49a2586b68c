"""SGLang's unified memory pool, out of its wheel: pages that its own allocator moves, adopted where they lie."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import kvcore
from kvcore.errors import ShapeError, SpecError
from kvcore.interop import sglang
from kvcore.interop.sglang_tensors import tensors_from, unified_from
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


@pytest.mark.parametrize("kind", ["UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool"])
def test_requests_stay_theirs_while_the_pool_is_compacted(kind):
    pool, allocator = built(kind)
    spec = sglang.spec_from(pool)
    tensors, descriptor, maps = unified_from(pool, allocator)
    cache = kvcore.adopt(spec, tensors, layout=descriptor, maps=maps, max_requests=3)
    own = kvcore.create_cache(spec, backend="reference", max_requests=3, max_tokens=512)
    # Its allocator hands pages out: in turns, so that a request that goes leaves holes.
    slots = [allocator.alloc(PAGE) for _ in range(9)]
    pages = [int(some[0]) // PAGE for some in slots]
    requests = [cache.admit(blocks=pages[first::3]) for first in range(3)]
    others = [own.admit() for _ in requests]
    for where, some in ((cache, requests), (own, others)):
        stories.tell(where, {one: TOKENS[10 * n : 10 * n + 37] for n, one in enumerate(some)})
    assert cache.digest(requests) == own.digest(others)
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
    slots = [allocator.alloc(PAGE) for _ in range(9)]
    pages = [int(some[0]) // PAGE for some in slots]
    requests = [cache.admit(blocks=pages[first::3]) for first in range(3)]
    others = [own.admit() for _ in requests]
    for where, some in ((cache, requests), (own, others)):
        stories.tell(where, {one: TOKENS[10 * n : 10 * n + 37] for n, one in enumerate(some)})
    assert cache.digest(requests) == own.digest(others)
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


def test_what_is_no_pool_of_its_kind_is_refused_by_name():
    pool, allocator = built("UnifiedMHATokenToKVPool")
    with pytest.raises(SpecError, match=r"UnifiedMHATokenToKVPool.*unified_from"):
        tensors_from(pool)
    with pytest.raises(SpecError, match="UnifiedMLATokenToKVPool"):
        unified_from(type("UnifiedMambaPool", (), {})(), allocator)
    allocator.page_size *= 2
    with pytest.raises(SpecError, match="a slot for every token"):
        unified_from(pool, allocator)
