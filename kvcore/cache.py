"""A cache: a plan, its pools, a backend's verbs, and the requests that live in them."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcore import digest
from kvcore.arrays import to_numpy
from kvcore.errors import ShapeError, StepError
from kvcore.manager import Manager, Request
from kvcore.open_step import Step
from kvcore.ops import Backend, Ops
from kvcore.plan import CachePlan, plan_cache
from kvcore.plugins import choose_backend
from kvcore.pools import Pools, check_same_tree
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
    prefix: str = "off",
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
        prefix: prefix reuse; only ``off`` is available.
        layout: ``packed``, ``planar``, ``tpu_tile``, or ``auto`` for the backend's own choice.
        check: refuse non-finite input and unfinished steps; slower.

    Raises:
        SpecError: the spec or the figures cannot be planned. BackendError: no backend fits; every candidate's reason.
        OutOfBlocks: the budget is too small.
    """
    if prefix != "off":
        raise ShapeError(got=prefix, where="prefix", allowed="'off'", hint="Prefix reuse is not available yet.")
    chosen = choose_backend(backend, device)
    plan = plan_cache(
        spec,
        max_requests=max_requests,
        max_tokens=max_tokens,
        budget_bytes=budget_bytes,
        max_draft_tokens=max_draft_tokens,
        layout=chosen.default_layout(device) if layout == "auto" else layout,
    )
    return Cache(plan, chosen, chosen.create(plan, device=device, check=check), check=check)


class Cache:
    """Key-value caches of many requests over all layers of a model.

    Attributes:
        spec: what each layer holds.
        plan: blocks, slots and bytes.
        ops: the backend's verbs, for functional use: ``pools = cache.ops.append_window(pools, layer, index, rows)``.
        backend: the backend; ``backend.name`` says which.
        check: whether input is checked for finiteness and steps for completeness.
    """

    def __init__(self, plan: CachePlan, backend: Backend, ops: Ops, *, check: bool) -> None:
        self.spec = plan.spec
        self.plan = plan
        self.backend = backend
        self.ops = ops
        self.check = check
        self._manager = Manager(plan)
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
        if tokens is not None:
            token_ids(tokens, "admit: tokens")
        with self._lock:
            request = self._manager.admit()
            self._pools = self.ops.reset_slots(self._pools, self._slots([request.slot]))
            return request

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
            taken = self._manager.take_blocks(requests, counts)
            try:
                rows = [
                    Row(request.slot, request.length, count, tuple(request.blocks))
                    for request, count in zip(requests, counts, strict=True)
                ]
                host = build_index(rows, max_blocks=self.plan.blocks, pad_tokens=pad_tokens, pad_requests=pad_requests)
                self._step = Step(self, self._manager, requests, rows, [ids for _, ids in parsed], taken, host)
            except BaseException:
                self._manager.give_back_blocks(requests, taken)
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
            self._manager.truncate(self._manager.check(request), length)

    def release(self, request: Request) -> None:
        """End a request: its slot and blocks become free.

        Raises:
            RequestError: already released, or foreign. StepError: a step is open.
        """
        with self._lock:
            self._no_open_step("release")
            self._manager.release(self._manager.check(request))

    def digest(self, requests: Sequence[Request] | None = None) -> int:
        """One number for what the requests hold: equal for any slots, blocks, layouts and backends.

        Args:
            requests: in the order that counts; None for all live ones in order of admission.
        """
        with self._lock:
            self._no_open_step("digest")
            chosen = [self._manager.check(request) for request in (self.requests if requests is None else requests)]
            rows = [Row(request.slot, request.length, 0, request.blocks) for request in chosen]
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

    def _slots(self, slots: list[int]) -> Any:
        return self.ops.asarray(np.array(slots, np.int32))

    def _no_open_step(self, verb: str) -> None:
        if self._step is not None:
            raise StepError(
                got=f"{verb} while a step is open", where="cache", allowed="one step at a time, then others"
            )
