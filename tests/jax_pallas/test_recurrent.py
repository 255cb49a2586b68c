"""Recurrent layers on JAX: random lives, states inside ``jit``, a request that goes on where it was elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np

import kvcore
from kvcore.conformance.specs import conformance_spec
from kvcore.parity.run import run
from kvcore.plugins import registry
from tests.support import recurrent


def test_random_lives():
    cache = recurrent.create("jax_pallas", prefix=kvcore.Periodic(3))
    recurrent.Lives(cache, 3, prefix=True).go_on(14)


def test_a_request_goes_on_here():
    source, target = recurrent.create("reference"), recurrent.create("jax_pallas")
    request, tokens = source.admit(), [5, 6, 7, 8, 9]
    recurrent.advance(source, {request: ([], tokens)})
    moved = target.import_request(source.export_request(request))
    for cache, one in ((source, request), (target, moved)):
        recurrent.advance(cache, {one: (tokens, [1, 2])}, every=True)
        cache.truncate(one, 6)
        recurrent.advance(cache, {one: ([*tokens, 1], [3])})
    assert target.digest([moved]) == source.digest([request])


def test_a_decode_step_in_one_program():
    """Read, compute, write inside ``jit``; drafts of which some are rolled back."""
    cache = recurrent.create("jax_pallas")
    request, tokens = cache.admit(), [5, 6, 7]
    recurrent.advance(cache, {request: ([], tokens)})
    shapes = {number: layer.state.shape for number, layer in enumerate(cache.spec.layers) if layer.state is not None}

    @jax.jit
    def decode(pools, index, new):
        for number, layer in enumerate(cache.spec.layers):
            rows = new.astype(jnp.float32)
            if layer.state is not None:
                places = jnp.arange(np.prod(shapes[number]), dtype=jnp.float32).reshape(shapes[number])
                states = [cache.ops.read_state(pools, number, index)[0]]
                for token in rows:
                    states.append((states[-1] * 3 + token + places) % recurrent.MODULUS)
                pools = cache.ops.append_state(pools, number, index, jnp.stack(states[1:]))
            if layer.conv is not None:
                inputs = jnp.repeat(rows[:, None], layer.conv.channels, axis=1)
                pools = cache.ops.append_conv(pools, number, index, inputs)
            if layer.kv is not None:
                keys = jnp.repeat(rows[:, None, None], 2, axis=2)
                pools = cache.ops.append_kv(pools, number, index, keys, keys)
        return pools

    with cache.step({request: [1, 2, 3]}) as step:
        cache.pools = decode(cache.pools, step.index, jnp.array([1, 2, 3]))
    cache.truncate(request, 5)
    recurrent.advance(cache, {request: ([*tokens, 1, 2], [4])})


def test_the_kit_checks_the_verbs():
    for verb in ("append_state", "write_state", "select_state", "read_state", "append_conv", "gather_conv"):
        report = run(conformance_spec(), [registry().backends["jax_pallas"]], only=f"{verb}/*fp32*/planar/ragged")
        assert report.checks
        assert {record.status for record in report.checks} == {"agree"}, verb
