"""Shard plans: every canonical row has one owner and one place there, and the way back; loops are the oracle."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvcore.errors import SpecError
from kvcore.plan import plan_cache
from kvcore.sharding import Canonical, Heads, Layers, Local, Pages, ShardPlan
from kvcore.sharding.layers import stages
from kvcore.spec import CacheSpec, LayerSpec, Window, presets
from tests.support import stories

SMALL = st.integers(1, 9)


def dealt(pages: Pages, count: int) -> list[list[int]]:
    """The first ``count`` rows of each shard's share, dealt out one by one."""
    hands = [[] for _ in range(pages.shards)]
    for row in range(count):
        hands[(row // pages.rows) % pages.shards].append(row)
    return hands


@given(shards=SMALL, rows=SMALL, count=st.integers(0, 200))
def test_pages_deal_rows_out_in_turn(shards, rows, count):
    pages = Pages(shards, rows)
    hands = dealt(pages, count)
    for shard, hand in enumerate(hands):
        assert pages.held(shard, count) == len(hand)
        for local, row in enumerate(hand):
            assert (pages.owner(row), pages.local(row)) == (shard, local)
            assert pages.canonical(shard, local) == row
    # Arrays give what integers give.
    every = np.arange(count, dtype=np.int32)
    assert pages.owner(every).tolist() == [pages.owner(row) for row in range(count)]
    assert pages.local(every).tolist() == [pages.local(row) for row in range(count)]
    for shard in range(shards):
        assert pages.held(shard, every).tolist() == [pages.held(shard, row) for row in range(count)]


@given(shards=SMALL, rows=SMALL, count=st.integers(0, 200))
def test_no_shard_holds_a_page_more_than_another(shards, rows, count):
    sizes = [Pages(shards, rows).held(shard, count) for shard in range(shards)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= rows
    assert sizes == sorted(sizes, reverse=True)


@given(heads=st.integers(1, 16), shards=st.integers(1, 16))
def test_every_head_has_one_owner_and_equal_holders(heads, shards):
    groups = Heads(heads, shards)
    holders = {head: [shard for shard in range(shards) if head in groups.on(shard)] for head in range(heads)}
    assert {head: list(groups.holders(head)) for head in range(heads)} == holders
    assert {len(found) for found in holders.values()} == {groups.replicas}
    for head, found in holders.items():
        assert groups.owner(head) == found[0]
        assert {groups.canonical(shard, groups.local(head)) for shard in found} == {head}
    divides = heads % shards == 0 or shards % heads == 0
    assert groups.per_shard == (max(1, heads // shards) if divides else heads)
    if divides:
        # Query heads are split in order: each shard has the K-V heads that its queries read.
        queries = heads * shards
        for shard in range(shards):
            asked = {query * heads // queries for query in range(shard * heads, (shard + 1) * heads)}
            assert asked == set(groups.on(shard))


V41 = presets.deepseek_v4_1_flash_tiny()
CLASSIC = presets.classic(layers=5, key_heads=4, key_dim=8, value_heads=2, block_tokens=4)
FLASH = presets.deepseek_v4_flash_tiny(block_tokens=16)


@pytest.mark.parametrize(
    ("spec", "shards", "starts"),
    [
        pytest.param(CLASSIC, 1, (0, 5), id="one stage"),
        pytest.param(CLASSIC, 2, (0, 2, 5), id="two stages"),
        pytest.param(CLASSIC, 5, (0, 1, 2, 3, 4, 5), id="a layer a stage"),
        pytest.param(FLASH, 2, (0, 2, 6), id="draft layers stay in the last stage"),
        pytest.param(V41, 2, (0, 3, 7), id="cut between groups that share a pool"),
        pytest.param(V41, 3, (0, 1, 3, 7), id="every group alone"),
    ],
)
def test_stages(spec, shards, starts):
    found = stages(spec, shards)
    assert found == Layers(starts)
    layers = [layer for shard in range(shards) for layer in found.on(shard)]
    assert layers == list(range(len(spec.all_layers)))
    assert [found.canonical(found.owner(layer), found.local(layer)) for layer in layers] == layers


PLANS = [
    pytest.param(CLASSIC, {}, id="one"),
    pytest.param(CLASSIC, {"requests": 2, "context": 2, "heads": 2}, id="replicas, context and heads"),
    pytest.param(CLASSIC, {"heads": 8, "layers": 2}, id="replicated heads in stages"),
    pytest.param(CLASSIC, {"heads": 3, "context": 4}, id="heads that do not divide"),
    pytest.param(FLASH, {"requests": 2, "context": 4}, id="V4 by request and context"),
    pytest.param(FLASH, {"context": 8}, id="V4 on eight context shards"),
    pytest.param(V41, {"layers": 3, "context": 2, "requests": 2}, id="V4.1 in stages"),
]


@pytest.mark.parametrize(("spec", "axes"), PLANS)
def test_canonical_order_and_places_are_one_to_one(spec, axes):
    plan = ShardPlan(spec=spec, **axes)
    assert [plan.rank(plan.coordinate(rank)) for rank in range(plan.ranks)] == list(range(plan.ranks))
    places: dict[tuple[int, Local], Canonical] = {}
    count = 0
    for layer, role, component in spec.components():
        if component.shared_from is not None:
            continue
        for part, heads in enumerate(component.parts):
            for request in range(3):
                for row in range(37):
                    for head in range(heads.heads):
                        at = Canonical(request, layer, role, row, head)
                        place = plan.local(at, part)
                        assert plan.canonical(place, part) == at
                        assert 0 <= place.rank < plan.ranks
                        places[part, place] = at
                        count += 1
    assert len(places) == count


@pytest.mark.parametrize(("spec", "axes"), PLANS)
def test_each_rank_has_a_spec_of_its_own_rows(spec, axes):
    plan = ShardPlan(spec=spec, **axes)
    for rank in range(plan.ranks):
        own = plan.local_spec(rank)
        _, stage, _, heads = plan.coordinate(rank)
        assert len(own.all_layers) == len(plan.stages.on(stage))
        for local, layer in enumerate(plan.stages.on(stage)):
            for role, component in spec.all_layers[layer].components():
                mine = getattr(own.all_layers[local], role)
                assert [part.heads for part in mine.parts] == [
                    len(group.on(heads)) for group in plan.parts(layer, role)
                ]
                assert [part.format for part in mine.parts] == [part.format for part in component.parts]


@pytest.mark.parametrize(
    ("spec", "axes", "where", "allowed"),
    [
        pytest.param(FLASH, {"heads": 2}, "layers[0].window", "one head for all queries", id="heads of latent rows"),
        pytest.param(stories.PAGED, {"context": 2}, "layers[1].kv", "without window", id="a paged sliding window"),
        pytest.param(
            CacheSpec(layers=[LayerSpec(window=Window(dim=8, window=4, format="fp32"))]),
            {"context": 2},
            "spec",
            "context=1",
            id="context where nothing grows",
        ),
        pytest.param(V41, {"layers": 4}, "layers", "1 to 3", id="more stages than groups"),
        pytest.param(CLASSIC, {"layers": 6}, "layers", "1 to 5", id="more stages than layers"),
        pytest.param(CLASSIC, {"requests": 0}, "requests", "1 or more", id="no replicas"),
        pytest.param(CLASSIC, {"context": 2.0}, "context", "1 or more", id="not a count"),
    ],
)
def test_what_cannot_be_spread_is_refused(spec, axes, where, allowed):
    with pytest.raises(SpecError) as caught:
        ShardPlan(spec=spec, **axes)
    assert caught.value.where == where
    assert allowed in caught.value.allowed


@given(context=st.sampled_from([1, 2, 4, 8]), tokens=st.integers(1, 5000))
def test_a_block_is_a_page_on_every_context_shard(context, tokens):
    plan = plan_cache(FLASH, max_requests=2, max_tokens=tokens, context=context)
    whole = plan_cache(FLASH, max_requests=2, max_tokens=tokens)
    assert plan.block_tokens == 16 * context
    assert plan.blocks == -(-tokens // (16 * context))
    assert plan.max_tokens == plan.blocks * 16 * context
    assert plan.block_bytes == whole.block_bytes
    assert plan.blocks_for(16 * context + 1) == 2


def test_a_budget_holds_more_tokens_the_more_shards_there_are():
    held = [
        plan_cache(FLASH, max_requests=2, budget_bytes=4 << 20, context=context).max_tokens for context in (1, 2, 4, 8)
    ]
    assert held[0] > 0
    # Windows and tails are on every shard; all the rest of each budget is pages.
    assert [tokens / held[0] for tokens in held] == pytest.approx([1, 2, 4, 8], rel=0.05)
