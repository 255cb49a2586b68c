"""A request's rows in pages all at once: moved, both ways, and digested; a backend that declines is held to that."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.backends.reference import lifecycle
from kvcore.conformance.canonical import POISON, canonical_noise, read_rows, write_rows
from kvcore.conformance.case import Bench, Case
from kvcore.conformance.outputs import Output, exact
from kvcore.conformance.reduced import drafts
from kvcore.digest import MASK, region_salt
from kvcore.ops import RawRows, Strip
from kvcore.portable.pages import page_layout

Bytes = np.ndarray


class Part(NamedTuple):
    """What is asked for at once: pages of ``nbytes`` bytes, their strips, and the unit of each."""

    name: str
    nbytes: int
    strips: tuple[Strip, ...]
    units: Bytes


def move_strips(bench: Bench) -> list[Output]:
    """Each request's rows out of pools full of rows into poison, then out of other pages into poisoned pools."""
    case, found = bench.case, []
    full = _full(case)
    pools, stored = bench.load(full), bench.pools()
    for part in _parts(case):
        poison = np.full((len(part.units), part.nbytes), POISON, np.uint8)
        pages = bench.put(poison)
        moved = bench.ops.move_strips(pools, pages, part.strips, bench.put(part.units))
        got = to_numpy(pages)
        if moved is False and (got == POISON).all():
            _read(full, case, part, got)
        found.append(exact(f"{part.name} in pages", got, "page", "byte"))

        given = _noise(case, part)
        before = bench.hold(stored)
        moved = bench.ops.move_strips(stored, bench.put(given), part.strips, bench.put(part.units), store=True)
        after = bench.hold(stored)
        if moved is False and all((after[name] == before[name]).all() for name in after):
            _store(after, case, part, given)
            stored = bench.load(after)
    # Reading changed nothing.
    same = [(array == full[name]).all() for name, array in bench.hold(pools).items()]
    return [*found, exact("pools that were read are as before", np.array(same), "buffer"), *bench.stored(stored)]


def digest_strips(bench: Bench) -> list[Output]:
    """Pages of each request, all of them and from the second on, against digests of rows."""
    case, found = bench.case, []
    for part in _parts(case):
        pages = _noise(case, part)
        for first in range(min(2, len(pages))):
            got = bench.ops.digest_strips(bench.put(pages[first:]), part.strips, first)
            lanes = _lanes(pages, part.strips)[first:] if got is None else to_numpy(got).astype(np.int64) & MASK
            found.append(exact(f"lanes of {part.name} from page {first} on", lanes, "page", "lane"))
    return found


def _parts(case: Case) -> Iterator[Part]:
    """History and record of each request, with what a rollback would need; every other one lacks its first block."""
    for number, row in enumerate(case.rows):
        layout = page_layout(case.plan.spec, max(0, row.length - drafts(case.plan.spec)), row.length)
        blocks = np.array(row.blocks[: layout.blocks], np.int32)
        if number % 2:
            blocks[:1] = -1
        even = tuple(strip for strip in layout.record.strips if isinstance(strip.numbers, range))
        record = layout.record.pages * layout.page_bytes
        yield Part(f"history of request {number}", layout.page_bytes, layout.history.strips, blocks)
        yield Part(f"record of request {number}", record, even, np.array([row.slot], np.int32))


def _full(case: Case) -> dict[str, Bytes]:
    """Pools with a row of somebody's in every place."""
    image = case.image()
    for region in case.plan.regions:
        units, numbers = (axis.reshape(-1) for axis in np.indices((case.plan.units(region), region.rows)))
        rng = case.rng(f"{region.layer} {region.role} {region.part} rows")
        rows = canonical_noise(rng, len(units) * region.heads, region.format)
        write_rows(image, region, units, numbers, rows.reshape(len(units), region.heads, region.format.row))
    return image


def _noise(case: Case, part: Part) -> Bytes:
    """Pages of poison with canonical rows of nobody in the part's strips."""
    pages = np.full((len(part.units), part.nbytes), POISON, np.uint8)
    for strip in part.strips:
        rng = case.rng(f"{part.name} {strip.layer} {strip.role}")
        (page, _, column), first = _cells(strip), 0
        for region in case.plan.region(strip.layer, strip.role):
            width = region.heads * region.format.row
            rows = canonical_noise(rng, len(page) * region.heads, region.format).reshape(len(page), width)
            pages[page[:, None], column[:, first : first + width]] = rows
            first += width
    return pages


def _read(pools: dict[str, Bytes], case: Case, part: Part, pages: Bytes) -> None:
    """What a backend that declines leaves to its caller: the pools' rows into pages."""
    for strip in part.strips:
        regions = case.plan.region(strip.layer, strip.role)
        held = [read_rows(pools, region)[:, : region.rows] for region in regions]
        held = [rows.reshape(*rows.shape[:2], -1) for rows in held]
        page, number, column = _cells(strip)
        unit = part.units[page]
        rows = np.concatenate(held, axis=2)[unit, number % regions[0].rows]
        pages[page[:, None], column] = np.where(unit[:, None] >= 0, rows, 0)


def _store(pools: dict[str, Bytes], case: Case, part: Part, pages: Bytes) -> None:
    """The inverse."""
    for strip in part.strips:
        page, number, column = _cells(strip)
        unit, first = part.units[page], 0
        kept = unit >= 0
        for region in case.plan.region(strip.layer, strip.role):
            width = region.heads * region.format.row
            rows = pages[page[:, None], column[:, first : first + width]]
            rows = rows.reshape(len(page), region.heads, region.format.row)
            write_rows(pools, region, unit[kept], number[kept] % region.rows, rows[kept])
            first += width


def _lanes(pages: Bytes, strips: Sequence[Strip]) -> Bytes:
    """The sums of the reference's digests of rows: [pages, 2]."""
    lanes = np.zeros((len(pages), 2), np.int64)
    for strip in strips:
        positions = np.full(len(pages) * strip.rows, -1, np.int32)
        positions[: len(strip.numbers)] = _cells(strip)[1] * strip.tokens_per_row
        rows = pages[:, strip.start : strip.stop].reshape(len(pages), strip.rows, strip.row_bytes)
        raw = RawRows(rows, positions.reshape(len(pages), strip.rows))
        lanes += lifecycle.digest_rows(raw, region_salt(strip.layer, strip.role))
    return lanes & MASK


def _cells(strip: Strip) -> tuple[Bytes, Bytes, Bytes]:
    """Page [n], number [n], and bytes in the page [n, row_bytes] of every row."""
    page, row = divmod(np.arange(len(strip.numbers)), strip.rows)
    column = strip.start + row[:, None] * strip.row_bytes + np.arange(strip.row_bytes)
    return page, np.array(strip.numbers, np.int64), column
