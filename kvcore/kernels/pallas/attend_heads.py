"""Decode attention over int4 keys and values of eight heads, each head's queries with its own rows alone.

A word is a token's codes of eight heads, two of them a byte. Bytes of four words change places, so that what is
multiplied is two heads' rows, of which products keep the lanes of their own. Scales of a token's groups come to lie
beside logits and weights by products with zeros and ones, a lane a token; what is not finite passes those as a mark.
"""

import functools
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import attend_groups, block_lines, compact, softmax
from kvcore.kernels.pallas.attend_groups import CODES, FEW, MARK
from kvcore.kernels.pallas.attend_kv import TERMS
from kvcore.kernels.pallas.block_lines import Lie
from kvcore.kernels.pallas.codes import both_halves
from kvcore.kernels.pallas.walks import BLOCK_BYTES
from kvcore.plan import Region
from kvcore.spec.layout import LANES, WORDS

HEADS, PAIRS = 8, 4
"""Of a word, and of them that share a byte."""
HALF = LANES // 2
"""Lanes of a row's codes."""
AT_ONCE = 32
"""Rows of a byte of four registers."""


class Heads(NamedTuple):
    """Keys and values of a layer, as the kernel reads them.

    Attributes:
        keys, values: the regions.
        asked: queries of a head, rounded up.
        count: blocks of a chunk.
        terms: bf16 numbers that a query, or a weight, is the sum of.
        apart: scales of a row.
    """

    keys: Region
    values: Region
    asked: int
    count: int
    terms: int
    apart: int

    @property
    def tokens(self) -> int:
        """Of which a line of words of scales is."""
        return LANES // (HEADS * self.apart)

    @property
    def rows(self) -> int:
        """Rows of queries: of every head."""
        return HEADS * self.asked

    @property
    def held(self) -> int:
        """Tokens of a chunk."""
        return self.count * self.keys.rows

    @property
    def sets(self) -> int:
        """Of a chunk."""
        return self.held // (self.tokens * LANES)


@cache
def declined(keys: Region, values: Region) -> str:
    """Why the kernel does not take a layer's keys and values; "" where it does."""
    how = block_lines.lie(keys), block_lines.lie(values)
    if not all(isinstance(one, Lie) and one.code == "uint4" for one in how) or how[0] != how[1]:
        return "rows are not int4 of one format"
    if keys.heads != HEADS or values.heads != HEADS or keys.format.dim != LANES:
        return f"rows are not of {HEADS} heads of {LANES} channels"
    size = LANES * LANES // (HEADS * how[0].apart)  # type: ignore[union-attr]
    if size % keys.rows and keys.rows % size:
        return f"blocks of {keys.rows} tokens are neither whole sets of {size} nor equal parts of one"
    if max(keys.unit.nbytes, values.unit.nbytes) > BLOCK_BYTES:
        return f"a block is more than {BLOCK_BYTES} bytes"
    return ""


def supports(keys: Region, values: Region) -> bool:
    """True for int4 rows of eight heads of 128 channels."""
    return not declined(keys, values)


def attend_heads(
    keys: Region, values: Region, key_pools, value_pools, blocks, first, last, q, scale, sink=None, *, interpret
):
    """As ``attend_kv`` -> out [T, H, 128] fp32 and lse [T, H]."""
    tokens, heads = q.shape[:2]
    how = block_lines.lie(keys)
    assert isinstance(how, Lie), "what is not supported"
    size = LANES * LANES // (HEADS * how.apart)
    few = -(-(heads // HEADS) // FEW) * FEW
    by = Heads(keys, values, few, max(1, size // keys.rows), 1 if q.dtype == jnp.bfloat16 else TERMS, how.apart)
    inputs = [*_asked(by, q), jnp.asarray(_spreads(by), jnp.bfloat16)]
    pools = [*key_pools, *value_pools]
    given = blocks, first, last, scale
    out, lse = attend_groups.walked(
        by, pools, given, inputs, each=2, fold=_fold, heads=heads, interpret=interpret, name="attend_heads"
    )
    # Of every row the lanes of its own head, in both planes; even channels come before odd ones.
    mine = np.arange(2 * LANES)[None] // HALF % 2 == np.arange(2)[:, None]
    out = jnp.where(mine[None, None, :, None], out.reshape(tokens, PAIRS, 2, few, 2 * LANES), 0)
    out = jnp.concatenate([out[..., n : n + HALF] + out[..., n + HALF : n + LANES] for n in (0, LANES)], axis=-1)
    out = out.reshape(tokens, HEADS, few, LANES)[:, :, : heads // HEADS].reshape(-1, LANES)
    out = attend_groups.reordered(out, np.arange(LANES).reshape(2, HALF).T.reshape(-1))
    lse = lse.reshape(tokens, HEADS, few)[:, :, : heads // HEADS]
    out, lse = out.reshape(tokens, heads, LANES), lse.reshape(tokens, heads)
    return softmax.with_sink(out, lse, sink), lse


def _asked(by: Heads, q):
    """Queries [T, pairs · terms · apart · 2 · asked, 2 · 128] bf16 where codes lie, and sums of their groups, fp32."""
    tokens, several = len(q), q.shape[1] // HEADS
    shape = tokens, PAIRS, 2, several
    flat, group = q.astype(jnp.float32).reshape(-1, LANES), np.arange(LANES)[:, None] // (LANES // by.apart)
    sums = softmax.product(flat, jnp.asarray(group == np.arange(by.apart)[None], jnp.float32), contract=0)
    flat = attend_groups.reordered(flat, np.arange(LANES).reshape(HALF, 2).T.reshape(-1))
    more = ((0, 0), (0, 0), (0, 0), (0, by.asked - several), (0, 0))
    sums, q = (jnp.pad(one.reshape(*shape, -1), more) for one in (sums, flat))
    sums = jnp.moveaxis(sums, -1, 2).reshape(tokens, -1, 1)
    parts = jnp.stack([part.astype(jnp.bfloat16) for part in compact.terms(q, by.terms)], axis=2)
    # [T, pairs, terms, 2, asked, plane, lane] -> of one head the lower half of the lanes, of the other the upper.
    planes = parts.reshape(*parts.shape[:-1], 2, HALF)
    nothing = jnp.zeros_like(planes[:, :, :, 0])
    wide = jnp.stack(
        [
            jnp.concatenate([planes[:, :, :, 0], nothing], axis=-1),
            jnp.concatenate([nothing, planes[:, :, :, 1]], axis=-1),
        ],
        axis=3,
    )
    part = np.arange(LANES) % HALF // (HALF // by.apart)
    wide = jnp.stack([jnp.where(jnp.asarray(part == n), wide, jnp.bfloat16(0)) for n in range(by.apart)], axis=3)
    return wide.reshape(tokens, -1, 2 * LANES), jnp.broadcast_to(sums, (*sums.shape[:2], LANES))


def _spreads(by: Heads) -> np.ndarray:
    """[tokens · words · rows, 128] ones where a lane of words is that of a row's head."""
    row = np.arange(by.rows)
    head = row // (2 * by.asked) * 2 + row // by.asked % 2
    token, word = (array.reshape(-1, 1) for array in np.divmod(np.arange(by.tokens * by.apart), by.apart))
    lane = ((token * HEADS + head) * by.apart + word).reshape(-1)
    return lane[:, None] == np.arange(LANES)[None]


def _fold(by: Heads, chunk, seen, scale, inputs, state) -> None:
    """Take a chunk into the softmax; ``seen`` is the first and the last of its positions that are."""
    (held, half, interpret), (q, sums, spreads), (largest, total, weighted) = chunk, inputs, state
    names = [name for region in (by.keys, by.values) for name, _ in region.unit.buffers]
    codes_at = [n for n, name in enumerate(names) if name != WORDS]
    words_at = [n for n, name in enumerate(names) if name == WORDS]

    def words(side: int, number: int):
        return compact.words_of_chunk(held[words_at[side]], half, number * LANES, LANES, interpret=interpret)

    def codes_of(side: int, number: int, first: int, step: int):
        first += number * by.tokens * LANES
        return compact.words_of_chunk(held[codes_at[side]], half, first, 8, step=step, interpret=interpret)

    sets = range(by.sets)
    beside = [[_beside(by, words(side, number), spreads) for side in range(2)] for number in sets]
    of_keys = [_codes(by, functools.partial(codes_of, 0, number)) for number in sets]
    logits = [_logits(by, codes, one[0], q, sums) for codes, one in zip(of_keys, beside, strict=True)]
    logits = jnp.concatenate(logits, axis=1) * scale
    line = lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)
    within = line & by.tokens * LANES - 1
    position = (
        line - within + (within & LANES - 1) * by.tokens + lax.shift_right_logical(within, LANES.bit_length() - 1)
    )
    logits = jnp.where((position >= seen[0]) & (position <= seen[1]), logits, -jnp.inf)
    kept, weights = softmax.weigh_logits(logits, None, largest, total, power=jnp.exp2)
    rows, every = 2 * by.asked, by.tokens * LANES
    codes = [_codes(by, functools.partial(codes_of, 1, number)) for number in sets]
    lane = lax.broadcasted_iota(jnp.int32, (rows, 2 * LANES), 1) & HALF - 1
    part = lax.shift_right_logical(lane, (HALF // by.apart).bit_length() - 1)
    for pair in range(PAIRS):
        some = slice(rows * pair, rows * (pair + 1))
        left, added = [], []
        for number in range(by.apart):
            scaled, more = [], jnp.zeros((rows, LANES), jnp.float32)
            for one, (_, (scales, offsets)) in enumerate(beside):
                for token in range(by.tokens):
                    first = one * every + token * LANES
                    mine = weights[some, first : first + LANES]
                    line = mine * scales[number][token][some]
                    # A token that is not seen has a weight of 0, whatever is its scale.
                    scaled.append(jnp.where(line < 0, np.float32(np.nan), line))
                    more += mine * offsets[number][token][some]
            left.append(compact.terms(jnp.concatenate(scaled, axis=1), by.terms))
            added.append(jnp.sum(more, axis=1, keepdims=True))
        rounded = [one[term].astype(jnp.float32) for term in range(by.terms) for one in left]
        right = jnp.concatenate([matrix for one in codes for matrix in one[pair]], axis=0)
        products = compact.dot(jnp.concatenate(rounded, axis=0).astype(jnp.bfloat16), right, contract=0)
        found = [
            one + more
            for one, more in zip(
                attend_groups.parts(attend_groups.added(products, by.terms), by.apart), added, strict=True
            )
        ]
        weighted[some] = weighted[some] * kept[some] + attend_groups.chosen(part, found)


def _logits(by: Heads, codes, beside, q, sums):
    """[rows, tokens · 128] of a set."""
    scales, offsets = beside
    rows, size = 2 * by.asked, 2 * by.asked * by.apart
    found = []
    for pair in range(PAIRS):
        some = slice(rows * pair, rows * (pair + 1))
        left = q[0, size * by.terms * pair : size * by.terms * (pair + 1)]
        mine = attend_groups.parts(sums[0, size * pair : size * (pair + 1)], by.apart)
        lines = []
        for token in range(by.tokens):
            products = compact.dot(left, codes[pair][token])
            products = attend_groups.parts(attend_groups.added(products, by.terms), by.apart)
            line = functools.reduce(
                jnp.add,
                [one * scales[n][token][some] + mine[n] * offsets[n][token][some] for n, one in enumerate(products)],
            )
            least = functools.reduce(jnp.minimum, [one[token][some] for one in scales])
            lines.append(jnp.where(least < 0, np.float32(np.nan), line))
        found.append(jnp.concatenate(lines, axis=1))
    return jnp.concatenate(found, axis=0)


def _codes(by: Heads, words) -> list:
    """Of every pair of heads, and every token of a line of scales' words, [128, 2 · 128] bf16: a row a token.

    ``words``: (first, step) -> eight words of lanes, from word ``first`` on every ``step``-th.
    """
    found: list[list] = [[] for _ in range(PAIRS)]
    for token in range(by.tokens):
        planes: list[list[list]] = [[[], []] for _ in range(PAIRS)]
        for first in range(0, LANES, AT_ONCE):
            four = [words(by.tokens * (first + i) + token, 4 * by.tokens) for i in range(4)]
            for pair, line in enumerate(compact.transposed(*four)):
                for plane in range(2):
                    codes = (lax.shift_right_logical(line, 4) if plane else line) & CODES
                    planes[pair][plane].append(pltpu.bitcast(codes, jnp.int8).astype(jnp.bfloat16))
        for pair, both in enumerate(planes):
            found[pair].append(jnp.concatenate([jnp.concatenate(plane, axis=0) for plane in both], axis=1))
    return found


def _beside(by: Heads, words, spreads):
    """(scales, offsets): of every group of channels, and of every token of a line of words, [rows, 128]."""
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1) & by.apart - 1
    half = by.apart // 2
    numbers: list[list] = [[None] * by.apart, [None] * by.apart]
    for upper, one in enumerate(both_halves(words)):
        fault = attend_groups.faults(one)
        # An offset that is none is its scale's fault, too.
        theirs = jnp.where(lane < half, pltpu.roll(fault, LANES - half, 1), 0.0)
        fault = jnp.maximum(fault, theirs) > 0
        one = jnp.where(fault, jnp.where(lane < half, MARK, np.float32(0)), one)
        spread = compact.dot(spreads[...], one.astype(jnp.bfloat16))
        lines = attend_groups.parts(spread, by.tokens * by.apart)
        for word in range(by.apart):
            kind, number = divmod(word, half)
            numbers[kind][2 * number + upper] = lines[word :: by.apart]
    return numbers
