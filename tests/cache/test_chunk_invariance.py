"""What a cache holds depends on which positions were written, never on how they were split into calls.

Random splits of up to 1000 tokens, three requests by turns, drafts that are rolled back in between: canonical rows of
every role, counts, digests and gathered values must equal those of one single step.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Window
from tests.support import scene
from tests.support.samples import examples

LONGEST = 1000
REQUESTS = 3
ROPE = Rope(dim=4, theta=1e4)
SIZES = (1, 3, 4, 5, 7, 8, 9, 31, 32, 33, 127)


def _shared(share: int | None) -> LayerSpec:
    return LayerSpec(
        window=Window(dim=8, window=7, format="bf16"),
        entries=Entries(dim=8, ratio=2, format="bf16", share=share),
        index_keys=IndexKeys(dim=8, ratio=2, heads=2, topk=2, format="fp32", share=share),
    )


SPEC = CacheSpec(
    layers=[
        scene.compressed(4, window=6, key_format="index_fp4_68_h", key_dim=128),
        scene.compressed(8, overlap=False, window=33, format="bf16", indexer=False),
        _shared(None),
        _shared(2),
        scene.classic(heads=1, key_format="fp8_row"),
        scene.classic("slot", heads=1, key_format="int8_row"),
        scene.classic("ring", heads=1, window=9, value_format="bf16"),
        scene.classic("ring", heads=1, chunk=8),
    ],
    block_tokens=16,
)


def _content() -> list[list[dict[str, np.ndarray]]]:
    """Random rows for every request, layer and argument, long enough for the longest request."""
    random = np.random.default_rng(20)

    def rows(*shape: int) -> np.ndarray:
        return random.standard_normal((LONGEST, *shape)).astype(np.float32)

    def layer(spec: LayerSpec) -> dict[str, np.ndarray]:
        found = {role: rows(2 * getattr(spec, role).width) for role in ("tail", "index_tail") if getattr(spec, role)}
        if spec.window is not None:
            found["window"] = rows(spec.window.dim)
        if spec.kv is not None:
            found["key"], found["value"] = (rows(part.heads, part.format.dim) for part in spec.kv.parts)
        if spec.entries is not None and spec.tail is None:
            found["entries"], found["index_keys"] = rows(spec.entries.dim), rows(spec.index_keys.dim)
        return found

    return [[layer(spec) for spec in SPEC.layers] for _ in range(REQUESTS)]


CONTENT = _content()


def write(cache: kvcore.Cache, requests: list[kvcore.Request], counts: dict[int, int], *, noise: float = 0.0) -> None:
    """One step: the next tokens of some of the requests; ``noise`` is added to every row of a draft."""
    with cache.step({requests[number]: new for number, new in counts.items()}) as step:
        for number, spec in enumerate(SPEC.layers):
            _append(step.layer(number), spec, number, requests, counts, noise)


def _append(
    layer: Any,
    spec: LayerSpec,
    number: int,
    requests: list[kvcore.Request],
    counts: dict[int, int],
    noise: float,
) -> None:
    def rows(argument: str) -> np.ndarray:
        parts = [CONTENT[0][number][argument][:0]]
        for which, new in counts.items():
            start = requests[which].length
            parts.append(CONTENT[which][number][argument][start : start + new])
        return np.concatenate(parts) + np.float32(noise)

    given: dict[str, Any] = {} if spec.window is None else {"window": rows("window")}
    for role in ("tail", "index_tail"):
        if getattr(spec, role) is not None:
            given[role] = tuple(map(np.ascontiguousarray, np.split(rows(role), 2, axis=1)))
    layer.append(**given)
    if spec.tail is not None:
        weights = {"norm_weight": np.linspace(0.5, 2, spec.entries.dim, dtype=np.float32)}
        if spec.index_keys is not None:
            weights["index_norm_weight"] = np.linspace(2, 0.5, spec.index_keys.dim, dtype=np.float32)
        layer.flush(rope=ROPE, **weights)
    elif spec.entries is not None and spec.entries.share is None:
        which, entries = (kvcore.to_numpy(array) for array in layer.closed)
        order = list(counts)
        for_role = {
            role: np.array([CONTENT[order[q]][number][role][entry] for q, entry in zip(which, entries, strict=True)])
            for role in ("entries", "index_keys")
        }
        dims = {"entries": spec.entries.dim, "index_keys": spec.index_keys.dim}
        layer.store_entries(*(array.reshape(-1, dims[role]).astype(np.float32) for role, array in for_role.items()))
    if spec.kv is not None:
        layer.append_kv(rows("key"), rows("value"))


def observe(cache: kvcore.Cache, requests: list[kvcore.Request]) -> dict[str, Any]:
    """Everything that can be read between steps."""
    seen: dict[str, Any] = {"digest": cache.digest(requests), "lengths": [request.length for request in requests]}
    with cache.step(dict.fromkeys(requests, 0)) as step:
        for number, spec in enumerate(SPEC.layers):
            layer = step.layer(number)
            for role, _ in spec.components():
                seen[f"{number}.{role} rows"] = tuple(layer.gather_rows(role))
            seen[f"{number} digest"] = layer.digest()
            if spec.window is not None:
                seen[f"{number} window"] = tuple(layer.gather_window())
            if spec.entries is not None:
                seen[f"{number} entries"] = tuple(layer.gather_all_entries())
            if spec.index_keys is not None:
                seen[f"{number} index keys"] = tuple(layer.gather_all_index_keys())
            if spec.kv is not None:
                seen[f"{number} kv"] = layer.gather_kv()
        return {name: _host(value) for name, value in seen.items()}


def _host(value: Any) -> Any:
    return [kvcore.to_numpy(array) for array in value] if isinstance(value, tuple) else value


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, list) or not isinstance(value[0], np.ndarray):
            assert found[name] == value, name
            continue
        for got, want in zip(found[name], value, strict=True):
            assert got.dtype == want.dtype, name
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=name)


def create(backend: str, drafts: int) -> kvcore.Cache:
    return scene.create(SPEC, backend, max_requests=REQUESTS + 1, max_tokens=REQUESTS * 1008, max_draft_tokens=drafts)


def at_once(backend: str, lengths: list[int], drafts: int) -> dict[str, Any]:
    """The same tokens in one step."""
    cache = create(backend, drafts)
    requests = [cache.admit() for _ in lengths]
    write(cache, requests, dict(enumerate(lengths)))
    return observe(cache, requests)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[dict[int, int], int]]]:
    """(lengths, D, steps): each step brings some requests some tokens, after drafts for one of them that fail."""
    lengths = draw(st.lists(st.one_of(st.sampled_from(SIZES), st.integers(1, LONGEST)), min_size=3, max_size=3))
    drafts = draw(st.sampled_from((0, 1, 3)))
    left = list(lengths)
    steps = []
    size = st.one_of(st.sampled_from(SIZES), st.integers(0, 200))
    for _ in range(draw(st.integers(1, 24))):
        who = draw(st.lists(st.sampled_from(range(REQUESTS)), min_size=1, max_size=REQUESTS, unique=True))
        counts = {number: min(left[number], draw(size)) for number in who}
        steps.append((counts, draw(st.integers(0, drafts))))
        for number, new in counts.items():
            left[number] -= new
    steps.append(({number: rest for number, rest in enumerate(left) if rest}, 0))
    return lengths, drafts, steps


@settings(
    max_examples=examples(8, 20), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(schedule=schedules())
def test_random_splits(backend, schedule):
    lengths, drafts, steps = schedule
    cache = create(backend, drafts)
    # Another owner first, and slots in another order, so that nothing rests on a fresh cache.
    old = cache.admit()
    requests = [cache.admit() for _ in range(REQUESTS)][::-1]
    write(cache, [old, *requests], {0: 37})
    cache.release(old)
    for counts, rejected in steps:
        first = next(iter(counts), None)
        if rejected and first is not None:
            start = requests[first].length
            write(cache, requests, {first: min(rejected, LONGEST - start)}, noise=5.0)
            cache.truncate(requests[first], start)
        write(cache, requests, counts)
    equal(observe(cache, requests), at_once(backend, lengths, drafts))


@pytest.mark.sampled
@pytest.mark.parametrize("size", SIZES)
def test_equal_calls(backend, size):
    lengths = [130, 64, 101] if size > 4 else [70, 37, 51]  # of many calls shorter ones, longer than all rings
    cache = create(backend, 0)
    requests = [cache.admit() for _ in lengths]
    while any(request.length < length for request, length in zip(requests, lengths, strict=True)):
        rest = {number: length - requests[number].length for number, length in enumerate(lengths)}
        write(cache, requests, {number: min(size, left) for number, left in rest.items() if left})
    equal(observe(cache, requests), at_once(backend, lengths, 0))
