"""A cache: a plan, its pools, a backend's verbs, and the requests that live in them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from kvcore import digest, snapshot, transfer
from kvcore.arrays import to_numpy
from kvcore.content import Content, Own, state_at, write_rows
from kvcore.counts import is_count
from kvcore.errors import OutOfBlocks, RequestError, ShapeError, SpecError, StepError
from kvcore.manager import Growth, Manager, Request
from kvcore.open_step import Step
from kvcore.ops import Backend, Ops
from kvcore.plan import CachePlan, plan_cache
from kvcore.plugins import choose_backend
from kvcore.pools import Pools, check_same_tree
from kvcore.prefix import Policy, Restorable, check_policy
from kvcore.reuse import Hit, PrefixCache
from kvcore.spec import CacheSpec
from kvcore.step import Row, build_index
from kvcore.tokens import as_mapping, parse_tokens, token_ids

Tokens = int | Sequence[int]


def create_cache(
    spec: CacheSpec,
    *,
    backend: str = "auto",
    device: str | None = None,
    max_requests: int,
    max_tokens: int | None = None,
    budget_bytes: int | None = None,
    max_draft_tokens: int = 0,
    prefix: Policy = "off",
    layout: str = "auto",
    check: bool = False,
) -> "Cache":
    """Plan, allocate and return a cache.

    Args:
        spec: what each layer holds; see ``kvcore.spec``.
        backend: a backend's name, or ``auto``: the best one that runs here (never the reference).
        device: where the pools live, in the backend's words; None for its default.
        max_requests: requests that can be live at once.
        max_tokens: tokens that the paged pools hold over all requests.
        budget_bytes: bytes for all pools, instead of ``max_tokens``.
        max_draft_tokens: tokens that ``truncate`` can always undo.
        prefix: prefix reuse: ``off``; ``full`` (every block boundary); ``Periodic(n)`` (multiples of n at which a step
            ends, and semantic points); ``zero`` (blocks only, rings are replayed).
        layout: ``packed``, ``planar``, ``tpu_tile``, or ``auto`` for the backend's own choice.
        check: refuse non-finite input and unfinished steps, and poison what is freed; slower.

    Raises:
        SpecError: the spec or the figures cannot be planned. BackendError: no backend fits; every candidate's reason.
        OutOfBlocks: the budget is too small.
    """
    policy = check_policy(prefix)
    chosen = choose_backend(backend, device)
    plan = plan_cache(
        spec,
        max_requests=max_requests,
        max_tokens=max_tokens,
        budget_bytes=budget_bytes,
        max_draft_tokens=max_draft_tokens,
        layout=chosen.default_layout(device) if layout == "auto" else layout,
    )
    return Cache(plan, chosen, chosen.create(plan, device=device, check=check), prefix=policy, check=check)


class Cache:
    """Key-value caches of many requests over all layers of a model.

    Attributes:
        spec: what each layer holds.
        plan: blocks, slots and bytes.
        ops: the backend's verbs, for functional use: ``pools = cache.ops.append_window(pools, layer, index, rows)``.
        backend: the backend; ``backend.name`` says which.
        check: whether input is checked for finiteness and steps for completeness.
    """

    def __init__(
        self, plan: CachePlan, backend: Backend, ops: Ops, *, prefix: Policy = "off", check: bool = False
    ) -> None:
        self.spec = plan.spec
        self.plan = plan
        self.backend = backend
        self.ops = ops
        self.check = check
        self._manager = Manager(plan)
        self._prefix = PrefixCache(plan.spec, prefix, self._manager)
        self._pools = ops.allocate()
        self._step: Step | None = None
        self._lock = threading.RLock()

    @property
    def pools(self) -> Pools:
        """The pools, ``"L.role.field"`` -> array. Assign what functional ops returned to put it back."""
        return self._pools

    @pools.setter
    def pools(self, pools: Mapping[str, Any]) -> None:
        self._pools = check_same_tree(pools, self._pools)
        if self._step is not None:
            self._step.pools_replaced = True

    def replace_pools(self, pools: Pools) -> None:
        """Take what a handle's verb returned; nothing is checked."""
        self._pools = pools

    def end_step(self) -> None:
        """Let the next step begin; called by the step that ends."""
        self._step = None

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The backend's array as NumPy."""
        return to_numpy(array)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self._pools.nbytes

    @property
    def free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self._manager.free_slots

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take."""
        return self._manager.free_blocks

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return self._manager.requests

    def admit(self, tokens: Sequence[int] | None = None) -> Request:
        """Admit a request: it gets a clean slot; blocks are taken by its steps.

        Args:
            tokens: the prompt's token ids, for prefix reuse.

        Raises:
            OutOfSlots: ``max_requests`` requests are live. ShapeError: tokens are not ids.
        """
        ids = [] if tokens is None else token_ids(tokens, "admit: tokens")
        with self._lock:
            request = self._manager.admit()
            self._pools = self.ops.reset_slots(self._pools, self._integers([request.slot]))
            hit = self._prefix.find(ids, limit=len(ids) - 1)
            if hit.length:
                self._take_over(request, hit, ids)
            return request

    def fork(self, request: Request) -> Request:
        """A second request with the same history: blocks are shared until one of them writes, the slot is copied.

        Raises:
            OutOfSlots: none is free. RequestError: stale or foreign. StepError: a step is open.
        """
        with self._lock:
            self._no_open_step("fork")
            source = self._manager.check(request)
            fork = self._manager.fork(source)
            slots = [self._integers([slot]) for slot in (source.slot, fork.slot)]
            self._pools = self.ops.copy_slots(self._pools, *slots)
            return fork

    def checkpoint(self, request: Request) -> None:
        """Make the request's present length a semantic point: later prompts that start with its tokens can begin there.

        Raises:
            RequestError: stale, foreign, or its token ids are not known. StepError: a step is open.
            SpecError: the cache was created with ``prefix="off"``.
        """
        with self._lock:
            self._no_open_step("checkpoint")
            place = self._manager.place(request)
            if not self._prefix.on:
                raise SpecError(got="prefix='off'", where="checkpoint", allowed="'full', 'zero' or Periodic(n)")
            if place.tokens is None:
                raise RequestError(
                    got=f"request {request.id}, token ids unknown",
                    where="checkpoint",
                    allowed="a request whose steps were given token ids",
                    hint="Open steps with {request: ids} rather than counts.",
                )
            if place.length:
                self._prefix.keep(place.tokens, state_at(self.ops, self._pools, self.row(request), place.length, {}))

    def restorable(self, tokens: Sequence[int], n: int | None = None) -> Restorable:
        """How much of a prompt's first ``n`` tokens (None: all) can be taken over: (length, replay, exact).

        Raises:
            ShapeError: tokens are not ids, or n is out of range.
        """
        ids = token_ids(tokens, "restorable: tokens")
        if n is not None and (not is_count(n) or n > len(ids)):
            raise ShapeError(got=n, where="restorable: n", allowed=f"0 to {len(ids)}, or None")
        with self._lock:
            ids = ids[:n]
            hit = self._prefix.find(ids, limit=len(ids))
            return Restorable(hit.stored, max(0, hit.stored - hit.length), True)

    def export_request(self, request: Request) -> bytes:
        """All that a request holds, as one self-contained blob: a finished copy that any backend can import.

        Raises:
            RequestError: stale or foreign. StepError: a step is open.
        """
        with self._lock:
            self._no_open_step("export_request")
            return transfer.export(self, self._manager.check(request))

    def import_request(self, blob: bytes, into: Request | None = None) -> Request:
        """Take in an exported request; generation goes on where it was.

        Args:
            blob: from ``export_request`` of a cache with the same spec, on any backend.
            into: a request without tokens to fill; None admits one.

        Raises:
            SnapshotError: the blob is damaged or of another spec (the first difference is named).
            OutOfSlots, OutOfBlocks: no room. RequestError: ``into`` is stale, foreign or not empty. Nothing is changed.
        """
        with self._lock:
            self._no_open_step("import_request")
            return transfer.import_(self, blob, into)

    def save(self, path: str | PathLike[str], requests: Sequence[Request] | None = None) -> None:
        """Write a verified snapshot of some or all requests; the file appears whole or not at all.

        Raises:
            RequestError: stale or foreign. StepError: a step is open. OSError: the disk refused.
        """
        with self._lock:
            self._no_open_step("save")
            chosen = [self._manager.check(request) for request in (self.requests if requests is None else requests)]
            snapshot.save(self, path, chosen)

    def install(self, request: Request, length: int, tokens: Sequence[int] | None, rows: Content) -> None:
        """Make a fresh request hold ``rows`` at ``length`` tokens.

        Raises:
            OutOfBlocks: no room; the request is still fresh.
        """
        self._manager.take_over(request, length=length, stored=0, blocks=(), tokens=tokens)
        self._pools = write_rows(self.ops, self._pools, self.row(request), rows)
        self._prefix.publish(self._manager.place(request))

    def row(self, request: Request) -> Row:
        """The request as it is now, as a part of a step without tokens."""
        return self._rows([request], [0])[0]

    def keep_boundaries(
        self, request: Request, row: Row, ids: Sequence[int] | None, own: Callable[[int], Own], *, written: bool
    ) -> None:
        """Keep the checkpoints that the policy wants of a step that is about to commit.

        Args:
            own: length -> the step's rows of this request that the rings do not hold yet, up to that length.
            written: outside code put the step's rows into the pools, so only the end of the step is known.
        """
        place = self._manager.place(request)
        if place.tokens is None or ids is None:
            return
        for length in self._prefix.boundaries(row.start, row.length):
            if written and length != row.length:
                continue
            state = state_at(self.ops, self._pools, row, length, own(length))
            self._prefix.keep([*place.tokens, *ids][:length], state)

    def publish(self, request: Request) -> None:
        """Seal the blocks that a committed step filled."""
        self._prefix.publish(self._manager.place(request))

    def step(
        self,
        tokens: Mapping[Request, Tokens],
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
    ) -> "Step":
        """Open a step: ``{request: number of new tokens, or their ids}``; mapping order is batch order.

        Use it as a context manager: it commits on exit and rolls back on an exception.

        Args:
            tokens: requests of this step; 0 tokens and an empty mapping are legal.
            pad_tokens: token rows to pad every input to, so that compiled code sees one shape; padding comes last.
            pad_requests: request rows to pad to.

        Raises:
            StepError: a step is open. RequestError: a request is stale or foreign. OutOfBlocks: the tokens do not fit.
            ShapeError: a count is not an integer >= 0. Nothing is changed by any of them.
        """
        with self._lock:
            self._no_open_step("step")
            given = as_mapping(tokens)
            requests = [self._manager.check(request, "step") for request in given]
            parsed = [
                parse_tokens(value, f"step: request {request.id}")
                for request, value in zip(requests, given.values(), strict=True)
            ]
            counts = [count for count, _ in parsed]
            grown = self._manager.grow(requests, counts)
            try:
                rows = self._rows(requests, counts)
                host = build_index(rows, max_blocks=self.plan.blocks, pad_tokens=pad_tokens, pad_requests=pad_requests)
                self._copy_replaced(rows, grown)
                # A backend may keep padded indices in one place, so that a captured graph can be replayed on the next.
                padded = pad_tokens is not None or pad_requests is not None
                put = getattr(self.ops, "padded_index", self.ops.index) if padded else self.ops.index
                self._step = Step(self, self._manager, requests, rows, [ids for _, ids in parsed], grown, put(host))
            except BaseException:
                self._manager.shrink(requests, grown)
                raise
            return self._step

    def truncate(self, request: Request, length: int) -> None:
        """Shorten a request to ``length`` tokens, exactly, for every component; blocks beyond it are freed.

        Raises:
            RollbackError: ``length`` is out of range, or a ring has overwritten rows that would be needed.
            RequestError: stale or foreign. StepError: a step is open.
        """
        with self._lock:
            self._no_open_step("truncate")
            self._poison([], self._manager.truncate(self._manager.check(request), length))

    def release(self, request: Request) -> None:
        """End a request: its slot and blocks become free.

        Raises:
            RequestError: already released, or foreign. StepError: a step is open.
        """
        with self._lock:
            self._no_open_step("release")
            slot = self._manager.place(request).slot
            self._poison([slot], self._manager.release(request))

    def digest(self, requests: Sequence[Request] | None = None) -> int:
        """One number for what the requests hold: equal for any slots, blocks, layouts and backends.

        Args:
            requests: in the order that counts; None for all live ones in order of admission.
        """
        with self._lock:
            self._no_open_step("digest")
            chosen = [self._manager.check(request) for request in (self.requests if requests is None else requests)]
            rows = self._rows(chosen, [0] * len(chosen))
            index = self.ops.index(build_index(rows, max_blocks=self.plan.blocks))
            lanes: list[list[tuple[int, int]]] = [[] for _ in rows]
            for layer, role, component in self.spec.components():
                if component.shared_from is not None:
                    continue
                columns = max((len(component.live(row.length)) for row in rows), default=0)
                raw = self.ops.gather_rows(self._pools, layer, role, index, columns=columns)
                found = to_numpy(self.ops.digest_rows(raw, digest.region_salt(layer, role)))
                for request, pair in enumerate(found):
                    lanes[request].append((int(pair[0]), int(pair[1])))
            return digest.combine([(row.length, lane) for row, lane in zip(rows, lanes, strict=True)])

    def asarray(self, array: Any) -> Any:
        """A NumPy array (bf16 as ml_dtypes) as the backend's array on its device; inverse of ``kvcore.to_numpy``."""
        return self.ops.asarray(array)

    def __repr__(self) -> str:
        live = self.plan.slots - self.free_slots
        return f"Cache({self.backend.name} on {self.ops.device}: {live} of {self.plan.slots} requests, {self.plan})"

    def _take_over(self, request: Request, hit: Hit, ids: list[int]) -> None:
        """Start a fresh request from a prefix hit; without room for its last, partial block it starts from nothing."""
        stored = hit.stored if self.plan.blocks else 0
        try:
            self._manager.take_over(
                request, length=hit.length, stored=stored, blocks=hit.blocks, tokens=ids[: hit.length]
            )
        except OutOfBlocks:
            return
        place = self._manager.place(request)
        place.cached_tokens = hit.length
        if hit.state is not None:
            self._pools = write_rows(self.ops, self._pools, self.row(request), hit.state)
        self._prefix.publish(place)

    def _rows(self, requests: Sequence[Request], new: Sequence[int]) -> list[Row]:
        """The requests' parts in a step that brings ``new`` tokens."""
        places = [self._manager.place(request) for request in requests]
        return [
            Row(place.slot, place.length, count, tuple(place.blocks), place.stored)
            for place, count in zip(places, new, strict=True)
        ]

    def _poison(self, slots: list[int], blocks: list[int]) -> None:
        """Under ``check=True``, make what was freed unreadable."""
        if self.check:
            self._pools = self.ops.poison(self._pools, self._integers(slots), self._integers(blocks))

    def _copy_replaced(self, rows: Sequence[Row], grown: Sequence[Growth]) -> None:
        """Copy on write: bring the bytes of shared blocks into the blocks that replaced them."""
        pairs = [
            (old, row.blocks[column])
            for row, growth in zip(rows, grown, strict=True)
            for column, old in growth.replaced
        ]
        if pairs:
            sources, targets = (self._integers(list(side)) for side in zip(*pairs, strict=True))
            self._pools = self.ops.copy_blocks(self._pools, sources, targets)

    def _integers(self, values: list[int]) -> Any:
        return self.ops.asarray(np.array(values, np.int32))

    def _no_open_step(self, verb: str) -> None:
        if self._step is not None:
            raise StepError(
                got=f"{verb} while a step is open", where="cache", allowed="one step at a time, then others"
            )
