"""Giving a cache rows that say whose they are: every value is a function of (key, layer, role, position).

A key stands for one writer of tokens: a request, or a request after it was rolled back or forked. Two caches hold the
same if and only if the same keys wrote the same positions, so a row that leaks, goes stale or lands elsewhere is seen
in the digest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any
from zlib import crc32

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.cache import Cache, LayerHandle, Step
from kvcore.requests.manager import Request
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window
from kvcore.testing.names import Stream

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


def append_layer(
    handle: LayerHandle | Any,
    number: int,
    layer: LayerSpec,
    rows: Callable[..., Any],
    closed: Callable[..., Any] | None = None,
    flush: Mapping[str, Any] | None = None,
) -> None:
    """Give one layer of an open step its rows, whatever it is made of, and have stored what closes.

    Args:
        handle: of the layer.
        number: of the layer, for its streams.
        layer: of the spec.
        rows: (stream, *shape of one token's) -> the step's array [T, *shape].
        closed: likewise of the entries that the caller compressed, [entries that close, dim]; None: none are stored.
        flush: options of the flush that follows a tail; None: a tail's rows are not compressed.
    """
    if layer.window is not None:
        handle.append_window(rows(Stream(number, "window"), layer.window.dim))
    for role, append in (("tail", handle.append_tail), ("index_tail", handle.append_index_tail)):
        tail: Tail | None = getattr(layer, role)
        if tail is not None:
            append(*(rows(Stream(number, role, part), tail.width) for part in tail.streams))
    if layer.kv is not None:
        parts = layer.kv.given
        handle.append_kv(*(rows(Stream(number, "kv", part.name), part.heads, part.format.dim or 0) for part in parts))
    if layer.tail is not None and flush is not None:
        handle.flush(**flush)
    elif closed is not None and layer.entries is not None and layer.entries.share is None:
        keys = None if layer.index_keys is None else closed(Stream(number, "index_keys"), layer.index_keys.dim)
        handle.store_entries(closed(Stream(number, "entries"), layer.entries.dim), keys)


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
    told = [key for keys in new for key in keys]
    writers = list(zip(told, to_numpy(step.positions)[: len(told)].tolist(), strict=True))
    for number, layer in enumerate(step.cache.spec.all_layers):
        # An entry that the caller compressed is a function of who wrote its last token.
        ratio = 1 if layer.entries is None else layer.entries.ratio
        closing = [(key, position) for key, position in writers if (position + 1) % ratio == 0]
        handle: Any = step.layer(number)
        append_layer(
            _Reusing(handle) if reused else handle,
            number,
            layer,
            partial(_rows, writers),
            partial(_rows, closing),
            {"rope": ROPE},
        )


def written(cache: Cache, keys: Sequence[int]) -> Request:
    """A request whose tokens all came in one step."""
    request = cache.admit()
    feed(cache, {request: keys})
    return request


class _Reusing:
    """A layer whose caller writes other numbers into its arrays as soon as a verb has returned."""

    def __init__(self, handle: LayerHandle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._handle, name)

        def run(*arrays: Any, **options: Any) -> None:
            verb(*arrays, **options)
            for array in arrays:
                if array is not None:
                    array.fill(7.0)

        return run


def _rows(writers: Sequence[tuple[int, int]], stream: Stream, *shape: int) -> np.ndarray:
    """Rows [n, *shape] of a stream by who wrote them, and where."""
    name = f"{stream.role} {stream.part}"
    found = [_table(key, stream.layer, name, int(np.prod(shape)))[position] for key, position in writers]
    return np.array(found, np.float32).reshape(len(writers), *shape)


@lru_cache(maxsize=4096)
def _table(key: int, layer: int, role: str, width: int) -> np.ndarray:
    """Rows [LIMIT, width] of one writer."""
    return np.random.default_rng([key, layer, crc32(role.encode())]).standard_normal((LIMIT, width), np.float32)
