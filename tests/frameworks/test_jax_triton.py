"""The project's Triton kernels under JAX, without a GPU: interpreted beside the reference, and lowered for CUDA."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from kvcore.backends.jax_pallas import JaxOps, run_triton
from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.kernels.triton.device import DeviceProps
from kvcore.plan import plan_cache
from kvcore.pools import allocate
from kvcore.spec import KV, CacheSpec, Conv, Entries, IndexKeys, LayerSpec, Rope, State, Tail, Window
from kvcore.step import StepRequest, build_index

CHECKS = {
    "append": (
        "append_window/v41_fp4_288/packed/ragged",
        "append_rotated_window/v4_584/packed/padded",
        "append_kv/int8_row.full.paged/packed/ragged",
        "append_index_tail/index_tail.m2/packed/ragged",
        "append_tail/tail.m4.overlap/planar/longer",
        "store_entries/v4_584.m2/packed/ragged",
    ),
    "flush": (
        "append_flush/v4_584.m2/packed/ragged",
        "append_flush/bf16.m4+index_fp8_132.m4/planar/ragged",
        "flush/v41_528.m4/packed/one_over",
        "flush/v4_584.m2/planar/padded",
    ),
    "gather": (
        "gather_window/v4_584/packed/ragged",
        "gather_entries/bf16.m4/packed/ragged",
        "gather_all_entries/v4_584.m2/packed/padded",
        "gather_kv/fp8_row.full.paged/packed/ragged",
    ),
    "recurrent": (
        "append_state/state.bf16/packed/ragged",
        "write_state/state.fp32.matrix/packed/padded",
        "select_state/state.int8_row.matrix/planar/ragged",
        "read_state/state.bf16/packed/ragged",
        "append_conv/conv.fp32.w2/packed/longer",
        "gather_conv/conv.bf16.w4/planar/ragged",
    ),
    "indexer": (
        "index_scores/index_fp8_132_h.m2/packed/ragged",
        "select/index_fp8_132.m4/any/longer",
        "index_select/index_fp4_68.m1/packed/ragged",
    ),
    "attend": (
        "attend/v4_584+v4_584.m2/packed/ragged",
        "attend/fp32+fp32.m3/packed/one_over",
        "attend/v4_584+v4_584.m2.rope/packed/padded",
    ),
}


@pytest.mark.parametrize("group", CHECKS)
def test_interpreted_launches_agree_with_the_reference(group: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.frameworks.interpreted_launches", *CHECKS[group]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(CHECKS[group])
    assert all("agree" in line and "_kernel" in line for line in lines), done.stdout


def test_interpreted_launches_on_two_devices_agree_with_jax_numpy() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.frameworks.interpreted_shards", "blocks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    # All but the tails' own append: the flush's launch does that.
    kinds = "append attend best flush gather_entries gather_kv gather_window rank rotate scores store_entries"
    assert line == " ".join(["blocks", *(f"{kind}_kernel" for kind in kinds.split()), "faults:"])


# Above here nothing needs jax-triton; its lowering needs the CUDA plug-in, and no GPU.

Q, BLOCKS, DIM, INDEX_DIM = 3, 2, 512, 128
CSA = LayerSpec(
    window=Window(dim=DIM, window=128),
    tail=Tail(dim=DIM, ratio=4, overlap=True),
    entries=Entries(dim=DIM, ratio=4),
    index_tail=Tail(dim=INDEX_DIM, ratio=4, overlap=True),
    index_keys=IndexKeys(dim=INDEX_DIM, ratio=4, heads=64, topk=512),
)
HCA = LayerSpec(window=CSA.window, tail=Tail(dim=DIM, ratio=128, overlap=False), entries=Entries(dim=DIM, ratio=128))
CLASSIC = LayerSpec(kv=KV(key_heads=2, key_dim=64))
DELTA = LayerSpec(state=State(heads=4, key_dim=128, value_dim=128), conv=Conv(dim=3072, width=4))
ROPE, WEIGHT, INDEX_WEIGHT = Rope(dim=64, theta=1e4), np.ones(DIM, np.float32), np.ones(INDEX_DIM, np.float32)


def floats(*shape: int) -> np.ndarray:
    return np.zeros((Q, *shape), np.float32)


# name -> (verb of ops, pools, index and inputs; inputs; roles whose pools it updates)
VERBS = {
    "append_window": (lambda o, p, i, x: o.append_window(p, 0, i, x), (floats(DIM),), ("window",)),
    "append_rotated_window": (
        lambda o, p, i, x, w: o.append_rotated_window(p, 0, i, x, rope=ROPE, norm_weight=w),
        (floats(DIM), WEIGHT),
        ("window",),
    ),
    "append_tail": (
        lambda o, p, i, *x: o.append_tail(p, 0, i, *x),
        (floats(2 * DIM), floats(2 * DIM)),
        ("tail",),
    ),
    "flush": (
        lambda o, p, i, *x: o.flush(p, 0, i, *x[:4], norm_weight=x[4], index_norm_weight=x[5], rope=ROPE),
        (floats(2 * DIM), floats(2 * DIM), floats(2 * INDEX_DIM), floats(2 * INDEX_DIM), WEIGHT, INDEX_WEIGHT),
        ("entries", "index_keys"),
    ),
    "append_flush": (
        lambda o, p, i, *x: o.append_flush(p, 0, i, *x, newest=1),
        (floats(2 * DIM), floats(2 * DIM), floats(2 * INDEX_DIM), floats(2 * INDEX_DIM)),
        ("entries", "tail", "index_keys", "index_tail"),
    ),
    "append_flush, split over channels": (
        lambda o, p, i, *x: o.append_flush(p, 1, i, *x, newest=1),
        (floats(DIM), floats(DIM)),
        ("entries", "tail"),
    ),
    "store_entries": (lambda o, p, i, x: o.store_entries(p, 0, i, x), (floats(DIM),), ("entries",)),
    "attend": (
        lambda o, p, i, q, picks: o.attend(p, 1, i, q, picks, scale=0.1, rope=ROPE),
        (np.zeros((300, 64, DIM), np.float32), np.zeros((300, 8), np.int32)),
        (),
    ),
    "gather_window": (lambda o, p, i: o.gather_window(p, 0, i), (), ()),
    "gather_entries": (lambda o, p, i, x: o.gather_entries(p, 0, i, x), (np.zeros((Q, 8), np.int32),), ()),
    "append_state": (lambda o, p, i, x: o.append_state(p, 3, i, x), (floats(4, 128, 128),), ("state",)),
    "write_state": (lambda o, p, i, x: o.write_state(p, 3, i, x), (floats(4, 128, 128),), ("state",)),
    "select_state": (
        lambda o, p, i, x, n: o.select_state(p, 3, i, x, n),
        (floats(4, 128, 128), np.ones(Q, np.int32)),
        ("state",),
    ),
    "read_state": (lambda o, p, i: o.read_state(p, 3, i), (), ()),
    "append_conv": (lambda o, p, i, x: o.append_conv(p, 3, i, x), (floats(3072),), ("conv",)),
    "gather_conv": (lambda o, p, i: o.gather_conv(p, 3, i), (), ()),
    "gather_all_entries": (lambda o, p, i: o.gather_all_entries(p, 0, i, columns=8), (), ()),
}


IN_PLANAR = {"append_tail": 2, "flush": 5, "append_flush": 9, "append_flush, split over channels": 5}
"""Buffers that a verb of compression updates where codes, rope and scales, or kv and score, each have their own."""


def ops_in(layout: str) -> JaxOps:
    spec = CacheSpec(layers=(CSA, HCA, CLASSIC, DELTA), block_tokens=256)
    plan = plan_cache(spec, max_requests=Q, max_tokens=Q * BLOCKS * 256, layout=layout)
    return JaxOps(plan, "cuda", None, "triton")


@pytest.fixture(scope="module")
def ops() -> JaxOps:
    return ops_in("packed")


def lowered(ops: JaxOps, function, inputs, monkeypatch: pytest.MonkeyPatch, *, donated: bool = True) -> str:
    """StableHLO for an H100 of a function of pools, index and inputs."""
    monkeypatch.setattr(run_triton, "capability", lambda: 90)
    monkeypatch.setattr(run_triton, "props", lambda _: DeviceProps(90, 132, 227 << 10))

    def empty(*given):
        units, _, _, region, buffer = given
        return jax.ShapeDtypeStruct(*pool_shape(region, buffer, units))

    rows = [StepRequest(n, 255, 1, tuple(range(n * BLOCKS, (n + 1) * BLOCKS))) for n in range(Q)]
    index = build_index(rows, max_blocks=BLOCKS)
    traced = jax.jit(function, donate_argnums=(0,) if donated else ()).trace(allocate(ops.plan, empty), index, *inputs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def launches(text: str) -> list[list[tuple[int, int]]]:
    """(output, input) that share memory, of every launch."""
    pair = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")
    calls = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    return [[(int(out or 0), int(given)) for out, given in pair.findall(line)] for line in calls]


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_one_launch_that_updates_its_pools(name: str, ops: JaxOps, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, inputs, roles = VERBS[name]
    text = lowered(
        ops, lambda pools, index, *given: verb(ops, pools, index, *given), inputs, monkeypatch, donated=bool(roles)
    )
    assert launches(text) == [[(n, n) for n in range(len(roles))]]


@pytest.mark.parametrize("name", IN_PLANAR)
def test_compression_in_planar_is_one_launch_that_updates_its_pools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, inputs, _ = VERBS[name]
    ops = ops_in("planar")
    text = lowered(ops, lambda pools, index, *given: verb(ops, pools, index, *given), inputs, monkeypatch)
    assert launches(text) == [[(n, n) for n in range(IN_PLANAR[name])]]


def test_few_queries_share_out_their_keys(ops: JaxOps, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(pools, index, q, picks):
        return ops.attend(pools, 0, index, q, picks, rope=ROPE)

    given = np.zeros((Q, 64, DIM), jax.numpy.bfloat16), np.zeros((Q, 512), np.int32)
    text = lowered(ops, attend, given, monkeypatch, donated=False)
    assert launches(text) == [[], []]


def test_index_select_rotates_scores_and_keeps_the_best_of_tiles(ops: JaxOps, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(pools, index, q, weights):
        return ops.index_select(pools, 0, index, q, weights, 512, columns=40_000)

    given = np.zeros((Q, 64, INDEX_DIM), jax.numpy.bfloat16), np.zeros((Q, 64), np.float32)
    # Rotated, scored, the best of each tile, their best, ranked.
    assert launches(lowered(ops, select, given, monkeypatch, donated=False)) == [[]] * 5


def test_keys_and_values_are_one_launch_each(ops: JaxOps, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(pools, index, k, v):
        pools = ops.append_kv(pools, 2, index, k, v)
        return pools, ops.gather_kv(pools, 2, index, columns=16)

    given = (floats(2, 64), floats(2, 64))
    assert launches(lowered(ops, step, given, monkeypatch)) == [[(0, 0)], [(0, 0)], [], []]


def test_layers_of_one_kind_share_their_kernels(ops: JaxOps, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_triton.adapter.cache_info().misses
    for _ in range(2):
        verb, inputs, _ = VERBS["append_flush"]
        lowered(ops, lambda pools, index, *given: verb(ops, pools, index, *given), inputs, monkeypatch)  # noqa: B023
    assert run_triton.adapter.cache_info().misses <= before + 1


def over_shards(ops: JaxOps, verb, out_specs, *, checked: bool):
    """A function of pools, index and inputs under ``shard_map`` over two devices that need not be here."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",))

    def run(pools, index, *given):
        return verb(ops, pools, index, *given)

    def whole(pools, index, *given):
        twice = jax.tree.map(lambda array: jax.numpy.concatenate([array] * 2), (dict(pools), index, given))
        mapped = jax.shard_map(
            lambda pools, index, given: run(pools, index, *given),
            mesh=mesh,
            in_specs=jax.P("data"),
            out_specs=out_specs,
            check_vma=checked,
        )
        return mapped(*twice)

    return whole


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "what varies is checked"])
@pytest.mark.parametrize("name", ["append_window", "append_flush", "attend", "gather_entries"])
def test_under_shard_map_a_verb_is_the_same_launch(
    name: str, checked: bool, ops: JaxOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, inputs, roles = VERBS[name]
    given = inputs if name != "attend" else tuple(array[:Q] for array in inputs)
    text = lowered(ops, over_shards(ops, verb, jax.P("data"), checked=checked), given, monkeypatch, donated=False)
    found = launches(text)
    assert found[0] == [(n, n) for n in range(len(roles))]
    # Few queries share out their keys, and are merged.
    assert found[1:] == ([[]] if name == "attend" else [])


def test_under_shard_map_results_differ_from_shard_to_shard(ops: JaxOps, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, inputs, _ = VERBS["append_window"]
    with pytest.raises(ValueError, match="out_specs"):
        lowered(ops, over_shards(ops, verb, jax.P(), checked=True), inputs, monkeypatch, donated=False)


def test_jax_triton_leaves_the_environment_alone() -> None:
    run_triton._jax_triton()
    assert os.environ.get(run_triton.CACHE) != ""
