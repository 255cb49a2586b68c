"""What the table of kernels is made of: one row a verb, bound to every layer of a plan once.

A row says how its verb is bound to a layer, which answers what its launches must know, or ``Declined`` with the reason;
and, where arguments of a call decide, too, what of them: ``covers``, which answers likewise. Which code runs is read
off these answers by the verbs, by ``ops.explain()`` and by strict mode alike.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kvcore.backends.torch_triton import launch
from kvcore.backends.torch_triton.backend import TorchOps
from kvcore.backends.torch_triton.replay import Replayed
from kvcore.backends.torch_triton.symbols import CURRENT, Unbound
from kvcore.kernels.triton.launches.launching import Part, bind_groups, bind_ring, bind_rows
from kvcore.kernels.triton.launches.states import bind_states
from kvcore.ops.choices import Decision, Declined, kernel
from kvcore.spec import TAIL_OF

PLAIN: Any = TorchOps
"""The verbs for what is not launched: calls of no rows, and what is not the kernels'."""


class Ready(NamedTuple):
    """A verb's kernels, bound to a layer.

    Attributes:
        given: what their launches must know.
        roles: whose pools they read or write; none for verbs on whole units.
        but: arguments of calls that they do not cover.
        decision: what is said of the verb where that does not follow from the roles.
        asks: whether a call is to be asked at all.
        replayed: whether calls of the layer may be replayed, if those of the verb are.
    """

    given: Any
    roles: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    decision: Decision | None = None
    asks: bool = True
    replayed: bool = True


class Kernel(NamedTuple):
    """A row of the table.

    Attributes:
        run: (what is given, ops, pools, layer, ...) -> the verb's result, by launches.
        bind: (ops, layer) -> ``Ready``, or why the kernels cover no call of the layer.
        covers: (what is given, arguments of a call behind the layer) -> what ``run`` is given, or why the kernels do
            not cover the call; None: they cover all of them.
        replayed: what it launches follows from shapes, dtypes and numbers alone, and is worked out once for these.
        unread: options of such a verb that decide nothing.
        bounds: those that are bounds of a number, and decide how many programs share the work: a greater one does too.
    """

    run: Callable[..., Any]
    bind: Callable[[Any, Any], Ready | Declined]
    covers: Callable[..., Any] | None = None
    replayed: bool = False
    unread: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()


class Way(NamedTuple):
    """How a verb of a layer runs, and what is said of that.

    Attributes:
        run: (ops, pools, layer, ...) -> the verb's result.
        decision: which code that is, and why.
    """

    run: Callable[..., Any]
    decision: Decision


def bound(ops: Any, layer: int | None, verb: str, row: Kernel, plain: Callable[..., Any]) -> Way:
    """A row of the table for one layer; ``plain`` runs what its kernels do not cover."""
    found = row.bind(ops, layer)
    if isinstance(found, Declined):
        return Way(plain, kernel("triton", "", plain="torch", declined=found.reason))
    decision = found.decision
    if decision is None:
        decision = kernel(name_of_kernels(), why(ops, layer, found.roles), plain="torch", but=found.but)
    if row.covers is None or not found.asks:
        way = partial(row.run, found.given)
    else:
        way = _asking(row.run, row.covers, found.given, verb, plain, of_layer=layer is not None)
    if row.replayed and found.replayed:
        replayed = Replayed(verb, ops, layer, way, found.given, row.unread, row.bounds)
        way = replayed if layer is not None else replayed.of_none
    return Way(way, decision)


def _asking(
    run: Callable[..., Any],
    covers: Callable[..., Any],
    given: Any,
    verb: str,
    plain: Callable[..., Any],
    *,
    of_layer: bool,
) -> Callable[..., Any]:
    """A way that asks of every call whether it is covered; of one that is not strict mode is told."""

    def way(ops: Any, pools: Any, layer: int, *arguments: Any, **options: Any) -> Any:
        found = covers(given, *arguments, **options)
        if type(found) is Declined:
            _refuse_symbols(found)
            ops.fall_back(layer, verb, found.reason)
            return plain(ops, pools, layer, *arguments, **options)
        return run(found, ops, pools, layer, *arguments, **options)

    def of_none(ops: Any, *arguments: Any, **options: Any) -> Any:
        found = covers(given, *arguments, **options)
        if type(found) is Declined:
            _refuse_symbols(found)
            ops.fall_back(None, verb, found.reason)
            return plain(ops, *arguments, **options)
        return run(found, ops, *arguments, **options)

    return way if of_layer else of_none


def _refuse_symbols(found: Declined) -> None:
    """End a trace of a call that the kernels do not cover."""
    if CURRENT.trace is not None:
        raise Unbound(found.reason)


def why(ops: Any, layer: int | None, roles: tuple[str, ...]) -> str:
    """Which formats of which layout kernels cover."""
    regions = [region for role in roles for region in ops.plan.region(layer, role)]
    formats = " and ".join(dict.fromkeys(region.format.name for region in regions))
    return f"kernels cover {formats} in layout {ops.plan.layout}"


def name_of_kernels() -> str:
    """``triton``, or that kernels are interpreted, which is never taken for hardware."""
    return "triton, interpreted" if launch.INTERPRETED else "triton"


def records_of(ops: Any) -> Mapping[tuple[int, str], tuple[Part, ...] | Declined]:
    """What launches must know of every role of every layer, or why the kernels do not cover its format or layout.

    Looked up once, so that nothing has to be while a verb is traced or captured.
    """
    found: dict[tuple[int, str], tuple[Part, ...] | Declined] = {}
    for layer, role, component in ops.plan.spec.components():
        parts: list[Part] = []
        for region in ops.plan.region(layer, role):
            if role in TAIL_OF.values():
                one = bind_ring(region, component)
            else:
                one = bind_rows(region, float(ops.global_scale(layer, role)))
            if isinstance(one, Declined):
                found[layer, role] = one
                break
            parts.append(one)
        else:
            found[layer, role] = tuple(parts)
    return found


def declined(ops: Any, layer: int, *roles: str) -> Declined | None:
    """Why kernels do not cover some of these roles of a layer; None where they cover them all."""
    found = ((role, ops.records[layer, role]) for role in roles)
    reasons = [f"{role}: {each.reason}" for role, each in found if isinstance(each, Declined)]
    return Declined("; ".join(reasons)) if reasons else None


class GroupParts(NamedTuple):
    """Keys and values in groups of tokens: their parts, those of the open group's raw rows, and tokens of a group.

    ``numbers``: of the records, in this order; ``tails``: the two pools of raw rows.
    """

    keys: Part
    values: Part
    numbers: list[int]
    tails: list[str]
    raw: tuple[Part, ...]
    ratio: int

    def pools(self, pools: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """What launches take: buffers of keys, of values and of raw rows."""
        named = self.keys.names, self.values.names, self.tails
        return tuple([pools[name] for name in names] for names in named)  # type: ignore[return-value]


def bind_group_parts(ops: Any, layer: int) -> GroupParts | Declined:
    """Keys and values of a layer in formats over tokens, or why the kernels do not cover them."""
    without = declined(ops, layer, "kv_tail")
    if without is not None:
        return without
    keys, values = (bind_groups(region) for region in ops.plan.region(layer, "kv"))
    if isinstance(keys, Declined) or isinstance(values, Declined):
        reason = next(part.reason for part in (keys, values) if isinstance(part, Declined))
        return Declined(f"kv: {reason}")
    raw = ops.records[layer, "kv_tail"]
    numbers = [part.number for part in (keys, values, *raw)]
    tails = [part.names[0] for part in raw]
    return GroupParts(keys, values, numbers, tails, raw, ops.component(layer, "kv").ratio)


def of_states(role: str) -> Callable[[Any, Any], Ready | Declined]:
    """A binding to the rows of a recurrent layer, in the pieces that they are moved in."""

    def bind(ops: Any, layer: Any) -> Ready | Declined:
        without = declined(ops, layer, role)
        if without is not None:
            return without
        part = bind_states(ops.records[layer, role][0])
        return part if isinstance(part, Declined) else Ready(part, (role,))

    return bind


def of_role(role: str) -> Callable[[Any, Any], Ready | Declined]:
    """A binding that needs no more than the parts of one role, and gives them."""

    def bind(ops: Any, layer: Any) -> Ready | Declined:
        return declined(ops, layer, role) or Ready(ops.records[layer, role], (role,))

    return bind
