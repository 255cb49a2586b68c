"""Launches of attention over the window and the entries: the kernel, and the merge of its parts."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

from kvcore.kernels.triton import attend
from kvcore.kernels.triton.attend import (
    LOG2_E,
    MOST_SPLITS,
    TileConfig,
    alike,
    attend_config,
    attend_constants,
    merge_constants,
    parts_of,
    splits_for,
)
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches.launching import BOUND, Array, Framework, Kernel, bound_record, launch
from kvcore.kernels.triton.record import PLACES, RowRecord, ceil_div


class Pipeline(NamedTuple):
    """How programs of ``attend_hopper`` share their work out.

    Attributes:
        keys: of a tile, of which ``stages`` are kept.
        producers: warps that decode keys, ``rows`` at a time, with ``registers`` registers a thread.
    """

    keys: int = 64
    stages: int = 2
    producers: int = 4
    rows: int = 32
    registers: int = 128

    @property
    def heads(self) -> int:
        """Heads of a program."""
        return HOPPER_HEADS


PIPELINE = Pipeline()
HOPPER_HEADS, HOPPER_WARPS, HOPPER_PAIRS = 64, 8, 32
"""Of ``attend_hopper``: heads and warps of a program; pairs of last channels that it turns back at most."""
HOPPER_SHARED = 208 << 10
"""Bytes of shared memory that a program takes, or a few more."""
HOPPER_TILE, HOPPER_START, HOPPER_MERGE = 1.9, 8.0, 3.0
"""µs of a tile of 64 keys, of a program beside its tiles, and of putting parts together, on an H200."""


class Share(NamedTuple):
    """How a call is cut into programs, and how many of them share a query's keys."""

    config: TileConfig | Pipeline
    splits: int


def pipelined(gluon: bool, own: Array | None, frequencies: Array | None) -> bool:
    """True for calls that ``attend_hopper`` takes, where device, rows and queries are such as it takes, too.

    Args:
        gluon: the framework can launch it.
    """
    return gluon and own is None and (frequencies is None or frequencies.shape[0] <= HOPPER_PAIRS)


@cache
def on_hopper(props: DeviceProps, window: RowRecord | None, entries: RowRecord | None, *, bf16: bool) -> bool:
    """True where ``attend_hopper`` was written for the device, for bf16 queries and for rows of both kinds."""
    rows = [record for record in (window, entries) if record is not None]
    if props.capability != 90 or props.shared < HOPPER_SHARED or not bf16 or (len(rows) == 2 and not alike(*rows)):
        return False
    wanted = {"dim": 512, "quant": 448, "width": 64, "code": "e4m3", "scale": "e8m0", "plain": "bf16", "heads": 1}
    # Codes and scales are read in words; a row's scales are two of them.
    places = [place for place in PLACES if not place.startswith("plain")]
    words = all(one.groups + one.pad == 8 and not any(getattr(one, place) % 4 for place in places) for one in rows)
    return words and all(getattr(one, name) == value for one in rows for name, value in wanted.items())


def hopper_splits(props: DeviceProps, tokens: int, heads: int, keys: int) -> int:
    """Programs that share a query's keys: what takes the least, by waves of programs and tiles of each."""
    programs, tiles = max(1, tokens * ceil_div(heads, HOPPER_HEADS)), max(1, ceil_div(keys, PIPELINE.keys))
    best, least = 1, float("inf")
    for splits in range(1, min(tiles, MOST_SPLITS) + 1):
        waves = ceil_div(programs * splits, props.multiprocessors)
        time = waves * (ceil_div(tiles, splits) * HOPPER_TILE + HOPPER_START) + (splits > 1) * HOPPER_MERGE
        if time < least:
            best, least = splits, time
    return best


@lru_cache(4096)
def config_of(
    props: DeviceProps, window: int, entries: int, bf16: bool, tokens: int, heads: int, keys: int, selected: bool,
    pipelined: bool,
) -> Share:  # fmt: skip
    """The cut of a call by numbers of records (-1: none) and sizes; see ``attend_config`` and ``splits_for``.

    Args:
        pipelined: as the function of that name says of the call.
    """
    rows = bound_record(window), bound_record(entries)
    if pipelined and on_hopper(props, *rows, bf16=bf16):
        return Share(PIPELINE, hopper_splits(props, tokens, heads, keys))
    parts = parts_of(*rows, bf16=bf16)
    assert parts is not None
    config = attend_config(props, tokens, heads, keys, parts, *rows, selected=selected)
    return Share(config, splits_for(props, tokens, heads, keys, config))


@cache
def _attend(
    window: int, entries: int, own: int, config: TileConfig | Pipeline, bf16: bool, span: int, ratio: int, every: bool,
    sink: bool, split: bool, pairs: int, native: bool,
) -> Kernel:  # fmt: skip
    writes = ("partial", "partial_lse") if split else ("out", "lse")
    seen = {"WINDOW": span, "RATIO": ratio, "ALL": every, "SINK": sink, "SPLIT": split, "PAIRS": pairs}
    if isinstance(config, Pipeline):
        return _on_hopper(window, entries, config, seen, writes)
    rows = map(bound_record, (window, entries, own))
    constants = {**attend_constants(config, *rows, bf16=bf16), **seen, "NATIVE": native}
    return Kernel(attend.attend_kernel, constants, config.warps, writes=writes, fused=True)


def _on_hopper(window: int, entries: int, config: Pipeline, seen: dict[str, Any], writes: tuple[str, ...]) -> Kernel:
    # Older releases of Triton lack Gluon, which is not asked for before it is known to be there.
    from kvcore.kernels.triton import attend_hopper

    w, e = bound_record(window), bound_record(entries)
    of_config = {name.upper(): value for name, value in config._asdict().items()}
    constants = {"W": w or e, "E": e or w, **seen, **of_config}
    return Kernel(attend_hopper.attend_hopper_kernel, constants, HOPPER_WARPS, writes=writes, fused=True)


@cache
def _merged(dim: int, splits: int, sink: bool, pairs: int, ahead: bool, native: bool) -> Kernel:
    """The kernel that puts ``splits`` parts of rows of ``dim`` channels together."""
    constants = {**merge_constants(dim, splits), "SINK": sink, "PAIRS": pairs, "NATIVE": native}
    return Kernel(attend.merge_kernel, constants, writes=("out", "lse"), fused=True, ahead=ahead)


def parts_for(to: Framework, workspace: Array, out: Array, lse: Array, splits: int) -> tuple[Array, Array]:
    """Where ``splits`` programs of a row write: parts of out and lse in ``workspace``; one writes both whole."""
    if splits == 1:
        return out, lse
    tokens, heads, dim = out.shape
    sums = to.part(workspace, splits * tokens * heads * dim, (splits, tokens, heads), to.float32)
    return to.part(workspace, 0, (splits, tokens, heads, dim), to.float32), sums


def merge(
    to: Framework, out: Array, lse: Array, parts: tuple[Array, Array], beside: Array, positions: Array,
    frequencies: Array, splits: int, *, sunk: bool, native: bool, pairs: int = 0, ahead: bool = False,
) -> None:  # fmt: skip
    """Put parts together, where there are several; ``beside`` is the sink if it is ``sunk``."""
    if splits == 1:
        return
    tokens, heads, dim = out.shape
    to.run(
        _merged(dim, splits, sunk, pairs, ahead, native),
        (tokens * heads,),
        (out, lse, *parts, beside, positions, frequencies),
        (heads, splits),
    )


@cache
def _inverse_rope(dim: int, pairs: int, lse: bool, ahead: bool, native: bool) -> Kernel:
    constants = {"DIM": dim, "PAIRS": pairs, "HEADS": attend.TURN_HEADS, "LSE": lse, "NATIVE": native}
    return Kernel(attend.inverse_rope_kernel, constants, writes=("out", "lse"), fused=True, ahead=ahead)


def _attend_out(to: Framework, q: Array) -> tuple[Array, Array]:
    return to.empty_like(q), to.empty(q.shape[:2], to.float32, q)


@launch("workspace", outputs=_attend_out)
def attend_rows(
    to: Framework, q: Array, selected: Array | None, sink: Array | None, own: Array | None, positions: Array,
    request_index: Array, slots: Array, starts: Array, block_table: Array, window: list[Array],
    entries: list[Array], frequencies: Array | None, workspace: Array, records: list[int], sizes: list[int],
    scale: float, bf16: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of q [tokens, heads, dim], contiguous: out like q and lse [tokens, heads].

    Args:
        selected: [tokens, topk] entries, contiguous; None: every visible one.
        own: [tokens, row_bytes] canonical rows of the step where the ring does not hold them yet.
        window, entries: the pools' buffers, empty where the layer lacks them.
        frequencies: fp32, of the pairs of last channels by which outputs are turned back; None: of none.
        workspace: fp32, for ``splits`` · tokens · heads · (dim + 1) numbers where ``splits`` > 1.
        records: of the window, the entries, the own rows; -1 where there are none.
        sizes: window, ratio (0 without), splits, most keys of a query.
        bf16: keys and queries may be multiplied in bf16.
    """
    out, lse = _attend_out(to, q)
    tokens, heads, dim = q.shape
    if not tokens * heads * dim:
        return out, lse
    w, e = (BOUND[number] if number >= 0 else None for number in records[:2])
    span, ratio, splits, keys = sizes
    fits = pipelined(to.gluon, own, frequencies)
    config = config_of(to.props(q), *records[:2], bf16, tokens, heads, keys, selected is not None, fits).config
    native, pairs = to.native(q), 0 if frequencies is None else frequencies.shape[0]
    absent, frequencies = (positions,) * 3, lse if frequencies is None else frequencies
    beside, parts = lse if sink is None else sink, parts_for(to, workspace, out, lse, splits)
    topk = 0 if selected is None else selected.shape[1]
    seen = span if w else 0, ratio if e else 0, selected is None, sink is not None, splits > 1, pairs
    to.run(
        _attend(*records, config, bf16, *seen, native),
        (tokens * ceil_div(heads, config.heads) * splits,),
        (
            out, lse, *parts, q, beside, positions if selected is None else selected,
            *(w.given(window) if w else absent), *(e.given(entries) if e else absent),
            positions if own is None else own, positions, request_index, slots, starts, block_table, frequencies,
        ),
        (tokens, heads, topk, block_table.shape[1], splits, scale * LOG2_E),
    )  # fmt: skip
    merge(
        to, out, lse, parts, beside, positions, frequencies, splits, sunk=sink is not None, native=native, pairs=pairs,
        ahead=isinstance(config, Pipeline),
    )  # fmt: skip
    return out, lse


@launch("out")
def inverse_rope_rows(to: Framework, out: Array, positions: Array, frequencies: Array) -> None:
    """Turn outputs [tokens, heads, dim], contiguous, back by positions [tokens]: where others' kernels attended."""
    if frequencies.shape[0]:
        _turned(to, out, None, positions, frequencies)


@launch("out", "lse")
def flash_answer(to: Framework, out: Array, lse: Array, positions: Array, frequencies: Array | None) -> None:
    """Make FlashMLA's answer one of ``attend_rows``: lse [tokens, heads] has +inf of queries without keys."""
    _turned(to, out, lse, positions, frequencies)


def _turned(to: Framework, out: Array, lse: Array | None, positions: Array, frequencies: Array | None) -> None:
    tokens, heads, dim = out.shape
    if tokens * heads * dim:
        pairs = 0 if frequencies is None else frequencies.shape[0]
        given, programs = out if lse is None else lse, tokens * ceil_div(heads, attend.TURN_HEADS)
        to.run(
            _inverse_rope(dim, pairs, lse is not None, 4 * programs <= to.ahead(out), to.native(out)),
            (programs,),
            (out, given, positions, given if frequencies is None else frequencies),
            (heads,),
        )
