"""A cache: a plan, its pools, a backend's verbs, and the requests that live in them."""

from collections.abc import Mapping, Sequence

from kvcore import digest
from kvcore.arrays import to_numpy
from kvcore.cache.open_step import Step
from kvcore.cache.portable import PortableVerbs
from kvcore.cache.sharing import SharingVerbs
from kvcore.cache.step_state import StepState
from kvcore.cache.turns import exclusive
from kvcore.plan import plan_cache
from kvcore.plugins import Needs, choose_backend
from kvcore.portable.rows import owned
from kvcore.requests.manager import Request
from kvcore.requests.padding import left_padding_of
from kvcore.requests.prefix import Policy, check_policy
from kvcore.requests.tokens import TokenIds, Tokens, as_mapping, check_salt, parse_tokens, token_ids
from kvcore.spec import CacheSpec
from kvcore.step import build_index


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
    max_request_tokens: int | None = None,
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
        layout: ``packed``, ``planar``, ``tpu_tile``, ``by_head``, or ``auto`` for the backend's own choice.
        check: refuse non-finite input and unfinished steps, and poison what is freed; slower.
        max_request_tokens: the most tokens that one request can hold, so that no ring, slot or block table is larger
            than such a request needs; a step that would exceed it is refused. None: no bound but the pools.

    Raises:
        SpecError: the spec or the figures cannot be planned. BackendError: no backend fits; every candidate's reason.
        OutOfBlocks: the budget is too small.
    """
    policy = check_policy(prefix)
    chosen = choose_backend(backend, device, Needs.of(spec, layout))
    plan = plan_cache(
        spec,
        max_requests=max_requests,
        max_tokens=max_tokens,
        budget_bytes=budget_bytes,
        max_draft_tokens=max_draft_tokens,
        layout=chosen.default_layout(device) if layout == "auto" else layout,
        max_request_tokens=max_request_tokens,
    )
    return Cache(plan, chosen, chosen.create(plan, device=device, check=check), prefix=policy, check=check)


class Cache(SharingVerbs, PortableVerbs):
    """Key-value caches of many requests over all layers of a model.

    Safe to use from several threads: verbs run one at a time, and while a step is open other threads wait for its end.
    After ``turn_timeout`` seconds of that a ``StepError`` says who holds the cache, and how to end it.

    A verb happens or it does not, whatever interrupts it (``KeyboardInterrupt``, ``MemoryError``, a device's error):
    what it left half done is finished or undone by the next verb. So is a step that nobody can end any more: dropped,
    or opened by a thread that has ended. If rows that a step overwrote cannot be put back, its requests are lost: they
    can only be released, and say so.

    Attributes:
        spec: what each layer holds.
        plan: blocks, slots and bytes.
        ops: the backend's verbs, for functional use: ``pools = cache.ops.append_window(pools, layer, index, rows)``.
        backend: the backend; ``backend.name`` says which.
        damaged: pages that ``kvcore.load(..., strict=False)`` found damaged, whose requests it left out.
        turn_timeout: seconds for which a verb waits for the end of another thread's step; None, as at first, has none.
    """

    def admit(self, tokens: TokenIds | None = None, *, salt: str | None = None) -> Request:
        """Admit a request: it gets a clean slot; blocks are taken by its steps.

        Args:
            tokens: the prompt's token ids, for prefix reuse. A step of the request may then say a number instead of
                ids: it stands for the prompt's next ids as far as the prompt goes; ``truncate`` forgets them beyond its
                length.
            salt: prefixes are shared among requests of the same salt only, so that nobody learns from a hit what
                others asked. It stays with the request, its forks, exports and snapshots.

        Raises:
            OutOfSlots: ``max_requests`` requests are live. ShapeError: tokens are not ids, or the salt is no text.
        """
        ids = [] if tokens is None else token_ids(tokens, "admit: tokens")
        salt = check_salt(salt, "admit: salt")
        return self._admit(ids, salt)

    @exclusive("admit", in_step=True)
    def _admit(self, ids: list[int], salt: str | None) -> Request:
        request, place = self._fresh(salt)
        place.prompt = ids
        try:
            hit = self._prefix.find(ids, limit=len(ids) - 1, salt=salt)
            if hit.length:
                self._take_over(request, place, hit, ids)
        except BaseException:
            self._discard(place)
            raise
        self._manager.adopt(request, place)
        self._prefix.publish(place)
        return request

    @exclusive("step")
    def step(
        self,
        tokens: Mapping[Request, Tokens],
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
        *,
        left_padding: Mapping[Request, int] | None = None,
    ) -> Step:
        """Open a step: ``{request: number of new tokens, or their ids}``; mapping order is batch order.

        Use it as a context manager: it commits on exit and rolls back on an exception.

        Args:
            tokens: requests of this step; 0 tokens and an empty mapping are legal.
            pad_tokens: token rows to pad every input to, so that compiled code sees one shape; padding comes last.
            pad_requests: request rows to pad to.
            left_padding: for requests whose first positions are no tokens, how many; the same in all steps of a
                request. Their rows are stored like others, but no query sees them, and chunks count from the first
                token. Classic layers only.

        Raises:
            StepError: a step is open. OutOfBlocks: the tokens do not fit.
            RequestError: a request is stale or foreign, or given other ids than the prompt whose blocks it took over.
            ShapeError: a count is not an integer >= 0, or left padding that a layer cannot have.
            Nothing is changed by any of them.
        """
        given = as_mapping(tokens)
        requests = [self._manager.check(request, "step") for request in given]
        parsed = [
            parse_tokens(value, f"step: request {request.id}")
            for request, value in zip(requests, given.values(), strict=True)
        ]
        counts = [count for count, _ in parsed]
        # A number stands for the prompt's next ids, as far as there are any.
        known = [
            self._manager.known_ids(request, count) if ids is None else ids
            for request, (count, ids) in zip(requests, parsed, strict=True)
        ]
        padding = left_padding_of(self.spec, requests, left_padding)
        for request, ids in zip(requests, known, strict=True):
            self._manager.check_replay(request, ids)
        grown = self._manager.grow(requests, counts)
        try:
            rows = self._grown_rows(requests, counts, grown)
            if padding is not None:
                rows = [row._replace(left_padding=count) for row, count in zip(rows, padding, strict=True)]
            host = build_index(rows, max_blocks=self.plan.max_blocks, pad_tokens=pad_tokens, pad_requests=pad_requests)
            self._prepare_blocks(grown)
            # A backend may keep padded indices in one place, so that a captured graph can be replayed on the next.
            padded = pad_tokens is not None or pad_requests is not None
            put = self.ops.padded_index if padded else self.ops.index
            state = StepState(self, requests, rows, known, grown, put(host))
            step = Step(state)
        except BaseException:
            self._manager.shrink(grown)
            raise
        self._step = state
        return step

    @exclusive("truncate")
    def truncate(self, request: Request, length: int) -> None:
        """Shorten a request to ``length`` tokens, exactly, for every component; blocks beyond it are freed.

        Raises:
            RollbackError: ``length`` is out of range, or a ring has overwritten rows that would be needed.
            RequestError: stale or foreign. StepError: a step is open.
        """
        self._poison([], self._manager.truncate(self._manager.check(request), length))

    @exclusive("release")
    def release(self, request: Request) -> None:
        """End a request: its slot and blocks become free.

        Raises:
            RequestError: already released, or foreign. StepError: a step is open.
        """
        place = self._manager.place_of(self._manager.check(request, lost=True))
        self._poison([place.slot], self._manager.release(request))

    def digest(self, requests: Sequence[Request] | None = None) -> int:
        """One number for what the requests hold: equal for any slots, blocks, layouts and backends.

        Args:
            requests: in the order that counts; None for all live ones in order of admission.
        """
        return digest.combine(self._digest_lanes(requests))

    @exclusive("digest")
    def _digest_lanes(self, requests: Sequence[Request] | None = None) -> list[tuple[int, list[tuple[int, int]]]]:
        """What ``digest`` combines: for each request its length, and the two lanes of every pool in canonical order."""
        chosen = [self._manager.check(request) for request in (self.requests if requests is None else requests)]
        rows = self._rows(chosen, [0] * len(chosen))
        index = self._verbs.index(build_index(rows, max_blocks=self.plan.max_blocks))
        lanes: list[list[tuple[int, int]]] = [[] for _ in rows]
        for layer, role, component in owned(self.spec):
            columns = max((len(component.live(row.length)) for row in rows), default=0)
            raw = self._verbs.gather_rows(self._pools, layer, role, index, columns=columns)
            found = to_numpy(self._verbs.digest_rows(raw, digest.region_salt(layer, role)))
            for request, pair in enumerate(found):
                lanes[request].append((int(pair[0]), int(pair[1])))
        return [(row.length, lane) for row, lane in zip(rows, lanes, strict=True)]

    def __repr__(self) -> str:
        live = self.plan.slots - self.free_slots
        return f"Cache({self.backend.name} on {self.ops.device}: {live} of {self.plan.slots} requests, {self.plan})"
