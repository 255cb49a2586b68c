"""Rules by a step's mode: where activations lie, what chooses the mode, and what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kvcore.errors import ShapeError, SpecError
from kvcore.interop.jax.rules import Axes, Rules, mode_of
from kvcore.interop.jax.sharding import Sharded
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.jax_pallas.processes import finished, start

MESH = jax.sharding.AbstractMesh((2, 2, 4), ("data", "context", "model"))
RULES = {"requests": "data", "blocks": "context", "heads": "model", "query_length": "context"}
MODES = {
    "prefill": {"query_length": ("context", "model"), "query_heads": None},
    "decode": {"query_length": None},
    "insert": {"query_length": None, "query_heads": None},
}
TOKENS = ("requests", "query_length")


def test_prefill_and_decode_answer_the_same_and_pools_stay_where_they_are() -> None:
    running = [start("mesh_modes", axes) for axes in ("auto", "explicit")]
    for one in running:
        out = finished(one)
        modes = ("prefill", "decode", "decode", "prefill", "decode")
        assert out.splitlines() == [f"{mode}: 12 answers" for mode in modes]


@pytest.mark.parametrize(
    ("mode", "lies", "seen"),
    [
        pytest.param(None, (("data", "context"), "model"), ("data", "model"), id="the table alone"),
        pytest.param("train", (("data", "context"), "model"), ("data", "model"), id="a mode without overrides"),
        pytest.param("prefill", (("data", "context", "model"), None), (("data", "model"), None), id="prefill"),
        pytest.param("decode", ("data", "model"), ("data", "model"), id="decode"),
        pytest.param("insert", ("data", None), ("data", None), id="insert"),
    ],
)
def test_a_mode_overrides_the_table(mode: str | None, lies: tuple, seen: tuple) -> None:
    rules = Rules(MESH, RULES, MODES)
    assert rules.spec(TOKENS, "query_heads", mode=mode) == PartitionSpec(*lies)
    # Shards of one block answer the same queries: each has a part of what these see.
    assert rules.seen(TOKENS, "query_heads", mode=mode) == PartitionSpec(*seen)
    assert rules.spec(("requests", "blocks"), "heads", mode=mode) == PartitionSpec(("data", "context"), "model")


def test_query_heads_follow_heads_unless_the_table_says_otherwise() -> None:
    rules = Rules(MESH, {"heads": "model", "requests": "data"})
    assert rules.spec(TOKENS, "query_heads", None) == PartitionSpec("data", "model", None)
    assert Rules(MESH, {"heads": "model", "query_heads": None}).axes("query_heads") == ()
    assert rules == Rules(MESH, {"heads": "model", "requests": "data"})
    assert rules != Rules(MESH, {"heads": "model", "requests": "data"}, MODES)


@pytest.mark.parametrize(
    ("rules", "modes", "complaint"),
    [
        pytest.param({"query": "data"}, {}, r"rules: got query; allowed: requests, blocks", id="an unknown axis"),
        pytest.param({}, {"verify": {}}, "modes: got verify; allowed: train, prefill, decode, insert", id="a mode"),
        pytest.param(
            {}, {"decode": {"width": "data"}}, r"modes\['decode'\]: got width; allowed: query", id="in a mode"
        ),
        pytest.param({}, {"decode": {"heads": None}}, r"heads; .* Pools lie alike in every mode", id="a pool's axis"),
        pytest.param({}, {"insert": {"requests": None}}, r"modes\['insert'\]: got requests", id="a pool's, in insert"),
    ],
)
def test_a_table_that_cannot_hold_is_refused(rules: dict, modes: dict, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        Rules(MESH, rules, modes)


@pytest.mark.parametrize(
    ("axes", "mode", "complaint"),
    [
        pytest.param((TOKENS,), "verify", "mode: got verify", id="an unknown mode"),
        pytest.param(("requests", "width"), None, "axis: got width", id="an unknown axis"),
        pytest.param((TOKENS, "heads"), "prefill", "Override a rule", id="one axis of the mesh for two dimensions"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(axes: tuple, mode: str | None, complaint: str) -> None:
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=4, key_dim=16))], block_tokens=8)
    sharded = Sharded(spec, MESH, RULES, modes=MODES, max_requests=4, max_tokens=64)
    with pytest.raises(SpecError, match=complaint):
        sharded.spec(*axes, mode=mode)
    with pytest.raises(SpecError, match=complaint):
        sharded.step(lambda *_: None, (Axes(*axes),), Axes("requests"), mode or "decode")


def test_what_does_not_divide_is_not_put() -> None:
    rules = Rules(MESH, RULES, MODES)
    with pytest.raises(ShapeError, match="dimension 0: got 24; allowed: a multiple of 16"):
        rules.put(np.zeros((24, 3)), TOKENS, mode="prefill")


@pytest.mark.parametrize(
    ("counts", "padded", "drafts", "mode"),
    [
        pytest.param((1, 1, 1), 3, 0, "decode", id="a token each"),
        pytest.param((1, 0, 1), 3, 0, "decode", id="a request rests"),
        pytest.param((3, 0, 2), 9, 2, "decode", id="drafts"),
        pytest.param((3, 0, 2), 9, 0, "prefill", id="as many tokens, and no drafts"),
        pytest.param((1, 1, 1), 4, 0, "prefill", id="by its shape: padded as a prefill"),
        pytest.param((7,), 7, 0, "prefill", id="a prompt"),
    ],
)
def test_shapes_choose_the_mode(counts: tuple, padded: int, drafts: int, mode: str) -> None:
    rows = [StepRequest(number, 0, count, (number,)) for number, count in enumerate(counts)]
    index = build_index(rows, max_blocks=1, pad_tokens=padded, pad_requests=len(rows))
    assert mode_of(index, drafts) == mode
