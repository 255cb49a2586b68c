"""Regions of a plan whose rows lie where a descriptor says, and their pools: views of somebody's bytes.

What is looked up in tables of pages, or in maps, has no region there: rings are the library's, see
``kvcore.adoption.pages``.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import zip_longest
from math import gcd
from typing import Any

import msgspec
import numpy as np

from kvcore.adoption.descriptor import Stretch, fields_of
from kvcore.adoption.memory import Tensor, bytes_at, zeros_like
from kvcore.arrays import to_numpy
from kvcore.plan import CachePlan, Region
from kvcore.pools import Pools, fresh_unit
from kvcore.spec.layout import FOREIGN, BlockLayout, Place, Steps


class ForeignRegion(Region, frozen=True, kw_only=True, dict=True):
    """A region whose fields lie in buffers of their own, at steps that somebody else chose.

    Attributes:
        fields: (field, bytes of it in a row, bytes of the block that hold it, its unit of steps).
        stepping: such units from a row to the next, and from a head to the next; where the fields of a row step alike.
        apart: how each field is stepped over, where they do not.
    """

    fields: tuple[tuple[str, int, int, int], ...]
    stepping: tuple[int, int]
    apart: tuple[Steps, ...] = ()

    @cached_property
    def unit(self) -> BlockLayout:
        """Each field at the beginning of its buffer."""
        return BlockLayout(
            format=self.format,
            layout=self.layout,
            rows=self.places * self.heads,
            places=tuple(
                Place(field=name, buffer=name, base=0, stride=step, nbytes=nbytes, steps=steps)
                for (name, nbytes, _, step), steps in zip_longest(self.fields, self.apart)
            ),
            buffers=tuple((name, span) for name, _, span, _ in self.fields),
        )

    @cached_property
    def steps(self) -> tuple[int, int]:
        """As they were said."""
        return self.stepping

    @property
    def even(self) -> bool:
        """Where the fields of a row step alike."""
        return not self.apart


def foreign_plan(plan: CachePlan, stretches: dict[tuple[Any, ...], Stretch]) -> CachePlan:
    """The plan with its rows where the stretches are."""
    regions: list[Region] = []
    for region in plan.regions:
        own = [
            stretches[region.layer, region.role, region.part, field.name]
            for field in region.format.fields
            if field.name != "pad"
        ]
        if not own[0].lines.in_place:
            regions.append(region)
            continue
        stepping: set[tuple[int, int]] = set()
        fields: list[tuple[str, int, int, int]] = []
        for stretch in own:
            lines = stretch.lines
            token = lines.token if stretch.rows > 1 else stretch.nbytes
            step = gcd(token, lines.head) if region.heads > 1 else token
            stepping.add((token // step, lines.head // step if region.heads > 1 else 1))
            fields.append((lines.field, stretch.nbytes, stretch.span, step))
        uneven = len(stepping) > 1 or any(stretch.uneven for stretch in own)
        regions.append(
            ForeignRegion(
                layer=region.layer,
                role=region.role,
                part=region.part,
                format=region.format,
                heads=region.heads,
                growth=region.growth,
                rows=own[0].rows,
                layout=FOREIGN,
                fields=tuple(fields),
                stepping=stepping.pop(),
                apart=tuple(stretch.steps for stretch in own) if uneven else (),
            )
        )
    return msgspec.structs.replace(plan, layout=FOREIGN, regions=tuple(regions))


def foreign_pools(plan: CachePlan, stretches: dict[tuple[Any, ...], Stretch], tensors: dict[str, Tensor]) -> Pools:
    """Views [units, bytes of a unit] of the tensors, of every buffer of a foreign plan; rings of our own else."""
    arrays: dict[str, Any] = {}
    for region, field, _ in fields_of(plan):
        stretch = stretches[region.layer, region.role, region.part, field]
        lines = stretch.lines
        tensor = tensors[lines.tensor]
        if not lines.in_place:
            for buffer, (name, size) in region.buffers.items():
                arrays[name] = zeros_like(tensor, (plan.units(region), size))
                _fill(arrays[name], fresh_unit(region, buffer))
            continue
        name, span = region.buffers[field]
        # A single unit's step is never taken.
        step = max(lines.block, span) if stretch.units == 1 else lines.block
        arrays[name] = bytes_at(tensor, lines.offset, (plan.units(region), span), (step, 1))
    return Pools(arrays)


def _fill(pool: Any, fresh: bytes | None) -> None:
    if fresh is not None:
        unit = np.frombuffer(fresh, np.uint8)
        pool[:] = unit if isinstance(pool, np.ndarray) else pool.new_tensor(unit)


def field_view(stretch: Stretch, tensor: Tensor) -> Any:
    """Bytes of a field in every row: [units, rows, heads, pieces, bytes] uint8, where they lie."""
    lines, heads, grain = stretch.lines, stretch.region.heads, stretch.grain
    shape = stretch.units, stretch.rows, heads, stretch.nbytes // grain, grain
    # What is never stepped over may have been said as nothing.
    said = zip((lines.block, lines.token, lines.head, lines.piece), shape, strict=False)
    steps = (step if count > 1 else stretch.nbytes for step, count in said)
    return bytes_at(tensor, lines.offset, shape, (*steps, 1))


class Slots:
    """What a cache's verbs on whole slots do where a slot's bytes are not its own alone: row by row.

    Nothing that is the owner's is cleared; a fork's rows are copied field by field, not what lies between them. Those
    of rings that are looked up ``copy_looked_up`` copies, from a slot to another.
    """

    def __init__(
        self,
        plan: CachePlan,
        stretches: dict[tuple[Any, ...], Stretch],
        tensors: dict[str, Tensor],
        copy_looked_up: Callable[[int, int], None],
    ) -> None:
        rings = [stretch for stretch in stretches.values() if stretch.lines.kind == "ring" and stretch.lines.in_place]
        self._copy_looked_up = copy_looked_up
        self._fields = [field_view(stretch, tensors[stretch.lines.tensor]) for stretch in rings]
        own = [region for region in plan.regions if region.growth == "slot" and not isinstance(region, ForeignRegion)]
        self._own = {name: fresh_unit(region, buffer) for region in own for buffer, (name, _) in region.buffers.items()}

    def reset(self, pools: Pools, slots: Any) -> Pools:
        """``reset_slots``: the library's own rings."""
        at = _places(slots)
        for name, fresh in self._own.items():
            pool = pools[name]
            pool[at] = 0
            for slot in at if fresh is not None else ():
                _fill(pool[slot : slot + 1], fresh)
        return pools

    def copy(self, pools: Pools, sources: Any, targets: Any) -> Pools:
        """``copy_slots``."""
        first, second = _places(sources), _places(targets)
        for array in (*self._fields, *(pools[name] for name in self._own)):
            array[second] = array[first]
        for pair in zip(first, second, strict=True):
            self._copy_looked_up(*pair)
        return pools


def _places(numbers: Any) -> list[int]:
    return [number for number in to_numpy(numbers).tolist() if number >= 0]
