"""Launches on what is stored or answered: digests of rows and pages, parts of context shards, FlashMLA's indices."""

from functools import cache

from kvcore.kernels.triton import checksum, flash_index, shards
from kvcore.kernels.triton.launches.launching import Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import ceil_div, power_of_two


@cache
def _digest() -> Kernel:
    constants = {"ROWS": checksum.ROWS, "WORDS": checksum.WORDS}
    return Kernel(checksum.digest_kernel, constants, writes=("lanes",), zeroed=("lanes",))


@cache
def _strips() -> Kernel:
    constants = {"ENTRY": checksum.ENTRY, "BLOCK": checksum.BLOCK}
    return Kernel(checksum.strips_kernel, constants, writes=("lanes",), zeroed=("lanes",))


@cache
def _join(count: int, once: bool, sink: bool, dim: int) -> Kernel:
    constants = {"SHARDS": count, "ONCE": once, "SINK": sink, "DIM": dim, "BLOCK": power_of_two(dim)}
    return Kernel(shards.shards_kernel, constants, writes=("out", "lse"))


@cache
def _flash(span: int, aligned: int, ring: int, rows: int, ratio: int, every: bool, line: int, ahead: bool) -> Kernel:
    constants = {
        "WINDOW": span, "LINE": aligned, "RING": ring, "ROWS": rows, "RATIO": ratio, "ALL": every,
        "WIDTH": power_of_two(aligned), "BLOCK": max(16, min(512, power_of_two(line))),
    }  # fmt: skip
    return Kernel(flash_index.flash_index_kernel, constants, writes=("window", "entries"), ahead=ahead)


def _lanes(to: Framework, words: Array) -> Array:
    return to.filled((words.shape[0], 2), 0, to.int32, words)


@launch(outputs=_lanes)
def digest_lanes(to: Framework, words: Array, positions: Array, salt: int) -> Array:
    """Lanes [requests, 2] int32 of canonical rows [requests, columns, words] int32 at positions [requests, columns]."""
    lanes = _lanes(to, words)
    requests, columns, size = words.shape
    if requests * columns * size:
        chunks = ceil_div(columns, checksum.ROWS)
        # Always within int32, so that one compiled kernel takes every salt.
        salt = salt - (1 << 32) if salt >= 1 << 31 else salt
        to.run(_digest(), (requests * chunks,), (lanes, words, positions), (columns, size, salt, chunks))
    return lanes


@launch(outputs=_lanes)
def digest_strips(to: Framework, words: Array, table: Array, first_page: int) -> Array:
    """Lanes [pages, 2] int32 of pages [pages, words] int32 whose strips table [strips, ENTRY] int32 describes."""
    lanes = _lanes(to, words)
    pages, size = words.shape
    strips = table.shape[0]
    if pages * strips:
        to.run(_strips(), (pages, strips), (lanes, words, table), (size, first_page))
    return lanes


@cache
def _runs() -> Kernel:
    constants = {"RUN": checksum.RUN, "BLOCK": checksum.BLOCK}
    return Kernel(checksum.runs_kernel, constants, writes=("lanes",))


@launch("lanes")
def digest_runs(to: Framework, lanes: Array, numbers: Array, table: Array) -> None:
    """Add to lanes [components, 2] int32 the rows in units [pages] int32 that table [runs, RUN] int64 describes."""
    pages, runs = numbers.shape[0], table.shape[0]
    if pages * runs:
        to.run(_runs(), (pages * runs,), (lanes, numbers, table), (runs,))


def _joined(to: Framework, parts: Array, like: Array) -> tuple[Array, Array]:
    _, tokens, heads, size = parts.shape
    return to.empty((tokens, heads, size - 1), like.dtype, like), to.empty((tokens, heads), to.float32, parts)


@launch(outputs=_joined)
def join_shards(
    to: Framework, parts: Array, once: Array | None, once_lse: Array | None, sink: Array | None, like: Array
) -> tuple[Array, Array]:
    """(out [T, H, dim] of the dtype of ``like``, lse [T, H]) from parts [shards, T, H, dim + 1] fp32.

    Args:
        parts: every shard's output, and its log-sum as the last value.
        once: [T, H, dim], what every shard has alike, and
        once_lse: [T, H] fp32 its log-sum; or None.
        sink: [H] or None.
        like: gives the dtype.
    """
    count, tokens, heads, size = parts.shape
    out, lse = _joined(to, parts, like)
    if tokens * heads:
        given = (parts if array is None else to.dense(array) for array in (once, once_lse, sink))
        kernel = _join(count, once is not None, sink is not None, size - 1)
        to.run(kernel, (tokens * heads,), (out, lse, parts, *given), (tokens * heads, heads))
    return out, lse


def _flash_out(to: Framework, positions: Array, selected: Array | None, sizes: list[int]) -> tuple[Array, Array]:
    *_, every, multiple = sizes
    entries = every if selected is None else selected.shape[1]
    lines = (ceil_div(size, multiple) * multiple for size in (sizes[0], entries))
    window, entries = (to.empty((positions.shape[0], line), to.int32, positions) for line in lines)
    return window, entries


@launch(outputs=_flash_out)
def flash_rows(
    to: Framework, positions: Array, request_index: Array, slots: Array, block_table: Array, selected: Array | None,
    sizes: list[int],
) -> tuple[Array, Array]:  # fmt: skip
    """Physical rows [tokens, window] and [tokens, entries] int32, padded with -1.

    Args:
        selected: [tokens, topk] entries, contiguous; None: every visible one.
        sizes: window, rows of a ring, rows of a block, ratio (0 without entries), the most entries of a request (0
            where some are selected), what lengths are multiples of.
    """
    window, entries = _flash_out(to, positions, selected, sizes)
    span, ring, rows, ratio, *_ = sizes
    tokens, line = entries.shape
    if tokens:
        of_line = ratio if line else 0, selected is None, line
        kernel = _flash(span, window.shape[1], ring, rows, *of_line, 4 * tokens <= to.ahead(positions))
        numbers = positions if selected is None else selected
        to.run(
            kernel,
            (tokens,),
            (window, entries, positions, request_index, slots, block_table, numbers),
            (0 if selected is None else selected.shape[1], line, block_table.shape[1]),
        )
    return window, entries
