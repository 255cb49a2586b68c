"""What a handle remembers of its step: the rows it was given, and which of them the rings hold already.

A step reads old rows from the pools and new rows from itself. A ring row is written at once only while nothing in the
step can still need the row it overwrites, and at commit otherwise; what was overwritten at once is put back if the step
fails. This is the one place that knows that rule.
"""

# pyright: reportPrivateUsage=false

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from kvcore.cache.handle.storing import store_own
from kvcore.errors import StepError
from kvcore.ops import Array, StepIndex
from kvcore.ops.arguments import check_finite
from kvcore.pools import Pools
from kvcore.spec import ROLES, Component, LayerSpec
from kvcore.step import at_start, closed_count

if TYPE_CHECKING:
    from kvcore.cache.step_state import StepState


WRITERS = {role: f"append_{role}" for role in ROLES}
"""The verbs that write the library's own roles; others go through ``encode`` and ``store_rows``."""


class Writing(NamedTuple):
    """When a step's rows are stored: at once, unless they wait; an abort may have to put back what was there."""

    waits: bool
    undone: bool


AT_ONCE = Writing(waits=False, undone=False)


class LayerState:
    """One layer's part in one step: what was appended, stored, overwritten, and what still waits for the commit."""

    def __init__(self, step: "StepState", layer: int) -> None:
        self._step = step
        self._layer = layer
        self._spec: LayerSpec = step.cache.spec.all_layers[layer]
        self._ops = step.cache._verbs
        # Role -> the step's own rows as given, one array a stream; present once they are in the pools, or wait.
        self._own: dict[str, tuple[Array, ...]] = {}
        # Those of them that the rings get at commit.
        self._waiting: dict[str, tuple[Array, ...]] = {}
        # Role -> the index and bytes of the rows that this step's take the place of.
        self._overwritten: dict[str, tuple[StepIndex, Array]] = {}
        # Paged roles whose closing entries were stored in this step.
        self._stored: set[str] = set()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: one handle knows what a layer got in its step."""
        raise StepError(
            got="pickle or copy of a layer's handle",
            where=self._where,
            allowed=f"{self._where}, the same one each time",
        )

    def _missing(self) -> list[str]:
        """Roles that new tokens should have reached but did not: what a commit refuses."""
        own, stored = self._own, "entries" in self._stored
        return [role for role in self._spec.written if role not in own and not (stored and role == "tail")]

    def _unstored(self) -> list[str]:
        """Own paged roles with entries that close in this step and were not stored yet."""
        return [role for role in self._spec.compressed if self._awaits_entries(role)]

    def _waiting_rows(self) -> dict[str, tuple[Array, ...]]:
        """Rows that the rings do not hold yet, by role, one array a part (a tail's kv and score side by side)."""
        return {role: self._parts(role) for role in self._waiting}

    def _store_waiting(self) -> None:
        """Write the ring rows that had to wait, with what they take the place of kept for ``_put_back``."""
        for role in self._waiting:
            rows = self._step.cache.plan.region(self._layer, role)[0].rows
            index = self._step.ring_index(rows)
            if index is not None:
                self._overwritten[role] = index, self._ops.read_ring(self._pools, self._layer, role, index)
            self._write(role, self._waiting[role])

    def _blank(self) -> None:
        """Store NaN for paged rows that this step leaves out: seen, and never the bytes of the block's last owner.

        Those are entries that close and were not stored, and keys and values of draft layers, which may be left out.
        """
        kv = self._spec.kv
        if kv is not None and "kv" not in self._own and kv.growth == "block" and self._tokens:
            shapes = ((self._tokens, part.heads, part.format.dim or 0) for part in kv.parts)
            k, v = (self._ops.asarray(np.full(shape, np.nan, np.float32)) for shape in shapes)
            self._replace(self._ops.append_kv(self._pools, self._layer, self._index, k, v))
        unstored = self._unstored()
        if unstored:
            count = {role: closed_count(self._step._rows, getattr(self._spec, role).ratio) for role in unstored}
            blank = {
                role: self._ops.asarray(np.full((count[role], getattr(self._spec, role).dim), np.nan, np.float32))
                for role in count
            }
            entries, keys = blank.get("entries"), blank.get("index_keys")
            self._replace(self._ops.store_entries(self._pools, self._layer, self._index, entries, keys))

    def _put_back(self) -> None:
        """Put back the ring rows that were overwritten; once more after it was interrupted."""
        for role, (index, saved) in self._overwritten.items():
            self._replace(self._ops.restore_ring(self._pools, self._layer, role, index, saved))

    @property
    def _tokens(self) -> int:
        """Token rows of every input, padding included."""
        return self._index.positions.shape[0]

    @property
    def _index(self) -> StepIndex:
        return self._step._device_index

    @property
    def _pools(self) -> Pools:
        self._step._check_open()
        return self._step.cache.pools

    @property
    def _where(self) -> str:
        return f"step.layer({self._layer})"

    def _replace(self, pools: Pools) -> None:
        self._step.cache._replace_pools(pools)

    def _component(self, role: str, kind: type = Component) -> Any:
        """The layer's component of that role and kind, or a StepError that lists what the layer has."""
        self._step._check_open()
        component = getattr(self._spec, role) if role in self._spec.every_role else None
        if not isinstance(component, kind):
            has = ", ".join(found for found, _ in self._spec.components())
            raise StepError(got=f"role {role!r}", where=self._where, allowed=f"a component of the layer: {has}")
        return component

    def _require(self, role: str, verb: str) -> None:
        """Verbs that see the step's new tokens need them appended first."""
        if self._tokens and role not in self._own:
            raise StepError(
                got=f"{verb} before append_{role}", where=self._where, allowed=f"append_{role}, then {verb}"
            )

    def _require_entries(self, role: str, verb: str) -> None:
        """Verbs that let a query see the entries it completes need those stored first."""
        owner = self._owner(role)
        if owner._awaits_entries(role):
            raise StepError(
                got=f"{verb} while entries that close in this step are not stored",
                where=self._where,
                allowed=f"step.layer({owner._layer}).flush or store_entries, then {verb}",
            )

    def _owner(self, role: str) -> "LayerState":
        """The handle of the layer that owns the pool a role reads."""
        return self._step.layer(self._step.cache.spec.owner(self._layer, role))

    def _awaits_entries(self, role: str) -> bool:
        return role not in self._stored and closed_count(self._step._rows, getattr(self._spec, role).tokens_per_row) > 0

    def _append(self, role: str, arrays: tuple[Array, ...]) -> None:
        """Take the step's rows of a role, and write them as soon as that is safe."""
        self._step.cache._check_outside(f"append_{role}", arrays)
        if role in self._own:
            raise StepError(got=f"a second append to {role}", where=self._where, allowed="one append a step")
        writing = self._writing(role, getattr(self._spec, role))
        if writing.waits:
            # Copies: the caller may fill its buffer with the next layer's rows before the step ends.
            self._waiting[role] = copy.deepcopy(arrays)
            self._own[role] = self._waiting[role]
            return
        # What an append left that failed is not what was there before the step.
        if writing.undone and role not in self._overwritten:
            saved = self._ops.read_ring(self._pools, self._layer, role, self._index)
            self._overwritten[role] = self._index, saved
        self._write(role, arrays)
        # A flush reads them again, when the caller may have filled its NumPy buffer anew; backends copy those as they
        # come, all but the one whose own arrays they are.
        self._own[role] = copy.deepcopy(arrays) if isinstance(arrays[0], np.ndarray) else arrays

    def _writing(self, role: str, component: Component) -> Writing:
        """When the step's rows of a component are written."""
        kept = self._step._kept
        rows = 0 if component.span is None else self._step.cache.plan.region(self._layer, role)[0].rows
        key = "writing", component, rows
        if key not in kept:
            kept[key] = self._new_writing(component, rows)
        return kept[key]

    def _new_writing(self, component: Component, rows: int) -> Writing:
        """What ``_writing`` keeps: when rows may go to a ring of ``rows``, 0 where there is no ring."""
        if component.reach is None:
            return AT_ONCE
        step, longest = self._step, self._step.cache.plan.longest
        # The step's own queries and entries read ``reach`` older rows; what an aborted step must leave readable beyond
        # that is put back.
        at_once = rows - component.reach
        if (longest is None or rows < longest) and step._most_new > at_once:
            return Writing(waits=True, undone=False)
        # Does it overwrite a row that is live at some length to which its requests can be truncated? The newest token
        # takes the place of position length - 1 - rows; what is live begins no earlier at a greater length.
        undone = any(
            row.new and row.length - rows > component.live(deepest).start
            for row, deepest in zip(step._rows, step._deepest, strict=True)
        )
        return Writing(waits=False, undone=undone)

    def _write(self, role: str, arrays: tuple[Array, ...]) -> None:
        step = self._step
        if role not in WRITERS:
            component: Component = getattr(self._spec, role)
            regions = step.cache.plan.region(self._layer, role)
            self._replace(store_own(self._ops, self._pools, regions, component, self._index, step._rows, arrays))
            return
        append = getattr(self._ops, WRITERS[role])
        step.cache._replace_pools(append(self._pools, self._layer, step._device_index, *arrays))

    def _unwritten(self, role: str) -> tuple[Array, ...] | None:
        """The step's own rows where the ring does not hold them yet; None: the pools have everything."""
        return self._own[role] if role in self._waiting else None

    def _parts(self, role: str) -> tuple[Array, ...]:
        """The step's own rows as ``gather_rows`` takes them: one array for every part of the component."""
        own = self._own[role]
        component: Component = getattr(self._spec, role)
        return own if len(own) == len(component.parts) else (self._ops.join(*own),)

    def _state(self, role: str) -> tuple[StepIndex, tuple[Array, ...] | None]:
        """(index, own rows) to read a role with: the start of the step before its append, the end after it."""
        self._step._check_open()
        return (self._index, self._unwritten(role)) if role in self._own else (at_start(self._index), None)

    def _paged_index(self, role: str) -> StepIndex:
        """The index to read entries with: their count of before the step until the step's entries are stored."""
        if self._owner(role)._awaits_entries(role):
            return self._index._replace(lengths=self._index.starts)
        return self._index

    def _lengths(self, index: StepIndex) -> list[int]:
        """Host lengths that match an index from ``_state`` or ``_paged_index``."""
        ended = index.lengths is self._index.lengths
        return [row.length if ended else row.start for row in self._step._rows]

    def _check(self, array: Array, where: str, component: Component, *, minus_infinity: bool = False) -> None:
        if self._step.cache._check:
            self._step.cache._check_outside(where, (array,))
            # Padding comes last, and its rows are ignored.
            given = self._step.cache._to_host(array)[: sum(row.new for row in self._step._rows)]
            check_finite(given, where, component, minus_infinity=minus_infinity)
