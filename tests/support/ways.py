"""Ways between two processes: how pages of one come to the other. Frameworks are loaded by those that need them."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from kvcore.handoff import FileTransport


def join(folder: str, rank: int, count: int = 2, seconds: float = 60.0) -> None:
    """Become a rank of the only gloo group of a folder."""
    import torch.distributed as dist

    store, limit = Path(folder) / "group", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)


def transport_of(way: str, folder: str, metadata: bytes) -> Any:
    """The transport of the process that pulls, rank 1 of two."""
    if way == "file":
        return FileTransport(folder)
    if way == "torch.distributed":
        from kvcore.interop.torch_distributed import PeerTransport

        join(folder, 1)
        return PeerTransport(0)
    from kvcore.interop import nixl

    return nixl.NixlTransport(nixl.agent(f"importer {folder}"), metadata)
