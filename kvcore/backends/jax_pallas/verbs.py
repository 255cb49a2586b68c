"""The table of verbs, for functions that are compiled: which arguments are arrays, and which a trace is made for."""

from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from kvcore.backends.jax_pallas import attention, choice, kv, programs, tail, window
from kvcore.backends.jax_pallas import entries as entry
from kvcore.backends.jax_pallas.order import read_first
from kvcore.ops import Ops, RawRows, StepIndex, bounds, facade
from kvcore.ops.records import Compression, Streams
from kvcore.pools import Pools
from kvcore.spec import TAIL_OF, Rope

STATIC = frozenset({"role", "eps", "closed", "count", "columns", "newest"})
"""Options that a trace is made for; all others are arrays."""


def reader(function: Any, *roles: str, name: str = "", **fixed: Any) -> Any:
    """A verb that reads pools of some roles, or of the role that it is given."""
    return _of_layer(function, roles, name, fixed, writes=False)


def writer(function: Any, *roles: str, name: str = "", **fixed: Any) -> Any:
    """A verb that returns pools with those of some roles written, or of the role that it is given."""
    return _of_layer(function, roles, name, fixed, writes=True)


def indexed(function: Any) -> Any:
    """A verb of a layer's index alone."""
    names, size = facade.parameters_of(function).names, facade.SIZES[function.__name__]

    def run(self: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        options.update(zip(names, given, strict=False))
        count = _bucketed(self, size, layer, index, options)
        kind = self.layers[layer].only(size.role or options.get("role", "entries"))
        return _trimmed(programs.indexed(function)(kind, index, tuple(sorted(options.items()))), size, count)

    return facade.as_verb(run, function)


def turning(compression: Compression) -> Compression:
    """The same with fp32 inverse frequencies for a rope."""
    weights = compression.norm_weight, compression.index_norm_weight
    return Compression(weights[0], float(compression.eps), tail.frequencies_of(compression.rope), weights[1])


def _of_layer(function: Any, roles: tuple[str, ...], name: str, fixed: dict[str, Any], *, writes: bool) -> Any:
    names, size = facade.parameters_of(function).names, facade.SIZES.get(function.__name__)

    def call(self: Any, pools: Any, layer: int, index: StepIndex, given: Any, options: dict[str, Any]) -> Any:
        arrays, static = _sorted_out(self, function, {**dict(zip(names, given, strict=False)), **options})
        count = None if size is None else _bucketed(self, size, layer, index, static)
        touched = roles or _roles(function, static.get("role", "entries"))
        move = _write if writes else _read
        found = move(self, function, pools, layer, touched, {"index": index, **arrays}, **static)
        return found if size is None or function is kv.attend_kv else _trimmed(found, size, count)

    def of_a_role(self: Any, pools: Any, layer: int, role: str, index: StepIndex, *given: Any, **options: Any) -> Any:
        return call(self, pools, layer, index, given, {**options, "role": role})

    def of_pools(self: Any, pools: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        return call(self, pools, layer, index, given, {**options, **fixed})

    return facade.as_verb(of_a_role if function.__name__ in facade.OF_A_ROLE else of_pools, function, name)


def _sorted_out(ops: Any, function: Any, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options of a trace) of a call; what is None is left to the function."""
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in STATIC:
            static[name] = float(value) if name == "eps" else value
        elif name == "scale" and function is attention.attend and _is_constant(ops, value):
            static[name] = float(value)
        elif name == "rope":
            arrays[name] = tail.frequencies_of(value)
        else:
            arrays[name] = RawRows(*value) if name == "raw" else value
    return arrays, static


def _is_constant(ops: Any, scale: Any) -> bool:
    """Whether a scale is a constant of a launch."""
    return ops.kernels == "triton" and isinstance(scale, int | float)


def _roles(function: Any, role: str) -> tuple[str, ...]:
    """The roles whose pools a function of a role reads."""
    return (role, TAIL_OF[role]) if function is tail.compress else (role,)


def _bucketed(ops: Any, size: facade.Size, layer: int, index: StepIndex, options: dict[str, Any]) -> int:
    """The size that is asked for; the options get one that changes rarely."""
    size.fill(ops.plan, layer, index, options)
    count = options[size.name]
    options[size.name] = _bucket(ops, count, index)
    return count


def _trimmed(found: Any, size: facade.Size, count: int | None) -> Any:
    """Outputs of the size that was asked for."""
    if size.name == "columns":
        return jax.tree.map(lambda array: array[:, :count] if array.ndim > 1 else array, found)
    return jax.tree.map(lambda array: array[:count], found)


def rotated_rows(
    self: Any,
    layer: int,
    index: StepIndex,
    rows: Array,
    *,
    rope: Rope | Array,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
) -> Array:
    """Window rows [T, d] normed (if a weight is given) and rotated at their positions, as they are stored then."""
    options = {"rope": tail.frequencies_of(rope), "norm_weight": norm_weight, "eps": float(eps)}
    return window.rotated_rows(self.layers[layer], index, rows, **options)


def select(self: Any, scores: Array, k: int) -> Array:
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    return programs.select(scores, k, self.kernels)


def store_entries(
    self: Any, pools: Pools, layer: int, index: StepIndex, entries: Array | None, index_keys: Array | None = None
) -> Pools:
    """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
    given = {"entries": entries, "index_keys": index_keys}
    writes = tuple(role for role, values in given.items() if values is not None)
    return _write(self, entry.store_entries, pools, layer, writes, {"index": index, **given})


def flush(self: Any, pools, layer, index, streams, compression, *, closed=None):
    """``flush``, whose index keys may be left out."""
    closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
    if not closed:
        return pools
    writes = ("entries",) if streams.index_kv is None else ("entries", "index_keys")
    reads = tuple(TAIL_OF[role] for role in writes)
    arrays = {"index": index, "streams": streams, "compression": turning(compression)}
    # A launch finds on the device what closes: its trace needs no bound.
    closed = 1 if _flushes(self, layer, writes) else _bucket(self, closed, index)
    return _write(self, tail.flush, pools, layer, writes, arrays, reads, closed=closed)


def _flushes(self: Any, layer: int, roles: tuple[str, ...]) -> bool:
    """True where a flush of these roles is one launch of a Triton kernel."""
    triton = choice.verbs(self.kernels)
    tails = (TAIL_OF[role] for role in roles)
    return bool(triton and triton.flushes(self.layers[layer].only(*roles, *tails), roles))


def append_flush(
    self: Any,
    pools: Pools,
    layer: int,
    index: StepIndex,
    kv: Array,
    score: Array,
    index_kv: Array | None = None,
    index_score: Array | None = None,
    *,
    newest: int | None = None,
    closed: int | None = None,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
    rope: Rope | Array | None = None,
    index_norm_weight: Array | None = None,
) -> Pools:
    """``flush``, then ``append_tail`` and ``append_index_tail``; one launch where kernels are Triton's."""
    roles = ("entries",) if index_kv is None else ("entries", "index_keys")
    tails = tuple(TAIL_OF[role] for role in roles)
    if _flushes(self, layer, roles):
        streams = Streams(kv, score, index_kv, index_score)
        compression = turning(Compression(norm_weight, eps, rope, index_norm_weight))
        arrays = {"index": index, "streams": streams, "compression": compression}
        newest = len(index.positions) if newest is None else newest
        options = {"closed": 1, "append": True, "newest": newest}
        return _write(self, tail.flush, pools, layer, (*roles, *tails), arrays, **options)
    weights = {"norm_weight": norm_weight, "index_norm_weight": index_norm_weight}
    if self.kernels != "portable" or not isinstance(next(iter(pools.values())), Tracer):
        options = {"closed": closed, "eps": eps, "rope": rope, **weights}
        return Ops.append_flush(self, pools, layer, index, kv, score, index_kv, index_score, **options)
    # In one program the tails are read first: beside the write, XLA would read a copy of them.
    streams = {"entries": (kv, score, norm_weight), "index_keys": (index_kv, index_score, index_norm_weight)}
    closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
    if closed:
        options, frequencies = {"closed": _bucket(self, closed, index), "eps": eps}, tail.frequencies_of(rope)

        def read(pools):
            names = "kv", "score", "norm_weight"
            return [
                _read(
                    self,
                    tail.flush_latents,
                    pools,
                    layer,
                    (role, TAIL_OF[role]),
                    {"index": index, "rope": frequencies, **dict(zip(names, streams[role], strict=True))},
                    role=role,
                    **options,
                )
                for role in roles
            ]

        latents, after = read_first(read, pools, index)
        pools = store_entries(self, pools, layer, index, *latents)
    else:
        after = index
    pools = self.append_tail(pools, layer, after, kv, score)
    if index_kv is None or index_score is None:
        return pools
    return self.append_index_tail(pools, layer, after, index_kv, index_score)


def reset_slots(self: Any, pools: Pools, slots: Array) -> Pools:
    """Make slots [n] as if never used; -1 is ignored."""
    arrays = programs.written(pools, slots, [pools[name] for name in self._fresh])
    for name, fresh in self._fresh.items():
        programs.put(arrays, name, programs.reset(arrays[name], slots, fresh))
    return programs.as_given(pools, arrays)


def poison(self: Any, pools: Pools, slots: Array, blocks: Array) -> Pools:
    """Fill freed slots [n] and blocks [m] with 0xFF, so that a stale read is seen."""
    units = {"slot": slots, "block": blocks}
    arrays = programs.written(pools, slots, blocks, list(pools.values()))
    for region in self.plan.stored:
        for name, _ in region.buffers.values():
            programs.put(arrays, name, programs.poison(arrays[name], units[region.growth]))
    return programs.as_given(pools, arrays)


def copier(growth):
    """``copy_slots`` or ``copy_blocks``: all sources are read before any target is written."""

    def copy(self: Any, pools: Any, sources: Any, targets: Any) -> Any:
        regions = [region for region in self.plan.stored if region.growth == growth]
        names = [name for region in regions for name, _ in region.buffers.values()]
        arrays = programs.written(pools, sources, targets, [pools[name] for name in names])
        for name in names:
            programs.put(arrays, name, programs.copy_units(arrays[name], sources, targets))
        return programs.as_given(pools, arrays)

    return facade.as_verb(copy, copy, f"copy_{growth}s")


def _bucket(self, count: int, index: StepIndex) -> int:
    return programs.bucket(count, index, programs.SMALLEST_BUCKET[self.kernels == "interpret"])


def _read(self, verb, pools, number, roles, arrays, **options):
    layer = self.layers[number].only(*roles)
    read = {name: pools[layer.names[name]] for name in layer.names}
    return programs.program(verb)(layer, tuple(sorted(options.items())), {}, read, arrays)


def _write(self, verb, pools, number, roles, arrays, reads=(), **options):
    layer = self.layers[number].only(*roles, *reads)
    written = {name: pools[layer.names[name]] for name in layer.pools_of(*roles)}
    read = {name: pools[layer.names[name]] for name in layer.pools_of(*reads)}
    # JAX returns mappings in the order of their names. In one line, for nothing to come between.
    run, names = programs.program(verb, writes=True), [layer.names[name] for name in sorted(written)]
    into, how = programs.written(pools, written, read, arrays), tuple(sorted(options.items()))
    dict.update(into, zip(names, run(layer, how, written, read, arrays).values(), strict=True))
    return programs.as_given(pools, into)
