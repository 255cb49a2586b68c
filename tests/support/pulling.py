"""What two processes do when one pulls from the other: rank 0 exports, rank 1 pulls."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvcore.errors import KvcoreError, TransferError
from kvcore.handoff import Exporter, FileTransport, Handle, decode_handle, pull
from kvcore.interop import torch_distributed
from kvcore.interop.torch_distributed import PeerTransport, serve
from kvcore.portable.exporter import REASONS
from tests.reliability import ranks
from tests.support import stories

SPEC = stories.STORED
_world: dict[str, Any] = {}


def begin() -> None:
    """A fresh desk in rank 0; its clock stands still."""
    _world["now"] = 0.0
    _world["cache"] = stories.create(SPEC, "torch_triton" if dist.get_rank() else "reference")
    _world["desk"] = Exporter(_world["cache"], places=1, clock=lambda: _world["now"])


def export(count: int) -> Handle | None:
    """Rank 0 exports a request of ``count`` tokens and releases it."""
    if dist.get_rank():
        return None
    cache = _world["cache"]
    request = cache.admit()
    stories.tell(cache, {request: list(range(count))})
    handle = _world["desk"].export(request)
    cache.release(request)
    return handle


def pass_time(seconds: float) -> None:
    """Let the desk's clock go on."""
    _world["now"] += seconds


def outcome(handle: Handle, carrier: Any, backend: str = "torch_triton") -> str:
    """``committed`` if what was pulled is right, or the reason; nothing is half there."""
    cache = stories.create(SPEC, backend)
    stories.tell(cache, {cache.admit(): [5] * 20})
    before = cache.digest(), cache.free_slots, cache.free_blocks
    try:
        request = pull(cache, handle, carrier, timeout=10, chunk_pages=1)
    except TransferError as error:
        assert (cache.digest(), cache.free_slots, cache.free_blocks) == before
        return error.reason
    assert cache.digest([request]) == stories.retell(backend, SPEC, range(request.length))
    return "committed"


def pull_from_peer(handle: Handle) -> str | None:
    """Rank 1 pulls; rank 0 serves until it says goodbye."""
    if dist.get_rank() == 0:
        serve(_world["desk"], 1)
        return None
    carrier = PeerTransport(0)
    found = outcome(handle, carrier)
    carrier.goodbye()
    return found


def fetch_from_peer(handle: Handle, first: int, count: int) -> str | None:
    """Rank 1 asks for pages that there are not."""
    if dist.get_rank() == 0:
        serve(_world["desk"], 1)
        return None
    carrier = PeerTransport(0)
    try:
        carrier.fetch(handle, first, np.zeros((count, handle.page_bytes), np.uint8), timeout=5)
        found = "fetched"
    except KvcoreError as error:
        found = getattr(error, "reason", type(error).__name__)
    carrier.goodbye()
    return found


NONSENSE = [[verb, 0, 0, 0, 1] for verb in (99, -2, -1, 4, 2**62, -(2**63))] + [
    [1, -1, 0, 0, 1],
    [1, 0, -1, 0, 1],
    [1, 0, 0, -1, 1],
    [1, 0, 0, 0, -1],
    [1, 0, 0, 2**62, 2**62],
    [0, 2**62, 2**62, 0, 0],
]
"""Verb, place, generation, first page, count: what no importer of ours would ask."""


def ask_nonsense(handle: Handle) -> list[str]:
    """Rank 1 asks what makes no sense: the answers; rank 0 must go on, with nothing changed."""
    if dist.get_rank() == 0:
        serve(_world["desk"], 1)
        return []
    name = np.frombuffer(bytes.fromhex(handle.exporter), np.int64).tolist()
    found = []
    for numbers in NONSENSE:
        dist.send(torch.tensor([*numbers, *name], dtype=torch.int64), 0)
        answer = torch.empty(2, dtype=torch.int64)
        dist.recv(answer, 0)
        status, size = answer.tolist()
        found.append(REASONS[status - 1] if status and not size else "taken")
    PeerTransport(0).goodbye()
    return found


LIES = [[99, 0], [-5, 0], [0, -1], [0, 2**62], [0, 7]]
"""Status and bytes: what no exporter of ours would answer."""


def believe_lies(handle: Handle) -> list[str]:
    """Rank 0 answers nonsense to every question of rank 1: what its pulls end with."""
    if dist.get_rank() == 0:
        for lie in LIES:
            dist.recv(torch.empty(7, dtype=torch.int64), 1)
            dist.send(torch.tensor(lie, dtype=torch.int64), 1)
        # The last was 7 bytes of a manifest.
        dist.send(torch.zeros(7, dtype=torch.uint8), 1)
        return []
    return [outcome(handle, PeerTransport(0)) for _ in LIES]


class Spoiled(FileTransport):
    """Changes one byte of what it carries."""

    def fetch(self, handle: Handle, first: int, into: Any, *, timeout: float) -> None:
        super().fetch(handle, first, into, timeout=timeout)
        into[0, 5] ^= 1


def pull_together(folder: str, data: bytes, spoiled: int | None) -> tuple[str, bool]:
    """Two context shards pull from a folder; in rank ``spoiled`` a byte is wrong: (outcome, right or unchanged)."""
    mesh = ranks.mesh(1, 2)
    cache = torch_distributed.create_cache(SPEC, mesh=mesh, max_requests=2, max_tokens=256)
    stories.tell(cache, {cache.admit(): [5] * 20})
    before = cache.digest(), cache.free_slots, cache.free_blocks
    carrier = (Spoiled if dist.get_rank() == spoiled else FileTransport)(folder)
    try:
        request = torch_distributed.pull(cache, decode_handle(data), carrier, mesh=mesh)
    except TransferError as error:
        return error.reason, (cache.digest(), cache.free_slots, cache.free_blocks) == before
    return "committed", cache.digest([request]) == stories.retell("torch_triton", SPEC, range(40))
