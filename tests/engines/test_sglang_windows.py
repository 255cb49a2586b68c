"""SGLang's own pools of sliding windows and its allocator, out of its wheel on a CPU: rows where its mapping says."""

from types import SimpleNamespace

import pytest
import torch

import kvcore
from kvcore.errors import OutOfBlocks, ShapeError, SpecError
from kvcore.interop import sglang
from kvcore.interop.sglang_tensors import WINDOWS, mapped_from
from tests.engines.test_sglang_pools import latent, moved, plain, random  # noqa: F401
from tests.engines.wheels import own_modules

paged, windows, swa = own_modules(
    "sglang",
    "srt.mem_cache.allocator.paged",
    "srt.mem_cache.swa_memory_pool",
    "srt.mem_cache.allocator.swa",
)

TOKENS, WINDOW = 150, 70
ATTENTION = {"full_attention_layer_ids": [1], "swa_attention_layer_ids": [0, 2]}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """What SGLang's allocators ask of a platform, for a CPU."""
    monkeypatch.setattr(windows, "maybe_init_custom_mem_pool", lambda **_: (False, None, None))
    monkeypatch.setattr(swa, "current_platform", SimpleNamespace(get_paged_allocator_cls=lambda: None))
    monkeypatch.setattr(swa, "async_h2d", lambda data, dtype, device: torch.tensor(data, dtype=dtype, device=device))

    def pages(seq_lens, page_size, prefix_lens=None, decode=False):
        before = seq_lens - 1 if decode else prefix_lens
        up = lambda lens: (lens + page_size - 1) // page_size  # noqa: E731
        return int((up(seq_lens) - up(before)).sum())

    monkeypatch.setattr(paged, "get_num_new_pages", pages)
    monkeypatch.setattr(swa, "get_num_new_pages", pages)


class Owner:
    """A pool and its allocator, of which others have pages already: those of windows have other numbers."""

    def __init__(self, pool, page, size, size_swa):
        self.pool, self.page = pool, page
        self.allocator = swa.SWATokenToKVPoolAllocator(size, size_swa, page, torch.bfloat16, "cpu", pool, False)
        self.extend(2 * page)
        if page > 1:
            # Another request, of whose windows a page is there alone.
            at = [torch.tensor([count]) for count in (0, 3 * page, -1)]
            self.allocator.alloc_extend_swa_tail(at[0], at[0], at[1], at[1], at[2], 3 * page, page)
        else:
            # As after some have come and gone.
            windows_of = self.allocator.swa_attn_allocator
            windows_of.free_pages = windows_of.free_pages[torch.randperm(len(windows_of.free_pages))]

    def extend(self, count):
        """Slots of a new request."""
        if self.page == 1:
            return self.allocator.alloc(count)
        zero, length, last = (torch.tensor([number]) for number in (0, count, -1))
        return self.allocator.alloc_extend(zero, zero, length, length, last, count)

    def grow(self, slots):
        """One more."""
        if self.page == 1:
            return torch.cat([slots, self.allocator.alloc(1)])
        length = torch.tensor([len(slots) + 1])
        return torch.cat([slots, self.allocator.alloc_decode(length, length, slots[-1:])])

    def blocks(self, slots):
        return (slots[:: self.page] // self.page).tolist()

    def read(self, layer, part, block, row):
        """What its attention reads for a slot of the full pool."""
        held = self.pool.get_key_buffer(layer) if part == "key" else self.pool.get_value_buffer(layer)
        slot = torch.tensor(block * self.page + row)
        sliding = self.pool.layers_mapping[layer][1]
        found = held[self.pool.translate_loc_from_full_to_swa(slot) if sliding else slot]
        return found.contiguous().view(torch.uint8)


def heads(page):
    pool = windows.SWAKVPool(
        size=960, size_swa=704, page_size=page, dtype=torch.bfloat16, head_num=2, head_dim=8, device="cpu",
        enable_alt_stream=False, **ATTENTION,
    )  # fmt: skip
    for held in (pool.full_kv_pool, pool.swa_kv_pool):
        for tensor in (*held.k_buffer, *held.v_buffer):
            random(tensor)
    return Owner(pool, page, 960, 704)


def adopted(owner, spec, **changes):
    tensors, descriptor, maps = mapped_from(owner.pool, spec)
    return kvcore.adopt(spec, tensors, layout=descriptor, **{"maps": maps, "max_requests": 4, **changes})


@pytest.mark.parametrize("page", [64, 1])
def test_keys_and_values_of_windows(page):
    owner = heads(page)
    slots = owner.extend(TOKENS)
    spec = sglang.spec_from(owner.pool, window=WINDOW)
    cache = adopted(owner, spec)
    request = cache.admit(blocks=owner.blocks(slots), length=TOKENS)
    cache.compare(request, owner.read)
    # Its own copy of the window is what kvcore has of it.
    translated = owner.allocator.translate_loc_from_full_to_swa(slots)
    assert not torch.equal(translated, slots)
    with cache.step({request: 0}) as step:
        keys, _, positions = step.layer(2).gather_kv()
    live = positions[0] >= 0
    held = owner.pool.get_key_buffer(2)[translated[positions[0][live].long()]]
    assert int(live.sum()) == WINDOW
    assert torch.equal(keys[0][live].float(), held.float())
    # Out into a cache of kvcore's own, and back into slots that the allocator gives out.
    blob = moved(spec, cache, request)
    others = owner.extend(TOKENS)
    again = cache.import_request(blob, into=cache.admit(blocks=owner.blocks(others)))
    assert cache.digest([again]) == cache.digest([request])
    cache.compare(again, owner.read)
    # What is behind the window is taken back, and goes on: a token that kvcore writes is found by the engine.
    owner.allocator.free_swa(slots[:64])
    grown = owner.grow(slots)
    cache.give(request, owner.blocks(grown)[len(owner.blocks(slots)) :])
    rows = torch.full((1, 2, 8), 3.0, dtype=torch.bfloat16)
    own = kvcore.create_cache(spec, backend="torch_triton", max_requests=1, max_tokens=512)
    there = own.import_request(blob)
    answers = []
    for one, who in ((cache, request), (own, there)):
        with one.step({who: 1}) as step:
            for layer in range(3):
                step.layer(layer).append_kv(rows, rows)
            answers.append(step.layer(2).attend(torch.ones(1, 2, 8), scale=0.3)[0])
    assert torch.equal(*answers)
    at = owner.allocator.translate_loc_from_full_to_swa(grown[-1:])
    assert (owner.pool.get_key_buffer(2)[at] == 3).all()
    assert (owner.pool.get_value_buffer(1)[grown[-1:]] == 3).all()
    assert cache.digest([request]) == own.digest([there])


def beyond(values, slots):
    values[slots[-1]] = 960


def of_another(values, slots, others):
    values[slots] = values[others].clone()


def twice(values, slots):
    values[slots[-64:]] = values[slots[-128:-64]].clone()


def not_there(values, slots):
    values[slots[-3]] = 0


def of_one_slot_later(values, slots):
    values[slots[:-1]] = values[slots[1:]].clone()


def a_row_on(values, slots):
    values[slots] += 1


@pytest.mark.parametrize("page", [64, 1])
@pytest.mark.parametrize("change", [beyond, of_another, twice, not_there, of_one_slot_later, a_row_on])
def test_a_wrong_mapping_is_refused_or_shows(change, page):
    owner = heads(page)
    slots, others = owner.extend(128), owner.extend(128)
    spec = sglang.spec_from(owner.pool, window=WINDOW)
    cache = adopted(owner, spec)
    cache.admit(blocks=owner.blocks(others), length=128)
    right = owner.pool.full_to_swa_index_mapping.clone()
    # What the engine itself reads by stays as it is.
    owner.pool.register_mapping(right)
    wrong = owner.allocator.full_to_swa_index_mapping
    change(*((wrong, slots, others) if change is of_another else (wrong, slots)))
    assert not torch.equal(wrong, right)
    wrong_cache = adopted(owner, spec, maps={WINDOWS: wrong})
    wrong_cache.admit(blocks=owner.blocks(others), length=128)
    with pytest.raises((ShapeError, OutOfBlocks)):
        wrong_cache.compare(wrong_cache.admit(blocks=owner.blocks(slots), length=128), owner.read)


def test_pools_without_a_mapping_are_refused_by_name():
    owner = heads(64)
    spec = sglang.spec_from(owner.pool, window=WINDOW)
    with pytest.raises(SpecError, match=r"no map 'full_to_swa'"):
        adopted(owner, spec, maps={})
    owner.pool.full_to_swa_index_mapping = None
    with pytest.raises(SpecError, match="without full_to_swa_index_mapping"):
        mapped_from(owner.pool, spec)
    with pytest.raises(SpecError, match="got SimpleNamespace"):
        mapped_from(SimpleNamespace(), spec)


def fill(pool, states):
    """Random rows in all that a ``DeepSeekV4TokenToKVPool`` holds, and in pools of states, of which some are None."""
    for held in (pool.swa_kv_pool, *pool.kv_pools.values()):
        for tensor in held.kv_buffer:
            random(tensor)
    for held in pool.index_pools.values():
        for tensor in held.index_k_with_scale_buffer:
            random(tensor)
    for held in states:
        if held is not None:
            held.kv_score_buffer.kv_score.normal_()


def deepseek(monkeypatch, *, online):
    """A ``DeepSeekV4TokenToKVPool`` as its own methods allot its parts, for a page of 256 tokens."""
    monkeypatch.setattr(latent, "ONLINE_C128", online)
    monkeypatch.setattr(latent, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None), raising=False)
    kind = latent.DeepSeekV4TokenToKVPool
    pool = kind.__new__(kind)
    page, slots = 256, 4
    vars(pool).update(
        page_size=page, swa_page_size=page, sliding_window=128, device="cpu", compression_ratios=[0, 4, 128],
        qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128, num_req_slots=slots, _unified_kv=False,
        uniform_fp8=False, kv_layout=latent.KVLayout.V4, compressed_kv_layout_option=None, _stage_start=0, _stage_end=3,
        online_mtp_max_draft_tokens=0, layer_transfer_counter=None, sources_by_ratio={}, full_size=12 * page,
        request_window=None, swa_req_ring_size=None,
    )  # fmt: skip
    config = latent._CompressedPoolConfig
    pool.compressed_pool_configs = {
        4: config(12 * page // 4, 8 * 8, torch.float32, 12 * page // 4),
        128: config(12 * page // 128, slots * (1 if online else 128), torch.float32),
    }
    memory = {"dtype": torch.float8_e4m3fn, "device": "cpu", "enable_memory_saver": False}
    pool.swa_kv_pool = pool._make_kv_pool(size=8 * page, page_size=page, layer_num=3, global_page_size=page, **memory)
    pool._init_compressed_pools(
        stage_ratios=[0, 4, 128],
        page_size=page,
        enable_hisparse=False,
        kv_pool_cls=latent.DeepSeekV4SingleKVPool,
        **memory,
    )
    pool._init_compressed_layer_mapping()
    pool._init_paged_compress_states(False)
    fill(pool, (*pool.compress_state_pools, *pool.indexer_compress_state_pools))
    return Owner(pool, page, 12 * page, 8 * page)


def deepseek_v41(monkeypatch, layout, keys=64):
    """A ``DeepSeekV4TokenToKVPool`` of V4.1: two layers read the pools of a source, one has pairs that wait."""
    monkeypatch.setattr(latent, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None), raising=False)
    monkeypatch.setattr(latent, "DSV41_INDEX_PAGE_SIZE", keys)
    kind = latent.DeepSeekV4TokenToKVPool
    pool = kind.__new__(kind)
    page, ratios = 256, [0, 1, 1, 2, 2]
    vars(pool).update(
        page_size=page, swa_page_size=page, sliding_window=128, device="cpu", compression_ratios=ratios,
        qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128, num_req_slots=4, _unified_kv=False,
        uniform_fp8=False, kv_layout=latent.KVLayout(layout), compressed_kv_layout_option=None, _stage_start=0,
        _stage_end=len(ratios), online_mtp_max_draft_tokens=0, layer_transfer_counter=None, full_size=12 * page,
        sources_by_ratio=latent.collect_sources_by_ratio(ratios, [1, 3], range(len(ratios))), request_window=None,
        swa_req_ring_size=None, compressed_pool_configs={},
    )  # fmt: skip
    memory = {"dtype": torch.float8_e4m3fn, "device": "cpu", "enable_memory_saver": False}
    sizes = {"page_size": page, "layer_num": len(ratios), "global_page_size": page}
    pool.swa_kv_pool = pool._make_kv_pool(size=8 * page, kv_layout=pool.kv_layout, **sizes, **memory)
    pool._init_compressed_pools(
        stage_ratios=ratios, page_size=page, enable_hisparse=False, kv_pool_cls=latent.DeepSeekV4SingleKVPool, **memory
    )
    pool._init_compressed_layer_mapping()
    pool._init_paged_compress_states(False)
    fill(pool, pool.compress_state_pools)
    return Owner(pool, page, 12 * page, 8 * page)


@pytest.mark.parametrize(("layout", "keys"), [("v41", 64), ("v41_new", 128)])
def test_all_of_a_deepseek_v4_1_pool(monkeypatch, layout, keys):
    owner = deepseek_v41(monkeypatch, layout, keys)
    pool, length = owner.pool, 301
    slots = owner.extend(length)
    spec = sglang.spec_from(pool, index={"heads": 2, "topk": 4})
    cache = adopted(owner, spec)
    request = cache.admit(blocks=owner.blocks(slots), slot=2, length=length)
    with cache.step({request: 0}) as step:
        raw = {role: [step.layer(number).gather_rows(role) for number in (1, 3)] for role in ("index_keys", "entries")}
        window, tail = step.layer(4).gather_rows("window"), step.layer(3).gather_rows("tail")
    for place, ratio in enumerate((1, 2)):
        # Rows of a ratio lie at the slot of their first token divided by it, in every pool of that ratio.
        places = slots[: length // ratio * ratio : ratio] // ratio
        rows = raw["index_keys"][place].rows[0, : len(places)]
        payload, scales = pool.index_pools[ratio].get_index_k_fp4(0, places)
        assert torch.equal(rows[:, :64], payload.view(torch.uint8))
        assert torch.equal(rows[:, 64:].contiguous().view(torch.int32)[:, 0], scales)
        held = pool.kv_pools[ratio]
        data, base, scale = held.kv_layout.row_addressing(held.page_size)
        for row, slot in zip(raw["entries"][place].rows[0].tolist(), places.tolist(), strict=False):
            page, at = divmod(slot, held.page_size)
            line = held.kv_buffer[0][page].view(torch.uint8)
            assert row[:256] == line[at * data :][:256].tolist()
            assert row[256:] == line[base + at * scale :][:32].tolist()
    data, base, scale = pool.kv_layout.row_addressing(256)
    swa_slots = pool.translate_loc_from_full_to_swa(slots)
    for row, position in zip(window.rows[0], window.positions[0].tolist(), strict=True):
        page, at = divmod(int(swa_slots[position]), 256)
        line = pool.swa_kv_pool.kv_buffer[4][page].view(torch.uint8)
        assert row.tolist() == [*line[at * data :][:512].tolist(), *line[base + at * scale :][:16].tolist()]
    # The pair that waits is where SGLang looks for it.
    states = pool.get_attention_compress_states(3)
    at = tail.positions[0][tail.positions[0] >= 0].long()
    places = states.translate_from_req_position_to_state_loc(torch.full_like(at, 2), at)
    held = states.get_state_by_state_loc(places).kv_score
    assert at.tolist() == [length - 1]
    assert torch.equal(tail.rows[0][: len(at)].contiguous().view(torch.float32), held)
    # Out, and back under another slot, into places that the allocator gives out: SGLang reads the same keys there.
    blob = moved(spec, cache, request)
    others = owner.extend(length)
    again = cache.import_request(blob, into=cache.admit(blocks=owner.blocks(others), slot=0))
    assert cache.digest([again]) == cache.digest([request])
    for ratio in (1, 2):
        both = [
            pool.index_pools[ratio].get_index_k_fp4(0, some[: length // ratio * ratio : ratio] // ratio)
            for some in (slots, others)
        ]
        assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_index_keys_that_are_no_rows_in_order_are_refused_by_name(monkeypatch):
    owner = deepseek_v41(monkeypatch, "v41")
    spec = sglang.spec_from(owner.pool, index={"heads": 2, "topk": 4})
    keys = owner.pool.index_pools[1]
    keys.index_k_page8 = True
    with pytest.raises(SpecError, match=r"pages of 64 rows, eight of which lie together"):
        mapped_from(owner.pool, spec)
    keys.index_k_page8, keys.page_size = False, 96
    with pytest.raises(SpecError, match=r"index_keys in pages of 96 rows; allowed: pages that 256 rows"):
        mapped_from(owner.pool, spec)


@pytest.mark.parametrize("online", [False, True])
def test_all_of_a_deepseek_v4_pool(monkeypatch, online):
    owner = deepseek(monkeypatch, online=online)
    pool, length = owner.pool, 300
    slots = owner.extend(length)
    spec = sglang.spec_from(pool, index={"heads": 2, "topk": 4}, formats={"index_keys": "index_fp8_132_h"})
    cache = adopted(owner, spec)
    request = cache.admit(blocks=owner.blocks(slots), slot=2, length=length)
    with cache.step({request: 0}) as step:
        window, tail = step.layer(1).gather_rows("window"), step.layer(1).gather_rows("tail")
        last = step.layer(2).gather_rows("state" if online else "tail")
        entries = step.layer(1).gather_rows("entries")
    swa_slots = pool.translate_loc_from_full_to_swa(slots)
    for row, position in zip(window.rows[0], window.positions[0].tolist(), strict=True):
        page, at = divmod(int(swa_slots[position]), 256)
        assert row[:576].tolist() == pool.swa_kv_pool.kv_buffer[1][page][at * 576 :][:576].tolist()
    # States of the overlapping compressor follow the windows' pages, where SGLang itself looks.
    states = pool.get_attention_compress_states(1)
    at = tail.positions[0][tail.positions[0] >= 0].long()
    held = states.get_state_by_state_loc(states.translate_from_swa_loc_to_state_loc(swa_slots[at])).kv_score
    assert torch.equal(tail.rows[0][: len(at)].contiguous().view(torch.float32), held)
    # The other's are its request slot's: a ring, or one row of what they came to.
    states = pool.get_attention_compress_states(2)
    at = last.positions[0][last.positions[0] >= 0].long()
    places = states.translate_from_req_position_to_state_loc(torch.full_like(at, 2), at)
    held = states.get_state_by_state_loc(places).kv_score
    assert len(at) == (1 if online else length % 128)
    assert torch.equal(last.rows[0][: len(at)].contiguous().view(torch.float32).view(held.shape), held)
    block = owner.blocks(slots)[1]
    row = pool.kv_pools[4].kv_buffer[0][block][3 * 576 :][:576]
    assert entries.rows[0, 67, :576].tolist() == row.tolist()
    # Out, and back under another slot, into places that the allocator gives out.
    blob = moved(spec, cache, request)
    others = owner.extend(length)
    again = cache.import_request(blob, into=cache.admit(blocks=owner.blocks(others), slot=0))
    assert cache.digest([again]) == cache.digest([request])
    states = pool.get_attention_compress_states(1)
    both = [
        states.get_state_by_state_loc(
            states.translate_from_swa_loc_to_state_loc(pool.translate_loc_from_full_to_swa(of[-4:]))
        ).kv_score
        for of in (slots, others)
    ]
    assert torch.equal(*both)
    # Places of another request's are refused here, too.
    pool.full_to_swa_index_mapping[slots] = pool.full_to_swa_index_mapping[others]
    with pytest.raises(ShapeError, match="not that of token"):
        cache.admit(blocks=owner.blocks(slots), slot=1, length=length)
