"""Verbs bound once: what a call launches is worked out for the shapes it is given, and launched again from then on.

A verb's code decides, of shapes, dtypes and numbers alone, which kernels run, with which constants, in how many
programs. ``Replayed`` has it do so once for a ``kind`` of call, with symbols for tensors (``symbols``), and keeps the
``Program`` (``program``): a call of a known kind is a look-up, new outputs, addresses and launches. Layers that are
alike share programs. Addresses of pools and of a step's index are looked up once for these.

A call that is not of this sort (arrays with gaps or off 16-byte boundaries, pools or an index that somebody put
together, torch's own operations on the way) goes the verb's own way, and so does the first call of a kind, in which
Triton compiles.

All that checks of arguments ask of tensors on the device decides the kind, too. So calls of a kind pass or fail alike,
and whoever checks asks first whether such a call has passed before (``again``): one look at the arguments is then all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from kvcore.backends.torch_triton.program import NONE, NamedPools, Program, answer_of
from kvcore.backends.torch_triton.run_triton import ALIGNED, INTERPRETED
from kvcore.backends.torch_triton.symbols import Trace, Unbound
from kvcore.ops import StepIndex
from kvcore.ops.arguments import NUMBERS, STRANGE, UNKNOWN, are_same
from kvcore.pools import Pools
from kvcore.step import IndexShape, pieces_of

TENSORS = frozenset({Tensor, Parameter})
"""Classes of arguments that are tensors without more to them; programs may depend on the value of ``NUMBERS``."""

_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling

MOST_KINDS = 512
"""Kinds of calls that are known at a time."""


class Indexed(NamedTuple):
    """What is known of a step's index.

    Attributes:
        index: itself.
        kind: a number of its shapes; None: it is nothing that programs are made for.
        places: its arrays, as launches take them: addresses, or tensors under the interpreter.
    """

    index: StepIndex | None
    kind: int | None
    places: tuple[Any, ...]


class Seen:
    """What calls of one set of verbs were given last, and the programs that they have in common.

    Whoever looks takes hold of a whole record: another thread may bring another index meanwhile.

    Attributes:
        index: what is known of the step's index.
        pools: the pools, and what stands for them, so that nobody else need keep hold of them.
        programs: of calls of a kind, for all layers that are alike; None: they are not replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: dict[tuple[Any, ...], int] = {}
        self.index = self._expected = Indexed(None, None, ())
        self.pools: tuple[Pools | None, object] = None, object()
        self.programs: dict[Any, Program | None] = {}

    @cached_property
    def like(self) -> Tensor:
        """A tensor on the device."""
        with torch.inference_mode(False):
            return torch.empty(0, device=self._device)

    @cached_property
    def device(self) -> torch.device:
        """The device, as tensors tell it."""
        return self.like.device

    def look(self, index: StepIndex) -> Indexed:
        """What is known of an index."""
        indexed = self.index
        return indexed if indexed.index is index else self.take_index(index)

    def take_index(self, index: StepIndex) -> Indexed:
        """Look at another index."""
        found = next((known for known in (self.index, self._expected) if _is_in_place_of(index, known.index)), None)
        self.index = self._looked_at(index) if found is None else found._replace(index=index)
        return self.index

    def _looked_at(self, index: StepIndex) -> Indexed:
        arrays = index.arrays
        if not all(array.__class__ is Tensor and array.dtype is torch.int32 and _fits(array) for array in arrays):
            return Indexed(index, None, ())
        kind = self._kinds.setdefault(tuple([array.shape for array in arrays]), len(self._kinds))
        return Indexed(index, kind, arrays if INTERPRETED else tuple([array.data_ptr() for array in arrays]))

    def expect(self, index: StepIndex, shape: IndexShape) -> None:
        """An index that was made in one piece will be given: it need not be asked array by array."""
        first = 0 if INTERPRETED else index.positions.data_ptr()
        if first and not first % ALIGNED:
            kind = self._kinds.setdefault(shape.arrays, len(self._kinds))
            places = tuple([first + 4 * piece.start for piece in pieces_of(shape)[0]])
            self._expected = Indexed(index, kind, places)

    def forget(self) -> None:
        """Let go of the pools and the index that calls were given."""
        self.pools = None, object()
        self.index = Indexed(None, None, ())
        self._expected = self.index

    def take_pools(self, pools: Pools) -> tuple[Pools, object]:
        """Look at other pools."""
        found = self.pools = pools, object()
        return found


def _is_in_place_of(index: StepIndex, other: StepIndex | None) -> bool:
    """Whether an index has the arrays of another one, as have those of steps that are kept in one place."""
    return other is not None and all(map(is_, index[:-1], other[:-1]))


def _fits(array: Tensor) -> bool:
    """Whether it is what a symbol stands for."""
    return array.is_contiguous() and not array.data_ptr() % ALIGNED


UNREAD, BOUND = object(), object()


class Like(NamedTuple):
    """A call that passed a door's checks, as far as it tells others of which that is true, too.

    Attributes:
        door: whose checks they were.
        kind: of the step's index.
        program: what such calls launch.
        count: arguments of a call.
        names: of its options.
        expected: of every argument and option (shape, dtype) of a tensor, (None, value) of a number, (``BOUND``, the
            bound rounded up), or ``UNREAD``.
    """

    door: str
    kind: int | None
    program: Program
    count: int
    names: list[str]
    expected: list[tuple[Any, Any]]

    def take(self, arguments: tuple[Any, ...], options: dict[str, Any], device: Any) -> list[Any] | None:
        """A call's tensors, as launches take them; None: the call is another."""
        if len(arguments) != self.count or [*options] != self.names:
            return None
        given: list[Any] = []
        for value, (shape, what) in zip((*arguments, *options.values()), self.expected, strict=True):
            kind = value.__class__
            if kind in TENSORS:
                if value.dtype is not what or value.shape != shape or not value.is_contiguous() or value.is_neg():
                    return None
                address = value.data_ptr()
                if address % ALIGNED or value.device != device:
                    return None
                given.append(value if INTERPRETED else address)
            elif shape is None:
                if value is not what and (kind not in NUMBERS or kind is not what.__class__ or value != what):
                    return None
            elif shape is not UNREAD and (shape is not BOUND or kind is not int or rounded(value) != what):
                return None
        return given


class Kind(NamedTuple):
    """A kind of call, which layers alike repeat in a step.

    Attributes:
        program: what is launched.
        indexed: what is known of the step's index.
    """

    program: Program
    indexed: Indexed


class Turns:
    """Calls of a kind that layers make one after the other: what decides them is looked up once for all.

    Each has three tensors, as many and as large as those of the call before, and gives two arrays, which it is given.
    """

    __slots__ = ("_index", "_lie", "_program", "_seen", "_token", "kind")

    def __init__(self, seen: Seen, kind: Kind, token: object, lie: dict[int, tuple[Any, ...]]) -> None:
        self._seen, self.kind, self._token, self._lie = seen, kind, token, lie
        self._program, self._index = kind.program, kind.indexed.places

    @property
    def layers(self) -> Iterable[int]:
        """Those whose turn may come."""
        return self._lie.keys()

    def in_step(self, pools: Any, index: Any) -> "Turns | None":
        """The same in another step; None: its index is of another shape, or its pools are others."""
        (held, token), kind = self._seen.pools, self.kind
        indexed = self._seen.look(index)
        if held is not pools or token is not self._token or indexed.kind != kind.indexed.kind:
            return None
        return Turns(self._seen, kind._replace(indexed=indexed), token, self._lie)

    def outputs(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Arrays of a shape, one for each layer to give first."""
        count = len(self._lie)
        every = like.new_empty((count, *shape), dtype=dtype)
        if every.nbytes % (count * ALIGNED):
            return [like.new_empty(shape, dtype=dtype) for _ in range(count)]
        return [*every.unbind(0)]

    def __call__(self, layer: int, one: Tensor, two: Tensor, three: Tensor, out: Tensor, more: Tensor) -> bool:
        """A layer's call; False, with nothing done, where its tensors lie unlike.

        Profilers that have come since the call before are not told.
        """
        program = self._program
        first, second, third = one.data_ptr(), two.data_ptr(), three.data_ptr()
        if (first | second | third) % ALIGNED or one.is_neg() or two.is_neg() or three.is_neg():
            return False
        if not (one.is_contiguous() and two.is_contiguous() and three.is_contiguous()):
            return False
        if INTERPRETED:
            return program.run([one, two, three], self._index, self._lie[layer], out, [out, more]) is not False
        return program.launch((first, second, third, *self._index, *self._lie[layer]), out, more)


def rounded(bound: int) -> int:
    """A bound, or the next greater number of four binary digits and zeros."""
    zeros = max(bound.bit_length() - 4, 0)
    return -(-bound >> zeros) << zeros if bound > 0 else bound


class Replayed:
    """A verb of a layer, or of none, whose calls are replayed.

    Args:
        verb: its name.
        ops: the verbs, whose ``seen`` it shares.
        layer: its number, or None.
        way: what runs a call that is not replayed, and traces one: (ops, pools, layer, index, ...).
        given: what its launches know of the layer.
        names: of the layer's pools, in an order that layers of a kind have in common.
        kind: what layers that launch alike have in common.
        unread: options that decide nothing.
        bounds: options of which a greater number is as right: a history that grows is of another kind only now and
            then.
    """

    __slots__ = (
        *("_bounds", "_kind", "_layer", "_like", "_names", "_ops"),
        *("_passed", "_places", "_programs", "_seen", "_unread", "way"),
    )

    def __init__(
        self,
        verb: str,
        ops: Any,
        layer: int | None,
        way: Callable[..., Any],
        given: Any,
        unread: tuple[str, ...],
        bounds: tuple[str, ...] = (),
    ) -> None:
        self.way = way
        self._ops, self._layer, self._unread, self._bounds = ops, layer, unread, bounds
        self._seen: Seen = ops.seen
        self._names = () if layer is None else _names_of(ops.plan, layer)
        alike = None if layer is None else ops.plan.spec.all_layers[layer]
        self._kind = verb, alike, frozen(given, self._names)
        self._programs: dict[Any, Program | None] = {}
        # Of kinds whose arguments passed all checks as they were.
        self._passed: dict[Any, Program] = {}
        # What passed last: in most steps the next call is like it.
        self._like: Like | None = None
        # What stands for pools, and where those of them lie that a program takes.
        self._places: tuple[object, dict[Any, tuple[Any, ...] | None]] = None, {}

    def __call__(self, ops: Any, pools: Any, layer: int, index: Any, *arguments: Any, **options: Any) -> Any:
        """The verb of a layer."""
        seen = self._seen
        indexed = seen.look(index)
        exact = options
        if self._bounds:
            options = self._bounded(options)
        taken = None if indexed.kind is None or pools.__class__ is not Pools else self._take(arguments, options)
        if taken is None:
            return self.way(ops, pools, layer, index, *arguments, **exact)
        key, given = taken
        key = (indexed.kind, *key)
        if key in self._programs:
            program = self._programs[key]
        else:
            program = self._program(key, (pools, layer, index), arguments, options)
        if program is None:
            options = exact
        else:
            lie = self._lie(pools, program)
            if lie is not None:
                new = program.run(given, indexed.places, lie, seen.like)
                if new is not False:
                    self._places[1].setdefault(program, lie)
                    return pools if program.answer is None else program.answer(new)
        return self.way(ops, pools, layer, index, *arguments, **options)

    def kind_of(self, index: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Kind | None:
        """What a call that was replayed shares with others of layers alike in the step; None: it was not."""
        indexed = self._seen.look(index)
        taken = None if indexed.kind is None else self._take(arguments, self._bounded(options))
        program = None if taken is None else self._programs.get((indexed.kind, *taken[0]))
        return None if program is None else Kind(program, indexed)

    def in_step(self, kind: Kind, index: Any) -> Kind | None:
        """The same kind of call in another step; None: its index is of another shape."""
        indexed = self._seen.look(index)
        return kind._replace(indexed=indexed) if indexed.kind == kind.indexed.kind else None

    def bounded(self, bound: int) -> int:
        """A bound as calls of one kind have it."""
        return rounded(bound) if self._bounds else bound

    def repeat(self, kind: Kind, pools: Any, tensors: tuple[Tensor, ...], kept: list[Tensor] = NONE) -> Any:
        """A call of a kind, with other tensors of the same numbers of elements and dtypes on the same device.

        ``kept``: what an earlier such call gave last, which nobody reads any more, to be written again.
        ``UNKNOWN``, with nothing done, where they lie unlike, or the layer has had no such call with these pools.
        """
        given: list[Any] = []
        for tensor in tensors:
            address = tensor.data_ptr()
            if address % ALIGNED or not tensor.is_contiguous() or tensor.is_neg():
                return UNKNOWN
            given.append(tensor if INTERPRETED else address)
        program, seen = kind.program, self._seen
        (held, token), (known, places) = seen.pools, self._places
        lie = places.get(program) if held is pools and known is token else None
        if lie is None:
            return UNKNOWN
        new = program.run(given, kind.indexed.places, lie, seen.like, kept)
        if new is False:
            return UNKNOWN
        return pools if program.answer is None else program.answer(new)

    def in_turn_with(self, kind: Kind, pools: Any, others: Mapping[int, "Replayed"]) -> "Turns | None":
        """What layers alike go on with once a call of a kind was repeated; None where none of them can."""
        held, token = self._seen.pools
        if held is not pools:
            return None
        program, placed = kind.program, ((n, *other._places) for n, other in others.items())
        lie: dict[int, Any] = {n: at[program] for n, known, at in placed if known is token and program in at}
        return Turns(self._seen, kind, token, lie)

    def again(self, door: str, pools: Any, index: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a call gives of a kind that has passed all checks before; ``UNKNOWN``, with nothing done, else.

        Args:
            door: whose checks these were.
            pools: that it is given, and the step's index; None of a verb of no layer.
            arguments: behind them; and its options.
        """
        seen, lie = self._seen, ()
        if _grad_enabled() or _compiling():
            return UNKNOWN
        kind, places = None, ()
        if self._layer is not None:
            indexed = seen.index
            if indexed.index is not index:
                indexed = seen.take_index(index)
            kind, places = indexed.kind, indexed.places
        like = self._like
        try:
            given = None
            if like is not None and like.door == door and like.kind == kind:
                given = like.take(arguments, options, seen.device)
            if like is None or given is None:
                taken = self._take(arguments, self._bounded(options))
                program = None if taken is None else self._passed.get((*taken[0], door, kind))
                if taken is None or program is None:
                    return UNKNOWN
                given = taken[1]
                like = self._like = self._like_of(door, kind, arguments, options, program)
        except STRANGE:
            return UNKNOWN
        program = like.program
        if self._layer is not None:
            # Pools are of this cache if they are those of a call that passed.
            (held, token), (known, found) = seen.pools, self._places
            lie = found.get(program.pools) if held is pools and known is token else None
            if lie is None:
                return UNKNOWN
        new = program.run(given, places, lie, seen.like)
        if new is False:
            return UNKNOWN
        return pools if program.answer is None else program.answer(new)

    def _like_of(
        self, door: str, kind: int | None, arguments: tuple[Any, ...], options: dict[str, Any], program: Program
    ) -> Like:
        """What tells calls like this one."""
        expected: list[tuple[Any, Any]] = []
        for name, value in (*((None, value) for value in arguments), *options.items()):
            if name in self._unread:
                expected.append((UNREAD, None))
            elif name in self._bounds and type(value) is int:
                expected.append((BOUND, rounded(value)))
            else:
                is_tensor = value.__class__ in TENSORS
                expected.append((value.shape, value.dtype) if is_tensor else (None, value))
        return Like(door, kind, program, len(arguments), [*options], expected)

    def note(
        self, door: str, index: Any, arguments: tuple[Any, ...], options: dict[str, Any], checked: Sequence[Any]
    ) -> None:
        """Note that a call passed a door's checks, which found ``checked`` of its arguments and options, and ran."""
        if _grad_enabled() or _compiling() or not are_same((*arguments, *options.values()), checked):
            return
        try:
            taken = self._take(arguments, self._bounded(options))
        except STRANGE:
            return
        if taken is not None:
            indexed = self._seen.index
            if self._layer is not None and indexed.index is not index:
                return
            kind = None if self._layer is None else indexed.kind
            program = self._programs.get(tuple(taken[0]) if self._layer is None else (kind, *taken[0]))
            if program is not None:
                self._passed[*taken[0], door, kind] = program

    def learn(self, door: str, pools: Any, index: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Work a call out that has passed a door's checks as it is, and was run another way: the next is ``again``."""
        options = self._bounded(options)
        indexed, taken = self._seen.look(index), self._take(arguments, options)
        if taken is None or indexed.kind is None or self._seen.pools[0] is not pools:
            return
        program = self._program((indexed.kind, *taken[0]), (pools, self._layer, index), arguments, options)
        if program is not None and (lie := self._lie(pools, program)) is not None:
            self._passed[*taken[0], door, indexed.kind] = program
            self._places[1].setdefault(program, lie)

    @classmethod
    def in_turn(
        cls, name: str, way: Callable[..., Any], parts: Mapping[str, "Replayed"], bounds: tuple[str, ...] = ()
    ) -> "Replayed":
        """Several verbs of a layer, as the way calls them one after the other: never called, but worked out."""
        one = next(iter(parts.values()))
        return cls(name, one._ops, one._layer, way, tuple([part._kind for part in parts.values()]), (), bounds)

    def _bounded(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with bounds rounded up."""
        for name in self._bounds:
            bound = options.get(name)
            if type(bound) is int:
                options = {**options, name: rounded(bound)}
        return options

    def of_none(self, ops: Any, *arguments: Any, **options: Any) -> Any:
        """The verb of no layer."""
        taken = self._take(arguments, options)
        if taken is None:
            return self.way(ops, *arguments, **options)
        key, given = taken
        key = tuple(key)
        program = self._programs[key] if key in self._programs else self._program(key, (), arguments, options)
        if program is not None:
            new = program.run(given, (), (), self._seen.like)
            if new is not False:
                return None if program.answer is None else program.answer(new)
        return self.way(ops, *arguments, **options)

    def launcher(self, *arguments: Any) -> Callable[[], bool] | None:
        """What launches a call of the verb of no layer again, on the same arrays, which stay where they are.

        It says whether it could. None: the call is not replayed, or allocates.
        """
        taken = self._take(arguments, {})
        program = None if taken is None else self._programs.get(tuple(taken[0]))
        if taken is None or program is None or program.new:
            return None
        run, given, like = program.run, taken[1], self._seen.like
        return lambda: run(given, (), (), like) is not False

    def _take(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
        """(what a program depends on, tensors as launches take them); None: the call is of no kind."""
        values = (*arguments, *options.values())
        for name in self._unread:
            if name in options:
                values = (*arguments, *[value for each, value in options.items() if each not in self._unread])
        key: list[Any] = [len(arguments), *options]
        given: list[Any] = []
        device = self._seen.device
        for value in values:
            kind = value.__class__
            if kind in TENSORS:
                address = value.data_ptr()
                if address % ALIGNED or not value.is_contiguous():
                    return None
                if value.device != device or value.is_neg():
                    return None
                key.append(value.shape)
                key.append(value.dtype)
                given.append(value if INTERPRETED else address)
            elif kind in NUMBERS:
                key.append(kind)
                key.append(value)
            else:
                return None
        return key, given

    def _lie(self, pools: Pools, program: Program) -> tuple[Any, ...] | None:
        """Where the pools lie that a program takes; None as of ``_places_of``."""
        held, token = self._seen.pools
        if held is not pools:
            _, token = self._seen.take_pools(pools)
        known, places = self._places
        if known is not token:
            _, places = self._places = token, {}
        if program.pools not in places:
            places[program.pools] = self._places_of(pools, program.pools)
        return places[program.pools]

    def _places_of(self, pools: Pools, names: Sequence[int]) -> tuple[Any, ...] | None:
        """Where some of the layer's pools lie; None where they are not as programs expect them."""
        found = [pools[self._names[name]] for name in names]
        if not all(pool.__class__ is Tensor and pool.dtype is torch.uint8 and _fits(pool) for pool in found):
            return None
        return tuple(found) if INTERPRETED else tuple([pool.data_ptr() for pool in found])

    def _program(
        self, key: tuple[Any, ...], at: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Program | None:
        """The program of a kind of call, from a layer like this one or by a trace."""
        every, whole = self._seen.programs, (self._kind, key)
        if whole not in every:
            if len(every) >= MOST_KINDS:
                every.clear()
            every[whole] = self._traced(at, arguments, options)
        if len(self._programs) >= MOST_KINDS:
            self._programs.clear()
            self._passed.clear()
            self._like = None
        program = self._programs[key] = every[whole]
        return program

    def _traced(self, at: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Program | None:
        trace, count, place = Trace(self._ops.torch_device), 0, ()

        def symbol(value: Any) -> Any:
            nonlocal count
            if value.__class__ not in TENSORS:
                return value
            count += 1
            return trace.symbol(("given", count - 1), value.shape, value.dtype)

        named: NamedPools | None = None
        fields = 0
        if at:
            pools, layer, index = at
            named = NamedPools(trace, pools, self._names)
            symbols = []
            for array in index[:-1]:
                symbols.append(None if array is None else trace.symbol(("index", fields), array.shape, array.dtype))
                fields += array is not None
            place = named, layer, StepIndex(*symbols, paging=index.paging)
        given = [symbol(value) for value in arguments]
        known = {name: symbol(value) for name, value in options.items() if name not in self._unread}
        try:
            with trace:
                found = self.way(self._ops, *place, *given, **known)
            return Program(trace, answer_of(found, named), count, fields)
        except Unbound:
            return None


def _names_of(plan: Any, layer: int) -> tuple[str, ...]:
    """Names of all pools that a layer reads or writes."""
    regions = [region for parts in plan.layers[layer].regions.values() for region in parts]
    return tuple(dict.fromkeys(name for region in regions for name, _ in region.buffers.values()))


def frozen(given: Any, names: Sequence[str]) -> Any:
    """What launches know of a layer, without the names of its pools: alike for layers that are alike."""
    if isinstance(given, Mapping):
        return tuple((frozen(key, names), frozen(value, names)) for key, value in given.items())
    if isinstance(given, (list, tuple)):
        return type(given).__name__, *(frozen(each, names) for each in given)
    return None if given in names else given
