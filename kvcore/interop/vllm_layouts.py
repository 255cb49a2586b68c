"""vLLM's six block layouts as descriptors, and back: where the rows of all layers lie in one tensor of a group.

Names are those of ``vllm.v1.kv_cache_layout.KVCacheLayout``: the axes in memory, outermost first, of layers, blocks,
heads, rows of a block, and the content of a row's head, keys and then values. Views of a layer, [B, H, N, C] with
strides of its own whatever the layout, are ``NL_X_NB_NH_BS_CS`` of ``kvcore.adopt``.
"""

from kvcore.adoption import Descriptor, Lines
from kvcore.errors import SpecError
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec

BLOCK_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def descriptor(spec: CacheSpec, layout: str, *, blocks: int, tensor: str = "") -> Descriptor:
    """Where the rows of a classic spec of equal layers lie in a tensor of one layout.

    Args:
        spec: keys and values in blocks, of as many heads and bytes in all layers.
        layout: a name of ``BLOCK_LAYOUTS``.
        blocks: how many there are.
        tensor: its name.

    Raises:
        SpecError: another layout, or layers that no such tensor holds.
    """
    if layout not in BLOCK_LAYOUTS:
        raise SpecError(got=layout, where="descriptor: layout", allowed=", ".join(BLOCK_LAYOUTS))
    regions = plan_cache(spec, max_requests=1, max_tokens=spec.block_tokens).regions
    kinds = {(region.role, region.growth, region.part, region.heads, region.format.row) for region in regions}
    if {(role, growth) for role, growth, *_ in kinds} != {("kv", "block")} or len(kinds) != 2:
        raise SpecError(
            got=f"{len(kinds)} kinds of rows", where="descriptor", allowed="keys and values of equal layers"
        )
    heads = regions[0].heads
    row = sum(size for *_, size in kinds)
    counts = {"L": len(regions) // 2, "B": blocks, "H": heads, "N": spec.block_tokens, "C": row}
    steps, step = dict.fromkeys("LBHN", 0), 1
    for axis in reversed(layout):
        if axis != "C":
            steps[axis] = step
        step *= counts[axis]
    lines: list[Lines] = []
    for number, region in enumerate(regions):
        first = 0 if region.part == "key" else regions[0].format.row
        for field in region.format.fields:
            begin, _ = region.format.byte_range(field.name)
            lines.append(
                Lines(
                    layer=region.layer,
                    role="kv",
                    part=region.part,
                    field=field.name,
                    tensor=tensor,
                    offset=number // 2 * steps["L"] + first + begin,
                    block=steps["B"],
                    token=steps["N"],
                    head=steps["H"],
                )
            )
    return Descriptor(block_tokens=spec.block_tokens, blocks=blocks, lines=lines)


def layout_of(found: Descriptor, spec: CacheSpec) -> str:
    """The layout of such a descriptor.

    Raises:
        SpecError: it is of none, or of several: an axis of one is stepped over in none.
    """
    names = [name for name in BLOCK_LAYOUTS if descriptor(spec, name, blocks=found.blocks).lines == _unnamed(found)]
    if len(names) != 1:
        raise SpecError(got=" or ".join(names) or "another order", where="layout_of", allowed="one of BLOCK_LAYOUTS")
    return names[0]


def _unnamed(found: Descriptor) -> list[Lines]:
    """Its places, if they are all in one tensor."""
    if len({line.tensor for line in found.lines}) > 1:
        return []
    return [
        Lines(**{**{name: getattr(line, name) for name in Lines.__struct_fields__}, "tensor": ""})
        for line in found.lines
    ]
