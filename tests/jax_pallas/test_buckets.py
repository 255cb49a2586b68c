"""Eager verbs are compiled for few sizes: steps of any share programs, and get what the reference says."""

from typing import Any

import jax
import numpy as np
import pytest

import kvcore
from benchmarks.jax_compile import V4, compilations, eager_compilations
from kvcore.arrays import to_numpy
from kvcore.backends.jax_pallas import buckets
from kvcore.spec import presets
from tests.support import functional_cases as cases
from tests.support import recurrent

HEADS, DIM, MOST = 2, 16, 512
PROMPTS = (1, 2, 3, 9, 16, 17, 40, 64, 65, 100, 129, 255, 256, 257, 300, 511, 512)


def cache_of(backend: str = "jax_pallas") -> Any:
    spec = presets.classic(layers=2, key_heads=HEADS, key_dim=DIM)
    return kvcore.create_cache(spec, backend=backend, max_requests=16, max_tokens=16 * MOST)


def attended(cache: Any, request: Any, rows: np.ndarray) -> Any:
    """What a prompt's queries see in the last layer."""
    with cache.step({request: len(rows)}) as step:
        for layer in range(2):
            step.layer(layer).append_kv(rows, rows)
            found = step.layer(layer).attend(np.concatenate([rows, -rows], axis=1))
    return found


def test_prompts_of_1_to_512_tokens_cost_six_compilations() -> None:
    cache, rows = cache_of(), np.ones((MOST, HEADS, DIM), np.float32)
    with compilations() as compiled:
        for tokens in PROMPTS:
            request = cache.admit()
            attended(cache, request, rows[:tokens])
            cache.release(request)
    assert 0 < len(compiled) <= 6


def test_a_size_of_prompts_of_deepseek_v4_costs_ten_compilations() -> None:
    """Layers of a window, CSA and HCA; ten for a token, the pools among them, and as many for 2 to 64."""
    assert {buckets.rounded(tokens) for tokens in range(1, MOST + 1)} == {1, 64, 512}
    found = eager_compilations(V4, (1, 2, 9, 64))
    assert found["append_window"] == found["index_select"] == 2
    assert 15 < found.total() <= 20, found


def test_batches_of_any_size_share_programs() -> None:
    cache, rows = cache_of(), np.ones((MOST, HEADS, DIM), np.float32)
    requests = [cache.admit() for _ in range(16)]

    def decode(count: int) -> None:
        with cache.step(dict.fromkeys(requests[:count], 1)) as step:
            for layer in range(2):
                step.layer(layer).append_kv(rows[:count], rows[:count])
                step.layer(layer).attend(rows[:count])

    with compilations() as compiled:
        for count in range(9, 17):
            decode(count)
        assert len(compiled) <= 2
        decode(5)
        one_more = len(compiled)
        for count in (6, 7, 8):
            decode(count)
        assert len(compiled) == one_more > 2


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_what_a_padded_step_gives_is_the_references(tokens: int) -> None:
    """Readers of handles, for three requests of sizes that no bucket fits."""
    counts, found = (tokens, tokens + 2, 3), []
    for backend in ("reference", "jax_pallas"):
        cache, rng = cases.create(backend, max_requests=4, max_tokens=400), np.random.default_rng(1)
        requests = [cache.admit() for _ in counts]
        for _ in range(2):
            seen: dict[str, Any] = {}
            with cache.step(dict(zip(requests, counts, strict=True))) as step:
                everything(step, rng, sum(counts), seen)
        found.append((seen, cache.digest()))
    (wanted, digest), (got, own) = found
    assert own == digest
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)


def everything(step: Any, rng: Any, tokens: int, seen: dict[str, Any]) -> None:
    """Fill all layers of the world and note what their readers give."""

    def x(*shape: int) -> np.ndarray:
        return rng.standard_normal((tokens, *shape)).astype(np.float32)

    def note(name: str, arrays: Any) -> None:
        for number, array in enumerate(jax.tree.leaves(arrays)):
            seen[f"{name} {number}"] = to_numpy(array)

    layer = step.layer(0)
    layer.append_window(x(16))
    layer.append_tail(x(32), x(32))
    layer.append_index_tail(x(64), x(64))
    layer.flush()
    q, weights = x(2, 32), x(2)
    note("scores", layer.index_scores(q, weights))
    selected = layer.index_select(q, weights, 3)
    note("index_select", selected)
    note("select", layer.select(layer.index_scores(q, weights), 3))
    note("attend", tuple(layer.attend(x(2, 16), selected)))
    note("window", tuple(layer.gather_window()))
    note("entries", tuple(layer.gather_entries(selected)))
    note("all entries", tuple(layer.gather_all_entries()))
    note("rows", tuple(layer.gather_rows("entries")))
    for number in (cases.PAGED, cases.RING, cases.SLOT):
        layer = step.layer(number)
        layer.append_kv(x(2, 16), x(2, 16))
        note(f"kv {number}", tuple(layer.gather_kv()))
        note(f"attended {number}", tuple(layer.attend(x(4, 16))))
        note(f"mask {number}", layer.mask())
        note(f"visible {number}", tuple(layer.visible_rows()))
    step.layer(cases.PLAIN).append_window(x(16))
    note("batch", step.to_batch(x(2)))
    note("tokens", step.from_batch(np.asarray(step.to_batch(x(2)))))
    note("positions", step.positions)


def test_states_of_a_padded_step_are_the_references() -> None:
    digests = set()
    for backend in ("reference", "jax_pallas"):
        cache = recurrent.create(backend)
        requests = [cache.admit() for _ in range(3)]
        first, second = [[5, 6, 7], [8], [9]], [[1], [2, 3], [4, 4]]
        recurrent.advance(cache, {one: ([], new) for one, new in zip(requests, first, strict=True)})
        parts = {one: (had, new) for one, had, new in zip(requests, first, second, strict=True)}
        recurrent.advance(cache, parts, every=True)
        digests.add(cache.digest())
    assert len(digests) == 1


def test_a_step_in_a_trace_keeps_its_size() -> None:
    cache, rows = cache_of(), np.ones((5, HEADS, DIM), np.float32)
    with cache.step({cache.admit(): 5}) as step:
        assert len(step.index.positions) == 5
        append = jax.jit(lambda pools, index, rows: cache.ops.append_kv(pools, 0, index, rows, rows))
        text = append.lower(cache.pools, step.index, rows).as_text()
        step.abort()
    assert "tensor<5x" in text
    assert "tensor<64x2x16xf32>" not in text


@pytest.mark.parametrize(
    ("step", "size"), [((1, 1), (1, 1)), ((3, 3), (4, 4)), ((5, 3), (64, 4)), ((70, 1), (512, 1)), ((0, 2), (0, 2))]
)
def test_sizes(step: tuple[int, int], size: tuple[int, int]) -> None:
    assert buckets.sizes_of(*step) == size
