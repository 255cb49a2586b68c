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


RUN = 17
"""Integers of a run of words of a strip's rows where they lie: those of ``strips.ENTRY``, of a strip that begins its
page; then tokens a row, salt, and number of the strip."""


@triton.jit(do_not_specialize=["runs"])
def runs_kernel(lanes_ptr, units_ptr, table_ptr, runs, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Add one run of the rows of one page, in its unit, to the two lanes of its strip; a unit of -1 is zeros."""
    page = tl.program_id(0) // runs
    entry = table_ptr + tl.program_id(0) % runs * RUN
    unit = tl.load(units_ptr + page).to(tl.int64)
    address = tl.load(entry)
    row_step, head_step = tl.load(entry + 3), tl.load(entry + 4)
    words, base = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
    head_words = tl.load(entry + 8).to(tl.int32)
    heads, rows = tl.load(entry + 9).to(tl.int32), tl.load(entry + 10).to(tl.int32)
    ring, count = tl.load(entry + 11).to(tl.int32), tl.load(entry + 13).to(tl.int32)
    step, salt = tl.load(entry + 14).to(tl.int32), tl.load(entry + 15).to(tl.uint32)
    lanes = lanes_ptr + tl.load(entry + 16) * 2
    before = page * rows
    number = tl.load(entry + 12).to(tl.int32) + before
    total = tl.minimum(rows, tl.maximum(count - before, 0)) * heads * words
    there = tl.where(address != 0, tl.where(unit >= 0, total, 0), 0)
    inside = address.to(tl.pointer_type(tl.int32)) + unit * tl.load(entry + 1) + tl.load(entry + 2)
    first = tl.zeros([BLOCK], tl.uint32)
    second = tl.zeros([BLOCK], tl.uint32)
    for some in range(0, total, BLOCK):
        at = some + tl.arange(0, BLOCK)
        mask = at < total
        line = at // words
        row = line // heads
        head = line - row * heads
        word = at - line * words
        source = inside + (((number + row) % ring).to(tl.int64) * row_step + head * head_step + word)
        stored = tl.load(source, mask=at < there, other=0).to(tl.uint32, bitcast=True)
        position = ((number + row) * step).to(tl.uint32, bitcast=True)
        word = (base + head * head_words + word).to(tl.uint32, bitcast=True)
        place = position * FACTORS[1] + salt + word * FACTORS[0]
        first += tl.where(mask, mixed(stored ^ mixed(place + SEEDS[0])), 0)
        second += tl.where(mask, mixed(stored ^ mixed(place + SEEDS[1])), 0)
    if total > 0:
        tl.atomic_add(lanes, tl.sum(first.to(tl.int32, bitcast=True), axis=0))
        tl.atomic_add(lanes + 1, tl.sum(second.to(tl.int32, bitcast=True), axis=0))
