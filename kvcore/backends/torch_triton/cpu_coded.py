"""Classic attention of one new token a request to coded rows on the CPU, in C, from where they lie.

torch decodes rows into arrays, which it writes and reads again, before it attends to them; that takes several times as
long as attention itself. ``kvcore.native`` decodes a row as it is read. Whoever has no C compiler, or asks for fewer
numbers than are worth it, has torch's operations in its place.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.backends.torch_triton.cpu_views import complete
from kvcore.backends.torch_triton.encoding import FOUR_BITS, decode, encode, levels, scale_values
from kvcore.native import Lanes, Native
from kvcore.ops import Attention
from kvcore.spec import FORMATS, Format
from kvcore.spec.codes import CODES, RANGE_SMALLEST

WORTH = 1 << 18
"""Numbers of keys and values from which a call is C's; the first such call of a process waits for the compiler."""

ALONE = 1 << 20
"""Numbers from which threads share a call."""

KINDS = {"int8": 0, "e4m3": 1, "nf4": 2, "e2m1": 2, "uint4": 2, "bf16": 3, "fp32": 4}
"""Codes of values -> what the source calls their kind."""


class Side(NamedTuple):
    """What C is told of a layer's keys, or values.

    Attributes:
        pools: where they were found; ``arrays`` those of them that they lie in.
        numbers: in the order of the source.
        tables: that numbers name, kept for as long.
    """

    pools: Any
    arrays: tuple[Any, ...]
    numbers: Any
    tables: tuple[Any, ...]


class Seen(NamedTuple):
    """Rows that a step's requests see: runs (unit, row, count), first runs of each, and how many rows in all."""

    runs: Any
    of_request: Any
    count: int


@cache
def fits(format: Format, tokens: int) -> bool:
    """Whether C decodes rows of a format, each of so many tokens, over channels or over tokens."""
    values = [field for field in format.fields if field.is_value]
    if len(values) != 1 or format.global_scaled or (format.dim or 1) % (8 * tokens):
        return False
    field = values[0]
    whole = field.group is None or field.groups == 1 or not field.width % 8
    return field.code in KINDS and whole and (field.group is None) == (field.code in ("bf16", "fp32"))


def attend(ops: Any, pools: Any, layer: int, index: Any, q: Any, *, sink: Any, scale: float) -> Attention | None:
    """Attend from q [T, H, dim], a token of each request, to what the pools hold; None: torch's operations do it.

    That is: rows that C does not decode, or too few of them; several tokens of a request, padding, or rows that other
    shards have; no compiler; and a number that is not finite.
    """
    regions, host = ops.plan.region(layer, "kv"), ops.host(index)
    keys, _ = regions
    if not host.regular or len(q) != len(host.slots) or host.lengths != [start + 1 for start in host.starts]:
        return None
    seen = seen_rows(keys, ops.component(layer, "kv"), host, index)
    found = None if seen is None else _over(ops, pools, regions, seen, q, scale)
    if found is None:
        return None
    out, logs = found
    if not bool(logs.max() < torch.inf):
        return None
    if sink is not None:
        out *= torch.sigmoid(logs - sink.to(torch.float32))[..., None]
    return Attention(out.to(q.dtype), logs)


def attend_groups(ops: Any, pools: Any, layer: int, index: Any, q: Any, *, scale: float) -> Attention | None:
    """The same of keys and values in formats over tokens: of whole groups alone, in fp32; None: torch's operations."""
    regions, host = ops.plan.region(layer, "kv"), ops.host(index)
    ratio, component = regions[0].tokens, ops.component(layer, "kv")
    if ratio % 8 or len(q) != len(host.slots):
        return None
    key = attend_groups, regions[0].growth, regions[0].rows, component
    if key not in host.kept:
        ends = [length // ratio * ratio for length in host.lengths]
        begins = [
            min(component.first_visible(start, left), end) if start >= left else end
            for start, left, end in zip(host.starts, host.padding, ends, strict=True)
        ]
        whole = not any(begin % ratio for begin in begins)
        runs = _runs(regions[0], host, index, begins, ends) if whole else None
        host.kept[key] = None if runs is None or (runs.runs[:, 0] < 0).any() else runs
    found = None if host.kept[key] is None else _over(ops, pools, regions, host.kept[key], q, scale)
    return None if found is None else Attention(*found)


def _over(ops: Any, pools: Any, regions: Any, seen: Seen, q: Any, scale: float) -> tuple[Any, Any] | None:
    """Attention [T, H, dim] in fp32 to rows, and its log-sum-exp; None: too few rows, or no compiler."""
    keys, values = regions
    heads, tokens, dim = keys.heads, len(q), values.format.dim // values.tokens
    work = seen.count * heads * (keys.format.dim // keys.tokens + dim)
    run = native.wait() if work >= WORTH else None
    if run is None:
        return None
    group = q.shape[1] // heads
    query = q.to(torch.float32).contiguous()
    out = torch.empty((tokens, heads * group, dim))
    greatest, total = torch.empty((2, tokens, heads * group))
    told = [side(ops, pools, region).numbers.ctypes.data for region in regions]
    ways = seen.runs.ctypes.data, seen.of_request.ctypes.data
    gives = out.data_ptr(), greatest.data_ptr(), total.data_ptr()

    def part(first: int, last: int) -> None:
        run(query.data_ptr(), heads, group, scale, *told, *ways, first, last, *gives)

    count, threads = tokens * heads, torch.get_num_threads()
    if threads > 1 and work >= ALONE:
        cuts = np.linspace(0, count, min(threads, count) + 1).astype(int).tolist()
        list(workers(os.getpid(), threads).map(part, cuts[:-1], cuts[1:]))
    else:
        part(0, count)
    return out, greatest + total.log()


def possible(regions: Any) -> bool:
    """Whether C decodes the rows of a layer's regions, which lie alike then."""
    keys, values = regions
    alike = (keys.heads, keys.growth, keys.rows, keys.tokens) == (
        values.heads,
        values.growth,
        values.rows,
        values.tokens,
    )
    placed = all(region.even and not any(place.split for place in region.unit.places) for region in regions)
    return alike and placed and all(fits(region.format, region.tokens) for region in regions)


@lru_cache(maxsize=1)
def workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that share calls; those of another process are not this one's."""
    del process
    return ThreadPoolExecutor(threads, thread_name_prefix="kvcore.attend")


def seen_rows(region: Any, component: Any, host: Any, index: Any) -> Seen | None:
    """The rows that a token of each request sees; None where another shard has some of them.

    Worked out once for all layers of equal components whose rows lie alike.
    """
    key = seen_rows, region.growth, region.rows, component
    if key not in host.kept:
        host.kept[key] = _seen_rows(region, component, host, index) if complete(region, host) else None
    return host.kept[key]


def _seen_rows(region: Any, component: Any, host: Any, index: Any) -> Seen:
    firsts = [
        component.first_visible(start, left) if start >= left else length
        for start, length, left in zip(host.starts, host.lengths, host.padding, strict=True)
    ]
    return _runs(region, host, index, firsts, host.lengths)


def _runs(region: Any, host: Any, index: Any, firsts: list[int], lengths: list[int]) -> Seen:
    """Positions of each request from its first to its length."""
    found, counts, rows = [], [0], region.rows * region.tokens
    for request, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        # Units that a request's positions go through, in order: blocks, or rounds of its ring.
        numbers = np.arange(first // rows, -(-length // rows))
        runs = np.zeros((len(numbers), 3), np.int64)
        if region.growth == "slot":
            runs[:, 0] = host.slots[request]
        elif len(numbers):
            runs[:, 0] = index.block_table[request].numpy()[numbers[0] : numbers[-1] + 1]
        runs[:, 1] = np.maximum(first - numbers * rows, 0)
        runs[:, 2] = np.minimum(length - numbers * rows, rows) - runs[:, 1]
        found.append(runs)
        counts.append(counts[-1] + len(runs))
    runs = np.concatenate(found)
    return Seen(runs, np.array(counts, np.int64), int(runs[:, 2].sum()))


def side(ops: Any, pools: Any, region: Any) -> Side:
    """What C is told of a region, as long as its pools lie where they did."""
    kept = ops.sides.get(id(region))
    if kept is not None:
        if kept.pools is pools:
            return kept
        names = [region.buffers[place.buffer][0] for place in region.unit.places]
        if all(pools[name] is array for name, array in zip(names, kept.arrays, strict=True)):
            return kept
    found = ops.sides[id(region)] = _side(pools, region)
    return found


def _side(pools: Any, region: Any) -> Side:
    numbers, (row, head) = {}, region.steps
    arrays = []
    for place in region.unit.places:
        pool = pools[region.buffers[place.buffer][0]]
        arrays.append(pool)
        where = pool.data_ptr() + place.base, pool.stride(0), row * place.stride, head * place.stride
        numbers[place.field] = where
    return _side_at(region.format, region.tokens, numbers, pools, tuple(arrays))


def _side_at(format: Format, tokens: int, numbers: dict[str, Any], pools: Any, arrays: tuple[Any, ...]) -> Side:
    """A side whose fields are found by these numbers: address, then steps from a unit, a row and a head to the next."""
    (field,) = (field for field in format.fields if field.is_value)
    four = levels(field.code, "cpu") if field.code in FOUR_BITS else None
    scales, size = None, 0
    if field.group is not None:
        size = field.scale_element.bits // 8
        scales = scale_table(field.scale or "") if size == 1 else None
    nowhere = 0, 0, 0, 0
    smallest = np.array(RANGE_SMALLEST if field.has_offsets else 0, np.float32).view(np.int32)
    by_channel, bits, dim = format.tokens > 1, CODES[field.code].bits, (format.dim or 0) // tokens
    steps = (tokens * bits // 8, size) if by_channel else (dim * bits // 8, field.groups // tokens * size)
    told = [
        *numbers[field.name],
        *numbers.get("scales", nowhere),
        *numbers.get("offsets", nowhere),
        KINDS[field.code],
        0 if four is None else four.data_ptr(),
        field.width,
        field.groups // tokens,
        size,
        0 if scales is None else scales.data_ptr(),
        dim,
        int(smallest),
        tokens,
        by_channel,
        *steps,
    ]
    return Side(pools, arrays, np.array(told, np.int64), (four, scales))


@cache
def scale_table(code: str) -> torch.Tensor:
    """The scale that every byte stands for."""
    return scale_values(torch.arange(256, dtype=torch.uint8)[:, None], code).contiguous()


CHECKED = (
    ("int8_row", "int8_row"),
    ("fp8_row", "fp8_row"),
    ("mxfp8", "mxfp8"),
    ("nf4_b64", "nf4_b64"),
    ("int4_g32", "int4_g32"),
    ("int4_ch32", "int4_ch32"),
    ("int4_ch32", "int4_g32"),
    ("mxfp4", "int4_ch32"),
    ("fp32", "bf16"),
    ("bf16", "fp32"),
)
"""Keys and values that show a function right: every kind, with and without scales of groups and offsets, every loop."""


def _right(run: Lanes) -> bool:
    """Whether a function attends as NumPy does: to rows of every kind."""
    return all(_agrees(run, *formats) for formats in CHECKED)


def _agrees(run: Lanes, *formats: str) -> bool:
    """Whether it does of two heads: a request of two runs, and one of few rows, whose numbers all count."""
    random, (heads, group, dim, rows) = np.random.default_rng(0), (2, 3, 64, 160)
    tokens = max(FORMATS[name].tokens for name in formats)
    # Runs of tokens that are coded together begin and end with eight.
    seen = [[(3, 70), (80, 21)], [(77, 1)]] if tokens == 1 else [[(40, 72), (128, 32)], [(16, 8)]]
    runs = np.array([(0, *each) for some in seen for each in some], np.int64)
    of_request = np.array([0, 2, 3], np.int64)
    sides, decoded = zip(*(_drawn(random, name, tokens, (heads, rows, dim)) for name in formats), strict=True)
    query = random.standard_normal((len(seen), heads, group, dim), np.float32)
    out, logs = np.zeros_like(query), np.zeros((2, *query.shape[:3]), np.float32)
    greatest, total = logs[0], logs[1]
    told = [each.ctypes.data for each in (*(side.numbers for side in sides), runs, of_request)]
    gives = [each.ctypes.data for each in (out, greatest, total)]
    run(query.ctypes.data, heads, group, 0.25, *told, 0, len(seen) * heads, *gives)
    for request, some in enumerate(seen):
        numbers = [row for first, count in some for row in range(first, first + count)]
        keys, values = (each[:, numbers] for each in decoded)
        logits = 0.25 * query[request] @ keys.swapaxes(1, 2)
        most = logits.max(axis=2)
        weights = np.exp(logits - most[..., None])
        sums = weights.sum(axis=2)
        with np.errstate(all="ignore"):
            found = total[request] * np.exp(greatest[request] - most)
        expected = weights @ values / sums[..., None]
        if not (np.allclose(out[request], expected, 1e-5, 2e-6) and np.allclose(found, sums, 1e-5)):
            return False
    return True


def _drawn(random: np.random.Generator, name: str, tokens: int, shape: tuple[int, int, int]) -> tuple[Side, Any]:
    """Rows of a format, as canonical ones lie, and what they decode to: float64 [heads, rows, dim]."""
    (heads, rows, dim), format = shape, FORMATS[name].for_dim(shape[2] * tokens)
    drawn = random.standard_normal((rows // tokens * heads, dim * tokens), np.float32)
    # Of many exponents, so that the smallest codes are among them.
    stored = encode(format, torch.from_numpy(drawn * np.exp2(random.uniform(-14, 0, drawn.shape), dtype=np.float32)))
    steps = 0, heads * format.row, format.row
    numbers = {field.name: (stored.data_ptr() + format.byte_range(field.name)[0], *steps) for field in format.fields}
    values = decode(format, stored).double().numpy()
    if format.tokens > 1:
        values = values.reshape(-1, heads, dim, tokens).transpose(1, 0, 3, 2)
    else:
        values = values.reshape(-1, heads, tokens, dim).transpose(1, 0, 2, 3)
    return _side_at(format, tokens, numbers, stored, (stored,)), values.reshape(shape)


native = Native(_right, "attend")
