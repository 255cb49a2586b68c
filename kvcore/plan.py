"""From a spec and a budget to blocks, slots and bytes: integers only, exact to the byte.

Two things scale a cache and nothing else: slots grow with requests, blocks grow with history. A plan lists one region
for every stream of rows that a layer owns; pools are allocated from the regions and every verb addresses through them.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from kvcore.counts import check_count
from kvcore.errors import OutOfBlocks, SpecError
from kvcore.foreign import printable
from kvcore.spec.component import Component, Growth
from kvcore.spec.formats import CHECK_WORD, Format
from kvcore.spec.layout import BY_HEAD, LAYOUTS, BlockLayout, block_layout
from kvcore.spec.model import TAIL_OF, CacheSpec
from kvcore.spec.sizes import bytes_per_token as bytes_per_token  # of plans, too, as users see them
from kvcore.spec.sizes import logical_bytes as logical_bytes

MOST_SLOTS = (1 << 31) - 1
"""Numbers of slots are int32 in a step's index."""

MOST_SAMPLE = 1 << 30
"""Of rows, one in which has a check word: numbers of rows, rounded up to that, are int32."""


class Region(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The pool of one stream of rows.

    Attributes:
        layer: number of the layer that owns it.
        role: the component's role.
        part: ``""``, or ``key`` / ``value``.
        format: of one row, sized.
        heads: rows stored for every position or entry.
        growth: ``slot`` or ``block``: what a unit of the pool is.
        rows: positions or entries that one unit holds.
        layout: how a unit's rows are laid out.
        copies: how often a unit holds its rows, one after the other: 2 where a ring is to be read in one run.
        tokens: positions from one row to the next.
    """

    layer: int
    role: str
    part: str
    format: Format
    heads: int
    growth: Growth
    rows: int
    layout: str
    copies: int = 1
    tokens: int = 1

    @cached_property
    def places(self) -> int:
        """Rows that a unit has room for; row r lies at r, r + rows, … of them, and every copy holds the same."""
        return self.rows * self.copies

    @cached_property
    def unit(self) -> BlockLayout:
        """Layout of one unit (a slot's ring, or a block): ``places * heads`` format rows."""
        return block_layout(self.format, self.places * self.heads, self.layout)

    @cached_property
    def steps(self) -> tuple[int, int]:
        """Format rows of a unit from a row to the next, and from a head to the next: head by head, or side by side."""
        return (1, self.places) if self.layout == BY_HEAD else (self.heads, 1)

    @property
    def even(self) -> bool:
        """Whether ``steps`` say where all fields lie: rows and heads evenly, and the bytes of a field side by side."""
        return True

    @cached_property
    def buffers(self) -> dict[str, tuple[str, int]]:
        """Buffer of the layout -> (key in the pools, bytes of a unit)."""
        part = f"{self.part}_" if self.part else ""
        return {name: (f"{self.layer}.{self.role}.{part}{name}", size) for name, size in self.unit.buffers}


class RingKind(NamedTuple):
    """Rings of the same component and as many rows, which a step overwrites alike.

    Attributes:
        component: what they hold.
        rows: of each.
        rings: (layer, role) of all of them.
    """

    component: Component
    rows: int
    rings: tuple[tuple[int, str], ...]


class Watched(NamedTuple):
    """Rows of which a sample has check words.

    Attributes:
        layer, role, component: whose pool it is.
        regions: the rows, part by part.
        words: their check words, in the same slots or blocks: that of row r is row ``r // stride`` there.
        stride: from a row with a word to the next; 1 where blocks are no multiples of the sample, which then leaves
            words unused.
        kind: number of all that are of an equal component and as many rows: alive, and written, alike.
    """

    layer: int
    role: str
    component: Component
    regions: tuple[Region, ...]
    words: Region
    stride: int
    kind: int


class LayerPlan:
    """One layer of a plan by role: what a verb must know of it, looked up once.

    Attributes:
        number: of the layer.
        regions: role -> the regions of its parts, its own or those that it shares.
        over_tokens: keys or values are in a format over tokens, and those of the open group in a ring.
        memo: what others worked out of the layer, once.
    """

    def __init__(
        self, number: int, components: Mapping[str, Component], regions: Mapping[str, tuple[Region, ...]]
    ) -> None:
        self.number = number
        self.regions = regions
        self.over_tokens = "kv_tail" in regions
        self.memo: dict[Any, Any] = {}
        self._components = components
        # What has no global scale is not scaled.
        self._scales: dict[str, float] = {
            role: getattr(component, "global_scale", 1.0) for role, component in components.items()
        }

    def component(self, role: str) -> Any:
        """The layer's component of that role, or None."""
        return self._components.get(role)

    def tail_of(self, role: str) -> str:
        """The role whose rows are compressed into ``role``."""
        return TAIL_OF[role]

    def global_scale(self, role: str) -> float:
        """The component's global scale, 1 where it has none."""
        return self._scales[role]

    def pools_of(self, *roles: str) -> tuple[str, ...]:
        """Names in the pools of some roles' buffers; roles that the layer lacks have none."""
        return tuple(
            name for role in roles for region in self.regions.get(role, ()) for name, _ in region.buffers.values()
        )


class CachePlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """How much of everything a cache takes.

    Attributes:
        spec: what is planned.
        slots: requests that fit at once.
        blocks: blocks of the paged components, shared by all of a request's layers; 0 if the spec pages nothing.
        max_tokens: tokens that the pools hold for all requests together (for each, where nothing is paged), or None
            where nothing bounds them.
        max_draft_tokens: D, the drafts that every ring keeps room for.
        layout: ``packed``, ``planar``, ``tpu_tile`` or ``by_head``.
        regions: every pool, in canonical order.
        context: shards that history is spread over, page by page; each holds one page of every block, and all the
            rest of this plan is what one shard holds.
        max_request_tokens: tokens that one request may hold, or None where only the pools bound it; see ``longest``.
        canary: one row in so many has a check word, those whose numbers are multiples of it; 0: none has.
    """

    spec: CacheSpec
    slots: int
    blocks: int
    max_tokens: int | None
    max_draft_tokens: int
    layout: str
    regions: tuple[Region, ...]
    context: int = 1
    max_request_tokens: int | None = None
    canary: int = 0

    @cached_property
    def longest(self) -> int | None:
        """Tokens that one request can hold at most, or None where nothing bounds it."""
        return _least(self.max_request_tokens, self.max_tokens)

    @cached_property
    def max_blocks(self) -> int:
        """Blocks that one request can hold at most: the columns of every block table."""
        return self.blocks if self.longest is None else min(self.blocks, self.blocks_for(self.longest))

    @property
    def block_tokens(self) -> int:
        """Tokens of one block over all context shards: what requests take, share and publish."""
        return self.spec.block_tokens * self.context

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, padding included."""
        return sum(region.unit.nbytes for region in self.stored if region.growth == "slot")

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, padding included."""
        return sum(region.unit.nbytes for region in self.stored if region.growth == "block")

    @property
    def nbytes(self) -> int:
        """Bytes of all pools together."""
        return self.slots * self.slot_bytes + self.blocks * self.block_bytes

    @cached_property
    def rollback_tokens(self) -> int:
        """How far below the highest position ever written a request can be truncated once a ring has wrapped."""
        declared = [component.largest_drafts() for _, _, component in self.spec.components()]
        if all(drafts is None for drafts in declared):
            return self.max_draft_tokens
        longest = self.longest
        rings = [component.ring_rows(self.max_draft_tokens, longest) for _, _, component in self.spec.components()]
        spans = [component.span_within(longest) for _, _, component in self.spec.components()]
        return min(
            rows - span for rows, span in zip(rings, spans, strict=True) if rows is not None and span is not None
        )

    @cached_property
    def unwrapped(self) -> int | None:
        """Positions that the smallest ring can take before it overwrites any; None where there is no ring."""
        return min((region.rows for region in self.regions if region.growth == "slot"), default=None)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of ``tokens`` tokens holds."""
        return -(-tokens // self.block_tokens) if self.blocks else 0

    def units(self, region: Region) -> int:
        """Units of a region's pool: slots or blocks."""
        return self.slots if region.growth == "slot" else self.blocks

    def region(self, layer: int, role: str) -> tuple[Region, ...]:
        """The parts of a layer's own or shared pool of ``role``."""
        return self.layers[layer].regions[role]

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Every layer by role, main layers first: index by layer number."""
        own: dict[tuple[int, str], tuple[Region, ...]] = {}
        for region in self.regions:
            key = region.layer, region.role
            own[key] = (*own.get(key, ()), region)
        return tuple(
            LayerPlan(
                number,
                dict(layer.components()),
                {role: own[self.spec.owner(number, role), role] for role in layer.roles},
            )
            for number, layer in enumerate(self.spec.all_layers)
        )

    @cached_property
    def watched(self) -> tuple[Watched, ...]:
        """All pools of rows with what belongs to them of check words; none without ``canary``."""
        kinds: dict[tuple[Component, int], int] = {}
        return tuple(
            _watched(self.canary, layer, role, component, self.region(layer, role), kinds)
            for layer, role, component in self.spec.components()
            if component.shared_from is None and self.canary
        )

    @cached_property
    def stored(self) -> tuple[Region, ...]:
        """Everything that pools are allocated for, filled and copied by slots and blocks: rows, then check words."""
        return (*self.regions, *(watched.words for watched in self.watched))

    @cached_property
    def rings(self) -> tuple[tuple[RingKind, ...], tuple[RingKind, ...]]:
        """Of main layers and of draft layers, every kind of ring that they own."""
        found: tuple[dict[tuple[Component, int], list[tuple[int, str]]], ...] = {}, {}
        for layer, role, component in self.spec.components():
            if component.shared_from is None and component.span is not None:
                key = component, self.region(layer, role)[0].rows
                found[layer >= len(self.spec.layers)].setdefault(key, []).append((layer, role))
        main, draft = (tuple(RingKind(*key, rings=tuple(rings)) for key, rings in kinds.items()) for kinds in found)
        return main, draft

    @cached_property
    def ring_line(self) -> tuple[dict[tuple[int, str], int], int]:
        """Where a row of each ring lies in a line with one of every ring in slots, and bytes of that line.

        Rows begin on boundaries of 16 bytes.
        """
        places: dict[tuple[int, str], int] = {}
        size = 0
        for kinds in self.rings:
            for ring in (ring for kind in kinds for ring in kind.rings):
                regions = self.region(*ring)
                if all(region.growth == "slot" for region in regions):
                    places[ring] = size
                    size += -(-sum(region.heads * region.format.row for region in regions) // 16) * 16
        return places, size

    @property
    def undo_tokens(self) -> int:
        """Tokens of a decode step of all slots, drafts included: those whose rows have room in ``undo_bytes``."""
        return self.slots * (1 + self.max_draft_tokens)

    @property
    def undo_bytes(self) -> int:
        """Bytes beside the pools of what decode steps keep on a GPU until they end, to be undone.

        That is a row of every ring for each of ``undo_tokens``, written where the step takes the place of rows that a
        shorter request needs. Allocated once a step has to keep some. Steps of more tokens keep theirs until they end.
        """
        return self.undo_tokens * self.ring_line[1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools, and of what decode steps keep beside them: what a budget has to hold."""
        return self.nbytes + self.undo_bytes

    @cached_property
    def ring_sets(self) -> dict[tuple[bool, tuple[bool, ...]], tuple[tuple[int, str], ...]]:
        """(whether of draft layers, which of their kinds) -> the rings of these kinds, once somebody put them here."""
        return {}

    @cached_property
    def ring_phases(self) -> dict[bool, Any]:
        """Whether of draft layers -> ``Phases`` of their kinds, or None, once somebody put them here."""
        return {}

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """``main`` and ``draft`` -> numbers of such layers; without those that keep nothing, and get nothing."""
        main, keeping = len(self.spec.layers), [n for n, layer in enumerate(self.spec.all_layers) if layer.roles]
        return {"main": tuple(n for n in keeping if n < main), "draft": tuple(n for n in keeping if n >= main)}

    @cached_property
    def kinds(self) -> dict[tuple[int, str], int]:
        """(layer, role) -> a number that components of one kind, in pools of so many rows a unit, have in common."""
        numbers: dict[tuple[Component, int], int] = {}
        return {
            (layer, role): numbers.setdefault((component, self.region(layer, role)[0].rows), len(numbers))
            for layer, role, component in self.spec.components()
        }

    def __repr__(self) -> str:
        name, blocks = printable(self.spec.name) or "unnamed", f"{self.blocks} blocks × {self.block_tokens} tokens"
        return f"CachePlan({name}: {blocks}, {self.slots} slots, {self.nbytes / 2**30:.3f} GiB)"


def plan_cache(
    spec: CacheSpec,
    *,
    max_requests: int,
    max_tokens: int | None = None,
    budget_bytes: int | None = None,
    max_draft_tokens: int = 0,
    layout: str = "packed",
    context: int = 1,
    max_request_tokens: int | None = None,
    canary: int = 0,
) -> CachePlan:
    """Work out a cache that holds ``max_tokens``, or the largest one within ``budget_bytes``.

    Args:
        spec: what each layer holds.
        max_requests: slots, 1 or more.
        max_tokens: tokens that the paged pools hold over all requests (rounded up to whole blocks); also the longest
            request where a layer stores K-V contiguously per slot, unless ``max_request_tokens`` is less.
        budget_bytes: bytes for everything, ``undo_bytes`` among them; give this or ``max_tokens``, not both; neither
            where nothing is paged and ``max_request_tokens`` says all.
        max_draft_tokens: tokens that a rollback may undo after a ring has wrapped.
        layout: ``packed``, ``planar``, ``tpu_tile`` or ``by_head``.
        context: shards that history is spread over; bytes are those of one shard.
        max_request_tokens: the most tokens that one request can hold; None: no bound but the pools. No ring has more
            than ``min(window, max_request_tokens) + max_draft_tokens`` rows, unless the spec fixes them, no slot more
            rows, and no block table more columns, than such a request needs.
        canary: one row in so many gets a check word of four bytes beside the pools; 0: none.

    Raises:
        SpecError: an argument is out of range, or a declared ring is too small for ``max_draft_tokens``.
        OutOfBlocks: the budget does not hold the slots and one block (one token, where nothing is paged).

    Example:
        >>> from kvcore.plan import plan_cache
        >>> from kvcore.spec import presets
        >>> plan = plan_cache(presets.llama_3_8b(key_format="fp8_row"), max_requests=16, budget_bytes=8 << 30)
        >>> plan.max_tokens, plan.total_bytes <= 8 << 30
        (126976, True)
        >>> plan.blocks_for(1000), plan.block_tokens
        (4, 256)
    """
    _check_spec(spec)
    max_requests = check_count(SpecError, "max_requests", max_requests, 1)
    if max_requests > MOST_SLOTS:
        raise SpecError(got=max_requests, where="max_requests", allowed=f"1 to {MOST_SLOTS}")
    max_draft_tokens = check_count(SpecError, "max_draft_tokens", max_draft_tokens, 0)
    context = check_count(SpecError, "context", context, 1)
    if max_request_tokens is not None:
        max_request_tokens = check_count(SpecError, "max_request_tokens", max_request_tokens, 1)
    canary = check_count(SpecError, "canary", canary, 0)
    if canary > MOST_SAMPLE:
        raise SpecError(got=canary, where="canary", allowed=f"one row in how many: {MOST_SAMPLE} at most")
    if layout not in LAYOUTS:
        raise SpecError(got=layout, where="layout", allowed=", ".join(LAYOUTS))
    _check_drafts(spec, max_draft_tokens)
    paged = any(component.growth == "block" for _, _, component in spec.components())
    bounded = any(_is_bounded(component) for _, _, component in spec.components())
    if bounded and not paged and max_tokens is budget_bytes is None:
        # Contiguous rows need to know how long a request gets, and nothing else.
        max_tokens = max_request_tokens
    if (max_tokens is None) == (budget_bytes is None) and (bounded or max_tokens is not None):
        raise SpecError(
            got=f"max_tokens={max_tokens}, budget_bytes={budget_bytes}",
            where="max_tokens, budget_bytes",
            allowed="one of the two",
        )

    block_tokens = spec.block_tokens * context

    def plan(blocks: int, tokens: int | None) -> CachePlan:
        tokens = tokens if bounded else None
        return CachePlan(
            spec=spec,
            slots=max_requests,
            blocks=blocks if paged else 0,
            max_tokens=tokens,
            max_draft_tokens=max_draft_tokens,
            layout=layout,
            regions=_regions(spec, tokens, max_request_tokens, max_draft_tokens, layout),
            context=context,
            max_request_tokens=max_request_tokens,
            canary=canary,
        )

    if max_tokens is not None:
        max_tokens = check_count(SpecError, "max_tokens", max_tokens, 1)
        blocks = -(-max_tokens // block_tokens)
        return plan(blocks, blocks * block_tokens if paged else max_tokens)
    if budget_bytes is None:
        return plan(0, None)
    budget_bytes = check_count(SpecError, "budget_bytes", budget_bytes, 1)
    if not bounded:
        return _checked(plan(0, None), budget_bytes, "")
    # What is not paged grows token by token.
    unit, name = (block_tokens, "block") if paged else (1, "token of each")
    return _largest(lambda count: plan(count, count * unit), budget_bytes, name)


def _largest(at: Callable[[int], CachePlan], budget: int, unit: str) -> CachePlan:
    """The plan of most units within the budget: ``nbytes`` grows with units, so bisect."""
    # Whatever the units, as much is kept beside the pools.
    room = budget - _checked(at(1), budget, f" and one {unit}").undo_bytes
    low, high = 1, 2
    while at(high).nbytes <= room:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).nbytes <= room else (low, middle)
    return at(low)


def _checked(smallest: CachePlan, budget: int, what: str) -> CachePlan:
    if smallest.total_bytes > budget:
        raise OutOfBlocks(
            got=f"{budget} bytes",
            where="budget_bytes",
            allowed=f"{smallest.total_bytes} bytes or more: {smallest.slots} slots{what}",
            hint="Lower max_requests or raise the budget.",
        )
    return smallest


def _regions(
    spec: CacheSpec, tokens: int | None, request_tokens: int | None, drafts: int, layout: str
) -> tuple[Region, ...]:
    longest = _least(tokens, request_tokens)
    return tuple(
        Region(
            layer=layer,
            role=role,
            part=part.name,
            format=part.format,
            heads=part.heads,
            growth=component.growth,
            rows=(rows := _unit_rows(spec, component, tokens, longest, drafts, layout)),
            layout=layout,
            copies=_copies(component, part.format, rows, longest, layout),
            tokens=component.tokens_per_row,
        )
        for layer, role, component in spec.components()
        if component.shared_from is None
        for part in component.parts
    )


def _watched(
    sample: int,
    layer: int,
    role: str,
    component: Component,
    regions: tuple[Region, ...],
    kinds: dict[tuple[Component, int], int],
) -> Watched:
    rows, growth = regions[0].rows, component.growth
    # Of the sampled rows of a ring, which are neighbours there, no two that can be alive share a place.
    stride = sample if growth == "slot" or rows % sample == 0 else 1
    words = Region(
        layer=layer,
        role=role,
        part="check",
        format=CHECK_WORD,
        heads=1,
        growth=growth,
        rows=-(-rows // stride),
        layout="planar",
    )
    kind = kinds.setdefault((component, rows), len(kinds))
    return Watched(layer, role, component, regions, words, stride, kind)


def _unit_rows(
    spec: CacheSpec, component: Component, tokens: int | None, longest: int | None, drafts: int, layout: str
) -> int:
    """Rows of a unit. No query sees more rows than a request of ``longest`` tokens holds: a ring has no more.

    A CPU's rings have a row to spare: a single token then overwrites none that must be there again after an abort.
    """
    if component.growth == "block":
        return spec.block_tokens // component.tokens_per_row
    rows = component.ring_rows(drafts, longest)
    if rows is None:
        assert longest is not None
        return longest
    rows += _read_by_head(component, layout) and (longest is None or rows < longest)
    return rows if tokens is None or component.declared_rows is not None else min(rows, tokens)


def _copies(component: Component, format: Format, rows: int, longest: int | None, layout: str) -> int:
    """Twice where a CPU may have views: of a ring of two copies any ``rows`` neighbouring positions are one run.

    Of rows that must be decoded there are none, and a ring that no request can fill does not wrap.
    """
    wraps = component.span is not None and (longest is None or rows < longest)
    viewed = _read_by_head(component, layout) and block_layout(format, rows, layout).supports_views
    return 2 if viewed and wraps else 1


def _read_by_head(component: Component, layout: str) -> bool:
    """Whether a CPU reads the component head by head."""
    return layout == BY_HEAD and component.headed


def _is_bounded(component: Component) -> bool:
    """True if the component's pool limits how long a request can be."""
    return component.growth == "block" or component.span is None


def _least(*bounds: int | None) -> int | None:
    """The smallest of the bounds that there are, None where there is none."""
    return min((bound for bound in bounds if bound is not None), default=None)


def _check_spec(spec: object) -> None:
    if not isinstance(spec, CacheSpec):
        raise SpecError(got=spec, where="spec", allowed="a CacheSpec", hint="kvcore.spec.presets has ready-made ones.")


def _check_drafts(spec: CacheSpec, drafts: int) -> None:
    for layer, role, component in spec.components():
        largest = component.largest_drafts()
        if largest is not None and drafts > largest:
            raise SpecError(
                got=drafts,
                where="max_draft_tokens",
                allowed=f"0 to {largest}: {spec.path(layer)}.{role}.rows is {component.declared_rows}",
                hint="Leave rows out to have the ring sized for max_draft_tokens.",
            )
