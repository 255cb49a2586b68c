"""A layer's step in one call is one program under JAX, which stores and answers what the reference's verbs do."""

from typing import Any

import jax
import numpy as np
import pytest

import kvcore
from benchmarks.jax_compile import V4, eager_compilations
from kvcore.backends.jax_pallas import programs, whole
from kvcore.errors import ShapeError, StepError
from kvcore.interop.jax import inspect_in_place
from kvcore.spec import CacheSpec, Rope
from tests.support import scene

SPEC = CacheSpec(
    layers=[
        scene.compressed(4),
        scene.ring(4),
        scene.compressed(8, overlap=False, indexer=False, format="bf16"),
        scene.compressed(4),
    ],
    block_tokens=8,
)
ROPE = Rope(dim=4, theta=1e4)
STEPS = (
    ((40, 0), "a prompt that outgrows its rings"),
    ((1, 40), "a token while another prompt begins"),
    ((2, 1), "drafts, aborted"),
    ((2, 30), "a part of a prompt, which waits"),
    ((1, 1), "a token each"),
    ((0, 1), "of one"),
)
PROMPTS = (1, 2, 9, 64, 65, 129, 257, 512)


def how_of(layer: Any, rotate: bool) -> dict[str, Any]:
    """Its other arguments."""
    weights = {"norm_weight": layer.entries, "index_norm_weight": layer.index_keys}
    found = {name: np.linspace(0.5, 1.5, part.dim, dtype=np.float32) for name, part in weights.items() if part}
    if rotate:
        found["window_norm_weight"] = np.linspace(1, 2, layer.window.dim, dtype=np.float32)
    return {**found, "rope": ROPE, "rotate": rotate, "sink": np.ones(2, np.float32), "scale": 0.5}


def caches_of(**options: Any) -> list[Any]:
    """The reference's cache and JAX's, of two requests each."""
    sizes = {"max_requests": 2, "max_tokens": 256, **options}
    return [scene.create(SPEC, backend, **sizes) for backend in ("reference", "jax_pallas")]


def same(got: Any, wanted: Any, what: str = "") -> None:
    np.testing.assert_allclose(kvcore.to_numpy(got), kvcore.to_numpy(wanted), rtol=1e-5, atol=2e-5, err_msg=what)


def seen(cache: Any, requests: Any, spec: CacheSpec = SPEC) -> list[np.ndarray]:
    """All that requests hold."""
    found: list[Any] = []
    with cache.step(dict.fromkeys(requests, 0)) as step:
        for number, layer in enumerate(spec.layers):
            handle = step.layer(number)
            found += handle.gather_window()
            found += handle.gather_all_entries() if layer.entries else ()
            found += handle.gather_all_index_keys() if layer.index_keys else ()
            found += [handle.gather_rows(role).rows for role in ("tail", "index_tail") if getattr(layer, role)]
        return [kvcore.to_numpy(array) for array in found]


def test_a_step_stores_and_answers_what_the_references_does() -> None:
    """And what is read in the step after it is what is read after the verbs."""
    caches, random = caches_of(max_draft_tokens=2), np.random.default_rng(0)
    held = [(cache.admit(), cache.admit()) for cache in caches]
    for counts, what in STEPS:
        before = [cache.digest() for cache in caches]
        steps = [cache.step(dict(zip(pair, counts, strict=True))) for cache, pair in zip(caches, held, strict=True)]
        for number, layer in enumerate(SPEC.layers):
            rows, how = scene.given_to(layer, random, sum(counts)), how_of(layer, rotate=number > 1)
            wanted, got = (step.layer(number).decode(**rows, **how) for step in steps)
            same(got.out, wanted.out, what)
            same(got.lse, wanted.lse, what)
            if not number:
                look_again([step.layer(number) for step in steps], rows["q"])
        aborted = "aborted" in what
        for step in steps:
            step.abort() if aborted else step.commit()
        assert [old == cache.digest() for old, cache in zip(before, caches, strict=True)] == [aborted, aborted]
        for got, wanted in zip(*(seen(*one) for one in zip(caches[::-1], held[::-1], strict=True)), strict=True):
            assert got.shape == wanted.shape
            same(got, wanted, what)


def test_tpu_kernels_in_one_program_do_what_the_references_verbs_do() -> None:
    """Interpreted: a prompt that closes entries, and a token behind it."""
    spec = CacheSpec(layers=[scene.compressed(4)], block_tokens=8)
    sizes = {"max_requests": 2, "max_tokens": 64, "layout": "tpu_tile"}
    caches = [
        scene.create(spec, "reference", **sizes),
        scene.create(spec, "jax_pallas", device="cpu:interpret", **sizes),
    ]
    random, held = np.random.default_rng(0), [(cache.admit(), cache.admit()) for cache in caches]
    for counts in ((9, 2), (1, 3)):
        steps = [cache.step(dict(zip(pair, counts, strict=True))) for cache, pair in zip(caches, held, strict=True)]
        rows, how = scene.given_to(spec.layers[0], random, sum(counts)), how_of(spec.layers[0], rotate=True)
        wanted, got = (step.layer(0).decode(**rows, **how) for step in steps)
        same(got.out, wanted.out)
        same(got.lse, wanted.lse)
        for step in steps:
            step.commit()
    for got, wanted in zip(*(seen(*one, spec) for one in zip(caches[::-1], held[::-1], strict=True)), strict=True):
        same(got, wanted)


def look_again(handles: list[Any], q: Any) -> None:
    """The same step's rows, of which the rings may hold the last alone, or none."""
    windows = [handle.gather_window() for handle in handles]
    same(windows[1].values, windows[0].values)
    answers = [handle.attend(q) for handle in handles]
    same(answers[1].out, answers[0].out)


def test_a_layer_is_one_program_a_size() -> None:
    """Prompts of 1 to 512 tokens through three kinds of layers; another for pools that slots are made clean in."""
    found = eager_compilations(V4, PROMPTS, whole=True)
    assert found["store_and_attend"] == 9
    assert found.total() <= 10, found


def test_a_prefix_of_a_prompt_that_outgrew_its_rings_is_taken_over() -> None:
    """Its rows at the end of a block are the step's own: the rings hold later ones."""
    caches, random = caches_of(prefix="full"), np.random.default_rng(0)
    tokens = list(range(40))
    held = [cache.admit(tokens) for cache in caches]
    rows = [scene.given_to(spec, random, 40) for spec in SPEC.layers]
    lengths, held_then = [], []
    for cache, request in zip(caches, held, strict=True):
        with cache.step({request: 40}) as step:
            for layer, spec in enumerate(SPEC.layers):
                step.layer(layer).decode(**rows[layer], **how_of(spec, rotate=layer > 1))
        cache.release(request)
        taken = cache.admit([*tokens[:24], 99, 98])
        lengths.append(taken.length)
        held_then.append(seen(cache, [taken]))
    assert lengths == [24, 24]
    for got, wanted in zip(*held_then[::-1], strict=True):
        same(got, wanted)


def test_what_is_refused_changes_nothing() -> None:
    _, cache = caches_of()
    rows, how = scene.given_to(SPEC.layers[0], np.random.default_rng(0), 3), how_of(SPEC.layers[0], rotate=True)
    index = rows["index"]
    with cache.step({cache.admit(): 3}) as step:
        handle = step.layer(0)
        with pytest.raises(ShapeError, match="index_select: weights"):
            handle.decode(**{**rows, "index": (index[0], index[1][:, :1])}, **how)
        with pytest.raises(ShapeError, match="append_index_tail"):
            handle.decode(**{**rows, "index_tail": (rows["window"][:2],) * 2}, **how)
        handle.decode(**rows, **how)
        with pytest.raises(StepError, match="second append"):
            handle.decode(**rows, **how)
        step.abort()


@pytest.mark.parametrize("tokens", [1, 9])
def test_no_pool_is_copied(monkeypatch: Any, tokens: int) -> None:
    """By a decode's program, nor by a prompt's, which reads a ring before it writes to it."""
    cache, places = caches_of()[1], []
    made = programs.answering(whole.store_and_attend).__wrapped__

    def answering(_: Any) -> Any:
        def run(kind: Any, options: Any, written: Any, arrays: Any) -> Any:
            def alone(pools: Any, arrays: Any) -> Any:
                return made(kind, options, pools, arrays)

            places.append(inspect_in_place(alone, written, arrays))
            return jax.jit(alone)(written, arrays)

        return run

    monkeypatch.setattr(programs, "answering", answering)
    with cache.step({cache.admit(): tokens}) as step:
        for number, layer in enumerate(SPEC.layers[:3]):
            step.layer(number).decode(
                **scene.given_to(layer, np.random.default_rng(0), tokens), **how_of(layer, rotate=False)
            )
        step.abort()
    assert len(places) == 3
    for place in places:
        assert place.alias_bytes == place.pool_bytes > 0
        assert not place.moves


def test_a_query_that_is_differentiated_goes_through_the_verbs() -> None:
    """What is stored has no gradient; a program that stores and attends would lose the query's."""
    _, cache = caches_of()
    rows = scene.given_to(SPEC.layers[1], np.random.default_rng(0), 3)
    with cache.step({cache.admit(): 3}) as step:
        handle = step.layer(1)
        found = jax.grad(lambda q: handle.decode(q, rows["window"]).out.sum())(rows["q"])
        step.abort()
    assert np.abs(np.asarray(found)).max() > 0
