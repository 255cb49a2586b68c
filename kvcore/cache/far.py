"""Entries that stay in the host's memory until a step picks them: a long request goes on before its rows are all there.

A request that came from a store may leave the entries of layers with an indexer behind. What a step's queries picked is
brought into the request's own blocks then (``LayerHandle.fetch``), while others attend; what is there stays there. No
row is read before it came: whoever looks at such entries names the picks that were fetched, and what needs the whole
request is refused until the rest is there.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.errors import StepError
from kvcore.ops import Array, Ops, RawRows
from kvcore.pools import Pools
from kvcore.requests.manager import Manager, Request, RequestState
from kvcore.step import StepRequest, build_index

Rows = np.ndarray[Any, Any]


class Far:
    """Entries of one request in the host's memory, and which of them its blocks have already.

    Attributes:
        rows: canonical rows [n, row_bytes] uint8 of every layer that owns such entries.
        present: [n] bool: those that came.
        ratios: tokens of an entry.
        length: tokens up to which they are the request's; what follows its steps wrote.
    """

    def __init__(
        self, rows: Mapping[int, Rows], present: Mapping[int, Rows], ratios: Mapping[int, int], length: int
    ) -> None:
        self.rows = rows
        self.present = present
        self.ratios = ratios
        self.length = length

    def until(self, length: int) -> "Far":
        """Those of a request that was shortened."""
        return self if length >= self.length else Far(self.rows, self.present, self.ratios, length)

    def missing(self, layer: int, selected: Rows | None = None) -> Rows:
        """Numbers of entries that are not there yet, ascending: of some picks, or of all."""
        present = self.present[layer][: self.length // self.ratios[layer]]
        if selected is None:
            return np.flatnonzero(~present)
        wanted = np.unique(selected[(selected >= 0) & (selected < len(present))])
        return wanted[~present[wanted]]

    @property
    def nbytes(self) -> int:
        """Bytes that are not there yet."""
        return sum(len(self.missing(layer)) * rows.shape[1] for layer, rows in self.rows.items())


class Part(NamedTuple):
    """Rows of a request on their way."""

    far: Far
    row: StepRequest
    numbers: Rows
    sent: "Sent"


class InStep(Protocol):
    """What is needed of a step: see ``StepContext``."""

    ops: Ops
    far: "list[Far | None]"
    coming: "dict[int, Coming]"

    @property
    def rows(self) -> list[StepRequest]:
        """Each request's part."""
        ...

    @property
    def held(self) -> Pools:
        """The cache's pools."""
        ...

    def check_open(self) -> None:
        """Refuse to go on after the step's end."""
        ...

    def replace(self, pools: Pools) -> None:
        """Make what a verb returned the cache's pools."""
        ...


class Held(Protocol):
    """What is needed of a cache between steps: see ``CacheState``."""

    ops: Ops
    pools: Pools
    manager: Manager

    def row_of(self, place: RequestState) -> StepRequest:
        """A request as a part of a step without tokens."""
        ...


class Coming:
    """What a step's queries picked of a layer, on its way; from ``LayerHandle.fetch``.

    Attributes:
        selected: the picks, as they are attended to.
        rows: rows that had to come, over all requests.
    """

    def __init__(self, context: InStep, layer: int, given: Any, selected: Array, parts: list[Part]) -> None:
        self.selected = selected
        self.rows = sum(len(part.numbers) for part in parts)
        self._context = context
        self._layer = layer
        self._given = given
        self._parts = parts

    def wait(self) -> None:
        """Put the rows where they belong, once: ``attend`` and ``gather_entries`` do it if nobody did."""
        self._context.check_open()
        while self._parts:
            part = self._parts[-1]
            self._context.replace(stored(self._context.ops, self._context.held, self._layer, part))
            self._parts.pop()

    def is_of(self, given: Any) -> bool:
        """Whether these are the picks that were fetched."""
        return given is self._given or given is self.selected


def fetch(context: InStep, layer: int, given: Any, selected: Array) -> Coming:
    """Begin to bring what is picked and is not there; ``layer`` owns the entries."""
    parts: list[Part] = []
    if any(far is not None and layer in far.rows for far in context.far):
        # Nobody changes it between here and the reader.
        indices = np.array(to_numpy(selected))
        selected, first = context.ops.asarray(indices), 0
        for row, far in zip(context.rows, context.far, strict=True):
            numbers = far.missing(layer, indices[first : first + row.new]) if far and layer in far.rows else indices[:0]
            if far is not None and numbers.size:
                parts.append(Part(far, row, numbers, Sent(context.ops, far.rows[layer], numbers)))
            first += row.new
    coming = Coming(context, layer, given, selected, parts)
    context.coming[layer] = coming
    return coming


def fetched(context: InStep, layer: int, given: Any, where: str) -> Array:
    """The picks as they were fetched, once their rows are there.

    Raises:
        StepError: others than were fetched, or all entries, of a request whose entries are in the host's memory.
    """
    coming = context.coming.get(layer)
    if given is None or coming is None or not coming.is_of(given):
        raise StepError(
            got="entries that are in the host's memory, and were not fetched",
            where=where,
            allowed="the picks that the layer's fetch was given",
            hint="layer.fetch(picks), or kvcore.store.bring(cache, request) before the step.",
        )
    coming.wait()
    return coming.selected


def stored(ops: Ops, pools: Any, layer: int, part: Part) -> Any:
    """Pools with rows where they belong; they are there once these are the cache's."""
    far, row, numbers, sent = part
    index = ops.index(build_index([row._replace(start=row.length, new=0)], max_blocks=ops.plan.max_blocks))
    positions = ops.asarray((numbers * far.ratios[layer]).astype(np.int32)[None])
    pools = ops.store_rows(pools, layer, "entries", index, RawRows(sent.rows()[None], positions))
    far.present[layer][numbers] = True
    return pools


def bring(state: Held, request: Request, most: int | None) -> int:
    """Bring rows that are not there, up to so many bytes; those of a request that has all make it whole.

    Returns:
        Bytes that are still to come.
    """
    place = state.manager.place(request)
    far: Far | None = place.far
    if far is None:
        return 0
    left = far.nbytes if most is None else most
    for layer, rows in far.rows.items():
        numbers = far.missing(layer)[: -(-left // rows.shape[1])]
        if len(numbers):
            part = Part(far, state.row_of(place), numbers, Sent(state.ops, rows, numbers))
            state.pools = stored(state.ops, state.pools, layer, part)
            left = max(0, left - numbers.size * rows.shape[1])
    if not far.nbytes:
        place = place.copy()
        place.far = None
        state.manager.adopt(request, place)
    return far.nbytes


class Sent:
    """Rows [n, row_bytes] uint8 on their way to the device: beside what runs there, out of pinned memory on CUDA."""

    def __init__(self, ops: Ops, held: Rows, numbers: Sequence[int] | Rows) -> None:
        torch: Any = sys.modules.get("torch")
        device: Any = getattr(ops, "torch_device", None)
        self._event: Any = None
        if torch is None or device is None or device.type != "cuda":
            self._rows = ops.asarray(held[numbers])
            return
        staged = torch.empty((len(numbers), held.shape[1]), dtype=torch.uint8, pin_memory=True)
        np.take(held, numbers, axis=0, out=staged.numpy())
        self._torch = torch
        with torch.cuda.stream(torch.cuda.Stream(device)):
            self._rows = staged.to(device, non_blocking=True)
            self._event = torch.cuda.current_stream(device).record_event()

    def rows(self) -> Array:
        """They, for what runs on the device from here on."""
        if self._event is not None:
            here = self._torch.cuda.current_stream(self._rows.device)
            here.wait_event(self._event)
            self._rows.record_stream(here)
        return self._rows
