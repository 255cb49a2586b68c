"""Launches that move or fill bytes: whole units of a pool, rows of rings, pages of exports."""

from functools import cache

from kvcore.kernels.triton import rings, strips, units
from kvcore.kernels.triton.launches.launching import Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import ceil_div, power_of_two


@cache
def _fill(given: bool, value: int) -> Kernel:
    constants = {"FROM_UNIT": given, "VALUE": value, "BLOCK": units.BLOCK}
    return Kernel(units.fill_units_kernel, constants, writes=("pool",))


@cache
def _take(back: bool) -> Kernel:
    constants = {"BACK": back, "BLOCK": units.BLOCK}
    return Kernel(units.take_units_kernel, constants, writes=("pool" if back else "held",))


@cache
def _ring_rows(numbers: tuple[int, ...], rows: int, copies: int, size: int, back: bool) -> Kernel:
    fields = tuple(numbers[n : n + 7] for n in range(0, len(numbers), 7))
    block = power_of_two(max(field[5] for field in fields))
    constants = {
        "FIELDS": fields, "COUNT": len(fields), "ROWS": rows, "COPIES": copies, "SIZE": size, "BACK": back,
        "BLOCK": block,
    }  # fmt: skip
    writes = ("one", "two", "three") if back else ("held",)
    return Kernel(units.ring_rows_kernel, constants, max(1, min(4, block // 128)), writes=writes)


@cache
def _move(store: bool) -> Kernel:
    constants = {"STORE": store, "ENTRY": strips.ENTRY, "BLOCK": strips.BLOCK}
    return Kernel(strips.move_strips_kernel, constants, writes=() if store else ("pages",))


@cache
def _rings(back: bool) -> Kernel:
    constants = {"BACK": back, "ENTRY": rings.ENTRY, "BLOCK": rings.BLOCK}
    return Kernel(rings.move_rings_kernel, constants, writes=() if back else ("held",))


@launch("pool")
def fill_units(to: Framework, pool: Array, numbers: Array, unit: Array | None, value: int) -> None:
    """Fill the units [n] of a pool [units, bytes] with a unit's bytes, or without one with a byte of ``value``."""
    target = to.words(pool)
    count, size = numbers.shape[0], target.shape[1]
    if not count * target.shape[0] * size:
        return
    chunks = ceil_div(size, units.BLOCK)
    wide = value * 0x01010101 if target.dtype == to.int32 else value
    to.run(
        _fill(unit is not None, wide - (1 << 32) if wide >= 1 << 31 else wide),
        (count * chunks,),
        (target, numbers, target if unit is None else to.view(unit, target.dtype)),
        (size, chunks),
    )


@launch("pool")
def copy_units(to: Framework, pool: Array, sources: Array, targets: Array) -> None:
    """Copy units [n] of a pool [units, bytes] onto others; all are read before any is written."""
    inside = to.words(pool)
    count, size = sources.shape[0], inside.shape[1]
    if not count * size:
        return
    held, chunks = to.empty((count, size), inside.dtype, pool), ceil_div(size, units.BLOCK)
    for numbers, others, back in ((sources, targets, False), (targets, sources, True)):
        to.run(_take(back), (count * chunks,), (inside, numbers, others, held), (size, chunks))


@launch("buffers", "held")
def move_ring_rows(
    to: Framework, buffers: list[Array], held: Array, positions: Array, request_index: Array, slots: Array,
    fields: list[int], rows: int, copies: int, back: bool,
) -> None:  # fmt: skip
    """Copy the bytes of the ring rows that the step's tokens take to ``held`` [tokens, heads, bytes], or back.

    Args:
        buffers: the pools of a region, three at most.
        fields: seven numbers a field, see ``ring_rows_kernel``.
        rows: of a ring, which lies ``copies`` times in its unit.
    """
    tokens, heads, size = held.shape
    if tokens * heads * size:
        pools = (*buffers, *buffers[:1] * 2)[:3]
        kernel = _ring_rows(tuple(fields), rows, copies, size, back)
        to.run(kernel, (tokens * heads,), (*pools, held, positions, request_index, slots), (heads,))


@launch("held")
def move_rings(
    to: Framework, held: Array, positions: Array, request_index: Array, slots: Array, lengths: Array, table: Array,
    rows: Array, back: bool,
) -> None:  # fmt: skip
    """Copy the bytes of the rows that the step's tokens take in many rings to ``held`` [tokens, words], or back.

    Args:
        table: [runs, ENTRY] int64; the pools' addresses are in it.
        rows: [runs] int32, of the ring of each run.
    """
    tokens, words = held.shape
    runs = table.shape[0]
    if tokens * words * runs:
        arrays = held, positions, request_index, slots, lengths, table, rows
        to.run(_rings(back), (tokens * runs,), arrays, (words, runs))


@launch("pages")
def move_strips(to: Framework, pages: Array, numbers: Array, table: Array, first_page: int, store: bool) -> None:
    """Copy the runs of ``table`` [runs, ENTRY] int64 between pages [pages, words] and units [pages] int32 of pools.

    ``first_page``: number of the first of these pages in the request.
    """
    count, words = pages.shape
    runs = table.shape[0]
    if count * words * runs:
        to.run(_move(store), (count * runs,), (pages, numbers, table), (words, runs, first_page))
