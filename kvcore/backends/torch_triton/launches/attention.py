"""Launches of attention: the two kernels that do it."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import BOUND, INTERPRETED, Bound, is_native, registered
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import attend, merge, turn
from kvcore.kernels.triton.cut import (
    LOG2_E,
    Cut,
    attend_constants,
    attend_cut,
    merge_constants,
    parts_of,
    splits_for,
)
from kvcore.kernels.triton.device import INTERPRETER, Chip
from kvcore.kernels.triton.record import ceil_div


@cache
def chip_of(device: torch.device) -> Chip:
    """A device as the cuts know it."""
    if INTERPRETED:
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return Chip(10 * major + minor, found.multi_processor_count, found.shared_memory_per_block_optin)


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once; under the interpreter a number that makes small cases split."""
    return chip_of(device).multiprocessors


def _attend_out(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@registered(("workspace",), _attend_out)
def attend_rows(
    q: Tensor,
    selected: Tensor | None,
    sink: Tensor | None,
    own: Tensor | None,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    starts: Tensor,
    block_table: Tensor,
    window: list[Tensor],
    entries: list[Tensor],
    frequencies: Tensor | None,
    workspace: Tensor,
    records: list[int],
    sizes: list[int],
    scale: float,
    bf16: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of q [tokens, heads, dim], contiguous: out like q and lse [tokens, heads].

    Args:
        selected: [tokens, picks] entries, contiguous; None: every visible one.
        own: [tokens, row_bytes] canonical rows of the step where the ring does not hold them yet.
        window, entries: the pools' buffers, empty where the layer lacks them.
        frequencies: fp32, of the pairs of last channels by which outputs are turned back; None: of none.
        workspace: fp32, for ``splits`` · tokens · heads · (dim + 1) numbers where ``splits`` > 1.
        records: of the window, the entries, the own rows; -1 where there are none.
        sizes: window, ratio (0 without), splits, most keys of a query.
        bf16: keys and queries may be multiplied in bf16.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    tokens, heads, dim = q.shape
    if not q.numel():
        return out, lse
    w, e = (BOUND[number] if number >= 0 else None for number in records[:2])
    span, ratio, splits, keys = sizes
    cut = cut_of(q.device, *records[:2], bf16, tokens, heads, keys, selected is not None).cut
    pairs = 0 if frequencies is None else len(frequencies)
    frequencies = lse if frequencies is None else frequencies
    beside = lse if sink is None else sink
    partial = workspace if splits > 1 else out
    sums = workspace[splits * tokens * heads * dim :] if splits > 1 else lse
    number_of_picks = 0 if selected is None else selected.shape[1]
    seen = span if w else 0, ratio if e else 0, selected is None, sink is not None, splits > 1, pairs
    _attend(*records, cut, bf16, *seen, is_native(q.device))(
        (tokens * ceil_div(heads, cut.heads) * splits,),
        (
            out, lse, partial, sums, q, beside, positions if selected is None else selected,
            *_three(w, window, positions), *_three(e, entries, positions), positions if own is None else own,
            positions, request_index, slots, starts, block_table, frequencies,
        ),
        (tokens, heads, number_of_picks, block_table.shape[1], splits, scale * LOG2_E),
    )  # fmt: skip
    if splits > 1:
        merged(dim, splits, sink is not None, pairs, is_native(q.device))(
            (tokens * heads,), (out, lse, partial, sums, beside, positions, frequencies), (heads, splits)
        )
    return out, lse


class Share(NamedTuple):
    """How a call is cut into programs, and how many of them share a query's keys."""

    cut: Cut
    splits: int


@lru_cache(4096)
def cut_of(
    device: torch.device, window: int, entries: int, bf16: bool, tokens: int, heads: int, keys: int, picked: bool
) -> Share:
    """The cut of a call by numbers of records (-1: none) and sizes; see ``attend_cut`` and ``splits_for``."""
    rows = [BOUND[number].record if number >= 0 else None for number in (window, entries)]
    parts = parts_of(*rows, bf16=bf16)
    assert parts is not None
    chip = chip_of(device)
    cut = attend_cut(chip, tokens, heads, keys, parts, *rows, picked=picked)
    return Share(cut, splits_for(chip, tokens, heads, keys, cut))


@cache
def _attend(
    window: int, entries: int, own: int, cut: Cut, bf16: bool, span: int, ratio: int, every: bool, sink: bool,
    split: bool, pairs: int, native: bool,
) -> Launcher:  # fmt: skip
    rows = [BOUND[number].record if number >= 0 else None for number in (window, entries, own)]
    constants = {
        **attend_constants(cut, *rows, bf16=bf16), "WINDOW": span, "RATIO": ratio, "ALL": every, "SINK": sink,
        "SPLIT": split, "PAIRS": pairs, "NATIVE": native,
    }  # fmt: skip
    return Launcher(attend.attend_kernel, constants, cut.warps, fused=True)


@cache
def merged(dim: int, splits: int, sink: bool, pairs: int, native: bool) -> Launcher:
    """The kernel that puts ``splits`` parts of rows of ``dim`` channels together."""
    constants = {**merge_constants(dim, splits), "SINK": sink, "PAIRS": pairs, "NATIVE": native}
    return Launcher(merge.merge_kernel, constants, 4, fused=True)


@cache
def _turn_back(dim: int, pairs: int, native: bool) -> Launcher:
    constants = {"DIM": dim, "PAIRS": pairs, "HEADS": turn.HEADS, "NATIVE": native}
    return Launcher(turn.turn_back_kernel, constants, 4, fused=True)


@registered(("out",))
def turn_back_rows(out: Tensor, positions: Tensor, frequencies: Tensor) -> None:
    """Turn outputs [tokens, heads, dim], contiguous, back by positions [tokens]: where others' kernels attended."""
    tokens, heads, dim = out.shape
    if out.numel() and len(frequencies):
        _turn_back(dim, len(frequencies), is_native(out.device))(
            (tokens * ceil_div(heads, turn.HEADS),), (out, positions, frequencies), (heads,)
        )


def _three(bound: Bound | None, buffers: list[Tensor], absent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers of codes, scales and plain channels; any tensor stands in for one that is never read."""
    if bound is None:
        return absent, absent, absent
    return buffers[bound.codes], buffers[bound.scales], buffers[bound.plain]
