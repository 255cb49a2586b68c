"""The figures of a plan that ``kvcore plan`` shows, as plain data: all sizes in bytes, padding never hidden."""

from fractions import Fraction
from typing import TYPE_CHECKING

from kvcore.plan import CachePlan, Region
from kvcore.spec.sizes import bytes_per_token, logical_bytes, point_bytes

if TYPE_CHECKING:
    from kvcore.spec import Component, LayerSpec

GIB = 2**30


def describe(plan: CachePlan, *, budget: int | None = None) -> dict:
    """Everything that the command prints, as plain data; all sizes in bytes."""
    spec = plan.spec
    tokens = plan.blocks * spec.block_tokens if plan.blocks else plan.max_tokens
    logical, padded = bytes_per_token(spec), padded_bytes_per_token(plan)
    return {
        "spec": spec.name,
        "digest": spec.digest,
        "layers": len(spec.layers),
        "draft_layers": len(spec.draft_layers),
        "layout": plan.layout,
        "max_draft_tokens": plan.max_draft_tokens,
        "max_request_tokens": plan.max_request_tokens,
        "slots": plan.slots,
        "slot_bytes": plan.slot_bytes,
        "blocks": plan.blocks,
        "block_tokens": spec.block_tokens,
        "block_bytes": plan.block_bytes,
        "max_tokens": tokens,
        "nbytes": plan.nbytes,
        "undo_bytes": plan.undo_bytes,
        "total_bytes": plan.total_bytes,
        "budget_bytes": budget,
        "unused_bytes": None if budget is None else budget - plan.total_bytes,
        "bytes_per_token": {"logical": _number(logical), "padded": _number(padded)},
        "point_bytes": point_bytes(spec),
        "tokens_per_further_gib": int(GIB / padded) if padded else None,
        "logical_bytes": logical_bytes(spec, plan.longest or tokens or 0),
        "pools": _pools(plan),
        "layer_kinds": _layer_kinds(plan),
    }


def padded_bytes_per_token(plan: CachePlan) -> Fraction:
    """Bytes that every further token of history costs in the pools, page padding included."""
    slope = Fraction(0)
    for region in plan.regions:
        component: Component = getattr(plan.spec.all_layers[region.layer], region.role)
        if component.span is None:
            slope += Fraction(region.unit.nbytes, region.rows * component.tokens_per_row)
    return slope


def _pools(plan: CachePlan) -> list[dict]:
    """Equal pools of different layers together, in canonical order of the roles."""
    groups: dict[tuple, list[Region]] = {}
    for region in plan.regions:
        key = region.role, region.part, region.format, region.heads, region.rows
        groups.setdefault(key, []).append(region)
    found = []
    order = list(dict.fromkeys(role for layer in plan.spec.all_layers for role in layer.every_role))
    for regions in sorted(groups.values(), key=lambda regions: order.index(regions[0].role)):
        region, unit = regions[0], regions[0].unit
        stored = unit.rows * sum(place.nbytes for place in unit.places)
        found.append(
            {
                "role": region.role,
                "part": region.part,
                "format": region.format.name,
                "unit": region.growth,
                "rows": region.rows,
                "row_bytes": region.heads * region.format.row,
                "unit_bytes": unit.nbytes,
                "padding_bytes": unit.nbytes - stored,
                "layers": len(regions),
                "units": plan.units(region),
                "nbytes": len(regions) * plan.units(region) * unit.nbytes,
            }
        )
    return found


def _layer_kinds(plan: CachePlan) -> list[dict]:
    """Layers that hold the same, with what one of them takes."""
    groups: dict[LayerSpec, list[int]] = {}
    for number, layer in enumerate(plan.spec.all_layers):
        groups.setdefault(layer, []).append(number)
    found = []
    for layer, numbers in groups.items():
        own = [region for region in plan.regions if region.layer == numbers[0]]
        found.append(
            {
                "kind": " + ".join(component.summary(role) for role, component in layer.components()),
                "layers": numbers,
                "slot_bytes": sum(region.unit.nbytes for region in own if region.growth == "slot"),
                "block_bytes": sum(region.unit.nbytes for region in own if region.growth == "block"),
            }
        )
    return found


def _number(value: Fraction) -> dict:
    """An exact quantity for JSON: as a float for people, as a fraction for programs."""
    return {"value": float(value), "exact": str(value)}
