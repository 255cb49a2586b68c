"""Caches over torch.distributed: requests spread over replicas, history over context shards (gloo, NCCL).

Groups come from a ``DeviceMesh``; tensors are plain local ones. Every rank of a context group makes the same calls in
the same order, like the rank of any SPMD program.
"""

from kvcore.interop.torch_distributed.caches import create_cache, gathered_digest, request_shard
from kvcore.interop.torch_distributed.pulls import pull
from kvcore.interop.torch_distributed.transport import PeerTransport, serve
from kvcore.sharding.torch import TorchExchange

PeerCarrier = PeerTransport
"""The name it had first."""

__all__ = [
    "PeerCarrier",
    "PeerTransport",
    "TorchExchange",
    "create_cache",
    "gathered_digest",
    "pull",
    "request_shard",
    "serve",
]
