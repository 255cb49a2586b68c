"""The verbs that attend on CUDA: to latent rows, to keys and values, and to keys coded over groups of tokens.

Outputs come from torch's allocator, which a CUDA graph gives a pool of its own; everything else that a call writes lies
in workspaces that are kept.
"""

from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import flash, flash_infer, launch
from kvcore.backends.torch_triton.cuda import (
    PLAIN,
    GroupParts,
    Kernel,
    Ready,
    bind_group_parts,
    declined,
    name_of_kernels,
    why,
)
from kvcore.backends.torch_triton.cuda_gather import whole_window
from kvcore.backends.torch_triton.flash import Served
from kvcore.backends.torch_triton.tail import frequencies_of
from kvcore.kernels.triton import attend_kv as kv_kernel
from kvcore.kernels.triton import packed
from kvcore.kernels.triton.attend import attended, takes_whole
from kvcore.kernels.triton.device import native as is_native
from kvcore.kernels.triton.groups import groups_fit
from kvcore.kernels.triton.launches.attention import config_of, on_hopper, pipelined
from kvcore.kernels.triton.launches.kv_groups import programs_of, splits_of
from kvcore.kernels.triton.launches.launching import Part
from kvcore.kernels.triton.record import own_record, plain_record
from kvcore.ops import Attention, bounds
from kvcore.ops.choices import Decision, Declined, kernel

MOST_DECODED = 1 << 28
"""Bytes that decoded entries may take."""

ALONE = Declined("k or v is given without the other")


class Attended(NamedTuple):
    """What attention of a latent layer must know.

    Attributes:
        window, entries: their parts, None where the layer has none.
        numbers: of their records, -1 where there is none.
        span: of the window, 0 without; ``ratio`` of the entries likewise, ``block_rows`` entries of a block.
        parts: how rows are multiplied, by whether queries are bf16.
        flash: what FlashMLA must know of the layer, which takes the calls that fit it; None where it takes none.
        infer: likewise FlashInfer.
    """

    window: Part | None
    entries: Part | None
    numbers: tuple[int, int]
    span: int
    ratio: int
    block_rows: int
    parts: dict[bool, Any]
    flash: Served | None
    infer: Served | None


def bind_attend(ops, layer):
    """Triton's kernels, unless attention is torch's by choice; beside them a package's, where that is chosen."""
    roles = tuple(role for role in ("window", "entries") if ops.component(layer, role) is not None)
    if ops.attention_kernels == "torch":
        return Declined(f"{flash.VARIABLE}=torch")
    without = declined(ops, layer, *roles)
    if without is not None:
        return without
    window, entries = (ops.records[layer, role][0] if role in roles else None for role in ("window", "entries"))
    records = [None if part is None else launch.BOUND[part.number].record for part in (window, entries)]
    parts = {bf16: attended(*records, bf16=bf16) for bf16 in (True, False)}
    for found in parts.values():  # one for both, or none
        if isinstance(found, Declined):
            return found
    served: Served | str = ""
    if ops.attention_kernels == "flash_mla":
        served = flash.served(ops, layer)
    elif ops.attention_kernels == "flashinfer":
        served = flash_infer.served(ops, layer, ops.props.capability)
    known = None if isinstance(served, str) else served
    given = Attended(
        window,
        entries,
        (-1 if window is None else window.number, -1 if entries is None else entries.number),
        0 if window is None else ops.component(layer, "window").window,
        0 if entries is None else ops.component(layer, "entries").ratio,
        0 if entries is None else ops.plan.region(layer, "entries")[0].rows,
        parts,
        known if ops.attention_kernels == "flash_mla" else None,
        known if ops.attention_kernels == "flashinfer" else None,
    )
    own = why(ops, layer, roles)
    if launch.run_triton.gluon and on_hopper(ops.props, *records, bf16=True):
        own += "; a pipelined one for Hopper takes bf16 q where the ring holds the step's rows"
    return Ready(given, roles, decision=_beside(ops, own, served, LATENT_FITS), replayed=known is None)


LATENT_FITS = {
    "flash_mla": f"where q is bf16 with {' or '.join(map(str, flash.HEADS))} heads and the ring holds the step's rows",
    "flashinfer": f"{flash_infer.UNMEASURED}; where q is bf16 with up to {flash_infer.MOST_HEADS} heads and the ring "
    "holds the step's rows",
}
"""Package -> what is said of it where it attends to latent rows."""
CLASSIC_FITS = {"flashinfer": f"{flash_infer.UNMEASURED}; where each request brings one token, outside of graphs"}
"""Likewise to keys and values."""


def _beside(ops, covered, served, fits):
    """What is said, of the kernels alone or of a package that was chosen to go before them."""
    own, package = name_of_kernels(), ops.attention_kernels
    if package not in fits:
        return Decision(own, covered)
    if isinstance(served, str):
        # FlashMLA is chosen by ``auto``, too; who asks for FlashInfer, and strictly, is told where it does not run.
        return Decision(own, f"{covered}; {served}", slower=package == "flashinfer")
    return Decision(package, f"{fits[package]}, else {own}: {covered}")


def attend(bound, ops, pools, layer, index, q, selected=None, *, rows=None, sink=None, scale=None, rope=None):
    """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V."""
    if bound.flash is not None and flash.fits(bound.flash, index, q, selected, rows):
        frequencies = frequencies_of(rope, q.device)
        return flash.attend(ops, pools, bound.flash, index, q, selected, sink, _scale(q, scale), frequencies)
    if not len(index.slots) or not q.numel():  # there is nothing to launch
        return PLAIN.attend(ops, pools, layer, index, q, selected, rows=rows, sink=sink, scale=scale, rope=rope)
    if bound.infer is not None:
        reason = flash_infer.misfit(bound.infer, index, q, selected, rows)
        if not reason:
            given = sink, _scale(q, scale), frequencies_of(rope, q.device)
            return flash_infer.attend(ops, pools, bound.infer, index, q, selected, *given)
        ops.fall_back(layer, "attend", reason, name_of_kernels())
    window, entries, numbers, span, ratio, block_rows, parts, _, _ = bound
    tokens, heads, dim = q.shape
    bf16 = q.dtype == torch.bfloat16
    parts = parts[bf16]
    table = index.block_table
    if entries is None:
        entry_buffers, most = [], 0
    else:
        entry_buffers = [pools[name] for name in entries.names]
        most = table.shape[1] * block_rows if selected is None else selected.shape[1]
        if parts.whole and _visits(index, entries.number, tokens, selected) >= ops.fewest_visits:
            number, entry_buffers, table = _decoded_entries(entry_buffers, index, entries.number, ratio)
            numbers = numbers[0], number
    own, own_number = None, -1
    if rows is not None and window is not None:
        w, e = (None if number < 0 else launch.BOUND[number].record for number in numbers)
        own, own_number = _own_rows(ops, layer, window.number, rows, whole=takes_whole(w, e, parts))
    keys, frequencies = span + most, frequencies_of(rope, q.device)
    fits = pipelined(launch.run_triton.gluon, own, frequencies)
    splits = config_of(ops.props, *numbers, bf16, tokens, heads, keys, selected is not None, fits).splits
    workspace = ops.workspaces.take("attention", splits * tokens * heads * (dim + 1) if splits > 1 else 1)
    out, lse = launch.calls().attend_rows(
        q.contiguous(),
        None if selected is None or entries is None else selected.contiguous(),
        None if sink is None else sink.contiguous(),
        own,
        index.positions,
        index.request_index,
        index.slots,
        index.starts,
        table,
        [] if window is None else [pools[name] for name in window.names],
        entry_buffers,
        frequencies,
        workspace,
        [*numbers, own_number],
        [span, ratio, splits, keys],
        _scale(q, scale),
        bf16,
    )
    return Attention(out, lse)


def _own_rows(ops, layer, number, rows, *, whole):
    """(the step's own window rows [T, bytes], number of their record): as the ring will hold them, or decoded."""
    (region,) = ops.plan.region(layer, "window")
    record = own_record(launch.BOUND[number].record, region.format)
    number, tokens = launch.bind(launch.Bound(record, 0, 0, 0)), len(rows)
    zeros = torch.zeros(tokens + 1, dtype=torch.int32, device=rows.device)
    positions, length = torch.arange(tokens, dtype=torch.int32, device=rows.device), zeros[:1] + tokens
    own = torch.empty((tokens, region.format.row), dtype=torch.uint8, device=rows.device)
    # All are rows of one block.
    table = zeros[:1, None]
    launch.calls().append_rows(rows.contiguous(), positions, zeros[:-1], zeros[:1], zeros[:1], table, [own], number)
    if not whole:
        return own, number
    values, _, _ = launch.calls().gather_all_rows(length, table, [own], number, 1, tokens)
    return values[0].view(torch.uint8), launch.bind(launch.Bound(plain_record(record), 0, 0, 0))


def _visits(index, number, tokens, selected):
    """How often a step's queries read an entry on average; -1 where decoding them all is not worth it."""
    record = launch.BOUND[number].record
    count = index.block_table.numel() * record.rows
    if not count or not record.quant or 2 * count * record.dim > MOST_DECODED:
        return -1
    return tokens / len(index.slots) if selected is None else selected.numel() / count


def _decoded_entries(buffers, index, number, ratio):
    """(number of the record, buffers, block table) of entries decoded once for all queries."""
    table, record = index.block_table, launch.BOUND[number].record
    columns = table.shape[1] * record.rows
    values, _, _ = launch.calls().gather_all_rows(index.lengths, table, buffers, number, ratio, columns)
    blocks = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
    decoded = launch.bind(launch.Bound(plain_record(record), 0, 0, 0))
    return decoded, [values.view(torch.uint8)], torch.where(table >= 0, blocks, -1)


def _scale(q, scale):
    """The scale of the logits: that of the key dim unless given."""
    return q.shape[2] ** -0.5 if scale is None else float(scale)


class Case(NamedTuple):
    """What of a call's arguments decides whether the kernel of classic attention covers it.

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


class AttendedKV(NamedTuple):
    """What classic attention of a layer must know in one case.

    Attributes:
        parts: of keys and of values.
        own_numbers: of records of the step's own keys and values, -1 where the pools hold them.
        heads: of keys and of values; ``value_dim`` channels of a value.
        window, chunk: of the layer, 0 without.
        config: how a call is cut into programs, for this device; ``packed`` where each takes one token, None if alike.
        props: the device.
        infer: what FlashInfer must know of the layer, which takes the calls that fit it; None where it takes none.
    """

    parts: tuple[Part, ...]
    own_numbers: tuple[int, ...]
    heads: tuple[int, int]
    value_dim: int
    window: int
    chunk: int
    config: Any
    packed: Any
    props: Any
    infer: flash_infer.Paged | None


class AttendedGroups(NamedTuple):
    """What attention to groups of tokens must know.

    Attributes:
        parts: of the layer.
        heads: of keys and of values; ``value_dim`` channels of a value.
        window, chunk: of the layer, 0 without.
        fast: whether codes are multiplied as bf16 numbers.
        multiprocessors: of the device.
    """

    parts: GroupParts
    heads: tuple[int, int]
    value_dim: int
    window: int
    chunk: int
    fast: bool
    multiprocessors: int


OWN_GROUPS = Declined("the step's own keys and values are given, and groups are not coded from them here")


def _bind_attend_groups(ops, layer):
    parts = bind_group_parts(ops, layer)
    if isinstance(parts, Declined):
        return parts
    component = ops.component(layer, "kv")
    keys, values = (launch.GROUPS[part.number].record for part in (parts.keys, parts.values))
    fast = ops.props.capability >= 80 and not launch.INTERPRETED and groups_fit(keys, values)
    seen = component.window or 0, component.chunk or 0
    heads = keys.heads, values.heads
    given = AttendedGroups(parts, heads, values.dim, *seen, fast, ops.props.multiprocessors)
    return Ready(given, ("kv_tail", "kv"), (OWN_GROUPS.reason,))


def _attend_groups(bound, ops, pools, index, q, columns, sink, scale):
    tokens, heads, _ = q.shape
    fast = bound.fast and q.dtype == torch.bfloat16
    seen = min(columns, bound.window or bound.chunk or columns)
    programs = tokens * programs_of(heads, *bound.heads, fast)[0]
    splits = splits_of(bound.multiprocessors, programs, -(-seen // bound.parts.ratio))
    room = splits * tokens * heads * (bound.value_dim + 1) if splits > 1 else 1
    return Attention(
        *launch.calls().attend_groups_rows(
            q.contiguous(),
            None if sink is None else sink.contiguous(),
            index.positions,
            index.request_index,
            index.slots,
            index.block_table,
            index.left_padding,
            *bound.parts.pools(pools),
            ops.workspaces.take("attention", room),
            bound.parts.numbers,
            [bound.window, bound.chunk, splits],
            _scale(q, scale),
            fast,
        )
    )


def bind_attend_kv(ops, layer):
    """The kernels for a layer's kind of rows, unless attention is torch's by choice; and FlashInfer, if chosen."""
    if ops.attention_kernels == "torch":
        return Declined(f"{flash.VARIABLE}=torch")
    served = flash_infer.served_kv(ops, layer, ops.props.capability) if ops.attention_kernels == "flashinfer" else ""
    infer = None if isinstance(served, str) else served
    if ops.component(layer, "kv").ratio > 1:
        found = _bind_attend_groups(ops, layer)
    else:
        found = _bind_attend_rows(ops, layer, infer)
    if isinstance(found, Declined) or ops.attention_kernels not in CLASSIC_FITS:
        return found
    own = kernel(name_of_kernels(), why(ops, layer, found.roles), plain="torch", but=found.but)
    return found._replace(decision=_beside(ops, own.reason, served, CLASSIC_FITS), replayed=infer is None)


def _bind_attend_rows(ops, layer, infer):
    """{case: what its calls need, or why the layer's formats are not covered in it}."""
    without = declined(ops, layer, "kv")
    if without is not None:
        return without
    cases = {case: _attended_kv(ops, layer, case, infer) for case in CASES}
    reasons = {case: found.reason for case, found in cases.items() if isinstance(found, Declined)}
    if len(reasons) == len(cases):
        return Declined("; ".join(dict.fromkeys(reasons.values())))
    # Plain tuples: code that torch 2.11 compiles finds no named one in a table by its values.
    table = {tuple(case): found for case, found in cases.items()}
    return Ready(table, ("kv",), (*(f"{case.words}: {reason}" for case, reason in reasons.items()), ALONE.reason))


def _attended_kv(ops, layer, case, infer):
    parts, component = ops.records[layer, "kv"], ops.component(layer, "kv")
    keys, values = (launch.BOUND[part.number].record for part in parts)
    records = None
    if case.own:
        records = kv_kernel.own_records(keys, values, [region.format for region in ops.plan.region(layer, "kv")])
        if isinstance(records, Declined):
            return records
    native = is_native(ops.props.capability) and not launch.INTERPRETED
    sides = kv_kernel.multiplied(keys, values, records, bf16=case.bf16, native=native)
    if isinstance(sides, Declined):
        return sides
    numbers = (-1, -1) if records is None else tuple(launch.bind(launch.Bound(one, 0, 0, 0)) for one in records)
    heads, seen = (keys.heads, values.heads), (component.window or 0, component.chunk or 0)
    fits = launch.run_triton.gluon and case.bf16 and not case.own
    taken = packed.packed_work(keys, values, ops.props) if fits else None
    config = kv_kernel.config_for(ops.props, sides)
    return AttendedKV(parts, numbers, heads, values.dim, *seen, config, taken and taken.config, ops.props, infer)


def attend_kv_covers(bound, index, q, k=None, v=None, **_):
    """The case of a call."""
    if (k is None) != (v is None):
        return ALONE
    if isinstance(bound, AttendedGroups):
        return bound if k is None else OWN_GROUPS
    return bound[q.dtype == torch.bfloat16, k is not None]


def attend_kv(bound, ops, pools, layer, index, q, k=None, v=None, *, columns=None, sink=None, scale=None):
    """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim].

    Rows are read where they lie: ``columns`` only bounds how many keys a query sees.
    """
    if not len(index.slots) or not q.numel():  # there is nothing to launch
        return PLAIN.attend_kv(ops, pools, layer, index, q, k, v, columns=columns, sink=sink, scale=scale)
    if isinstance(bound, AttendedGroups):
        columns = bounds.columns(ops.plan, layer, "kv", index) if columns is None else columns
        return _attend_groups(bound, ops, pools, index, q, columns, sink, scale)
    if bound.infer is not None:
        reason = flash_infer.misfit_kv(ops, bound.infer, index, q, k)
        if not reason:
            return flash_infer.attend_kv(ops, pools, bound.infer, index, q, sink, _scale(q, scale))
        ops.fall_back(layer, "attend_kv", reason, name_of_kernels())
    own = None, None
    if k is not None:
        parts = zip(ops.plan.region(layer, "kv"), (k, v), strict=True)
        own = [ops.encode_rows(region, rows).contiguous() for region, rows in parts]
    keys, values = bound.parts
    columns = bounds.columns(ops.plan, layer, "kv", index) if columns is None else columns
    seen = min(columns, bound.window or bound.chunk or columns)
    tokens, heads, _ = q.shape
    work = kv_kernel.work_for(tokens, len(index.slots), heads, *bound.heads)
    most = seen + work.each - 1
    if bound.packed is not None and work.each == 1:
        splits = packed.splits_of(bound.props, packed.programs_of(tokens, heads, *bound.heads), most, bound.packed)
    else:
        splits = kv_kernel.splits_for(bound.props, work.programs, most, bound.config)
    room = splits * tokens * heads * (bound.value_dim + 1) if splits > 1 else 1
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
        [pools[name] for name in keys.names],
        [pools[name] for name in values.names],
        ops.workspaces.take("attention", room),
        [keys.number, values.number, *bound.own_numbers],
        [bound.window, bound.chunk, splits],
        _scale(q, scale),
        q.dtype == torch.bfloat16,
    )
    return Attention(out, lse)


KERNELS = {
    "attend": Kernel(attend, bind_attend, whole_window, replayed=True),
    "attend_kv": Kernel(attend_kv, bind_attend_kv, attend_kv_covers, replayed=True, bounds=("columns",)),
}
"""Verbs that attend."""
