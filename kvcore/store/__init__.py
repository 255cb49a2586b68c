"""A store of pages by key: tiers in the host's memory and on disk, each page verified before anything of it is used.

``BlockStore`` holds pages under keys of prefixes; ``save`` and ``load`` move requests of a cache there and back, block
by block; ``Peer`` and ``BlockExporter`` fetch blocks from another process's store; events say what came and went, in
the form that vLLM publishes.
"""

from kvcore.store.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, ZmqPublisher
from kvcore.store.exports import BlockExporter
from kvcore.store.peers import Peer
from kvcore.store.requests import bring, find, keys_of, load, save
from kvcore.store.seal import Seal
from kvcore.store.store import BlockStore
from kvcore.store.tiers import DiskTier, HostTier, Tier

__all__ = [
    "AllBlocksCleared",
    "BlockExporter",
    "BlockRemoved",
    "BlockStore",
    "BlockStored",
    "DiskTier",
    "EventBatch",
    "HostTier",
    "Peer",
    "Seal",
    "Tier",
    "ZmqPublisher",
    "bring",
    "find",
    "keys_of",
    "load",
    "save",
]
