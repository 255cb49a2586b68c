"""Faults that another JAX cache has been seen to have, as tests of this one. Numbers are those of the report on it."""

import itertools

import jax
import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, SpecError
from kvcore.spec import KV, CacheSpec, LayerSpec, presets
from tests.support import scene
from tests.support.scene import numbered

BACKEND = "jax_pallas"


def sliding(window: int) -> list[LayerSpec]:
    return [scene.classic("ring", window=window)]


def test_01_a_chunk_that_crosses_the_windows_edge_keeps_the_older_rows() -> None:
    """Window 8, six tokens, then four: positions 2 to 9 are there, and after one more 3 to 10."""
    cache = scene.create(sliding(8), BACKEND)
    request = cache.admit()
    for values, held in ((range(6), (0, 5)), (range(6, 10), (2, 9)), ([10], (3, 10))):
        scene.write(cache, {request: values})
        assert scene.read(cache, scene.kv_of, request) == [numbered(*held)]


def test_02_every_query_of_a_prompt_longer_than_the_window_sees_its_window() -> None:
    cache = scene.create(sliding(8), BACKEND)
    request = cache.admit()
    with cache.step({request: 12}) as step:
        scene.fill(step, range(12))
        seen = kvcore.to_numpy(step.layer(0).mask()).sum(axis=1).tolist()
        assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
        assert [count for count, _ in scene.seen_by(step)] == seen


def test_03_a_pure_form_comes_back_whole() -> None:
    """Pools flatten to arrays and names and come back; a request moves to the reference and back, byte for byte."""
    spec = [scene.ring(4), scene.compressed(4), scene.classic("ring", window=4), scene.classic("paged")]
    cache, other = scene.create(spec, BACKEND), scene.create(spec, "reference")
    request = cache.admit()
    scene.write(cache, {request: range(13)})
    before = cache.digest()
    leaves, tree = jax.tree.flatten(cache.pools)
    pure = [np.asarray(leaf) for leaf in leaves]
    cache.pools = jax.tree.unflatten(tree, [cache.asarray(array) for array in pure])
    assert cache.digest() == before
    moved = other.import_request(cache.export_request(request))
    assert other.digest([moved]) == before
    back = cache.import_request(other.export_request(moved))
    assert cache.digest([back]) == before


@pytest.mark.parametrize("format", ["int8_row", "fp8_row", "nf4_b64", "mxfp4"])
def test_04_quantised_storage_works_with_one_head_and_groups_run_over_channels(format: str) -> None:
    layer = LayerSpec(kv=KV(key_heads=1, key_dim=64, key_format=format, storage="ring", window=8))
    cache = scene.create([layer], BACKEND)
    request = cache.admit()
    rows = np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 1, 64) * np.array([1, 10, 100, 1, 3])[:, None, None]
    with cache.step({request: 5}) as step:
        step.layer(0).append_kv(rows.astype(np.float32), rows.astype(np.float32))
        keys, _, _ = step.layer(0).gather_kv()
    largest = np.abs(rows).max(axis=2, keepdims=True)
    assert (np.abs(kvcore.to_numpy(keys)[0].astype(np.float32) - rows) <= largest / 4).all()


@pytest.mark.parametrize("name", ["mxfp6", "nvfp8", "e4m3fnuz", "fp8"])
def test_05_a_format_is_named_by_its_codes_and_an_unknown_brand_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=name):
        KV(key_heads=1, key_dim=64, key_format=name)


def test_06_tokens_past_the_end_are_refused_and_overwrite_nothing() -> None:
    cache = scene.create([scene.classic("slot")], BACKEND, max_tokens=32)
    request = cache.admit()
    scene.write(cache, {request: range(31)})
    before = scene.raw(cache)
    with pytest.raises(OutOfBlocks):
        cache.step({request: 4})
    assert scene.raw(cache) == before


def test_06_rows_without_a_block_are_dropped_inside_jit() -> None:
    cache = scene.create([scene.classic("paged")], BACKEND, max_tokens=32)
    request = cache.admit()
    scene.write(cache, {request: range(8)})
    before = scene.raw(cache)
    with cache.step({request: 1}) as step:
        index = step.index._replace(block_table=step.index.block_table.at[:].set(-1))
        rows = np.ones((1, 2, 4), np.float32), np.ones((1, 2, 6), np.float32)
        pools = jax.jit(lambda pools: cache.ops.append_kv(pools, 0, index, *rows))(cache.pools)
        assert {name: np.asarray(pool).tobytes() for name, pool in pools.items()} == before
        step.abort()


def test_07_a_verb_without_donation_leaves_its_pools_as_they_were() -> None:
    cache = scene.create(sliding(8), BACKEND)
    scene.write(cache, {cache.admit(): range(5)})
    before = scene.raw(cache)
    slots = np.array([0], np.int32), np.array([1], np.int32)
    pools = jax.jit(lambda pools: cache.ops.copy_slots(pools, *slots))(cache.pools)
    assert scene.raw(cache) == before
    assert all((np.asarray(pool)[1] == np.asarray(pool)[0]).all() for pool in pools.values())


@pytest.mark.parametrize("format", ["int8_row", "nf4_b64", "mxfp4"])
def test_08_small_codes_pack(format: str) -> None:
    cache = scene.create([scene.classic("slot", dim=64, value_dim=64, key_format=format)], BACKEND, max_tokens=8)
    bits = {"int8_row": 8, "nf4_b64": 4, "mxfp4": 4}[format]
    assert cache.pools["0.kv.key_codes"].nbytes == 2 * 8 * 2 * 64 * bits // 8


@pytest.mark.parametrize("layout", ["planar", "packed", "tpu_tile"])
@pytest.mark.parametrize("format", ["bf16", "fp8_row"])
def test_09_a_budget_counts_the_padding(layout: str, format: str) -> None:
    layers = [scene.classic("paged", heads=1, dim=96, value_dim=96, key_format=format)]
    cache = scene.create(layers, BACKEND, budget_bytes=1 << 20, layout=layout)
    assert cache.nbytes == cache.plan.nbytes == sum(pool.nbytes for pool in cache.pools.values())
    assert (1 << 20) - cache.plan.block_bytes < cache.nbytes <= 1 << 20


def test_10_layers_without_a_component_keep_their_numbers() -> None:
    layers = [scene.ring(4), scene.classic("paged"), scene.ring(4)]
    cache = scene.create(layers, BACKEND)
    again = jax.tree.map(lambda pool: pool, cache.pools)
    assert sorted({name.split(".")[0] for name in again}) == ["0", "1", "2"]
    assert {name.split(".")[1] for name in again if name.startswith("1.")} == {"kv"}


def test_11_the_layer_number_is_no_part_of_a_trace() -> None:
    """61 layers of three kinds: verbs see equal static descriptions, so JAX keeps one trace a kind."""
    spec = presets.deepseek_v4_flash()
    cache_plan = kvcore.plan.plan_cache(spec, max_requests=1, max_tokens=256)
    from kvcore.backends.jax_pallas import JaxOps

    ops = JaxOps(cache_plan, "cpu", None)
    assert len(ops.layers) > 40
    assert len(set(ops.layers)) <= 4
    assert len({layer.only("window") for layer in ops.layers}) == 1


def test_12_every_way_to_cut_a_prompt_leaves_the_same_window() -> None:
    cache = scene.create(sliding(4), BACKEND)
    # One padded shape for all cuts.
    step = cache.step
    cache.step = lambda tokens, **_: step(tokens, pad_tokens=8, pad_requests=1)
    for first, second in itertools.product(range(1, 8), range(1, 8)):
        request = cache.admit()
        scene.write(cache, {request: range(first)})
        scene.write(cache, {request: range(first, first + second)})
        length = first + second
        held = scene.read(cache, scene.kv_of, request)
        assert held == [numbered(max(0, length - 4), length - 1)], (first, second)
        cache.release(request)


def test_a_window_may_be_chunked_too() -> None:
    layer = CacheSpec(layers=[scene.classic("ring", chunk=4)], block_tokens=8)
    cache = scene.create(layer, BACKEND)
    request = cache.admit()
    scene.write(cache, {request: range(6)})
    assert scene.read(cache, scene.kv_of, request) == [numbered(4, 5)]
