"""The launches of classic attention, from tensors and record numbers: its kernel, and the merge of its parts."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.attention import chip_of, merged
from kvcore.backends.torch_triton.launches.bound import BOUND, is_native, registered
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import attend_kv
from kvcore.kernels.triton.cut import LOG2_E
from kvcore.kernels.triton.kv_cuts import Work, cut_for, sides_of, span_of, whole_tiles, work_for


def _attend_out(
    q: Tensor, sink: Any, own_keys: Any, own_values: Any, positions: Any, request_index: Any, slots: Any, starts: Any,
    block_table: Any, left_padding: Any, keys: Any, values: Any, workspace: Any, records: list[int], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(q, records[1])


def _outputs(q: Tensor, values: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], BOUND[values].record.dim)), q.new_empty(q.shape[:2], dtype=torch.float32)


@registered(("workspace",), _attend_out)
def attend_kv_rows(
    q: Tensor,
    sink: Tensor | None,
    own_keys: Tensor | None,
    own_values: Tensor | None,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    starts: Tensor,
    block_table: Tensor,
    left_padding: Tensor | None,
    keys: list[Tensor],
    values: list[Tensor],
    workspace: Tensor,
    records: list[int],
    sizes: list[int],
    scale: float,
    bf16: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of q [tokens, heads, key dim], contiguous: out [tokens, heads, value dim] and lse [tokens, heads].

    Args:
        own_keys, own_values: [tokens, heads, row_bytes] canonical rows of the step where the pools do not hold them.
        keys, values: the pools' buffers.
        workspace: fp32, for ``splits`` · tokens · heads · (value dim + 1) numbers where ``splits`` > 1.
        records: of the keys, the values, the own keys and values; -1 where there are none.
        sizes: window and chunk (0 without), splits.
        bf16: operands may be multiplied in bf16 where they are bf16 numbers.
    """
    k, v = (BOUND[number] for number in records[:2])
    out, lse = _outputs(q, records[1])
    tokens, heads, _ = q.shape
    if not tokens:
        return out, lse
    window, chunk, splits = sizes
    requests = slots.shape[0]
    found = _attend(*records, q.device, bf16, tokens, requests, heads, left_padding is not None)
    partial = workspace if splits > 1 else out
    sums = workspace[splits * out.numel() :] if splits > 1 else lse
    beside = lse if sink is None else sink
    found.run(
        (found.work.programs * splits,),
        (
            out, lse, partial, sums, q, beside,
            keys[k.codes], keys[k.scales], keys[k.plain], values[v.codes], values[v.scales], values[v.plain],
            positions if own_keys is None else own_keys, positions if own_values is None else own_values,
            positions, request_index, slots, starts, block_table, starts if left_padding is None else left_padding,
        ),
        (
            tokens, heads, found.work.each, window, chunk, sink is not None, block_table.shape[1], splits,
            scale * LOG2_E,
        ),
    )  # fmt: skip
    if splits > 1:
        merged(out.shape[2], splits, sink is not None, 0, is_native(q.device))(
            (tokens * heads,), (out, lse, partial, sums, beside, positions, positions), (heads, splits)
        )
    return out, lse


class _Bound(NamedTuple):
    work: Work
    run: Launcher


@lru_cache(4096)
def _attend(
    keys: int, values: int, own_keys: int, own_values: int, device: torch.device, bf16: bool, tokens: int,
    requests: int, heads: int, left: bool,
) -> _Bound:  # fmt: skip
    k, v = BOUND[keys].record, BOUND[values].record
    own = (BOUND[own_keys].record, BOUND[own_values].record) if own_keys >= 0 else None
    native = is_native(device)
    sides = sides_of(k, v, own, bf16=bf16, native=native)
    assert sides is not None
    work, cut = work_for(tokens, requests, heads, k.heads, v.heads), cut_for(chip_of(device), sides)
    span = span_of(work.each)
    constants = {
        "K": k, "V": v, "NK": own[0] if own else k, "NV": own[1] if own else v, "SK": sides[0], "SV": sides[1],
        "OWN": own is not None, "LEFT": left, "GROUPS": work.groups, "HEADS": work.heads, "SPAN": span,
        "ROWS": max(16, work.heads * span), "KEYS": cut.keys, "WHOLE": whole_tiles(k, cut), "STAGES": cut.stages,
        "SPREAD": max(1, 32 * cut.warps // cut.keys), "NATIVE": native,
    }  # fmt: skip
    return _Bound(work, _launcher(tuple(constants.items()), cut.warps))


@cache
def _launcher(constants: tuple[tuple[str, Any], ...], warps: int) -> Launcher:
    """One for all calls that are cut alike."""
    return Launcher(attend_kv.attend_kv_kernel, dict(constants), warps, fused=True)
