"""``adopt``: a cache whose pools are somebody else's tensors, and whose requests are given their blocks."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from kvcore.adoption.descriptor import Descriptor, IndexMap, check, region_plan
from kvcore.adoption.given import GivenManager, no_such_slot
from kvcore.adoption.maps import Index, read_maps
from kvcore.adoption.memory import device_of, framework, tensors_of
from kvcore.adoption.pages import Held, Pages, write
from kvcore.adoption.regions import Slots, foreign_plan, foreign_pools
from kvcore.adoption.tables import describe as described
from kvcore.arrays import to_numpy
from kvcore.cache.cache import Cache
from kvcore.cache.reuse import PrefixCache
from kvcore.cache.state import verb
from kvcore.counts import as_count, check_count
from kvcore.errors import BackendError, ShapeError
from kvcore.ops import Backend, Ops
from kvcore.ops.fused import created
from kvcore.plan import CachePlan
from kvcore.plugins import Needs, choose_backend
from kvcore.portable.record import RequestRecord
from kvcore.portable.rows import write_rows
from kvcore.requests.manager import Request
from kvcore.requests.tokens import check_salt
from kvcore.spec import CacheSpec
from kvcore.step import build_index

BACKENDS = {"numpy": "reference", "torch": "torch_triton"}


def describe(
    spec: CacheSpec, tensors: Any, layout: str | Mapping[str, str] | None = None, *, maps: Sequence[IndexMap] = ()
) -> Descriptor:
    """Where the rows of a spec lie in somebody's tensors.

    Args:
        spec: what a layer holds.
        tensors: as the layout's name says: one for every component in order of layers (a sequence, or a mapping in that
            order), pairs of them where keys and values are apart, two lists, or one tensor for all layers.
        layout: a name of ``LAYOUTS``, or one for each role, or one layer's (``"3.kv"``), behind ``rings`` or ``pages``
            for windows and tails, and the name of a map if they are looked up in one; None: the only one that has such
            shapes.
        maps: what the owner's maps are, which are given to ``adopt``.

    Raises:
        SpecError: several layouts have such shapes, or none; a map that is none.
        ShapeError: the tensors are not of the layout.
    """
    region_plan(spec, 1, 1)
    return described(spec, tensors_of(tensors), layout, maps)


def adopt(
    spec: CacheSpec,
    tensors: Any,
    *,
    layout: str | Mapping[str, str] | Descriptor | None = None,
    maps: Mapping[str, Any] | None = None,
    backend: str = "auto",
    max_requests: int = 256,
    max_draft_tokens: int = 0,
    check_rows: bool = False,
) -> "AdoptedCache":
    """A cache over paged tensors of somebody else's, which are not copied.

    What the tensors hold is read as it lies, and what steps, imports and rollbacks write is written there. Blocks are
    the owner's: requests are admitted with theirs (``admit(blocks=..., length=...)``); none is taken or freed.

    Args:
        spec: what a layer holds; its ``block_tokens`` are the owner's.
        tensors: as for ``describe``; NumPy arrays, torch tensors on the CPU or a CUDA device, or JAX arrays on the
            CPU, which are read and not written.
        layout: a name of ``LAYOUTS``, one for each role, or a ``Descriptor``; None: the only one of such shapes.
        maps: tensors of the descriptor's maps by name, which are read as they are whenever a request is admitted or
            written to: int32 or int64 ``[count]``, NumPy's or torch's.
        backend: the reference for NumPy's, torch_triton for torch's.
        max_requests: requests that can be live at once, and no more than there are rings.
        max_draft_tokens: tokens that a rollback may undo after a ring has wrapped.
        check_rows: refuse non-finite input and unfinished steps, as ``check`` of ``create_cache``.

    Raises:
        SpecError: a layout that several readings have; places that overlap, or lie beyond the tensors; a component in
            slots that is no ring; a map that is not given.
        ShapeError: tensors of other shapes or dtypes. BackendError: tensors elsewhere.

    Example:
        >>> import numpy as np
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=2, key_heads=2, key_dim=8, block_tokens=16, key_format="fp32")
        >>> engine = [np.zeros((2, 10, 16, 2, 8), np.float32) for _ in spec.layers]
        >>> cache = kvcore.adopt(spec, engine, layout="NL_X_TWO_NB_BS_NH_HS")
        >>> request = cache.admit(blocks=[7, 3], length=20)
        >>> request.length, request.blocks
        (20, (7, 3))
    """
    named = tensors_of(tensors)
    kind = framework(next(iter(named.values())).array)
    wanted = BACKENDS.get(kind, "reference")
    if backend not in ("auto", wanted):
        raise BackendError(got=backend, where="adopt: backend", allowed=f"{wanted}, for tensors of {kind}")
    device = device_of(named)
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise BackendError(
            got=f"tensors on {device}",
            where="adopt: tensors",
            allowed="tensors on the CPU or a CUDA device",
            hint="Copy rows with export_request and import_request.",
        )
    region_plan(spec, 1, 1)
    descriptor = layout if isinstance(layout, Descriptor) else described(spec, named, layout)
    blocks = check_count(ShapeError, "descriptor: blocks", descriptor.blocks, 1)
    requests = check_count(ShapeError, "adopt: max_requests", max_requests, 1)
    plan = region_plan(spec, blocks, requests, max_draft_tokens)
    stretches = check(plan, descriptor, {name: tensor.nbytes for name, tensor in named.items()})
    arrays = read_maps(descriptor.maps or (), maps or {})
    plan = foreign_plan(plan, stretches)
    pools = foreign_pools(plan, stretches, named)
    chosen = choose_backend(wanted, device, Needs.of(spec))
    ops: Any = created(chosen, plan, device=device)
    # The owner allocated them, and what lies between a slot's rows is not the slot's.
    pages = Pages(plan, stretches, named, descriptor.maps_by_name, arrays)
    slots = Slots(plan, stretches, named, pages.copy)
    ops.allocate, ops.reset_slots, ops.copy_slots = (lambda: pools), slots.reset, slots.copy
    said = next((one for one in descriptor.maps or () if one.of == "block"), None)
    index = None if said is None else Index(said, arrays[said.name], plan.block_tokens, plan.blocks)
    manager = GivenManager(plan, pages, index, sealed=any(tensor.sealed for tensor in named.values()))
    return AdoptedCache(plan, chosen, cast("Ops", ops), descriptor, manager, check=check_rows)


def _leave(slots: list[int], blocks: list[int]) -> None:
    """Poison nothing."""
    del slots, blocks


class AdoptedCache(Cache):
    """A cache over somebody else's blocks; see ``adopt``.

    Attributes:
        descriptor: where the rows lie.
    """

    def __init__(
        self,
        plan: CachePlan,
        backend: Backend,
        ops: Ops,
        descriptor: Descriptor,
        manager: GivenManager,
        *,
        check: bool = False,
    ) -> None:
        super().__init__(plan, backend, ops, check=check)
        self.descriptor = descriptor
        state = self._state
        state.manager = self._manager = manager
        state.follow = manager.pages.follow
        state.prefix = PrefixCache(plan.spec, "off", state.manager)
        # Bytes of blocks that nobody writes here are the owner's.
        state.poison = _leave

    def admit(
        self,
        tokens: Any = None,
        *,
        salt: str | None = None,
        blocks: Sequence[int] = (),
        pages: Mapping[str, Sequence[int]] | None = None,
        slot: int | None = None,
        length: int = 0,
    ) -> Request:
        """A request in blocks of the owner's, its ring of every component in rings, and pages.

        Args:
            tokens: not taken: nothing is shared by prefixes here.
            salt: as for ``Cache.admit``.
            blocks: all that it may use, in order of history.
            pages: tables of components in pages, by role (``"window"``) or for one layer (``"3.window"``): the page of
                the first tokens first, -1 for those that are gone.
            slot: a number of its own among live requests, which its rings have; None: any.
            length: tokens whose rows lie in the blocks, rings and pages already.

        Raises:
            ShapeError: blocks or pages that are none, or fewer blocks than ``length`` needs. OutOfBlocks: a page is
            missing. OutOfSlots: no slot, or not that one.
        """
        if tokens is not None:
            raise ShapeError(
                got="tokens", where="admit", allowed="blocks and a length: the owner's prefixes are its own"
            )
        given = self._blocks(blocks)
        count = as_count(length)
        if count is None or self.plan.blocks_for(count) > len(given):
            allowed = f"0 to {len(given) * self.plan.block_tokens}, what {len(given)} blocks hold"
            raise ShapeError(got=length, where="admit: length", allowed=allowed)
        wanted = self._slot(slot, "admit")
        salt = check_salt(salt, "admit: salt")
        held = self._manager.pages
        tables = held.read_tables(pages or {})
        owned = Held(tables, given, wanted)
        held.check(owned, 0, count, "admit: pages", writes=False)

        def take(state: Any) -> Request:
            manager = self._manager
            # What had left its rings is not known to be there.
            record = RequestRecord(length=count, floor=state.floor(count), tokens=None, salt=None, checkpoints=[])
            manager.look_up()
            manager.coming, manager.wanted, held.coming = manager.units(given), wanted, tables
            manager.coming_numbers = given
            try:
                content = held.content(owned, count)
                request: Request = state.restore(
                    record, lambda ops, pools, row: write_rows(ops, pools, row, content), salt=salt, shares=False
                )
            finally:
                manager.coming, manager.wanted, held.coming = (), None, None
                manager.coming_numbers = ()
            manager.given[request] = given
            held.add(request, tables)
            return request

        return self.exclusive("admit", take, in_step=True)

    def give(
        self, request: Request, blocks: Sequence[int] = (), pages: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """More blocks for a request, and more pages, behind those that it has."""
        more = self._blocks(blocks)
        tables = self._manager.pages.read_tables(pages or {})
        self.exclusive("give", lambda state: self._manager.give(state.manager.check(request), more, tables))

    @verb("fork")
    def fork(self, request: Request, *, slot: int | None = None) -> Request:
        """As ``Cache.fork``; the rows of its rings are copied within the owner's memory, too.

        Args:
            slot: as for ``admit``: whose rings are the fork's.

        Raises:
            ShapeError: rings are looked up by slots, and none is given. OutOfSlots: no slot, or not that one.
            OutOfBlocks: a map has no place of a ring. BackendError: nobody writes into the memory.
        """
        manager = self._manager
        manager.wanted = self._slot(slot, "fork")
        try:
            return self._fork(request)
        finally:
            manager.wanted = None

    @verb("truncate")
    def truncate(self, request: Request, length: int) -> None:
        """As ``Cache.truncate``; rings that the owner shifts along go back with it.

        Raises:
            OutOfBlocks: a map has no place of such a ring any more. ShapeError: a place that cannot be.
            BackendError: nobody writes into the memory.
        """
        manager = self._manager
        was = manager.place(request).length
        rows = manager.pages.behind(self._state, request, manager.shorter(request, length), was)
        if rows:
            manager.check_writable("truncate")
        write(rows)
        self._state.poison([], manager.truncate(request, length))

    def compare(self, request: Request, read: Callable[[int, str, int, int], Any], *, role: str | None = None) -> None:
        """Hold what is read here against what the owner reads: a wrong layout of the right shape shows in nothing else.

        Args:
            request: with rows that differ from each other.
            read: (layer, part, block, row of the block) -> the bytes of all heads of that row, an array of any dtype,
                as the owner's own code finds them; ``part`` is ``key``, ``value``, or empty. Of what is looked up in a
                map of tokens, the token's block and row.
            role: the only one that is compared; None: all in blocks, or looked up by tokens.

        Raises:
            ShapeError: naming the first row that differs.
        """
        state = self._state
        row = self.exclusive("compare", lambda held: held.row(request))
        for region in self.plan.regions:
            rows_of_block = region.rows
            if region.growth != "block":
                if not self._manager.pages.numbered(region.layer, region.role):
                    continue
                rows_of_block = self.plan.block_tokens
            if role not in (None, region.role):
                continue
            index = state.ops.index(build_index([row], max_blocks=self.plan.max_blocks))
            raw = state.ops.gather_rows(state.pools, region.layer, region.role, index)
            rows, positions = to_numpy(raw.rows)[0], to_numpy(raw.positions)[0]
            parts = self.plan.region(region.layer, region.role)
            first = sum(part.heads * part.format.row for part in parts[: parts.index(region)])
            size = region.heads * region.format.row
            step = self.plan.block_tokens // rows_of_block
            for at, position in enumerate(positions.tolist()):
                if position < 0:
                    continue
                number = position // step
                block, place = row.blocks[number // rows_of_block], number % rows_of_block
                theirs = np.ascontiguousarray(to_numpy(read(region.layer, region.part, block, place)))
                ours = rows[at, first : first + size].tobytes()
                if theirs.tobytes() != ours:
                    raise ShapeError(
                        got=f"other bytes of row {number}, block {block}",
                        where=f"layers[{region.layer}].{region.role} {region.part}".rstrip(),
                        allowed="what the owner reads there",
                        hint="The layout is another one of the same shape.",
                    )

    def _slot(self, slot: int | None, where: str) -> int | None:
        wanted = None if slot is None else check_count(ShapeError, f"{where}: slot", slot, 0)
        if wanted is not None and wanted >= self.plan.slots:
            raise no_such_slot(wanted, self.plan.slots)
        return wanted

    def _blocks(self, blocks: Sequence[int]) -> tuple[int, ...]:
        found = tuple(-1 if (count := as_count(block)) is None else count for block in blocks)
        index = self._manager.index
        limit = self.plan.blocks if index is None else index.said.count
        wrong = [block for block, count in zip(blocks, found, strict=True) if not 0 <= count < limit]
        if wrong or len(set(found)) < len(found):
            raise ShapeError(
                got=f"blocks {list(blocks)!r}", where="blocks", allowed=f"numbers below {limit}, each once"
            )
        return found
