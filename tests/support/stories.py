"""Requests whose every row follows from (layer, role, token id, position), so that any history can be told again.

``tell`` runs steps through a cache; ``retell`` runs a whole history through a fresh one, in one step, as the answer
that forks, rollbacks, prefix hits, imports and loads must equal bit for bit.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import kvcore
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Window
from kvcore.testing.names import Stream
from kvcore.testing.tagged_rows import append_layer
from tests.support import scene

ROPE = Rope(dim=4, theta=10000.0)

LATENT = CacheSpec(
    layers=[
        scene.compressed(4, window=6),
        scene.compressed(8, overlap=False, indexer=False, window=5),
        LayerSpec(
            window=Window(dim=8, window=4, format="bf16"),
            entries=Entries(dim=8, ratio=4, format="fp32", share=0),
            index_keys=IndexKeys(dim=8, ratio=4, heads=2, topk=4, format="fp32", share=0),
        ),
        scene.ring(7, format="fp16"),
    ],
    block_tokens=16,
    name="latent",
)
"""CSA with an indexer, HCA, a layer that shares the first one's pools, a sliding window."""

MIXED = CacheSpec(
    layers=[
        scene.compressed(4, window=6),
        scene.classic(),
        scene.classic("ring", window=5, key_format="bf16"),
        scene.classic("ring", chunk=6, key_format="fp16"),
    ],
    block_tokens=8,
    name="mixed",
)
"""CSA beside paged, sliding and chunked keys and values."""

STORED = CacheSpec(
    layers=[
        scene.ring(6, format="v4_584", dim=512),
        scene.stored(4, format="v4_584", dim=512, key_format="index_fp4_68_h", key_dim=128),
        scene.classic(key_format="int8_row", value_format="bf16"),
    ],
    block_tokens=8,
    name="stored",
)
"""Quantised rows that are stored as they are given, without arithmetic: the same bits on every backend."""

PAGED = CacheSpec(layers=[scene.classic(), scene.classic(window=5)], block_tokens=8, name="paged")
"""Paged keys and values only: blocks are all there is to restore."""

DRAFTED = CacheSpec(
    layers=[scene.compressed(4, window=6)], draft_layers=[scene.compressed(4, window=5)], block_tokens=8, name="drafted"
)
"""One main layer and one draft layer."""

SPECS = {spec.name: spec for spec in (LATENT, MIXED, PAGED)}


def create(spec: CacheSpec, backend: str, **sizes: Any) -> kvcore.Cache:
    """A poisoned cache of four requests and 256 tokens unless told otherwise."""
    return scene.create(spec, backend, **{"max_requests": 4, "max_tokens": 256, "check": True, **sizes})


def rows(name: str, tokens: Sequence[int], positions: np.ndarray, *shape: int) -> np.ndarray:
    """[T, *shape] fp32 between -2 and 2, from the stream's name, the token ids and their positions alone."""
    salt = np.uint32(sum(ord(letter) * 31**place for place, letter in enumerate(name)) & 0xFFFFFFFF)
    width = int(np.prod(shape))
    with np.errstate(over="ignore"):
        mixed = np.asarray(tokens, np.uint32)[:, None] * np.uint32(2654435761)
        mixed = mixed + positions.astype(np.uint32)[:, None] * np.uint32(40503) + salt
        mixed = mixed + np.arange(width, dtype=np.uint32) * np.uint32(2246822519)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return (mixed.astype(np.float64) / 2**30 - 2).astype(np.float32).reshape(len(tokens), *shape)


def feed(step: Any, tokens: Sequence[int], *, main: bool = True, drafts: bool = True) -> None:
    """Give the layers of an open step their rows; those of padding hold token 0 of position -1."""
    spec = step.cache.spec
    positions = kvcore.to_numpy(step.positions)
    tokens = [*tokens, *[0] * (len(positions) - len(tokens))]
    for number, layer in enumerate(spec.all_layers):
        if main if number < len(spec.layers) else drafts:
            feed_layer(step.layer(number), layer, number, tokens, positions)


def feed_layer(handle: Any, layer: LayerSpec, number: int, tokens: Sequence[int], positions: np.ndarray) -> None:
    """Give one layer its rows, and compress what closes."""

    def own(stream: Stream, *shape: int) -> np.ndarray:
        return rows(_name(stream), tokens, positions, *shape)

    def closed(stream: Stream, dim: int) -> np.ndarray:
        # Compressed elsewhere: they follow from their own number alone, so only for histories that agree.
        entries = kvcore.to_numpy(handle.closed.entry_index)
        return rows(_name(stream), entries, entries, dim)

    flush: dict[str, Any] = {"rope": ROPE}
    if layer.tail is not None:
        flush["norm_weight"] = np.linspace(0.5, 1.5, layer.entries.dim, dtype=np.float32)
    if layer.index_tail is not None:
        flush["index_norm_weight"] = np.linspace(1.5, 0.5, layer.index_tail.dim, dtype=np.float32)
    append_layer(handle, number, layer, own, closed, flush)
    if layer.state is not None:
        handle.append_state(rows(f"{number} state", tokens, positions, *layer.state.shape))
    if layer.conv is not None:
        handle.append_conv(rows(f"{number} conv", tokens, positions, layer.conv.channels))


def _name(stream: Stream) -> str:
    """What salts a stream's rows; golden files hold them."""
    if stream.role.endswith("tail"):
        return f"{stream.part}{stream.role}{stream.layer}"
    return f"{(stream.part or stream.role)[0]}{stream.layer}"


def tell(cache: kvcore.Cache, new: Mapping[kvcore.Request, Sequence[int]], **layers: bool) -> None:
    """One committed step of token ids."""
    with cache.step(new) as step:
        feed(step, [token for ids in new.values() for token in ids], **layers)


def retell(backend: str, spec: CacheSpec, tokens: Sequence[int], *, main: bool = True, drafts: bool = True) -> int:
    """Digest of a request that got ``tokens`` in one step, in a fresh cache."""
    return _retold(backend, spec, tuple(tokens), main, drafts)


@functools.cache
def _retold(backend: str, spec: CacheSpec, tokens: tuple[int, ...], main: bool, drafts: bool) -> int:
    cache = create(spec, backend, max_requests=1, max_tokens=max(256, len(tokens)))
    request = cache.admit()
    if tokens:
        tell(cache, {request: tokens}, main=main, drafts=drafts)
    return cache.digest([request])


class Failed(Exception):
    """What goes wrong in a step that is to fail."""


def fail(cache: kvcore.Cache, new: Mapping[kvcore.Request, Sequence[int]]) -> None:
    """A step that gets all its rows and then fails."""
    with contextlib.suppress(Failed), cache.step(new) as step:
        feed(step, [token for ids in new.values() for token in ids])
        raise Failed


def split(tokens: Sequence[int], rng: np.random.Generator, longest: int = 9) -> list[list[int]]:
    """The tokens cut into random pieces."""
    pieces: list[list[int]] = []
    rest = list(tokens)
    while rest:
        count = int(rng.integers(1, longest + 1))
        pieces.append(rest[:count])
        rest = rest[count:]
    return pieces
