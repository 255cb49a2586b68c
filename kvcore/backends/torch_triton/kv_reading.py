"""Classic attention as one launch over the pools: which layers it covers, and what a call needs beside them."""

from typing import Any, NamedTuple

import torch

from kvcore import bounds
from kvcore.backends.torch_triton.kernels import kv_cuts, launch
from kvcore.ops import Attention


class Covered(NamedTuple):
    """What a call of a layer needs.

    Attributes:
        bound: for keys and for values: (record number, names of their buffers, paged or not).
        own: canonical rows [T, heads, row_bytes] of the step's own keys and values, None where the pools hold them.
        own_numbers: their records' numbers, -1 likewise.
        sides: how keys and values are multiplied.
    """

    bound: Any
    own: Any
    own_numbers: Any
    sides: Any


def attend_kv(ops, pools, layer, index, q, k, v, *, columns, sink, scale) -> Attention | None:
    """The verb of the same name; None where the kernel doesn't cover the layer.

    Rows are read where they lie: ``columns`` only bounds how many keys a query sees.
    """
    found = covered(ops, layer, q, k, v)
    if found is None:
        return None
    keys, values = found.bound
    component = ops.component(layer, "kv")
    columns = bounds.columns(ops.plan, layer, "kv", index) if columns is None else columns
    seen = min(columns, component.window or component.chunk or columns)
    device, (tokens, heads, dim) = torch.device(ops.device), q.shape
    key_record, value_record = (launch.BOUND[number].record for number, _, _ in found.bound)
    work = kv_cuts.work_for(tokens, len(index.slots), heads, key_record.heads, value_record.heads)
    cut = kv_cuts.cut_for(device, found.sides)
    splits = kv_cuts.splits_for(device, work.programs, seen + work.each - 1, cut)
    room = splits * tokens * heads * (value_record.dim + 1) if splits > 1 else 1
    out, lse = launch.calls().attend_kv_rows(
        q.contiguous(),
        None if sink is None else sink.contiguous(),
        *found.own,
        index.positions,
        index.request_index,
        index.slots,
        index.starts,
        index.block_table,
        index.left_padding,
        [pools[name] for name in keys[1]],
        [pools[name] for name in values[1]],
        ops.workspaces.take("attention", room),
        [keys[0], values[0], *found.own_numbers],
        [component.window or 0, component.chunk or 0, splits],
        dim**-0.5 if scale is None else float(scale),
        q.dtype == torch.bfloat16,
    )
    return Attention(out, lse)


def covered(ops, layer, q, k, v) -> Covered | None:
    """What the call needs, or None where the layer's formats or layout, or rows of one part alone, are not covered."""
    bound = ops.bound(layer, "kv")
    if bound is None or (k is None) != (v is None):
        return None
    keys, values = (launch.BOUND[number] for number, _, _ in bound)
    regions = ops.plan.region(layer, "kv")
    records = None
    if k is not None:
        records = kv_cuts.own_records(keys, values, [region.format for region in regions])
        if records is None:
            return None
    device = torch.device(ops.device)
    how = {"bf16": q.dtype == torch.bfloat16, "native": launch.is_native(device)}
    sides = kv_cuts.sides_of(keys.record, values.record, records, **how)
    if sides is None or records is None:
        return None if sides is None else Covered(bound, (None, None), (-1, -1), sides)
    own = [ops.encode_rows(region, rows).contiguous() for region, rows in zip(regions, (k, v), strict=True)]
    return Covered(bound, own, [launch.bind(launch.Bound(record, 0, 0, 0)) for record in records], sides)
