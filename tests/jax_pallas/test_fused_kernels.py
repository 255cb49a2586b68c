"""The TPU kernels that compute, interpreted with races, bounds and unwritten memory watched: the reference's bytes."""

import functools
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kvcore.backends.jax_pallas import JaxBackend, JaxOps, indexer, tiles
from kvcore.backends.jax_pallas.backend import INTERPRETED
from kvcore.backends.jax_pallas.calls import INTERPRETER
from kvcore.backends.jax_pallas.rows import Held
from kvcore.backends.jax_pallas.runs import pool_shape
from kvcore.backends.reference import ReferenceBackend
from kvcore.backends.reference import encoding as reference
from kvcore.conformance.agreement import compare
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.kernels.pallas import codes, compact, rings, rows_codec
from kvcore.kernels.pallas.attend_rows import Source, attend_rows
from kvcore.kernels.pallas.gather_blocks import fits, gather_blocks
from kvcore.kernels.pallas.gather_rows import gather_rows
from kvcore.kernels.pallas.store_rows import store_rows
from kvcore.kernels.pallas.top_k import top_k
from kvcore.plan import Region
from kvcore.spec import FORMATS, CacheSpec, Entries, LayerSpec
from tests.jax_pallas import whole_step

UNITS, ROWS = 3, 8
GLOBAL_SCALE = 0.37
SMALL_SCALE = 1.3e-38  # large values are beyond fp32 by it, and remainders of quotients below
PER_HEAD = ("int8_per_token_head", "fp8_per_token_head")
OUTSIDE = (
    "fp16",
    "int8_row",
    "fp8_row",
    "nf4_b64",
    "mxfp4",
    "v32_nvfp4_352",
    "int4_g32",
    "int4_g64",
    "int4_ch32",
    "int4_ch64",
    "mxfp8",
    "fp4_mx_block16",
    "nvfp4",
    *PER_HEAD,
)
IN_KERNELS = [name for name in FORMATS if name not in OUTSIDE]
CHECKS = (
    "flush/v4_584.m2/tpu_tile/ragged",  # overlapping windows, whole tiles and quarters
    "flush/v41_fp4_288.m8/tpu_tile/ragged",  # windows of their own, FP4 with e4m3 scales
    "flush/bf16.m2+index_fp4_68_h.m2/tpu_tile/ragged",  # rotated index keys, four to a tile
    "index_scores/index_fp8_132.m4/tpu_tile/ragged",
    "index_scores/index_fp4_68_h.m2/tpu_tile/ragged",
    "gather_entries/v41_528.m4/tpu_tile/padded",
    "gather_all_entries/v4_584.m2/tpu_tile/ragged",  # blocks of twelve rows
    "attend/v4_584+v4_584.m2/tpu_tile/ragged",  # a ring, and entries one by one
)


def region(name: str, growth: str = "block", rows: int = ROWS) -> Region:
    format = FORMATS[name].for_dim(FORMATS[name].dim or 256)
    return Region(layer=0, role="entries", part="", format=format, heads=1, growth=growth, rows=rows, layout="tpu_tile")


def noise(one: Region) -> list[np.ndarray]:
    """Pools full of 0xFF, which no kernel may take for a row."""
    shapes = [pool_shape(one, buffer, UNITS) for buffer, _ in one.unit.buffers]
    return [np.full(shape, 255, np.uint8) if dtype == np.uint8 else np.full(shape, np.nan, dtype)
            for shape, dtype in shapes]  # fmt: skip


def canonical(one: Region, pools: list[np.ndarray]) -> np.ndarray:
    """Rows [units · rows, row_bytes] by the layout's own table, byte by byte."""
    found = np.zeros((UNITS, ROWS, one.format.row), np.uint8)
    buffers = {name: np.asarray(pool).reshape(UNITS, -1).view(np.uint8)
               for (name, _), pool in zip(one.unit.buffers, pools, strict=True)}  # fmt: skip
    for place in one.unit.places:
        first, last = one.format.byte_range(place.field)
        for row in range(ROWS):
            start = place.base + row * place.stride
            stored = buffers[place.buffer][:, start : start + place.nbytes]
            if place.split:
                high, low = np.split(stored, 2, axis=1)
                stored = np.stack([low, high], axis=2).reshape(UNITS, -1)
            found[:, row, first:last] = stored
    return found.reshape(UNITS * ROWS, -1)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        (name, scale)
        for name in IN_KERNELS
        for scale in ((GLOBAL_SCALE, SMALL_SCALE) if FORMATS[name].global_scaled else (1.0,))
    ],
)
def test_rows_are_encoded_into_place_and_decoded_out_of_it(name: str, scale: float, rng: np.random.Generator) -> None:
    one = region(name)
    assert rows_codec.supports(one)
    pools = noise(one)
    before = canonical(one, pools)
    at = rng.permutation(UNITS * ROWS)[:11].astype(np.int32)
    unit, row = at // ROWS, at % ROWS
    unit[4] = -1
    values = rng.standard_normal((11, one.format.dim)).astype(np.float32)
    values *= np.exp(rng.uniform(-12, 8, (11, 1))).astype(np.float32)
    values[0, 5], values[1, -1], values[2], values[3, ::2], values[5, ::3] = np.inf, np.nan, 0, -0.0, -3e38
    values[6:8] *= np.float32(2.0**-122)
    with np.errstate(all="ignore"):
        wanted = np.asarray(reference.encode(name, values, scale))
        decoded = np.asarray(reference.decode(name, wanted, one.format.dim, scale)).astype(np.float32)

    @jax.jit
    def there_and_back(pools, unit, row, values):
        options = {"global_scale": scale, "interpret": INTERPRETER}
        pools = store_rows(one, pools, unit, row, values, **options)
        return pools, gather_rows(one, pools, unit, row, **options)

    pools, found = there_and_back(pools, unit, row, values)
    expected = before.copy()
    expected[at[unit >= 0]] = wanted[unit >= 0]
    pads = [field.name for field in one.format.fields if field.name == "pad"]
    for field in pads:
        expected[:, slice(*one.format.byte_range(field))] = 0
    assert np.array_equal(canonical(one, pools), expected)
    decoded[unit < 0] = 0
    np.testing.assert_array_equal(np.asarray(found), decoded)


@pytest.mark.parametrize("name", ["v4_584", "v32_656"])
def test_canonical_rows_across_tiles_come_and_go_and_leave_their_neighbours_alone(name, rng) -> None:
    """Five lines a row, and six; neighbours, one row alone, and one that is skipped."""
    one = region(name)
    pools = noise(one)
    before = canonical(one, pools)
    at = np.array([0, 1, 2, 9, 23, 14], np.int32)
    unit, row = np.where(at == 9, -1, at // ROWS), at % ROWS
    rows = rng.integers(0, 256, (len(at), 1, one.format.row), np.uint8)
    for field in (field.name for field in one.format.fields if field.name == "pad"):
        rows[..., slice(*one.format.byte_range(field))] = 0
    names = [name for name, _ in one.buffers.values()]

    @jax.jit
    def there_and_back(pools, unit, row, rows):
        held = tiles.store(Held(zip(names, pools, strict=True), "interpret"), one, unit, row, rows)
        return [held[name] for name in names], tiles.load(held, one, unit, row)

    pools, found = there_and_back(pools, unit, row, rows)
    expected = before.copy()
    expected[at[unit >= 0]] = rows[unit >= 0, 0]
    assert np.array_equal(canonical(one, pools), expected)
    assert np.array_equal(np.asarray(found), np.where(unit[:, None, None] >= 0, rows, 0))


def test_codes_are_those_of_the_casts(rng: np.random.Generator) -> None:
    """All 256 e4m3 and 16 e2m1 codes, and rounding of ties, subnormals and what lies near them."""
    every = np.arange(256, dtype=np.int32)
    wanted = every.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(codes.from_e4m3(every)), wanted)
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(codes.from_e2m1(every[:16])), nibbles)
    finite = np.sort(np.abs(wanted[np.isfinite(wanted)]))
    middles = (finite[1:] + finite[:-1]) / 2
    near = np.concatenate([f(middles) for f in (np.copy, lambda m: np.nextafter(m, 0), lambda m: np.nextafter(m, 999))])
    values = np.concatenate([finite, near, rng.standard_normal(10_000) * 30, 2.0 ** rng.uniform(-12, 8, 10_000)])
    values = np.clip(np.concatenate([values, -values]), -448, 448).astype(np.float32)
    want = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(np.asarray(jax.jit(codes.to_e4m3)(values)), want)
    assert np.array_equal(np.asarray(codes.to_bf16(values)), values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_codes_in_halves_of_words_are_those_of_the_casts() -> None:
    """All codes of both halves, as bf16: e4m3, bytes that a product moves."""
    every = np.arange(256, dtype=np.int32)
    words = np.tile(every | every[::-1] << 16, (8, 1)).reshape(16, 128)

    def converted(convert):
        def kernel(given, found):
            found[...] = convert(given[...])

        shape = jax.ShapeDtypeStruct((32, 128), jnp.bfloat16)
        found = np.asarray(pl.pallas_call(kernel, out_shape=shape, interpret=INTERPRETER)(words)).astype(np.float32)
        lower, upper = found[0:4:2].reshape(-1), found[1:4:2].reshape(-1)
        np.testing.assert_array_equal(upper, lower[::-1])
        return lower

    codes_of = every.astype(np.uint8)
    wanted = codes_of.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(converted(compact.from_e4m3), wanted)
    np.testing.assert_array_equal(np.asarray(compact.bytes_again(converted(compact.from_bytes))), every)


def test_exponents_are_powers_of_two(rng: np.random.Generator) -> None:
    """Every byte of words of four rows; 255 is infinite, and 0 is 0."""
    every = rng.permutation(np.arange(8 * 4 * 128) % 256).astype(np.uint8).reshape(32, 128)
    words = every.reshape(8, 4, 128).swapaxes(1, 2).copy().view(np.int32)[:, :, 0]

    def kernel(given, found):
        found[...] = compact.exponents(given[...])

    shape = jax.ShapeDtypeStruct((32, 128), jnp.bfloat16)
    found = np.asarray(pl.pallas_call(kernel, out_shape=shape, interpret=INTERPRETER)(words)).astype(np.float32)
    powers = np.concatenate([[0], np.exp2(np.arange(1, 255) - 127.0), [np.inf]]).astype(np.float32)
    np.testing.assert_array_equal(found, powers[every])


def test_chunks_without_a_row_are_passed_over(rng: np.random.Generator) -> None:
    numbers, following = compact.order(jnp.array([False, True, False, True]))
    assert (numbers.tolist(), following.tolist()) == ([-1, 0, -1, 1], [1, 1, 3, 3, 4])
    one = region("v4_584")
    pools, values = noise(one), rng.standard_normal((20, 512)).astype(np.float32)
    at = np.arange(20, dtype=np.int32)
    pools = jax.jit(functools.partial(store_rows, one, interpret=INTERPRETER))(pools, at // ROWS, at % ROWS, values)
    stored = np.asarray(reference.decode("v4_584", reference.encode("v4_584", values, 1.0), 512, 1.0))
    pick = np.full(3 * 128, -1, np.int32)
    pick[[130, 300, 383]] = 3, 19, 8
    unit, row = np.where(pick >= 0, pick // ROWS, -1), np.maximum(pick, 0) % ROWS
    found = jax.jit(functools.partial(gather_rows, one, interpret=INTERPRETER))(pools, unit, row)
    np.testing.assert_array_equal(np.asarray(found), np.where(pick[:, None] >= 0, stored[pick], 0))


@pytest.mark.parametrize("rows", [8, 2])
def test_blocks_come_whole_and_in_the_order_of_a_table(rows: int, rng: np.random.Generator) -> None:
    """Several steps, of which one has no block; blocks that do not exist among others; NaN in rows not written."""
    one = region("v4_584", rows=rows)
    assert fits(one)
    pools, values = noise(one), rng.standard_normal((2 * rows, 512)).astype(np.float32)
    values[:, 5] = -0.0
    at = np.arange(2 * rows, dtype=np.int32)
    block, row = 2 - at // rows, at % rows
    pools = jax.jit(functools.partial(store_rows, one, interpret=INTERPRETER))(pools, block, row, values)
    stored = np.asarray(reference.decode("v4_584", reference.encode("v4_584", values, 1.0), 512, 1.0))
    step = 256 // rows
    table = np.full(2 * step + 6, -1, np.int32)
    table[[1, step - 2, step - 1, 2 * step, -1]] = 2, 1, 0, 1, 2
    (pool,) = pools
    found = jax.jit(functools.partial(gather_blocks, one, interpret=INTERPRETER))(pool, table)
    assert found.shape == (len(table) * rows, 512)
    found = np.asarray(found).reshape(len(table), rows, 512)
    np.testing.assert_array_equal(found[[1, -1]], np.stack([stored[:rows]] * 2))
    assert np.signbit(found[1]).tolist() == np.signbit(stored[:rows]).tolist()  # of zeros, too
    np.testing.assert_array_equal(found[[step - 2, 2 * step]], np.stack([stored[rows:]] * 2))
    assert np.isnan(found[step - 1]).all()


@pytest.mark.parametrize(
    ("rows", "taken"), [(2, True), (4, True), (12, True), (100, True), (1, False), (6, False), (1028, False)]
)
def test_blocks_come_whole_where_their_rows_lie_alike_and_are_few_enough(rows: int, taken: bool) -> None:
    assert fits(region("v4_584", rows=rows)) is taken
    assert not fits(region("v4_584", growth="slot", rows=rows))
    assert not fits(region("v32_656", rows=rows))


@pytest.mark.parametrize("columns", [300, 1024])
def test_the_highest_scores_are_picked_in_order(columns: int, rng: np.random.Generator) -> None:
    scores = rng.standard_normal((3, columns)).astype(np.float32)
    scores[0, :3] = np.nan, np.inf, -np.inf
    scores[1] = np.round(scores[1])
    scores[1, ::3] = -0.0
    scores[2, 20:] = -np.inf
    picks = np.asarray(jax.jit(functools.partial(top_k, k=70, interpret=INTERPRETER))(scores))
    for row, got in zip(scores, picks, strict=True):
        order = sorted((i for i in range(columns) if row[i] > -np.inf), key=lambda i: (-row[i], i))[:70]
        assert got.tolist() == order + [-1] * (70 - len(order))


def test_one_softmax_over_two_sources_with_the_sink_once(rng: np.random.Generator) -> None:
    """Rows of a window and of entries, more than a chunk of one; a token without rows; NaN in every row that is not."""
    sources, rows = [], []
    for name, count in (("v41_528", 9), ("v4_584", 131)):
        one = region(name)
        pools = noise(one)
        stored = rng.standard_normal((UNITS * ROWS - 1, 512)).astype(np.float32)
        at = np.arange(len(stored), dtype=np.int32)
        pools = jax.jit(functools.partial(store_rows, one, interpret=INTERPRETER))(pools, at // ROWS, at % ROWS, stored)
        keys = np.asarray(reference.decode(name, reference.encode(name, stored, 1.0), 512, 1.0))
        pick = rng.integers(0, len(stored), (3, count)).astype(np.int32)
        pick[rng.random(pick.shape) < 0.3] = -1
        pick[2] = -1
        sources.append(Source(one, pools, np.where(pick >= 0, pick // ROWS, -1), np.maximum(pick, 0) % ROWS))
        rows.append((keys.astype(np.float64), pick))
    q = rng.standard_normal((3, 4, 512)).astype(np.float32) / 22
    sink = rng.standard_normal(4).astype(np.float32)
    pools = [source.pools for source in sources]

    @jax.jit
    def attend(pools, q, sink):
        given = [source._replace(pools=mine) for source, mine in zip(sources, pools, strict=True)]
        return attend_rows(q, given, sink, scale=0.5, interpret=INTERPRETER)

    out, lse = (np.asarray(array) for array in attend(pools, q, sink))
    for token in range(2):
        keys = np.concatenate([stored[pick[token][pick[token] >= 0]] for stored, pick in rows])
        logits = 0.5 * q[token].astype(np.float64) @ keys.T
        weights = np.exp(logits)
        np.testing.assert_allclose(lse[token], np.log(weights.sum(1)), rtol=1e-5)
        wanted = (weights @ keys) / (weights.sum(1) + np.exp(sink.astype(np.float64)))[:, None]
        np.testing.assert_allclose(out[token], wanted, rtol=1e-5, atol=1e-5)
    assert not out[2].any()
    assert np.isneginf(lse[2]).all()


def test_rows_of_a_ring_change_places_only_with_rows_that_are_not_seen() -> None:
    one, most = region("v4_584", growth="slot", rows=35), 32
    for first in range(35):
        for count in range(most + 1):
            begin, places, moved, more = (int(number) for number in rings.folded(one, first, count, most))
            assert (places, begin >= 0, begin + more <= places) == (32, True, True)
            ring = np.arange(35)
            ring[begin : begin + more] = ring[moved : moved + more]
            seen = (first + np.arange(count)) % 35
            assert set(ring[(begin + np.arange(count)) % places]) == set(seen), (first, count)


@pytest.mark.parametrize(("dtype", "count", "columns"), [("float32", 35, 32), ("bfloat16", 37, 37)])
def test_a_ring_is_taken_whole_and_seen_in_part(dtype: str, count: int, columns: int, rng: np.random.Generator) -> None:
    """From its first row, in its middle, around its end, all that can be seen, one row and none; NaN where not written.

    Three tokens see rows that are no numbers, one of them of codes and scales that are none: all of theirs is none.
    Queries in bf16 are as exact, and what they give is as exact as weights in bf16 allow.
    """
    name = "v4_584"
    one = region(name, growth="slot", rows=count)
    assert rings.fits(one)
    pools, values = noise(one), rng.standard_normal((2 * count, 512)).astype(np.float32)
    slot = np.repeat(np.array([2, 0], np.int32), count)
    at = np.tile(np.arange(count, dtype=np.int32), 2)
    written = (slot == 2) | (at < 30)
    values[count + 2, 3] = values[count + 3, 500] = np.nan
    stored = jax.jit(functools.partial(store_rows, one, interpret=INTERPRETER))
    pools = stored(pools, np.where(written, slot, -1), at, values)
    keys = np.asarray(reference.decode(name, reference.encode(name, values, 1.0), 512, 1.0)).astype(np.float64)
    keys = np.where(written[:, None], keys, np.nan)
    runs = [(2, 0, 9), (0, 5, 20), (2, 30, 16), (2, 11, columns), (-1, 0, 0), (0, 29, 1), (2, count - 1, columns)]
    runs += [(0, 2, 1), (0, 3, 2), (0, 28, 4)]
    unit = np.full((len(runs), columns), -1, np.int32)
    row = np.zeros_like(unit)
    for token, (mine, first, seen) in enumerate(runs):
        unit[token, columns - seen :], row[token, columns - seen :] = mine, (first + np.arange(seen)) % count
    q = np.asarray(jnp.asarray(rng.standard_normal((len(runs), 2, 512)), dtype))
    options = {"scale": 1 / 22, "interpret": INTERPRETER}
    call = jax.jit(lambda pools, *rest: attend_rows(rest[0], [Source(one, pools, *rest[1:])], **options))
    out, lse = map(np.asarray, call(pools, q, unit, row))
    rounded = dtype == "bfloat16"
    rtol, atol = (2.0**-7, 2.0**-8 * np.nanmax(np.abs(out))) if rounded else (1e-5, 1e-5)
    for token, (mine, first, seen) in enumerate(runs):
        some = keys[(0 if mine == 2 else count) + (first + np.arange(seen)) % count]
        weights = np.exp(q[token].astype(np.float64) @ some.T / 22)
        total = weights.sum(axis=1)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[token], np.log(total), rtol=1e-5)
        wanted = weights @ some / np.where(total == 0, 1, total)[:, None]
        np.testing.assert_allclose(out[token], wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("tokens", "columns", "k"), [(0, 8, 4), (2, 0, 4), (2, 8, 0)])
def test_no_scores_and_no_picks_need_no_kernel(tokens: int, columns: int, k: int) -> None:
    picks = indexer.select(jnp.zeros((tokens, columns)), k, "interpret")
    assert picks.shape == (tokens, k)
    assert (np.asarray(picks) == -1).all()


@pytest.mark.parametrize("check", CHECKS)
def test_the_kits_check_passes_on_the_interpreted_kernels(check: str) -> None:
    (found,) = [one for one in checks_of(conformance_spec()) if fnmatchcase(one.id, check)]
    drive = found.prepare()
    ops = JaxBackend().create(found.plan, device=INTERPRETED)
    assert ops.how == "cpu, Pallas TPU interpreter"
    agreement = compare(drive(ReferenceBackend().create(found.plan)), drive(ops))
    assert not agreement.mismatches, agreement


def test_rows_that_end_within_a_line_are_attended_to_in_a_kernel() -> None:
    """As those of MLA: queries are filled up to whole lines."""
    spec = CacheSpec(layers=[LayerSpec(entries=Entries(dim=160, ratio=1, format="bf16"))], block_tokens=24)
    (found,) = [one for one in checks_of(spec) if one.id == "attend/bf16.m1/tpu_tile/ragged"]
    drive, ops = found.prepare(), JaxBackend().create(found.plan, device=INTERPRETED)
    assert {choice[2] for choice in ops.explain() if choice.verb == "attend"} == {"pallas, interpreted"}
    agreement = compare(drive(ReferenceBackend().create(found.plan)), drive(ops))
    assert not agreement.mismatches, agreement


CALLS = {
    "append_window": 1,
    "flush": 2,  # entries and index keys
    "index_scores": 1,
    "select": 1,
    "attend": 1,
}


def test_a_verb_is_one_kernel(rng: np.random.Generator) -> None:
    """On tiles the verbs are traced to these kernels and to no gather of pools by XLA."""
    _, cache = whole_step.caches("tpu_tile", max_requests=2, max_tokens=64)
    ops = JaxOps(cache.plan, "tpu", None, "tpu")
    (x, *_) = whole_step.given(cache.spec, 1, 1, rng)
    with cache.step({cache.admit(): 1}) as step:
        index, pools = step.index, cache.pools
        step.abort()
    verbs = {
        "append_window": lambda p: ops.append_window(p, 0, index, x.rows),
        "flush": lambda p: ops.flush(p, 0, index, *x.tail, *x.index_tail, closed=1),
        "index_scores": lambda p: ops.index_scores(p, 0, index, jnp.ones((1, 4, 128)), jnp.ones((1, 4)), columns=8),
        "select": lambda _: ops.select(jnp.ones((1, 8)), 4),
        "attend": lambda p: ops.attend(p, 0, index, x.q, x.picks, sink=jnp.ones(4)),
    }
    for name, verb in verbs.items():
        traced = str(jax.make_jaxpr(verb)(pools))
        assert traced.count("pallas_call[") == CALLS[name], name
    assert set(verbs) == set(CALLS)
