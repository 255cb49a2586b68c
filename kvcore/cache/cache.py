"""A cache: the door to a plan, its pools, a backend's verbs, and the requests that live in them.

Map: what there is (``pools``, ``requests``, ``free_blocks`` ...); requests through steps (``admit``,
``step``, ``truncate``, ``release``); what they share (``fork``, ``checkpoint``, ``restorable``); what a scheduler asks
(``fits``, ``blocks_needed``) and says (``reset_prefix_cache``); what leaves (``export_request``, ``import_request``,
``save``, ``digest``). What each verb does, it does in ``CacheState``.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn, SupportsIndex, TypeVar, cast

from kvcore import digest
from kvcore.cache.canary import Fault
from kvcore.cache.state import CacheState, verb
from kvcore.cache.step import Step, StepState
from kvcore.counts import as_count, check_count
from kvcore.errors import RequestError, ShapeError, SnapshotError, SpecError
from kvcore.ops import Backend, Ops
from kvcore.ops.arguments import prepare
from kvcore.ops.functional import FunctionalOps
from kvcore.plan import CachePlan
from kvcore.pools import Pools, check_same_tree
from kvcore.portable import blob as blobs
from kvcore.portable import snapshot
from kvcore.portable.rows import state_at
from kvcore.requests.blocks import BlockStatistics
from kvcore.requests.manager import Request
from kvcore.requests.padding import left_padding_of
from kvcore.requests.prefix import Policy, Restorable
from kvcore.requests.tokens import TokenIds, Tokens, as_mapping, check_salt, parse_tokens, token_ids
from kvcore.turns import owner

R = TypeVar("R")


def _asked(verb: str, tokens: Tokens, new_tokens: SupportsIndex, salt: str | None) -> tuple[list[int], int, str | None]:
    """(ids as far as they are known, tokens in all, salt) of a prompt that a scheduler asks about, checked."""
    count, ids = parse_tokens(tokens, f"{verb}: tokens")
    count += check_count(ShapeError, f"{verb}: new_tokens", new_tokens, 0)
    return ids or [], count, check_salt(salt, f"{verb}: salt")


class Cache:
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

    Example:
        >>> import numpy as np
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=1, key_heads=1, key_dim=4, block_tokens=4)
        >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=8, max_tokens=256, prefix="full")
        >>> def run(tokens):  # what a model does: one call a layer
        ...     with cache.step(tokens) as step:
        ...         rows = np.ones((len(step.positions), 1, 4), np.float32)
        ...         step.layer(0).append_kv(rows, rows)
    """

    def __init__(
        self, plan: CachePlan, backend: Backend, ops: Ops, *, prefix: Policy = "off", check: bool = False
    ) -> None:
        self.spec = plan.spec
        self.plan = plan
        self.backend = backend
        self._state = CacheState(plan, ops, prefix=prefix, check=check)
        door = FunctionalOps(ops)
        door.expect(self._state.pools)
        self._state.paging = door.paging
        self.ops = cast("Ops", door)
        # The verbs remember whose rows they moved last; nobody else keeps a cache's memory once it is gone.
        forget = getattr(ops, "forget_pools", None)
        if forget is not None:
            weakref.finalize(self, forget).atexit = False
        prepare(plan)
        self.damaged: tuple[str, ...] = ()

    @property
    def pools(self) -> Pools:
        """The pools, ``"L.role.field"`` -> array. Assign what functional ops returned to put it back."""
        self._settle()
        return self._state.pools

    @pools.setter
    def pools(self, pools: Mapping[str, Any]) -> None:
        self._state.check_outside("cache.pools")
        self._settle()
        self._state.pools = check_same_tree(pools, self._state.pools)
        if self._state.step is not None:
            self._state.step.pools_replaced = True

    def _settle(self) -> None:
        """Write what an open step's handles put off, if it is this thread's step."""
        step = cast("StepState | None", self._state.step)
        if step is not None and step.owner() is owner():
            step.context.settle()

    def asarray(self, array: Any) -> Any:
        """A NumPy array (bf16 as ml_dtypes) as the backend's array on its device; inverse of ``kvcore.to_numpy``."""
        return self.ops.asarray(array)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self._state.pools.nbytes

    @property
    def free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self._state.manager.free_slots

    @property
    def free_blocks(self) -> int:
        """Blocks that steps can still take."""
        return self._state.manager.free_blocks

    @property
    def block_statistics(self) -> BlockStatistics:
        """Blocks taken, dropped and evicted so far, and key look-ups of prefix reuse that hit and missed."""
        return self._state.manager.blocks.statistics

    @property
    def requests(self) -> tuple[Request, ...]:
        """Live requests in order of admission."""
        return self._state.manager.requests

    @property
    def turn_timeout(self) -> float | None:
        """Seconds for which a verb waits for the end of another thread's step; None, as at first, has none."""
        return self._state.turn_timeout

    @turn_timeout.setter
    def turn_timeout(self, seconds: float | None) -> None:
        self._state.turn_timeout = seconds

    def admit(
        self, tokens: TokenIds | None = None, *, salt: str | None = None, reuse: SupportsIndex | None = None
    ) -> Request:
        """Admit a request: it gets a clean slot; blocks are taken by its steps.

        Args:
            tokens: the prompt's token ids, for prefix reuse. A step of the request may then say a number instead of
                ids: it stands for the prompt's next ids as far as the prompt goes; ``truncate`` forgets them beyond its
                length.
            salt: prefixes are shared among requests of the same salt only, so that nobody learns from a hit what
                others asked. It stays with the request, its forks, exports and snapshots.
            reuse: most of the prompt's tokens to take over, where requests are to start equally long; None: all that
                can be, but for the last.

        Raises:
            OutOfSlots: ``max_requests`` requests are live. ShapeError: tokens are not ids, the salt is no text, or
            ``reuse`` is no count.

        Example:
            >>> prompt = [1, 2, 3, 4, 5, 6]
            >>> first = cache.admit(prompt)
            >>> run({first: 6})  # a number: the prompt's next ids
            >>> second = cache.admit(prompt)
            >>> second.cached_tokens  # a whole block of four
            4
            >>> run({second: 2})
            >>> cache.release(first), cache.release(second)
            (None, None)
        """
        ids = [] if tokens is None else token_ids(tokens, "admit: tokens")
        salt = check_salt(salt, "admit: salt")
        most = max(len(ids) - 1, 0) if reuse is None else as_count(reuse)
        if most is None:
            raise ShapeError(got=reuse, where="admit: reuse", allowed="a number of tokens, or None")
        return self._admit(ids, salt, min(most, len(ids) - 1))

    @verb("admit", in_step=True)
    def _admit(self, ids: list[int], salt: str | None, reuse: int) -> Request:
        request, place = self._state.admit(salt)
        place.prompt = ids
        try:
            hit = self._state.prefix.find(ids, limit=reuse, salt=salt)
            if hit.length:
                self._state.take_prefix(request, place, hit, ids)
        except BaseException:
            self._state.free(place)
            raise
        self._state.manager.adopt(request, place)
        self._state.prefix.publish(place)
        return request

    @verb("step")
    def step(
        self,
        tokens: Mapping[Request, Tokens],
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
        *,
        left_padding: Mapping[Request, int] | None = None,
    ) -> "Step[Cache]":
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

        Example:
            >>> first, second = cache.admit(), cache.admit()
            >>> with cache.step({first: 3, second: 1}) as step:
            ...     rows = np.ones((4, 1, 4), np.float32)
            ...     step.layer(0).append_kv(rows, rows)
            >>> first.length, second.length
            (3, 1)
            >>> cache.release(first), cache.release(second)
            (None, None)
        """
        held, manager = self._state, self._state.manager
        asked = as_mapping(tokens, "step")
        if held.canary is not None:
            held.canary.check_places(asked, "step")
        opening = manager.read(asked)
        if left_padding is not None:
            padding = left_padding_of(self.spec, opening.requests, left_padding)
        else:
            padding = manager.unseen(opening.requests) if held.prefix.policy == "approximate" else None
        grants = manager.grow(opening)
        try:
            numbers = held.numbers_of(opening, padding)
            index = held.index_of(numbers, pad_tokens, pad_requests)
            held.prepare_blocks(grants)
            if held.canary is not None:
                held.pools = held.canary.opened(held.pools, opening.requests, numbers, opening.blocks, index)
            state = StepState(held, opening, numbers, index)
            step: Step[Cache] = Step(self, state)
        except BaseException:
            manager.shrink(grants)
            raise
        held.step = state
        return step

    @verb("truncate")
    def truncate(self, request: Request, length: int) -> None:
        """Shorten a request to ``length`` tokens, exactly, for every component; blocks beyond it are freed.

        Raises:
            RollbackError: ``length`` is out of range, or a ring has overwritten rows that would be needed.
            RequestError: stale or foreign. StepError: a step is open.

        Example:
            >>> request = cache.admit()
            >>> run({request: 6})  # four tokens and two drafts
            >>> cache.truncate(request, 4)
            >>> request.length, len(request.blocks)
            (4, 1)
            >>> cache.release(request)
        """
        self._state.poison([], self._state.manager.truncate(self._state.manager.check(request), length))

    @verb("release")
    def release(self, request: Request) -> None:
        """End a request: its slot and blocks become free.

        Raises:
            RequestError: already released, or foreign. StepError: a step is open.

        Example:
            >>> request = cache.admit()
            >>> cache.release(request)
            >>> request.length
            Traceback (most recent call last):
                ...
            kvcore.errors.RequestError: ...
        """
        place = self._state.manager.place_of(self._state.manager.check(request, lost=True))
        self._state.poison([place.slot], self._state.manager.release(request))

    @verb("fork")
    def fork(self, request: Request) -> Request:
        """A second request with the same history: blocks are shared until one of them writes, the slot is copied.

        Raises:
            OutOfSlots: none is free. RequestError: stale or foreign. StepError: a step is open.

        Example:
            >>> request = cache.admit()
            >>> run({request: 6})
            >>> beam = cache.fork(request)
            >>> run({beam: 1})  # the shared block is copied before it is written to
            >>> request.blocks[0] == beam.blocks[0], request.blocks[1] == beam.blocks[1]
            (True, False)
            >>> cache.release(request), cache.release(beam)
            (None, None)
        """
        return self._fork(request)

    def _fork(self, request: Request) -> Request:
        source = self._state.manager.place(request)
        self._state.manager.check_near(request)
        fork, place = self._state.manager.fork(source)
        try:
            slots = [self._state.integers([slot]) for slot in (source.slot, place.slot)]
            self._state.pools = self._state.ops.copy_slots(self._state.pools, *slots)
        except BaseException:
            self._state.manager.discard(place)
            raise
        self._state.manager.adopt(fork, place)
        return fork

    @verb("checkpoint")
    def checkpoint(self, request: Request) -> None:
        """Make the request's present length a semantic point: later prompts that start with its tokens can begin there.

        Raises:
            RequestError: stale, foreign, its token ids are not known, or a layer did not get all of its tokens.
            StepError: a step is open. SpecError: the cache was created with ``prefix="off"``.

        Example:
            >>> request = cache.admit([7, 8, 9])
            >>> run({request: 3})
            >>> cache.checkpoint(request)  # in the middle of a block
            >>> later = cache.admit([7, 8, 9, 10])
            >>> later.cached_tokens
            3
            >>> cache.release(request), cache.release(later)
            (None, None)
        """
        place = self._state.manager.place(request)
        if not self._state.prefix.on:
            raise SpecError(got="prefix='off'", where="checkpoint", allowed="another policy")
        if place.tokens is None:
            raise RequestError(
                got=f"request {request.id}, token ids unknown",
                where="checkpoint",
                allowed="a request whose ids were given to admit or to its steps",
                hint="Give the prompt's ids to admit; beyond it, open steps with {request: ids}, not numbers.",
            )
        if not place.shares:
            raise RequestError(
                got=f"request {request.id}, which was imported under no salt or is older than a reset",
                where="checkpoint",
                allowed="a request whose prefixes may be found",
                hint="Say salt= to import_request.",
            )
        if max(place.length, place.stored) > place.complete:
            raise RequestError(
                got=f"request {request.id}, {place.complete} tokens in every layer and {place.length} in some",
                where="checkpoint",
                allowed="a request whose layers got all of its tokens",
            )
        if place.length:
            state = state_at(self._state.ops, self._state.pools, self._state.row(request), place.length, {})
            self._state.prefix.keep(place, place.length, state)

    def restorable(self, tokens: TokenIds, n: SupportsIndex | None = None, *, salt: str | None = None) -> Restorable:
        """How much of a prompt's first ``n`` tokens (None: all) can be taken over: (length, replay, exact).

        Args:
            salt: as for ``admit``.

        Raises:
            ShapeError: tokens are not ids, n is out of range, or the salt is no text.

        Example:
            >>> request = cache.admit([20, 21, 22, 23, 24])
            >>> run({request: 5})
            >>> cache.restorable([20, 21, 22, 23, 99])
            Restorable(length=4, replay=0, exact=True)
            >>> cache.release(request)
        """
        ids = token_ids(tokens, "restorable: tokens")
        salt = check_salt(salt, "restorable: salt")
        most = len(ids) if n is None else as_count(n)
        if most is None or most > len(ids):
            raise ShapeError(got=n, where="restorable: n", allowed=f"0 to {len(ids)}, or None")
        return self._restorable(ids[:most], salt)

    @verb("restorable", in_step=True)
    def _restorable(self, ids: list[int], salt: str | None) -> Restorable:
        hit = self._state.prefix.find(ids, limit=len(ids), salt=salt)
        return Restorable(hit.stored, max(0, hit.stored - hit.length), hit.exact)

    def fits(self, tokens: Tokens, new_tokens: SupportsIndex = 0, *, salt: str | None = None) -> bool:
        """Whether a prompt could be admitted and stepped through now: a slot is free, and as many blocks as it needs.

        Args:
            tokens: the prompt's ids, whose blocks are not needed where prefix reuse has them; or how many there are.
            new_tokens: tokens to be generated after it.
            salt: as for ``admit``.

        Raises:
            ShapeError: tokens are neither ids nor a count, ``new_tokens`` is no count, or the salt is no text.

        Example:
            >>> cache.fits(200, new_tokens=56), cache.fits(200, new_tokens=57)
            (True, False)
        """
        asked = _asked("fits", tokens, new_tokens, salt)
        return self.exclusive("fits", lambda state: state.fits(*asked), in_step=True)

    def blocks_needed(self, tokens: Tokens, new_tokens: SupportsIndex = 0, *, salt: str | None = None) -> int:
        """How many of ``free_blocks`` a prompt would take now, to be admitted and stepped through.

        Fewer than ``cache.plan.blocks_for(n)``, which says how many blocks n tokens hold, where live requests hold some
        of them already. For schedulers that keep blocks back for those that run.

        Args:
            tokens: as for ``fits``.
            new_tokens: as for ``fits``.
            salt: as for ``admit``.

        Raises:
            ShapeError: as ``fits``.

        Example:
            >>> request = cache.admit([1, 2, 3, 4, 5])
            >>> run({request: 5})
            >>> cache.blocks_needed([1, 2, 3, 4, 6], new_tokens=4), cache.blocks_needed(5, new_tokens=4)
            (2, 3)
            >>> cache.release(request)
        """
        asked = _asked("blocks_needed", tokens, new_tokens, salt)
        return self.exclusive("blocks_needed", lambda state: state.blocks_needed(*asked), in_step=True)

    @verb("reset_prefix_cache")
    def reset_prefix_cache(self) -> None:
        """Forget every published prefix and checkpoint, as after an update of the model's weights.

        Live requests go on, but what they hold was computed before: neither it nor what follows from it is found again.
        What is admitted from now on is published as before.

        Raises:
            StepError: a step is open.
        """
        self._state.poison([], self._state.prefix.reset())

    @verb("export_request")
    def export_request(self, request: Request, *, checkpoints: bool = True) -> bytes:
        """All that a request holds, as one self-contained blob: a finished copy that any backend can import.

        Args:
            request: a live one.
            checkpoints: whether those of its tokens go with it, so that prompts find there what they find here. Each
                is as large as the request's rings: under ``prefix="full"`` one for every block.

        Raises:
            RequestError: stale, foreign, or still replaying the tokens of a prefix hit. StepError: a step is open.

        Example:
            >>> request = cache.admit()
            >>> run({request: 6})
            >>> blob = cache.export_request(request)
            >>> moved = cache.import_request(blob)  # here, or in a cache of any backend
            >>> cache.digest([request]) == cache.digest([moved])
            True
            >>> cache.release(request), cache.release(moved)
            (None, None)
        """
        return blobs.export(self._state, self._state.manager.check(request), checkpoints=checkpoints)

    @verb("import_request")
    def import_request(
        self, blob: bytes, into: Request | None = None, *, salt: str | None = None, convert: bool = False
    ) -> Request:
        """Take in an exported request; generation goes on where it was.

        Digests tell damage, not deceit: whoever made the blob may have written any rows beside any ids. So it is you
        who says whom its prefixes may serve; the blob's own salt counts for nothing.

        Args:
            blob: from ``export_request`` of a cache with the same spec, on any backend.
            into: a request without tokens to fill; None admits one.
            salt: as for ``admit``: prefixes of the request, and of what follows it, may be found by requests of this
                salt. None: they are not published. With ``into`` it is that request's own salt.
            convert: take in a request of a spec that differs in formats alone, its rows coded anew; ``converted`` of
                the request then says what from, in what is exported of it too, and others never find its prefixes.

        Raises:
            SnapshotError: the blob is damaged or of another spec (the first difference is named).
            OutOfSlots, OutOfBlocks: no room. ShapeError: the salt is no text. RequestError: ``into`` is stale, foreign,
            not empty or of another salt. Nothing is changed.
        """
        salt = check_salt(salt, "import_request: salt")
        return blobs.import_(self._state, blob, into, salt, convert=convert)

    def save(
        self, path: str | PathLike[str], requests: Sequence[Request] | None = None, *, checkpoints: bool = True
    ) -> None:
        """Write a verified snapshot of some or all requests; the file appears whole or not at all.

        Args:
            path: of the file.
            requests: in the order wanted; None for all live ones.
            checkpoints: as for ``export_request``.

        Raises:
            RequestError: stale, foreign, or still replaying a prefix hit. StepError: a step is open.
            OSError: the disk refused; a file of that name is as it was, or the new one, whole.
            SnapshotError: a layer has a component of outside code, which no file's spec can say.

        Example:
            >>> import tempfile
            >>> request = cache.admit()
            >>> run({request: 6})
            >>> folder = tempfile.TemporaryDirectory()
            >>> cache.save(folder.name + "/requests.kv")
            >>> loaded = kvcore.load(folder.name + "/requests.kv", backend="reference")
            >>> loaded.digest() == cache.digest()
            True
            >>> cache.release(request)
            >>> folder.cleanup()
        """
        # The bytes are a finished copy: others need not wait for the disk.
        snapshot.write(path, self._snapshot(requests, checkpoints))

    @verb("save")
    def _snapshot(self, requests: Sequence[Request] | None, checkpoints: bool) -> list[bytes | memoryview]:
        chosen = [self._state.manager.check(request) for request in self._state.manager.chosen(requests, "save")]
        return snapshot.to_parts(self._state, chosen, checkpoints=checkpoints)

    def digest(self, requests: Sequence[Request] | None = None) -> int:
        """One number for what the requests hold: equal for any slots, blocks, layouts and backends.

        Args:
            requests: in the order that counts; None for all live ones in order of admission.
        """
        wanted = self._state.manager.chosen(requests, "digest")
        return digest.combine(self.exclusive("digest", lambda state: state.digest_lanes(wanted)))

    def faults(self, requests: Sequence[Request] | None = None) -> tuple[Fault, ...]:
        """What is not as it was written: sampled rows, slots, lengths and blocks of some requests; of all, for None.

        Looks now, and waits for the device; what steps found there and nobody was told of yet is among it. Which rows
        are sampled ``create_cache`` says with ``canary``.

        Raises:
            SpecError: the cache was created without ``canary``. RequestError: stale or foreign. StepError: a step is
            open.

        Example:
            >>> watched = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=64, canary=True)
            >>> request = watched.admit()
            >>> with watched.step({request: 20}) as step:
            ...     rows = np.ones((20, 1, 4), np.float32)
            ...     step.layer(0).append_kv(rows, rows)
            >>> watched.faults()
            ()
            >>> watched.pools["0.kv.key_page"][request.blocks[4], 3] ^= 1  # a bit of token 16's key
            >>> print(*watched.faults())
            layer 0, kv, position 16 of request 0
        """
        return self.exclusive("faults", lambda state: state.faults(requests))

    def exclusive(self, verb: str, act: Callable[[CacheState], R], *, in_step: bool = False) -> R:
        """Do something with what the cache holds, alone, as its own verbs do: for what moves requests in other ways.

        Args:
            verb: its name, for messages.
            act: what to do. An error of kvcore's own says that it changed nothing.
            in_step: whether the thread that has a step open may do it.

        Raises:
            StepError: a step is open.
        """
        return self._state.take_turn(verb, functools.partial(act, self._state), in_step=in_step)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, to ``pickle`` and ``copy``: requests are alive in one cache, and pools belong to a device."""
        raise SnapshotError(
            got=f"pickle or copy of a {type(self).__name__}",
            where="cache",
            allowed="save(path) and kvcore.load(path), or export_request and import_request into a cache of its own",
        )

    def __repr__(self) -> str:
        live = self.plan.slots - self.free_slots
        return f"Cache({self.backend.name} on {self.ops.device}: {live} of {self.plan.slots} requests, {self.plan})"
