"""Regions of a plan whose rows lie where a descriptor says, and their pools: views of somebody's bytes."""

from functools import cached_property
from math import gcd
from typing import Any

import msgspec

from kvcore.adoption.descriptor import Descriptor, Stretch, fields_of
from kvcore.adoption.memory import Tensor, bytes_at
from kvcore.errors import SpecError
from kvcore.plan import CachePlan, Region
from kvcore.pools import Pools
from kvcore.spec.layout import BlockLayout, Place


class ForeignRegion(Region, frozen=True, kw_only=True, dict=True):
    """A region whose fields lie in buffers of their own, at steps that somebody else chose.

    Attributes:
        fields: (field, bytes of it in a row, bytes of the block that hold it, its unit of steps).
        stepping: such units from a row to the next, and from a head to the next.
    """

    fields: tuple[tuple[str, int, int, int], ...]
    stepping: tuple[int, int]

    @cached_property
    def unit(self) -> BlockLayout:
        """Each field at the beginning of its buffer."""
        return BlockLayout(
            format=self.format,
            layout=self.layout,
            rows=self.places * self.heads,
            places=tuple(
                Place(field=name, buffer=name, base=0, stride=step, nbytes=nbytes)
                for name, nbytes, _, step in self.fields
            ),
            buffers=tuple((name, span) for name, _, span, _ in self.fields),
        )

    @cached_property
    def steps(self) -> tuple[int, int]:
        """As they were said."""
        return self.stepping


def foreign_plan(plan: CachePlan, stretches: dict[tuple[Any, ...], Stretch]) -> CachePlan:
    """The plan with its rows where the stretches are.

    Raises:
        SpecError: fields of one row step so differently that no address names all of them.
    """
    regions: list[Region] = []
    for region in plan.regions:
        own = [
            stretches[region.layer, region.role, region.part, field.name]
            for field in region.format.fields
            if field.name != "pad"
        ]
        stepping: set[tuple[int, int]] = set()
        fields: list[tuple[str, int, int, int]] = []
        for stretch in own:
            lines = stretch.lines
            token = lines.token if stretch.rows > 1 else stretch.nbytes
            step = gcd(token, lines.head) if region.heads > 1 else token
            stepping.add((token // step, lines.head // step if region.heads > 1 else 1))
            fields.append((lines.field, stretch.nbytes, stretch.span, step))
        if len(stepping) > 1:
            raise SpecError(
                got=f"fields of layers[{region.layer}].{region.role} in rows and heads of different order",
                where="descriptor",
                allowed="one order for all fields of a row",
            )
        regions.append(
            ForeignRegion(
                layer=region.layer,
                role=region.role,
                part=region.part,
                format=region.format,
                heads=region.heads,
                growth=region.growth,
                rows=region.rows,
                layout="foreign",
                fields=tuple(fields),
                stepping=stepping.pop(),
            )
        )
    return msgspec.structs.replace(plan, layout="foreign", regions=tuple(regions))


def foreign_pools(
    plan: CachePlan, descriptor: Descriptor, stretches: dict[tuple[Any, ...], Stretch], tensors: dict[str, Tensor]
) -> Pools:
    """Views [blocks, bytes of a block] of the tensors, for every buffer of a foreign plan."""
    arrays: dict[str, Any] = {}
    for region, field, _ in fields_of(plan):
        stretch = stretches[region.layer, region.role, region.part, field]
        name, span = region.buffers[field]
        lines = stretch.lines
        # A single block's step is never taken.
        step = max(lines.block, span) if descriptor.blocks == 1 else lines.block
        arrays[name] = bytes_at(tensors[lines.tensor], lines.offset, descriptor.blocks, step, span)
    return Pools(arrays)
