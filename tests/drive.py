"""The same random life of requests through several caches in lockstep, everything readable compared along the way.

The workload is drawn from a seed and the caches' own lengths, never from what a cache answers: admissions, ragged steps
(zero tokens, single tokens, chunks longer than a ring), truncations, failed steps, releases and reuse. Storage is filled
with 0xFF before use. ``drive`` yields (what was read, one NumPy array per cache); the caller decides how near they must be.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from backends_under_test import poison

import kvcore
from kvcore.spec import CacheSpec, LayerSpec, Rope


class Seen(NamedTuple):
    """One thing read from every cache: which verb and part, where, and what each cache answered."""

    what: str
    where: str
    answers: list[np.ndarray]


class Options(NamedTuple):
    """What a workload does.

    Attributes:
        steps: events to draw.
        longest: most new tokens of one request in a step.
        flush: compress in the cache; False: give every cache the same entries.
        faults: put NaN into some rows.
        limit: tokens that a request may reach.
    """

    steps: int = 14
    longest: int = 21
    flush: bool = False
    faults: bool = True
    limit: int = 60


class Failed(Exception):
    """Raised inside a step to have it rolled back."""


def drive(caches: Sequence[kvcore.Cache], seed: int, options: Options, happened: Counter[str]) -> Iterator[Seen]:
    """Run one workload through all caches; ``happened`` counts its events by name."""
    for cache in caches:
        poison(cache)
    rng = np.random.default_rng(seed)
    # One tuple a request: the same request in every cache.
    live: list[tuple[kvcore.Request, ...]] = []
    for number in range(options.steps):
        lengths = [requests[0].length for requests in live]
        event = _draw(rng, lengths, caches[0], options)
        happened[event] += 1
        if event == "admit":
            live.append(tuple(cache.admit() for cache in caches))
        elif event == "release":
            for request, cache in zip(live.pop(int(rng.integers(len(live)))), caches, strict=True):
                cache.release(request)
        elif event == "truncate":
            requests = live[int(rng.integers(len(live)))]
            drafts = min(caches[0].plan.max_draft_tokens, requests[0].length)
            length = requests[0].length - int(rng.integers(drafts + 1))
            for request, cache in zip(requests, caches, strict=True):
                cache.truncate(request, length)
        else:
            yield from _step(caches, live, rng, options, happened, failing=event == "failed step", name=f"event {number}")
        yield from _bytes(caches, f"event {number} ({event})", options)


def _draw(rng: np.random.Generator, lengths: list[int], cache: kvcore.Cache, options: Options) -> str:
    """The next event: one that is possible now."""
    if not lengths:
        return "admit"
    weights = {"step": 6.0, "failed step": 1.0, "truncate": 1.0, "admit": 2.0 * bool(cache.free_slots)}
    weights["release"] = 4.0 if max(lengths) >= options.limit else 0.3 * (not cache.free_slots)
    chances = np.array(list(weights.values()))
    return str(rng.choice(list(weights), p=chances / chances.sum()))


def _step(
    caches: Sequence[kvcore.Cache],
    live: list[tuple[kvcore.Request, ...]],
    rng: np.random.Generator,
    options: Options,
    happened: Counter[str],
    *,
    failing: bool,
    name: str,
) -> Iterator[Seen]:
    """One step of some requests, in random order, with readings before, between and after its appends."""
    chosen = [live[i] for i in rng.permutation(len(live))[: int(rng.integers(1, len(live) + 1))]]
    counts = []
    for requests in chosen:
        count = int(rng.choice([0, 1, 1, 2, int(rng.integers(3, options.longest + 1))]))
        counts.append(min(count, max(0, options.limit - requests[0].length)))
    happened["no new tokens"] += counts.count(0)
    happened["several requests"] += len(chosen) > 1
    ring = min((region.rows for region in caches[0].plan.regions if region.growth == "slot"), default=0)
    happened["more tokens than a ring"] += 0 < ring < max(counts)
    padding = {"pad_tokens": sum(counts) + 2, "pad_requests": len(counts) + 1} if rng.random() < 0.3 else {}
    happened["padded step"] += bool(padding)
    steps = [
        cache.step({requests[i]: count for requests, count in zip(chosen, counts, strict=True)}, **padding)
        for i, cache in enumerate(caches)
    ]
    tokens = len(steps[0].positions)
    spec = caches[0].spec
    for number, layer in enumerate(spec.all_layers):
        handles = [step.layer(number) for step in steps]
        for what, read in (*_rest(layer), *_append(layer, tokens, rng, options, happened), *_readers(layer, tokens, rng)):
            answers = [kvcore.to_numpy(array) for array in _lockstep(read, handles)]
            parts = len(answers) // len(handles)
            for part in range(parts):
                yield Seen(f"{what}.{part}" if parts > 1 else what, f"{name}, layer {number}", answers[part::parts])
    if failing:
        for step in steps:
            step.abort()
        return
    for step in steps:
        step.commit()


def _lockstep(read: Callable[..., Any], handles: list[Any]) -> Iterator[Any]:
    """Every array that a reading answers, cache by cache. A reading may look at the first cache's handle for input."""
    for handle in handles:
        found = read(handle)
        yield from () if found is None else (found if isinstance(found, tuple) else (found,))


Reading = tuple[str, Callable[[Any], Any]]


def _rest(layer: LayerSpec) -> Iterator[Reading]:
    """What a layer shows at the start of a step."""
    for role, _ in layer.components():
        yield f"gather_rows({role})", lambda handle, role=role: tuple(handle.gather_rows(role))
    if layer.window is not None:
        yield "gather_window", lambda handle: tuple(handle.gather_window())
    if layer.kv is not None:
        yield "gather_kv", lambda handle: tuple(handle.gather_kv())


def _append(
    layer: LayerSpec, tokens: int, rng: np.random.Generator, options: Options, happened: Counter[str]
) -> Iterator[Reading]:
    """Give a layer the step's rows: the same to every cache, as NumPy."""

    def floats(*shape: int, faults: bool = options.faults, bf16: bool = rng.random() < 0.3) -> np.ndarray:
        rows = rng.standard_normal((tokens, *shape)).astype(np.float32)
        rows *= np.exp2(rng.integers(-3, 4, (tokens, *[1] * len(shape)))).astype(np.float32)
        if faults and tokens and rng.random() < 0.1:
            rows[tuple(rng.integers(size) for size in rows.shape)] = np.nan
        return rows.astype(ml_dtypes.bfloat16) if bf16 else rows

    if layer.window is not None:
        rows = floats(layer.window.dim)
        yield "append_window", lambda handle: handle.append_window(rows)
    for role in ("tail", "index_tail"):
        tail = getattr(layer, role)
        if tail is not None:
            kv, score = floats(tail.width, faults=False, bf16=False), floats(tail.width, faults=False, bf16=False)
            score[rng.random(score.shape) < 0.05] = -np.inf
            yield f"append_{role}", lambda handle, role=role, kv=kv, score=score: getattr(handle, f"append_{role}")(kv, score)
    if layer.kv is not None:
        keys, values = layer.kv.parts
        k, v = floats(keys.heads, keys.format.dim), floats(values.heads, values.format.dim)
        yield "append_kv", lambda handle: handle.append_kv(k, v)
    if layer.entries is not None and layer.entries.share is None:
        yield from _store(layer, rng, options, happened)


def _store(layer: LayerSpec, rng: np.random.Generator, options: Options, happened: Counter[str]) -> Iterator[Reading]:
    """Entries of the windows that close: compressed by each cache, or given to all."""
    entries, keys = layer.entries, layer.index_keys
    seed = int(rng.integers(2**32))

    def given(handle: Any) -> tuple[Any, ...]:
        draw = np.random.default_rng(seed)
        count = len(handle.closed.entry_index)
        happened["closed entries"] += count
        values = draw.standard_normal((count, entries.dim)).astype(np.float32)
        handle.store_entries(values, None if keys is None else draw.standard_normal((count, keys.dim)).astype(np.float32))
        return tuple(handle.closed)

    def flushed(handle: Any) -> Any:
        draw = np.random.default_rng(seed)
        happened["closed entries"] += len(handle.closed.entry_index)
        weight = 1 + draw.standard_normal(entries.dim).astype(np.float32) / 8
        latents = handle.compress(norm_weight=weight)
        rope = Rope(dim=min(64, entries.dim // 2), theta=10000.0)
        index_weight = None if keys is None else 1 + draw.standard_normal(keys.dim).astype(np.float32) / 8
        handle.flush(norm_weight=weight, rope=rope, index_norm_weight=index_weight)
        return latents

    if options.flush and layer.tail is not None:
        yield "compress", flushed
    else:
        yield "closed", given


def _readers(layer: LayerSpec, tokens: int, rng: np.random.Generator) -> Iterator[Reading]:
    """Every verb that reads, after the step's rows are in."""
    yield from _rest(layer)
    yield "digest", lambda handle: np.array(handle.digest(), np.uint64)
    heads = 4
    bf16 = rng.random() < 0.3

    def queries(*shape: int) -> np.ndarray:
        q = rng.standard_normal((tokens, heads, *shape)).astype(np.float32)
        return q.astype(ml_dtypes.bfloat16) if bf16 else q

    sink = rng.standard_normal(heads).astype(np.float32)
    if layer.kv is not None:
        q = queries(layer.kv.key_dim)
        yield "mask", lambda handle: handle.mask()
        yield "attend", lambda handle: tuple(handle.attend(q))
        yield "attend", lambda handle: tuple(handle.attend(q, sink=sink, scale=0.3))
        return
    component = layer.window or layer.entries
    q = queries(component.dim)
    yield "attend", lambda handle: tuple(handle.attend(q, sink=sink))
    if layer.entries is None:
        return
    picks = np.argsort(rng.random((tokens, 24)), axis=1)[:, :7].astype(np.int64) - 3
    yield "gather_entries", lambda handle: tuple(handle.gather_entries(picks))
    yield "gather_all_entries", lambda handle: tuple(handle.gather_all_entries())
    yield "attend", lambda handle: tuple(handle.attend(q, picks, scale=0.05))
    yield "attend", lambda handle: tuple(handle.attend(q, picks[:, :0].astype(np.int32)))
    if layer.index_keys is None:
        return
    index_q, weights = queries(layer.index_keys.dim), queries()
    yield "gather_all_index_keys", lambda handle: tuple(handle.gather_all_index_keys())
    yield "index_scores", lambda handle: handle.index_scores(index_q, weights)
    # Few distinct scores, so that most of them tie.
    scores = rng.integers(-2, 3, (tokens, 9)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores[rng.random(scores.shape) < 0.1] = -0.0
    yield "select", lambda handle: handle.select(scores, 5)
    yield "select", lambda handle: handle.select(scores, 12)


def _bytes(caches: Sequence[kvcore.Cache], where: str, options: Options) -> Iterator[Seen]:
    """Between steps: the digest, and every byte of every pool, live or not; computed entries may differ, so not those."""
    if not options.flush:
        yield Seen("digest", where, [np.array(cache.digest(), np.uint64) for cache in caches])
    for name in caches[0].pools:
        if not (options.flush and name.split(".")[1] in ("entries", "index_keys")):
            yield Seen("pool", f"{where}, {name}", [kvcore.to_numpy(cache.pools[name]) for cache in caches])


def classic_spec(formats: Sequence[tuple[str, str]]) -> CacheSpec:
    """Every storage and visibility of classic layers, in turn over (key format, value format); K and V differ in size."""
    from kvcore.spec import KV

    kinds: list[dict[str, Any]] = [
        {"storage": "paged"},
        {"storage": "slot"},
        {"storage": "paged", "window": 7},
        {"storage": "ring", "window": 6},
        {"storage": "ring", "chunk": 5},
        {"storage": "slot", "chunk": 8},
    ]
    layers = []
    for kind, (key_format, value_format) in zip(kinds, itertools.cycle(formats), strict=False):
        kv = KV(
            key_heads=2, key_dim=64, value_heads=4, value_dim=32, key_format=key_format, value_format=value_format, **kind
        )
        layers.append(LayerSpec(kv=kv))
    return CacheSpec(layers=layers, block_tokens=8, name="every classic kind")
