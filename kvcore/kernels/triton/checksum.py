"""The content digest of canonical rows: two 32-bit lanes a request, as ``kvcore.digest`` defines them."""

import triton
import triton.language as tl

from kvcore import digest

SEEDS = tl.constexpr(digest.LANE_SEEDS)
FACTORS = tl.constexpr((digest.WORD_FACTOR, digest.POSITION_FACTOR, *digest.MIX_FACTORS))
"""Of a word's place in its row, of the row's position, and the mixer's two."""
ROWS, WORDS = 16, 128


@triton.jit(do_not_specialize=["columns", "words", "salt", "chunks"])
def digest_kernel(
    lanes_ptr, rows_ptr, positions_ptr, columns, words, salt, chunks, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Add the mixed words of rows [requests, columns, words] to two 32-bit lanes a request; see ``kvcore.digest``."""
    request = tl.program_id(0) // chunks
    column = tl.program_id(0) % chunks * ROWS + tl.arange(0, ROWS)
    inside = column < columns
    cell = request.to(tl.int64) * columns + column
    position = tl.load(positions_ptr + cell, mask=inside, other=-1)
    valid = position >= 0
    first = tl.zeros([ROWS, WORDS], tl.uint32)
    second = tl.zeros([ROWS, WORDS], tl.uint32)
    for some in range(0, words, WORDS):
        word = some + tl.arange(0, WORDS)
        mask = valid[:, None] & (word < words)[None, :]
        stored = tl.load(rows_ptr + cell[:, None] * words + word[None, :], mask=mask, other=0)
        stored = stored.to(tl.uint32, bitcast=True)
        row_part = position.to(tl.uint32, bitcast=True) * FACTORS[1] + salt.to(tl.uint32)
        place = row_part[:, None] + (word.to(tl.uint32, bitcast=True) * FACTORS[0])[None, :]
        first += tl.where(mask, mixed(stored ^ mixed(place + SEEDS[0])), 0)
        second += tl.where(mask, mixed(stored ^ mixed(place + SEEDS[1])), 0)
    first = tl.sum(tl.sum(first.to(tl.int32, bitcast=True), axis=1), axis=0)
    second = tl.sum(tl.sum(second.to(tl.int32, bitcast=True), axis=1), axis=0)
    tl.atomic_add(lanes_ptr + request * 2, first)
    tl.atomic_add(lanes_ptr + request * 2 + 1, second)


@triton.jit
def mixed(x):
    """murmur3's 32-bit finaliser of uint32."""
    x = (x ^ (x >> 16)) * FACTORS[2]
    x = (x ^ (x >> 13)) * FACTORS[3]
    return x ^ (x >> 16)


BLOCK = 1024
"""Words at a time of ``strips_kernel``."""

WORD = 4
"""Bytes of a word of the digest."""

ENTRY = 7
"""Integers of a strip: first word, rows a page, words a row, first position, tokens a row, rows in all, salt."""


@triton.jit(do_not_specialize=["page_words", "first_page"])
def strips_kernel(lanes_ptr, words_ptr, table_ptr, page_words, first_page, ENTRY: tl.constexpr, BLOCK: tl.constexpr):
    """Add one strip of one page, rows without gaps between them, to the page's two lanes; see ``kvcore.digest``."""
    page = tl.program_id(0)
    entry = table_ptr + tl.program_id(1) * ENTRY
    rows, words = tl.load(entry + 1), tl.load(entry + 2)
    origin, step, count = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    salt = tl.load(entry + 6).to(tl.uint32, bitcast=True)
    before = (first_page + page) * rows
    total = tl.minimum(rows, tl.maximum(count - before, 0)) * words
    strip = words_ptr + page.to(tl.int64) * page_words + tl.load(entry)
    first = tl.zeros([BLOCK], tl.uint32)
    second = tl.zeros([BLOCK], tl.uint32)
    for some in range(0, total, BLOCK):
        at = some + tl.arange(0, BLOCK)
        mask = at < total
        row = at // words
        word = (at - row * words).to(tl.uint32, bitcast=True)
        position = (origin + (before + row) * step).to(tl.uint32, bitcast=True)
        stored = tl.load(strip + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
        place = position * FACTORS[1] + salt + word * FACTORS[0]
        first += tl.where(mask, mixed(stored ^ mixed(place + SEEDS[0])), 0)
        second += tl.where(mask, mixed(stored ^ mixed(place + SEEDS[1])), 0)
    if total > 0:
        tl.atomic_add(lanes_ptr + page * 2, tl.sum(first.to(tl.int32, bitcast=True), axis=0))
        tl.atomic_add(lanes_ptr + page * 2 + 1, tl.sum(second.to(tl.int32, bitcast=True), axis=0))
