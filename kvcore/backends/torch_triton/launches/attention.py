"""Launches of attention: the two kernels that do it."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import BOUND, INTERPRETED, Bound, is_native, registered
from kvcore.kernels.triton import attend, merge, turn
from kvcore.kernels.triton.cut import LOG2_E, attend_constants, attend_cut, merge_constants, parts_of
from kvcore.kernels.triton.device import INTERPRETER, Chip


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
    w, e, o = (BOUND[number] if number >= 0 else None for number in records)
    rows = [bound.record if bound else None for bound in (w, e, o)]
    parts = parts_of(*rows[:2], bf16=bf16)
    assert parts is not None
    span, ratio, splits, keys = sizes
    cut = attend_cut(chip_of(q.device), tokens, heads, keys, parts, *rows[:2], picked=selected is not None)
    turned = {"PAIRS": 0 if frequencies is None else len(frequencies), "NATIVE": is_native(q.device)}
    frequencies = lse if frequencies is None else frequencies
    partial = workspace if splits > 1 else out
    sums = workspace[splits * tokens * heads * dim :] if splits > 1 else lse
    attend.attend_kernel[(tokens * triton.cdiv(heads, cut.heads) * splits,)](
        out, lse, partial, sums, q,
        lse if sink is None else sink, positions if selected is None else selected,
        *_three(w, window, positions), *_three(e, entries, positions), positions if own is None else own,
        positions, request_index, slots, starts, block_table, frequencies,
        tokens, heads, 0 if selected is None else selected.shape[1], block_table.shape[1], splits, scale * LOG2_E,
        **attend_constants(cut, *rows, bf16=bf16), WINDOW=span if w else 0, RATIO=ratio if e else 0,
        ALL=selected is None, SINK=sink is not None, SPLIT=splits > 1, **turned, num_warps=cut.warps,
    )  # fmt: skip
    if splits > 1:
        merge.merge_kernel[(tokens * heads,)](
            out, lse, partial, sums, lse if sink is None else sink, positions, frequencies, heads, splits,
            **merge_constants(dim, splits), SINK=sink is not None, **turned, num_warps=4,
        )  # fmt: skip
    return out, lse


@registered(("out",))
def turn_back_rows(out: Tensor, positions: Tensor, frequencies: Tensor) -> None:
    """Turn outputs [tokens, heads, dim], contiguous, back by positions [tokens]: where others' kernels attended."""
    tokens, heads, dim = out.shape
    if out.numel() and len(frequencies):
        turn.turn_back_kernel[(tokens * triton.cdiv(heads, turn.HEADS),)](
            out, positions, frequencies, heads,
            DIM=dim, PAIRS=len(frequencies), HEADS=turn.HEADS, NATIVE=is_native(out.device), num_warps=4,
        )  # fmt: skip


def _three(bound: Bound | None, buffers: list[Tensor], absent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers of codes, scales and plain channels; any tensor stands in for one that is never read."""
    if bound is None:
        return absent, absent, absent
    return buffers[bound.codes], buffers[bound.scales], buffers[bound.plain]
