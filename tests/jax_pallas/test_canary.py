"""Caches with ``canary`` on JAX: what is not as it was written is named, whatever the layout and whoever writes."""

import jax
import numpy as np
import pytest

import kvcore
from kvcore.cache import Fault
from kvcore.check_words import check_words
from kvcore.digest import region_salt
from kvcore.errors import FaultError
from kvcore.ops.canary import pieces_of
from kvcore.spec import Conv, LayerSpec, State
from tests.reliability import canary, command
from tests.support import scene, stories


def test_perturbations_are_named_and_nothing_else_is(monkeypatch):
    monkeypatch.setattr(canary, "SEED_PERTURBATIONS", 6)
    # The world that compiles least: keys and values in slots and rings.
    record = command.work(canary.FIGURE, 6, first_seed=4, backend="jax_pallas")
    assert record["divergences"] == 0, record["failures"]


def flipped(cache, name, unit, byte):
    """A pool with a bit flipped, in the cache's."""
    host = kvcore.to_numpy(cache.pools[name])
    host.view(np.uint8).reshape(len(host), -1)[unit, byte] ^= 2
    cache.pools = {**cache.pools, name: cache.asarray(host)}


@pytest.mark.parametrize("layout", ["planar", "tpu_tile"])
def test_words_are_those_of_the_host(layout):
    spec = kvcore.CacheSpec(layers=[scene.ring(9, format="v4_584", dim=512)], block_tokens=8)
    cache = kvcore.create_cache(
        spec, backend="jax_pallas", max_requests=2, max_tokens=64, max_draft_tokens=1, canary=2, layout=layout
    )
    request = cache.admit()
    with cache.step({request: 13}) as step:
        step.layer(0).append_window(np.random.default_rng(0).standard_normal((13, 512), dtype=np.float32))
    with cache.step({}) as step:
        pass
    with cache.step({request: 0}) as step:
        raw = step.layer(0).gather_rows("window")
    (watched,) = cache.plan.watched
    words = kvcore.to_numpy(cache.pools["0.window.check_word"]).view("<u4")[request.slot]
    for row, position in zip(kvcore.to_numpy(raw.rows)[0], kvcore.to_numpy(raw.positions)[0], strict=True):
        if position % 2 == 0:
            number = np.array([position])
            (word,) = check_words(row[None], number, region_salt(0, "window"), pieces_of(watched.regions))
            assert words[position // 2 % watched.words.rows] == word
    assert cache.faults() == ()


def test_recurrent_layers_are_looked_after_too():
    layer = LayerSpec(state=State(heads=2, key_dim=3, value_dim=4), conv=Conv(dim=5, width=4))
    cache = kvcore.create_cache(
        kvcore.CacheSpec(layers=[layer]), backend="jax_pallas", max_requests=2, canary=1, layout="packed"
    )
    request = cache.admit()

    def fill(step, count):
        step.layer(0).write_state(np.ones((1, 2, 3, 4), np.float32))
        step.layer(0).append_conv(np.ones((count, 5), np.float32))

    for count in (5, 1):
        with cache.step({request: count}) as step:
            fill(step, count)
    assert cache.faults() == ()
    # The one state that there is, is overwritten by the next step: it is looked at before.
    flipped(cache, "0.state.page", request.slot, 40)
    told = (Fault(request, "row", 0, "state", 5),)
    assert cache.faults() == told
    with pytest.raises(FaultError) as caught:
        cache.step({request: 1})
    assert caught.value.faults == told
    flipped(cache, "0.state.page", request.slot, 40)
    with cache.step({request: 1}) as step:
        fill(step, 1)
    assert cache.faults() == ()


def test_rows_of_a_jitted_step_get_their_words():
    cache = kvcore.create_cache(stories.PAGED, backend="jax_pallas", max_requests=2, max_tokens=64, canary=1)
    request = cache.admit()
    stories.tell(cache, {request: range(9)})

    @jax.jit
    def layers(pools, index, k, v):
        for number in range(2):
            pools = cache.ops.append_kv(pools, number, index, k, v)
        return pools

    part, other = stories.PAGED.layers[0].kv.parts
    k, v = (np.ones((1, each.heads, each.format.dim), np.float32) for each in (part, other))
    for _ in range(2):
        with cache.step({request: 1}) as step:
            cache.pools = layers(cache.pools, step.index, k, v)
    assert cache.faults() == ()
    # Rows of values have 48 bytes.
    flipped(cache, next(name for name in cache.pools if name.startswith("1.kv.value_")), request.blocks[1], 50)
    assert {(fault.layer, fault.role, fault.position) for fault in cache.faults()} == {(1, "kv", 9)}
