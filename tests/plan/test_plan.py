"""Plans: budgets and tokens both ways, rings sized for drafts, refusals, and bytes that pools really have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import OutOfBlocks, SpecError
from kvcore.plan import logical_bytes, plan_cache
from kvcore.spec import KV, LAYOUTS, CacheSpec, Entries, LayerSpec, Tail, Window, presets

SLOTTED = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=8, storage="slot"))] * 2)
RINGS = presets.classic(layers=2, key_heads=2, key_dim=8, window=16)
MIXED = presets.classic(layers=4, key_heads=2, key_dim=8, window=16, full_every=2, block_tokens=16)
SPECS = {
    "Flash tiny": presets.deepseek_v4_flash_tiny(),
    "Pro tiny": presets.deepseek_v4_pro_tiny(),
    "V4.1 tiny": presets.deepseek_v4_1_flash_tiny(),
    "Flash": presets.deepseek_v4_flash(),
    "paged and sliding": MIXED,
    "contiguous": SLOTTED,
}


@pytest.mark.parametrize("name", SPECS)
@given(
    budget=st.integers(1, 2**38),
    requests=st.integers(1, 40),
    drafts=st.integers(0, 9),
    layout=st.sampled_from(LAYOUTS),
)
def test_a_budget_gives_the_largest_cache_that_fits(name, budget, requests, drafts, layout):
    spec = SPECS[name]
    arguments = {"max_requests": requests, "max_draft_tokens": drafts, "layout": layout}
    unit = 1 if name == "contiguous" else spec.block_tokens
    try:
        plan = plan_cache(spec, budget_bytes=budget, **arguments)
    except OutOfBlocks:
        assert plan_cache(spec, max_tokens=1, **arguments).total_bytes > budget
        return
    assert plan.total_bytes <= budget
    assert plan.max_tokens is not None
    assert plan.max_tokens % unit == 0
    assert plan.blocks == (0 if name == "contiguous" else plan.max_tokens // unit)
    assert plan_cache(spec, max_tokens=plan.max_tokens + 1, **arguments).total_bytes > budget

    again = plan_cache(spec, max_tokens=plan.max_tokens, **arguments)
    assert again == plan
    assert plan_cache(spec, budget_bytes=plan.total_bytes, **arguments) == plan


@given(tokens=st.integers(1, 10**7), requests=st.integers(1, 300))
def test_tokens_are_rounded_up_to_whole_blocks(tokens, requests):
    plan = plan_cache(SPECS["Flash"], max_requests=requests, max_tokens=tokens)
    assert plan.blocks == -(-tokens // 256)
    assert plan.max_tokens == plan.blocks * 256
    assert plan.nbytes == requests * plan.slot_bytes + plan.blocks * 917_568


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_blocks_of_a_request(tokens, blocks):
    plan = plan_cache(SPECS["Flash tiny"], max_requests=1, max_tokens=64)
    assert plan.blocks_for(tokens) == blocks
    assert plan_cache(SLOTTED, max_requests=1, max_tokens=64).blocks_for(tokens) == 0


@pytest.mark.parametrize(
    ("spec", "requests", "pools", "undo"),
    [
        # one slot: a ring of 8 rows of 584 bytes in each of 6 layers, in 576-byte steps; tails of 8 rows. One block of
        # 32 tokens: 2 CSA layers with 8 entries and 8 keys, 2 HCA layers with 4 entries.
        pytest.param(
            SPECS["Flash tiny"],
            1,
            6 * 5184 + 2 * 8 * (8192 + 2048) + 2 * 8 * 4096 + 2 * (5184 + 576) + 2 * 2880,
            # one row of each, on boundaries of 16 bytes
            6 * 592 + 2 * (8192 + 2048) + 2 * 4096,
            id="Flash tiny, one request",
        ),
        pytest.param(SLOTTED, 3, 3 * 2 * 2 * 32, 0, id="one token contiguous in 2 layers of 3 requests"),
        pytest.param(RINGS, 3, 3 * 2 * 2 * 16 * 32, 3 * 2 * 2 * 32, id="rings of 16 tokens, nothing else"),
    ],
)
def test_the_smallest_budget(spec, requests, pools, undo):
    least = pools + undo
    plan = plan_cache(spec, max_requests=requests, budget_bytes=least)
    assert (plan.nbytes, plan.undo_bytes, plan.total_bytes) == (pools, undo, least)
    with pytest.raises(OutOfBlocks) as caught:
        plan_cache(spec, max_requests=requests, budget_bytes=least - 1)
    assert caught.value.where == "budget_bytes"
    assert caught.value.got == f"{least - 1} bytes"
    assert caught.value.allowed.startswith(f"{least} bytes or more: {requests} slots")
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("spec", [*SPECS.values(), RINGS])
def test_a_budget_of_one_byte(spec):
    with pytest.raises(OutOfBlocks):
        plan_cache(spec, max_requests=1, budget_bytes=1)


def test_a_spec_of_rings_needs_no_size():
    plan = plan_cache(RINGS, max_requests=4)
    assert (plan.blocks, plan.max_tokens) == (0, None)
    assert plan.nbytes == 4 * 2 * 2 * 16 * 32
    assert plan_cache(RINGS, max_requests=4, max_tokens=8) == plan
    assert plan_cache(RINGS, max_requests=4, budget_bytes=10**9) == plan


@pytest.mark.parametrize(
    ("drafts", "window", "csa_tail", "hca_tail"),
    [(0, 128, 8, 128), (1, 129, 8, 128), (2, 130, 9, 129), (5, 133, 12, 132), (17, 145, 24, 144)],
)
def test_rings_grow_with_the_drafts(drafts, window, csa_tail, hca_tail):
    """C = W + D; R = 2m - 1 + max(D, 1) with overlap, m - 1 + max(D, 1) without."""
    plan = plan_cache(presets.deepseek_v4_flash(), max_requests=1, max_tokens=4096, max_draft_tokens=drafts)
    found = {(region.layer, region.role): region.rows for region in plan.regions if region.layer in (2, 3)}
    assert found[2, "window"] == found[3, "window"] == window
    assert found[2, "tail"] == found[2, "index_tail"] == csa_tail
    assert found[3, "tail"] == hca_tail
    assert plan.rollback_tokens == drafts


@pytest.mark.parametrize(("window", "chunk", "rows"), [(16, None, 19), (None, 16, 19)])
def test_classic_rings_grow_with_the_drafts(window, chunk, rows):
    ring = KV(key_heads=1, key_dim=4, storage="ring", window=window, chunk=chunk)
    plan = plan_cache(CacheSpec(layers=[LayerSpec(kv=ring)]), max_requests=1, max_draft_tokens=3)
    assert [region.rows for region in plan.regions] == [rows, rows]


def test_a_ring_is_never_longer_than_a_request():
    plan = plan_cache(presets.deepseek_v4_flash_tiny(block_tokens=8), max_requests=1, max_tokens=8, max_draft_tokens=30)
    assert {region.rows for region in plan.regions if region.growth == "slot"} == {8}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("longest", "window", "csa_tail", "hca_tail", "columns"),
    [(5, 5, 5, 5, 1), (100, 100, 7, 100, 1), (256, 128, 7, 127, 1), (257, 128, 7, 127, 2), (10**6, 128, 7, 127, 64)],
)
def test_no_ring_and_no_table_is_larger_than_a_request_needs(longest, window, csa_tail, hca_tail, columns, drafts):
    """C = min(W, M) + D, R = min(span, M) + max(D, 1); blocks ceil(M / block), no more than there are."""
    plan = plan_cache(
        presets.deepseek_v4_flash(),
        max_requests=2,
        max_tokens=64 * 256,
        max_draft_tokens=drafts,
        max_request_tokens=longest,
    )
    found = {(region.layer, region.role): region.rows for region in plan.regions if region.layer in (2, 3)}
    assert found[2, "window"] == found[3, "window"] == window + drafts
    assert found[2, "tail"] == found[2, "index_tail"] == csa_tail + max(drafts, 1)
    assert found[3, "tail"] == hca_tail + max(drafts, 1)
    assert (plan.blocks, plan.max_blocks) == (64, columns)
    assert (plan.max_request_tokens, plan.longest) == (longest, min(longest, 64 * 256))
    assert plan.rollback_tokens == drafts


def test_a_sliding_layer_takes_what_one_request_can_hold():
    ring = KV(key_heads=8, key_dim=128, storage="ring", window=4096)
    spec = CacheSpec(layers=[LayerSpec(kv=ring)])
    plans = [plan_cache(spec, max_requests=2, max_request_tokens=longest) for longest in (None, 512)]
    assert [plan.regions[0].rows for plan in plans] == [4096, 512]
    assert [plan.nbytes for plan in plans] == [2 * rows * 2 * 8 * 128 * 2 for rows in (4096, 512)]


@pytest.mark.parametrize(("longest", "rows"), [(7, (7, 7)), (8, (8, 8)), (9, (9, 9)), (30, (10, 30))])
def test_a_ring_that_no_request_fills_needs_neither_a_copy_nor_a_row_to_spare(longest, rows):
    """In the layout for a CPU: window 8, a draft and a row to spare, twice in memory, where it wraps."""
    ring = KV(key_heads=1, key_dim=8, storage="ring", window=8)
    slot = KV(key_heads=1, key_dim=8, storage="slot")
    plan = plan_cache(
        CacheSpec(layers=[LayerSpec(kv=ring), LayerSpec(kv=slot)]),
        max_requests=1,
        max_draft_tokens=1,
        layout="by_head",
        max_request_tokens=longest,
    )
    found = {region.layer: (region.rows, region.copies) for region in plan.regions}
    assert found == {0: (rows[0], 2 if longest == 30 else 1), 1: (rows[1], 1)}


def test_rows_that_the_spec_fixes_stay():
    spec = CacheSpec(layers=[LayerSpec(window=Window(dim=8, window=4, format="fp32", rows=9))])
    plan = plan_cache(spec, max_requests=1, max_draft_tokens=5, max_request_tokens=3)
    assert (plan.regions[0].rows, plan.rollback_tokens) == (9, 6)


def layer(**components):
    return CacheSpec(
        layers=[LayerSpec(window=Window(dim=8, window=4, format="fp32")), LayerSpec(**components)], block_tokens=8
    )


@pytest.mark.parametrize(
    ("spec", "role", "rows", "largest"),
    [
        pytest.param(
            layer(window=Window(dim=8, window=4, format="fp32", rows=4)), "window", 4, 0, id="window, no spare"
        ),
        pytest.param(
            layer(window=Window(dim=8, window=4, format="fp32", rows=7)), "window", 7, 3, id="window, 3 spare"
        ),
        pytest.param(layer(tail=Tail(dim=8, ratio=4, overlap=True, rows=8)), "tail", 8, 1, id="CSA tail of 8"),
        pytest.param(layer(tail=Tail(dim=8, ratio=4, overlap=True, rows=12)), "tail", 12, 5, id="CSA tail of 12"),
        pytest.param(layer(tail=Tail(dim=8, ratio=4, overlap=False, rows=6)), "tail", 6, 3, id="HCA tail of 6"),
        pytest.param(
            layer(index_tail=Tail(dim=8, ratio=4, overlap=True, rows=9)), "index_tail", 9, 2, id="index tail of 9"
        ),
    ],
)
def test_declared_rows_bound_the_drafts(spec, role, rows, largest):
    plan = plan_cache(spec, max_requests=1, max_draft_tokens=largest)
    (region,) = plan.region(1, role)
    assert region.rows == rows
    with pytest.raises(SpecError) as caught:
        plan_cache(spec, max_requests=1, max_draft_tokens=largest + 1)
    assert caught.value.where == "max_draft_tokens"
    assert caught.value.allowed == f"0 to {largest}: layers[1].{role}.rows is {rows}"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        pytest.param({}, "max_tokens, budget_bytes", id="neither tokens nor budget"),
        pytest.param({"max_tokens": 1, "budget_bytes": 1}, "max_tokens, budget_bytes", id="both"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
        pytest.param({"max_tokens": 1.5}, "max_tokens", id="a fraction of tokens"),
        pytest.param({"max_tokens": True}, "max_tokens", id="tokens are true"),
        pytest.param({"budget_bytes": 0}, "budget_bytes", id="no bytes"),
        pytest.param({"budget_bytes": "1GB"}, "budget_bytes", id="bytes as text"),
        pytest.param({"max_tokens": 8, "max_requests": 0}, "max_requests", id="no requests"),
        pytest.param({"max_tokens": 8, "max_requests": None}, "max_requests", id="requests are None"),
        pytest.param({"max_tokens": 8, "max_draft_tokens": -1}, "max_draft_tokens", id="negative drafts"),
        pytest.param({"max_tokens": 8, "layout": "rows"}, "layout", id="unknown layout"),
        pytest.param({"max_tokens": 8, "spec": None}, "spec", id="no spec"),
        pytest.param({"max_tokens": 8, "spec": "deepseek_v4_pro"}, "spec", id="a preset's name"),
    ],
)
def test_arguments_are_checked(arguments, where):
    with pytest.raises(SpecError) as caught:
        plan_cache(**{"spec": SPECS["Flash tiny"], "max_requests": 1, **arguments})
    assert caught.value.where == where


def test_both_sizes_are_refused_for_rings_too():
    with pytest.raises(SpecError, match="one of the two"):
        plan_cache(RINGS, max_requests=1, max_tokens=5, budget_bytes=5)


@pytest.mark.parametrize("tokens", [-1, 1.0, None])
def test_logical_bytes_need_a_count(tokens):
    with pytest.raises(SpecError):
        logical_bytes(RINGS, tokens)


def test_logical_bytes_by_role():
    """43 tokens: five windows of 8 and a draft's; 4 + 3 or 3 rows await; 10 or 5 entries."""
    found = logical_bytes(SPECS["Flash tiny"], 43)
    assert found == {
        "window": 6 * 8 * 584,
        "tail": 2 * 7 * 8192 + 2 * 3 * 4096,
        "entries": 2 * 10 * 584 + 2 * 5 * 584,
        "index_tail": 2 * 7 * 2048,
        "index_keys": 2 * 10 * 68,
    }
    assert logical_bytes(MIXED, 43) == {"kv": 2 * 43 * 64 + 2 * 16 * 64}


def test_a_shared_role_adds_nothing():
    owner = LayerSpec(entries=Entries(dim=8, ratio=1, format="fp32"))
    reader = LayerSpec(entries=Entries(dim=8, ratio=1, format="fp32", share=0))
    spec = CacheSpec(layers=[owner, reader, reader], block_tokens=4)
    assert logical_bytes(spec, 10) == {"entries": 320}
    plan = plan_cache(spec, max_requests=1, max_tokens=10)
    assert (plan.blocks, plan.nbytes, len(plan.regions)) == (3, 3 * 4 * 32, 1)
    assert plan.region(2, "entries") is plan.region(0, "entries")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "Flash"])
def test_pools_have_the_planned_bytes(build, name, layout):
    cache = build(SPECS[name], max_requests=3, max_tokens=100, max_draft_tokens=2, layout=layout)
    sizes = {key: pool.shape[0] * pool.shape[1] for key, pool in cache.pools.items()}
    assert cache.nbytes == cache.plan.nbytes == sum(sizes.values())
    assert cache.plan.layout == layout
    assert set(sizes) == {key for region in cache.plan.regions for key, _ in region.buffers.values()}
    plan = plan_cache(SPECS[name], max_requests=3, max_tokens=100, max_draft_tokens=2, layout=layout)
    assert plan == cache.plan


def test_names_of_pools(build):
    cache = build(presets.deepseek_v4_1_flash_tiny(), max_requests=1, max_tokens=8, layout="planar")
    assert {"0.window.codes", "0.window.scales", "1.tail.kv", "1.tail.score", "3.index_keys.codes"} <= set(cache.pools)
    assert not any(name.startswith(("2.entries", "4.entries", "2.tail")) for name in cache.pools)
    cache = build(MIXED, max_requests=1, max_tokens=8)
    assert {"0.kv.key_page", "0.kv.value_page", "1.kv.key_page"} <= set(cache.pools)


def test_a_plan_says_what_it_is():
    assert repr(plan_cache(SPECS["Flash"], max_requests=2, max_tokens=1000)) == (
        "CachePlan(deepseek_v4_flash: 4 blocks × 256 tokens, 2 slots, 0.032 GiB)"
    )


def test_there_are_no_more_slots_than_an_index_has_numbers_for():
    assert plan_cache(SLOTTED, max_requests=2**31 - 1, max_tokens=1).slots == 2**31 - 1
    with pytest.raises(SpecError, match="max_requests: got 2147483648; allowed: 1 to 2147483647"):
        plan_cache(SLOTTED, max_requests=2**31, max_tokens=1)


def test_a_layer_of_a_plan_is_known_by_role() -> None:
    plan = plan_cache(presets.deepseek_v4_flash_tiny(), max_requests=2, max_tokens=64)
    assert len(plan.layers) == len(plan.spec.all_layers)
    for number, (layer, spec) in enumerate(zip(plan.layers, plan.spec.all_layers, strict=True)):
        assert layer.number == number
        assert {role: layer.component(role) for role in layer.regions} == dict(spec.components())
        assert layer.component("kv") is None
        for role, regions in layer.regions.items():
            assert regions is plan.region(number, role)
            assert layer.global_scale(role) == 1.0
            assert layer.pools_of("kv", role) == tuple(name for one in regions for name, _ in one.buffers.values())
