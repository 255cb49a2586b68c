"""Requests pulled from one process by another: leased exports, verified on arrival, committed whole or not at all.

An ``Exporter`` exports requests as pages with a digest each; a handle names one export for a while. ``pull`` fetches
them through a carrier (a file, torch.distributed, NIXL), checks every page, and only then makes a request of it.
"""

from kvcore.portable.exporter import Exporter, Handle
from kvcore.portable.importer import decode_handle, encode_handle, pull
from kvcore.portable.manifest import Manifest, Staged, stage
from kvcore.portable.memory_regions import MemoryRegion, region_table
from kvcore.portable.transport import Carrier, Direct, FileCarrier, publish

Desk = Exporter
"""The name it had first."""

__all__ = [
    "Carrier",
    "Desk",
    "Direct",
    "Exporter",
    "FileCarrier",
    "Handle",
    "Manifest",
    "MemoryRegion",
    "Staged",
    "decode_handle",
    "encode_handle",
    "publish",
    "pull",
    "region_table",
    "stage",
]
