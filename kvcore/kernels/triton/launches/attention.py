"""Launches of attention over the window and the entries: the kernel, and the merge of its parts."""

from functools import cache, lru_cache
from typing import NamedTuple

from kvcore.kernels.triton import attend
from kvcore.kernels.triton.attend import (
    LOG2_E,
    TileConfig,
    attend_config,
    attend_constants,
    merge_constants,
    parts_of,
    splits_for,
)
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches.launching import BOUND, Array, Framework, Kernel, bound_record, launch
from kvcore.kernels.triton.record import ceil_div


class Share(NamedTuple):
    """How a call is cut into programs, and how many of them share a query's keys."""

    config: TileConfig
    splits: int


@lru_cache(4096)
def config_of(
    props: DeviceProps, window: int, entries: int, bf16: bool, tokens: int, heads: int, keys: int, selected: bool
) -> Share:
    """The cut of a call by numbers of records (-1: none) and sizes; see ``attend_config`` and ``splits_for``."""
    rows = bound_record(window), bound_record(entries)
    parts = parts_of(*rows, bf16=bf16)
    assert parts is not None
    config = attend_config(props, tokens, heads, keys, parts, *rows, selected=selected)
    return Share(config, splits_for(props, tokens, heads, keys, config))


@cache
def _attend(
    window: int, entries: int, own: int, config: TileConfig, bf16: bool, span: int, ratio: int, every: bool, sink: bool,
    split: bool, pairs: int, native: bool,
) -> Kernel:  # fmt: skip
    constants = {
        **attend_constants(config, *map(bound_record, (window, entries, own)), bf16=bf16), "WINDOW": span,
        "RATIO": ratio, "ALL": every, "SINK": sink, "SPLIT": split, "PAIRS": pairs, "NATIVE": native,
    }  # fmt: skip
    writes = ("partial", "partial_lse") if split else ("out", "lse")
    return Kernel(attend.attend_kernel, constants, config.warps, writes=writes, fused=True)


@cache
def merged(dim: int, splits: int, sink: bool, pairs: int, native: bool) -> Kernel:
    """The kernel that puts ``splits`` parts of rows of ``dim`` channels together."""
    constants = {**merge_constants(dim, splits), "SINK": sink, "PAIRS": pairs, "NATIVE": native}
    return Kernel(attend.merge_kernel, constants, writes=("out", "lse"), fused=True)


@cache
def _inverse_rope(dim: int, pairs: int, native: bool) -> Kernel:
    constants = {"DIM": dim, "PAIRS": pairs, "HEADS": attend.TURN_HEADS, "NATIVE": native}
    return Kernel(attend.inverse_rope_kernel, constants, writes=("out",), fused=True)


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
    config = config_of(to.props(q), *records[:2], bf16, tokens, heads, keys, selected is not None).config
    native, pairs = to.native(q), 0 if frequencies is None else frequencies.shape[0]
    absent, frequencies = (positions,) * 3, lse if frequencies is None else frequencies
    beside, partial, sums = lse if sink is None else sink, out, lse
    if splits > 1:
        partial = to.part(workspace, 0, (splits, tokens, heads, dim), to.float32)
        sums = to.part(workspace, splits * tokens * heads * dim, (splits, tokens, heads), to.float32)
    topk = 0 if selected is None else selected.shape[1]
    seen = span if w else 0, ratio if e else 0, selected is None, sink is not None, splits > 1, pairs
    to.run(
        _attend(*records, config, bf16, *seen, native),
        (tokens * ceil_div(heads, config.heads) * splits,),
        (
            out, lse, partial, sums, q, beside, positions if selected is None else selected,
            *(w.given(window) if w else absent), *(e.given(entries) if e else absent),
            positions if own is None else own, positions, request_index, slots, starts, block_table, frequencies,
        ),
        (tokens, heads, topk, block_table.shape[1], splits, scale * LOG2_E),
    )  # fmt: skip
    if splits > 1:
        to.run(
            merged(dim, splits, sink is not None, pairs, native),
            (tokens * heads,),
            (out, lse, partial, sums, beside, positions, frequencies),
            (heads, splits),
        )
    return out, lse


@launch("out")
def inverse_rope_rows(to: Framework, out: Array, positions: Array, frequencies: Array) -> None:
    """Turn outputs [tokens, heads, dim], contiguous, back by positions [tokens]: where others' kernels attended."""
    tokens, heads, dim = out.shape
    if tokens * heads * dim and frequencies.shape[0]:
        kernel = _inverse_rope(dim, frequencies.shape[0], to.native(out))
        to.run(kernel, (tokens * ceil_div(heads, attend.TURN_HEADS),), (out, positions, frequencies), (heads,))
