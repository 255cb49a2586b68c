"""The launches of classic attention, from tensors and record numbers: its kernel, and the merge of its parts."""

from typing import Any

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.attention import chip_of
from kvcore.backends.torch_triton.launches.bound import BOUND, is_native, registered
from kvcore.kernels.triton import attend_kv, merge
from kvcore.kernels.triton.cut import LOG2_E
from kvcore.kernels.triton.kv_cuts import cut_for, sides_of, span_of, whole_tiles, work_for
from kvcore.kernels.triton.record import power_of_two


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
    k, v, *own = (BOUND[number] for number in records if number >= 0)
    out, lse = _outputs(q, records[1])
    tokens, heads, _ = q.shape
    if not tokens:
        return out, lse
    own_records = (own[0].record, own[1].record) if own else None
    sides = sides_of(k.record, v.record, own_records, bf16=bf16, native=is_native(q.device))
    assert sides is not None
    window, chunk, splits = sizes
    work = work_for(tokens, len(slots), heads, k.record.heads, v.record.heads)
    cut = cut_for(chip_of(q.device), sides)
    span = span_of(work.each)
    partial = workspace if splits > 1 else out
    sums = workspace[splits * out.numel() :] if splits > 1 else lse
    attend_kv.attend_kv_kernel[(work.programs * splits,)](
        out, lse, partial, sums, q, lse if sink is None else sink,
        keys[k.codes], keys[k.scales], keys[k.plain], values[v.codes], values[v.scales], values[v.plain],
        positions if own_keys is None else own_keys, positions if own_values is None else own_values,
        positions, request_index, slots, starts, block_table, starts if left_padding is None else left_padding,
        tokens, heads, work.each, window, chunk, sink is not None, block_table.shape[1], splits, scale * LOG2_E,
        k.record, v.record, *(own_records or (k.record, v.record)), *sides,
        bool(own), left_padding is not None, work.groups, work.heads, span, max(16, work.heads * span), cut.keys,
        whole_tiles(k.record, cut), cut.stages, max(1, 32 * cut.warps // cut.keys),
        is_native(q.device), num_warps=cut.warps,
    )  # fmt: skip
    if splits > 1:
        dim = out.shape[2]
        merge.merge_kernel[(tokens * heads,)](
            out, lse, partial, sums, lse if sink is None else sink, positions, positions, heads, splits,
            dim, power_of_two(dim), min(8, power_of_two(splits)), power_of_two(splits), sink is not None, 0,
            is_native(q.device), num_warps=4,
        )  # fmt: skip
    return out, lse
