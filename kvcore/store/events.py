"""What a store says of itself: blocks that came and went, in the form that vLLM publishes and llm-d and Dynamo read.

Batches are msgpack arrays ``[time, events, rank]`` of maps that carry their class's name; ``ZmqPublisher`` sends them
as vLLM's does: topic, a running number of eight bytes, batch.
"""

import time
from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one moment.

    Attributes:
        ts: seconds since the epoch.
        events: in order.
        data_parallel_rank: of whoever has the blocks.
    """

    ts: float
    events: "list[BlockStored | BlockRemoved | AllBlocksCleared]"
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that are there now.

    Attributes:
        block_hashes: their keys.
        parent_block_hash: key of the block before the first; None at a prompt's beginning.
        token_ids: of all of them.
        block_size: tokens of each.
        lora_id, lora_name: None; an adapter is a part of the keys.
        medium: ``CPU`` or ``STORAGE``.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that are no longer there."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """None is there any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def encode(events: list[Event], rank: int | None = None) -> bytes:
    """A batch as it is sent."""
    return msgspec.msgpack.encode(EventBatch(ts=time.time(), events=events, data_parallel_rank=rank))


class ZmqPublisher:
    """Sends events to whoever subscribes: a ``BlockStore``'s ``events``. Needs pyzmq.

    Args:
        endpoint: to bind, ``tcp://*:5557``.
        topic: of all messages.
    """

    def __init__(self, endpoint: str, topic: str = "") -> None:
        import importlib

        zmq: Any = importlib.import_module("zmq")
        self._topic = topic.encode()
        self._next = 0
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(endpoint)

    def __call__(self, events: list[Event]) -> None:
        """Send a batch."""
        self._socket.send_multipart((self._topic, self._next.to_bytes(8, "big"), encode(events)))
        self._next += 1

    def close(self) -> None:
        """Let the endpoint go."""
        self._socket.close(linger=0)
