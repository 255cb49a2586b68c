"""The TPU kernels, interpreted: rows land where they should, and the interpreter sees the faults it is there for."""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import kvcore
from kvcore.backends.jax_pallas import JaxOps
from kvcore.backends.jax_pallas.calls import INTERPRETER
from kvcore.kernels.pallas.read_rows import read_rows
from kvcore.kernels.pallas.write_rows import write_parts, write_rows
from tests.jax_pallas import whole_step

TILES = [
    pytest.param((4, 128), np.uint8, id="one tile of bytes"),
    pytest.param((8, 128), np.uint8, id="two tiles of bytes"),
    pytest.param((8, 128), np.float32, id="fp32"),
    pytest.param((1, 128), np.float32, id="a short fp32 row"),
]


def test_every_kernel_tells_xla_what_it_costs() -> None:
    calls = [
        (path.name, call)
        for path in sorted(Path(write_parts.__code__.co_filename).parent.glob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pl.pallas_call"
    ]
    assert len(calls) >= 11
    assert not [name for name, call in calls if "cost_estimate" not in {given.arg for given in call.keywords}]


def places(rng: np.random.Generator, units: int, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (unit, row) pairs, two of them -1."""
    at = rng.permutation(units * rows)[:count].astype(np.int32)
    unit, row = at // rows, at % rows
    unit[[1, count - 1]] = -1
    return unit, row


def random_pool(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.sampled
@pytest.mark.parametrize(("tile", "dtype"), TILES)
@pytest.mark.parametrize("count", [3, 8, 11])
def test_rows_are_written_and_read_where_they_belong(tile, dtype, count, rng) -> None:
    pool = random_pool(rng, (3, 10, *tile), dtype)
    unit, row = places(rng, 3, 10, count)
    new = random_pool(rng, (count, *tile), dtype)
    wanted = pool.copy()
    for i in range(count):
        if unit[i] >= 0:
            wanted[unit[i], row[i]] = new[i]
    written = jax.jit(functools.partial(write_rows, interpret=INTERPRETER))(pool, unit, row, new)
    assert np.asarray(written).tobytes() == wanted.tobytes()
    found = jax.jit(functools.partial(read_rows, interpret=INTERPRETER))(written, unit, row)
    assert np.asarray(found).tobytes() == np.where((unit >= 0)[:, None, None], new, 0).astype(dtype).tobytes()


@pytest.mark.parametrize("count", [2, 3])
def test_neighbours_are_written_and_read_together(count, rng) -> None:
    pool = rng.integers(0, 256, (3, 12, 4, 128), np.uint8)
    unit, row = places(rng, 3, 12 // count, 9)
    new = rng.integers(0, 256, (9, count, 4, 128), np.uint8)
    wanted = pool.copy()
    for i in range(9):
        if unit[i] >= 0:
            wanted[unit[i], row[i] * count : (row[i] + 1) * count] = new[i]
    written = jax.jit(functools.partial(write_rows, interpret=INTERPRETER))(pool, unit, row * count, new)
    assert np.asarray(written).tobytes() == wanted.tobytes()
    read = jax.jit(functools.partial(read_rows, count=count, interpret=INTERPRETER))
    new[unit < 0] = 0
    assert np.asarray(read(written, unit, row * count)).tobytes() == new.tobytes()


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_come_together_are_those_that_come_alone(count, rng) -> None:
    """Neighbours, those with a hole, of two units, up to a unit's end, one tile again and again; some that are left."""
    pool = rng.integers(0, 256, (3, 40, 4, 128), np.uint8)
    ahead = count * np.arange(8)
    every = [
        (np.full(8, 2), 4 + ahead),
        (np.where(ahead == count, -1, 1), 8 + ahead),
        (np.where(ahead < 4, 0, 1), ahead),
        (np.full(8, 1), 40 - 8 * count + ahead),
        (np.zeros(8, int), np.full(8, 6)),
        (np.full(8, -1), np.full(8, 0)),
        (np.full(8, 0), 16 - ahead),
        (np.full(8, 2), ahead),
        (np.full(8, 1), 2 + ahead),
        (np.full(3, 1), 30 + ahead[:3]),
    ]
    unit, row = (np.concatenate(part).astype(np.int32) for part in zip(*every, strict=True))
    wanted = np.stack([pool[u, r : r + count].reshape(-1, 128) if u >= 0 else np.zeros((4 * count, 128), np.uint8)
                       for u, r in zip(unit, row, strict=True)])  # fmt: skip
    found = jax.jit(functools.partial(read_rows, count=count, interpret=INTERPRETER))(pool, unit, row)
    assert np.asarray(found).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [
        pytest.param(4, np.uint8, id="quarter tiles"),
        pytest.param(2, np.uint8, id="half tiles"),
        pytest.param(16, np.uint8, id="part of a line"),
        pytest.param(64, np.uint32, id="two words"),
    ],
)
def test_rows_that_share_a_tile_leave_their_neighbours_alone(parts, dtype, rng) -> None:
    tile = (4, 128) if dtype == np.uint8 else (1, 128)
    size = tile[0] * tile[1] // parts
    pool = rng.integers(0, 256, (3, 2, *tile), dtype)
    unit, part = places(rng, 3, 2 * parts, 7)
    unit, part = np.append(unit, unit[:1]), np.append(part, part[0] ^ 1)  # a neighbour, in the same tile
    new = rng.integers(0, 256, (8, size), dtype)
    wanted = pool.copy().reshape(3, 2 * parts, size)
    for i in range(8):
        if unit[i] >= 0:
            wanted[unit[i], part[i]] = new[i]
    write = jax.jit(functools.partial(write_parts, parts=parts, interpret=INTERPRETER))
    tiles = np.tile(new, (1, parts)).reshape(8, *tile)
    assert np.asarray(write(pool, unit, part, tiles)).tobytes() == wanted.tobytes()


def test_every_verb_of_a_decode_step_on_the_kernels(rng) -> None:
    """Append, store, flush, gathers and attention with every row moved by a kernel: the reference's rows and values."""
    reference, cache = whole_step.caches("tpu_tile", max_requests=2, max_tokens=64)
    ops = JaxOps(cache.plan, "cpu", None, "interpret")
    assert ops.how == "cpu, Pallas TPU interpreter"
    a, b = (kvcore_cache.admit() for kvcore_cache in (reference, cache))
    # A prefill by the portable path, so that rings have wrapped and entries are there.
    inputs = whole_step.given(cache.spec, 15, 6, rng)
    for kvcore_cache, request in ((reference, a), (cache, b)):
        with kvcore_cache.step({request: 15}) as step:
            whole_step.through_handles(step, inputs)
    inputs = whole_step.given(cache.spec, 1, 1, rng)
    with reference.step({a: 1}) as step:
        expected = whole_step.through_handles(step, inputs, flush=True)
        wanted = [kvcore.to_numpy(step.layer(1).gather_rows(role).rows) for role in ("window", "tail", "entries")]
    with cache.step({b: 1}) as step:
        pools, outs = jax.jit(
            lambda pools, index: whole_step.functional(ops, pools, index, inputs, flush=True, closed=1)
        )(cache.pools, step.index)
        found = [
            ops.gather_rows(pools, 1, role, step.index, columns=rows.shape[1]).rows
            for role, rows in zip(("window", "tail", "entries"), wanted, strict=True)
        ]
        cache.pools = pools
    for out, want in zip(outs, expected, strict=True):
        np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-5)
    for rows, want in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(rows), want)
    assert reference.digest() == cache.digest()


def faulty_read(pool, row, *, wait: bool):
    """Read one row, with or without waiting for it to arrive."""

    def kernel(rows, pool, out, arrived):
        copy = pltpu.make_async_copy(pool.at[rows[0]], out.at[0], arrived)
        copy.start()
        if wait:
            copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((1, 8, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, 8, 128), lambda *_: (0, 0, 0)),
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        interpret=INTERPRETER,
    )(row, pool)


def test_the_interpreter_catches_a_missing_wait() -> None:
    pool = np.ones((4, 8, 128), np.float32)
    row = np.array([2], np.int32)
    assert np.asarray(faulty_read(pool, row, wait=True)).tolist() == pool[2:3].tolist()
    try:
        # The row has not arrived: what is read is memory that nobody wrote.
        assert np.isnan(np.asarray(faulty_read(pool, row, wait=False))).any()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_the_interpreter_catches_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Two writers of one row, the DMA and the core, in no order."""

    def kernel(pool, out, arrived):
        copy = pltpu.make_async_copy(pool.at[0], out, arrived)
        copy.start()
        out[...] = jnp.zeros((8, 128), jnp.float32)
        copy.wait()

    racing = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        interpret=INTERPRETER,
    )
    try:
        jax.block_until_ready(racing(np.ones((4, 8, 128), np.float32)))
        assert "RACE DETECTED" in capsys.readouterr().out
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_the_interpreter_catches_a_row_outside_of_the_pool() -> None:
    pool = np.ones((4, 8, 128), np.float32)
    try:
        with pytest.raises(Exception, match=r"(?i)out[- ]of[- ]bounds"):
            jax.block_until_ready(faulty_read(pool, np.array([4], np.int32), wait=True))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
