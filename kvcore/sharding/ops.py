"""The verbs of a backend on one context shard: rows of history are the shard's own pages, all the rest is whole.

A verb runs the backend's own verb on an index of this shard's rows, then the shards exchange what is missing. Windows
and tails are on every shard, so compression comes before ownership: each shard pools every window that closes and
keeps the entries of its pages. Every shard of the group calls the same verbs with the same inputs.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvcore.ops import (
    AllEntries,
    Array,
    Attention,
    Backend,
    Choice,
    RawRows,
    SelectedEntries,
    StepIndex,
    Strip,
    VisibleRows,
    bounds,
)
from kvcore.ops.fused import FUSED, REQUIRED, created
from kvcore.plan import CachePlan
from kvcore.pools import Pools
from kvcore.sharding.exchange import Exchange
from kvcore.sharding.index import to_read, to_write
from kvcore.sharding.pages import Pages
from kvcore.spec import LayerSpec, Rope

PAGED = ("entries", "index_keys", "kv")


class ShardedOps:
    """``kvcore.ops.Ops`` on one of ``plan.context`` shards.

    ``index_scores`` shows this shard's entries and -inf for those of others; ``select`` merges. Everything else
    answers what one device would.
    """

    def __init__(self, backend: Backend, plan: CachePlan, exchange: Exchange, **options: Any) -> None:
        self.plan = plan
        self.exchange = exchange
        self._base: Any = created(backend, plan, **options)
        self._rings: Any = created(backend, _only(plan, ("window",)), **options)
        self._pages: Any = created(backend, _only(plan, PAGED), **options)
        self.device: str = self._base.device
        self.in_place: bool = self._base.in_place

    @property
    def how(self) -> str:
        """The backend's, and the number of shards."""
        return f"{self._base.how}, {self.plan.context} context shards"

    def explain(self) -> list[Choice]:
        """Which code runs on a shard, and why; attention runs over the window and over pages, each by itself."""
        parts = {(choice.layer, choice.verb): choice for choice in self._pages.explain()}
        rings = {(choice.layer, choice.verb): choice for choice in self._rings.explain()}
        found = []
        for choice in self._base.explain():
            here = choice.layer, choice.verb
            layer = None if choice.layer is None else self.plan.spec.all_layers[choice.layer]
            if choice.verb == "attend" and layer is not None and layer.entries is not None:
                entries, window = parts[here], None if layer.window is None else rings[here]
                choice = entries if window is None else _both(window, entries)
            found.append(choice)
        return found

    def __getattr__(self, name: str) -> Any:
        # Verbs of the contract that need nothing of other shards have no method here.
        if name in REQUIRED or name in FUSED:
            return getattr(self._base, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def flush(self, pools: Pools, layer: int, index: StepIndex, *streams: Array, closed: int | None = None, **how: Any):
        """Compress what closes, and store the entries of this shard's pages."""
        closed = bounds.closed(self.plan, layer, "entries", index) if closed is None else closed
        return self._base.flush(pools, layer, self._to_write(index), *streams, closed=closed, **how)

    def append_flush(self, pools: Pools, layer: int, index: StepIndex, *streams: Array, **how: Any) -> Pools:
        """The same with the tails, which every shard has whole."""
        return self._base.append_flush(pools, layer, self._to_write(index), *streams, **how)

    def store_entries(
        self, pools: Pools, layer: int, index: StepIndex, entries: Array | None, index_keys: Array | None = None
    ) -> Pools:
        """Store those of the entries that lie on this shard's pages."""
        return self._base.store_entries(pools, layer, self._to_write(index), entries, index_keys)

    def append_kv(self, pools: Pools, layer: int, index: StepIndex, k: Array, v: Array) -> Pools:
        """Store keys and values: those of this shard's pages, or all of them in rings and slots."""
        return self._base.append_kv(pools, layer, self._to_write(index), k, v)

    def store_rows(self, pools: Pools, layer: int, role: str, index: StepIndex, raw: RawRows) -> Pools:
        """Write canonical rows: those of this shard's pages, or all of them in rings and slots."""
        return self._base.store_rows(pools, layer, role, self._to_write(index), raw)

    def gather_rows(
        self,
        pools: Pools,
        layer: int,
        role: str,
        index: StepIndex,
        rows: tuple[Array, ...] | None = None,
        *,
        columns: int | None = None,
    ) -> RawRows:
        """The role's live rows, of all shards, in position order."""
        index = self._to_write(index)
        columns = bounds.columns(self.plan, layer, role, index) if columns is None else columns
        raw = self._base.gather_rows(pools, layer, role, index, rows, columns=columns)
        return raw._replace(rows=self.exchange.from_owner(raw.rows)) if self._is_paged(layer, role) else raw

    def gather_entries(self, pools: Pools, layer: int, index: StepIndex, indices: Array) -> SelectedEntries:
        """Entries by canonical number, from the shards that hold them."""
        pages, ratio = self._pages_of(layer, "entries"), self._ratio(layer, "entries")
        found = self._pages.gather_entries(
            pools, layer, self._to_read(index, layer, "entries"), self._own(indices, pages)
        )
        counts = index.lengths[index.request_index.clip(0)] // ratio if len(index.lengths) else index.request_index
        valid = (index.request_index >= 0)[:, None] & (indices >= 0) & (indices < counts[:, None])
        return SelectedEntries(self.exchange.from_owner(self.exchange.where(found.valid, found.values)), valid)

    def gather_all_entries(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None, role: str = "entries"
    ) -> AllEntries:
        """Every entry of every request, from the shards that hold them."""
        index = self._to_write(index)
        columns = bounds.columns(self.plan, layer, role, index) if columns is None else columns
        found = self._base.gather_all_entries(pools, layer, index, columns=columns, role=role)
        positions = self._positions(columns, index.lengths // self._ratio(layer, role), self._ratio(layer, role))
        mine = self._mine(columns, self._pages_of(layer, role)) & (positions >= 0)
        values = self.exchange.from_owner(self.exchange.where(mine, found.values))
        return found._replace(values=values, positions=positions)

    def index_scores(
        self, pools: Pools, layer: int, index: StepIndex, q: Array, weights: Array, *, columns: int | None = None
    ) -> Array:
        """Scores [T, columns] of this shard's entries; -inf for those of others and for what is not visible."""
        pages = self._pages_of(layer, "index_keys")
        most = bounds.columns(self.plan, layer, "index_keys", index) * self.plan.context
        columns = most if columns is None else columns
        own = self._to_read(index, layer, "index_keys")
        few = _columns(pages, columns)
        scores = self._pages.index_scores(pools, layer, own, q, weights, columns=few)
        return self.exchange.spread(scores, pages.rows, columns)

    def select(self, scores: Array, k: int) -> Array:
        """Top k over all shards' scores."""
        indices = self._base.select(scores, k)
        return self.exchange.top(scores, indices, indices)

    def index_select(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Array,
        weights: Array,
        k: int,
        *,
        columns: int | None = None,
    ) -> Array:
        """``select(index_scores(...), k)``, without scores as wide as the whole history on any shard."""
        pages = self._pages_of(layer, "index_keys")
        most = bounds.columns(self.plan, layer, "index_keys", index) * self.plan.context
        few = _columns(pages, most if columns is None else columns)
        scores = self._pages.index_scores(
            pools, layer, self._to_read(index, layer, "index_keys"), q, weights, columns=few
        )
        indices = self._base.select(scores, k)
        entries = self.exchange.where(indices >= 0, pages.canonical(self.exchange.shard, indices) + 1) - 1
        return self.exchange.top(scores, indices, entries)

    def attend(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Array,
        selected: Array | None = None,
        *,
        rows: Array | None = None,
        sink: Array | None = None,
        scale: float | None = None,
        rope: Rope | Array | None = None,
    ) -> Attention:
        """Window, once, and every shard's entries; the sink once; the whole is turned back, once."""
        spec = self.plan.spec.all_layers[layer]
        if spec.entries is None:
            return self._base.attend(pools, layer, index, q, selected, rows=rows, sink=sink, scale=scale, rope=rope)
        wide, once = self.exchange.widen(q), None
        if spec.window is not None:
            once = self._rings.attend(pools, layer, index, wide, None, rows=rows, scale=scale)
        indices = None if selected is None else self._own(selected, self._pages_of(layer, "entries"))
        parts = self._pages.attend(pools, layer, self._to_read(index, layer, "entries"), wide, indices, scale=scale)
        found = self.exchange.merge(parts, once, sink, q)
        return (
            found if rope is None else found._replace(out=self.exchange.inverse_rope(found.out, index.positions, rope))
        )

    def gather_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        k: Array | None = None,
        v: Array | None = None,
        *,
        columns: int | None = None,
    ) -> tuple[Array, Array, Array]:
        """Every row that a query of the step may see, from the shards that hold it."""
        index = self._to_write(index)
        columns = bounds.columns(self.plan, layer, "kv", index) if columns is None else columns
        keys, values, positions = self._base.gather_kv(pools, layer, index, k, v, columns=columns)
        if not self._is_paged(layer, "kv"):
            return keys, values, positions
        positions = self._positions(columns, index.lengths, 1)
        mine = self._mine(columns, self._pages_of(layer, "kv")) & (positions >= 0)
        keys, values = (self.exchange.from_owner(self.exchange.where(mine, part)) for part in (keys, values))
        return keys, values, positions

    def kv_view(self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None) -> None:
        """None: a request's rows may lie on several shards."""
        del pools, layer, index, columns

    def append_kv_view(
        self, pools: Pools, layer: int, index: StepIndex, k: Array, v: Array, *, columns: int | None = None
    ) -> tuple[Pools, None]:
        """``append_kv``; there is no view."""
        del columns
        return self.append_kv(pools, layer, index, k, v), None

    def move_strips(
        self, pools: Pools, pages: Array, strips: Sequence[Strip], units: Array, *, store: bool = False
    ) -> bool:
        """False: a request's rows may lie on several shards."""
        del pools, pages, strips, units, store
        return False

    def mask(self, layer: int, index: StepIndex, *, columns: int | None = None) -> Array:
        """What each query may see of ``gather_kv``'s rows."""
        return self._base.mask(layer, self._to_write(index), columns=columns)

    def visible_rows(self, layer: int, index: StepIndex, *, columns: int | None = None) -> VisibleRows:
        """The same with the position of every row."""
        return self._base.visible_rows(layer, self._to_write(index), columns=columns)

    def attend_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        columns: int | None = None,
        sink: Array | None = None,
        scale: float | None = None,
    ) -> Attention:
        """Attention to every shard's keys and values; the sink once."""
        if not self._is_paged(layer, "kv"):
            return self._base.attend_kv(pools, layer, index, q, k, v, columns=columns, sink=sink, scale=scale)
        columns = bounds.columns(self.plan, layer, "kv", self._to_write(index)) if columns is None else columns
        few = _columns(self._pages_of(layer, "kv"), columns)
        own = self._to_read(index, layer, "kv")
        parts = self._pages.attend_kv(pools, layer, own, self.exchange.widen(q), columns=few, scale=scale)
        return self.exchange.merge(parts, None, sink, q)

    def _to_write(self, index: StepIndex) -> StepIndex:
        return to_write(index, self.exchange.mine)

    def _to_read(self, index: StepIndex, layer: int, role: str) -> StepIndex:
        return to_read(index, self._pages_of(layer, role), self._ratio(layer, role), self.exchange.shard)

    def _own(self, entries: Array, pages: Pages) -> Array:
        """Canonical entry numbers as numbers among this shard's, -1 where another holds them."""
        mine = (entries >= 0) & (pages.owner(entries) == self.exchange.shard)
        return self.exchange.where(mine, pages.local(entries) + 1) - 1

    def _mine(self, columns: int, pages: Pages) -> Array:
        """[1, columns] bool: canonical rows that lie on this shard."""
        rows = self._base.asarray(np.arange(columns, dtype=np.int32)[None])
        return pages.owner(rows) == self.exchange.shard

    def _positions(self, columns: int, counts: Array, ratio: int) -> Array:
        """[Q, columns] int32: positions of canonical rows, -1 beyond each request's ``counts``.

        Worked out here, since a backend may say -1 for a row that is on no page of its own.
        """
        rows = self._base.asarray(np.arange(columns, dtype=np.int32)[None])
        return self.exchange.where(rows < counts[:, None], rows * ratio + 1) - 1

    def _pages_of(self, layer: int, role: str) -> Pages:
        return Pages(self.plan.context, self.plan.region(layer, role)[0].rows)

    def _ratio(self, layer: int, role: str) -> int:
        return getattr(self.plan.spec.all_layers[layer], role).tokens_per_row

    def _is_paged(self, layer: int, role: str) -> bool:
        return self.plan.region(layer, role)[0].growth == "block"


def _both(window: Choice, entries: Choice) -> Choice:
    """What runs attention over a window and then over entries."""
    names = dict.fromkeys((window.implementation, entries.implementation))
    return entries._replace(
        implementation=" and ".join(names), reason=f"window: {window.reason}; entries: {entries.reason}"
    )


def _columns(pages: Pages, columns: int) -> int:
    """Rows of the first ``columns`` that a shard can hold at most: those of the first shard."""
    return pages.held(0, columns)


def _only(plan: CachePlan, roles: tuple[str, ...]) -> CachePlan:
    """The plan for verbs that are to see some roles only; pools, layer numbers and addresses are the same.

    A layer without any of the roles keeps all of its own: nobody asks for it there.
    """

    def kept(layer: LayerSpec) -> LayerSpec:
        found = {role: component for role, component in layer.components() if role in roles}
        return LayerSpec(**found) if found else layer  # type: ignore[arg-type]

    spec = msgspec.structs.replace(
        plan.spec,
        layers=tuple(map(kept, plan.spec.layers)),
        draft_layers=tuple(map(kept, plan.spec.draft_layers)),
    )
    owned = {(layer, role) for layer, role, component in spec.components() if component.shared_from is None}
    regions = tuple(region for region in plan.regions if (region.layer, region.role) in owned)
    return msgspec.structs.replace(plan, spec=spec, regions=regions)
