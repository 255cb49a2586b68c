"""Giving a cache rows that say whose they are: every value is a function of (key, layer, role, position).

A key stands for one writer of tokens: a request, or a request after it was rolled back or forked. Two caches hold the
same if and only if the same keys wrote the same positions, so a row that leaks, goes stale or lands elsewhere is seen
in the digest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.cache import Cache, Step
from kvcore.requests.manager import Request
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window

LIMIT = 64
"""Longest request that rows are made for."""

ROPE = Rope(dim=8, theta=10000.0)


def life_spec() -> CacheSpec:
    """Every role in every storage, as small as can be: what life cycles are run on."""
    dim, index = 32, 16
    latent = Window(dim=dim, window=5, format="mxfp4")
    layers = (
        LayerSpec(
            window=latent,
            tail=Tail(dim=dim, ratio=4, overlap=True),
            entries=Entries(dim=dim, ratio=4, format="bf16"),
            index_tail=Tail(dim=index, ratio=4, overlap=True),
            index_keys=IndexKeys(dim=index, ratio=4, heads=2, topk=2, format="int8_row"),
        ),
        LayerSpec(
            window=latent,
            tail=Tail(dim=dim, ratio=8, overlap=False),
            entries=Entries(dim=dim, ratio=8, format="fp8_row"),
        ),
        *stored_spec().layers,
    )
    return CacheSpec(layers=layers, block_tokens=8, name="life")


def stored_spec() -> CacheSpec:
    """The part of it in which nothing is computed, so that all backends hold the same bytes."""
    layers = (
        LayerSpec(window=Window(dim=32, window=3, format="fp32"), entries=Entries(dim=32, ratio=2, format="mxfp4")),
        LayerSpec(kv=KV(key_heads=2, key_dim=8, key_format="int8_row", value_format="fp16")),
        LayerSpec(kv=KV(key_heads=2, key_dim=8, storage="ring", window=6)),
        LayerSpec(kv=KV(key_heads=2, key_dim=8, storage="ring", chunk=5)),
        LayerSpec(kv=KV(key_heads=2, key_dim=8, storage="slot", value_heads=1)),
    )
    return CacheSpec(layers=layers, block_tokens=8, name="stored")


def feed(cache: Cache, new: Mapping[Request, Sequence[int]], *, reused: bool = False) -> None:
    """One committed step.

    Args:
        new: request -> keys of its new tokens, in order.
        reused: as ``fill`` takes it.
    """
    with cache.step({request: len(keys) for request, keys in new.items()}) as step:
        fill(step, list(new.values()), reused=reused)


def fill(step: Step, new: Sequence[Sequence[int]], *, reused: bool = False) -> None:
    """Append every layer's rows to an open step and store what closes.

    Args:
        reused: whoever calls writes other numbers into its arrays as soon as a verb has returned.
    """

    def give(verb: Callable[..., object], *arrays: np.ndarray) -> None:
        verb(*arrays)
        if reused:
            for array in arrays:
                array.fill(7.0)

    told = [key for keys in new for key in keys]
    writers = list(zip(told, to_numpy(step.positions)[: len(told)].tolist(), strict=True))
    for number, layer in enumerate(step.cache.spec.all_layers):
        handle = step.layer(number)

        def rows(role: str, *shape: int, number: int = number, writers=writers) -> np.ndarray:
            found = [_table(key, number, role, int(np.prod(shape)))[position] for key, position in writers]
            return np.array(found, np.float32).reshape(len(writers), *shape)

        if layer.window is not None:
            give(handle.append_window, rows("window", layer.window.dim))
        if layer.kv is not None:
            keys, values = layer.kv.parts
            give(
                handle.append_kv,
                rows("keys", keys.heads, keys.format.dim or 0),
                rows("values", values.heads, values.format.dim or 0),
            )
        if layer.tail is not None:
            give(handle.append_tail, rows("kv", layer.tail.width), rows("score", layer.tail.width))
            if layer.index_tail is not None:
                width = layer.index_tail.width
                give(handle.append_index_tail, rows("index kv", width), rows("index score", width))
            handle.flush(rope=ROPE)
        elif layer.entries is not None:
            give(handle.store_entries, _entries(number, layer, writers))


def written(cache: Cache, keys: Sequence[int]) -> Request:
    """A request whose tokens all came in one step."""
    request = cache.admit()
    feed(cache, {request: keys})
    return request


def _entries(number: int, layer: LayerSpec, writers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Entries that the caller compressed: each is a function of who wrote its last token."""
    entries = layer.entries
    assert entries is not None
    closing = [(key, position) for key, position in writers if (position + 1) % entries.ratio == 0]
    found: list[Any] = [_table(key, number, "entries", entries.dim)[position] for key, position in closing]
    return np.array(found, np.float32).reshape(len(closing), entries.dim)


@lru_cache(maxsize=4096)
def _table(key: int, layer: int, role: str, width: int) -> np.ndarray:
    """Rows [LIMIT, width] of one writer."""
    return np.random.default_rng([key, layer, crc32(role.encode())]).standard_normal((LIMIT, width), np.float32)
