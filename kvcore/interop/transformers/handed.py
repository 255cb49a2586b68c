"""What a layer hands out while the cache attends itself: outlines of keys and values, and the way to attend to them."""

# pyright: reportPrivateUsage=false

from typing import Any, NamedTuple

import torch

from kvcore.errors import StepError
from kvcore.interop.transformers.attention import PLAIN, Facts, Forward, facts_of, unknown
from kvcore.interop.transformers.deferred import Deferred, deferred, outline
from kvcore.interop.transformers.tensors import ACCEPTED, by_token
from kvcore.ops.arguments import UNKNOWN

Pair = tuple[torch.Tensor, torch.Tensor]
NONE: dict[str, Any] = {}


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
    """

    __slots__ = ("again", "columns", "own")

    def __init__(self, layer: Any, columns: int, forward: Forward, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, _, new, _ = keys.shape
        dtype, seen = keys.dtype, len(layer._visible(new))
        key, value = (outline((batch, states.shape[1], seen, states.shape[3]), dtype) for states in (keys, values))
        super().__init__(forward, keys, (key, value))
        self.columns = columns
        self.own = not forward.start and dtype == values.dtype == layer.stored_as
        self.again: dict[str, tuple[Any, Any, Any, list[torch.Tensor]]] = {}


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
        super().__init__(layer, None, shared)
        self._given = given
        self.waits = waits
        layer.owner.hand_out(layer.number, self if waits else None)

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
            columns = handle._context.kv_columns(layer.component, ended=True)
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
        return owner.take(found, query.dtype).view(query.shape[0], shared.new, *found.shape[1:])

    def _attend(self, q: torch.Tensor, facts: Facts, sink: Any, scale: float | None) -> torch.Tensor:
        """By the layer's handle, which knows whether the pools hold all of its rows."""
        context = self._handle._context
        k, v = self._handle._writes.unwritten("kv") or (None, None)
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
