"""``cache.ops``: a backend's verbs with a door in front of them, the same for all backends.

The verbs themselves trust what they get, since a handle has checked it. Called functionally, nobody has: here every
argument is looked at, and turned into what the verb takes, by one table. What a shape, a host integer or the index
itself can tell is told before anything is written. JAX's functions are checked while they are traced; what torch
compiles is not, for its tracer has no arrays to look at.
"""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from kvcore.arrays import check_plain, is_a
from kvcore.counts import as_count, check_count
from kvcore.errors import ShapeError, StepError
from kvcore.ops import Array, Ops, Paging, RawRows, StepIndex
from kvcore.ops.arguments import (
    FLOATS,
    check_array,
    check_constant,
    check_float,
    check_integers,
    check_number,
    check_rope,
    check_weight,
)
from kvcore.pools import Pools
from kvcore.spec import FORMATS, TAIL_OF, Component, Format, block_layout


class Call:
    """What earlier arguments of a call say about later ones."""

    __slots__ = ("door", "format", "heads", "index", "layer", "pools", "spec", "verb", "where")

    def __init__(self, door: "FunctionalOps", verb: str) -> None:
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
    return number


def _index(call: Call, index: Any) -> Any:
    if not isinstance(index, StepIndex):
        raise ShapeError(got=type(index).__name__, where=call.where, allowed="a step's index: step.index")
    paging = call.door.paging
    if index.paging is not paging and index.paging != paging:
        call.door.check_index(index, call.where)
    call.index = index
    return index


def _layer_with(*roles: str) -> Check:
    """The layer's number, if the layer has one of the roles."""

    def check(call: Call, value: Any) -> int:
        number = _layer(call, value)
        call.component(*roles)
        return number

    return check


Size: TypeAlias = int | Callable[[Call], int | None] | None


def _size(call: Call, size: Size) -> int | None:
    return size(call) if callable(size) else size


def _floats(*shape: Size) -> Check:
    """fp32 or bf16 of a shape; None where the verb allows it."""

    def check(call: Call, value: Any) -> Any:
        if value is None:
            return None
        return check_float(call.ops, value, call.where, tuple(_size(call, size) for size in shape))

    return check


def _given(check: Check) -> Check:
    """An argument that may not be None."""

    def given(call: Call, value: Any) -> Any:
        if value is None:
            raise ShapeError(got=value, where=call.where, allowed="an array of the backend or of NumPy")
        return check(call, value)

    return given


def _tokens(call: Call) -> int:
    return call.tokens


def _requests(call: Call) -> int:
    return call.requests


def _channels(call: Call) -> int:
    return call.component("conv").channels  # type: ignore[attr-defined]


def _states(count: Callable[[Call], int]) -> Check:
    """One state for each token or request."""

    def check(call: Call, value: Any) -> Any:
        component: Any = call.component("state")
        return check_float(call.ops, value, call.where, (count(call), *component.shape))

    return check


def _heads(call: Call) -> int | None:
    return call.heads


def _dim(*roles: str) -> Callable[[Call], int]:
    return lambda call: call.component(*roles).dim  # type: ignore[attr-defined]


def _width(role: str) -> Callable[[Call], int]:
    return lambda call: call.component(role).width  # type: ignore[attr-defined]


def _kv(part: int) -> Check:
    """Keys (0) or values (1) of the step's tokens."""

    def check(call: Call, value: Any) -> Any:
        if value is None:
            return None
        region = call.door.plan.region(call.layer, "kv")[part]
        return check_float(call.ops, value, call.where, (call.tokens, region.heads, region.format.dim))

    return check


def _query(*roles: str) -> Check:
    """Queries [T, H, d] against the keys of a role."""

    def check(call: Call, value: Any) -> Any:
        component = call.component(*roles)
        dim: int = getattr(component, "key_dim" if roles == ("kv",) else "dim")
        q = check_float(call.ops, value, call.where, (call.tokens, None, dim))
        call.heads = q.shape[1]
        for region in call.door.plan.region(call.layer, "kv") if roles == ("kv",) else ():
            if q.shape[1] % region.heads:
                raise ShapeError(got=f"{q.shape[1]} heads", where=call.where, allowed=f"a multiple of {region.heads}")
        return q

    return check


def _own_rows(call: Call, value: Any) -> Any:
    """The step's own rows of a role, one array for every part."""
    if value is None:
        return None
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
    return None if value is None else check_integers(call.ops, value, call.where, (call.tokens, None))


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


def _count(call: Call, value: Any) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    return check_count(ShapeError, call.where, value, 0)


def _number(call: Call, value: Any) -> Any:
    if value is None:
        return None
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


def _weight(*roles: str) -> Check:
    def check(call: Call, value: Any) -> Any:
        return None if value is None else check_weight(call.ops, value, call.where, _dim(*roles)(call))

    return check


def _any_weight(call: Call, value: Any) -> Any:
    return None if value is None else check_weight(call.ops, value, call.where, None)


def _scores(call: Call, value: Any) -> Any:
    """They are compared only: no gradient comes from an order."""
    return check_array(call.ops, value, call.where, (None, None), FLOATS)


def _sink(call: Call, value: Any) -> Any:
    return None if value is None else check_float(call.ops, value, call.where, (call.heads,))


def _rope(*roles: str) -> Check:
    def check(call: Call, value: Any) -> Any:
        return None if value is None else check_rope(call.ops, value, call.where, _dim(*roles)(call))

    return check


def _rope_of_flush(call: Call, value: Any) -> Any:
    """What turns the entries turns their index keys."""
    dims = [getattr(call.spec, role).dim for role in TAIL_OF if getattr(call.spec, role) is not None]
    return None if value is None else check_rope(call.ops, value, call.where, min(dims, default=0))


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


def _dim_of_rows(call: Call, value: Any) -> int | None:
    if value is None:
        return None
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


CODEC = {"global_scale": _number}
STEP: dict[str, Check] = {"pools": _pools, "layer": _layer, "index": _index}
"""The first arguments of most verbs; a verb's own line says what else there is."""

OF_A_ROLE: dict[str, Check] = {"pools": _pools, "layer": _layer, "role": _role, "index": _index}


def _step(roles: tuple[str, ...], **more: Check) -> dict[str, Check]:
    return {**STEP, "layer": _layer_with(*roles) if roles else _layer, **more}


LATENT = ("window", "entries")
TAILS: dict[str, Check] = {
    "kv": _given(_floats(_tokens, _width("tail"))),
    "score": _given(_floats(_tokens, _width("tail"))),
    "index_kv": _floats(_tokens, _width("index_tail")),
    "index_score": _floats(_tokens, _width("index_tail")),
    "newest": _count,
    "closed": _count,
    "norm_weight": _weight("entries"),
    "eps": _number,
    "rope": _rope_of_flush,
    "index_norm_weight": _weight("index_keys"),
}
INDEXER: dict[str, Check] = {
    "q": _query("index_keys"),
    "weights": _given(_floats(_tokens, _heads)),
    "k": _count,
    "columns": _count,
}
KV_ROWS: dict[str, Check] = {"k": _kv(0), "v": _kv(1), "columns": _count}

CHECKS: dict[str, dict[str, Check]] = {
    "encode": {"format": _format, "values": _values, **CODEC},
    "decode": {"format": _format, "rows": _canonical, "dim": _dim_of_rows, **CODEC},
    "pack_page": {"format": _format, "rows": _canonical},
    "unpack_page": {"format": _format, "page": _page, "rows": _page_rows},
    "join": {"kv": _given(_floats(None, None)), "score": _given(_floats(None, None))},
    "append_window": _step(("window",), rows=_given(_floats(_tokens, _dim("window")))),
    "append_rotated_window": _step(
        ("window",),
        rows=_given(_floats(_tokens, _dim("window"))),
        rope=_given(_rope("window")),
        norm_weight=_weight("window"),
        eps=_number,
    ),
    "append_tail": _step(
        ("tail",), kv=_given(_floats(_tokens, _width("tail"))), score=_given(_floats(_tokens, _width("tail")))
    ),
    "append_index_tail": _step(
        ("index_tail",),
        kv=_given(_floats(_tokens, _width("index_tail"))),
        score=_given(_floats(_tokens, _width("index_tail"))),
    ),
    "gather_window": _step(("window",), rows=_floats(_tokens, _dim("window"))),
    "compress": _step(
        ("entries", "index_keys"),
        kv=_given(_floats(_tokens, None)),
        score=_given(_floats(_tokens, None)),
        closed=_count,
        role=_entry_role,
        norm_weight=_any_weight,
        eps=_number,
    ),
    "flush": _step(("tail",), **TAILS),
    "append_flush": _step(("tail",), **TAILS),
    "store_entries": _step(
        ("entries", "index_keys"), entries=_floats(None, _dim("entries")), index_keys=_floats(None, _dim("index_keys"))
    ),
    "closed": {"layer": _layer, "index": _index, "count": _count, "role": _entry_role},
    "gather_entries": _step(("entries",), indices=_given(_indices)),
    "gather_all_entries": _step(("entries", "index_keys"), columns=_count, role=_entry_role),
    "index_scores": _step(("index_keys",), **{name: INDEXER[name] for name in ("q", "weights", "columns")}),
    "select": {"scores": _given(_scores), "k": _given(_count)},
    "index_select": _step(("index_keys",), **{**INDEXER, "k": _given(_count)}),
    "attend": _step(
        LATENT,
        q=_query(*LATENT),
        selected=_indices,
        rows=_floats(_tokens, _dim("window")),
        sink=_sink,
        scale=_number,
        rope=_rope(*LATENT),
    ),
    "append_kv": _step(("kv",), k=_given(_kv(0)), v=_given(_kv(1))),
    "gather_kv": _step(("kv",), **KV_ROWS),
    "kv_view": _step(("kv",), columns=_count),
    "append_kv_view": _step(("kv",), k=_given(_kv(0)), v=_given(_kv(1)), columns=_count),
    "mask": {"layer": _layer_with("kv"), "index": _index, "columns": _count},
    "visible_rows": {"layer": _layer_with("kv"), "index": _index, "columns": _count},
    "attend_kv": _step(("kv",), q=_query("kv"), **KV_ROWS, sink=_sink, scale=_number),
    "append_state": _step(("state",), states=_given(_states(_tokens))),
    "write_state": _step(("state",), states=_given(_states(_requests)), newest=_count),
    "read_state": _step(("state",)),
    "append_conv": _step(("conv",), rows=_given(_floats(_tokens, _channels))),
    "gather_conv": _step(("conv",)),
    "from_batch": {"index": _index, "batch": _batch},
    "to_batch": {"index": _index, "rows": _rows_of_step, "width": _given(_count)},
    "reset_slots": {"pools": _whole_pools, "slots": _units("slots", least=-1)},
    "poison": {"pools": _whole_pools, "slots": _units("slots"), "blocks": _units("blocks")},
    "copy_slots": {"pools": _whole_pools, "sources": _sources("slots"), "targets": _targets("slots")},
    "copy_blocks": {"pools": _whole_pools, "sources": _sources("blocks"), "targets": _targets("blocks")},
    "gather_rows": {**OF_A_ROLE, "rows": _own_rows, "columns": _count},
    "read_ring": OF_A_ROLE,
    "restore_ring": {**OF_A_ROLE, "saved": _as_it_is},
    "store_rows": {**OF_A_ROLE, "raw": _raw},
    "digest_rows": {"raw": _raw, "salt": _given(_count)},
}
"""Verb -> its parameters in the verb's order, each with its check. Verbs that are not here are the backend's own."""


class FunctionalOps:
    """A backend's verbs for functional use; attributes that are no verbs are the backend's.

    Attributes:
        plan: what is addressed.
        paging: what every index of this cache says of where it belongs.
    """

    def __init__(self, verbs: Ops) -> None:
        own = self.__dict__
        own["_verbs"] = verbs
        own["plan"] = verbs.plan
        own["paging"] = Paging.of(verbs.plan)
        own["_shapes"] = {}
        for name, checks in CHECKS.items():
            verb = getattr(verbs, name, None)
            if verb is not None:
                own[name] = _checked(self, name, verb, checks)

    def __getattr__(self, name: str) -> Any:
        if name == "_verbs":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._verbs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._verbs, name, value)
        if name in CHECKS:
            self.__dict__[name] = value

    def allocate(self) -> Pools:
        """Fresh pools for the plan."""
        return self._verbs.allocate()

    def asarray(self, array: Any) -> Array:
        """A NumPy array (bf16 as ml_dtypes) as an array of the framework on the device; its own arrays pass through."""
        return self._verbs.asarray(check_plain(array, "asarray"))

    def index(self, host: StepIndex) -> StepIndex:
        """The step index on the device, from NumPy int32 arrays; it says that it is this cache's."""
        return self._verbs.index(host)._replace(paging=self.paging)

    def padded_index(self, host: StepIndex) -> StepIndex:
        """The index of a padded step, which may be kept in one place: good until the next of the same shape."""
        return self._verbs.padded_index(host)._replace(paging=self.paging)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._verbs!r})"

    def expect(self, pools: Pools) -> None:
        """Take the shapes of these pools for those that every call must bring."""
        for layer, spec in enumerate(self.plan.spec.all_layers):
            names = [
                name
                for role, _ in spec.components()
                for region in self.plan.region(layer, role)
                for name, _ in region.buffers.values()
            ]
            self._shapes[layer] = [(name, tuple(pools[name].shape)) for name in names[:1] if name in pools]

    def check_pools(self, pools: Mapping[str, Any], layer: int, verb: str) -> None:
        """Refuse another cache's pools: other names, or units of other numbers or sizes."""
        for name, shape in self._shapes.get(layer, ()):
            array = pools.get(name)
            got = None if array is None else tuple(array.shape)
            if got != shape:
                raise ShapeError(
                    got="no such pool" if got is None else f"shape {list(got)}",
                    where=f"{verb}: pools[{name!r}]",
                    allowed=f"shape {list(shape)}, of this cache's pools",
                )

    def check_index(self, index: StepIndex, where: str) -> None:
        """Refuse an index that another plan's cache made, or that cannot be one of this plan's."""
        plan = self.plan
        if index.paging is not None:
            raise ShapeError(
                got=f"an index of {index.paging}",
                where=where,
                allowed=f"one of {self.paging}",
                hint="A step's index goes with the cache whose step it is.",
            )
        tokens, requests = index.positions.shape, index.slots.shape
        wanted = {
            "request_index": tokens,
            "starts": requests,
            "lengths": requests,
            "stored": requests,
            "left_padding": requests,
        }
        for name, shape in wanted.items():
            array = getattr(index, name)
            if array is not None and tuple(array.shape) != tuple(shape):
                raise ShapeError(got=f"shape {list(array.shape)}", where=f"{where}.{name}", allowed=f"{list(shape)}")
        table = index.block_table
        if len(table.shape) != 2 or table.shape[0] != requests[0] or table.shape[1] > plan.max_blocks:
            raise ShapeError(
                got=f"shape {list(table.shape)}",
                where=f"{where}.block_table",
                allowed=f"[{requests[0]}, {plan.max_blocks}] or less wide",
            )
        for name, most in (("slots", plan.slots), ("block_table", plan.blocks)):
            array = getattr(index, name)
            if isinstance(array, np.ndarray) and array.size and not -1 <= array.min() <= array.max() < most:
                odd = int(array.max() if array.max() >= most else array.min())
                raise ShapeError(got=odd, where=f"{where}.{name}", allowed=f"-1 to {most - 1}, the plan's")


def _checked(door: FunctionalOps, name: str, verb: Any, checks: Mapping[str, Check]) -> Any:
    """The verb behind its checks, which go by the order of the table however arguments are passed."""
    order = [(place, parameter, check) for place, (parameter, check) in enumerate(checks.items())]
    # What rows mean must be known before they are looked at.
    order.sort(key=lambda each: each[1] not in ("format", "dim"))
    wheres = {parameter: f"{name}: {parameter}" for parameter in checks}
    torch = sys.modules.get("torch")
    compiling = _never if torch is None else torch.compiler.is_compiling

    @wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        if compiling():
            return verb(*arguments, **options)
        call, given = Call(door, name), list(arguments)
        for place, parameter, check in order:
            call.where = wheres[parameter]
            if place < len(given):
                given[place] = check(call, given[place])
            elif parameter in options:
                options[parameter] = check(call, options[parameter])
        if call.format is not None:
            _size_format(call, given, options)
        return verb(*given, **options)

    return run


def _never() -> bool:
    return False


def _size_format(call: Call, given: list[Any], options: dict[str, Any]) -> None:
    """Hand over the format with its size."""
    if given:
        given[0] = call.format
    else:
        options["format"] = call.format
