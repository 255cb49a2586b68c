"""Recurrent layers on JAX: random lives, states inside ``jit``, a request that goes on where it was elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.backends.jax_pallas import JaxOps
from kvcore.backends.reference.backend import ReferenceOps
from kvcore.conformance.specs import conformance_spec
from kvcore.kernels.pallas import states as states_of_tiles
from kvcore.parity.run import run
from kvcore.plan import plan_cache
from kvcore.plugins import registry
from kvcore.spec import CacheSpec, Conv, LayerSpec, State
from kvcore.step import StepRequest, build_index
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


STATES = (
    State(heads=3, key_dim=2, value_dim=128), State(heads=4, key_dim=8, value_dim=128), State(heads=2, key_dim=256),
    State(heads=2, key_dim=4, value_dim=256), State(heads=4, key_dim=32, value_dim=128, format="bf16"),
    State(heads=2, key_dim=2048, format="bf16"), State(heads=3, key_dim=16, value_dim=256, format="bf16"),
    State(heads=2, key_dim=4096, format="fp8_row"),
    State(heads=3, key_dim=16, value_dim=256, format="int8_per_token_head"),
)  # fmt: skip
STEP = StepRequest(4, 3, 2, ()), StepRequest(0, 0, 3, ()), StepRequest(2, 5, 0, ()), StepRequest(5, 1, 5, ())


@pytest.mark.parametrize("component", STATES, ids=lambda one: f"{'x'.join(map(str, one.shape))} {one.format}")
def test_states_of_whole_tiles_are_moved_as_numbers(component, rng, monkeypatch):
    """By kernels of their own, interpreted: to the bit what the reference reads, writes, keeps and forgets."""
    if component.heads == 4:
        monkeypatch.setattr(states_of_tiles, "PIECE_BYTES", 8192)  # two pieces
    spec = CacheSpec(layers=[LayerSpec(state=component)])
    sizes = {"max_requests": 6, "max_tokens": 64, "max_draft_tokens": 2}
    ours = JaxOps(plan_cache(spec, layout="tpu_tile", **sizes), "cpu", None, "interpret")
    theirs = ReferenceOps(plan_cache(spec, layout="packed", **sizes))
    made = {choice.verb: choice.implementation for choice in ours.explain()}
    verbs = ("append_state", "write_state", "select_state", "read_state")
    assert {made[verb] for verb in verbs} == {"pallas, interpreted"}
    host = build_index(STEP, max_blocks=1)
    states, last = (rng.standard_normal((n, *component.shape)).astype(np.float32) for n in (len(host.positions), 4))
    states[0].flat[3] = np.nan
    states[1].view(np.int32).flat[5] = 0x7F800001
    first = [(ops, ops.append_state(ops.allocate(), 0, ops.index(host), ops.asarray(states))) for ops in (ours, theirs)]
    taken = [np.array(some, np.int32) for some in ([2, 3, 0, 5], [1, 2, 0, 3], [0, 0, 0, 1])]
    put = [(host.lengths, "write_state", (last,), {"newest": newest}) for newest in (None, 1)]
    put += [(host.starts + some, "select_state", (states, some), {}) for some in taken]
    for lengths, verb, given, options in [(host.lengths, "", (), {}), *put]:
        after = [
            (ops, getattr(ops, verb)(pools, 0, ops.index(host), *map(ops.asarray, given), **options) if verb else pools)
            for ops, pools in first
        ]
        for back in range(3):
            at = host._replace(starts=np.maximum(lengths - back, 0).astype(np.int32))
            ours_found, theirs_found = (np.asarray(ops.read_state(pools, 0, ops.index(at))) for ops, pools in after)
            np.testing.assert_array_equal(ours_found.view(np.int32), theirs_found.view(np.int32))


@pytest.mark.parametrize("format", ["bf16", "int8_row"])
def test_inputs_of_a_convolution_of_whole_tiles_are_rows(format):
    spec = CacheSpec(layers=[LayerSpec(conv=Conv(dim=4096, width=4, format=format))])
    ops = JaxOps(plan_cache(spec, layout="tpu_tile", max_requests=6, max_tokens=64), "tpu", None, "tpu")
    index = build_index(STEP, max_blocks=1)
    pools = jax.eval_shape(ops.allocate)
    rows = jax.ShapeDtypeStruct((len(index.positions), 4096), jnp.float32)
    found = jax.eval_shape(lambda pools, index, rows: ops.append_conv(pools, 0, index, rows), pools, index, rows)
    assert jax.tree.map(lambda one: one.shape, found) == jax.tree.map(lambda one: one.shape, pools)
