"""Classic attention as one launch over the pools: which layers it covers, and what a call needs beside them."""

from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import launch
from kvcore.kernels.triton import kv_cuts
from kvcore.ops import Attention, bounds
from kvcore.ops.choices import Declined


class Case(NamedTuple):
    """What of a call's arguments decides whether the kernel covers it.

    Attributes:
        bf16: queries are.
        own: the step's own keys and values are given.
    """

    bf16: bool
    own: bool

    @property
    def words(self) -> str:
        """Said to a user."""
        return f"q is {'bf16' if self.bf16 else 'not bf16'}, {'with' if self.own else 'without'} k and v"


CASES = tuple(Case(bf16, own) for bf16 in (True, False) for own in (False, True))
ALONE = Declined("k or v is given without the other")


class Covered(NamedTuple):
    """What a call of a layer needs.

    Attributes:
        bound: for keys and for values: (record number, names of their buffers, paged or not).
        own_numbers: of records of the step's own keys and values, -1 where the pools hold them.
        sides: how keys and values are multiplied.
    """

    bound: Any
    own_numbers: Any
    sides: Any


def attend_kv(ops, pools, layer, index, q, k, v, *, columns, sink, scale) -> Attention | Declined:
    """The verb of the same name, or why the kernel doesn't cover the call.

    Rows are read where they lie: ``columns`` only bounds how many keys a query sees.
    """
    if (k is None) != (v is None):
        return ALONE
    found = ops.kv_covered[layer, q.dtype == torch.bfloat16, k is not None]
    if isinstance(found, Declined):
        return found
    own = None, None
    if k is not None:
        parts = zip(ops.plan.region(layer, "kv"), (k, v), strict=True)
        own = [ops.encode_rows(region, rows).contiguous() for region, rows in parts]
    keys, values = found.bound
    component = ops.component(layer, "kv")
    columns = bounds.columns(ops.plan, layer, "kv", index) if columns is None else columns
    seen = min(columns, component.window or component.chunk or columns)
    chip, (tokens, heads, dim) = launch.chip_of(torch.device(ops.device)), q.shape
    key_record, value_record = (launch.BOUND[number].record for number, _, _ in found.bound)
    work = kv_cuts.work_for(tokens, len(index.slots), heads, key_record.heads, value_record.heads)
    cut = kv_cuts.cut_for(chip, found.sides)
    splits = kv_cuts.splits_for(chip, work.programs, seen + work.each - 1, cut)
    room = splits * tokens * heads * (value_record.dim + 1) if splits > 1 else 1
    out, lse = launch.calls().attend_kv_rows(
        q.contiguous(),
        None if sink is None else sink.contiguous(),
        *own,
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


def covered(ops, layer, case: Case) -> Covered | Declined:
    """What calls of that case need, or why the layer's formats or layout are not covered."""
    bound = ops.bound(layer, "kv")
    if bound is None:
        return Declined(ops.why_unbound(layer, "kv"))
    keys, values = (launch.BOUND[number] for number, _, _ in bound)
    records = None
    if case.own:
        formats = [region.format for region in ops.plan.region(layer, "kv")]
        records = kv_cuts.own_records(keys.record, values.record, formats)
        if isinstance(records, Declined):
            return records
    native = launch.is_native(torch.device(ops.device))
    sides = kv_cuts.multiplied(keys.record, values.record, records, bf16=case.bf16, native=native)
    if isinstance(sides, Declined):
        return sides
    numbers = (-1, -1) if records is None else [launch.bind(launch.Bound(record, 0, 0, 0)) for record in records]
    return Covered(bound, numbers, sides)
