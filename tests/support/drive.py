"""The same random life of requests through several caches in lockstep, everything readable compared along the way.

The kinds of event follow ``LIFE``, their details a seed; nothing depends on what a cache answers. Steps are ragged: no
tokens, single tokens, chunks longer than the smallest ring. Storage is filled with 0xFF before use. ``drive`` yields
what was read, one NumPy array per cache; the caller decides how near they must be.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import kvcore
from kvcore.ops import tolerances
from kvcore.ops.tolerances import Tolerance
from kvcore.spec import KV, CacheSpec, LayerSpec, Rope
from tests.support.backends_under_test import poison


class Seen(NamedTuple):
    """One thing read from every cache: which verb and part, where, and what each cache answered."""

    what: str
    where: str
    answers: list[np.ndarray]


def bits(array: np.ndarray) -> np.ndarray:
    """Integers that tell -0 from 0 and make every NaN alike."""
    if array.dtype.kind not in "fV":
        return array
    words = array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
    return np.where(np.isnan(array.astype(np.float32)), np.uint32(0x7FC00000), words)


def assert_same(seen: Seen) -> None:
    want, got = seen.answers
    assert (got.shape, got.dtype) == (want.shape, want.dtype), seen.what
    wrong = np.argwhere(bits(got) != bits(want))
    assert not len(wrong), f"{seen.what} at {seen.where}: {len(wrong)} differ, the first at {wrong[0].tolist()}"


def assert_near(seen: Seen, tolerance: Tolerance) -> None:
    """Within relative·|want| + absolute·largest; NaN and infinities must be in the same places."""
    want, got = seen.answers
    assert (got.shape, got.dtype) == (want.shape, want.dtype), seen.what
    want, got = want.astype(np.float32), got.astype(np.float32)
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    where = f"{seen.what} at {seen.where}"
    np.testing.assert_allclose(got, want, tolerance.relative, tolerance.absolute * largest, err_msg=where)


def assert_agrees(seen: Seen) -> None:
    """Attention and scores may be summed in another order; everything else is exact."""
    operation = {"attend.0": "attention", "attend.1": "attention", "index_scores": "scores"}.get(seen.what)
    if operation is None:
        assert_same(seen)
        return
    precision = "bf16" if seen.answers[0].dtype == ml_dtypes.bfloat16 else "fp32"
    assert_near(seen, tolerances.computed(operation, precision))


LIFE = (
    "admit",
    "step",
    "admit",
    "long step",
    "step",
    "truncate",
    "padded step",
    "admit",
    "failed step",
    "long step",
    "release",
    "admit",
    "step",
    "padded long step",
    "failed long step",
    "truncate",
    "step",
)
"""What happens, in order: slots are reused once a request has left, and every kind of step meets wrapped rings."""


class Options(NamedTuple):
    """What a workload does.

    Attributes:
        flush: compress in the cache; False: give every cache the same entries.
        faults: put NaN into some rows.
        limit: tokens that a request may reach.
    """

    flush: bool = False
    faults: bool = True
    limit: int = 64


def drive(caches: Sequence[kvcore.Cache], seed: int, options: Options, happened: Counter[str]) -> Iterator[Seen]:
    """Run one workload through all caches; ``happened`` counts its events by name."""
    for cache in caches:
        poison(cache)
    rng = np.random.default_rng(seed)
    # One tuple a request: the same request in every cache.
    live: list[tuple[kvcore.Request, ...]] = []
    for number, event in enumerate(LIFE):
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
            yield from _step(caches, live, rng, options, happened, event=event, name=f"event {number}, {event}")
        yield from _bytes(caches, f"event {number}, {event}", options)


def _step(
    caches: Sequence[kvcore.Cache],
    live: list[tuple[kvcore.Request, ...]],
    rng: np.random.Generator,
    options: Options,
    happened: Counter[str],
    *,
    event: str,
    name: str,
) -> Iterator[Seen]:
    """One step of some requests, in random order, with readings before, between and after its appends."""
    some = len(live) if "padded" in event else int(rng.integers(1, len(live) + 1))
    chosen = [live[i] for i in rng.permutation(len(live))[:some]]
    ring = min((region.rows for region in caches[0].plan.regions if region.growth == "slot"), default=8)
    counts = [int(rng.choice([0, 1, 1, 2, 5])) for _ in chosen]
    if "long" in event:
        counts[0] = ring + int(rng.integers(1, 5))
    if "padded" in event:
        counts[-1] = 0
    counts = [min(count, options.limit - requests[0].length) for count, requests in zip(counts, chosen, strict=True)]
    happened["no new tokens"] += counts.count(0)
    happened["several requests"] += len(chosen) > 1
    happened["more tokens than a ring"] += max(counts) > ring
    padding = {"pad_tokens": sum(counts) + 2, "pad_requests": len(counts) + 1} if "padded" in event else {}
    steps = [
        cache.step({requests[i]: count for requests, count in zip(chosen, counts, strict=True)}, **padding)
        for i, cache in enumerate(caches)
    ]
    tokens = len(steps[0].positions)
    spec = caches[0].spec
    for number, layer in enumerate(spec.all_layers):
        handles = [step.layer(number) for step in steps]
        appends = _append(layer, tokens, rng, options, happened)
        for what, read in (*_rest(layer), *appends, *_readers(layer, tokens, rng, options)):
            answers = [kvcore.to_numpy(array) for array in _lockstep(read, handles)]
            parts = len(answers) // len(handles)
            for part in range(parts):
                yield Seen(f"{what}.{part}" if parts > 1 else what, f"{name}, layer {number}", answers[part::parts])
    if "failed" in event:
        for step in steps:
            step.abort()
        return
    for step in steps:
        step.commit()


def _lockstep(read: Callable[[Any], Any], handles: list[Any]) -> Iterator[Any]:
    """Every array that a reading answers, cache by cache."""
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
        latents = floats(layer.window.dim)
        yield "append_window", lambda handle: handle.append_window(latents)
    for role in ("tail", "index_tail"):
        tail = getattr(layer, role)
        if tail is not None:
            kv, score = floats(tail.width, faults=False, bf16=False), floats(tail.width, faults=False, bf16=False)
            score[rng.random(score.shape) < 0.05] = -np.inf
            rows = kv, score
            yield f"append_{role}", lambda handle, role=role, rows=rows: getattr(handle, f"append_{role}")(*rows)
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
        index_keys = None if keys is None else draw.standard_normal((count, keys.dim)).astype(np.float32)
        handle.store_entries(values, index_keys)
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


def _readers(layer: LayerSpec, tokens: int, rng: np.random.Generator, options: Options) -> Iterator[Reading]:
    """Every verb that reads, after the step's rows are in; what is computed from computed entries is left out."""
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
    if layer.entries is not None:
        picks = np.argsort(rng.random((tokens, 24)), axis=1)[:, :7].astype(np.int64) - 3
        yield "gather_entries", lambda handle: tuple(handle.gather_entries(picks))
        yield "gather_all_entries", lambda handle: tuple(handle.gather_all_entries())
    if layer.index_keys is not None:
        yield "gather_all_index_keys", lambda handle: tuple(handle.gather_all_index_keys())
    if options.flush:
        return
    yield "attend", lambda handle: tuple(handle.attend(q, sink=sink))
    if layer.entries is not None:
        yield "attend", lambda handle: tuple(handle.attend(q, picks, scale=0.05))
        yield "attend", lambda handle: tuple(handle.attend(q, picks[:, :0].astype(np.int32)))
    if layer.index_keys is not None:
        index_q, weights = queries(layer.index_keys.dim), queries()
        yield "index_scores", lambda handle: handle.index_scores(index_q, weights)
        yield from _selections(tokens, rng)


def _selections(tokens: int, rng: np.random.Generator) -> Iterator[Reading]:
    """Top-k of the same scores for every cache: few distinct ones, so that most tie, some of them none at all."""
    scores = rng.integers(-2, 3, (tokens, 9)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores[rng.random(scores.shape) < 0.1] = -0.0
    yield "select", lambda handle: handle.select(scores, 5)
    yield "select", lambda handle: handle.select(scores, 12)


def _bytes(caches: Sequence[kvcore.Cache], where: str, options: Options) -> Iterator[Seen]:
    """Between steps: the digest, and every byte of every pool, live or not; not of entries that each cache computed."""
    if not options.flush:
        yield Seen("digest", where, [np.array(cache.digest(), np.uint64) for cache in caches])
    for name in caches[0].pools:
        if not (options.flush and name.split(".")[1] in ("entries", "index_keys")):
            yield Seen("pool", f"{where}, {name}", [kvcore.to_numpy(cache.pools[name]) for cache in caches])


def classic_spec(formats: Sequence[tuple[str, str]]) -> CacheSpec:
    """Every storage and visibility of classic layers, their formats (key, value) in turn; K and V differ in size."""
    kinds: list[dict[str, Any]] = [
        {"storage": "paged"},
        {"storage": "slot"},
        {"storage": "paged", "window": 7},
        {"storage": "ring", "window": 6},
        {"storage": "ring", "chunk": 5},
        {"storage": "slot", "chunk": 8},
    ]
    sizes = {"key_heads": 2, "key_dim": 64, "value_heads": 4, "value_dim": 32}
    layers = [
        LayerSpec(kv=KV(**sizes, **kind, key_format=key, value_format=value))
        for kind, (key, value) in zip(kinds, itertools.cycle(formats), strict=False)
    ]
    return CacheSpec(layers=layers, block_tokens=8, name="every classic kind")
