"""Verbs that show what is stored: canonical rows, raw buffers for outside kernels, digests."""

# pyright: reportPrivateUsage=false

from kvcore import digest
from kvcore.cache.handle.state import LayerState
from kvcore.errors import StepError
from kvcore.ops import Array, PagedView, RawRows, RingView
from kvcore.plan import Region
from kvcore.spec import Entries, Window


class InspectionVerbs(LayerState):
    """Q requests of the step, n live rows."""

    def gather_rows(self, role: str) -> RawRows:
        """A role's live rows in position order as canonical bytes: rows [Q, n, row_bytes] uint8, positions [Q, n].

        Tail rows are fp32 kv then score; K-V rows are the key heads, then the value heads; entries are at position m·i.
        """
        component = self._component(role)
        if component.written_by_step:
            index, rows = self._state(role)
            rows = None if rows is None else self._parts(role)
        else:
            index, rows = self._paged_index(role), None
        columns = max((len(component.live(length)) for length in self._lengths(index)), default=0)
        return self._ops.gather_rows(self._pools, self._layer, role, index, rows, columns=columns)

    def window_view(self) -> RingView:
        """The window's raw buffers and slots, zero-copy, for outside kernels. Rows appended in this step are in it.

        Raises:
            StepError: the step brings more tokens than the ring has spare rows, so its rows wait for the commit.
        """
        self._component("window", Window)
        if "window" in self._waiting:
            raise StepError(
                got=f"{max(row.new for row in self._step._rows)} new tokens of one request",
                where=f"{self._where}.window_view",
                allowed="at most 1 + max_draft_tokens",
                hint="Use attend, or commit first: a long step's rows overwrite what its own queries need.",
            )
        (region,) = self._step.cache.plan.region(self._layer, "window")
        index, _ = self._state("window")
        return RingView(region.format, region.unit, self._buffers(region), index.slots, region.rows, index.lengths)

    def entries_view(self) -> PagedView:
        """The entries' raw buffers and block table, zero-copy."""
        return self._paged_view("entries")

    def indexer_view(self) -> PagedView:
        """The index keys' raw buffers and block table, zero-copy."""
        return self._paged_view("index_keys")

    def digest(self) -> int:
        """One number for everything this layer holds of the step's requests; equal on every backend and layout."""
        cache = self._step.cache
        lanes: list[list[tuple[int, int]]] = [[] for _ in self._step._rows]
        for role, _ in self._spec.components():
            salt = digest.region_salt(cache.spec.owner(self._layer, role), role)
            found = cache._to_host(self._ops.digest_rows(self.gather_rows(role), salt))
            for lane, pair in zip(lanes, found, strict=False):
                lane.append((int(pair[0]), int(pair[1])))
        return digest.combine([(row.length, lane) for row, lane in zip(self._step._rows, lanes, strict=True)])

    def _paged_view(self, role: str) -> PagedView:
        component = self._component(role, Entries)
        (region,) = self._step.cache.plan.region(self._layer, role)
        index = self._paged_index(role)
        counts = index.lengths // component.ratio
        return PagedView(region.format, region.unit, self._buffers(region), index.block_table, region.rows, counts)

    def _buffers(self, region: Region) -> dict[str, Array]:
        return {buffer: self._pools[name] for buffer, (name, _) in region.buffers.items()}
