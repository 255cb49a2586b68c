"""Decode attention over keys that are coded over tokens, and values beside them: whole groups by DMA, codes by casts.

A line of keys' codes is some channels of one group, each a block of lanes with two tokens to a byte. Groups of 256
tokens exchange such blocks, so that a line is a channel and its lanes are all their tokens: what a product takes. A
channel's scale differs from group to group and is folded into the query, which is asked once a group; of what it finds
the lanes of that group are kept. Even tokens come from the lower halves of bytes and odd ones from the upper: each of
the two has a softmax of its own, and they are joined at the end. Lines of values are two tokens, whose products keep
the lanes of their own; a weight is multiplied by the scale of every group of channels, and as many products are made.

Codes are numbers always, so what is not finite comes by scales and offsets alone. They pass products with zeros as a
mark, and become NaN where they scale.
"""

import functools
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import compact, softmax, walks
from kvcore.kernels.pallas.attend_kv import TERMS
from kvcore.kernels.pallas.codes import both_halves, int_bits, of_bits
from kvcore.kernels.pallas.compact import HALVES
from kvcore.kernels.pallas.softmax import LOG2E
from kvcore.kernels.pallas.walks import BLOCK_BYTES
from kvcore.plan import Region
from kvcore.spec.layout import LANES, WORDS

SET = 2 * LANES
"""Tokens that are multiplied together: two to a byte."""
SETS = 2
"""Of a chunk, at least: blocks of fewer tokens arrive together."""
FEW = 4
"""Queries of a head are rounded up to so many."""
MARK = np.float32(-1)
"""The scale of what is no number; others are not below 0."""
CODES = np.int32(0x0F0F0F0F)
"""The lower halves of bytes."""


class Groups(NamedTuple):
    """Keys and values of a layer, as the kernel reads them.

    Attributes:
        keys, values: the regions.
        asked: queries of a head, rounded up.
        count: blocks of a chunk.
        terms: bf16 numbers that a folded query, and a weight, is the sum of.
    """

    keys: Region
    values: Region
    asked: int
    count: int
    terms: tuple[int, int]

    @property
    def heads(self) -> int:
        """Of keys, and of values."""
        return self.keys.heads

    @property
    def rows(self) -> int:
        """Rows of queries: those of even tokens and those of odd ones of every head."""
        return 2 * self.asked * self.heads

    @property
    def lanes(self) -> int:
        """Of a block: those of a group's tokens of one channel."""
        return self.keys.tokens // 2

    @property
    def groups(self) -> int:
        """Of a set, and blocks of a line."""
        return LANES // self.lanes

    @property
    def sets(self) -> int:
        """Of a chunk."""
        return self.count * self.keys.rows * self.keys.tokens // SET

    @property
    def apart(self) -> int:
        """Scales of a token's values."""
        return LANES // self.values.format.fields[0].width


@cache
def declined(keys: Region, values: Region) -> str:
    """Why the kernel does not take a layer's keys and values; "" where it does."""
    tokens = keys.format.tokens
    if keys.layout != "tpu_tile" or keys.growth != "block":
        return f"attention reads blocks of tiles, and rows are in {keys.growth}s of layout {keys.layout}"
    if tokens == 1 or keys.format.fields[0].code != "uint4" or LANES % (tokens // 2) or tokens > LANES // 2:
        return f"keys of {keys.format.name} are not codes of four bits over up to {LANES // 2} tokens"
    field = values.format.fields[0]
    if values.format.tokens > 1 or field.code != "uint4" or field.group != tokens or len(values.unit.buffers) != 2:
        return f"values of {values.format.name} are not in groups of {tokens} channels with scales in words"
    if keys.heads != values.heads or any(region.format.dim != tokens * LANES for region in (keys, values)):
        return f"keys and values are not as many heads of {LANES} channels"
    if keys.heads * tokens % 64:
        return f"{keys.heads} heads of {tokens} tokens are no whole registers"
    held = keys.rows * tokens
    if held % SET and SET % held:
        return f"blocks of {held} tokens are neither whole sets of {SET} nor equal parts of one"
    if any(region.unit.nbytes > BLOCK_BYTES for region in (keys, values)):
        return f"a block is more than {BLOCK_BYTES} bytes"
    return ""


def supports(keys: Region, values: Region) -> bool:
    """True for keys over tokens beside values in as many channels a group."""
    return not declined(keys, values)


def attend_groups(keys: Region, values: Region, key_pools, value_pools, blocks, first, last, q, scale, *, interpret):
    """Attend from q [T, H, 128] to whole groups -> out [T, H, 128] fp32 and lse [T, H]; -inf and 0 without a token.

    Args:
        keys, values: the regions; H is a multiple of their heads.
        key_pools, value_pools: their pools.
        blocks: [T, n] int32 units of each token's groups, in order; -1 is not read.
        first, last: [T] int32 first and last position that each token sees of them; last -1: none.
        q: fp32, or bf16, whose weights are rounded to bf16, too.
        scale: of logits, a number or an fp32 scalar.
        interpret: as in ``pallas_call``.
    """
    heads, held = q.shape[1], keys.rows * keys.tokens
    few = -(-(heads // keys.heads) // FEW) * FEW
    asked = few if few == FEW else -(-few // (2 * FEW)) * 2 * FEW
    terms = (2, 1) if q.dtype == jnp.bfloat16 else (TERMS, TERMS)
    by = Groups(keys, values, asked, max(1, SETS * SET // held), terms)
    inputs = [_asked(by, q), *(jnp.asarray(array, jnp.bfloat16) for array in _orders(by))]
    pools = [*key_pools, *value_pools]
    given = blocks, first, last, scale
    out, lse = walked(by, pools, given, inputs, fold=_fold, heads=heads, interpret=interpret, name="attend_groups")
    return _finished(by, out, lse, heads)


def walked(by, pools, given, inputs, *, each: int = 1, fold, heads: int, interpret, name: str):
    """Walk every token's blocks -> weighted sums [T, rows, 256] over their weights' sums, and lse [T, rows].

    Args:
        by: keys, values, blocks of a chunk, and rows of queries.
        pools: of keys, and then of values.
        given: blocks, first, last and scale, as of ``attend_groups``.
        inputs: what ``fold`` is given, of which the first ``each`` are a token's own.
        fold: takes a chunk into the softmax.
        heads: of queries.
        interpret: as in ``pallas_call``.
        name: of the kernel.
    """
    blocks, first, last, scale = given
    tokens = len(blocks)
    blocks = jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % by.count)), constant_values=-1)
    scale = (jnp.float32(scale) * jnp.float32(LOG2E)).reshape(1)
    chunks = [pltpu.VMEM((HALVES, by.count * pool.shape[1], *pool.shape[2:]), pool.dtype) for pool in pools]
    arrived = pltpu.SemaphoreType.DMA((HALVES,))
    out, lse = walks.called(
        functools.partial(_attend, by=by, count=len(inputs), fold=fold, interpret=bool(interpret)),
        (blocks, first, last, scale),
        inputs[:each],
        inputs[each:],
        pools,
        [(by.rows, 2 * LANES), (by.rows, LANES)],
        [*softmax.state(by.rows, LANES)[:2], pltpu.SMEM((1,), jnp.int32), arrived, *chunks],
        vmem_bytes=64 << 20,
        cost=_cost(by, tokens, heads, blocks.shape[1]),
        interpret=interpret,
        name=name,
    )
    return out, lse[:, :, 0]


def _cost(by, tokens: int, heads: int, blocks: int) -> pl.CostEstimate:
    """Of every block that a call could read."""
    held = tokens * blocks * by.keys.rows * by.keys.tokens
    return pl.CostEstimate(
        flops=4 * held * heads * LANES,
        bytes_accessed=tokens * blocks * (by.keys.unit.nbytes + by.values.unit.nbytes),
        transcendentals=held * heads,
    )


def _channels(by: Groups) -> np.ndarray:
    """[128] the channel of every line of a head's keys once blocks are exchanged."""
    lines = LANES // by.groups
    return (np.arange(lines)[None] * by.groups + np.arange(by.groups)[:, None]).reshape(-1)


def _asked(by: Groups, q):
    """Queries [T, heads · n, 128], n of a head fill registers: once, or for two groups; channels as lines have them."""
    tokens = len(q)
    q = reordered(q.astype(jnp.float32).reshape(-1, LANES), _channels(by))
    q = q.reshape(-1, by.heads, len(q) // by.heads // tokens, LANES)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, by.asked - q.shape[2]), (0, 0)))
    return jnp.concatenate([q] * max(1, 2 * FEW // by.asked), axis=2).reshape(len(q), -1, LANES)


def _once_a_group(by: Groups, q):
    """The same as [heads · groups · asked, 128]."""
    several = by.groups * by.asked * by.heads // len(q)
    return jnp.concatenate([part for part in parts(q, by.heads) for _ in range(several)], axis=0)


def _orders(by: Groups) -> tuple[np.ndarray, ...]:
    """Matrices of zeros and ones that move scales.

    Of keys: lanes to the order of lines [128, 128], and rows to queries, once a group. Of values: lanes so that blocks
    of them hold what is alike [128, 128], and rows to queries, those of even and of odd tokens.
    """
    lane, groups, heads = np.arange(LANES), by.groups, by.heads
    lines = lane[:, None] == _channels(by)[None]
    # Two rows of keys' scales share a tile: the first ones come before the others.
    row = np.arange(groups * heads).reshape(-1, 2).T.reshape(-1)
    mine = (np.arange(groups)[None] * heads + np.arange(heads)[:, None]).reshape(-1)
    keys = np.repeat(mine, by.asked)[:, None] == row[None]
    # A lane of words is of a token, (even or odd, block's lane), and a pair of scales or of offsets.
    pairs = by.apart // 2
    block, token = np.divmod(lane, by.lanes)
    kind, pair, odd = block // (2 * pairs), block // 2 % pairs, block % 2
    source = kind * (LANES // 2) + (2 * token + odd) * pairs + pair
    alike = lane[:, None] == source[None]
    asked = np.arange(by.rows)
    values = (asked // by.asked % 2 * heads + asked // (2 * by.asked))[:, None] == np.arange(2 * heads)[None]
    return lines, keys, alike, values


def _finished(by: Groups, out, lse, heads: int):
    """Out [T, H, 128] and lse [T, H] of what even and odd tokens came to."""
    tokens, half, few = len(out), LANES // 2, heads // by.heads
    lse = lse.reshape(tokens, by.heads, 2, by.asked)
    most = jnp.max(lse, axis=2, keepdims=True)
    shares = jnp.exp(lse - jnp.where(most == -jnp.inf, 0, most))
    total = jnp.sum(shares, axis=2)
    # Of every row the lanes of its own tokens, in both planes.
    mine = np.arange(2 * LANES)[None] // half % 2 == np.arange(2)[:, None]
    weighted = out.reshape(tokens, by.heads, 2, by.asked, 2 * LANES) * shares[..., None]
    found = jnp.sum(jnp.where(mine[None, None, :, None] & (shares[..., None] != 0), weighted, 0), axis=2)
    found = jnp.concatenate([found[..., n : n + half] + found[..., n + half : n + LANES] for n in (0, LANES)], axis=-1)
    found = (found / jnp.where(total == 0, 1, total)[..., None])[:, :, :few].reshape(tokens, heads, LANES)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(total) + most[:, :, 0])[:, :, :few].reshape(tokens, heads)
    # Even channels come before odd ones.
    found = reordered(found.reshape(-1, LANES), np.arange(LANES).reshape(2, half).T.reshape(-1))
    return found.reshape(tokens, heads, LANES), lse


def reordered(values, order: np.ndarray):
    """Values [n, 128] with lanes in another order, NaN where one is no finite number.

    By a product, since XLA gathers lanes by way of arrays that are sixteen times as large.
    """
    ones = jnp.asarray(np.arange(LANES)[:, None] == order[None], jnp.float32)
    fault = faults(values)
    moved = softmax.product(jnp.where(fault > 0, 0, values), ones, contract=0)
    return jnp.where(softmax.product(fault, ones, contract=0) > 0, np.float32(np.nan), moved)


def faults(values):
    """1 where a value is no finite number, 0 elsewhere, in fp32."""
    return jnp.where(jnp.abs(values) < jnp.inf, 0.0, 1.0)


def chosen(number, several: list):
    """Of several arrays in every place that which ``number`` names there."""
    return functools.reduce(lambda one, n: jnp.where(number == n, several[n], one), range(1, len(several)), several[0])


def _attend(units, firsts, lasts, scale, *refs, by, count: int, fold, interpret: bool):
    inputs, refs = refs[:count], refs[count:]
    buffers = [name for region in (by.keys, by.values) for name, _ in region.unit.buffers]
    pools, (out, lse, largest, total, turn, arrived, *held) = refs[: len(buffers)], refs[len(buffers) :]
    weighted = out.at[0]
    state = largest, total, weighted
    every = units.shape[0] // firsts.shape[0] // by.count
    rows = by.count * by.keys.rows * by.keys.tokens

    def each(chunk, half, act) -> None:
        walks.copy_blocks(pools, held, arrived, units, by.count, chunk, half, act, unroll=not interpret)

    def take(half, *seen) -> None:
        fold(by, (held, half, interpret), seen, scale[0], inputs, state)

    softmax.clear(*state)
    walks.over_chunks(firsts, lasts, turn, every, rows, each, take)
    lse[0], shrink = softmax.of_powers(largest, total)
    for plane in range(2):
        some = slice(LANES * plane, LANES * (plane + 1))
        weighted[:, some] = weighted[:, some] * shrink


_NAMES = ("codes", "scales", "offsets", "values", "words")


def _ordered(by: Groups, held) -> list:
    """References to chunks, as ``_NAMES`` says."""
    names = [name for name, _ in by.keys.unit.buffers]
    of_keys = dict(zip(names, held, strict=False))
    others = dict(zip((name for name, _ in by.values.unit.buffers), held[len(names) :], strict=True))
    place = {place.field: place.buffer for place in by.keys.unit.places}
    codes = by.values.unit.places[0].buffer
    return [*(of_keys[place[name]] for name in _NAMES[:3]), others[codes], others[WORDS]]


def _view(by: Groups, held: dict, half, interpret: bool, number, name: str):
    """A set's words of a buffer, [n, 128] int32."""
    mine = held[name]
    lines = mine.shape[1] * mine.shape[2] // (4 if mine.dtype == jnp.uint8 else 1)
    size = lines // by.sets
    return compact.words_of_chunk(mine, half, number * size, size, interpret=interpret)


def _fold(by: Groups, chunk, seen, scale, inputs, state) -> None:
    """Take a chunk into the softmax; ``seen`` is the first and the last of its positions that are."""
    (held, half, interpret), (largest, total, weighted) = chunk, state
    q, lines, of_keys, alike, of_values = inputs
    view = functools.partial(_view, by, dict(zip(_NAMES, _ordered(by, held), strict=True)), half, interpret)
    views = [functools.partial(view, number) for number in range(by.sets)]
    # Ahead of everything that waits for them.
    spread = [_spread(view, lines, of_keys) for view in views]
    beside = [_beside(by, view, alike, of_values) for view in views]
    q = _once_a_group(by, q[0])
    found = [_logits(by, view, q, *one) for view, one in zip(views, spread, strict=True)]
    logits = jnp.concatenate(found, axis=1) * scale
    row, lane = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
    odd = lax.shift_right_logical(row, by.asked.bit_length() - 1) & 1
    # Twice a block's lane, and every group is as many positions as it has lanes twice.
    position = 2 * lane + odd
    logits = jnp.where((position >= seen[0]) & (position <= seen[1]), logits, -jnp.inf)
    kept, weights = softmax.weigh_logits(logits, None, largest, total, power=jnp.exp2)
    for number, added in enumerate(_weighted(by, views, weights, beside)):
        some = slice(2 * by.asked * number, 2 * by.asked * (number + 1))
        weighted[some] = weighted[some] * kept[some] + added


def exchanged(arrays: list) -> list:
    """Arrays [n, 128] whose lanes are as many blocks as there are arrays: block a of array b becomes block b of a."""
    count, found, step = len(arrays), list(arrays), 1
    size = LANES // count
    while step < count:
        upper = lax.broadcasted_iota(jnp.int32, found[0].shape, 1) & step * size != 0
        for low in range(count):
            if not low & step:
                one, other, high = found[low], found[low + step], low + step
                found[low] = jnp.where(upper, pltpu.roll(other, step * size, 1), one)
                found[high] = jnp.where(upper, other, pltpu.roll(one, LANES - step * size, 1))
        step *= 2
    return found


def parts(words, count: int) -> list:
    """Equal parts of rows."""
    size = len(words) // count
    return [words[size * number : size * (number + 1)] for number in range(count)]


def _halves(words, by: Groups) -> list:
    """Words of lines of codes, an array a block or a group -> of every head two matrices [128, 128] bf16 side by side.

    They are of the lower halves of bytes, and of the upper ones.
    """

    def of_heads(codes):
        return parts(pltpu.bitcast(codes & CODES, jnp.int8).astype(jnp.bfloat16), by.heads)

    low, high = [of_heads(one) for one in words], [of_heads(lax.shift_right_logical(one, 4)) for one in words]
    return [
        jnp.concatenate([jnp.concatenate([one[head] for one in half], axis=0) for half in (low, high)], axis=1)
        for head in range(by.heads)
    ]


def added(products, count: int):
    """Sums of ``count`` terms, one above the other: small ones first."""
    return functools.reduce(jnp.add, parts(products, count)[::-1])


def _logits(by: Groups, view, q, scales, offsets):
    """[rows, 128] of a set's tokens, even ones and odd ones, over ``UINT4_FACTOR``."""
    folded = q * scales
    shift = jnp.sum(q * offsets, axis=1, keepdims=True)
    terms = [parts(one.astype(jnp.bfloat16), by.heads) for one in compact.terms(folded, by.terms[0])]
    shift = parts(shift, by.heads)
    found = []
    for head, codes in enumerate(_halves(exchanged(parts(view("codes"), by.groups)), by)):
        left = jnp.concatenate([one[head] for one in terms], axis=0)
        products = compact.dot(left, codes, contract=0)
        found.append(_own(by, added(products, by.terms[0]) + shift[head]))
    return jnp.concatenate(found, axis=0)


def _own(by: Groups, products):
    """[groups · asked, 2 · 128] of queries once a group -> [2 · asked, 128], of every lane its group's."""
    rows = max(by.asked, 2 * FEW)
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    group = lax.shift_right_logical(lane, by.lanes.bit_length() - 1)
    found, several = [], rows // by.asked
    number = lax.shift_right_logical(group, several - 1)
    for half in range(2):
        several_groups = parts(products[:, LANES * half : LANES * (half + 1)], by.groups // several)
        found.append(chosen(number, several_groups))
    even, odd = found
    if several == 1:
        return jnp.concatenate(found, axis=0)
    # Two groups share a register: of its upper half what one of them found for even tokens, below it for odd ones.
    upper = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) < FEW
    first = group & 1 == 0
    turned = pltpu.roll(jnp.where(upper, odd, even), FEW, 0)
    return jnp.where(upper == first, jnp.where(upper, even, odd), turned)


def _spread(view, lines, of_keys):
    """Scales and offsets of keys [heads · groups · asked, 128] each, as queries are asked; NaN where one is none."""
    found = [_two(view(name)) for name in ("scales", "offsets")]
    fault = functools.reduce(jnp.maximum, map(faults, found))
    fault = jnp.max(fault, axis=1, keepdims=True) > 0
    scales, offsets = (jnp.where(fault, other, one) for one, other in zip(found, (MARK, np.float32(0)), strict=True))
    both = compact.dot(jnp.concatenate([scales, offsets], axis=0).astype(jnp.bfloat16), lines[...], contract=0)
    both = jnp.concatenate(parts(both, 2), axis=1).astype(jnp.bfloat16)
    both = compact.dot(of_keys[...], both, contract=0)
    scales, offsets = both[:, :LANES], both[:, LANES:]
    return jnp.where(scales < 0, np.float32(np.nan), scales), offsets


def _two(words):
    """Words [n, 128] of two rows' bf16 numbers, each a line of high bytes and one of low ones -> [2n, 128] fp32."""
    first = (words & 0xFF) << 24 | (words & 0xFF00) << 8
    second = (words & 0xFF0000) << 8 | lax.shift_right_logical(words, 8) & 0xFF0000
    return of_bits(jnp.concatenate([first, second], axis=0))


def _weighted(by: Groups, views, weights, beside):
    """Values by their weights [rows, sets · 128]: of every head [2 · asked, 2 · 128]."""
    terms, constants = [], []
    for part in zip(*beside, strict=True):
        scales, offsets = (jnp.concatenate(several, axis=1) for several in zip(*part, strict=True))
        one = weights * scales
        # A token that is not seen has a weight of 0, whatever is its scale.
        one = jnp.where(one < 0, np.float32(np.nan), one)
        terms.append([part.astype(jnp.bfloat16) for part in compact.terms(one, by.terms[1])])
        constants.append(parts(jnp.sum(weights * offsets, axis=1, keepdims=True), by.heads))
    lane = lax.broadcasted_iota(jnp.int32, (2 * by.asked, 2 * LANES), 1) & LANES // 2 - 1
    part = lax.shift_right_logical(lane, (LANES // 2 // by.apart).bit_length() - 1)
    codes = [_halves(parts(view("values"), by.groups), by) for view in views]
    for head in range(by.heads):
        left = [parts(one[number], by.heads)[head] for number in range(by.terms[1]) for one in terms]
        right = jnp.concatenate([one[head] for one in codes], axis=0)
        products = added(compact.dot(jnp.concatenate(left, axis=0), right, contract=0), by.terms[1])
        sums = [one + more[head] for one, more in zip(parts(products, by.apart), constants, strict=True)]
        yield chosen(part, sums)


def _beside(by: Groups, view, alike, of_values) -> list:
    """Of every group of channels (scales, offsets) of values [rows, 128], a lane a token as weights have them."""
    words = view("words")
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    held = []
    for one in both_halves(words):
        fault = faults(one)
        fault = jnp.maximum(fault, pltpu.roll(fault, LANES // 2, 1)) > 0
        held.append(jnp.where(fault, jnp.where(lane < LANES // 2, MARK, np.float32(0)), one))
    moved = compact.dot(jnp.concatenate(held, axis=0).astype(jnp.bfloat16), alike[...], contract=0)
    low, high = (int_bits(one) for one in parts(moved, 2))
    blocks = exchanged(parts(lax.shift_right_logical(low, 16) | high, by.groups))
    pairs = by.apart // 2
    numbers = []
    for number in range(2 * pairs):
        both = jnp.concatenate(blocks[2 * number : 2 * number + 2], axis=0)
        numbers += both_halves(both)
    spread = compact.dot(of_values[...], jnp.concatenate(numbers, axis=1).astype(jnp.bfloat16), contract=0)
    found = [spread[:, first : first + LANES] for first in range(0, spread.shape[1], LANES)]
    return list(zip(found[: by.apart], found[by.apart :], strict=True))
