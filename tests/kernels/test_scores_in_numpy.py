"""Scores of FP4 keys by queries in e4m3, their kernel for Hopper carried out in NumPy, beside the reference."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.backends.reference.backend import ReferenceOps
from kvcore.kernels.triton import scores_hopper, scores_nibbles
from kvcore.kernels.triton.record import recorded
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.kernels.gluon_in_numpy import at, carried_out, language, memory_of

RANDOM = np.random.default_rng(11)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def prmt(low, high, selectors):
    """Four bytes out of the eight of two words, each by a nibble; one with its fourth bit is a byte's sign, spread."""
    given = [word >> 8 * n & 255 for word in (low, high) for n in range(4)]
    out = np.zeros_like(low)
    for n in range(4):
        selector = np.broadcast_to(selectors >> 4 * n & 15, low.shape)
        byte = np.choose(selector & 7, given)
        out |= np.where(selector & 8, np.where(byte & 128, 255, 0), byte) << 8 * n
    return out


def chosen(first, second, third, table):
    """Bits by a table of eight of them."""
    bits = np.zeros_like(first)
    for n in (n for n in range(8) if table >> n & 1):
        one, other, last = (each if n & bit else ~each for each, bit in ((first, 4), (second, 2), (third, 1)))
        bits |= one & other & last
    return bits


INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b, "shl.b32": lambda a, b: a << b, "shr.b32": lambda a, b: a >> b, "prmt.b32": prmt,
    "lop3.b32": chosen,
}  # fmt: skip


def spread(*given):
    """What ``SPREAD`` does, one instruction after another."""
    held = {f"${n + 2}": np.asarray(each).astype(np.int64) & 0xFFFFFFFF for n, each in enumerate(given)}
    for line in scores_nibbles.SPREAD.value.strip("{} ").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name in INSTRUCTIONS:
            target, *sources = operands.replace(" ", "").split(",")
            numbers = [held[each] if each in held else int(each, 0) for each in sources]
            held[target] = INSTRUCTIONS[name](*numbers) & 0xFFFFFFFF
        else:
            assert name in (".reg", ""), line
    return tuple(held[each].astype(np.uint32).view(np.int32) for each in ("$0", "$1"))


def largest(word):
    """In both halves of a word, as ``LARGEST`` has it."""
    found = np.ascontiguousarray(word).view(np.uint8).reshape(*word.shape, 4).max(axis=-1).astype(np.int32)
    return found | found << 16


ASSEMBLY = {scores_nibbles.SPREAD.value: spread, scores_nibbles.LARGEST.value: largest}


def scored(plan, pools, index, q, weights, columns, tiles, monkeypatch):
    """Scores [tokens, columns] of the kernel."""
    modules = scores_hopper, scores_nibbles
    carried_out(modules, monkeypatch)
    monkeypatch.setattr(scores_nibbles, "NAMED", True)
    (region,) = plan.region(0, "index_keys")
    record, (codes, scales, _) = recorded(region)
    memory = memory_of(pools)
    out = np.full((len(q), columns), np.nan, np.float32)
    arrays = index.positions, index.request_index, index.block_table
    given = (
        at(out), at(q), at(weights), memory[codes], memory[scales],
        *(at(np.ascontiguousarray(array, np.int32)) for array in arrays),
        len(q), q.shape[1], columns, index.block_table.shape[1], tiles,
    )  # fmt: skip
    for program in range(len(q) * -(-columns // (64 * tiles))):
        for module in modules:
            monkeypatch.setattr(module, "gl", language(program, ASSEMBLY))
        with np.errstate(all="ignore"):
            scores_nibbles.hopper_nibbles_kernel(*given, R=record, RATIO=4, HEADS=16, AHEAD=False)
    return out


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("apart", [0, 20, 30, 90])
@pytest.mark.parametrize("layout", ["packed", "planar"])
def test_its_answers_are_those_of_the_reference(layout, apart, tiles, monkeypatch):
    keys = IndexKeys(dim=128, ratio=4, heads=5, topk=8, format="index_fp4_68")
    layer = LayerSpec(entries=Entries(dim=16, ratio=4, format="bf16"), index_keys=keys)
    plan = plan_cache(CacheSpec(layers=[layer]), max_requests=4, max_tokens=2048, layout=layout)
    ops, blocks, lengths = ReferenceOps(plan), ((0, 3, 5), (1,), (4, 2)), (3 * 256 - 3, 3, 301)
    pools = {name: np.full_like(pool, 0xFF) for name, pool in ops.allocate().items()}
    rows = [
        StepRequest(slot=slot, start=0, new=length, blocks=blocks[slot], stored=0)
        for slot, length in enumerate(lengths)
    ]
    values = RANDOM.standard_normal((sum(length // 4 for length in lengths), 128)).astype(np.float32)
    # In every third entry one group's scale is so many powers of two below the others, and one group is zero once.
    entry = np.concatenate([np.arange(length // 4) for length in lengths])
    values.reshape(-1, 4, 32)[entry % 3 == 0, 1] *= np.float32(2.0**-apart)
    values[5, 64:96] *= apart != 20
    index = ops.index(build_index(rows, max_blocks=3))
    pools = ops.store_entries(pools, 0, index, np.zeros((len(values), 16), np.float32), values)
    last = [row._replace(start=length - 1, new=1) for row, length in zip(rows, lengths, strict=True)]
    index = ops.index(build_index(last, max_blocks=3, pad_tokens=4, pad_requests=4))
    q = RANDOM.standard_normal((4, 5, 128)).astype(E4M3)
    if apart:
        # All that is left is of these groups.
        q.reshape(4, 5, 4, 32)[:, :, [0, 2, 3]] = 0
    weights = RANDOM.standard_normal((4, 5)).astype(np.float32)
    want = ops.index_scores(pools, 0, index, q, weights, columns=192)
    got = scored(plan, pools, index, q, weights, 192, tiles, monkeypatch)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert seen.sum() == sum(length // 4 for length in lengths)
    enlarged = np.where(np.arange(192) % 3 == 0, 2.0**apart, 1.0)
    np.testing.assert_allclose((got * enlarged)[seen], (want * enlarged)[seen], rtol=1e-5, atol=1e-5)
