"""Two components that kvcore does not know, each one class and one field of a layer, and a life of requests with them.

``Last`` is live for one position. ``Notes`` grows with history, in two parts.
"""

from typing import Any

import numpy as np

import kvcore
from kvcore.spec import FORMATS, KV, CacheSpec, Component, LayerSpec, Part, Window


class Last(Component, frozen=True, kw_only=True):
    """The row of the last position, in a ring of one row and spare ones."""

    dim: int
    format: str = "fp32"

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", 1, FORMATS[self.format].for_dim(self.dim)),)

    @property
    def span(self) -> int:
        return 1

    def live_bounds(self, length: Any, maximum: Any = max) -> tuple[Any, Any]:
        return maximum(length - 1, 0), length


class Notes(Component, frozen=True, kw_only=True):
    """Two parts for every position, paged: three heads of bytes and one plain row."""

    dim: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part("heads", 3, FORMATS["int8_row"].for_dim(self.dim)), Part("flag", 1, FORMATS["bf16"].for_dim(2))

    @property
    def growth(self) -> Any:
        return "block"

    @property
    def restore(self) -> Any:
        return "retain"

    def live_bounds(self, length: Any, maximum: Any = max) -> tuple[Any, Any]:
        return maximum(0 * length, 0), length


class OpenLayer(LayerSpec, frozen=True, kw_only=True):
    last: Last | None = None
    notes: Notes | None = None


def spec() -> CacheSpec:
    layers = (
        OpenLayer(window=Window(dim=8, window=3, format="fp32"), last=Last(dim=6)),
        OpenLayer(notes=Notes(dim=4)),
        OpenLayer(kv=KV(key_heads=1, key_dim=4), last=Last(dim=4, format="bf16"), notes=Notes(dim=8)),
    )
    return CacheSpec(layers=layers, block_tokens=4, name="outside")


def rows(key: int, layer: int, name: str, positions: range, *shape: int) -> np.ndarray:
    """Values that tell whose they are: every one depends on the writer, the place and the position."""
    found = [
        np.random.default_rng([key, layer, len(name), position]).standard_normal(shape, np.float32)
        for position in positions
    ]
    return np.array(found, np.float32).reshape(len(positions), *shape)


def fill(step: Any, keys: dict[int, range]) -> None:
    """Append to every layer: writer -> positions, in step order."""

    def of(number: int, name: str, *shape: int) -> np.ndarray:
        return np.concatenate([rows(key, number, name, positions, *shape) for key, positions in keys.items()])

    for number, layer in enumerate(step.cache.spec.layers):
        handle = step.layer(number)
        if layer.window is not None:
            handle.append_window(of(number, "window", 8))
        if layer.kv is not None:
            handle.append_kv(of(number, "k", 1, 4), of(number, "vv", 1, 4))
        if layer.last is not None:
            handle.append_rows("last", of(number, "last", layer.last.dim))
        if layer.notes is not None:
            flags = np.floor(of(number, "flag", 2))
            handle.append_rows("notes", of(number, "notes", 3, layer.notes.dim), flags)


def create(backend: str, **options: Any) -> kvcore.Cache:
    given = {"max_requests": 4, "max_tokens": 64, "max_draft_tokens": 2} | options
    return kvcore.create_cache(spec(), backend=backend, **given)


def take(cache: kvcore.Cache, keys: dict[Any, tuple[int, int]]) -> None:
    """One committed step: request -> (writer, new tokens)."""
    with cache.step({request: new for request, (_, new) in keys.items()}) as step:
        fill(step, {key: range(request.length, request.length + new) for request, (key, new) in keys.items()})


def gathered(cache: kvcore.Cache, request: Any) -> list[tuple[Any, Any]]:
    """Canonical rows and positions of every role of a request."""
    found = []
    with cache.step({request: 0}) as step:
        for number, layer in enumerate(cache.spec.layers):
            for role in layer.roles:
                raw = step.layer(number).gather_rows(role)
                found.append((kvcore.to_numpy(raw.rows), kvcore.to_numpy(raw.positions)))
    return found


def live_a_life(backend: str, layout: str = "auto") -> dict[str, Any]:
    """Append in chunks, abort, fork, roll back, export and import: all that can be seen of it."""
    seen: dict[str, Any] = {}
    cache = create(backend, layout=layout)
    assert cache.nbytes == cache.plan.nbytes
    a, b = cache.admit(), cache.admit()
    take(cache, {a: (1, 7), b: (2, 1)})
    take(cache, {b: (2, 3), a: (1, 1)})
    seen["written"] = cache.digest()
    # Against what was given, not only against another backend: the last position's row, every position's notes.
    last, positions = gathered(cache, a)[1]
    assert positions.tolist() == [[7]]
    assert last.view(np.float32)[0, 0].tolist() == rows(1, 0, "last", range(7, 8), 6)[0].tolist()
    notes, positions = gathered(cache, a)[2]
    assert positions.tolist() == [list(range(8))]
    flags = notes[0, :, -4:].copy().view(np.uint16).astype(np.uint32) << 16
    assert flags.view(np.float32).tolist() == np.floor(rows(1, 1, "flag", range(8), 2)).tolist()

    try:
        with cache.step({a: 4, b: 1}) as step:
            fill(step, {3: range(8, 12), 4: range(4, 5)})
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert cache.digest() == seen["written"]
    fork = cache.fork(a)
    take(cache, {fork: (5, 2)})
    take(cache, {a: (1, 1)})
    seen["forked"] = cache.digest([a, fork, b])
    cache.truncate(fork, 8)
    seen["rolled back"] = cache.digest([fork])
    blob = cache.export_request(a)
    again = cache.import_request(blob)
    assert cache.digest([again]) == cache.digest([a])
    seen["blob"] = bytes(blob)
    seen["rows"] = [(raw.tolist(), places.tolist()) for raw, places in gathered(cache, again)]
    cache.release(again)
    with cache.step({a: 5, b: 2}, pad_tokens=9, pad_requests=3) as step:
        with_padding = {1: range(9, 14), 2: range(4, 6), 9: range(2)}
        fill(step, with_padding)
        seen["layer"] = [step.layer(number).digest() for number in range(3)]
    seen["padded"] = cache.digest([a, b])
    return seen
