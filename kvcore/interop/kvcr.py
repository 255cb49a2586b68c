"""A cache's region table as KVCR takes it: one ``RegionDescriptor`` for every buffer, labelled ``pool:part``.

KVCR moves and tiers fixed-size elements without knowing what they mean; here an element is a block or a slot.
"""

from typing import Any

from kvcore.errors import BackendError
from kvcore.portable.caches import Buffers
from kvcore.portable.memory_regions import MemoryRegion, region_table


def descriptor_fields(region: MemoryRegion) -> dict[str, Any]:
    """The fields of KVCR's ``RegionDescriptor`` (0.1.1) for one buffer.

    Raises:
        BackendError: the framework gives no address.
    """
    if region.pointer is None:
        raise BackendError(got=region.name, where="kvcr", allowed="a backend whose arrays have addresses")
    layer, role, field = region.name.split(".", 2)
    return {
        "mem_type": region.memory,
        "device_Id": region.device_id,
        "addr": region.pointer,
        "stride": region.stride,
        "count": region.units,
        "size": region.unit_bytes,
        "label": f"{layer}.{role}:{field}",
    }


def region_descriptors(cache: Buffers) -> list[Any]:
    """KVCR's own descriptors of all buffers of a cache.

    Raises:
        BackendError: KVCR is not installed, or the framework gives no addresses.
    """
    try:
        from kvcr.types import RegionDescriptor  # type: ignore[import-not-found]
    except ImportError as error:
        raise BackendError(got=str(error), where="kvcr", allowed="KVCR", hint="pip install kvcr") from error
    return [RegionDescriptor(**descriptor_fields(region)) for region in region_table(cache)]
