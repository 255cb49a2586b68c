"""A backend's verbs as a table of functions of one layer.

Backends implement verbs as functions ``f(layer, pools, index, ...)``, without what they do not need, under the same
names and with the same parameters in every backend. The contract's verbs take the number of a layer and the pools
first, a role before the index, and leave sizes out. What lies between the two is here, once.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

from kvcore.ops import bounds
from kvcore.ops.fused import Ops
from kvcore.ops.records import Compression, Streams
from kvcore.ops.results import Array, StepIndex
from kvcore.plan import CachePlan
from kvcore.pools import Pools, fresh_unit
from kvcore.spec import Rope
from kvcore.spec.component import Growth

OF_A_ROLE = frozenset({"gather_rows", "store_rows", "read_ring", "restore_ring", "store_role"})
"""Verbs that take the role beside the layer; functions take it among their options."""


class Size(NamedTuple):
    """A size of a verb's output, which callers may leave out.

    Attributes:
        name: of the argument.
        role: whose rows it counts; None: those of the role that the verb is given, entries unless it is.
        bound: the most there can be: (plan, layer, role, index) -> rows.
    """

    name: str
    role: str | None
    bound: Callable[[CachePlan, int, str, StepIndex], int]

    def fill(self, plan: CachePlan, layer: int, index: StepIndex, options: dict[str, Any]) -> None:
        """Put the bound where the caller gave no size."""
        if options.get(self.name) is None:
            role = self.role or options.get("role", "entries")
            options[self.name] = self.bound(plan, layer, role, index)


SIZES = {
    "compress": Size("closed", None, bounds.closed),
    "flush": Size("closed", "entries", bounds.closed),
    "append_flush": Size("closed", "entries", bounds.closed),
    "closed": Size("count", None, bounds.closed),
    "gather_all_entries": Size("columns", None, bounds.columns),
    "index_scores": Size("columns", "index_keys", bounds.columns),
    "index_select": Size("columns", "index_keys", bounds.columns),
    "gather_kv": Size("columns", "kv", bounds.positions),
    "kv_view": Size("columns", "kv", bounds.positions),
    "append_kv_view": Size("columns", "kv", bounds.positions),
    "mask": Size("columns", "kv", bounds.positions),
    "visible_rows": Size("columns", "kv", bounds.positions),
    "attend_kv": Size("columns", "kv", bounds.positions),
    "gather_rows": Size("columns", None, bounds.columns),
}
"""Verb -> the size that is filled in."""


class Parameters(NamedTuple):
    """How a function of one layer is called.

    Attributes:
        leading: which of ``layer``, ``pools`` and ``index`` it begins with.
        names: of the others, in order.
    """

    leading: tuple[str, ...]
    names: tuple[str, ...]


@cache
def parameters_of(function: Any) -> Parameters:
    """A function's parameters."""
    names = tuple(inspect.signature(function).parameters)
    leading = tuple(name for name in names[:3] if name in ("layer", "pools", "index"))
    return Parameters(leading, names[len(leading) :])


def verb(function: Any, name: str = "", **fixed: Any) -> Any:
    """The contract's verb that a function is, as a method of a class with ``plan`` and ``layers``.

    Args:
        function: of one layer.
        name: the verb's; the function's own unless given.
        fixed: options that the verb has none of, as ``role="tail"`` of ``append_tail``.
    """
    leading, names = parameters_of(function)
    size = SIZES.get(function.__name__)

    def of_a_role(self: Any, pools: Any, layer: int, role: str, index: StepIndex, *given: Any, **options: Any) -> Any:
        options["role"] = role
        if size is not None:
            size.fill(self.plan, layer, index, options)
        return function(self.layers[layer], pools, index, *given, **options)

    def of_pools(self: Any, pools: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        if size is not None:
            size.fill(self.plan, layer, index, options)
        return function(self.layers[layer], pools, index, *given, **fixed, **options)

    def of_an_index(self: Any, layer: int, index: StepIndex, *given: Any, **options: Any) -> Any:
        options.update(zip(names, given, strict=False))
        if size is not None:
            size.fill(self.plan, layer, index, options)
        return function(self.layers[layer], index, **options)

    def of_arrays(self: Any, *given: Any, **options: Any) -> Any:
        del self
        return function(*given, **fixed, **options)

    if function.__name__ in OF_A_ROLE:
        return as_verb(of_a_role, function, name)
    kinds: dict[tuple[str, ...], Any] = {("layer", "pools", "index"): of_pools, ("layer", "index"): of_an_index}
    return as_verb(kinds.get(leading, of_arrays), function, name)


def as_verb(run: Any, function: Any, name: str = "") -> Any:
    """A method under a verb's name, with the contract's signature and the function's words."""
    run.__name__ = name or function.__name__
    run.__qualname__, run.__module__, run.__doc__ = f"Ops.{run.__name__}", function.__module__, function.__doc__
    promised = getattr(Ops, run.__name__, None)
    if promised is not None:
        run.__signature__ = inspect.signature(promised)
    return run


def of_streams(flush: Any, name: str = "") -> Any:
    """A verb of the parameters of ``flush`` from one that takes them as records."""

    def run(
        self: Any,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Array,
        score: Array,
        index_kv: Array | None = None,
        index_score: Array | None = None,
        *,
        closed: int | None = None,
        norm_weight: Array | None = None,
        eps: float = 1e-6,
        rope: Rope | Array | None = None,
        index_norm_weight: Array | None = None,
    ) -> Pools:
        streams = Streams(kv, score, index_kv, index_score)
        compression = Compression(norm_weight, eps, rope, index_norm_weight)
        return flush(self, pools, layer, index, streams, compression, closed=closed)

    return as_verb(run, flush, name)


def fresh_slots(plan: CachePlan) -> dict[str, bytes | None]:
    """Name of every pool of slots -> the bytes of a slot that nobody has used, None for zeros."""
    return {
        name: fresh_unit(region, buffer)
        for region in plan.stored
        for buffer, (name, _) in region.buffers.items()
        if region.growth == "slot"
    }


def pools_of(plan: CachePlan, growth: Growth) -> tuple[str, ...]:
    """Names of the pools of slots, or of blocks."""
    return tuple(name for region in plan.stored if region.growth == growth for name, _ in region.buffers.values())


def reset_in_place(function: Any) -> Any:
    """``reset_slots`` from a function of one pool, the slots and the bytes of a fresh one."""

    def reset_slots(self: Any, pools: Pools, slots: Array) -> Pools:
        slots = self.asarray(slots)
        # Every request that is admitted asks.
        kept = cast("dict[str, Any]", vars(self)).get("fresh_slots")
        if kept is None:
            kept = fresh_slots(self.plan)
            self.fresh_slots = kept
        for name, fresh in kept.items():
            function(pools[name], slots, fresh)
        return pools

    return as_verb(reset_slots, function)


def poison_in_place(function: Any) -> Any:
    """``poison`` from a function of one pool and its units."""

    def poison(self: Any, pools: Pools, slots: Array, blocks: Array) -> Pools:
        units: dict[Growth, Array] = {"slot": self.asarray(slots), "block": self.asarray(blocks)}
        for growth in units:
            for name in pools_of(self.plan, growth):
                function(pools[name], units[growth])
        return pools

    return as_verb(poison, function)


def copy_in_place(function: Any, growth: Growth) -> Any:
    """``copy_slots`` or ``copy_blocks`` from a function of one pool and its units."""

    def copy(self: Any, pools: Pools, sources: Array, targets: Array) -> Pools:
        sources, targets = self.asarray(sources), self.asarray(targets)
        for name in pools_of(self.plan, growth):
            function(pools[name], sources, targets)
        return pools

    return as_verb(copy, function, f"copy_{growth}s")
