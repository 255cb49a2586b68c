"""Indexer scores from encoded keys: one program takes one query's heads and a run of its request's keys.

A product of keys [n, dim] with all heads of the query, negative products dropped, the others summed with the heads'
weights. A key's scale is positive and comes last, where the format has but one or where scales are powers of two.
Queries of e4m3 multiply such keys as they are stored, where the format has one scale a key: nothing is decoded.

Map: ``ScoreParts`` .. ``score_tiles`` cut a call into programs; the kernels are behind them.
"""

from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvcore.kernels.triton.address import locate
from kvcore.kernels.triton.chunks import decode_chunk, load_row, load_scales, row_pointers
from kvcore.kernels.triton.codes import bf16_bits, e8m0_value, load_float
from kvcore.kernels.triton.device import INTERPRETED
from kvcore.kernels.triton.record import RowRecord, ceil_div, power_of_two, power_of_two_scaled
from kvcore.kernels.triton.rows import channels, element_offsets, hadamard, scale_value
from kvcore.kernels.triton.topk import LOWEST, order_of, pair_of, store_sorted, truncate_list
from kvcore.ops.choices import Declined


class ScoreParts(NamedTuple):
    """How a key is cut for the product; see ``attention.Parts``."""

    dim: int
    chunk: int
    chunks: int
    full: bool
    apart: bool


class ScoreConfig(NamedTuple):
    """Keys of a tile, warps, the depth of the pipeline, and whether units are looked up a tile ahead of their keys."""

    keys: int
    warps: int
    stages: int
    ahead: bool


CUTS = {
    "nibbles": (ScoreConfig(128, 4, 1, True),) * 3,
    "codes": (ScoreConfig(128, 4, 2, False), ScoreConfig(128, 4, 3, True), ScoreConfig(256, 4, 3, True)),
    "decoded": (ScoreConfig(64, 4, 3, True),) * 3,
}
"""By what the products take of a key (nibbles spread to bf16, its e4m3 codes as they are, else its decoded values), and
by ``size_of`` a call."""
SIZES = 1 << 19, 1 << 22
"""Scores of a call below which it is small, and middling: then more programs are worth more than larger ones."""
HOPPER_KEYS, HOPPER_DIM, HOPPER_HEADS = 64, 128, 128
"""Keys of a tile of the kernel for Hopper, channels of a key, and the most heads: their products fill 64 registers."""
HOPPER_PROGRAMS, HOPPER_TILES = 4, 64
"""Its programs that share a multiprocessor, and the most tiles of one."""
EXACT_SUMS = tl.constexpr(32)
"""Channels that tensor cores may sum of e4m3 products before fp32 takes over: their own sums keep about 14 bits."""


@cache
def score_parts(record: RowRecord) -> ScoreParts | None:
    """How keys are cut; None where ``scored`` declines."""
    found = scored(record)
    return None if isinstance(found, Declined) else found


@cache
def scored(record: RowRecord) -> ScoreParts | Declined:
    """How keys are cut, or why the kernel does not cover them: codes are bf16 numbers, scales apart or exact."""
    chunk = min(64, power_of_two(record.dim))
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    scaled = record.code in ("e4m3", "e2m1", "int8") and (
        record.groups == 1 or power_of_two_scaled(record) or (record.code, record.scale) == ("e2m1", "e4m3")
    )
    exact = (scaled or not record.quant) and record.plain in ("", "bf16")
    if chunk < 16:
        return Declined(f"scores need keys of more than 8 channels, these have {record.dim}")
    if not whole or record.heads != 1:
        return Declined("scores need keys of one head whose groups divide, or are divided by, 64 channels")
    if not exact:
        return Declined(f"scores need keys that are bf16 numbers; {record.code or record.plain} with its scales is not")
    return ScoreParts(record.dim, chunk, ceil_div(record.dim, chunk), INTERPRETED, True)


@cache
def nibbles(record: RowRecord) -> bool:
    """Four power-of-two scales in a word, sixteen bytes of codes each."""
    words = all(number % 4 == 0 for number in (record.scales_unit, record.scales_base, record.scales_stride))
    return (record.code, record.scale, record.groups, record.width) == ("e2m1", "e8m0", 4, 32) and words


@cache
def takes_codes(record: RowRecord) -> bool:
    """True where queries of e4m3 multiply keys as they are stored: e4m3 with one scale, channels of one product."""
    one = (
        record.groups == 1 and record.quant == record.dim == power_of_two(record.dim) and record.dim >= EXACT_SUMS.value
    )
    return one and record.code == "e4m3" and not record.hadamard


def size_of(scores: int) -> int:
    """0 to 2: how large a call for so many scores is."""
    return sum(scores >= size for size in SIZES)


def score_config(
    record: RowRecord, heads: int, native: bool, codes: bool, size: int
) -> tuple[ScoreConfig, dict[str, Any]]:
    """The cut of a record's keys, and what the kernels must know of it.

    Args:
        codes: queries are e4m3.
        size: of the call, as ``size_of`` says.
    """
    taken = "nibbles" if nibbles(record) and native else "codes" if codes else "decoded"
    config, parts = CUTS[taken][size], score_parts(record)
    if codes:
        parts = parts._replace(chunk=record.dim, chunks=1)
    return config, {
        "R": record, "S": parts, "HEADS": max(16, power_of_two(heads)), "KEYS": config.keys,
        "STAGES": config.stages, "AHEAD": config.ahead, "TAKEN": taken, "NATIVE": native,
    }  # fmt: skip


def score_tiles(multiprocessors: int, tokens: int, columns: int, keys: int) -> int:
    """Tiles of a program: enough programs to fill the GPU a few times; beyond that longer runs load queries once."""
    most = ceil_div(columns, keys)
    return power_of_two(max(1, min(64, most * tokens // (8 * multiprocessors))))


@cache
def hopper_takes(record: RowRecord, heads: int) -> str:
    """What the kernel for Hopper takes of keys for queries in bf16 or e4m3; "" where it does not cover them."""
    aligned = all(number % 16 == 0 for number in (record.codes_unit, record.codes_base, record.codes_stride))
    words = all(number % 4 == 0 for number in (record.scales_unit, record.scales_base, record.scales_stride))
    if record.dim != HOPPER_DIM or record.quant != HOPPER_DIM or heads > HOPPER_HEADS or not record.paged:
        return ""
    if not aligned or not words or record.global_scale != 1:
        return ""
    codes = (record.code, record.scale, record.groups) == ("e4m3", "fp32", 1)
    return "nibbles" if nibbles(record) else "codes" if codes else ""


def hopper_tiles(multiprocessors: int, groups: int, columns: int, waves: int) -> int:
    """Tiles of a program: so many times as many programs as run at once; longer runs load queries once."""
    most = ceil_div(columns, HOPPER_KEYS)
    return power_of_two(max(1, min(HOPPER_TILES, most * groups // (waves * HOPPER_PROGRAMS * multiprocessors))))


@cache
def fitted_tiles(programs: int, tokens: int, columns: int) -> int:
    """Tiles of a program where ``programs`` run at once, such that the last wave of them is full, too."""
    most = ceil_div(columns, HOPPER_KEYS)
    runs = {wave: min(most, max(1, wave * programs // tokens)) for wave in range(1, 9)}
    # What a program does before its first tile takes as long as two of them.
    cuts = {wave: ceil_div(most, each) for wave, each in runs.items()}
    return min((ceil_div(tokens * runs[wave], programs) * (tiles + 2), tiles) for wave, tiles in cuts.items())[1]


@triton.jit(do_not_specialize=["count"])
def rotate_kernel(out_ptr, q_ptr, count, R: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """Queries [count, dim] rotated as rotated keys were, rounded to bf16."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (row.to(tl.int64) * R.dim)[:, None, None] + channels(R)
    keep = (row < count)[:, None, None] & (channels(R) < R.dim)
    x = hadamard(load_float(q_ptr + at, keep), R, NATIVE)
    tl.store(out_ptr.to(tl.pointer_type(tl.int16)) + at, bf16_bits(x, NATIVE).to(tl.int16), mask=keep)


@triton.jit
def spread_nibbles(byte, factor):
    """Bytes of two e2m1 codes [n, w] -> (low, high) codes times ``factor`` / 2^126, bf16 [n, w].

    A code's magnitude bits, placed in a bf16 number, are its value times 2^-126.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, t, u, z;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shl.b32 t, a, 12;
        and.b32 t, t, 0x80008000;
        shl.b32 u, a, 6;
        lop3.b32 u, u, 0x01C001C0, t, 0xEA;
        fma.rn.bf16x2 $0, u, $5, z;
        shl.b32 t, b, 12;
        and.b32 t, t, 0x80008000;
        shl.b32 u, b, 6;
        lop3.b32 u, u, 0x01C001C0, t, 0xEA;
        fma.rn.bf16x2 $1, u, $6, z;
        shl.b32 t, a, 8;
        and.b32 t, t, 0x80008000;
        shl.b32 u, a, 2;
        lop3.b32 u, u, 0x01C001C0, t, 0xEA;
        fma.rn.bf16x2 $2, u, $5, z;
        shl.b32 t, b, 8;
        and.b32 t, t, 0x80008000;
        shl.b32 u, b, 2;
        lop3.b32 u, u, 0x01C001C0, t, 0xEA;
        fma.rn.bf16x2 $3, u, $6, z;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [byte, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def load_nibbles(unit, row, valid, codes_ptr, scales_ptr, R: tl.constexpr):
    """(low, high nibbles' values over the key's largest scale [n, dim / 2] bf16, that scale [n] fp32)."""
    column = tl.arange(0, R.dim // 2)[None, :]
    at = element_offsets(unit, row, R.codes_unit, R.codes_base, R.codes_stride, 1)[:, None]
    byte = tl.load(codes_ptr + at + column, mask=valid[:, None], other=0)
    at = element_offsets(unit, row, R.scales_unit, R.scales_base, R.scales_stride, 4)
    # A key's four scales are one word.
    scales = tl.load(scales_ptr.to(tl.pointer_type(tl.int32)) + at, mask=valid, other=0)
    largest = tl.maximum(
        tl.maximum(scales & 0xFF, (scales >> 8) & 0xFF), tl.maximum((scales >> 16) & 0xFF, (scales >> 24) & 0xFF)
    )
    exponent = (scales[:, None] >> (column // 16 * 8)) & 0xFF
    factor = tl.maximum(253 + exponent - largest[:, None], 0) << 7
    low, high = spread_nibbles(byte, factor.to(tl.int16).to(tl.bfloat16, bitcast=True))
    return low, high, e8m0_value(largest)


@triton.jit
def load_queries(q_at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, TAKEN: tl.constexpr):
    """Channels FIRST .. FIRST + WIDTH of queries at ``q_at`` [heads]: [heads, WIDTH], as the products take them."""
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    x = tl.load(q_at[:, None] + channel, mask=inside[:, None] & (channel < S.dim), other=0.0)
    if S.full:
        x = x.to(tl.float32)
    elif TAKEN != "codes" and x.dtype == tl.float8e4nv:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def product(k, q, acc, S: tl.constexpr):
    """Acc + k [n, width] · q [heads, width] transposed; fp32 queries as a sum of three bf16 numbers."""
    if S.full or q.dtype == tl.bfloat16:
        acc = tl.dot(k, tl.trans(q), acc, input_precision="ieee")
    else:
        high = q.to(tl.bfloat16)
        rest = q - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(k, tl.trans(high), acc)
        acc = tl.dot(k, tl.trans(middle), acc)
        acc = tl.dot(k, tl.trans(low), acc)
    return acc


@triton.jit
def query_of(
    token, position_ptr, request_ptr, q_ptr, weights_ptr, heads,
    R: tl.constexpr, S: tl.constexpr, RATIO: tl.constexpr, HEADS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """(request, entries that are visible, head weights [HEADS], queries as the products take them) of a token."""
    request = tl.load(request_ptr + token)
    position = tl.where(request >= 0, tl.load(position_ptr + token), -1)
    head = tl.arange(0, HEADS)
    inside = head < heads
    weight = load_float(weights_ptr + token.to(tl.int64) * heads + head, inside)
    q_at = q_ptr + (token.to(tl.int64) * heads + head) * S.dim
    chunks: tl.constexpr = S.chunks
    q = ()
    if TAKEN == "nibbles":
        whole = load_queries(q_at, inside, 0, R.dim, S, TAKEN)
        even, odd = tl.split(tl.reshape(whole, (HEADS, R.dim // 2, 2)))
        q = (even, odd)
    else:
        for c in tl.static_range(chunks):
            q = q + (load_queries(q_at, inside, c * S.chunk, S.chunk, S, TAKEN),)
    return tl.maximum(request, 0), (position + 1) // RATIO, weight, q


@triton.jit
def unit_of(request, column, visible, table_ptr, table_columns, R: tl.constexpr):
    """Units [n] of a request's entries ``column`` [n], -1 where there is none or it is not visible."""
    each = tl.zeros_like(column) + request
    return locate(each, tl.where(column < visible, column, -1), table_ptr, table_ptr, table_columns, R)[0]


@triton.jit
def score_keys(
    unit, column, visible, q, weight, codes_ptr, scales_ptr, plain_ptr,
    R: tl.constexpr, S: tl.constexpr, TAKEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Scores [n] of entries ``column`` [n] in ``unit`` [n]; numbers for those of no unit, -inf from ``visible`` on."""
    keys: tl.constexpr = column.shape[0]
    heads: tl.constexpr = weight.shape[0]
    chunks: tl.constexpr = S.chunks
    held = unit >= 0
    unit, row = tl.where(held, unit, 0), tl.where(held, column % R.rows, 0)
    acc = tl.zeros([keys, heads], tl.float32)
    if TAKEN == "nibbles":
        low, high, scale = load_nibbles(unit, row, held, codes_ptr, scales_ptr, R)
        acc = product(low, q[0], acc, S)
        acc = product(high, q[1], acc, S)
        score = tl.sum(tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :], axis=1) * scale
    elif TAKEN == "codes":
        codes_at, scales_at, _ = row_pointers(unit, row, codes_ptr, scales_ptr, plain_ptr, R)
        codes_at = codes_at.to(tl.pointer_type(tl.float8e4nv))[:, None] + tl.arange(0, R.dim)[None, :]
        codes = tl.load(codes_at, mask=held[:, None], other=0.0)
        scale = scale_value(load_scales((codes_at, scales_at, codes_at), held, R)[0], R, NATIVE)
        acc = tl.dot(codes, tl.trans(q[0]), acc, max_num_imprecise_acc=EXACT_SUMS)
        score = tl.sum(tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :], axis=1) * scale
    else:
        at = row_pointers(unit, row, codes_ptr, scales_ptr, plain_ptr, R)
        raw, scales = load_row(at, held, R, S)
        for c in tl.static_range(chunks):
            acc = product(decode_chunk(raw[c], scales, held, c * S.chunk, R, S, NATIVE), q[c], acc, S)
        score = tl.sum(tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :], axis=1)
        if R.groups == 1:
            score *= scale_value(scales[0], R, NATIVE)
        score *= R.global_scale
    return tl.where(column < visible, score, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "columns", "table_columns"])
def scores_kernel(
    out_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr, request_ptr, table_ptr,
    tokens, heads, columns, table_columns,
    R: tl.constexpr, S: tl.constexpr, RATIO: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, TAKEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Scores of the first ``columns`` entries -> out [tokens, columns], -inf where not visible."""
    token = tl.program_id(0) % tokens
    run = tl.program_id(0) // tokens * (KEYS * TILES)
    request, visible, weight, q = query_of(
        token, positions_ptr, request_ptr, q_ptr, weights_ptr, heads, R, S, RATIO, HEADS, TAKEN
    )
    visible = tl.minimum(visible, columns)
    out_at = out_ptr + token.to(tl.int64) * columns + run
    n = tl.arange(0, KEYS)
    tiles = tl.maximum(tl.cdiv(tl.minimum(visible - run, KEYS * TILES), KEYS), 0)
    # Units are looked up a tile ahead of their keys: loads of keys then wait for nothing.
    unit = unit_of(request, run + n, visible, table_ptr, table_columns, R)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        column = run + tile * KEYS + n
        if AHEAD:
            following = unit_of(request, column + KEYS, visible, table_ptr, table_columns, R)
        else:
            unit = unit_of(request, column, visible, table_ptr, table_columns, R)
        score = score_keys(unit, column, visible, q, weight, codes_ptr, scales_ptr, plain_ptr, R, S, TAKEN, NATIVE)
        if AHEAD:
            unit = following
        tl.store(out_at + tile * KEYS + n, score, mask=column < columns)
    # The rest of the run is not visible.
    for tile in range(tiles, TILES):
        column = run + tile * KEYS + n
        tl.store(out_at + tile * KEYS + n, tl.full([KEYS], float("-inf"), tl.float32), mask=column < columns)


@triton.jit
def best_of_run(
    list_ptr, scores_ptr, floor_ptr, request, begin, last, k, most, q, weight, codes_ptr, scales_ptr, plain_ptr,
    table_ptr, table_columns,
    R: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, ROUND: tl.constexpr, ROOM: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, TAKEN: tl.constexpr, NATIVE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """List the best k and some more of a request's entries from ``begin`` to before ``last``: (bound, count).

    It goes through them in column order, a ROUND of keys at a time, whose scores are kept. Those above a bound, at
    first all, are added to the list; before that might not take another round it is cut to its best, which raises the
    bound. SHARED: what no other program of the query could use any more is not listed either: the floor is the highest
    bound yet, less one, since equal scores of another run may come first.
    """
    bound = tl.full([], LOWEST, tl.int32)
    count = tl.full([], 0, tl.int32)
    n = tl.arange(0, KEYS)
    every = tl.arange(0, ROUND)
    for first in range(begin, last, ROUND):
        unit = unit_of(request, first + n, last, table_ptr, table_columns, R)
        for tile in tl.range(0, tl.cdiv(tl.minimum(last - first, ROUND), KEYS), num_stages=STAGES):
            column = first + tile * KEYS + n
            if AHEAD:
                following = unit_of(request, column + KEYS, last, table_ptr, table_columns, R)
            else:
                unit = unit_of(request, column, last, table_ptr, table_columns, R)
            score = score_keys(unit, column, last, q, weight, codes_ptr, scales_ptr, plain_ptr, R, S, TAKEN, NATIVE)
            if AHEAD:
                unit = following
            tl.store(scores_ptr + tile * KEYS + n, score)
        tl.debug_barrier()
        order = order_of(tl.load(scores_ptr + every, mask=first + every < last, other=float("-inf")))
        floor = bound
        if SHARED:
            floor = tl.maximum(bound, tl.load(floor_ptr, volatile=True))
        kept = (order > floor).to(tl.int32)
        at = count + tl.cumsum(kept, axis=0) - kept
        tl.store(list_ptr + at, pair_of(order, first + every), mask=kept == 1)
        count += tl.sum(kept, axis=0)
        tl.debug_barrier()
        if count > ROOM - ROUND:
            bound, count = truncate_list(list_ptr, count, bound, k, most, ROOM)
            if SHARED:
                tl.atomic_max(floor_ptr, bound - 1, sem="relaxed")
            tl.debug_barrier()
    return bound, count


@triton.jit(do_not_specialize=["tokens", "parts", "columns", "table_columns", "run", "k", "most"])
def best_scores_kernel(
    pairs_ptr, counts_ptr, scores_ptr, floors_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr,
    request_ptr, table_ptr, tokens, heads, parts, columns, table_columns, run, k, most,
    R: tl.constexpr, S: tl.constexpr, RATIO: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    ROUND: tl.constexpr, ROOM: tl.constexpr, KEPT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    TAKEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """KEPT of every ``run`` entries, the best k among them -> pairs [tokens, parts, ROOM]; counts [tokens, parts].

    Scores of a round are kept [programs, ROUND], floors of queries [tokens]: see ``best_of_run``. They decide how long
    lists become, never what is selected in the end.
    """
    token, part = tl.program_id(0) % tokens, tl.program_id(0) // tokens
    request, visible, weight, q = query_of(
        token, positions_ptr, request_ptr, q_ptr, weights_ptr, heads, R, S, RATIO, HEADS, TAKEN
    )
    # Tables may be far wider than this request: its own entries are what the programs share.
    share = tl.cdiv(tl.cdiv(tl.minimum(visible, columns), parts), KEYS) * KEYS
    run = tl.minimum(run, tl.maximum(share, ROUND))
    last = tl.minimum(tl.minimum(visible, columns), part * run + run)
    place = token.to(tl.int64) * parts + part
    list_ptr = pairs_ptr + place * ROOM
    bound, count = best_of_run(
        list_ptr, scores_ptr + place * ROUND, floors_ptr + token, request, part * run, last, k, most, q, weight,
        codes_ptr, scales_ptr, plain_ptr, table_ptr, table_columns, R, S, KEYS, ROUND, ROOM, STAGES, AHEAD, TAKEN,
        NATIVE, True,
    )  # fmt: skip
    if count > KEPT:
        bound, count = truncate_list(list_ptr, count, bound, k, k, ROOM)
    tl.store(counts_ptr + place, count)


@triton.jit(do_not_specialize=["columns", "table_columns", "least", "k", "most"])
def long_scores_kernel(
    indices_ptr, pairs_ptr, scores_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr,
    request_ptr, table_ptr, heads, columns, table_columns, least, k, most,
    R: tl.constexpr, S: tl.constexpr, RATIO: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    ROUND: tl.constexpr, ROOM: tl.constexpr, KEPT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    TAKEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The best k <= KEPT of a query that sees more than ``least`` entries -> indices [tokens, k], one program each.

    Others' indices stay as they are. Lists are pairs [tokens, ROOM], scores of a round [tokens, ROUND].
    """
    token = tl.program_id(0)
    position = tl.where(tl.load(request_ptr + token) >= 0, tl.load(positions_ptr + token), -1)
    if (position + 1) // RATIO > least:
        request, visible, weight, q = query_of(
            token, positions_ptr, request_ptr, q_ptr, weights_ptr, heads, R, S, RATIO, HEADS, TAKEN
        )
        place = token.to(tl.int64)
        list_ptr, last = pairs_ptr + place * ROOM, tl.minimum(visible, columns)
        bound, count = best_of_run(
            list_ptr, scores_ptr + place * ROUND, scores_ptr, request, 0, last, k, most, q, weight, codes_ptr,
            scales_ptr, plain_ptr, table_ptr, table_columns, R, S, KEYS, ROUND, ROOM, STAGES, AHEAD, TAKEN, NATIVE,
            False,
        )  # fmt: skip
        if count > KEPT:
            bound, count = truncate_list(list_ptr, count, bound, k, k, ROOM)
        tl.debug_barrier()
        store_sorted(indices_ptr + place * k, list_ptr, count, k, KEPT)
