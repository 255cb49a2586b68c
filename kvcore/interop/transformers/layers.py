"""One layer of the cache as ``transformers`` models call it.

A model calls ``update`` once a layer and forward, and attends to what it returns: the rows that its new tokens may see,
in position order, new ones last. How many there are and where they begin it asked before, through ``get_mask_sizes``;
both answers come from the component's ``visible``. New rows come back as stored, so a quantised cache quantises them
for the forward that writes them too, and a prompt's logits do not depend on how it was cut into chunks. In a format
over tokens there is one row a position, too, as the forward leaves it: coded in groups that are whole by then.
"""
# ruff: noqa: ARG002 - the signatures are those that models call
# pyright: reportPrivateUsage=false

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcore.cache.inside import writes_of
from kvcore.errors import StepError
from kvcore.interop.transformers.compiled import behind_padding, notes, stored_before
from kvcore.interop.transformers.handed import Alike, Captured, Handed, SharedRows, likes, share_views
from kvcore.interop.transformers.masked import REASON, attended_under
from kvcore.interop.transformers.owner import OwnedLayer, Owner
from kvcore.interop.transformers.static import padded, stored_keys_and_values
from kvcore.interop.transformers.tensors import by_head, by_token, check_inference
from kvcore.spec import KV, Entries, Window

Pair = tuple[torch.Tensor, torch.Tensor]


class Layer(OwnedLayer, CacheLayerMixin):
    """What all layers answer alike. B rows of the batch, S new tokens each.

    Attributes:
        cache_attends: whether the cache attends itself to one new token, and to several.
        most_new: new tokens of a row up to which it does; None: any number.
        kind: a number that layers of equal components share.
        chunked: whether what the spec calls a window is the model's chunk.
    """

    is_compileable = False
    supports_early_init = False
    cache_attends: tuple[bool, bool] = (False, False)
    most_new: int | None = None
    kind = 0
    chunked = False

    def __init__(self, owner: Owner, number: int, component: KV | Window | Entries) -> None:
        # Not the base class's, which assigns keys and values: here they are looked up in the cache.
        self.owner = owner
        self.number = number
        self.component = component
        self.window: int | None = component.span or getattr(component, "window", None)
        self.is_sliding = self.window is not None

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can undo tokens: always where nothing is overwritten, else up to ``max_draft_tokens``."""
        return self.owner.can_undo

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds anything: from its first ``update`` until ``reset``."""
        return self.owner.holds(self.number)

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of the keys that are stored, [B, heads, n, dim] in the model's dtype; None if there are none.

        As in transformers' own layers they are those that later tokens can see: all, or the last ``window - 1``.
        """
        stored = self.stored()
        return None if stored is None else stored[0]

    @keys.setter
    def keys(self, _: object) -> None:
        raise self._refused("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of the values that are stored; see ``keys``."""
        stored = self.stored()
        return None if stored is None else stored[1]

    @values.setter
    def values(self, _: object) -> None:
        raise self._refused("values")

    def attends(self, new: int) -> bool:
        """Whether the cache attends itself to ``new`` tokens a row."""
        # torch 2.11 does not trace a bool as an index
        return self.cache_attends[int(new > 1)] and (self.most_new is None or new <= self.most_new)

    def stored(self) -> Pair | None:
        """Copies of the layer's keys and values; None if there are none."""
        if not self.is_initialized:
            return None
        with self.owner.reading(self.number) as handle:
            return self._read(handle)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pools are allocated with the cache."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows that ``update`` will return, position of the first)."""
        visible = self._visible(query_length)
        return len(visible), visible.start

    def get_seq_length(self) -> int:
        """Tokens of every row before the forward that is under way, if one is."""
        return self.owner.length

    def _read(self, handle: Any) -> Pair:
        """Copies of the keys and values that later tokens can see."""
        raise NotImplementedError

    def _last(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of rows [B, heads, n, dim] that a later token can see."""
        return rows if self.window is None else rows[:, :, max(rows.shape[2] - self.window + 1, 0) :]

    def _visible(self, new: int) -> range:
        start, end = self.owner.length, self.owner.length + new
        # Where every position is kept, what the queries see is less than what there is.
        first = max(self.component.visible(start, end).start, self.component.first_visible(start))
        return range(first, end)

    def _refused(self, name: str) -> StepError:
        return StepError(
            got=f"an assignment to layers[{self.number}].{name}", where="KVCache", allowed="reading it; update stores"
        )


class KVLayer(Layer):
    """Keys and values of full, sliding or chunked attention.

    Attributes:
        stored_as: the dtype whose numbers are stored as they are, in keys and values; None: they are coded.
    """

    component: KV
    stored_as: torch.dtype | None = None

    def __init__(self, owner: Owner, number: int, component: KV) -> None:
        super().__init__(owner, number, component)
        # Where every position is kept and later tokens see the last ones alone; a ring hands out what they see.
        self._sees_part = component.span is None and component.sight is not None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store keys and values [B, heads, S, dim]; return the visible ones [B, heads, n, dim].

        Copies, or with ``zero_copy`` the cache's own memory where it lies evenly.
        """
        check_inference(key_states, value_states)
        owner = self.owner
        alike = owner.alike.get(self.kind) or owner.open_alike(self, key_states, value_states)
        if alike is not None and alike.like == likes(key_states, value_states):
            return self._update_alike(owner, alike, key_states, value_states)
        handle = owner.begin(self.number, key_states)
        try:
            if owner.attending is not None and self.attends(key_states.shape[2]):
                found = Handed.appended(self, handle, owner.attending, key_states, value_states).outlines()
            else:
                found = self._update(handle, key_states, value_states)
            owner.note_alike(self, handle, key_states, value_states)
        except BaseException:
            owner.abort()
            raise
        return found

    def _update(self, handle: Any, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store keys and values; return the visible ones, for the model to attend to."""
        owner, dtype = self.owner, keys.dtype
        append = handle.append_kv_view if owner.zero_copy else handle.append_kv
        views = append(owner.give(by_token(keys)), owner.give(by_token(values)))
        if views is None and dtype == values.dtype == self.stored_as and not owner.length:
            found = keys, values
        else:
            found = self.visible_rows(handle, keys.shape[2], dtype, views)
        owner.finish(self.number)
        return found

    def _update_alike(self, owner: Owner, alike: Alike, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """``update`` after a layer alike with keys and values alike, which has passed all checks in this step."""
        owner.begin_alike(self.number)
        try:
            number, forward = self.number, owner.attending
            if forward is not None and self.attends(keys.shape[2]):
                shared = forward.memo.get(self.kind)
                if shared is None:
                    shared = forward.memo[self.kind] = SharedRows(self, alike.columns, forward, keys, values)
                    shared.go_on(self, alike)
                handed = Handed(self, shared, (keys, values), waits=True)
                if "decode" not in alike.known.get(number, ()):
                    handed.store()
                return handed.outlines()
            rows = by_token(keys), by_token(values)
            _, views = alike.ops.append_kv_view(alike.pools, number, alike.index, *rows, columns=alike.columns)
            if views is None or self._sees_part:
                found = self.visible_rows(owner.handle_of(number, *rows), keys.shape[2], keys.dtype, views)
            else:
                found = by_head(owner.take(views[0], keys.dtype)), by_head(owner.take(views[1], keys.dtype))
                share_views(owner, alike, number, keys, values)
            owner.finish(number)
        except BaseException:
            owner.abort()
            raise
        return found

    def visible_rows(self, handle: Any, new: int, dtype: torch.dtype, views: tuple[Any, Any] | None = None) -> Pair:
        """The rows that ``new`` tokens may see [B, heads, n, dim], once they are appended; ``views`` of them if any."""
        k, v = views or handle.gather_kv()[:2]
        owner = self.owner
        first = self._first(new) if self._sees_part else 0
        if first:
            k, v = k[:, first:], v[:, first:]
        return by_head(owner.take(k, dtype)), by_head(owner.take(v, dtype))

    def _first(self, new: int) -> int:
        """First position that ``update`` hands out."""
        return self._visible(new).start

    def _read(self, handle: Any) -> Pair:
        take, dtype = self.owner.take, self.owner.dtype
        keys, values = (by_head(take(rows, dtype)) for rows in handle.gather_kv()[:2])
        return self._last(keys), self._last(values)


def captured_step(owner: Owner, layer: int) -> Captured:
    """The step that compiled code has opened.

    Raises:
        StepError: it has not.
    """
    if owner.captured is None:
        where = f"KVCache, layer {layer}, in compiled code"
        raise StepError(got="no open step", where=where, allowed="a forward from its beginning")
    return owner.captured


class StaticLayer(KVLayer):
    """The same with shapes that do not depend on how many tokens there are, for ``torch.compile``.

    A full layer returns ``max_length`` rows, a sliding one its window before the new tokens and those; rows that there
    are none of are zeros, which the model's mask leaves out.
    """

    is_compileable = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store keys and values [B, heads, S, dim]; return a fixed number of rows [B, heads, n, dim]."""
        check_inference(key_states, value_states)
        owner, new = self.owner, key_states.shape[2]
        columns = self._columns(new)
        if self.attends(new) and notes(
            owner, self.number, columns, key_states, value_states, window=self.component.span
        ):
            return key_states, value_states
        return stored_keys_and_values(key_states, value_states, owner.number, self.number, columns)

    def stored_and_attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        sink: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """What ``update`` and attention do together once compiled code runs: q [B, H, 1, dim] -> [B, 1, H, dim]."""
        owner = self.owner
        with owner.forward(self.number, keys) as handle:
            handle.append_kv(owner.give(by_token(keys)), owner.give(by_token(values)))
            index, whole = writes_of(handle).context.index, None
            if mask is not None:
                # What a row sees begins behind its padding; it may not be one run up to the new token.
                left, whole = behind_padding(mask, len(query), owner.length + 1, len(self._visible(1)))
                index = index._replace(left_padding=owner.numbers(left))
            if mask is not None and whole is not None and not whole.all():
                owner.refuse(self.number, REASON)
                k, v = (padded(each, mask.shape[3]) for each in self.visible_rows(handle, 1, query.dtype))
                found = attended_under(mask, query, k, v, sink, scale)
            else:
                found = self._attended(handle, index, query, sink, scale)
            owner.finish(self.number)
        return found

    def _attended(self, handle: Any, index: Any, query: torch.Tensor, sink: Any, scale: float | None) -> torch.Tensor:
        """Attention of q [B, H, 1, dim] to the rows where they lie -> [B, 1, H, dim]."""
        owner, writes = self.owner, writes_of(handle)
        k, v = writes.unwritten("kv") or (None, None)
        out = writes.context.ops.attend_kv(
            writes.context.pools,
            self.number,
            index,
            owner.give(by_token(query)),
            k,
            v,
            columns=writes.context.kv_columns(self.component, ended=True),
            sink=None if sink is None else owner.give(sink.detach().float()),
            scale=scale,
        ).out
        return owner.take(out, query.dtype).unsqueeze(1)

    def captured_and_attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        left: torch.Tensor | None,
        sink: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """The same in a step that is open, without anything that the host knows of it."""
        owner, number = self.owner, self.number
        ops, pools, index, kept = captured_step(owner, number)
        ops.append_kv(pools, number, index, owner.give(by_token(keys)), owner.give(by_token(values)))
        out = ops.attend_kv(
            pools,
            number,
            index if left is None else index._replace(left_padding=kept.copy_(left)),
            owner.give(by_token(query)),
            sink=None if sink is None else owner.give(sink.detach().float()),
            scale=scale,
        ).out
        return owner.take(out, query.dtype).unsqueeze(1)

    def prepare_captured(self, captured: Captured, batch: int, heads: int) -> None:
        """Do that once outside of a graph, with zeros, for a step of ``batch`` rows and queries of ``heads`` heads."""
        owner, (keys, values) = self.owner, self.component.parts
        dim, value_dim = keys.format.dim or 0, values.format.dim or 0
        dims = (keys.heads, dim), (values.heads, value_dim), (heads, dim)
        k, v, q = (owner.give(torch.zeros((batch, *each), dtype=owner.dtype, device=owner.device)) for each in dims)
        ops, pools, index, _ = captured
        ops.append_kv(pools, self.number, index, k, v)
        ops.attend_kv(pools, self.number, index, q)

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor, columns: int) -> Pair:
        """What ``update`` does once compiled code runs."""
        keys, values = super().update(key_states, value_states)
        return padded(keys, columns), padded(values, columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """(rows that ``update`` will return, position of the first)."""
        window, owner = self.component.span, self.owner
        if window is not None and torch.compiler.is_compiling():
            first = (stored_before(owner) - window + 1).clamp(min=0)
            return self._columns(query_length), first
        return self._columns(query_length), 0 if window is None else max(owner.length - window + 1, 0)

    def _first(self, new: int) -> int:
        """Whoever keeps every position hands out every one."""
        return 0

    def _last(self, rows: torch.Tensor) -> torch.Tensor:
        """As many as transformers' static layers hold, which keep a window whole, and zeros after them."""
        columns = min(self.window or self.owner.max_length, self.owner.max_length)
        return padded(rows[:, :, max(rows.shape[2] - columns, 0) :], columns)

    def _columns(self, new: int) -> int:
        """Rows that ``update`` returns; compiled code depends on it, so it must not depend on the length."""
        window, longest = self.component.span, self.owner.max_length
        return longest if window is None else min(window - 1 + new, longest)
