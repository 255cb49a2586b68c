"""Rows that say whose they are: every value names its writer, its stream and its position, and can be read back.

A writer is a request in one generation: after a rollback, a release or a fork the next tokens have another one. So a
value that turns up where it does not belong tells whose it is, however it got there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Tail, Window

WRITERS, STREAMS, POSITIONS, CHANNELS = 64, 16, 64, 8
"""Their product is below 2^24, so that every name is an exact fp32 number."""

NOBODY = float(2**23)
"""What padding rows hold: no name."""


class Stream(NamedTuple):
    """One kind of rows of one layer; ``part`` tells rows apart that a role keeps side by side."""

    layer: int
    role: str
    part: str = ""


def named_spec() -> CacheSpec:
    """Every role in every storage, all in fp32, so that names survive being stored."""
    sizes = {"dim": CHANNELS, "ratio": 4}
    latent = LayerSpec(
        window=Window(dim=CHANNELS, window=5, format="fp32"),
        tail=Tail(**sizes, overlap=True),
        entries=Entries(**sizes, format="fp32"),
        index_tail=Tail(**sizes, overlap=True),
        index_keys=IndexKeys(**sizes, heads=2, topk=2, format="fp32"),
    )
    ways: tuple[dict, ...] = (
        {"storage": "paged"},
        {"storage": "ring", "window": 6},
        {"storage": "ring", "chunk": 5},
        {"storage": "slot"},
    )
    classic = (LayerSpec(kv=KV(key_heads=2, key_dim=4, value_heads=1, key_format="fp32", **way)) for way in ways)
    return CacheSpec(layers=(latent, *classic), block_tokens=8, name="isolation")


def streams(spec: CacheSpec) -> tuple[Stream, ...]:
    """Every stream, in the order that names count."""
    return tuple(_streams(spec))


def names(number: int, writers: list[int], positions: list[int], width: int) -> np.ndarray:
    """Rows [n, width] fp32 of stream ``number``: one writer and one position a row."""
    row = (np.array(writers, np.int64) * STREAMS + number) * POSITIONS + np.array(positions, np.int64)
    return (row[:, None] * CHANNELS + np.arange(width) % CHANNELS).astype(np.float32)


def whose(spec: CacheSpec, value: float) -> str:
    """A value in words: who wrote it, in which stream, at which position."""
    if not 0 <= value < NOBODY or value != int(value):
        return "padding" if value == NOBODY else f"{value:g}, which nobody wrote"
    rest, position = divmod(int(value) // CHANNELS, POSITIONS)
    writer, number = divmod(rest, STREAMS)
    known = streams(spec)
    stream = known[number] if number < len(known) else None
    return f"writer {writer}, position {position}, {stream}"


def _streams(spec: CacheSpec) -> Iterator[Stream]:
    for layer, role, component in spec.components():
        yield from (Stream(layer, role, part) for part in component.streams)
