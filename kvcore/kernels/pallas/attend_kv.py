"""Decode attention over paged keys and values, a row a head: whole blocks by DMA, one softmax for all heads.

A block holds every head's rows side by side. All query heads are multiplied with all of them at once, which a matrix
unit does in the time that the block takes to arrive, and what a query head does not share is masked. The next blocks
come under the arithmetic of these; blocks that a token does not see are not walked, and nothing that was gathered is
ever written out.

Products are of bf16 and summed in fp32: codes are exact in it, and where queries are not, they and the weights are
taken apart into terms that are. A row's one scale multiplies its logits and weights, a lane a row; where rows have
several, powers of two each multiply their codes, and others what their group of channels comes to by itself.
"""

import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import block_lines, compact, softmax, walks
from kvcore.kernels.pallas.block_lines import Lie
from kvcore.kernels.pallas.compact import HALVES
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.kernels.pallas.softmax import LOG2E
from kvcore.kernels.pallas.walks import Walk
from kvcore.plan import Region
from kvcore.spec.layout import LANES, TILE_BYTES

TERMS = 3
"""bf16 numbers that an fp32 number is the sum of."""


def attend_kv(
    keys: Region, values: Region, key_pools, value_pools, blocks, first, last, q, scale, sink=None, *, interpret: Any
):
    """Attend from q [T, H, key_dim] -> out [T, H, value_dim] fp32 and lse [T, H]; -inf and 0 without a row.

    Args:
        keys, values: the regions; H is a multiple of their heads.
        key_pools, value_pools: their pools.
        blocks: [T, n] int32 units of each token's rows, in order; -1 is not read.
        first, last: [T] int32 first and last position that each token sees; last -1: none.
        q: fp32, or bf16, whose weights are rounded to bf16, too.
        scale: of logits, a number or an fp32 scalar.
        sink: [H], one logit a head in the denominator alone, or None.
        interpret: as in ``pallas_call``.
    """
    native = block_lines.casts_e4m3(interpret)
    options = {"native": native, "sublanes": block_lines.looks_among_sublanes(interpret)}
    options["terms"] = 1 if q.dtype == jnp.bfloat16 else TERMS
    ways = [
        walks.walk(keys, values, blocks.shape[1], q.shape[1], careful=careful, **options) for careful in (False, True)
    ]
    by = ways[0]
    how, tokens, heads = by.how, q.shape[0], q.shape[1]
    more = -blocks.shape[1] % by.count
    blocks = jnp.pad(blocks, ((0, 0), (0, more)), constant_values=-1)
    copies = walks.copies_of(by)
    virtual = len(copies) * heads
    asked = _asked(by, q, copies)
    moves = [walks.moves_of(way) for way in ways]
    whole = [walks.positions_of(way, copies, heads) for way in ways]
    whole += [jnp.asarray(array) for way in moves for one in walks.each_once(way) for array in one.arrays]
    factors = [block_lines.factor(one, native) for one in how]
    scale = (jnp.float32(scale) * jnp.float32(LOG2E * factors[0])).reshape(1)
    planes, held = how[1].planes * how[1].span, [*_scratch(keys, by), *_scratch(values, by)]
    out, lse = walks.called(
        functools.partial(_attend, ways=ways, moves=moves, copies=copies, heads=heads, interpret=bool(interpret)),
        (blocks, first, last, scale),
        [asked],
        whole,
        [*key_pools, *value_pools],
        [(planes * virtual, LANES), (virtual, LANES)],
        [*softmax.state(virtual, LANES)[:2], pltpu.SMEM((1,), jnp.int32), *held],
        vmem_bytes=_vmem(by, virtual),
        cost=_cost(by, tokens, heads, blocks.shape[1]),
        interpret=interpret,
        name="attend_kv",
    )
    return _finished(by, out * factors[1], lse[:, :, 0], copies, heads, sink)


def _vmem(by: Walk, virtual: int) -> int:
    """Bytes of VMEM that the kernel may take: chunks twice, and some arrays of a piece's logits."""
    chunks = sum(2 * HALVES * by.count * region.unit.nbytes for region in by.regions)
    logits = 4 * virtual * by.lines * sum(one.apart * one.span * by.terms for one in by.how)
    return min(96 << 20, max(32 << 20, chunks + 4 * logits))


def _cost(by: Walk, tokens: int, heads: int, blocks: int) -> pl.CostEstimate:
    """Of every block that a call could read."""
    keys, values = by.regions
    rows = tokens * blocks * keys.rows
    dims = (keys.format.dim or 0) + (values.format.dim or 0)
    return pl.CostEstimate(
        flops=2 * rows * heads * dims,
        bytes_accessed=tokens * blocks * (keys.unit.nbytes + values.unit.nbytes),
        transcendentals=rows * heads,
    )


def _asked(by: Walk, q, copies):
    """Queries as lines: [T, apart · span · terms · copies · H, levels · planes · 128], channels where a row's lie."""
    region, how = by.regions[0], by.how[0]
    channels = block_lines.channels_of(region, how)
    slot_of = np.repeat(copies, q.shape[1] // region.heads, axis=1)
    parts = jnp.stack(compact.terms(q.astype(jnp.float32), 1 if how.code == "fp32" else by.terms), axis=1)
    found = []
    for part, span in itertools.product(range(how.apart), range(how.span)):
        planes = []
        for plane in range(how.planes):
            channel = channels[plane, span]
            channel = np.where(channel // how.width == part, channel, -1) if how.apart > 1 else channel
            row = jnp.where(jnp.asarray(channel >= 0), parts[..., np.maximum(channel, 0)], 0)
            # [T, terms, copies, H, slots, lanes of one]
            slots = np.arange(how.slots)[None, None] == slot_of[:, :, None]
            row = jnp.where(jnp.asarray(slots)[None, None, :, :, :, None], row[:, :, None, :, None], 0)
            planes.append(row.reshape(len(q), -1, LANES))
        found.append(jnp.concatenate(planes * how.levels, axis=2))
    return jnp.concatenate(found, axis=1).astype(jnp.float32 if how.code == "fp32" else jnp.bfloat16)


def _scratch(region: Region, by: Walk) -> list:
    """Chunks of a region's pools, and their semaphores."""
    found = []
    for _, size in region.unit.buffers:
        shape, dtype = _items(region, size, len(found) > 0)
        found.append(pltpu.VMEM((HALVES, by.count * shape[0], *shape[1:]), dtype))
    return [*found, pltpu.SemaphoreType.DMA((HALVES,))]


def _items(region: Region, size: int, words: bool):
    """(shape of a unit, dtype) of a pool, its tiles one after another."""
    if words:
        return (size // TILE_BYTES, 1, LANES), jnp.uint32
    buffer = buffers_of(region)[0]
    tile = buffer.tile
    return (size // (tile[0] * LANES * jnp.dtype(buffer.dtype).itemsize), *tile), buffer.dtype


def _finished(by: Walk, out, lse, copies, heads: int, sink):
    """Out [T, H, d] and lse [T, H] of what every copy of a query found [T, planes · span · copies · H, 128]."""
    region, how = by.regions[1], by.how[1]
    channels = block_lines.channels_of(region, how)
    shared = np.arange(heads) * region.heads // heads
    slots = copies[:, shared]
    tokens = len(out)
    out = out.reshape(tokens, how.planes, how.span, len(copies), heads, how.slots, how.slot)
    every = out.transpose(0, 3, 4, 5, 1, 2, 6).reshape(tokens, len(copies), heads, how.slots, -1)
    mine = jnp.asarray(slots[:, :, None] == np.arange(how.slots))
    every = jnp.sum(jnp.where(mine[None, :, :, :, None], every, 0), axis=3)
    flat = channels.reshape(-1)
    order = np.argsort(np.where(flat < 0, 1 << 30, flat), kind="stable")[: region.format.dim]
    every = every[..., order]
    lse = lse.reshape(tokens, len(copies), heads)
    most = jnp.max(lse, axis=1, keepdims=True)
    shares = jnp.exp(lse - jnp.where(most == -jnp.inf, 0, most))
    total = jnp.sum(shares, axis=1)
    if len(copies) > 1:
        every = jnp.where(shares[..., None] > 0, every * shares[..., None], 0)
        found = jnp.sum(every, axis=1) / jnp.where(total == 0, 1, total)[..., None]
        lse = jnp.where(total == 0, -jnp.inf, jnp.log(total) + most[:, 0])
    else:
        found, lse = every[:, 0], lse[:, 0]
    return softmax.with_sink(found, lse, sink), lse


def _attend(units, firsts, lasts, scale, q, *refs, ways, moves, copies, heads: int, interpret: bool):
    by, (positions, refs) = ways[0], (refs[: len(ways)], refs[len(ways) :])
    arrays = []
    for way in moves:
        held = {}
        for one in walks.each_once(way):
            held[id(one)], refs = refs[: len(one.arrays)], refs[len(one.arrays) :]
        arrays += [held[id(one)] for one in way]
    buffers = [len(region.unit.buffers) for region in by.regions]
    pools, refs = refs[: sum(buffers)], refs[sum(buffers) :]
    out, lse, largest, total, turn, *held = refs
    sides = []
    for region, size in zip(by.regions, buffers, strict=True):
        sides.append(_Side(region, by, pools[:size], held[: size + 1], units, interpret))
        pools, held = pools[size:], held[size + 1 :]
    weighted = out.at[0]
    state = largest, total, weighted
    every = units.shape[0] // firsts.shape[0] // by.count
    rows = by.count * by.regions[0].rows

    def each(chunk, half, act):
        for side in sides:
            side.each(chunk, half, act)

    fold, carefully = (
        functools.partial(
            _fold, by=way, sides=sides, moves=moves[n], arrays=arrays[2 * n : 2 * n + 2], q=q,
            position=positions[n], scale=scale, copies=copies, heads=heads, state=state,
            careful=n > 0,
        )
        for n, way in enumerate(ways)
    )  # fmt: skip

    def take(half, first, last):
        for piece in range(by.pieces):
            fold(half, piece, first, last)

    softmax.clear(*state)
    # What was never written is no number, maybe, and 0 times that is none.
    begin, end = walks.over_chunks(firsts, lasts, turn, every, rows, each, take, prepare=sides[1].clear)
    faulty = jnp.max(jnp.where(jnp.abs(weighted[...]) < jnp.inf, 0.0, 1.0))
    faulty = jnp.maximum(faulty, jnp.max(jnp.where(total[...] < jnp.inf, 0.0, 1.0))).astype(jnp.int32)

    @pl.when(faulty == 1)
    def _():
        # Some row is no number: again, each head's rows by themselves, in the half that nothing comes to.
        half = lax.rem(turn[0] + 1, HALVES)
        softmax.clear(*state)
        token = pl.program_id(0)

        def again(chunk, _):
            for act in (lambda copy: copy.start(), lambda copy: copy.wait()):
                each(token * every + chunk, half, act)
            seen = firsts[token] - chunk * rows, lasts[token] - chunk * rows
            lax.fori_loop(0, ways[1].pieces, lambda piece, _: carefully(half, piece, *seen), None)
            return _

        lax.fori_loop(begin, end, again, None)

    lse[0], shrink = softmax.of_powers(largest, total)
    virtual = len(shrink)
    for number in range(weighted.shape[0] // virtual):
        some = slice(virtual * number, virtual * (number + 1))
        weighted[some] = weighted[some] * shrink


class _Side:
    """Keys or values: how their chunks come, and what a piece of one is."""

    def __init__(self, region: Region, by: Walk, pools, held, units, interpret: bool) -> None:
        self.region, self._by, self._pools, self._units, self._interpret = region, by, pools, units, interpret
        self.how: Lie = by.how[by.regions.index(region)]
        self._held, self._arrived = held[:-1], held[-1]

    def each(self, chunk, half, act) -> None:
        """``act`` on the copies of a chunk: of whole blocks, -1 left out."""
        count, mine = self._by.count, (self._pools, self._held, self._arrived)
        walks.copy_blocks(*mine, self._units, count, chunk, half, act, unroll=count == 1)

    def clear(self) -> None:
        """Zeros where chunks come to."""
        for held in self._held:
            held[...] = jnp.zeros(held.shape, held.dtype)

    def planes(self, by: Walk, half, piece) -> list:
        """Every plane of a piece, [lines, 128]."""
        size = by.lines if self.how.code == "fp32" else by.lines // self.how.lines
        return block_lines.matrices(self.how, self._view(0, half, piece, size), by.native, by.sublanes)

    def words(self, by: Walk, half, piece):
        """Words of scales of a piece [m, 128]."""
        return self._view(1, half, piece, self._held[1].shape[1] // by.pieces)

    def _view(self, number: int, half, piece, size: int):
        """Lines of words, or of fp32."""
        return compact.words_of_chunk(self._held[number], half, piece * size, size, interpret=self._interpret)


def _fold(
    half, piece, first, last, *, by: Walk, sides, moves, arrays, q, position, scale, copies, heads, state, careful
):
    """Take a piece into the softmax, whose first row is position ``piece · positions``."""
    largest, total, weighted = state
    keys, values = sides
    shift = piece * by.positions
    logits = _logits(by, keys, half, piece, q, scale, moves[0], arrays[0], copies, heads, careful)
    exists = _exists(by, position, first - shift, last - shift, logits.shape)
    logits = jnp.where(exists, logits, -jnp.inf)
    kept, weights = softmax.weigh_logits(logits, None, largest, total, power=jnp.exp2, share=1 / by.how[1].span)
    _weigh(by, values, half, piece, weights, exists, kept, weighted, moves[1], arrays[1], copies, heads,
           (first - shift, last - shift) if careful else None)  # fmt: skip


def _exists(by: Walk, position, first, last, shape):
    """[V, lines] whether a line's row is seen: one comparison of numbers without a sign."""
    count = jnp.maximum(last - first + 1, 0) + np.iinfo(np.int32).min
    if position.shape[1] == shape[1]:
        return position[...] - first < count
    held, step = position[...], walks.step_of(by)
    return jnp.concatenate([held - (first - step * n) < count for n in range(shape[1] // LANES)], axis=1)


def _logits(by: Walk, side: _Side, half, piece, q, scale, moves, arrays, copies, heads: int, careful: bool):
    """[V, lines] in powers of two, the same in all lines of a row."""
    how, virtual = side.how, len(copies) * heads
    words, matrix = _taken(by, side, half, piece, moves, arrays, careful=careful)
    precision = lax.Precision.HIGHEST if how.code == "fp32" else lax.Precision.DEFAULT
    # A row of another slot is multiplied with 0, and may be no number: each slot by itself.
    slots = range(how.slots) if careful and how.slots > 1 else (-1,)
    slot_of = copies[:, np.arange(heads) * side.region.heads // heads].reshape(-1)
    products = None
    for slot in slots:
        one = lax.dot_general(
            q[0], _only(how, matrix, slot), (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
        if slot >= 0:
            query = lax.rem(lax.broadcasted_iota(jnp.int32, one.shape, 0), jnp.int32(virtual))
            one = jnp.where(_among(query, slot_of == slot), one, 0.0)
        products = one if products is None else products + one
    assert products is not None, "a line has a slot at least"
    sums = _sums(q, virtual, how.apart) if how.has_offsets else ()
    lane = lax.broadcasted_iota(jnp.int32, (virtual, products.shape[1]), 1)
    found = None
    for number, terms in enumerate(_blocks(products, virtual, how.apart * how.span)):
        part, span = divmod(number, how.span)
        by_scale = _scales(side, words, copies, heads, scale[0], part=part)
        line = terms * (scale[0] if by_scale is None else by_scale)
        if how.has_offsets:
            line += _scales(side, words, copies, heads, scale[0], part=part, of=block_lines.offsets) * sums[part]
        if found is not None:
            line = found + line if part else jnp.where(lane & (how.span - 1) == span, line, found)
        found = line
    step = 1
    while step < how.span:
        # Every line of a row gets the sum of all.
        other = jnp.where(lane & step != 0, _rolled(found, step), _rolled(found, -step))
        found = found + other
        step *= 2
    return found


def _blocks(products, virtual: int, count: int) -> list:
    """Products [count · terms · V, n] -> of each of ``count`` the sum of its terms [V, n], small ones first."""
    size = len(products) // count
    return [
        functools.reduce(
            jnp.add, [products[at : at + virtual] for at in range(end - virtual, end - size - 1, -virtual)]
        )
        for end in range(size, len(products) + 1, size)
    ]


def _sums(q, virtual: int, apart: int) -> list:
    """Of every group of channels the sum of each query's [V, 1]."""
    return _blocks(jnp.sum(q[0].astype(jnp.float32), axis=1, keepdims=True), virtual, apart)


def _only(how: Lie, matrix, slot: int):
    """A matrix with the rows of one slot, or of all where that is -1."""
    if slot < 0:
        return matrix
    lane = lax.broadcasted_iota(jnp.int32, matrix.shape, 1) & LANES - 1
    mine = lax.shift_right_logical(lane, how.slot.bit_length() - 1) == slot
    return jnp.where(mine, matrix.astype(jnp.float32), 0.0).astype(matrix.dtype)


def _rolled(values, lanes: int):
    """Lanes moved within lines of 128."""
    pieces = [values[:, first : first + LANES] for first in range(0, values.shape[1], LANES)]
    rolled = [pltpu.roll(piece, lanes % piece.shape[1], 1) for piece in pieces]
    return rolled[0] if len(rolled) == 1 else jnp.concatenate(rolled, axis=1)


def _taken(by: Walk, side: _Side, half, piece, moves, arrays, *, careful: bool):
    """A piece's words of scales beside its lines, [1, lines] of every slot, and its planes side by side.

    Where rows have several scales each, every lane of the planes is scaled, and there are no words.
    """
    planes, words = side.planes(by, half, piece), None
    if side.how.spreads:
        scales = block_lines.spread(moves, side.words(by, half, piece), *arrays, careful=careful)
        planes = [plane * scales for plane in planes]
    elif side.how.groups:
        words = _beside(by, side, half, piece, moves, arrays)
    return words, planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=1)


def _beside(by: Walk, side: _Side, half, piece, moves: block_lines.Moves, arrays) -> list:
    """Words of rows that have one each, or several apart, beside their lines: of every slot's, [1, lines]."""
    words = side.words(by, half, piece)
    through = block_lines.moved(words, arrays[0], len(moves.patterns), moves.fold) if arrays else []

    def held(slot: int):
        pieces = []
        for number in range(-(-by.lines // LANES)):
            parts = [
                (words if pattern < 0 else through[pattern])[source : source + 1]
                for source, pattern in moves.of[slot, number]
            ]
            pieces.append(functools.reduce(jnp.bitwise_or, parts))
        whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        return whole[:, : by.lines]

    return [[held(slot * side.how.words + word) for word in range(side.how.words)] for slot in range(side.how.slots)]


def _scales(side: _Side, words, copies, heads: int, factor=None, *, part: int, of=block_lines.scales):
    """What scales logits or weights, [1 or V, lines]; None where rows have no scale, or those spread over lanes.

    With ``of=block_lines.offsets`` what is added.
    """
    how = side.how
    if not how.groups or how.spreads:
        return None
    per_slot = [of(how, mine, part) for mine in words]
    if factor is not None:
        per_slot = [one * factor for one in per_slot]
    if how.slots == 1:
        return per_slot[0]
    # Which slot a query asks: constants along its heads, in the order of copies.
    shared = np.arange(heads) * side.region.heads // heads
    slot_of = copies[:, shared].reshape(-1)
    virtual = lax.broadcasted_iota(jnp.int32, (len(slot_of), per_slot[0].shape[1]), 0)
    scales = jnp.broadcast_to(per_slot[0], virtual.shape)
    for slot in range(1, how.slots):
        scales = jnp.where(_among(virtual, slot_of == slot), jnp.broadcast_to(per_slot[slot], virtual.shape), scales)
    return scales


def _among(number, some: np.ndarray):
    """Whether ``some`` of a row ``number``, by its runs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], some.astype(np.int8), [0]])))
    found = jnp.zeros(number.shape, jnp.bool_)
    for begin, end in edges.reshape(-1, 2).tolist():
        found |= (number >= begin) & (number < end)
    return found


def _weigh(by: Walk, side: _Side, half, piece, weights, exists, kept, weighted, moves, arrays, copies, heads, seen):
    """Add values to the weighted sums; ``seen`` (first, last) where some of them may be no numbers."""
    how, virtual = side.how, len(weights)
    words, matrix = _taken(by, side, half, piece, moves, arrays, careful=seen is not None)
    lane = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    exact = how.code == "fp32" or seen is not None
    stacked, count, added = [], 1 if exact else by.terms, []
    for part, span in itertools.product(range(how.apart), range(how.span)):
        by_scale = _scales(side, words, copies, heads, part=part)
        mine = weights if how.span == 1 else jnp.where(lane & (how.span - 1) == span, weights, 0.0)
        one = mine if by_scale is None else mine * by_scale
        if seen is not None:
            one = jnp.where(exists, one, 0.0)
        stacked += compact.terms(one, count)
        if how.has_offsets:
            one = mine * _scales(side, words, copies, heads, part=part, of=block_lines.offsets)
            added.append(jnp.sum(one if seen is None else jnp.where(exists, one, 0.0), axis=1, keepdims=True))
    stacked = [one if exact else one.astype(jnp.bfloat16) for one in stacked]
    left = stacked[0] if len(stacked) == 1 else jnp.concatenate(stacked, axis=0)
    if seen is None:
        precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
        found = lax.dot_general(
            left, matrix, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
    else:
        found = _apart(by, side, left, matrix.astype(jnp.float32), seen, heads)
    blocks, wide = _blocks(found, virtual, how.apart * how.span), LANES * how.planes
    if how.levels > 1:
        blocks = [block[:, :wide] + block[:, wide:] for block in blocks]
    if added:
        blocks = [block + offset for block, offset in zip(blocks, added, strict=True)]
    if how.apart > 1:
        part = how.part_of(lax.broadcasted_iota(jnp.int32, blocks[0].shape, 1) & LANES - 1)
        blocks = [functools.reduce(lambda one, n: jnp.where(part == n, blocks[n], one), range(1, how.apart), blocks[0])]
    for span, total in enumerate(blocks):
        for plane in range(how.planes):
            some = slice(virtual * (plane * how.span + span), virtual * (plane * how.span + span + 1))
            weighted[some] = weighted[some] * kept + total[:, LANES * plane : LANES * (plane + 1)]


def _apart(by: Walk, side: _Side, left, matrix, seen, heads: int):
    """The same product with each head's rows by themselves, and only those that are seen: 0 times NaN is NaN."""
    how, region = side.how, side.region
    line, lane = (lax.broadcasted_iota(jnp.int32, matrix.shape, axis) for axis in (0, 1))
    slot = lax.shift_right_logical(lane & LANES - 1, how.slot.bit_length() - 1)
    if how.code == "bf16" and how.slots == 2:
        row = lax.shift_right_logical(line, 1) * 4 + (line & 1) + 2 * slot
    else:
        row = lax.shift_right_logical(line, how.span.bit_length() - 1) * how.slots + slot
    position = jnp.floor((row.astype(jnp.float32) + 0.5) * np.float32(1 / region.heads)).astype(jnp.int32)
    head = row - position * region.heads
    held = (position >= seen[0]) & (position <= seen[1]) & (position < by.positions)
    query = lax.broadcasted_iota(jnp.int32, (len(left), matrix.shape[1]), 0)
    query = lax.rem(query, jnp.int32(heads))
    group = heads // region.heads

    def one(number, found):
        mine = jnp.where(held & (head == number), matrix, 0.0)
        added = softmax.product(left, mine, contract=0)
        return jnp.where((query >= number * group) & (query < (number + 1) * group), added, found)

    return lax.fori_loop(0, region.heads, one, jnp.zeros((len(left), matrix.shape[1]), jnp.float32))
