"""Requests pulled from one process by another: leased exports, verified on arrival, committed whole or not at all.

An ``Exporter`` exports requests as pages with a digest each; a handle names one export for a while. ``pull`` fetches
them through a transport (a file, torch.distributed, NIXL), checks every page, and only then makes a request of it.
"""

from kvcore.portable.exporter import Exporter, Handle
from kvcore.portable.importer import decode_handle, encode_handle, pull
from kvcore.portable.manifest import Manifest, Staged, stage
from kvcore.portable.memory_regions import MemoryRegion, region_table
from kvcore.portable.transport import Direct, FileTransport, Transport, publish
from kvcore.sharding.regroup import import_shards

# The names that they had first.
Desk = Exporter
Carrier = Transport
FileCarrier = FileTransport

__all__ = [
    "Carrier",
    "Desk",
    "Direct",
    "Exporter",
    "FileCarrier",
    "FileTransport",
    "Handle",
    "Manifest",
    "MemoryRegion",
    "Staged",
    "Transport",
    "decode_handle",
    "encode_handle",
    "import_shards",
    "publish",
    "pull",
    "region_table",
    "stage",
]
