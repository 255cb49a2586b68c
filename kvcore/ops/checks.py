"""What arguments of functional verbs are, by name: one table that ``kvcore.ops.functional`` loops over.

Order, and what may be left out or None, is the contract's. An argument's check sees what those before it said (the
layer, its index, heads), and returns what the verb takes.
"""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvcore.arrays import check_plain, is_a
from kvcore.counts import as_count, check_count
from kvcore.errors import ShapeError, StepError
from kvcore.ops import Ops, Paging, RawRows, StepIndex
from kvcore.ops.arguments import (
    FLOATS,
    INDEX_QUERIES,
    check_array,
    check_constant,
    check_float,
    check_integers,
    check_number,
    check_rope,
    check_weight,
    inputs_of,
    on_host,
)
from kvcore.ops.fused import FUSED, REQUIRED
from kvcore.plan import CachePlan
from kvcore.spec import FORMATS, TAIL_OF, Component, Format, block_layout


class Door(Protocol):
    """What a call comes through."""

    plan: CachePlan
    paging: Paging
    _verbs: Ops

    def check_pools(self, pools: Mapping[str, Any], layer: int, verb: str) -> None:
        """Refuse another cache's pools."""
        ...

    def check_index(self, index: StepIndex, where: str) -> None:
        """Refuse another cache's index."""
        ...


class Call:
    """What earlier arguments of a call say about later ones."""

    __slots__ = ("door", "format", "heads", "index", "layer", "pools", "spec", "verb", "where")

    def __init__(self, door: Door, verb: str) -> None:
        self.door = door
        self.verb = verb
        self.where = verb
        self.layer = 0
        self.heads: int | None = None
        self.pools: Any = None
        self.index: Any = None
        self.spec: Any = None
        self.format: Any = None

    @property
    def ops(self) -> Ops:
        """The backend's verbs."""
        return self.door._verbs

    @property
    def tokens(self) -> int:
        """Token rows of the step."""
        return self.index.positions.shape[0]

    @property
    def requests(self) -> int:
        """Request rows of the step."""
        return self.index.slots.shape[0]

    def component(self, *roles: str) -> Component:
        """The first of these that the layer has."""
        for role in roles:
            found = getattr(self.spec, role) if role in self.spec.every_role else None
            if found is not None:
                return found
        has = ", ".join(found for found, _ in self.spec.components())
        wanted = " or ".join(repr(role) for role in roles)
        raise StepError(
            got=f"role {wanted}", where=f"{self.verb}: layer {self.layer}", allowed=f"a component of the layer: {has}"
        )


Check: TypeAlias = Callable[[Call, Any], Any]


def _pools(call: Call, pools: Any) -> Any:
    if not is_a(pools, Mapping):
        raise ShapeError(got=type(pools).__name__, where=call.where, allowed="pools: a mapping like cache.pools")
    call.pools = pools
    return pools


def _whole_pools(call: Call, pools: Any) -> Any:
    for layer in range(len(call.door.plan.spec.all_layers)):
        call.door.check_pools(_pools(call, pools), layer, call.verb)
    return pools


def _layer(call: Call, value: Any) -> int:
    layers = call.door.plan.spec.all_layers
    number = value if type(value) is int else as_count(value)
    if number is None or not 0 <= number < len(layers):
        raise ShapeError(got=value, where=call.where, allowed=f"a layer of the spec, 0 to {len(layers) - 1}")
    call.layer, call.spec = number, layers[number]
    if call.pools is not None:
        call.door.check_pools(call.pools, number, call.verb)
    if call.verb in LAYERS:
        call.component(*LAYERS[call.verb])
    return number


def _index(call: Call, index: Any) -> Any:
    if not isinstance(index, StepIndex):
        raise ShapeError(got=type(index).__name__, where=call.where, allowed="a step's index: step.index")
    paging = call.door.paging
    if index.paging is not paging and index.paging != paging:
        call.door.check_index(index, call.where)
    call.index = index
    return index


Size: TypeAlias = int | Callable[[Call], int | None] | None


def _size(call: Call, size: Size) -> int | None:
    return size(call) if callable(size) else size


def _floats(*shape: Size) -> Check:
    """fp32 or bf16 of a shape."""
    return lambda call, value: check_float(call.ops, value, call.where, tuple(_size(call, size) for size in shape))


def _given(check: Check) -> Check:
    """An argument that may not be None."""

    def given(call: Call, value: Any) -> Any:
        if value is None:
            raise ShapeError(got=value, where=call.where, allowed="an array of the backend or of NumPy")
        return check(call, value)

    return given


def _unless_none(check: Check) -> Check:
    """One that may."""
    return lambda call, value: None if value is None else check(call, value)


def _tokens(call: Call) -> int:
    return call.tokens


def _requests(call: Call) -> int:
    return call.requests


def _rows(role: str, number: int = 0, count: Callable[[Call], int] = _tokens) -> Check:
    """An array that a step gives a role, for every token unless told otherwise."""

    def check(call: Call, value: Any) -> Any:
        call.component(role)
        shape = inputs_of(call.door.plan.layers[call.layer], role)[number].shape
        return check_float(call.ops, value, call.where, (count(call), *shape))

    return check


def _heads(call: Call) -> int | None:
    return call.heads


def _dim(*roles: str) -> Callable[[Call], int]:
    return lambda call: call.component(*roles).dim  # type: ignore[attr-defined]


def _query(call: Call, value: Any) -> Any:
    """Queries [T, H, d] against the keys of the verb's role."""
    component: Any = call.component(*LAYERS[call.verb])
    classic = component is call.spec.kv
    dtypes = INDEX_QUERIES if component is call.spec.index_keys else FLOATS
    shape = call.tokens, None, component.key_dim if classic else component.dim
    q = check_float(call.ops, value, call.where, shape, dtypes=dtypes)
    call.heads = q.shape[1]
    for part in component.parts if classic else ():
        if q.shape[1] % part.heads:
            raise ShapeError(got=f"{q.shape[1]} heads", where=call.where, allowed=f"a multiple of {part.heads}")
    return q


def _own_rows(call: Call, value: Any) -> Any:
    """The step's own rows of a role, one array for every part."""
    if not is_a(value, tuple, list):
        raise ShapeError(got=type(value).__name__, where=call.where, allowed="a tuple of arrays, one for every part")
    shapes = [tuple(getattr(part, "shape", ())) for part in value]
    return tuple(
        check_float(call.ops, part, call.where, (call.tokens, *shape[1:]))
        for part, shape in zip(value, shapes, strict=True)
    )


def _batch(call: Call, value: Any) -> Any:
    shape = tuple(getattr(check_plain(value, call.where), "shape", ()))
    if len(shape) < 2 or shape[0] != call.requests:
        raise ShapeError(got=f"shape {list(shape)}", where=call.where, allowed=f"[{call.requests}, columns, ...]")
    check_constant(value, call.where)
    return call.ops.asarray(value)


def _rows_of_step(call: Call, value: Any) -> Any:
    shape = tuple(getattr(check_plain(value, call.where), "shape", ()))
    if not shape or shape[0] != call.tokens:
        raise ShapeError(got=f"shape {list(shape)}", where=call.where, allowed=f"[{call.tokens}, ...]")
    check_constant(value, call.where)
    return call.ops.asarray(value)


def _indices(call: Call, value: Any) -> Any:
    return check_integers(call.ops, value, call.where, (call.tokens, None))


def _taken(call: Call, value: Any) -> Any:
    """How many of each request's new tokens are taken: at most all of them, told where the host has both numbers."""
    found = check_integers(call.ops, value, call.where, (call.requests,))
    taken, starts, lengths = (on_host(array) for array in (found, call.index.starts, call.index.lengths))
    if taken is not None and starts is not None and lengths is not None:
        new = lengths - starts
        for request in np.flatnonzero((taken < 0) | (taken > new))[:1]:
            allowed = f"0 to {new[request]}, the new tokens of request {request} of the step"
            raise ShapeError(got=int(taken[request]), where=call.where, allowed=allowed)
    return found


def _units(kind: str, least: int = 0) -> Check:
    """Slots or blocks [n]; -1, which is ignored, only where the verb says so."""

    def check(call: Call, value: Any) -> Any:
        count = getattr(call.door.plan, kind)
        return check_integers(call.ops, value, call.where, (None,), least=least, most=count - 1, what=kind)

    return check


def _targets(kind: str) -> Check:
    check_units = _units(kind)

    def check(call: Call, value: Any) -> Any:
        targets = check_units(call, value)
        if targets.shape[0] != call.heads:
            raise ShapeError(got=f"{targets.shape[0]} of them", where=call.where, allowed=f"{call.heads}, as sources")
        return targets

    return check


def _sources(kind: str) -> Check:
    check_units = _units(kind)

    def check(call: Call, value: Any) -> Any:
        sources = check_units(call, value)
        call.heads = sources.shape[0]
        return sources

    return check


def _count(call: Call, value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    return check_count(ShapeError, call.where, value, 0)


def _number(call: Call, value: Any) -> Any:
    # A framework's scalar may be traced, or on a device: it has no value here.
    if not is_a(value, np.generic) and getattr(value, "shape", None) == ():
        return value
    return check_number(value, call.where)


def _role(call: Call, value: Any) -> Any:
    call.component(str(value))
    return value


def _entry_role(call: Call, value: Any) -> Any:
    if value not in TAIL_OF:
        raise ShapeError(got=value, where=call.where, allowed=", ".join(TAIL_OF))
    return _role(call, value)


def _weight(role: str) -> Check:
    return lambda call, value: check_weight(call.ops, value, call.where, _dim(role)(call))


def _any_weight(call: Call, value: Any) -> Any:
    return check_weight(call.ops, value, call.where, None)


def _scores(call: Call, value: Any) -> Any:
    """They are compared only: no gradient comes from an order."""
    return check_array(call.ops, value, call.where, (None, None), FLOATS)


def _rope(call: Call, value: Any) -> Any:
    return check_rope(call.ops, value, call.where, _dim(*LAYERS[call.verb])(call))


def _rope_of_flush(call: Call, value: Any) -> Any:
    """What turns the entries turns their index keys."""
    dims = [getattr(call.spec, role).dim for role in TAIL_OF if getattr(call.spec, role) is not None]
    return check_rope(call.ops, value, call.where, min(dims, default=0))


def _raw(call: Call, value: Any) -> RawRows:
    if not is_a(value, tuple) or len(value) != len(RawRows._fields):
        raise ShapeError(got=type(value).__name__, where=call.where, allowed="RawRows(rows, positions)")
    requests = None if call.index is None else call.requests
    rows = check_array(call.ops, value[0], f"{call.where}: rows", (requests, None, None), ("uint8",))
    shape = (rows.shape[0], rows.shape[1])
    return RawRows(rows, check_integers(call.ops, value[1], f"{call.where}: positions", shape))


def _format(call: Call, value: Any) -> Format:
    if not isinstance(value, (str, Format)):
        raise ShapeError(got=type(value).__name__, where=call.where, allowed="a format, or its name")
    call.format = FORMATS[value] if isinstance(value, str) else value
    return call.format


def _values(call: Call, value: Any) -> Any:
    values = check_float(call.ops, value, call.where, (None, None))
    call.format.for_dim(values.shape[1])
    return values


def _canonical(call: Call, value: Any) -> Any:
    """Canonical rows [rows, row_bytes]; the format is sized by them where it has no size, if that is possible."""
    rows = check_array(call.ops, value, call.where, (None, None), ("uint8",))
    call.format = call.format.for_rows(rows.shape[1])
    if rows.shape[1] != call.format.row:
        raise ShapeError(
            got=f"rows of {rows.shape[1]} bytes",
            where=call.where,
            allowed=f"{call.format.row}, of {call.format.name} with {call.format.dim} channels",
        )
    return rows


def _dim_of_rows(call: Call, value: Any) -> int:
    dim = check_count(ShapeError, call.where, value, 1)
    call.format = call.format.for_dim(dim)
    return dim


def _page(call: Call, value: Any) -> Any:
    call.pools = check_array(call.ops, value, call.where, (None,), ("uint8",))
    return call.pools


def _page_rows(call: Call, value: Any) -> int:
    rows, found = check_count(ShapeError, call.where, value, 0), call.pools.shape[0]
    call.format = call.format.for_rows(found // rows if rows else 0)
    wanted = block_layout(call.format, rows, "packed").nbytes
    if found != wanted:
        raise ShapeError(
            got=f"a page of {found} bytes", where="unpack_page: page", allowed=f"{wanted}, for {rows} rows"
        )
    return rows


def _as_it_is(call: Call, value: Any) -> Any:
    del call
    return value


LATENT = ("window", "entries")
LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("append_window", "rotated_rows", "append_rotated_window", "gather_window"), ("window",)),
    **dict.fromkeys(("append_tail", "flush", "append_flush"), ("tail",)),
    **dict.fromkeys(("compress", "store_entries", "gather_all_entries"), ("entries", "index_keys")),
    **dict.fromkeys(("index_scores", "index_select"), ("index_keys",)),
    **dict.fromkeys(("append_kv", "gather_kv", "kv_view", "append_kv_view"), ("kv",)),
    **dict.fromkeys(("mask", "visible_rows", "attend_kv"), ("kv",)),
    **dict.fromkeys(("append_state", "write_state", "select_state", "read_state"), ("state",)),
    **dict.fromkeys(("append_conv", "gather_conv"), ("conv",)),
    "append_index_tail": ("index_tail",),
    "gather_entries": ("entries",),
    "attend": LATENT,
}
"""Verb -> roles of which its layer must have one."""

BY_NAME: dict[str, Check] = {
    "pools": _pools,
    "layer": _layer,
    "index": _index,
    "role": _role,
    "raw": _raw,
    "saved": _as_it_is,
    "format": _format,
    "values": _values,
    "page": _page,
    "batch": _batch,
    **dict.fromkeys(("columns", "closed", "count", "newest", "width", "salt"), _count),
    **dict.fromkeys(("eps", "scale", "global_scale"), _number),
    "rows": _rows("window"),
    "states": _rows("state"),
    "taken": _taken,
    "k": _rows("kv", 0),
    "v": _rows("kv", 1),
    "kv": _rows("tail", 0),
    "score": _rows("tail", 1),
    "index_kv": _rows("index_tail", 0),
    "index_score": _rows("index_tail", 1),
    "entries": _floats(None, _dim("entries")),
    "index_keys": _floats(None, _dim("index_keys")),
    "q": _query,
    "weights": _floats(_tokens, _heads),
    "sink": _floats(_heads),
    "selected": _indices,
    "indices": _indices,
    "scores": _scores,
    "rope": _rope,
    "norm_weight": _weight("entries"),
    "index_norm_weight": _weight("index_keys"),
    "slots": _units("slots"),
    "blocks": _units("blocks"),
}
"""What an argument of a name is, in every verb but those below."""

UNLIKE: dict[str, dict[str, Check]] = {
    "decode": {"rows": _canonical, "dim": _dim_of_rows},
    "pack_page": {"rows": _canonical},
    "unpack_page": {"rows": _page_rows},
    "join": dict.fromkeys(("kv", "score"), _floats(None, None)),
    "rotated_rows": {"norm_weight": _weight("window")},
    "append_rotated_window": {"norm_weight": _weight("window")},
    "append_index_tail": {"kv": _rows("index_tail", 0), "score": _rows("index_tail", 1)},
    "compress": {
        **dict.fromkeys(("kv", "score"), _floats(_tokens, None)),
        "role": _entry_role,
        "norm_weight": _any_weight,
    },
    **{key: {"rope": _rope_of_flush} for key in ("flush", "append_flush")},
    **{key: {"role": _entry_role} for key in ("closed", "gather_all_entries")},
    **{key: {"k": _count} for key in ("select", "index_select")},
    "write_state": {"states": _rows("state", count=_requests)},
    "append_conv": {"rows": _rows("conv")},
    "to_batch": {"rows": _rows_of_step},
    "gather_rows": {"rows": _own_rows},
    "reset_slots": {"pools": _whole_pools, "slots": _units("slots", least=-1)},
    "poison": {"pools": _whole_pools},
    "copy_slots": {"pools": _whole_pools, "sources": _sources("slots"), "targets": _targets("slots")},
    "copy_blocks": {"pools": _whole_pools, "sources": _sources("blocks"), "targets": _targets("blocks")},
}
"""Verb -> what arguments of a name are in this one."""

THE_BACKENDS = ("allocate", "asarray", "index", "padded_index", "explain", "move_strips", "digest_strips")
"""Verbs without these checks."""


def _checks_of(name: str) -> dict[str, Check]:
    """A verb's parameters in its order, each with its check: as the contract says it, with what may be None."""
    verb: Any = getattr(Ops, name)
    names = verb.__code__.co_varnames[1 : verb.__code__.co_argcount + verb.__code__.co_kwonlyargcount]
    positional = verb.__code__.co_argcount - 1
    optional = {*names[positional - len(verb.__defaults__ or ()) : positional], *(verb.__kwdefaults__ or ())}
    own, found = UNLIKE.get(name, {}), dict[str, Check]()
    for parameter in names:
        check = own.get(parameter) or BY_NAME[parameter]
        if parameter in optional or "None" in verb.__annotations__[parameter]:
            check = _unless_none(check)
        elif check not in SAY_IT_THEMSELVES:
            check = _given(check)
        found[parameter] = check
    return found


SAY_IT_THEMSELVES = (_pools, _whole_pools, _layer, _index, _role, _format, _raw, _as_it_is)
"""Checks that have words of their own for None."""

CHECKS = {name: _checks_of(name) for name in (*REQUIRED, *FUSED) if name not in THE_BACKENDS}
"""Verb -> its parameters in the verb's order, each with its check. Verbs that are not here are the backend's own."""
