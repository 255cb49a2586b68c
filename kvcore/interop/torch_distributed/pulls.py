"""A pull by all context shards of a replica: every rank verifies all of it, and all commit or none."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from kvcore.cache import Cache
from kvcore.errors import OutOfBlocks, OutOfSlots, TransferError
from kvcore.portable.exporter import Handle
from kvcore.portable.importer import commit, receive
from kvcore.portable.transport import Transport
from kvcore.requests.manager import Request
from kvcore.requests.tokens import check_salt


def pull(
    cache: Cache,
    handle: Handle,
    transport: Transport,
    *,
    mesh: Any,
    timeout: float = 10.0,
    salt: str | None = None,
    **options: Any,
) -> Request:
    """``kvcore.handoff.pull`` on every rank along ``context``; each keeps its own pages, and says the same ``salt``.

    Export with as many ``readers`` as there are context shards.

    Raises:
        TransferError: as ``kvcore.handoff.pull``; ``peer_lost`` where it was another rank that failed.
        SnapshotError, OutOfSlots, OutOfBlocks: likewise. Nothing is changed on any rank.
    """
    failed: Exception | None = None
    received = None
    try:
        salt = check_salt(salt, "pull: salt")
        received = receive(cache, handle, transport, timeout=timeout, checkpoints=salt is not None, **options)
        _check_room(cache, received.record.length)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to hear of it
        failed = error
    group = mesh["context"].get_group()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    fine = torch.tensor([failed is None], dtype=torch.int32, device=device)
    dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=group)
    if failed is not None:
        raise failed
    if not int(fine) or received is None:
        raise TransferError(
            reason="peer_lost", got="a failed pull on another rank", where="pull", allowed="all context shards or none"
        )
    request = commit(cache, received, salt)
    with contextlib.suppress(TransferError):
        transport.finish(handle, timeout=timeout)
    return request


def _check_room(cache: Cache, length: int) -> None:
    """Refuse before anybody commits."""
    if not cache.free_slots:
        raise OutOfSlots(got="a pull", where="pull", allowed=f"{cache.plan.slots} requests at once")
    if cache.plan.blocks_for(length) > cache.free_blocks:
        raise OutOfBlocks(got=f"{length} tokens", where="pull", allowed=f"{cache.free_blocks} free blocks")
