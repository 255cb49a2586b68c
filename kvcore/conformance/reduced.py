"""A layer cut down to what one verb needs, in a small cache of its own.

Checks run on such layers, not on the whole spec, so that a check costs the same for a model of 61 layers as for a tiny
one, and equal parts of different layers are checked once. The layer under test is the second of two, so that a verb
that touches another layer is seen.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from kvcore.conformance.shapes import SHAPES, TARGET, Shape, Sizes
from kvcore.conformance.verb import Verb
from kvcore.plan import CachePlan, plan_cache
from kvcore.spec import DERIVED, CacheSpec, Component, LayerSpec

SLOTS = 6
"""Slots of such a cache: more than any shape has requests; the last one is never used."""

DRAFTS = 2


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """One layer reduced to some roles, twice, as a spec.

    Attributes:
        spec: two layers; ``TARGET`` is under test and reads the other one's pools if it shares.
        label: second part of a check's id: the formats and figures of the named roles.
    """

    spec: CacheSpec
    label: str

    @property
    def layer(self) -> LayerSpec:
        """The layer under test."""
        return self.spec.layers[TARGET]


def reduced_layers(spec: CacheSpec, verb: Verb) -> Iterator[Reduced]:
    """The distinct reduced layers of a spec for one verb, in order of the layers."""
    seen: set[CacheSpec] = set()
    labels: dict[str, int] = {}
    for layer in spec.all_layers:
        wanted = {DERIVED.get(role, role) for role in verb.roles}
        kept = {role: component for role, component in layer.components() if role in wanted and role not in DERIVED}
        found = kept | {role: getattr(layer, role) for role in layer.roles if DERIVED.get(role) in kept}
        shares = any(component.shared_from is not None for component in kept.values())
        if any(role not in found for role in verb.needs) or any(role in layer.roles for role in verb.lacks):
            continue
        # A writer has no business in a pool that belongs to another layer.
        if verb.writes and shares:
            continue
        small = _two_layers(type(layer), kept, spec.block_tokens)
        if small in seen:
            continue
        seen.add(small)
        label = "+".join(found[role].label(role) for role in verb.named or (verb.role,) if role in found)
        # Layers may differ in what the label leaves out, a window's size say: number them in order.
        labels[label] = labels.get(label, 0) + 1
        yield Reduced(spec=small, label=label if labels[label] == 1 else f"{label}.{labels[label]}")


def sizes(reduced: Reduced, role: str) -> Sizes:
    """What the shape classes of a check of ``role`` are relative to."""
    component: Component = getattr(reduced.layer, role)
    block = reduced.spec.block_tokens
    rows = component.ring_rows(drafts(reduced.spec))
    ratio = max(other.tokens_per_row for _, other in reduced.layer.components())
    return Sizes(full=block if rows is None else rows, ratio=ratio, block=block)


@cache
def plan_of(spec: CacheSpec, full: int, layout: str, shapes: tuple[Shape, ...] = SHAPES) -> CachePlan:
    """A cache for each of some shape classes of a layer, with blocks to spare, but no columns in a block table."""
    ratio = max(component.tokens_per_row for _, _, component in spec.components())
    relative = Sizes(full=full, ratio=ratio, block=spec.block_tokens)
    ends = [[start + new for start, new in shape.requests(relative)] for shape in shapes]
    needed = max(sum(-(-end // spec.block_tokens) for end in shape) for shape in ends)
    return plan_cache(
        spec,
        max_requests=SLOTS,
        max_tokens=(needed + 2) * spec.block_tokens,
        max_draft_tokens=drafts(spec),
        # Rings are no smaller for it.
        max_request_tokens=max(full, spec.block_tokens, *(end for shape in ends for end in shape)),
        layout=layout,
    )


def drafts(spec: CacheSpec) -> int:
    """Draft tokens of such a cache: some, so that rings have spare rows, but no more than fixed rings allow."""
    declared = [component.largest_drafts() for _, _, component in spec.components()]
    return min([DRAFTS, *[limit for limit in declared if limit is not None]])


def _two_layers(kind: type[LayerSpec], kept: dict[str, Any], block_tokens: int) -> CacheSpec:
    owned = {
        role: component if component.shared_from is None else msgspec.structs.replace(component, share=None)
        for role, component in kept.items()
    }
    target = {
        role: component if component.shared_from is None else msgspec.structs.replace(component, share=0)
        for role, component in kept.items()
    }
    return CacheSpec(layers=(kind(**owned), kind(**target)), block_tokens=block_tokens)
