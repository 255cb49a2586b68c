"""What a layer hands out while the cache attends itself: outlines of keys and values, and the way to attend to them."""

# pyright: reportPrivateUsage=false

from typing import Any

import torch

from kvcore.errors import StepError
from kvcore.interop.transformers.attention import PLAIN, Facts, Forward, facts_of, unknown
from kvcore.interop.transformers.deferred import Deferred, deferred, outline
from kvcore.interop.transformers.tensors import ACCEPTED, by_token


class Alike:
    """What layers of equal components share in a forward.

    Attributes:
        columns: most keys that a query sees.
        outlines: of their keys and values.
    """

    __slots__ = ("columns", "outlines")

    def __init__(self, layer: Any, handle: Any, keys: torch.Tensor) -> None:
        kv, (batch, _, new, _) = layer.component, keys.shape
        self.columns: int = handle._kv_columns(kv, ended=True)
        seen = len(layer._visible(new))
        key, value = (outline((batch, part.heads, seen, part.format.dim or 0), keys.dtype) for part in kv.parts)
        self.outlines = key, value


class HandedOut:
    """Rows of a layer in a forward, new ones stored; good until the forward's end."""

    __slots__ = ("_device", "_dtype", "_forward", "_handle", "_layer", "_new", "_rows")

    def __init__(self, layer: Any, handle: Any, forward: Forward, states: torch.Tensor) -> None:
        self._layer = layer
        self._handle = handle
        self._forward = forward
        self._new = states.shape[2]
        self._dtype = states.dtype
        self._device = states.device
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def _made_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``update`` would have handed out."""
        raise NotImplementedError

    def _first(self) -> torch.Tensor:
        return self._read()[0]

    def _second(self) -> torch.Tensor:
        return self._read()[1]

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows is not None:
            return self._rows
        layer = self._layer
        if layer.owner.attending is not self._forward:
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
        layer, forward, end = self._layer, self._forward, self._forward.start + self._new
        if layer.owner.attending is not forward:
            return "a forward that has ended"
        if options.get("dropout"):
            return f"dropout={options['dropout']}"
        option = unknown(options)
        if option is not None:
            return f"an attention function with {option}"
        if self._new > 1 and not options.get("is_causal", getattr(module, "is_causal", True)):
            return "attention that is not causal"
        if query.shape[2] != self._new:
            return f"{query.shape[2]} queries for {self._new} new tokens"
        if query.dtype not in ACCEPTED and query.dtype != torch.float16:
            return f"queries in {query.dtype}"
        if selected or (mask is None and self._new == 1):
            return PLAIN  # it sees what was handed out, which is what the layer keeps for it
        facts = facts_of(mask, forward.base, forward.start)
        if isinstance(facts, str):
            return forward.memo.get("refused", facts)
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

    __slots__ = ("_alike", "_given")

    def __init__(self, layer: Any, handle: Any, forward: Forward, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(layer, handle, forward, keys)
        owner = layer.owner
        alike = forward.memo.get(layer.kind)
        if alike is None:
            alike = forward.memo[layer.kind] = Alike(layer, handle, keys)
        handle.append_kv(owner.give(by_token(keys)), owner.give(by_token(values)))
        owner.hand_out(layer.number)
        self._alike: Alike = alike
        own = not forward.start and keys.dtype == values.dtype == layer.stored_as
        self._given = (keys, values) if own else None

    def outlines(self) -> tuple[Deferred, Deferred]:
        """Keys and values that are read if somebody other than our attention looks at them."""
        keys, values = self._alike.outlines
        return deferred(keys, self._device, self._first, self), deferred(values, self._device, self._second, self)

    def _made_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._given or self._layer.visible_rows(self._handle, self._new, self._dtype)

    def attend(self, module: Any, query: torch.Tensor, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Attention of q [B, H, S, dim] -> [B, S, H, value dim]; None, and the reason noted: the model attends."""
        layer = self._layer
        facts = self._facts(module, query, mask, options)
        if isinstance(facts, str):
            layer.owner.refuse(layer.number, facts)
            return None
        owner, handle = layer.owner, self._handle
        context = handle._context
        k, v = handle._writes.unwritten("kv") or (None, None)
        sink = options.get("s_aux", options.get("sinks"))
        rows = by_token(query)
        found = handle._ops.attend_kv(
            context.pools,
            layer.number,
            context.index if facts.left is None else self._padded(context.index, facts.left),
            owner.give(rows),
            k,
            v,
            columns=self._alike.columns,
            sink=None if sink is None else owner.give(sink.detach().float()),
            scale=options.get("scaling"),
        ).out
        out = owner.take(found, query.dtype)
        return out.reshape(query.shape[0], self._new, *out.shape[1:])

    def _padded(self, index: Any, left: tuple[int, ...]) -> Any:
        """The step's index with columns at each row's left that nobody sees."""
        memo, key = self._forward.memo, ("index", left)
        if key not in memo:
            owner = self._layer.owner
            memo[key] = index._replace(left_padding=owner.kv.asarray(torch.tensor(left, dtype=torch.int32).numpy()))
        return memo[key]
