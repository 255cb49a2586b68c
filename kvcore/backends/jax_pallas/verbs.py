"""The table of verbs, for functions that are compiled: which arguments are arrays, and which a trace is made for."""

import math
from typing import Any

from jax import Array
from jax.core import Tracer

from kvcore.backends.jax_pallas import attention, buckets, choice, host_memory, indexer, kv, programs, tail
from kvcore.backends.jax_pallas import entries as entry
from kvcore.ops import Ops, RawRows, StepIndex, bounds, facade
from kvcore.ops.records import Compression, Streams
from kvcore.pools import Pools
from kvcore.spec import TAIL_OF, Rope

STATIC = frozenset({"role", "eps", "closed", "count", "columns", "newest"})
"""Options that a trace is made for; all others are arrays."""


def reader(function: Any, *roles: str, by: str | None, name: str = "", **fixed: Any) -> Any:
    """A verb that reads pools of some roles, or of the role that it is given.

    Args:
        function: of one layer.
        roles: whose pools.
        by: what the first axis of its outputs counts: tokens, requests, or None: the rows that it is asked for.
        name: the verb's; the function's own unless given.
        fixed: options that the verb has none of.
    """
    return _of_layer(function, roles, name, fixed, by=by)


def writer(function: Any, *roles: str, name: str = "", axes: dict[str, str] | None = None, **fixed: Any) -> Any:
    """A verb that returns pools with those of some roles written, or of the role that it is given.

    ``axes`` says what the first axis of an argument counts, where that is another than ``buckets.AXES`` has it.
    """
    return _of_layer(function, roles, name, fixed, writes=True, axes=axes)


def indexed(function: Any, by: str | tuple[str, ...] | None) -> Any:
    """A verb of a layer's index alone; ``by`` of each output."""
    names, size = facade.parameters_of(function).names, facade.SIZES[function.__name__]

    def run(self: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        options.update(zip(names, given, strict=False))
        count = bucketed(self, size, layer, index, options)
        kind = self.layers[layer].only(size.role or options.get("role", "entries"))
        fit = self.twins.fit(index)
        index = index if fit is None else fit.index
        found = programs.indexed(function)(kind, index, tuple(sorted(options.items())))
        return trimmed(self, found, fit, by, size, count)

    return facade.as_verb(run, function)


def turning(compression: Compression) -> Compression:
    """The same with fp32 inverse frequencies for a rope."""
    weights = compression.norm_weight, compression.index_norm_weight
    return Compression(weights[0], float(compression.eps), tail.frequencies_of(compression.rope), weights[1])


def _of_layer(
    function: Any,
    roles: tuple[str, ...],
    name: str,
    fixed: dict[str, Any],
    *,
    writes: bool = False,
    by: str | None = None,
    axes: dict[str, str] | None = None,
) -> Any:
    names, size = facade.parameters_of(function).names, facade.SIZES.get(function.__name__)
    counted = {name: buckets.AXES.get(name, "tokens") for name in names} | (axes or {})
    # Columns that are read are none of what comes out.
    cut = None if function in (kv.attend_kv, indexer.index_select) else size

    def call(self: Any, pools: Any, layer: int, index: StepIndex, given: Any, options: dict[str, Any]) -> Any:
        arrays, static = _sorted_out(self, function, {**dict(zip(names, given, strict=False)), **options})
        count = None if size is None else bucketed(self, size, layer, index, static)
        touched = roles or _roles(function, static.get("role", "entries"))
        fit, index, arrays = fitted(self, pools, index, arrays, counted)
        move = _write if writes else _read
        found = move(self, function, pools, layer, touched, {"index": index, **arrays}, **static)
        return found if writes else trimmed(self, found, fit, by, cut, count)

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


def bucketed(ops: Any, size: facade.Size, layer: int, index: StepIndex, options: dict[str, Any]) -> int:
    """The size that is asked for; the options get one that changes rarely."""
    size.fill(ops.plan, layer, index, options)
    count = least = options[size.name]
    if size.role == "index_keys" and not (isinstance(index.lengths, Tracer) or ops.place.whole):
        # A prompt's own keys are as many as its tokens have, so that their padded number says both.
        fit, component = ops.twins.fit(index), ops.plan.layers[layer].component("index_keys")
        tokens = len((index if fit is None else fit.index).positions)
        least = max(1, count, tokens // component.tokens_per_row)
    options[size.name] = _bucket(ops, least, index)
    return count


def fitted(
    ops: Any, pools: Any, index: StepIndex, arrays: dict[str, Any], axes: dict[str, str | None]
) -> tuple[buckets.Fit | None, StepIndex, dict[str, Any]]:
    """(how a call's arrays are padded or None, its index, its arrays by name) outside of traces."""
    fit = ops.twins.fit(index)
    if fit is None or isinstance(next(iter(pools.values()), None), Tracer):
        return None, index, arrays
    if not all(fit.accepts(array, axes[name]) for name, array in arrays.items()):
        return None, index, arrays
    return fit, fit.index, {name: fit.lengthen(array, axes[name]) for name, array in arrays.items()}


def trimmed(
    ops: Any, found: Any, fit: buckets.Fit | None, by: str | tuple[str, ...] | None, size: Any, count: int | None
) -> Any:
    """Outputs of the step's size, and of the size that was asked for."""
    rows: Any = None
    if fit is not None and by is not None:
        rows = fit.given[by] if isinstance(by, str) else tuple(fit.given[axis] for axis in by)
    if size is not None and size.name != "columns":
        rows, count = count, None
    return ops.place.trimmed(found, rows, None if size is None else count)


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
    arrays = {"rows": rows, "rope": tail.frequencies_of(rope), "norm_weight": norm_weight}
    fit, index, arrays = fitted(self, {}, index, arrays, {"rows": "tokens", "rope": None, "norm_weight": None})
    found = programs.rotated_rows(self.layers[layer].only("window"), index, arrays, float(eps))
    return trimmed(self, found, fit, "tokens", None, None)


def select(self: Any, scores: Array, k: int) -> Array:
    """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
    if not buckets.is_known(scores) or self.place.whole:
        return programs.select(scores, k, self.kernels)
    tokens, columns = scores.shape
    padded = self.place.lengthen(scores, self.twins.tokens_of(tokens), self.place.rows(columns), value=-math.inf)
    return self.place.trimmed(programs.select(padded, k, self.kernels), tokens)


def index_select(
    self: Any,
    pools: Pools,
    layer: int,
    index: StepIndex,
    q: Array,
    weights: Array,
    k: int,
    *,
    columns: int | None = None,
) -> Array:
    """``select`` of ``index_scores``, in one program where no kernels run."""
    if self.kernels == "portable":
        return _index_select(self, pools, layer, index, q, weights, count=k, columns=columns)
    options: dict[str, Any] = {"columns": columns}
    bucketed(self, facade.SIZES["index_scores"], layer, index, options)
    return self.select(self.index_scores(pools, layer, index, q, weights, **options), k)


_index_select = reader(indexer.index_select, "index_keys", by="tokens")


def from_batch(self: Any, index: StepIndex, batch: Array) -> Array:
    """A batch [Q, S, ...] padded on the right -> rows [T, ...] in step order; padding rows are zeros."""
    fit, index, arrays = fitted(self, {}, index, {"batch": batch}, {"batch": "requests"})
    batch = arrays["batch"]
    if buckets.is_known((index, batch)) and not self.place.whole:
        batch = self.place.lengthen(batch, len(batch), buckets.rounded(batch.shape[1]))
    return trimmed(self, programs.from_batch(index, batch), fit, "tokens", None, None)


def to_batch(self: Any, index: StepIndex, rows: Array, width: int) -> Array:
    """Rows [T, ...] -> a batch [Q, width, ...], zeros where a request has fewer new tokens."""
    fit, index, arrays = fitted(self, {}, index, {"rows": rows}, {"rows": "tokens"})
    known = buckets.is_known((index, rows)) and not self.place.whole
    found = programs.to_batch(index, arrays["rows"], buckets.rounded(width) if known else width)
    return self.place.trimmed(found, None if fit is None else fit.given["requests"], width)


def store_entries(
    self: Any, pools: Pools, layer: int, index: StepIndex, entries: Array | None, index_keys: Array | None = None
) -> Pools:
    """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise."""
    given = {"entries": entries, "index_keys": index_keys}
    writes = tuple(role for role, values in given.items() if values is not None)
    fit, index, _ = fitted(self, pools, index, given, dict.fromkeys(given))
    if fit is not None:
        count = self.place.rows(len(next(values for values in given.values() if values is not None)))
        given = self.place.lengthen(given, count)
    return _write(self, entry.store_entries, pools, layer, writes, {"index": index, **given})


def flush(self: Any, pools, layer, index, streams, compression, *, closed=None):
    """``flush``, whose index keys may be left out."""
    closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
    if not closed:
        return pools
    writes = ("entries",) if streams.index_kv is None else ("entries", "index_keys")
    reads = tuple(TAIL_OF[role] for role in writes)
    arrays = {"streams": streams, "compression": turning(compression)}
    _, index, arrays = fitted(self, pools, index, arrays, {"streams": "tokens", "compression": None})
    arrays["index"] = index
    # A launch finds on the device what closes: its trace needs no bound.
    closed = 1 if _flushes(self, layer, writes) else _closing(self, layer, closed, index)
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
    """``flush``, then ``append_tail`` and ``append_index_tail``: one launch of Triton's, or one program of XLA."""
    roles = ("entries",) if index_kv is None else ("entries", "index_keys")
    tails = tuple(TAIL_OF[role] for role in roles)
    closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
    newest = len(index.positions) if newest is None else newest
    # Padded once for all that follows.
    given = {"streams": Streams(kv, score, index_kv, index_score)}
    _, index, given = fitted(self, pools, index, given, {"streams": "tokens"})
    kv, score, index_kv, index_score = given["streams"]
    if _flushes(self, layer, roles):
        streams = given["streams"]
        compression = turning(Compression(norm_weight, eps, rope, index_norm_weight))
        arrays = {"index": index, "streams": streams, "compression": compression}
        options = {"closed": 1, "append": True, "newest": newest}
        return _write(self, tail.flush, pools, layer, (*roles, *tails), arrays, **options)
    if self.kernels == "portable":
        arrays = {"index": index, "streams": given["streams"]}
        arrays["compression"] = turning(Compression(norm_weight, eps, rope, index_norm_weight))
        options = {"closed": _closing(self, layer, closed, index), "append": True}
        return _write(self, tail.flush, pools, layer, (*roles, *tails), arrays, **options)
    weights = {"norm_weight": norm_weight, "index_norm_weight": index_norm_weight}
    options = {"closed": closed, "eps": eps, "rope": rope, **weights}
    return Ops.append_flush(self, pools, layer, index, kv, score, index_kv, index_score, **options)


def reset_slots(self: Any, pools: Pools, slots: Array) -> Pools:
    """Make slots [n] as if never used; -1 is ignored."""
    if host_memory.reset(self.memory, pools, slots, self._fresh):
        return pools
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


def _closing(self: Any, layer: int, closed: int, index: StepIndex) -> int:
    """Entries to compile a flush for: as many as a step of the padded sizes can close, so that these say it."""
    if not closed or isinstance(index.lengths, Tracer) or self.place.whole:
        return _bucket(self, closed, index)
    return max(closed, bounds.closed(self.plan, layer, "entries", index))


def _bucket(self, count: int, index: StepIndex) -> int:
    """A size that changes rarely while ``count`` grows; inside the caller's trace it is the caller's own choice."""
    if isinstance(index.lengths, Tracer):
        return count
    return self.place.rows(count)


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
