"""The write path on CUDA: one launch for each part of a verb.

After a step's index is built nothing here allocates, asks the device for a value or looks at host integers that change
from step to step, so a decode step can be captured in a CUDA graph.
"""

from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import launch
from kvcore.backends.torch_triton.cuda import (
    GroupParts,
    Kernel,
    Ready,
    bind_group_parts,
    declined,
    of_role,
    of_states,
)
from kvcore.backends.torch_triton.tail import frequencies_of
from kvcore.kernels.triton.launches.launching import Part
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.shape import one_token_programs, tails_apart
from kvcore.ops.choices import Decision, Declined
from kvcore.spec import TAIL_OF

TWO_DTYPES = Declined("kv and index_kv are of two dtypes")


def append_window(parts, ops, pools, layer, index, rows):
    """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
    _append(parts[0], pools, index, rows)
    return pools


def bind_append_kv(ops, layer):
    """Parts whose rows are tokens, or groups of tokens."""
    if ops.component(layer, "kv").ratio == 1:
        return of_role("kv")(ops, layer)
    found = bind_group_parts(ops, layer)
    return found if isinstance(found, Declined) else Ready(found, ("kv_tail", "kv"))


def append_kv(parts, ops, pools, layer, index, k, v):
    """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
    if isinstance(parts, GroupParts):
        return append_groups(parts, ops, pools, layer, index, k, v)
    _append(parts[0], pools, index, k)
    _append(parts[1], pools, index, v)
    return pools


def append_groups(parts, ops, pools, layer, index, k, v):
    """Code every group that the step completes, and store its newest rows raw: one launch for a short step, else three.

    A long step's groups are coded side by side, so their launch must end before raw rows replace what it reads.
    """
    tokens, requests = len(index.positions), len(index.slots)
    most = 0 if one_token_programs(tokens, requests) else min(tokens, tokens // parts.ratio + requests)
    keys, values, tails = parts.pools(pools)
    launch.calls().append_groups_rows(
        k.contiguous(),
        v.contiguous(),
        index.positions,
        index.request_index,
        index.starts,
        index.lengths,
        index.slots,
        index.stored,
        index.block_table,
        keys,
        values,
        tails,
        parts.numbers,
        most,
    )
    if most:
        for part, given in zip(parts.raw, (k, v), strict=True):
            _append(part, pools, index, given)
    return pools


def _append(part, pools, index, values):
    number, names, paged = part
    launch.calls().append_rows(
        values.contiguous(),
        index.positions,
        index.request_index,
        index.slots,
        index.stored if paged else index.lengths,
        index.block_table,
        [pools[name] for name in names],
        number,
    )


def append_states(part, ops, pools, layer, index, states):
    """Store states [T, heads, ...], or inputs of a convolution [T, channels], of every token, as the ring has room."""
    _append(part, pools, index, states)
    return pools


def write_state(part, ops, pools, layer, index, states, *, newest=None):
    """Store the state after every request's last token, [Q, heads, ...], and NaN for its other tokens: one launch."""
    number, names, _ = part
    columns = min(launch.BOUND[number].record.rows, len(index.positions) if newest is None else newest)
    place = index.slots, index.starts, index.lengths
    buffers = [pools[name] for name in names]
    launch.calls().write_last_states(states.contiguous(), *place, buffers, number, columns)
    return pools


def select_state(part, ops, pools, layer, index, states, taken):
    """Of the states after every token, [T, ...], store the one after each request's first ``taken``: one launch."""
    number, names, _ = part
    place = index.slots, index.starts, index.lengths
    buffers = [pools[name] for name in names]
    launch.calls().select_state_rows(states.contiguous(), *place, taken.to(torch.int32), buffers, number)
    return pools


def append_rotated_window(parts, ops, pools, layer, index, rows, *, rope, norm_weight=None, eps=1e-6):
    """Norm (if a weight is given) and rotate rows [T, d] at their positions, then ``append_window``, in one launch.

    Rounded to bf16 after the norm and after the rotation, unless the window's format decodes to fp32.
    """
    ((number, names, _),) = parts
    launch.calls().append_rotated_rows(
        rows.contiguous(),
        index.positions,
        index.request_index,
        index.slots,
        index.lengths,
        index.block_table,
        norm_weight,
        frequencies_of(rope, rows.device),
        [pools[name] for name in names],
        number,
        float(eps),
    )
    return pools


def append_tail(parts, ops, pools, layer, index, kv, score):
    """Store raw compressor rows kv and score, [T, width] each, at slot·R + p mod R."""
    ((number, names, _),) = parts
    launch.calls().append_tail_rows(
        kv.contiguous(),
        score.contiguous(),
        index.positions,
        index.request_index,
        index.slots,
        index.lengths,
        [pools[name] for name in names],
        number,
    )
    return pools


class Stored(NamedTuple):
    """Where entries go, and tokens of each."""

    part: Part
    ratio: int

    @classmethod
    def of(cls, role):
        """A binding to the entries of a role."""

        def bind(ops, layer):
            without = declined(ops, layer, role)
            return without or Ready(cls(ops.records[layer, role][0], ops.component(layer, role).ratio), (role,))

        return bind


def store_role(bound, ops, pools, layer, role, index, values):
    """Store the entries that the step completes in the pool of one role."""
    (number, names, _), ratio = bound
    launch.calls().store_rows(
        values.contiguous(),
        index.starts,
        index.lengths,
        index.stored,
        index.block_table,
        [pools[name] for name in names],
        number,
        ratio,
    )


class Flush(NamedTuple):
    """What a flush must know of one stream, or of both.

    Attributes:
        records: numbers of the entries, their tail and, of both streams, of the index keys and theirs.
        tail, entries, index_tail, index_keys: names of their buffers.
        ratio: tokens of an entry.
        size: channels of a window's pooled row in the scratch memory.
        spare: new tokens of a request that overwrite nothing that a window closing in the same step still needs.
    """

    records: list[int]
    tail: list[str]
    entries: list[str]
    index_tail: list[str]
    index_keys: list[str]
    ratio: int
    size: int
    spare: int

    @classmethod
    def of(cls, ops, layer, mains) -> "Flush | Declined":
        """Of the streams of some roles, or why the kernels do not cover one of them."""
        roles = [each for main in mains for each in (main, TAIL_OF[main])]
        without = declined(ops, layer, *roles)
        if without is not None:
            return without
        entries, tail, *index = (ops.records[layer, role][0] for role in roles)
        index_keys, index_tail = index or (None, None)
        component = ops.component(layer, "entries")
        tails = [role for role in ("tail", "index_tail") if ops.component(layer, role) is not None]
        return cls(
            [part.number for part in (entries, tail, *index)],
            tail.names,
            entries.names,
            [] if index_tail is None else index_tail.names,
            [] if index_keys is None else index_keys.names,
            component.ratio,
            power_of_two(component.dim),
            min(ops.plan.region(layer, role)[0].rows - ops.component(layer, role).span for role in tails),
        )


class Flushes(NamedTuple):
    """Flushes of a layer: of its entries alone, and with its index keys; or why there is none."""

    alone: Flush
    both: Flush | Declined


def bind_flush(ops, layer) -> Ready | Declined:
    """A layer's flushes; of a layer with index keys kernels are said to run where they cover both streams."""
    alone = Flush.of(ops, layer, ("entries",))
    if any(ops.component(layer, role) is None for role in ("index_keys", "index_tail")):
        found = Declined("the layer has no index keys")
        return alone if isinstance(alone, Declined) else Ready(Flushes(alone, found), ("entries", "tail"))
    both = Flush.of(ops, layer, ("entries", "index_keys"))
    if isinstance(alone, Declined):
        # The reasons for both are the same, and more.
        return both if isinstance(both, Declined) else alone
    if isinstance(both, Declined):
        said = Decision("torch", f"{both.reason}; without index_kv kernels run", slower=True)
        return Ready(Flushes(alone, both), decision=said)
    return Ready(Flushes(alone, both), ("entries", "tail", "index_keys", "index_tail"), (TWO_DTYPES.reason,))


def flush_covers(bound, index, kv, score, index_kv=None, index_score=None, **_):
    """The flush of the streams that are given."""
    if index_kv is None:
        return bound.alone
    return bound.both if index_kv.dtype == kv.dtype else TWO_DTYPES


def flush(
    bound,
    ops,
    pools,
    layer,
    index,
    kv,
    score,
    index_kv=None,
    index_score=None,
    *,
    closed=None,
    norm_weight=None,
    eps=1e-6,
    rope=None,
    index_norm_weight=None,
    append=False,
    newest=None,
):
    """Compress, rotate, encode and store every entry that the step completes, and its index key: one launch.

    ``closed`` only says that there may be work: which entries close is read from the index on the device. With
    ``append`` the launch stores the tails' rows, too.
    """
    if closed == 0 and not append and not capturing():
        return pools
    launch.calls().flush_rows(
        kv,
        score,
        [pools[name] for name in bound.tail],
        [pools[name] for name in bound.entries],
        norm_weight,
        index_kv,
        index_score,
        [pools[name] for name in bound.index_tail],
        [pools[name] for name in bound.index_keys],
        index_norm_weight,
        frequencies_of(rope, kv.device),
        index.positions,
        index.request_index,
        index.slots,
        index.starts,
        index.lengths,
        index.stored,
        index.block_table,
        *ops.scratch.take(len(index.positions) // bound.ratio + len(index.slots) + 1, bound.size),
        bound.records,
        float(eps),
        append,
        append and (len(index.positions) if newest is None else newest) <= bound.spare,
    )
    return pools


def append_flush(
    bound, ops, pools, layer, index, kv, score, index_kv=None, index_score=None, *, newest=None, closed=None, **options
):
    """``append_tail``, ``append_index_tail`` and ``flush`` together, in one launch unless that is slower.

    ``newest`` tells whether the rings have spare rows for the step's own: each token's program then writes them.
    """
    streams: Any = kv, score, index_kv, index_score
    if not tails_apart(launch.TAILS[bound.records[1]].record, len(index.positions), len(index.slots), kv.itemsize):
        return flush(bound, ops, pools, layer, index, *streams, append=True, newest=newest, **options)
    flush(bound, ops, pools, layer, index, *streams, **options)
    # What the tails keep of a long prefill, after its flush has read them.
    numbers = index.slots, index.starts, index.lengths
    tails = zip(bound.records[1::2], (bound.tail, bound.index_tail), (streams[:2], streams[2:]), strict=False)
    for number, names, rows in tails:
        buffers = [pools[name] for name in names]
        launch.calls().append_last_rows(*(each.contiguous() for each in rows), *numbers, buffers, number)
    return pools


class Scratch:
    """Rows of pooled channels, and zeroed counters, for every window that can close at once.

    They are kept for the next step, and so are smaller ones that were outgrown: a captured graph may use them.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._outgrown: list[Any] = []

    def take(self, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(``rows`` rows of ``size`` channels, fp32; as many counters)."""
        kept = self._kept
        if kept is None or kept[0].numel() < rows * size or kept[1].numel() < rows:
            if kept is not None:
                self._outgrown.append(kept)
            rows = power_of_two(rows)
            self._kept = kept = (
                torch.empty(rows * size, dtype=torch.float32, device=self._device),
                torch.zeros(rows, dtype=torch.int32, device=self._device),
            )
        return kept


def capturing() -> bool:
    """True while launches are recorded for later steps, whose windows may close where this step's don't."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


KERNELS = {
    "append_window": Kernel(append_window, of_role("window"), replayed=True),
    "append_rotated_window": Kernel(append_rotated_window, of_role("window"), replayed=True),
    "append_tail": Kernel(append_tail, of_role("tail"), replayed=True),
    "append_index_tail": Kernel(append_tail, of_role("index_tail"), replayed=True),
    "store_entries": Kernel(store_role, Stored.of("entries")),
    "store_entries(index_keys)": Kernel(store_role, Stored.of("index_keys")),
    "flush": Kernel(flush, bind_flush, flush_covers),
    "append_flush": Kernel(append_flush, bind_flush, flush_covers, replayed=True, unread=("closed",)),
    "append_kv": Kernel(append_kv, bind_append_kv, replayed=True),
    "append_state": Kernel(append_states, of_states("state"), replayed=True),
    "write_state": Kernel(write_state, of_states("state"), replayed=True),
    "select_state": Kernel(select_state, of_states("state"), replayed=True),
    "append_conv": Kernel(append_states, of_states("conv"), replayed=True),
}
"""Verbs that write rows."""
