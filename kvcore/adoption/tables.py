"""The layouts in which engines keep paged rows, as one table: how tensors are given, and their axes, outermost first.

Names are those that LMCache gives vLLM's and SGLang's: ``NL`` layers, ``TWO`` keys and values, ``NB`` blocks, ``BS``
rows of a block, ``NBBS`` both in one, ``NH`` heads, ``HS`` channels of a head, ``CS`` those of keys and then of values,
``ONE`` an axis of one, ``NC`` chunks of a block; ``X`` stands between what is a list and what is an axis. Strides are
always the tensor's own, so that a permuted view (HND memory behind an NHD shape) is what it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvcore.adoption.descriptor import Descriptor, IndexMap, Lines
from kvcore.adoption.memory import Tensor, takes
from kvcore.errors import ShapeError, SpecError
from kvcore.plan import Region, plan_cache
from kvcore.spec import CacheSpec
from kvcore.spec.layout import block_layout

LAYOUTS: dict[str, tuple[str, ...]] = {
    "NL_X_TWO_NB_BS_NH_HS": ("TWO", "NB", "BS", "NH", "HS"),
    "NL_X_TWO_NB_NH_BS_HS": ("TWO", "NB", "NH", "BS", "HS"),
    "NL_X_NB_TWO_BS_NH_HS": ("NB", "TWO", "BS", "NH", "HS"),
    "NL_X_NB_TWO_NH_BS_HS": ("NB", "TWO", "NH", "BS", "HS"),
    "NL_X_NB_BS_NH_CS": ("NB", "BS", "NH", "CS"),
    "NL_X_NB_NH_BS_CS": ("NB", "NH", "BS", "CS"),
    "NL_X_NB_BS_NH_TWO_HS": ("NB", "BS", "NH", "TWO", "HS"),
    "NL_X_NB_NH_BS_TWO_HS": ("NB", "NH", "BS", "TWO", "HS"),
    "NB_NL_TWO_BS_NH_HS": ("NB", "NL", "TWO", "BS", "NH", "HS"),
    "NB_NL_TWO_NH_BS_HS": ("NB", "NL", "TWO", "NH", "BS", "HS"),
    "NL_X_TWO_X_NB_BS_NH_HS": ("NB", "BS", "NH", "HS"),
    "TWO_X_NL_X_NB_BS_NH_HS": ("NB", "BS", "NH", "HS"),
    "TWO_X_NL_X_NBBS_NH_HS": ("NBBS", "NH", "HS"),
    "NL_X_TWO_NB_NH_ONE_BS_HS": ("TWO", "NB", "NH", "ONE", "BS", "HS"),
    "NL_X_NB_BS_HS": ("NB", "BS", "HS"),
    "NL_X_NBBS_ONE_HS": ("NBBS", "ONE", "HS"),
    "NL_X_NB_BSV_BSS": ("NB", "BS", "HS"),
    "NL_X_NB_NC_BSV_BSS": ("NB", "NC", "BS", "HS"),
    "NL_X_NB_BS_NH_HS": ("NB", "BS", "NH", "HS"),
    "NL_X_NB_HS_BS": ("NB", "HS", "BS"),
}
"""Name -> axes of a tensor. The last two are of recurrent states and of a convolution's inputs, which are shifted;
those before them from ``NB_BS_HS`` on of latent rows. ``BSV_BSS`` has the shape of that, and in a block, or in each of
its chunks, the planes of a format one after the other: all rows' values, then all rows' scales."""

PLANES = ("NL_X_NB_BSV_BSS", "NL_X_NB_NC_BSV_BSS")

ONE_PART = "NL_X_NB_BS_NH_HS"

SHIFTED = "NL_X_NB_HS_BS"

KINDS = {"rings": "ring", "pages": "page"}
"""First word of the layout of what grows with requests: ``NB`` and ``BS`` are rings and their rows, or pages and
theirs. A second one is the name of the map that they are looked up in; ``blocks MAP NAME`` of history."""

Lists = Mapping[str, Tensor]
"""Tensors by name: ``N``, ``N.0`` and ``N.1`` of pairs."""


class Fit(NamedTuple):
    """A tensor as a layout reads it: what its axes count and step."""

    counts: dict[str, int]
    steps: dict[str, int]


class Said(NamedTuple):
    """A layout as it was said: ``block``, ``ring`` or ``page``, a map's name, and that of ``LAYOUTS``."""

    kind: Any
    map: str
    name: str | None


def describe(
    spec: CacheSpec, tensors: Lists, layout: str | Mapping[str, str] | None, maps: Sequence[IndexMap] = ()
) -> Descriptor:
    """The descriptor of tensors in layouts of the table; without one, in the only layout that they can have.

    Args:
        layout: a name for all roles, or one for each role (``"kv"``), or for one layer's (``"3.kv"``); behind ``rings``
            or ``pages`` for what grows with requests, and the name of a map.
        maps: that layouts name.

    Raises:
        SpecError: no layout or map of that name; tensors that no layout fits, or several do.
        ShapeError: tensors of other shapes or dtypes than the layout has.
    """
    # Regions of one block: what a row is does not depend on how many there are.
    paged = any(component.growth == "block" for _, _, component in spec.components())
    regions = plan_cache(spec, max_requests=1, max_tokens=spec.block_tokens if paged else None).regions
    blocks: set[int] = set()
    lines: list[Lines] = []
    alike: dict[tuple[str, str | None], list[Region]] = {}
    for region in regions:
        text = layout
        if text is not None and not isinstance(text, str):
            text = text.get(f"{region.layer}.{region.role}", text.get(region.role, ""))
        alike.setdefault((region.role, text), []).append(region)
    for (role, text), some in alike.items():
        said = _said(some, role, text)
        if said.name is not None and said.name not in LAYOUTS:
            got = f"layout {said.name!r} of {role}"
            raise SpecError(got=got, where="adopt: layout", allowed=f"a Descriptor, or one of {', '.join(LAYOUTS)}")
        if said.map and said.map not in [one.name for one in maps]:
            raise SpecError(
                got=f"layout {text!r} of {role}",
                where="adopt: layout",
                allowed=f"a map of {[one.name for one in maps]}",
                hint="describe(spec, tensors, layout, maps=[IndexMap(...)]) makes the Descriptor of one.",
            )
        counts, found = (
            _only(spec, regions, some, tensors) if said.name is None else _read(regions, some, tensors, said)
        )
        lines += found
        blocks |= counts if said.kind == "block" else set()
    if len(blocks) > 1:
        raise ShapeError(got=f"{sorted(blocks)} blocks", where="adopt: tensors", allowed="as many in all tensors")
    descriptor = Descriptor(block_tokens=spec.block_tokens, blocks=blocks.pop() if blocks else 1, lines=lines)
    return msgspec.structs.replace(descriptor, maps=list(maps)) if maps else descriptor


def _said(regions: Sequence[Region], role: str, said: str | None) -> Said:
    """What the text of a layout says of a role's regions.

    Raises:
        SpecError: what grows with requests is said to be neither in rings nor in pages, or history is.
    """
    *words, name = (said or "").split(" ")
    slots = any(region.growth == "slot" for region in regions)
    if not slots and len(words) == 2 and words[0] == "blocks":
        return Said("block", words[1], name)
    if slots != (bool(words) and words[0] in KINDS) or len(words) > 2:
        raise SpecError(
            got=f"layout {said!r} of {role}",
            where="adopt: layout",
            allowed="'rings NAME' or 'pages NAME', or with a map 'pages MAP NAME'"
            if slots
            else "a name, or with a map 'blocks MAP NAME': history lies in blocks",
            hint="Windows and tails are a ring for each request, or pages that a table of theirs lists.",
        )
    kind = KINDS[words[0]] if words else "block"
    return Said(kind, words[1] if len(words) > 1 else "", said if said is None else name)


def _only(
    spec: CacheSpec, regions: tuple[Region, ...], some: Sequence[Region], tensors: Lists
) -> tuple[set[int], list[Lines]]:
    """What the only layout of such shapes says."""
    found: dict[str, tuple[set[int], list[Lines]]] = {}
    for name in LAYOUTS:
        try:
            found[name] = _read(regions, some, tensors, Said("block", "", name))
        except ShapeError:
            continue
    shapes = sorted({tensor.shape for tensor in tensors.values()})
    got = f"tensors of shapes {shapes} for {some[0].role}, {spec.block_tokens} tokens a block"
    if not found:
        raise SpecError(got=got, where="adopt: layout", allowed=f"shapes of {', '.join(LAYOUTS)}")
    # Two names for the same places are one layout.
    if len({tuple(lines) for _, lines in found.values()}) > 1:
        raise SpecError(
            got=f"{got}, which may be {' or '.join(found)}",
            where="adopt: layout",
            allowed="a layout that is said",
            hint="Say which: the same bytes are other rows in each.",
        )
    return next(iter(found.values()))


def _read(
    regions: tuple[Region, ...], some: Sequence[Region], tensors: Lists, said: Said
) -> tuple[set[int], list[Lines]]:
    """(numbers of blocks, places) of some regions' rows."""
    counts: set[int] = set()
    lines: list[Lines] = []
    layout = said.name or ""
    for region in some:
        name = _tensor_of(regions, region, tensors, layout)
        fit = _fit(regions, region, tensors[name], layout, f"adopt: tensor {name!r} as {layout}")
        counts.add(fit.counts["NB"])
        lines += _lines(regions, region, name, fit, said)
    return counts, lines


def _tensor_of(regions: tuple[Region, ...], region: Region, tensors: Lists, layout: str) -> str:
    """The name of the tensor that a region's rows lie in."""
    owners = list(dict.fromkeys((one.layer, one.role) for one in regions))
    place, part = owners.index((region.layer, region.role)), int(region.part == "value")
    outer = list(dict.fromkeys(name.partition(".")[0] for name in tensors))
    if layout.startswith("TWO_X_NL_X"):
        wanted, there = f"{part}.{place}", len(outer) == 2 and len(tensors) == 2 * len(owners)
    elif layout.startswith("NL_X_TWO_X"):
        wanted, there = f"{place}.{part}", len(outer) == len(owners) and f"{place}.2" not in tensors
    elif layout.startswith("NL_X"):
        wanted, there = outer[place] if place < len(outer) else "", len(outer) == len(owners)
    else:
        wanted, there = outer[0], len(tensors) == 1
    if not there or wanted not in tensors:
        raise ShapeError(
            got=f"{len(tensors)} tensors, {', '.join(list(tensors)[:4])} …",
            where=f"adopt: tensors as {layout}",
            allowed=f"those of {len(owners)} components",
        )
    return wanted


def _fit(regions: tuple[Region, ...], region: Region, tensor: Tensor, layout: str, where: str) -> Fit:
    """A region's tensor as a layout reads it.

    Raises:
        ShapeError: it has another shape, or elements that the region's format has not.
    """
    axes = LAYOUTS[layout]
    if len(tensor.shape) != len(axes):
        raise ShapeError(got=f"shape {tensor.shape}", where=where, allowed=f"{len(axes)} axes: {', '.join(axes)}")
    if ("NH" in axes and layout != ONE_PART) != bool(region.part):
        raise ShapeError(got=f"rows of {region.role}", where=where, allowed="keys and values, or rows of one part")
    if "NH" not in axes and region.heads > 1:
        raise ShapeError(got=f"rows of {region.heads} heads", where=where, allowed="a layout with an axis NH")
    if layout == SHIFTED and (region.growth == "block" or len(region.format.fields) > 1):
        raise ShapeError(got=f"rows of {region.role}", where=where, allowed="plain rows of rings")
    counts, steps = dict(zip(axes, tensor.shape, strict=True)), dict(zip(axes, tensor.strides, strict=True))
    element = tensor.array.itemsize
    fields = region.format.fields
    if tensor.dtype != "uint8" and not all(takes(field.code, tensor.dtype) for field in fields):
        allowed = f"elements of {region.format.name}, or uint8"
        raise ShapeError(got=f"dtype {tensor.dtype}", where=where, allowed=allowed)
    if "NBBS" in axes:
        if region.growth == "slot":
            allowed = "an axis of rings or pages, and one of their rows"
            raise ShapeError(got="rows of all in one axis", where=where, allowed=allowed)
        blocks, rest = divmod(counts["NBBS"], region.rows)
        if rest:
            raise ShapeError(got=counts["NBBS"], where=where, allowed=f"a multiple of {region.rows} rows")
        counts |= {"NB": blocks, "BS": region.rows}
        steps |= {"NB": region.rows * steps["NBBS"], "BS": steps["NBBS"]}
    rows, rest = divmod(region.rows, counts.get("NC", 1))
    if "NC" in counts and (rest or rows < 2 or region.growth == "slot"):
        got = f"{counts['NC']} chunks in a {'block' if region.growth == 'block' else 'ring or page'}"
        raise ShapeError(got=got, where=where, allowed=f"chunks of some rows that {region.rows} of a block fill")
    size = region.format.row // element
    both = [one.format.row // element for one in regions if (one.layer, one.role) == (region.layer, region.role)]
    layers = len({one.layer for one in regions if one.role == region.role})
    wanted = {"TWO": 2, "ONE": 1, "NL": layers, "BS": rows, "NH": region.heads, "HS": size, "CS": sum(both)}
    if region.growth == "slot":
        # How many rows a ring or a page has is the owner's to choose.
        del wanted["BS"]
    for axis, count in wanted.items():
        if axis in counts and counts[axis] != count:
            got = f"shape {tensor.shape}: {counts[axis]} along {axis}"
            raise ShapeError(got=got, where=where, allowed=f"{count} along {axis}")
    if steps[axes[-1]] != element:
        raise ShapeError(got=f"{steps[axes[-1]]} bytes between channels", where=where, allowed=f"{element}: no gaps")
    if layout in PLANES and steps["BS"] != region.format.row:
        raise ShapeError(got=f"{steps['BS']} bytes between rows", where=where, allowed="blocks without gaps")
    return Fit(counts, steps)


def _lines(regions: tuple[Region, ...], region: Region, name: str, fit: Fit, said: Said) -> list[Lines]:
    """Where the fields of a region lie in a tensor that fits."""
    steps = fit.steps
    layers = list(dict.fromkeys(one.layer for one in regions if one.role == region.role))
    offset = steps["NL"] * layers.index(region.layer) if "NL" in steps else 0
    if region.part == "value":
        keys = next(one for one in regions if (one.layer, one.role) == (region.layer, region.role))
        offset += keys.format.row if "CS" in steps else steps.get("TWO", 0)
    units, rows = (0, 0) if said.kind == "block" else (fit.counts["NB"], fit.counts["BS"])
    planes = {place.field: place for place in block_layout(region.format, fit.counts["BS"], "packed").places}
    found: list[Lines] = []
    apart: dict[str, Any] = {}
    for field in region.format.fields:
        if field.name == "pad":
            continue
        first, token = region.format.byte_range(field.name)[0], steps["BS"]
        if said.name == SHIFTED:
            apart = {"piece_bytes": field.element.bits // 8, "piece": steps["HS"], "shifted": True}
        if said.name in PLANES:
            first, token = planes[field.name].base, planes[field.name].stride
        found.append(
            Lines(
                layer=region.layer,
                role=region.role,
                part=region.part,
                field=field.name,
                tensor=name,
                offset=offset + first,
                block=steps["NB"],
                token=token,
                # What is never stepped over makes no difference between two layouts.
                head=steps["NH"] if region.heads > 1 else 0,
                kind=said.kind,
                units=units,
                rows=rows,
                map=said.map,
                chunk_rows=fit.counts["BS"] if "NC" in steps else 0,
                chunk=steps.get("NC", 0),
                **apart,
            )
        )
    return found
