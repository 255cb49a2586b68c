"""Sampled rows of all layers beside their check words, compared or written, in one launch; see ``kvcore.check_words``.

Pools differ from layer to layer, so their addresses are numbers in tables.
"""

import triton
import triton.language as tl

from kvcore import check_words
from kvcore.digest import POSITION_FACTOR, WORD_FACTOR
from kvcore.kernels.triton.checksum import mixed

PIECE = 10
"""Integers of what lies together of a row: address of the pool, bytes from unit to unit, to the piece in a unit, from
row to row, from head to head, of the piece; heads; its first word in the row, words from head to head there; how
often a unit holds its rows."""

ROLE = 11
"""Integers of a role of a layer: first of its pieces, pieces, kind, whether it lies in slots, rows of a unit, most
copies of them, units, salt; address of the check words, those of a unit, rows from one to the next."""

NUMBERS, SPANS = 4, 4
"""What is asked of a request, and of each kind of its rows: as in ``kvcore.ops.canary``."""

ROWS, WORDS = 4, 128
"""A program's rows and words at a time."""

FAULT = 3
"""Integers of a fault: role, or -1 - n where number n of a request is another; request; row."""

SEED = tl.constexpr(check_words.SEED)
FACTORS = tl.constexpr((WORD_FACTOR, POSITION_FACTOR))


@triton.jit(do_not_specialize=["requests", "columns", "pairs", "splits", "step", "parts", "sample", "turn", "found"])
def watch_kernel(
    asked_ptr, slots_ptr, starts_ptr, lengths_ptr, table_ptr, roles_ptr, pieces_ptr, requests, columns, pairs, splits,
    step, parts, sample, turn, found, NARROW: tl.constexpr, MOST: tl.constexpr, NUMBERS: tl.constexpr,
    SPANS: tl.constexpr, ROLE: tl.constexpr, PIECE: tl.constexpr, FAULT: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Compare the sampled rows of a role of a request with their words, then give others theirs; or look at the index.

    What is wrong is counted at ``found`` of ``asked``, and the first MOST are named behind that. With NARROW words are
    put together from bytes. Of a ``turn`` a program compares ROWS rows and no more, and of every ``parts`` pairs of a
    role and a request one does: the next ones with the next. ``pairs`` have programs, one in ``step``.
    """
    found_ptr = asked_ptr + found
    number = tl.program_id(0) // splits
    if number >= pairs:
        request = tl.program_id(0) - pairs * splits
        _look_at_index(
            asked_ptr, slots_ptr, starts_ptr, lengths_ptr, table_ptr, found_ptr, request, requests, columns, MOST,
            FAULT, WORDS,
        )  # fmt: skip
    else:
        split = tl.program_id(0) % splits
        part = tl.maximum(turn, 0) % parts
        pair = number * step + tl.where(step > 1, part, 0)
        request, role = pair % requests, pair // requests
        its_turn = pair % parts == part
        entry = roles_ptr + role * ROLE
        kind = tl.load(entry + 2).to(tl.int32)
        in_slots, rows = tl.load(entry + 3) != 0, tl.load(entry + 4).to(tl.int32)
        units = tl.load(entry + 6)
        salt = tl.load(entry + 7).to(tl.uint32)
        words_ptr = tl.load(entry + 8).to(tl.pointer_type(tl.int32))
        words, stride = tl.load(entry + 9).to(tl.int32), tl.load(entry + 10).to(tl.int32)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        most_copies = tl.load(entry + 5).to(tl.int32)
        for sealing in range(2):
            span = asked_ptr + (NUMBERS + SPANS * kind + 2 * sealing) * requests + request
            first = (tl.load(span) + sample - 1) // sample
            end = (tl.maximum(tl.load(span + requests), 0) + sample - 1) // sample
            together = splits * ROWS
            in_turns = (turn >= 0) & (sealing == 0)
            cycle = tl.maximum((end - first + together - 1) // together, 1)
            begin = first + split * ROWS + tl.where(in_turns, turn // parts % cycle * together, 0)
            end = tl.where(in_turns, tl.minimum(end, begin + tl.where(its_turn, ROWS, 0)), end)
            for some in range(begin, end, together):
                inside = some + tl.arange(0, ROWS) < end
                row = (some + tl.arange(0, ROWS)) * sample
                column = row // rows
                held = inside & (column < columns)
                block = tl.load(table_ptr + request.to(tl.int64) * columns + column, mask=held, other=-1).to(tl.int64)
                unit = tl.where(in_slots, slot, block)
                known = inside & (unit >= 0) & (unit < units)
                place = words_ptr + tl.where(known, unit, 0) * words + row // stride % words
                stored = tl.load(place, mask=known, other=0).to(tl.uint32, bitcast=True)
                wrong = inside & (known == 0)
                for copy in range(tl.where(sealing == 1, 1, most_copies)):
                    total = _row_sums(
                        pieces_ptr, tl.load(entry), tl.load(entry + 1), tl.where(known, unit, 0),
                        row % rows, copy, rows, known, NARROW, PIECE, ROWS, WORDS,
                    )  # fmt: skip
                    numbered = row.to(tl.uint32, bitcast=True) * FACTORS[1] + salt
                    word = mixed(total ^ mixed(numbered))
                    tl.store(place, word.to(tl.int32, bitcast=True), mask=known & (sealing == 1))
                    wrong = wrong | (known & (stored != word))
                _name(found_ptr, wrong & (sealing == 0), role, request, row, MOST, FAULT)


@triton.jit
def _row_sums(
    pieces_ptr, first, count, unit, row, copy, rows, known, NARROW: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """[ROWS] uint32: the mixed words of rows of units."""
    sums = tl.zeros([ROWS, WORDS], tl.uint32)
    for number in range(first, first + count):
        piece = pieces_ptr + number * PIECE
        address, unit_step, base = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
        row_step, head_step = tl.load(piece + 3), tl.load(piece + 4)
        size, heads = tl.load(piece + 5).to(tl.int32), tl.load(piece + 6).to(tl.int32)
        word_first, word_step = tl.load(piece + 7).to(tl.int32), tl.load(piece + 8).to(tl.int32)
        long = (size + 3) // 4
        at_row = row.to(tl.int64) + copy % tl.load(piece + 9) * rows
        begin = unit * unit_step + base + at_row * row_step
        for some in range(0, heads * long, WORDS):
            at = some + tl.arange(0, WORDS)
            head = at // long
            word = at - head * long
            mask = known[:, None] & (at < heads * long)[None, :]
            byte = begin[:, None] + (head.to(tl.int64) * head_step + word * 4)[None, :]
            if NARROW:
                stored = tl.zeros([ROWS, WORDS], tl.uint32)
                pool = address.to(tl.pointer_type(tl.uint8))
                for n in tl.static_range(4):
                    there = mask & (word * 4 + n < size)[None, :]
                    stored = stored | (tl.load(pool + byte + n, mask=there, other=0).to(tl.uint32) << 8 * n)
            else:
                pool = address.to(tl.pointer_type(tl.int32))
                stored = tl.load(pool + byte // 4, mask=mask, other=0).to(tl.uint32, bitcast=True)
            place = (word_first + head * word_step + word).to(tl.uint32, bitcast=True)
            key = mixed(place * FACTORS[0] + SEED)
            sums += tl.where(mask, mixed(stored ^ key[None, :]), 0)
    return tl.sum(sums.to(tl.int32, bitcast=True), axis=1).to(tl.uint32, bitcast=True)


@triton.jit
def _look_at_index(
    asked_ptr, slots_ptr, starts_ptr, lengths_ptr, table_ptr, found_ptr, request, requests, columns,
    MOST: tl.constexpr, FAULT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Compare what the index says of a request with what it should."""
    sums = tl.zeros([WORDS], tl.uint32)
    for some in range(0, columns, WORDS):
        at = some + tl.arange(0, WORDS)
        block = tl.load(table_ptr + request.to(tl.int64) * columns + at, mask=at < columns, other=-1)
        key = mixed(at.to(tl.uint32, bitcast=True) * FACTORS[0] + SEED)
        sums += tl.where(block >= 0, mixed(block.to(tl.uint32, bitcast=True) ^ key), 0)
    hash = tl.sum(sums.to(tl.int32, bitcast=True), axis=0)
    asked_ptr += request
    number = tl.arange(0, 4)
    got = tl.where(number == 0, tl.load(slots_ptr + request), hash)
    got = tl.where(number == 1, tl.load(starts_ptr + request), got)
    got = tl.where(number == 2, tl.load(lengths_ptr + request), got)
    wrong = got != tl.load(asked_ptr + number * requests)
    _name(found_ptr, wrong, -1 - number, request, 0 * number, MOST, FAULT)


@triton.jit
def _name(found_ptr, wrong, role, request, row, MOST: tl.constexpr, FAULT: tl.constexpr):
    """Count what is wrong, and name it while there is room."""
    count = tl.sum(wrong.to(tl.int32), axis=0)
    if count > 0:
        number = tl.atomic_add(found_ptr, count) + tl.cumsum(wrong.to(tl.int32), axis=0) - 1
        room = wrong & (number < MOST)
        fault = found_ptr + 1 + number * FAULT
        tl.store(fault, role, mask=room)
        tl.store(fault + 1, request, mask=room)
        tl.store(fault + 2, row, mask=room)
