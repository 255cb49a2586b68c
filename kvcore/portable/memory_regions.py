"""The region table: every buffer of a cache as memory that others can register, and what it means.

Movers know addresses and counts; this says which layers and role a buffer holds, its logical axes, and whether a
checkpoint of a request contains it. Pages of the packed layout carry their scales, so they travel as plain bytes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.portable.caches import Buffers


class MemoryRegion(NamedTuple):
    """One buffer.

    Attributes:
        name: key in ``cache.pools``.
        layers: the layer that owns it, then those that read it.
        role: the component's role.
        format: of its rows.
        field: buffer of the layout: ``page``, or the fields of a planar one.
        growth: ``block`` or ``slot``: what a unit is.
        axes: logical axes of one layer's pool: blocks (or slots), heads, states, content: counts, and bytes last.
        tokens_per_state: tokens from one row to the next.
        window: live rows of a ring at most; None where nothing is overwritten.
        in_checkpoint: a checkpoint of a request's state contains it; prefix blocks do otherwise.
        sharding: ``by_block`` or ``replicated`` over context shards.
        units: blocks or slots.
        unit_bytes: bytes of a unit.
        stride: bytes from one unit to the next.
        pointer: address of the first unit, or None where the framework does not give it.
        memory: ``DRAM`` or ``VRAM``, in NIXL's words.
        device_id: of the memory; 0 on the host.
    """

    name: str
    layers: tuple[int, ...]
    role: str
    format: str
    field: str
    growth: str
    axes: dict[str, int]
    tokens_per_state: int
    window: int | None
    in_checkpoint: bool
    sharding: str
    units: int
    unit_bytes: int
    stride: int
    pointer: int | None
    memory: str
    device_id: int

    def descriptors(self, units: Sequence[int]) -> list[tuple[int, int, int]]:
        """(address, bytes, device) of units: what NIXL transfers.

        Raises:
            ValueError: the framework gives no addresses.
        """
        if self.pointer is None:
            raise ValueError(f"{self.name}: no address")
        return [(self.pointer + unit * self.stride, self.unit_bytes, self.device_id) for unit in units]


def region_table(cache: Buffers) -> list[MemoryRegion]:
    """All buffers of a cache in canonical order."""
    spec, found = cache.spec, list[MemoryRegion]()
    for region in cache.plan.regions:
        component = getattr(spec.all_layers[region.layer], region.role)
        readers = [
            layer
            for layer, role, other in spec.components()
            if role == region.role and other.shared_from == region.layer
        ]
        for field, (name, unit_bytes) in region.buffers.items():
            pool = cache.pools[name]
            pointer, memory, device = _address(pool)
            found.append(
                MemoryRegion(
                    name=name,
                    layers=(region.layer, *readers),
                    role=region.role,
                    format=region.format.name,
                    field=field,
                    growth=region.growth,
                    axes={
                        "layers": 1,
                        "blocks": cache.plan.units(region),
                        "heads": region.heads,
                        "states": region.places,
                        "content": region.format.row,
                    },
                    tokens_per_state=component.tokens_per_row,
                    window=component.span,
                    in_checkpoint=component.in_checkpoint,
                    sharding=component.sharding,
                    units=cache.plan.units(region),
                    unit_bytes=unit_bytes,
                    stride=unit_bytes,
                    pointer=pointer,
                    memory=memory,
                    device_id=device,
                )
            )
    return found


def _address(pool: Any) -> tuple[int | None, str, int]:
    """(address, memory, device) of an array of any framework."""
    if hasattr(pool, "data_ptr"):
        cuda = pool.device.type == "cuda"
        return pool.data_ptr(), "VRAM" if cuda else "DRAM", (pool.device.index or 0) if cuda else 0
    if hasattr(pool, "unsafe_buffer_pointer"):
        device = next(iter(pool.devices()))
        return pool.unsafe_buffer_pointer(), "DRAM" if device.platform == "cpu" else "VRAM", device.id
    interface = getattr(pool, "__array_interface__", None)
    return (interface["data"][0] if interface else None), "DRAM", 0
