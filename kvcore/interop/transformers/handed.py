"""What a layer hands out while the cache attends itself: outlines of keys and values, and the way to attend to them."""

# pyright: reportPrivateUsage=false

from typing import Any

import torch

from kvcore.errors import StepError
from kvcore.interop.transformers.attention import PLAIN, Facts, Forward, facts_of, unknown
from kvcore.interop.transformers.deferred import Deferred, deferred, outline
from kvcore.interop.transformers.tensors import ACCEPTED, by_token

Pair = tuple[torch.Tensor, torch.Tensor]


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


class Alike(Shared):
    """The same of layers of equal components with keys and values.

    Attributes:
        columns: most keys that a query sees.
        own: there are no others than those that the layers are given, and they are stored as they are.
        passed: what the first layer's append has checked of its keys and values; None: the rows are looked at.
    """

    __slots__ = ("columns", "own", "passed")

    def __init__(self, layer: Any, handle: Any, forward: Forward, keys: torch.Tensor, values: torch.Tensor) -> None:
        kv, batch, dtype = layer.component, keys.shape[0], keys.dtype
        seen = len(layer._visible(keys.shape[2]))
        key, value = (outline((batch, part.heads, seen, part.format.dim or 0), dtype) for part in kv.parts)
        super().__init__(forward, keys, (key, value))
        self.columns: int = handle._kv_columns(kv, ended=True)
        self.own = not forward.start and dtype == values.dtype == layer.stored_as
        self.passed: tuple[Any, ...] | None = None


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

    def _first(self) -> torch.Tensor:
        return self._read()[0]

    def _second(self) -> torch.Tensor:
        return self._read()[1]

    def _read(self) -> Pair:
        if self._rows is not None:
            return self._rows
        layer = self._layer
        if layer.owner.attending is not self._shared.forward:
            raise StepError(
                got=f"keys and values of layer {layer.number} from a forward that has ended",
                where="KVCache",
                allowed="their use in the forward, or layers[i].keys and .values",
                hint="attention='model' hands out tensors that last.",
            )
        self._rows = rows = self._made_rows()
        return rows

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
    """Keys and values of a layer."""

    __slots__ = ("_given",)

    def __init__(self, layer: Any, handle: Any, forward: Forward, keys: torch.Tensor, values: torch.Tensor) -> None:
        owner = layer.owner
        alike: Alike | None = forward.memo.get(layer.kind)
        if alike is None:
            alike = forward.memo[layer.kind] = Alike(layer, handle, forward, keys, values)
        super().__init__(layer, handle, alike)
        self._given = (keys, values) if alike.own else None
        rows = owner.give(by_token(keys)), owner.give(by_token(values))
        like = keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device
        if like == alike.passed:
            handle._writes.append("kv", rows)
        else:
            handle.append_kv(*rows)
            # Layers alike whose rows are alike pass the same checks, but for that of numbers.
            alike.passed = None if handle._context.check else like
        owner.hand_out(layer.number)

    def _made_rows(self) -> Pair:
        return self._given or self._layer.visible_rows(self._handle, self._shared.new, self._shared.dtype)

    def attend(self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Attention of q [B, H, S, dim] -> [B, S, H, value dim]; None, and the reason noted: the model attends."""
        layer, handle, alike = self._layer, self._handle, self._shared
        facts = self._facts(module, query, mask, options)
        owner = layer.owner
        if isinstance(facts, str):
            owner.refuse(layer.number, facts)
            return None
        context = handle._context
        k, v = handle._writes.unwritten("kv") or (None, None)
        sink = options.get("s_aux", options.get("sinks"))
        found = handle._ops.attend_kv(
            context.pools,
            layer.number,
            context.index if facts.left is None else self._padded(context.index, facts.left),
            owner.give(by_token(query)),
            k,
            v,
            columns=alike.columns,
            sink=None if sink is None else owner.give(sink.detach().float()),
            scale=options.get("scaling"),
        ).out
        return owner.take(found, query.dtype).unflatten(0, (query.shape[0], alike.new))

    def _padded(self, index: Any, left: tuple[int, ...]) -> Any:
        """The step's index with columns at each row's left that nobody sees."""
        memo, key = self._shared.forward.memo, ("index", left)
        if key not in memo:
            owner = self._layer.owner
            memo[key] = index._replace(left_padding=owner.kv.asarray(torch.tensor(left, dtype=torch.int32).numpy()))
        return memo[key]
