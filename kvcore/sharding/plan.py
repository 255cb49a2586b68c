"""A plan of shards: over which axes a cache is spread, who owns a row of it, and where the row lies there."""

from functools import cached_property
from math import prod
from typing import NamedTuple

import msgspec

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.sharding.heads import Heads
from kvcore.sharding.layers import Layers, stages
from kvcore.sharding.pages import Pages
from kvcore.spec import CacheSpec, LayerSpec

AXES = ("requests", "layers", "context", "heads")
"""Axes of a mesh of shards, slowest first: neighbours exchange most."""


class Canonical(NamedTuple):
    """A row by what it is: request, layer, role, row (position or entry) and head. Latent rows have one head, 0."""

    request: int
    layer: int
    role: str
    row: int
    head: int


class Local(NamedTuple):
    """The same row by where it lies: the rank that owns it, and request, layer, row and head as counted there."""

    rank: int
    request: int
    layer: int
    role: str
    row: int
    head: int


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Shards along every axis, in the order of ``AXES``."""

    requests: int = 1
    layers: int = 1
    context: int = 1
    heads: int = 1


class ShardPlan(Shape, frozen=True, kw_only=True, dict=True):
    """How a spec is spread: ``requests · layers · context · heads`` ranks, the last axis fastest.

    ``requests``: request n is on shard n mod N, whole. ``layers``: contiguous stages. ``context``: paged rows page by
    page in turn, everything else on every shard. ``heads``: K-V heads in groups, replicated where they do not divide.
    What every shard of an axis holds is owned by the first.

    Raises:
        SpecError: a number is not a count, or the spec cannot be spread like that; see ``check``.
    """

    spec: CacheSpec

    def __post_init__(self) -> None:
        """Refuse what cannot be spread."""
        for axis in AXES:
            msgspec.structs.force_setattr(self, axis, check_count(SpecError, axis, getattr(self, axis), 1))
        if self.heads > 1 or self.context > 1:
            self._check_over_channels()
        if self.heads > 1:
            self._check_heads()
        if self.context > 1:
            self._check_context()
        stages(self.spec, self.layers)

    @property
    def ranks(self) -> int:
        """Shards over all axes."""
        return prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shards along every axis, in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def stages(self) -> Layers:
        """Which layers are on which stage."""
        return stages(self.spec, self.layers)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """A rank's place along every axis."""
        found: list[int] = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """The rank at a place along every axis."""
        rank = 0
        for size, place in zip(self.shape, coordinate, strict=True):
            rank = rank * size + place
        return rank

    def pages(self, layer: int, role: str) -> Pages:
        """How the rows of a paged role go round the context shards; one shard where the role is on all of them."""
        component = getattr(self.spec.all_layers[layer], role)
        if component.sharding != "by_block":
            return Pages(1, self.spec.block_tokens)
        return Pages(self.context, self.spec.block_tokens // component.tokens_per_row)

    def parts(self, layer: int, role: str) -> tuple[Heads, ...]:
        """How the heads of every part of a role are grouped."""
        component = getattr(self.spec.all_layers[layer], role)
        return tuple(Heads(part.heads, self.heads if component.split_by_heads else 1) for part in component.parts)

    def local(self, at: Canonical, part: int = 0) -> Local:
        """Owner and place of a row (of its ``part``: 0 keys, 1 values)."""
        heads, pages = self.parts(at.layer, at.role)[part], self.pages(at.layer, at.role)
        owner = at.request % self.requests, self.stages.owner(at.layer), pages.owner(at.row), heads.owner(at.head)
        return Local(
            rank=self.rank(owner),
            request=at.request // self.requests,
            layer=self.stages.local(at.layer),
            role=at.role,
            row=pages.local(at.row),
            head=heads.local(at.head),
        )

    def canonical(self, at: Local, part: int = 0) -> Canonical:
        """What lies at a place: the inverse of ``local``; also for a replica's place, whose row others own."""
        requests, stage, context, heads = self.coordinate(at.rank)
        layer = self.stages.canonical(stage, at.layer)
        return Canonical(
            request=at.request * self.requests + requests,
            layer=layer,
            role=at.role,
            row=self.pages(layer, at.role).canonical(context, at.row)
            if self.pages(layer, at.role).shards > 1
            else at.row,
            head=self.parts(layer, at.role)[part].canonical(heads, at.head),
        )

    def local_spec(self, rank: int) -> CacheSpec:
        """What one rank's own cache holds: its stage's layers, with its group of heads."""
        _, stage, _, _ = self.coordinate(rank)
        main = len(self.spec.layers)
        layers = {number: self._local_layer(number) for number in self.stages.on(stage)}
        return msgspec.structs.replace(
            self.spec,
            layers=tuple(layer for number, layer in layers.items() if number < main),
            draft_layers=tuple(layer for number, layer in layers.items() if number >= main),
        )

    def _local_layer(self, number: int) -> LayerSpec:
        layer = self.spec.all_layers[number]
        changes: dict[str, object] = {}
        for role, component in layer.components():
            if component.shared_from is not None:
                changes[role] = msgspec.structs.replace(component, share=self.stages.local(component.shared_from))
            elif component.split_by_heads and self.heads > 1:
                changes[role] = component.with_heads(tuple(heads.per_shard for heads in self.parts(number, role)))
        return msgspec.structs.replace(layer, **changes)

    def _check_over_channels(self) -> None:
        for number, layer in enumerate(self.spec.all_layers):
            if layer.kv_tail is not None:
                raise SpecError(
                    got=f"heads={self.heads}, context={self.context}",
                    where=f"{self.spec.path(number)}.kv",
                    allowed="heads=1 and context=1 in a format over tokens",
                    hint="Spread such a model by requests or by layers.",
                )

    def _check_heads(self) -> None:
        for number, layer in enumerate(self.spec.all_layers):
            for role, component in layer.components():
                if not component.split_by_heads:
                    raise SpecError(
                        got=f"heads={self.heads}",
                        where=f"{self.spec.path(number)}.{role}",
                        allowed="heads=1: a latent row is one head for all queries",
                        hint="Spread such a model by requests or by context.",
                    )

    def _check_context(self) -> None:
        paged = [found for found in self.spec.components() if found[2].sharding == "by_block"]
        if not paged:
            raise SpecError(
                got=f"context={self.context}", where="spec", allowed="context=1: no component grows with history"
            )
        for number, role, component in paged:
            if component.sight is not None:
                raise SpecError(
                    got=f"context={self.context}",
                    where=f"{self.spec.path(number)}.{role}",
                    allowed="paged keys and values without window or chunk, or storage 'ring'",
                    hint="A ring is small, and is kept on every context shard.",
                )
