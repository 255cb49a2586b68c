"""Verbs on CUDA as launches of the project's Triton kernels, on arrays of JAX.

Everything is traced: a launch is part of the caller's program, and updates pools in place where XLA may, which is where
they are donated. What the kernels don't cover (a layout that splits bytes, a third party's format) is computed by
jax.numpy. Launches are those that the torch backend runs.
"""

from typing import Any

import jax.numpy as jnp

from kvcore.backends.jax_pallas import run_triton
from kvcore.backends.jax_pallas.encoding import DTYPES
from kvcore.backends.jax_pallas.run_triton import call
from kvcore.kernels.triton.attend import parts_of
from kvcore.kernels.triton.launches.attention import config_of, pipelined
from kvcore.kernels.triton.launches.launching import BOUND, Bound, Part, bind, bind_ring, bind_rows
from kvcore.kernels.triton.launches.states import bind_states
from kvcore.kernels.triton.record import RowRecord, ceil_div, own_record
from kvcore.kernels.triton.scores import score_parts, takes_codes
from kvcore.kernels.triton.topk import LARGEST_K, rows_at_once, tile_for
from kvcore.plan import Region

ROLES = ("window", "entries")


def covers(region: Region) -> bool:
    """True where rows of a region are encoded and decoded by the kernels."""
    return isinstance(bind_rows(region), Part)


def keeps_tail(layer, role: str) -> bool:
    """True where a tail's rows are stored and pooled by the kernels."""
    return isinstance(_tail(layer, role), Part)


def _tail(layer, role: str) -> Any:
    return bind_ring(layer.regions[role][0], layer.component(role))


def _record(region: Region, global_scale: float = 1.0) -> RowRecord:
    """The record of a region that is covered."""
    return BOUND[_bound(region, global_scale)[0]].record


def _bound(region: Region, global_scale: float = 1.0) -> Any:
    """(number of its record, names of its pools, paged or not) of a region that is covered."""
    return bind_rows(region, float(global_scale))


def _floats(values):
    """Values as the kernels read them: fp32 or bf16."""
    return values if values.dtype in (jnp.float32, jnp.bfloat16) else values.astype(jnp.float32)


def _updated(pools, names, buffers):
    """Pools with those of ``names`` replaced."""
    for name, buffer in zip(names, buffers, strict=True):
        pools = pools.replace(name, buffer)
    return pools


def _write(launch, pools, names, before, *after):
    """Pools after a launch of arrays ``before``, then of the buffers of ``names``, which it writes, then ``after``."""
    _, written = call(launch, *before, [pools[name] for name in names], *after)
    return _updated(pools, names, written["buffers"])


def append(pools, region: Region, index, values, global_scale=1.0):
    """Pools with values [T, dim] or [T, heads, dim] of the step's tokens encoded and stored at their positions."""
    number, names, paged = _bound(region, global_scale)
    stored = index.stored if paged else index.lengths
    given = _floats(values), index.positions, index.request_index, index.slots, stored, index.block_table
    return _write("append_rows", pools, names, given, number)


def append_rotated(pools, region: Region, index, values, frequencies, norm_weight, eps):
    """``append`` of one head with a norm, if it has a weight, and a rotation in front."""
    number, names, _ = _bound(region)
    place = index.positions, index.request_index, index.slots, index.lengths, index.block_table
    given = _floats(values), *place, norm_weight, frequencies
    return _write("append_rotated_rows", pools, names, given, number, float(eps))


def store_entries(pools, region: Region, index, values, ratio, global_scale=1.0):
    """Pools with values [closed, dim] encoded and stored as the entries that the step completes."""
    number, names, _ = _bound(region, global_scale)
    given = _floats(values), index.starts, index.lengths, index.stored, index.block_table
    return _write("store_rows", pools, names, given, number, ratio)


def append_tail(layer, pools, index, kv, score, *, role):
    """Pools with raw compressor rows kv and score [T, width] stored at slot·R + p mod R."""
    number, names, _ = _tail(layer, role)
    given = _floats(kv), _floats(score), index.positions, index.request_index, index.slots, index.lengths
    return _write("append_tail_rows", pools, names, given, number)


def flushes(layer, roles) -> bool:
    """True where a flush of these roles (``entries``, ``index_keys``) is one launch."""
    return all(covers(layer.regions[role][0]) and keeps_tail(layer, layer.tail_of(role)) for role in roles)


def flush(layer, pools, index, streams, rope, *, eps, append, newest):
    """Pools with every entry that the step completes pooled, normed, rotated, encoded and stored, in one launch.

    Args:
        streams: role -> (kv, score, norm weight or None), ``entries`` first, then ``index_keys`` if there are any.
        append: store the step's own raw rows in the tails, too.
        newest: most new tokens of a request.
    """
    wide = any(array.dtype != jnp.bfloat16 for kv, score, _ in streams.values() for array in (kv, score))
    given, numbers, named, spare = [], [], {}, []
    for (role, (kv, score, weight)), mark in zip(streams.items(), ("", "index_"), strict=False):
        kv, score = (array.astype(jnp.float32 if wide else jnp.bfloat16) for array in (kv, score))
        tail = layer.tail_of(role)
        (region,), (ring,) = layer.regions[role], layer.regions[tail]
        number, names, _ = _bound(region, layer.global_scale(role))
        tail_number, tail_names, _ = _tail(layer, tail)
        given += kv, score, [pools[name] for name in tail_names], [pools[name] for name in names], weight
        named |= {f"{mark}buffers": names, f"{mark}tail_buffers": tail_names}
        numbers += number, tail_number
        spare.append(ring.rows - layer.component(tail).span)
    given += (None, None, [], [], None) * (2 - len(streams))
    place = index.positions, index.request_index, index.slots, index.starts, index.lengths, index.stored
    beside = newest <= min(spare)
    _, written = call(
        "flush_rows", *given, rope, *place, index.block_table, None, None, numbers, float(eps), append, beside
    )
    for mark, names in named.items():
        pools = _updated(pools, names, written[mark])
    return pools


def attends(layer, index, q) -> bool:
    """True where the kernel covers every region that queries [T, H, d] attend to."""
    regions = [layer.regions[role][0] for role in ROLES if role in layer.regions]
    if not q.size or not len(index.slots) or not all(map(covers, regions)):
        return False
    records = (_record(layer.regions[role][0]) if role in layer.regions else None for role in ROLES)
    return parts_of(*records, bf16=q.dtype == jnp.bfloat16) is not None


def attend(layer, pools, index, q, selected, own, sink, scale, rope):
    """Out like q and lse [T, H] fp32 of queries q [T, H, d].

    Args:
        selected: entries [T, k], or None: all visible ones.
        own: the step's window rows as canonical bytes [T, row_bytes] where the ring does not hold them yet, or None.
        scale: of the logits, a number.
        rope: fp32 inverse frequencies by which outputs are turned back, or None.
    """
    given, q = q, _floats(q)
    bf16 = q.dtype == jnp.bfloat16
    window, entries = (layer.component(role) for role in ROLES)
    selected = None if selected is None or entries is None else selected.astype(jnp.int32)
    found = [_bound(layer.regions[role][0]) if role in layer.regions else (-1, [], False) for role in ROLES]
    numbers, own_number = [number for number, _, _ in found], -1
    if own is not None:
        record = own_record(BOUND[numbers[0]].record, layer.regions["window"][0].format)
        own_number = bind(Bound(record, 0, 0, 0))
    span, ratio = window.window if window else 0, entries.ratio if entries else 0
    if entries is None:
        most = 0
    elif selected is None:
        most = index.block_table.shape[1] * layer.regions["entries"][0].rows
    else:
        most = selected.shape[1]
    sizes = *q.shape[:2], span + most, selected is not None, pipelined(run_triton.gluon, own, rope)
    share = config_of(run_triton.props(q), *numbers, bf16, *sizes)
    (out, lse), _ = call(
        "attend_rows", q, selected, sink, own, index.positions, index.request_index, index.slots, index.starts,
        index.block_table, *([pools[name] for name in names] for _, names, _ in found), rope, None,
        [*numbers, own_number], [span, ratio, share.splits, span + most], scale, bf16,
    )  # fmt: skip
    return out.astype(given.dtype), lse


def keeps_states(region: Region) -> bool:
    """True where rows of a recurrent layer's region are read and written by the kernels."""
    return isinstance(_states(region), Part)


def _states(region: Region) -> Any:
    known = bind_rows(region)
    return bind_states(known) if isinstance(known, Part) else known


def append_states(pools, region: Region, index, values):
    """``append`` of states, or of a convolution's inputs."""
    number, names, _ = _states(region)
    place = index.positions, index.request_index, index.slots, index.lengths, index.block_table
    return _write("append_rows", pools, names, (_floats(values), *place), number)


def write_last(pools, region: Region, index, states, columns):
    """Pools with states [Q, ...] stored after each request's last token, NaN after its ``columns`` - 1 others."""
    number, names, _ = _states(region)
    given = _floats(states), index.slots, index.starts, index.lengths
    return _write("write_last_states", pools, names, given, number, columns)


def select_state(pools, region: Region, index, states, taken):
    """Pools with that of states [T, ...] stored that each request's ``taken`` [Q] new tokens end at."""
    number, names, _ = _states(region)
    place = index.slots, index.starts, index.lengths, taken.astype(jnp.int32)
    return _write("select_state_rows", pools, names, (_floats(states), *place), number)


def read_before(pools, region: Region, index, count):
    """Values [Q, count, heads, dim] of the last positions before the step; zeros for those below 0."""
    number, names, _ = _states(region)
    shape = [count, region.heads, region.format.dim or 0]
    given = index.slots, index.starts, [pools[name] for name in names], number, count, shape
    return _typed(region, call("read_before_rows", *given)[0])


def gather_window(pools, region: Region, index, window, own=None):
    """The last ``window`` rows of every request: values [Q, ring rows, dim] and positions [Q, ring rows].

    ``own`` rows [T, dim] of the step are put in as they would read once they are stored.
    """
    number, names, _ = _bound(region)
    given = index.slots, index.lengths, [pools[name] for name in names], number, window
    (values, positions), _ = call("gather_window_rows", *given)
    values = _put_own(values, own, index, number, True, True, window, 0)
    return _typed(region, values), positions


def gather_entries(pools, region: Region, index, indices, ratio, global_scale=1.0):
    """Entries by index [T, k]: values [T, k, dim], and whether each exists."""
    number, names, _ = _bound(region, global_scale)
    place = index.request_index, index.lengths, index.block_table, [pools[name] for name in names]
    (values, valid), _ = call("gather_selected_rows", indices.astype(jnp.int32), *place, number, ratio)
    return _typed(region, values), valid != 0


def gather_all(pools, region: Region, index, ratio, columns, global_scale=1.0):
    """Every entry of every request: values [Q, columns, dim], counts [Q], positions [Q, columns]."""
    number, names, _ = _bound(region, global_scale)
    place = index.lengths, index.block_table, [pools[name] for name in names]
    (values, *others), _ = call("gather_all_rows", *place, number, ratio, columns)
    return _typed(region, values), *others


def gather_kv(pools, regions, index, own, component, columns):
    """Rows that a query of the step may see: k, v [Q, columns, heads, dim] and positions [Q, columns].

    ``own``: the step's k and v where they are not stored yet, else two times None.
    """
    seen = component.span is not None, component.window or 0, component.chunk or 0
    place, gathered, positions = (index.slots, index.starts, index.lengths, index.block_table), [], None
    for region, given in zip(regions, own, strict=True):
        number, names, _ = _bound(region)
        buffers = [pools[name] for name in names]
        (values, positions), _ = call("gather_kv_rows", *place, buffers, number, columns, *seen)
        gathered.append(_typed(region, _put_own(values, given, index, number, False, *seen)))
    return *gathered, positions


def _put_own(gathered, own, index, number, *seen):
    """Gathered rows [Q, columns, ...] with those of the step's own positions replaced by ``own``, if it is given."""
    if own is None:
        return gathered
    step = index.positions, index.request_index, index.starts, index.lengths
    return call("put_own_rows", gathered, _floats(own), *step, number, *seen)[1]["out"]


def _typed(region, values):
    """Decoded rows in the type that the format is decoded to."""
    return values.astype(DTYPES[region.format.value_code])


def scores(region: Region, index, q, global_scale=1.0) -> bool:
    """True where the kernels cover keys and queries q [T, H, d]."""
    known = covers(region) and score_parts(_record(region, global_scale)) is not None
    return known and q.size > 0 and len(index.slots) > 0


def index_scores(pools, region: Region, index, q, weights, ratio, columns, global_scale=1.0):
    """Scores [T, columns] fp32, -inf for keys that the token does not see."""
    number, names, _ = _bound(region, global_scale)
    place = index.positions, index.request_index, index.block_table, [pools[name] for name in names]
    codes = q.dtype == jnp.float8_e4m3fn and takes_codes(_record(region, global_scale)) and run_triton.native(q)
    return call("score_rows", q if codes else _floats(q), _floats(weights), *place, None, number, ratio, columns)[0]


def selects(scores_, k) -> bool:
    """True where the best k of scores [T, n] come from the kernels."""
    return scores_.size > 0 and 0 < k <= LARGEST_K


def select(scores_, k):
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    columns = scores_.shape[1]
    tile = tile_for(k, columns)
    step = rows_at_once(ceil_div(columns, tile.hands * tile.deep))
    rows = (scores_[first : first + step].astype(jnp.float32) for first in range(0, len(scores_), step))
    return jnp.concatenate([call("select_rows", some, None, None, k)[0] for some in rows])
