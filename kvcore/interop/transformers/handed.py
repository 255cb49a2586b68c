"""What a layer hands out while the cache attends itself: outlines of keys and values, and the way to attend to them."""

# pyright: reportPrivateUsage=false

from sys import getrefcount
from typing import Any, NamedTuple

import torch

from kvcore.cache.inside import writes_of
from kvcore.errors import StepError
from kvcore.interop.transformers.attention import PLAIN, Facts, Forward, facts_of, unknown
from kvcore.interop.transformers.deferred import Deferred, deferred, outline
from kvcore.interop.transformers.tensors import ACCEPTED, by_token
from kvcore.ops.arguments import UNKNOWN

Pair = tuple[torch.Tensor, torch.Tensor]
_grad_enabled = torch.is_grad_enabled
NONE: dict[str, Any] = {}
HELD = [object()]
UNHELD = getrefcount(HELD[0])
"""References that are counted of what a list holds, and nobody else."""


class Shared:
    """What layers that are alike share in a forward.

    Attributes:
        forward: it.
        new: tokens of a row.
        dtype, device: of what the layers are given.
        outlines: of what they hand out.
    """

    __slots__ = ("device", "dtype", "forward", "new", "outlines")

    def __init__(self, forward: Forward, states: torch.Tensor, outlines: Pair) -> None:
        self.forward = forward
        self.new: int = states.shape[2]
        self.dtype = states.dtype
        self.device = states.device
        self.outlines = outlines


class SharedRows(Shared):
    """The same of layers of equal components with keys and values.

    Attributes:
        columns: most keys that a query sees.
        own: there are no others than those that the layers are given, and they are stored as they are.
        again: of the last layer's calls, by what was called: (what of its queries, its index, the kind of call, what
            the attention gave beside its output, for the next layer's to be written there).
        steady: what the next layers' calls have in common, once one of them was a repetition.
    """

    __slots__ = ("_pair", "_shapes", "again", "columns", "own", "steady")

    def __init__(self, layer: Any, columns: int, forward: Forward, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, _, new, _ = keys.shape
        dtype, seen = keys.dtype, len(layer._visible(new))
        key, value = (outline((batch, states.shape[1], seen, states.shape[3]), dtype) for states in (keys, values))
        super().__init__(forward, keys, (key, value))
        self.columns = columns
        self.own = not forward.start and dtype == values.dtype == layer.stored_as
        self.again: dict[str, tuple[Any, Any, Any, list[torch.Tensor]]] = {}
        self.steady: Steady | None = None
        self._shapes = keys.shape, values.shape, values.dtype
        # What the last layer handed out: the next one's, if nobody holds it any more.
        self._pair: list[Deferred] = []

    def hand_out(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> Pair | None:
        """What a layer hands out of keys and values like those of the layers before it; None: it looks at them."""
        key_shape, value_shape, value_dtype = self._shapes
        if keys.shape != key_shape or values.shape != value_shape or _grad_enabled():
            return None
        if keys.dtype is not self.dtype or values.dtype is not value_dtype:
            return None
        if keys.device != self.device or values.device != self.device:
            return None
        owner: Any = self.forward.cache
        if number in owner._begun:
            return None
        owner._begun.add(number)
        handed = Handed(owner.layers[number], self, (keys, values), waits=True)
        pair = self._pair
        if pair and getrefcount(pair[0]) == UNHELD and getrefcount(pair[1]) == UNHELD:
            first, second = pair
            first.source = second.source = handed
            first._make, second._make = handed._first, handed._second
            if first._numbers is not None or second._numbers is not None:
                first._numbers = second._numbers = None
            return first, second
        first, second = self._pair[:] = handed.outlines()
        return first, second

    def go_on(self, layer: Any, alike: "Alike") -> None:
        """Begin with what the calls of the step before had in common, where this step's are of the same kind."""
        owner: Any = self.forward.cache
        last: Steady | None = owner.lasting.get(layer.kind)
        if last is None or _grad_enabled() or alike.known[last.number].get("decode") is not last.way:
            return
        alike_columns = last.way.bounded(last.columns) == last.way.bounded(self.columns)
        turns = last.turns.in_step(alike.pools, alike.index) if alike_columns else None
        if turns is not None and layer.number in turns.layers:
            outs = turns.outputs(last.lse, (last.shape[0], 1, *last.out), last.dtype)
            lse = torch.empty_like(last.lse)
            self.steady = last._replace(turns=turns, columns=self.columns, outs=outs, lse=lse)
            owner.steady.update(dict.fromkeys(turns.layers, self))
            owner.lasting[layer.kind] = self.steady

    def end(self) -> None:
        """The forward has ended: what was handed out last knows this, and no longer the other way round."""
        self._pair.clear()


class SharedViews:
    """The same of layers whose rows are handed out where they lie, for the model or ``attend`` to look at.

    Attributes:
        turns: what stores a layer's new rows.
    """

    __slots__ = ("_like", "_owner", "turns")

    def __init__(self, owner: Any, like: tuple[Any, ...], turns: Any) -> None:
        self._owner, self._like, self.turns = owner, like, turns

    def hand_out(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> Pair | None:
        """What a layer hands out of keys and values like those of the layers before it; None: it looks at them."""
        owner = self._owner
        if _grad_enabled() or likes(keys, values) != self._like or number in owner._begun:
            return None
        try:
            owner.begin_alike(number)
            found = self.turns(number, keys, values)
            owner.finish(number)
        except BaseException:
            owner.abort()
            raise
        return found

    def end(self) -> None:
        """The forward has ended."""


class Steady(NamedTuple):
    """Calls that store a token's keys and values and attend, alike in all layers of a kind in a forward.

    Attributes:
        mask: that they are given, itself.
        names: of their options; ``scale`` among them.
        shape, dtype, device: of queries.
        out: heads and dim of what they give.
        columns: most keys that a query sees.
        number, way: of a layer, and what repeats its calls.
        turns: the calls.
        outs: [B, 1, *out] for as many layers as come; ``lse`` for each in turn.
    """

    mask: Any
    names: frozenset[str]
    scale: float | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    out: tuple[int, ...]
    columns: int
    number: int
    way: Any
    turns: Any
    outs: list[torch.Tensor]
    lse: torch.Tensor


class Alike(NamedTuple):
    """What layers of equal components share in a step, once one of them was given keys and values: their checks.

    Attributes:
        like: what of keys and values was checked.
        ops, pools, index: of the step, for verbs that are called without a handle.
        columns: most keys that a query sees.
        known: layer -> verb -> what repeats calls of a kind, ``decode`` for both verbs at once; may be empty.
        appending: the kind of the call that stored them; None: it is not repeated.
    """

    like: tuple[Any, ...]
    ops: Any
    pools: Any
    index: Any
    columns: int
    known: Any
    appending: Any

    def in_step(self, layer: int, context: Any, columns: int) -> "Alike":
        """The same in another step, in which layers are given what is alike."""
        kind, index = self.appending, context.index
        if kind is not None:
            kind = self.known[layer]["append_kv"].in_step(kind, index)
        return self._replace(pools=context.untraced, index=index, columns=columns, appending=kind)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a layer's k and v [T, heads, dim]."""
        kind, found = self.appending, UNKNOWN
        if kind is not None:
            found = self.known[layer]["append_kv"].repeat(kind, self.pools, (k, v))
        if found is UNKNOWN:
            self.ops.append_kv(self.pools, layer, self.index, k, v)


class Captured(NamedTuple):
    """A step that compiled code has opened for all layers.

    Attributes:
        ops, pools, index: what verbs are called with.
        left: [B] int32, where positions that queries do not see are put: whoever keeps an index keeps this.
    """

    ops: Any
    pools: Any
    index: Any
    left: torch.Tensor


def share_views(owner: Any, alike: Alike, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Have the next layers store a token's keys and values and hand views out as ``layer`` has just done."""
    in_turn = getattr(alike.ops, "append_in_turn", None)
    if in_turn is None or keys.shape[2] > 1 or owner.static:
        return
    rows = by_token(keys), by_token(values)
    turns = in_turn(alike.pools, layer, alike.index, *rows, columns=alike.columns)
    if turns is not None:
        owner.steady.update(dict.fromkeys(turns.layers, SharedViews(owner, alike.like, turns)))


def likes(keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
    """All that checks look at of keys and values, but for their numbers."""
    return keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device


class HandedOut:
    """Rows of a layer in a forward, new ones stored; good until the forward's end."""

    __slots__ = ("_handle", "_layer", "_rows", "_shared")

    def __init__(self, layer: Any, handle: Any, shared: Any) -> None:
        self._layer = layer
        self._handle = handle
        self._shared = shared
        self._rows: Pair | None = None

    def outlines(self) -> tuple[Deferred, Deferred]:
        """What ``update`` hands out, read if somebody other than our attention looks at it."""
        shared = self._shared
        first, second = shared.outlines
        return deferred(first, shared.device, self._first, self), deferred(second, shared.device, self._second, self)

    def _made_rows(self) -> Pair:
        """What ``update`` would have handed out."""
        raise NotImplementedError

    def _index(self, index: Any, facts: Facts) -> Any:
        """The step's index, with the columns at each row's left that nobody sees."""
        if facts.left is None:
            return index
        memo, key = self._shared.forward.memo, ("index", facts.left)
        if key not in memo:
            left = torch.tensor(facts.left, dtype=torch.int32).numpy()
            memo[key] = index._replace(left_padding=self._layer.owner.kv.asarray(left))
        return memo[key]

    def _first(self) -> torch.Tensor:
        return self._read()[0]

    def _second(self) -> torch.Tensor:
        return self._read()[1]

    def _read(self) -> Pair:
        if self._rows is not None:
            return self._rows
        self._check_under_way()
        self._rows = rows = self._made_rows()
        return rows

    def _check_under_way(self) -> None:
        layer = self._layer
        if layer.owner.attending is not self._shared.forward:
            raise StepError(
                got=f"keys and values of layer {layer.number} from a forward that has ended",
                where="KVCache",
                allowed="their use in the forward, or layers[i].keys and .values",
                hint="attention='model' hands out tensors that last.",
            )

    def _facts(
        self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any], *, selected: bool = False
    ) -> Facts | str:
        """What the mask says, if our attention gives what the model's would; else why not.

        ``selected``: an indexer has picked what queries see, and the mask is looked at with that.
        """
        layer, forward, new = self._layer, self._shared.forward, self._shared.new
        if layer.owner.attending is not forward:
            return "a forward that has ended"
        if options.get("dropout"):
            return f"dropout={options['dropout']}"
        option = unknown(options)
        if option is not None:
            return f"an attention function with {option}"
        if new > 1 and not options.get("is_causal", getattr(module, "is_causal", True)):
            return "attention that is not causal"
        if query.shape[2] != new:
            return f"{query.shape[2]} queries for {new} new tokens"
        if query.dtype not in ACCEPTED and query.dtype != torch.float16:
            return f"queries in {query.dtype}"
        if selected or (mask is None and new == 1):
            return PLAIN  # it sees what was handed out, which is what the layer keeps for it
        facts = facts_of(mask, forward.base, forward.start)
        if isinstance(facts, str):
            return forward.memo.get("refused", facts)
        end = forward.start + new
        seen = facts.window if facts.window is not None and facts.window < end else None
        sight = layer.component.sight
        kept = sight if sight is not None and sight < end else None
        if seen != kept:
            return f"a mask of {seen or end} positions where the cache keeps {kept or end}"
        if seen is not None and layer.chunked:
            return "chunks, whose beginning padding shifts"
        return facts


class Handed(HandedOut):
    """Keys and values of a layer, which it has stored, or stores when somebody attends to them or looks at them.

    Attributes:
        waits: whether they are still to be stored.
    """

    __slots__ = ("_given", "waits")

    def __init__(self, layer: Any, shared: SharedRows, given: Pair, *, waits: bool = False) -> None:
        owner: Any = shared.forward.cache
        handle: Any = None
        self._layer, self._handle, self._shared, self._rows = layer, handle, shared, None
        self._given = given
        self.waits = waits
        owner.hand_out(layer.number, self if waits else None)

    def store(self) -> None:
        """Store what waits."""
        if self.waits:
            layer = self._layer
            self.waits = False
            layer.owner.alike[layer.kind].append(layer.number, *map(by_token, self._given))

    @classmethod
    def appended(cls, layer: Any, handle: Any, forward: Forward, keys: torch.Tensor, values: torch.Tensor) -> "Handed":
        """What a layer hands out of keys and values [B, heads, S, dim] that it stores by its handle."""
        if layer.kind not in forward.memo:
            columns = writes_of(handle).context.kv_columns(layer.component, ended=True)
            forward.memo[layer.kind] = SharedRows(layer, columns, forward, keys, values)
        give = layer.owner.give
        handle.append_kv(give(by_token(keys)), give(by_token(values)))
        found = cls(layer, forward.memo[layer.kind], (keys, values))
        found._handle = handle
        return found

    def _made_rows(self) -> Pair:
        shared, layer = self._shared, self._layer
        if shared.own:
            return self._given
        self.store()
        handle = self._handle or layer.owner.handle_of(layer.number, *map(by_token, self._given))
        return layer.visible_rows(handle, shared.new, shared.dtype)

    def attend(self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Attention of q [B, H, S, dim] -> [B, S, H, value dim]; None, and the reason noted: the model attends."""
        layer, shared = self._layer, self._shared
        steady = shared.steady
        if steady is not None and self.waits:
            out = self._attend_steadily(steady, query, mask, options)
            if out is not None:
                return out
        facts = self._facts(module, query, mask, options)
        owner = layer.owner
        if isinstance(facts, str):
            owner.refuse(layer.number, facts)
            return None
        alike = owner.alike.get(layer.kind)
        sink = options.get("s_aux", options.get("sinks"))
        sink = None if sink is None else owner.give(sink.detach().float())
        scale = options.get("scaling")
        if alike is None:
            found = self._attend(owner.give(by_token(query)), facts, sink, scale)
        else:
            found = self._attend_alike(alike, query, facts, sink, scale)
            if shared.steady is None and "decode" in shared.again and sink is None:
                self._note_steady(alike, query, found, mask, options)
        return owner.take(found, query.dtype).view(query.shape[0], shared.new, *found.shape[1:])

    def _note_steady(self, alike: Alike, query: Any, found: torch.Tensor, mask: Any, options: dict[str, Any]) -> None:
        """Note what a call that stored and attended at once has in common with those of layers that come."""
        layer, shared = self._layer, self._shared
        owner, (_, _, kind, kept) = layer.owner, shared.again["decode"]
        if not kept or shared.new > 1 or query.dtype not in ACCEPTED or self.waits or _grad_enabled():
            return
        if len(kind.program.new) != 2 or found.dtype != query.dtype:
            return
        others = [
            other.number
            for other in owner.layers
            if type(other) is type(layer) and (other.kind, other.chunked) == (layer.kind, layer.chunked)
        ]
        ways = {number: way for number in others if (way := alike.known[number].get("decode")) is not None}
        turns = ways[layer.number].in_turn_with(kind, alike.pools, ways)
        if turns is None:
            return
        shared.steady = Steady(
            mask=mask,
            names=frozenset(options),
            scale=options.get("scaling"),
            shape=query.shape,
            dtype=query.dtype,
            device=query.device,
            out=tuple(found.shape[1:]),
            columns=shared.columns,
            number=layer.number,
            way=ways[layer.number],
            turns=turns,
            outs=turns.outputs(found, (query.shape[0], 1, *found.shape[1:]), query.dtype),
            lse=kept[0],
        )
        owner.steady.update(dict.fromkeys(turns.layers, shared))
        if mask is None:
            owner.lasting[layer.kind] = shared.steady

    def _attend_steadily(self, steady: Steady, query: Any, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """``attend`` where all is as in the layers before; None, with nothing done, where something is not."""
        if mask is not steady.mask or query.shape != steady.shape or query.dtype is not steady.dtype:
            return None
        if query.device != steady.device or options.keys() != steady.names or options.get("dropout"):
            return None
        forward = self._shared.forward
        owner: Any = forward.cache
        if options.get("scaling") != steady.scale or owner.attending is not forward or not steady.outs:
            return None
        out = steady.outs.pop()
        if not steady.turns(self._layer.number, *self._given, query, out, steady.lse):
            steady.outs.append(out)
            return None
        self.waits = False
        return out

    def _attend(self, q: torch.Tensor, facts: Facts, sink: Any, scale: float | None) -> torch.Tensor:
        """By the layer's handle, which knows whether the pools hold all of its rows."""
        writes = writes_of(self._handle)
        context, (k, v) = writes.context, writes.unwritten("kv") or (None, None)
        index = self._index(context.index, facts)
        options = {"columns": self._shared.columns, "sink": sink, "scale": scale}
        return context.ops.attend_kv(context.pools, self._layer.number, index, q, k, v, **options).out

    def _attend_alike(
        self, alike: Alike, query: torch.Tensor, facts: Facts, sink: Any, scale: float | None
    ) -> torch.Tensor:
        """The same where layers alike have passed the same checks, and all rows are stored."""
        number, columns, index = self._layer.number, self._shared.columns, self._index(alike.index, facts)
        like = query.shape, query.dtype, query.device, scale, None if sink is None else sink.shape
        options, known = {"columns": columns, "sink": sink, "scale": scale}, alike.known.get(number, NONE)
        whole = known.get("decode") if self.waits else None
        if whole is not None:
            found = self._again(whole, "decode", alike, like, index, (*self._given, query), options)
            if found is not UNKNOWN:
                self.waits = False
                return found.out
            self.store()
        found, q = UNKNOWN, None
        if "attend_kv" in known:
            found = self._again(known["attend_kv"], "attend_kv", alike, like, index, (query,), options)
        if found is UNKNOWN:
            q = self._layer.owner.give(by_token(query))
            found = alike.ops.attend_kv(alike.pools, number, index, q, **options)
        if whole is not None:
            rows = *map(by_token, self._given), self._layer.owner.give(by_token(query)) if q is None else q
            whole.learn("decode", alike.pools, index, rows, options)
        return found.out

    def _again(
        self, way: Any, verb: str, alike: Alike, like: Any, index: Any, states: Any, options: dict[str, Any]
    ) -> Any:
        """What a call gives of a kind that layers alike have called before; ``UNKNOWN``, with nothing done, else.

        ``states`` [B, heads, S, dim]: those of one token a row lie as the verb takes them.
        """
        shared = self._shared
        again = shared.again.get(verb)
        if again is not None and (again[0] != like or again[1] is not index):
            again = None
        if again is None or shared.new > 1 or like[1] not in ACCEPTED:
            give = self._layer.owner.give
            states = tuple([give(by_token(each)) for each in states])
        if again is None:
            kind = way.kind_of(index, states, options)
            if kind is None:
                return UNKNOWN
            again = shared.again[verb] = like, index, kind, []
        _, _, kind, kept = again
        sink = options["sink"]
        found = way.repeat(kind, alike.pools, states if sink is None else (*states, sink), kept)
        if not kept and found is not UNKNOWN and kind.program.ends_with(found.lse):
            kept.append(found.lse)
        return found
