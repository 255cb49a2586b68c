"""Attention of classic layers from encoded rows: keys and values, each in its own format, read where they lie.

One program takes the query heads that share a key head and a value head, for one token or for some neighbours of one
request, over some of their keys: these are the rows of both products. Exponentials are to the base 2. A row's only
scale is applied to its logit, or to its weight, instead of to every channel.

Map:
    ``Side`` .. ``whole_tiles``: how a call is cut: how keys and values are multiplied, what a program takes, how many
        share keys.
    .. ``take_tiles``: tiles of keys and values taken into a running softmax, decoded in registers, as ``words`` and
        ``chunks`` say.
    .. ``attend_kv_kernel``: queries, splits, outputs; ``attend.merge_kernel`` puts splits together.
"""

from collections.abc import Sequence
from functools import cache
from math import lcm
from typing import NamedTuple

import triton
import triton.language as tl

from kvcore.kernels.triton.chunks import row_pointers
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.device import INTERPRETED, LARGE, DeviceProps
from kvcore.kernels.triton.record import RowRecord, aligned, ceil_div, own_record, power_of_two
from kvcore.kernels.triton.rows import scale_value
from kvcore.kernels.triton.softmax import beside_sink, weigh
from kvcore.kernels.triton.words import load_packed, unpack_chunk
from kvcore.ops.choices import Declined
from kvcore.spec import Format

MOST_SPLITS = 128
MOST_ROWS = 64
"""Rows of the products: query heads of one group, times tokens."""
MOST_TOKENS = 8
"""Tokens that a program takes."""
START = 192
"""What a program costs before and after its keys, in keys."""


class Side(NamedTuple):
    """How rows of keys, or of values, are multiplied.

    Attributes:
        chunk: channels taken at a time, a power of two; ``chunks`` of them make a row.
        full: operands are fp32 and products as ``precision`` says; else they are bf16 and sums fp32.
        narrow: operands are bf16 numbers, whatever they are held in.
        apart: a chunk's only scale is not part of its operand.
        parts: tensors that a chunk is taken apart into, channel k into the one of k mod parts, by ``words``; or 1.
        twice: these have two halves that add up.
        precision: of fp32 products, in Triton's words.
    """

    chunk: int
    chunks: int
    full: bool
    narrow: bool
    apart: bool
    parts: int
    twice: bool
    precision: str


class TileConfig(NamedTuple):
    """What a program takes: keys a tile; its warps; the depth of the pipeline that loads rows.

    ``resident``: programs that a multiprocessor is to hold at once.
    """

    keys: int
    warps: int
    stages: int
    resident: int


NARROW = {80: TileConfig(64, 4, 2, 3), 90: TileConfig(64, 4, 3, 3), 100: TileConfig(64, 4, 3, 3)}
"""By compute capability: the newest that is not above the device's; for keys and values of up to WIDE channels."""
APART = {4: TileConfig(64, 2, 3, 4), 8: TileConfig(32, 1, 3, 8)}
"""By the parts that codes are taken apart into: these are narrow, and several warps would do the same work."""
FULL = TileConfig(32, 4, 1, 2)
"""For fp32 products."""
WIDE = 256


@cache
def sides_of(
    keys: RowRecord, values: RowRecord, own: tuple[RowRecord, RowRecord] | None, *, bf16: bool, native: bool
) -> tuple[Side, Side] | None:
    """How keys and values are multiplied, for queries in bf16 or not; None where ``multiplied`` declines."""
    found = multiplied(keys, values, own, bf16=bf16, native=native)
    return None if isinstance(found, Declined) else found


def multiplied(
    keys: RowRecord, values: RowRecord, own: tuple[RowRecord, RowRecord] | None, *, bf16: bool, native: bool
) -> tuple[Side, Side] | Declined:
    """How keys and values are multiplied, for queries in bf16 or not, or why the kernel does not cover them."""
    if (keys.rows, keys.paged) != (values.rows, values.paged):
        return Declined("units hold other numbers of keys than of values")
    own_keys, own_values = own or (keys, values)
    key_side = _side(keys, own_keys, bf16=bf16, native=native, values=False)
    value_side = _side(values, own_values, bf16=bf16, native=native, values=True)
    if isinstance(key_side, Declined) or isinstance(value_side, Declined):
        return key_side if isinstance(key_side, Declined) else value_side  # type: ignore[return-value]
    return key_side, value_side


@cache
def _side(record: RowRecord, own: RowRecord, *, bf16: bool, native: bool, values: bool) -> Side | Declined:
    chunk = record.dim & -record.dim
    if chunk < 32 and not record.quant:
        chunk = power_of_two(record.dim)
    chunk = min(128, max(chunk, 16))
    words = bf16 and native and record.quant == record.dim and _in_words(record) and _in_words(own)
    parts = {"int8": 4, "e4m3": 4, "e2m1": 8, "nf4": 8}.get(record.code, 1) if words else 1
    if parts > 1 and record.code == "nf4":
        chunk = min(chunk, record.width)
    # A chunk must not lie in two fields, nor in parts of two groups.
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    if not whole:
        return Declined(f"a chunk of {chunk} channels would lie in two fields, or in parts of two groups")
    if record.hadamard or record.global_scale != 1.0:
        return Declined("attention covers rows that are neither rotated nor under a global scale")
    apart = record.groups == 1 and record.quant == record.dim and record.scale == "fp32"
    twice = parts > 1 and record.code == "nf4" and not values
    # Products take 16 channels at least.
    if chunk // parts * (2 if twice else 1) < (8 if values else 16) or (parts == 4 and not apart):
        parts, twice = 1, False
    # Codes of one byte are bf16 numbers; so are values whose scales are powers of two, and bf16 rows.
    narrow = bf16 and (parts > 1 or record.exact or (apart and record.code in ("e4m3", "int8")))
    precision = "tf32x3"
    if bf16 and record.plain == "fp16" and not record.quant:
        # Both operands are tf32 numbers, or as values of a bf16 result need not be more.
        precision = "tf32"
    elif bf16 and values:
        # NF4 levels are rounded as the weights are; fp32 values keep more.
        narrow, precision = narrow or bool(record.quant), "tf32"
    chunks = ceil_div(record.dim, chunk)
    apart = apart or (parts > 1 and record.code == "nf4")
    return Side(chunk, chunks, INTERPRETED or not narrow, narrow, apart, parts, twice, precision)


def _in_words(record: RowRecord) -> bool:
    return all(number % 4 == 0 for number in (record.codes_unit, record.codes_base, record.codes_stride))


def own_records(
    keys: RowRecord, values: RowRecord, formats: Sequence[Format]
) -> tuple[RowRecord, RowRecord] | Declined:
    """The records of canonical rows [tokens, heads, row_bytes] of keys and values, or that they are not aligned."""
    found = [own_record(record, format) for record, format in zip((keys, values), formats, strict=True)]
    if all(aligned(record) for record in found):
        return found[0], found[1]
    return Declined("canonical rows have elements off their own alignment")


def config_for(props: DeviceProps, sides: tuple[Side, Side]) -> TileConfig:
    """The cut for a GPU."""
    return FULL if INTERPRETED else config_of(props.capability, sides, few=props.shared < LARGE)


def config_of(capability: int, sides: tuple[Side, Side], *, few: bool = False) -> TileConfig:
    """The cut for a compute capability, with ``few`` for blocks with less than LARGE bytes of shared memory."""
    keys, values = sides
    config = NARROW[max([80, *(known for known in NARROW if known <= capability)])]
    config = APART.get(max(keys.parts, values.parts), config)
    if keys.full or values.full:
        config = FULL
    channels = power_of_two(keys.chunk * keys.chunks + values.chunk * values.chunks)
    tile = max(16, (config.keys >> few) // max(1, channels // WIDE))
    return config._replace(keys=tile, stages=min(config.stages, 2) if few else config.stages)


class Work(NamedTuple):
    """How a step is shared out.

    Attributes:
        groups: groups of query heads that share a key head and a value head.
        heads: heads of a group that a program takes, a power of two.
        each: tokens that a program takes.
        programs: programs without splits.
    """

    groups: int
    heads: int
    each: int
    programs: int


@cache
def work_for(tokens: int, requests: int, heads: int, key_heads: int, value_heads: int) -> Work:
    """The work of a step of ``tokens`` tokens, which as a rule are shared out evenly among ``requests`` requests."""
    groups = lcm(key_heads, value_heads)
    size = heads // groups
    some = min(power_of_two(size), MOST_ROWS)
    room = MOST_ROWS // some
    each = max(1, min(ceil_div(tokens, max(requests, 1)), MOST_TOKENS, room)) if room >= span_of(2) else 1
    return Work(groups, some, each, ceil_div(tokens, each) * groups * ceil_div(size, some))


def span_of(each: int) -> int:
    """Tokens that a program has room for: few numbers, since each is compiled."""
    return 1 if each == 1 else max(4, power_of_two(each))


@cache
def splits_for(props: DeviceProps, programs: int, keys: int, config: TileConfig, uneven: float = 0.0) -> int:
    """Programs that share a group's keys, of which there are at most ``keys``: as many as end the soonest.

    ``uneven``: how much later than all others the last one ends, as a part of what one takes.
    """
    slots, tiles = config.resident * props.multiprocessors, max(1, ceil_div(keys, config.keys))
    best, least = 1, 0.0
    for splits in range(1, min(MOST_SPLITS, tiles) + 1):
        # What a program takes and what it costs, so many times in turn; then the parts are merged.
        turn = ceil_div(tiles, splits) * config.keys + START
        time = (ceil_div(programs * splits, slots) + uneven) * turn + splits
        if splits == 1 or time < least:
            best, least = splits, time
    return best


def whole_tiles(record: RowRecord, config: TileConfig) -> bool:
    """True if tiles that begin at multiples of their size lie in one block each."""
    return record.paged and record.rows % config.keys == 0


@triton.jit
def unit_of(
    first, least, most, request, slot, table_ptr, table_columns,
    K: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Unit of the KEYS rows from position ``first`` on, -1 where there is none; one number if a tile lies in one unit.

    Where it does not (blocks smaller than a tile), every unit is looked up SPREAD times, by as many threads, and then
    handed around: else the compiler would look it up anew for every layout that it is used in.
    """
    if OWN:
        unit = slot * 0
    elif not K.paged:
        unit = slot
    elif WHOLE:
        column = first // K.rows
        there = (first <= most) & (column < table_columns)
        unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=there, other=-1)
    else:
        number = first + tl.arange(0, KEYS)[:, None] + tl.zeros([1, SPREAD], tl.int32)
        column = number // K.rows
        there = (number >= least) & (number <= most) & (column < table_columns)
        at = table_ptr + request.to(tl.int64) * table_columns + column
        unit = tl.max(tl.load(at, mask=there, other=-1), axis=1)
    return unit


@triton.jit
def take_tiles(
    first, last, turn, jump, q, scale, largest, total, out, lines, base, least, most, place, pools,
    K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    PARTLY: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Take tiles ``first`` .. ``last`` - 1 of KEYS positions into the running softmax: (largest, total, out).

    From tile ``turn`` on ``jump`` tiles are left out. PARTLY: a row of the products may not see all keys of a tile. It
    then must not meet what it does not see, which may be NaN: each token has a product of its own. ``lines`` are the
    rows of the products; ``place`` is where the request's rows lie, and ``pools`` the pointers to keys and values.
    """
    member, position, earliest, mine = lines
    request, slot, shift, key_head, value_head, table_ptr, table_columns = place
    key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr = pools
    rows: tl.constexpr = position.shape[0]
    unit = unit_of(
        base + (first + tl.where(first >= turn, jump, 0)) * KEYS, least, most, request, slot, table_ptr, table_columns,
        K, KEYS, OWN, WHOLE, SPREAD,
    )  # fmt: skip
    for step in tl.range(first, last, num_stages=STAGES):
        tile = step + tl.where(step >= turn, jump, 0)
        following = step + 1 + tl.where(step + 1 >= turn, jump, 0)
        # The next tile's unit is found while this one's keys are multiplied.
        next_unit = unit_of(
            base + following * KEYS, least, most, request, slot, table_ptr, table_columns, K, KEYS, OWN, WHOLE, SPREAD
        )
        number = base + tile * KEYS + tl.arange(0, KEYS)
        valid = (number >= least) & (number <= most) & (tl.zeros_like(number) + unit >= 0)
        row = number + shift if OWN else number % K.rows
        there = tl.maximum(unit, 0)
        keys_at = row_pointers(there, row * K.heads + key_head, key_codes_ptr, key_scales_ptr, key_plain_ptr, K)
        values_at = row_pointers(there, row * V.heads + value_head, codes_ptr, scales_ptr, plain_ptr, V)
        raw_keys, key_scales = load_packed(keys_at, valid, K, SK)
        raw_values, value_scales = load_packed(values_at, valid, V, SV)

        logit = tl.zeros([rows, KEYS], tl.float32)
        key_chunks: tl.constexpr = SK.chunks
        key_parts: tl.constexpr = SK.parts
        for c in tl.static_range(key_chunks):
            k = unpack_chunk(raw_keys[c], key_scales, valid, c * SK.chunk, K, SK, True, NATIVE)
            some = logit if K.groups == 1 or not SK.apart else tl.zeros([rows, KEYS], tl.float32)
            for p in tl.static_range(key_parts):
                some = tl.dot(q[c * SK.parts + p], k[p], some, input_precision=SK.precision)
            if SK.apart and K.groups > 1:
                some = logit + some * scale_value(key_scales[c * SK.chunk // K.width], K, NATIVE)[None, :]
            logit = some
        logit *= scale
        if SK.apart and K.groups == 1:
            logit *= scale_value(key_scales[0], K, NATIVE)[None, :]
        seen = valid[None, :]
        if SPAN > 1:
            seen = seen & mine[:, None]
        if PARTLY:
            seen = seen & (number[None, :] <= position[:, None]) & (number[None, :] >= earliest[:, None])
        logit = tl.where(seen, logit, float("-inf"))
        largest, total, weight, kept = weigh(logit, largest, total)
        if SV.apart and V.groups == 1:
            weight *= scale_value(value_scales[0], V, NATIVE)[None, :]
            if SPAN > 1:
                weight = tl.where(seen, weight, 0.0)
        v = ()
        summed = ()
        weights = ()
        value_chunks: tl.constexpr = SV.chunks
        value_parts: tl.constexpr = SV.parts
        for c in tl.static_range(value_chunks):
            v = v + unpack_chunk(raw_values[c], value_scales, valid, c * SV.chunk, V, SV, False, NATIVE)
            w = weight
            if SV.apart and V.groups > 1:
                w *= scale_value(value_scales[c * SV.chunk // V.width], V, NATIVE)[None, :]
                if SPAN > 1:
                    w = tl.where(seen, w, 0.0)
            # Where the result is bf16 so are the weights; their sum is of what they were before.
            if SV.narrow and SV.full:
                w = round_bf16(w, NATIVE)
            elif not SV.full:
                w = w.to(tl.bfloat16)
            for p in tl.static_range(value_parts):
                weights = weights + (w,)
                summed = summed + (out[c * SV.parts + p] * kept[:, None],)
        panels: tl.constexpr = SV.chunks * SV.parts
        if PARTLY:
            for token in range(SPAN):
                its = mine & (member == token)
                until = tl.max(tl.where(its, position, -1), axis=0)
                since = tl.max(tl.where(its, earliest, 0), axis=0)
                met = (number <= until) & (number >= since)
                more = ()
                for p in tl.static_range(panels):
                    met_v = tl.where(met[:, None], v[p], 0.0).to(v[p].dtype)
                    with_it = tl.dot(weights[p], met_v, summed[p], input_precision=SV.precision)
                    more = more + (tl.where(its[:, None], with_it, summed[p]),)
                summed = more
        else:
            more = ()
            for p in tl.static_range(panels):
                more = more + (tl.dot(weights[p], v[p], summed[p], input_precision=SV.precision),)
            summed = more
        out = summed
        unit = next_unit
    return largest, total, out


@triton.jit
def panel_channels(PANEL: tl.constexpr, S: tl.constexpr):
    """Channels of a panel: every ``parts``-th of its chunk, if S.twice once more."""
    width: tl.constexpr = S.chunk // S.parts
    number = tl.arange(0, width * (2 if S.twice else 1)) % width
    return PANEL // S.parts * S.chunk + PANEL % S.parts + S.parts * number


@triton.jit
def first_seen(position, left, window, chunk):
    """First position that the queries at ``position`` see; window and chunk are 0 where they don't apply.

    The first ``left`` positions are no tokens: none is seen, and chunks begin with the first token.
    """
    of_chunk = left + (position - left) // tl.maximum(chunk, 1) * chunk
    return tl.maximum(tl.where(window > 0, position + 1 - window, of_chunk), left)


@triton.jit
def take_rows(
    split, splits, q, scale, largest, total, out, lines, apiece, least, most, place, pools,
    K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    OWN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take this split's share of positions ``least`` .. ``most`` of one request into the running softmax.

    ``apiece``: there are rows of other requests beside it, so that no tile is seen by all.
    """
    _, position, earliest, mine = lines
    # Tiles begin where blocks do, if those are multiples of them.
    base = least // KEYS * KEYS if WHOLE else least
    tiles = tl.cdiv(tl.maximum(most + 1 - base, 0), KEYS)
    each = tl.cdiv(tiles, splits)
    first = tl.minimum(split * each, tiles)
    last = tl.minimum(first + each, tiles)
    if SPAN == 1:
        largest, total, out = take_tiles(
            first, last, last + 1, 0, q, scale, largest, total, out, lines, base, least, most, place, pools,
            K, V, SK, SV, KEYS, SPAN, False, OWN, WHOLE, STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    else:
        since = tl.max(tl.where(mine, earliest, 0), axis=0)
        until = tl.min(tl.where(mine, position, 0x7FFFFFFF), axis=0)
        whole = tl.maximum(tl.cdiv(tl.maximum(since - base, 0), KEYS), first)
        end = tl.minimum(tl.maximum(until + 1 - base, 0) // KEYS, last)
        whole = tl.minimum(whole, last)
        end = tl.where(apiece, whole, tl.maximum(end, whole))
        if OWN:
            # Of the step's own rows there are few: one loop less to compile.
            end = whole
        else:
            largest, total, out = take_tiles(
                whole, end, last + 1, 0, q, scale, largest, total, out, lines, base, least, most, place, pools,
                K, V, SK, SV, KEYS, SPAN, False, OWN, WHOLE, STAGES, SPREAD, NATIVE,
            )  # fmt: skip
        largest, total, out = take_tiles(
            first, last - (end - whole), whole, end - whole, q, scale, largest, total, out, lines, base, least, most,
            place, pools, K, V, SK, SV, KEYS, SPAN, True, OWN, WHOLE, 1, SPREAD, NATIVE,
        )  # fmt: skip
    return largest, total, out


@triton.jit
def take_request(
    split, splits, q, scale, largest, total, out, token, lines, apiece, request, step, heads, pools, own_pools,
    K: tl.constexpr, V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    KEYS: tl.constexpr, SPAN: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take one request's rows, those of the pools, then with OWN the step's own, into the running softmax."""
    _, position, earliest, mine = lines
    slots_ptr, starts_ptr, table_ptr, table_columns = step
    key_head, value_head = heads
    most = tl.max(tl.where(mine, position, -1), axis=0)
    least = tl.min(tl.where(mine, earliest, 0x7FFFFFFF), axis=0)
    least = tl.where(most < 0, 0, least)
    slot = tl.load(slots_ptr + request)
    stored = most
    if OWN:
        start = tl.load(starts_ptr + request)
        stored = tl.minimum(most, start - 1)
    largest, total, out = take_rows(
        split, splits, q, scale, largest, total, out, lines, apiece, least, stored,
        (request, slot, 0, key_head, value_head, table_ptr, table_columns), pools,
        K, V, SK, SV, KEYS, SPAN, False, WHOLE, STAGES, SPREAD, NATIVE,
    )  # fmt: skip
    if OWN:
        # Tokens come request by request: from a position to the token that brings it is one number's way.
        shift = tl.max(tl.where(mine, token - position, -0x7FFFFFFF), axis=0)
        largest, total, out = take_rows(
            split, splits, q, scale, largest, total, out, lines, apiece, tl.maximum(least, start), most,
            (request, slot, shift, key_head, value_head, table_ptr, table_columns), own_pools,
            NK, NV, SK, SV, KEYS, SPAN, True, False, STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    return largest, total, out


@triton.jit(do_not_specialize=["tokens", "heads", "each", "window", "chunk", "sunk", "table_columns", "splits"])
def attend_kv_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr,
    key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, own_keys_ptr, own_values_ptr,
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr, left_ptr,
    tokens, heads, each, window, chunk, sunk, table_columns, splits, scale,
    K: tl.constexpr, V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    OWN: tl.constexpr, LEFT: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Q [tokens, heads, dim] -> out [tokens, heads, value dim] and lse [tokens, heads], or parts for ``merge_kernel``.

    GROUPS: groups of heads that share a key head and a value head. A program takes HEADS of a group's heads for
    ``each`` tokens, SPAN at most; these are the first of ROWS rows. NK and NV are the records of the step's own rows,
    which with OWN the pools do not hold yet. LEFT: requests have left padding. ``window`` and ``chunk`` are 0 where
    there is none; ``sunk`` says that there is a sink. ``scale`` is that of the logits times log2(e). Where ``splits`` >
    1 a group's keys are shared out among as many programs, which write normalised outputs [tokens, splits, heads, value
    dim] and base-2 logarithms of their sums [tokens, splits, heads].
    """
    program = tl.program_id(0)
    size = heads // GROUPS
    blocks = tl.cdiv(size, HEADS)
    group = program // blocks % GROUPS
    split = program // (blocks * GROUPS) % splits
    row = tl.arange(0, ROWS)
    member = row // HEADS
    token = program // (blocks * GROUPS * splits) * each + member
    of_group = program % blocks * HEADS + row % HEADS
    inside = (member < each) & (token < tokens) & (of_group < size)
    head = group * size + of_group
    key_head = group * K.heads // GROUPS
    value_head = group * V.heads // GROUPS

    requests = tl.load(request_ptr + token, mask=inside, other=-1)
    position = tl.load(positions_ptr + token, mask=inside & (requests >= 0), other=-1)
    left = tl.zeros_like(position)
    if LEFT:
        left = tl.load(left_ptr + requests, mask=inside & (requests >= 0), other=0)
    earliest = first_seen(position, left, window, chunk)

    line = token.to(tl.int64) * heads + head
    q = ()
    key_panels: tl.constexpr = SK.chunks * SK.parts
    for p in tl.static_range(key_panels):
        channel = panel_channels(p, SK)[None, :]
        x = tl.load(q_ptr + line[:, None] * K.dim + channel, mask=inside[:, None] & (channel < K.dim), other=0.0)
        q = q + (x.to(tl.float32 if SK.full else tl.bfloat16),)
    out = ()
    panels: tl.constexpr = SV.chunks * SV.parts
    width: tl.constexpr = SV.chunk // SV.parts
    for _ in tl.static_range(panels):
        out = out + (tl.zeros([ROWS, width], tl.float32),)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    newest = tl.max(requests, axis=0)
    step = slots_ptr, starts_ptr, table_ptr, table_columns
    pools = key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr
    own_pools = own_keys_ptr, own_keys_ptr, own_keys_ptr, own_values_ptr, own_values_ptr, own_values_ptr
    if SPAN == 1:
        largest, total, out = take_request(
            split, splits, q, scale, largest, total, out, token, (member, position, earliest, requests >= 0), False,
            tl.maximum(newest, 0), step, (key_head, value_head), pools, own_pools,
            K, V, NK, NV, SK, SV, KEYS, SPAN, OWN, WHOLE, STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    else:
        oldest = tl.min(tl.where(requests >= 0, requests, 0x7FFFFFFF), axis=0)
        for one in range(oldest, newest + 1):
            # The interpreter counts in plain numbers.
            request = newest * 0 + one
            largest, total, out = take_request(
                split, splits, q, scale, largest, total, out, token, (member, position, earliest, requests == request),
                oldest < newest, request, step, (key_head, value_head), pools, own_pools,
                K, V, NK, NV, SK, SV, KEYS, SPAN, OWN, WHOLE, STAGES, SPREAD, NATIVE,
            )  # fmt: skip

    some = 1.0 / tl.where(total == 0.0, 1.0, total)
    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    if splits > 1:
        line = (token.to(tl.int64) * splits + split) * heads + head
        tl.store(partial_lse_ptr + line, lse, mask=inside)
        store_rows(partial_ptr + line * V.dim, out, some, total, inside & (lse != float("-inf")), V, SV, NATIVE)
    else:
        tl.store(lse_ptr + line, lse * 0.6931471805599453, mask=inside)
        if sunk:
            some *= beside_sink(sink_ptr, head, inside, lse)
        store_rows(out_ptr + line * V.dim, out, some, total, inside, V, SV, NATIVE)


@triton.jit
def store_rows(at, out, some, total, inside, V: tl.constexpr, SV: tl.constexpr, NATIVE: tl.constexpr):
    """Store panels ``out`` of [rows, channels], times ``some`` [rows], at pointers [rows]; zeros where ``total`` is."""
    panels: tl.constexpr = SV.chunks * SV.parts
    for p in tl.static_range(panels):
        channel = panel_channels(p, SV)[None, :]
        x = tl.where((total == 0.0)[:, None], 0.0, out[p] * some[:, None])
        if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
            x = round_bf16(x, NATIVE)
        tl.store(at[:, None] + channel, x.to(at.dtype.element_ty), mask=inside[:, None] & (channel < V.dim))
