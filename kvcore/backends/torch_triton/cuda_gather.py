"""The verbs that gather rows on CUDA: windows, entries, keys and values, and what recurrent layers go on from.

Outputs come from torch's allocator, which a CUDA graph gives a pool of its own.
"""

from typing import NamedTuple

from kvcore.backends.torch_triton import launch
from kvcore.backends.torch_triton.cuda import Kernel, Ready, declined, of_states
from kvcore.kernels.triton.launches.launching import Part
from kvcore.ops import AllEntries, SelectedEntries, WindowRows, bounds
from kvcore.ops.choices import Declined

LEFT_PADDING = Declined("the step has left padding")
SHORTER = Declined("a window begins later than it does by itself")


class Gathered(NamedTuple):
    """Where rows are gathered from, and how many: the window's, or tokens of an entry."""

    part: Part
    count: int

    @classmethod
    def of(cls, role):
        """A binding to a role's rows."""

        def bind(ops, layer):
            component = ops.component(layer, role)
            count = component.window if role == "window" else component.ratio
            return declined(ops, layer, role) or Ready(cls(ops.records[layer, role][0], count), (role,))

        return bind


def whole_window(bound, index, *_, **__):
    """Windows that begin where they do by themselves: kernels know no other beginning."""
    return bound if index.left_padding is None else SHORTER


def gather_window(bound, ops, pools, layer, index, rows=None):
    """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
    (number, names, _), window = bound
    buffers = [pools[name] for name in names]
    found = WindowRows(*launch.calls().gather_window_rows(index.slots, index.lengths, buffers, number, window))
    if rows is not None:
        _put_own(found.values, rows, index, number, True, True, window, 0)
    return found


def _put_own(out, values, index, number, *seen):
    """Replace gathered rows of the step's own positions by ``values``, as they read once they are stored."""
    step = index.positions, index.request_index, index.starts, index.lengths
    launch.calls().put_own_rows(out, values.contiguous(), *step, number, *seen)


def gather_entries(bound, ops, pools, layer, index, indices):
    """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
    (number, names, _), ratio = bound
    found = launch.calls().gather_selected_rows(
        indices.contiguous(),
        index.request_index,
        index.lengths,
        index.block_table,
        [pools[name] for name in names],
        number,
        ratio,
    )
    return SelectedEntries(*found)


def gather_all_entries(bound, ops, pools, layer, index, *, columns=None, role="entries"):
    """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
    (number, names, _), ratio = bound
    columns = bounds.columns(ops.plan, layer, role, index) if columns is None else columns
    buffers = [pools[name] for name in names]
    found = launch.calls().gather_all_rows(index.lengths, index.block_table, buffers, number, ratio, columns)
    return AllEntries(*found)


class Before(NamedTuple):
    """Where rows before a step are read from, how many of a request, and the shape of what is read of it."""

    part: Part
    count: int
    shape: list[int]

    @classmethod
    def of(cls, role):
        """A binding to a role of a recurrent layer."""
        bind_part = of_states(role)

        def bind(ops, layer):
            found, component = bind_part(ops, layer), ops.component(layer, role)
            if isinstance(found, Declined):
                return found
            shape = component.shape if role == "state" else (component.span, component.channels)
            return found._replace(given=cls(found.given, component.span, [*shape]))

        return bind


def read_before(bound, ops, pools, layer, index):
    """What the step's tokens go on from: states [Q, heads, ...], or inputs [Q, width - 1, channels]; zeros before 0."""
    (number, names, _), count, shape = bound
    buffers = [pools[name] for name in names]
    return launch.calls().read_before_rows(index.slots, index.starts, buffers, number, count, shape)


class Rows(NamedTuple):
    """Keys' and values' parts, and which of their rows a query sees: (in a ring, window or 0, chunk or 0)."""

    parts: tuple[Part, ...]
    seen: tuple[bool, int, int]


def bind_gather_kv(ops, layer):
    """Kernels' rings begin where the first query's window does, left padding or not: of a ring not with it."""
    component = ops.component(layer, "kv")
    seen = component.span is not None, component.window or 0, component.chunk or 0
    ring, given = seen[0], Rows(ops.records[layer, "kv"], seen)
    return declined(ops, layer, "kv") or Ready(given, ("kv",), (LEFT_PADDING.reason,) if ring else (), asks=ring)


def gather_kv_covers(bound, index, k=None, v=None, *, columns=None):
    """Of rings, all but a step with left padding."""
    return bound if index.left_padding is None else LEFT_PADDING


def gather_kv(bound, ops, pools, layer, index, k=None, v=None, *, columns=None):
    """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
    columns = bounds.columns(ops.plan, layer, "kv", index) if columns is None else columns
    place = index.slots, index.starts, index.lengths, index.block_table
    gathered, positions = [], None
    for (number, names, _), own in zip(bound.parts, (k, v), strict=True):
        buffers = [pools[name] for name in names]
        rows, positions = launch.calls().gather_kv_rows(*place, buffers, number, columns, *bound.seen)
        if own is not None:
            _put_own(rows, own, index, number, False, *bound.seen)
        gathered.append(rows)
    return *gathered, positions


KERNELS = {
    "gather_window": Kernel(gather_window, Gathered.of("window"), whole_window, replayed=True),
    "gather_entries": Kernel(gather_entries, Gathered.of("entries"), replayed=True),
    "gather_all_entries": Kernel(gather_all_entries, Gathered.of("entries")),
    "gather_all_entries(index_keys)": Kernel(gather_all_entries, Gathered.of("index_keys")),
    "gather_kv": Kernel(gather_kv, bind_gather_kv, gather_kv_covers, replayed=True),
    "read_state": Kernel(read_before, Before.of("state"), replayed=True),
    "gather_conv": Kernel(read_before, Before.of("conv"), replayed=True),
}
"""Verbs that gather."""
