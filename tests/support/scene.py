"""Caches whose rows say which token they belong to, on poisoned storage, read back with every promise checked.

A token's value fills every channel of its rows, so what a gather returns reads as positions. Where a component has two
halves they differ: a carry half holds the value plus 100, a V row the negated value. Storage that no live request holds
is filled with 0xFF bytes (NaN in every float code), so that a row read by mistake shows at once.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import kvcore
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Tail, Window
from kvcore.testing.names import Stream
from kvcore.testing.tagged_rows import append_layer

CARRY = 100.0
DIM = 8


def ring(window: int, *, format: str = "fp32", dim: int = DIM, rows: int | None = None) -> LayerSpec:
    """A layer with a latent window only."""
    return LayerSpec(window=Window(dim=dim, window=window, format=format, rows=rows))


def compressed(
    ratio: int,
    *,
    overlap: bool = True,
    window: int = 4,
    format: str = "fp32",
    dim: int = DIM,
    indexer: bool = True,
    key_format: str = "fp32",
    key_dim: int = DIM,
    topk: int = 4,
) -> LayerSpec:
    """A window and compressed entries, with an indexer unless told otherwise."""
    return LayerSpec(
        window=Window(dim=dim, window=window, format=format),
        tail=Tail(dim=dim, ratio=ratio, overlap=overlap),
        entries=Entries(dim=dim, ratio=ratio, format=format),
        index_tail=Tail(dim=key_dim, ratio=ratio, overlap=overlap) if indexer else None,
        index_keys=IndexKeys(dim=key_dim, ratio=ratio, heads=2, topk=topk, format=key_format) if indexer else None,
    )


def stored(
    ratio: int, *, format: str = "fp32", dim: int = DIM, key_format: str = "fp32", key_dim: int = DIM
) -> LayerSpec:
    """Entries and index keys that the caller compresses: no tail, no window."""
    return LayerSpec(
        entries=Entries(dim=dim, ratio=ratio, format=format),
        index_keys=IndexKeys(dim=key_dim, ratio=ratio, heads=2, topk=4, format=key_format),
    )


def classic(storage: str = "paged", *, heads: int = 2, dim: int = 4, **fields: Any) -> LayerSpec:
    """A classic K-V layer with values of another width than its keys."""
    fields = {"key_format": "fp32", "value_dim": dim + 2, **fields}
    return LayerSpec(kv=KV(key_heads=heads, key_dim=dim, storage=storage, **fields))


def create(
    layers: Sequence[LayerSpec] | CacheSpec, backend: str, *, block_tokens: int = 8, **sizes: Any
) -> kvcore.Cache:
    """A cache of two requests and 64 tokens unless told otherwise, poisoned before use."""
    spec = layers if isinstance(layers, CacheSpec) else CacheSpec(layers=layers, block_tokens=block_tokens)
    if not {"max_tokens", "budget_bytes"} & set(sizes):
        sizes["max_tokens"] = 64
    cache = kvcore.create_cache(spec, backend=backend, **{"max_requests": 2, **sizes})
    poison(cache)
    return cache


def poison(cache: kvcore.Cache, pattern: bytes = b"\xff") -> None:
    """Fill every slot and block that no live request holds with a byte pattern."""
    slots = {request.slot for request in cache.requests}
    blocks = {block for request in cache.requests for block in request.blocks}
    pools = {}
    for region in cache.plan.stored:
        held = slots if region.growth == "slot" else blocks
        free = [unit for unit in range(cache.plan.units(region)) if unit not in held]
        for name, size in region.buffers.values():
            host = kvcore.to_numpy(cache.pools[name])
            host.view(np.uint8).reshape(len(host), size)[free] = np.resize(np.frombuffer(pattern, np.uint8), size)
            pools[name] = cache.asarray(host)
    cache.pools = pools


def raw(cache: kvcore.Cache) -> dict[str, bytes]:
    """Every byte of the cache, by pool."""
    return {name: kvcore.to_numpy(array).tobytes() for name, array in cache.pools.items()}


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, list[int]]:
    """Pool -> offsets of the bytes that differ; pools without a difference are left out."""
    found = {}
    for name, old in before.items():
        differs = np.frombuffer(old, np.uint8) != np.frombuffer(after[name], np.uint8)
        if differs.any():
            found[name] = np.flatnonzero(differs).tolist()
    return found


def filled(values: Sequence[float] | np.ndarray, *shape: int) -> np.ndarray:
    """[n, *shape] fp32, every channel of row i being values[i]."""
    column = np.asarray(values, np.float32).reshape(-1, *[1] * len(shape))
    return np.broadcast_to(column, (len(column), *shape)).copy()


def write(
    cache: kvcore.Cache,
    tokens: Mapping[kvcore.Request, Sequence[float]],
    *,
    gate: float = 0.0,
    filler: float = np.nan,
    look: Callable[[Any], None] | None = None,
    **padding: int,
) -> None:
    """One committed step: the new tokens' values by request, through every layer; padding rows hold ``filler``."""
    with cache.step({request: len(values) for request, values in tokens.items()}, **padding) as step:
        fill(step, list(itertools.chain(*tokens.values())), gate=gate, filler=filler)
        if look is not None:
            look(step)


def fill(step: Any, values: Sequence[float], *, gate: float = 0.0, filler: float = np.nan) -> None:
    """Give every layer of an open step its rows, and compress what closes."""
    tokens = np.full(len(step.positions), filler, np.float32)
    tokens[: len(values)] = values
    for number, layer in enumerate(step.cache.spec.layers):
        fill_layer(step.layer(number), layer, tokens, gate=gate)


def fill_layer(handle: Any, layer: LayerSpec, tokens: np.ndarray, *, gate: float = 0.0) -> None:
    """Give one layer its rows; entry i of the n-th request is 1000·n + i where the caller compresses."""
    append_layer(handle, 0, layer, partial(_rows, layer, tokens, gate), partial(_closed, handle), {})


def _rows(layer: LayerSpec, tokens: np.ndarray, gate: float, stream: Stream, *shape: int) -> np.ndarray:
    rows = filled(tokens, *shape)
    if stream.part == "score":
        return np.full(rows.shape, gate, np.float32)
    if stream.role.endswith("tail") and getattr(layer, stream.role).overlap:
        rows[:, : shape[0] // 2] += np.float32(CARRY)
    return -rows if stream.part == "value" else rows


def _closed(handle: Any, _: Stream, dim: int) -> np.ndarray:
    requests, entries = (kvcore.to_numpy(array) for array in handle.closed)
    return filled(1000.0 * requests + entries, dim)


@contextmanager
def at_rest(cache: kvcore.Cache, *requests: kvcore.Request) -> Iterator[Any]:
    """A step without new tokens, for reading."""
    with cache.step(dict.fromkeys(requests, 0)) as step:
        yield step


def read(
    cache: kvcore.Cache, reader: Callable[..., list[Any]], *requests: kvcore.Request, layer: int = 0, **options: Any
) -> list[Any]:
    """What ``reader`` finds in a layer for each request, between steps."""
    with at_rest(cache, *requests) as step:
        return reader(step, layer, **options)


def window_of(step: Any, layer: int = 0, *, rtol: float = 0.0) -> list[dict[int, float]]:
    """Position -> value of each request's window, in order."""
    gathered = step.layer(layer).gather_window()
    return rows_of(gathered.values, gathered.positions, rtol=rtol)


def kv_of(step: Any, layer: int = 0) -> list[dict[int, float]]:
    """Position -> value of each request's keys, in order; the values must be their negatives."""
    keys, values, positions = step.layer(layer).gather_kv()
    found = rows_of(keys, positions)
    assert rows_of(values, positions) == [{p: -v for p, v in rows.items()} for rows in found]
    return found


def tail_of(step: Any, layer: int = 0, *, role: str = "tail") -> list[dict[int, float]]:
    """Position -> value of each request's live tail rows; carry halves must be 100 more."""
    gathered = step.layer(layer).gather_rows(role)
    tail = getattr(step.cache.spec.all_layers[layer], role)
    content = kvcore.to_numpy(gathered.rows).view(np.float32)
    found = rows_of(content[..., tail.width - tail.dim : tail.width], gathered.positions)
    if tail.overlap:
        carry = rows_of(content[..., : tail.dim], gathered.positions)
        assert carry == [{p: v + CARRY for p, v in rows.items()} for rows in found]
    return found


def entries_of(step: Any, layer: int = 0) -> list[list[float]]:
    """The value of every entry of each request, in order."""
    return _entries(step, layer, step.layer(layer).gather_all_entries())


def keys_of(step: Any, layer: int = 0) -> list[list[float]]:
    """The value of every index key of each request, in order."""
    return _entries(step, layer, step.layer(layer).gather_all_index_keys())


def _entries(step: Any, layer: int, gathered: Any) -> list[list[float]]:
    found = rows_of(gathered.values, gathered.positions)
    assert kvcore.to_numpy(gathered.counts).tolist() == [len(rows) for rows in found]
    ratio = step.cache.spec.all_layers[layer].entries.ratio
    assert all(list(rows) == [ratio * entry for entry in range(len(rows))] for rows in found)
    return [list(rows.values()) for rows in found]


def rows_of(values: Any, positions: Any, *, rtol: float = 0.0) -> list[dict[int, float]]:
    """[Q, n, ...] values and [Q, n] positions -> position -> value for each request.

    Checks what every gather promises: valid rows first and in position order, all channels of a row alike (within
    ``rtol``, where fields are rounded differently), and rows without a position exactly zero.
    """
    values = kvcore.to_numpy(values).astype(np.float64)
    positions = kvcore.to_numpy(positions)
    assert values.shape[:2] == positions.shape
    found = []
    for channels, places in zip(values.reshape(*values.shape[:2], math.prod(values.shape[2:])), positions, strict=True):
        count = int((places >= 0).sum())
        assert (places[count:] == -1).all(), "an invalid row before a valid one"
        assert (np.diff(places[:count]) > 0).all(), "positions out of order"
        assert not channels[count:].any(), "an invalid row that is not zero"
        assert np.allclose(channels[:count], channels[:count, :1], rtol=rtol, atol=0), "channels of one row differ"
        found.append(dict(zip(places[:count].tolist(), channels[:count, 0].tolist(), strict=True)))
    return found


def seen_by(step: Any, layer: int = 0, *, heads: int = 2, selected: Any = None) -> list[tuple[int, float]]:
    """(how many rows each query sees, their mean value), found by attending with zero queries."""
    spec = step.cache.spec.all_layers[layer]
    dim = spec.kv.key_dim if spec.kv is not None else (spec.window or spec.entries).dim
    tokens = len(step.positions)
    out, lse = step.layer(layer).attend(np.zeros((tokens, heads, dim), np.float32), selected)
    out, lse = kvcore.to_numpy(out).astype(np.float64), kvcore.to_numpy(lse)
    assert np.isfinite(out).all()
    assert np.ptp(out, axis=(1, 2)).max(initial=0) < 1e-4
    counts = np.exp(lse[:, 0])
    assert np.abs(counts - np.round(counts)).max(initial=0) < 1e-3
    sign = 1 if spec.kv is None else -1
    return [(round(float(n)), sign * round(float(mean), 4) + 0.0) for n, mean in zip(counts, out[:, 0, 0], strict=True)]


def numbered(first: int, last: int, base: float = 0.0) -> dict[int, float]:
    """Positions first .. last, each holding base + position: what a reader should find."""
    return {position: base + position for position in range(first, last + 1)}


def poison_slots(cache: kvcore.Cache) -> None:
    """Fill every slot that no live request holds with 0xFF; blocks may be cached, so they stay."""
    held = {request.slot for request in cache.requests}
    pools = {}
    for region in cache.plan.stored:
        if region.growth == "slot":
            free = [slot for slot in range(cache.plan.slots) if slot not in held]
            for name, _ in region.buffers.values():
                host = kvcore.to_numpy(cache.pools[name])
                host[free] = 0xFF
                pools[name] = cache.asarray(host)
    cache.pools = cache.pools.replace(pools)


def given_to(layer: LayerSpec, random: np.random.Generator, tokens: int) -> dict[str, Any]:
    """What a model gives a layer that compresses: by argument of ``decode``."""

    def rows(*shape: int) -> np.ndarray:
        return random.standard_normal((tokens, *shape), dtype=np.float32)

    found: dict[str, Any] = {"q": rows(2, layer.window.dim), "window": rows(layer.window.dim)}
    for role in ("tail", "index_tail"):
        if tail := getattr(layer, role):
            found[role] = rows(tail.width), rows(tail.width)
    if keys := layer.index_keys:
        found["index"] = rows(keys.heads, keys.dim), rows(keys.heads)
    return found


def put(cache: kvcore.Cache, name: str, host: np.ndarray) -> None:
    """Put other bytes into a pool behind its cache's back."""
    state = cache._state
    if state.ops.in_place:
        state.pools[name][...] = cache.asarray(host)
    else:
        state.pools = state.pools.replace({name: cache.asarray(host)})
