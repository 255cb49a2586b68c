"""``cache.ops``: a backend's verbs with a door in front of them, the same for all backends.

The verbs themselves trust what they get, since a handle has checked it. Called functionally, nobody has: here every
argument is looked at, and turned into what the verb takes, by one table. What a shape, a host integer or the index
itself can tell is told before anything is written. JAX's functions are checked while they are traced; what torch
compiles is not, for its tracer has no arrays to look at.
"""

import sys
from collections.abc import Mapping
from functools import wraps
from typing import Any

import numpy as np

from kvcore.arrays import check_plain
from kvcore.errors import ShapeError
from kvcore.ops import Array, Ops, Paging, StepIndex
from kvcore.ops.arguments import UNKNOWN, likes, note_passed
from kvcore.ops.checks import CHECKS, Call, Check
from kvcore.plan import CachePlan
from kvcore.pools import Pools


class FunctionalOps:
    """A backend's verbs for functional use; attributes that are no verbs are the backend's.

    Attributes:
        plan: what is addressed.
        paging: what every index of this cache says of where it belongs.
        passed: calls whose arguments pass as they are, by all that is checked of them.
    """

    plan: CachePlan
    paging: Paging
    passed: set[Any]
    in_place: bool
    _verbs: Ops

    def __init__(self, verbs: Ops) -> None:
        own = self.__dict__
        own["_verbs"] = verbs
        own["plan"] = verbs.plan
        own["paging"] = Paging.of(verbs.plan)
        own["_shapes"] = {}
        own["passed"] = set()
        own["in_place"] = verbs.in_place
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

    def shapes(self, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of what is looked at of a layer's pools."""
        return self._shapes.get(layer, [])

    def check_pools(self, pools: Mapping[str, Any], layer: int, verb: str) -> None:
        """Refuse another cache's pools: other names, or units of other numbers or sizes."""
        for name, shape in self.shapes(layer):
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
    # Whose arguments' values nobody looks at, but those of plain numbers: what passed once passes again.
    repeats = _repeats(name, checks) and door.in_place
    wheres = {parameter: f"{name}: {parameter}" for parameter in checks}
    # What runs calls at once that have passed before, by layer and verb, where the backend has that.
    known: Mapping[int | None, Mapping[str, Any]] = getattr(door, "known", {}) if repeats else {}
    leading, paging = 0 if name == "select" else len(STEPS), door.paging
    torch = sys.modules.get("torch")
    compiling = _never if torch is None else torch.compiler.is_compiling

    @wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        if compiling():
            return verb(*arguments, **options)
        again, index = None, None
        if leading and len(arguments) >= leading:
            pools, layer, index, *_ = arguments
            if type(layer) is int and index.__class__ is StepIndex and index.paging is paging:
                again = known.get(layer, NONE).get(name)
        else:
            pools, again = None, known.get(None, NONE).get(name)
        if again is not None:
            found = again.again(DOOR, pools, index, arguments[leading:], options)
            if found is not UNKNOWN:
                return found
        key = _key(door, name, arguments, options) if repeats else None
        if key is not None and key in door.passed:
            found = verb(*arguments, **options)
            if again is not None:
                given = arguments[leading:]
                again.note(DOOR, index, given, options, (*given, *options.values()))
            return found
        call, given, named = Call(door, name), list(arguments), dict(options)
        for place, parameter, check in order:
            call.where = wheres[parameter]
            if place < len(given):
                given[place] = check(call, given[place])
            elif parameter in options:
                options[parameter] = check(call, options[parameter])
        if call.format is not None:
            _size_format(call, given, options)
        if key is not None:
            note_passed(door.passed, key, (*arguments, *named.values()), (*given, *options.values()))
        found = verb(*given, **options)
        if again is not None:
            again.note(DOOR, index, arguments[leading:], named, (*given[leading:], *options.values()))
        return found

    return run


STEPS = "pools", "layer", "index"
DOOR = "functional"
NONE: Mapping[str, Any] = {}


def _repeats(name: str, checks: Mapping[str, Check]) -> bool:
    """Whether a verb is one of a step's layers: they, and ``select``, are called again and again.

    But for one whose integers are looked at, ``taken``.
    """
    return name == "select" or (tuple(checks)[:3] == STEPS and "taken" not in checks)


def _key(door: FunctionalOps, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """All that a call is checked for, but what is looked at here; None where it is to be checked whole."""
    if name == "select":
        like = likes((*arguments, *options.values()))
        return None if like is None else (name, *options, like)
    if len(arguments) < len(STEPS):
        return None
    pools, layer, index, *given = arguments
    if type(layer) is not int or pools.__class__ is not Pools or index.__class__ is not StepIndex:
        return None
    if index.paging is not door.paging or any(
        name not in pools or pools[name].shape != shape for name, shape in door.shapes(layer)
    ):
        return None
    like = likes((*given, *options.values()))
    if like is None:
        return None
    return name, layer, index.positions.shape[0], index.slots.shape[0], len(given), *options, like


def _never() -> bool:
    return False


def _size_format(call: Call, given: list[Any], options: dict[str, Any]) -> None:
    """Hand over the format with its size."""
    if given:
        given[0] = call.format
    else:
        options["format"] = call.format
