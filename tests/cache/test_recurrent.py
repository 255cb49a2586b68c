"""Recurrent states and short convolutions: a state answers for one length, and every verb of a cache keeps it so."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import RollbackError, ShapeError, SpecError, StepError
from kvcore.plan import logical_bytes, plan_cache
from kvcore.spec import CacheSpec, Conv, LayerSpec, State, from_json, presets, to_json
from tests.support import recurrent
from tests.support.backends_under_test import BACKENDS

FORMATS = [("fp32", "fp32"), ("bf16", "bf16")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefix", ["off", "full", kvcore.Periodic(3)], ids=str)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_random_lives(backend, prefix, drafts):
    cache = recurrent.create(
        backend, recurrent.spec(state=FORMATS[drafts % 2][0]), prefix=prefix, max_draft_tokens=drafts, check=drafts == 1
    )
    lives = recurrent.Lives(cache, drafts, prefix=prefix != "off")
    lives.go_on(120)
    assert (lives.hits > 0) == (prefix != "off")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_is_of_one_length(backend):
    """A step keeps its last token's; whoever gives all of them can go back to each of the last D."""
    cache = recurrent.create(backend)
    request, tokens = cache.admit(), [5, 6, 7, 8, 9]
    recurrent.advance(cache, {request: ([], tokens)})
    recurrent.advance(cache, {request: (tokens, [1, 2, 3])})
    with pytest.raises(RollbackError, match="5, 8: lengths whose recurrent state is kept"):
        cache.truncate(request, 7)
    assert request.length == 8
    cache.truncate(request, 5)
    recurrent.advance(cache, {request: (tokens, [4, 4, 4])}, every=True)
    cache.truncate(request, 7)
    recurrent.advance(cache, {request: ([*tokens, 4, 4], [1])})
    with pytest.raises(RollbackError, match="5 to 8"):
        cache.truncate(request, 4)


def test_states_beyond_a_rollback_are_forgotten():
    """Lengths that another text has had since then have no state again."""
    cache = recurrent.create("reference", max_draft_tokens=4)
    request, tokens = cache.admit(), [5, 6, 7, 8, 9]
    recurrent.advance(cache, {request: ([], tokens)})
    recurrent.advance(cache, {request: (tokens, [1, 2, 3])})
    cache.truncate(request, 5)
    recurrent.advance(cache, {request: (tokens, [4, 3, 2, 1])})
    with pytest.raises(RollbackError, match="5, 9: lengths whose recurrent state is kept"):
        cache.truncate(request, 8)
    cache.truncate(request, 5)
    recurrent.advance(cache, {request: (tokens, [1])})


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_without_a_state_do_not_leave_with_a_request(backend):
    cache = recurrent.create(backend)
    request = cache.admit()
    recurrent.advance(cache, {request: ([], [5, 6, 7, 8])})
    recurrent.advance(cache, {request: ([5, 6, 7, 8], [1, 2, 3])})
    moved = cache.import_request(cache.export_request(request))
    with pytest.raises(RollbackError):
        cache.truncate(moved, 4)
    recurrent.advance(cache, {moved: ([5, 6, 7, 8, 1, 2, 3], [1])})
    cache.truncate(request, 4)
    recurrent.advance(cache, {request: ([5, 6, 7, 8], [1])})


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_prompt_did_not_write_is_nan_in_the_pools(backend):
    """Outside code that reads a length without a state gets no other length's."""
    cache = recurrent.create(backend)
    request = cache.admit()
    recurrent.advance(cache, {request: ([], [5, 6, 7, 8])})
    with cache.step({request: 0}) as step:
        index = step._device_index
        stale = index._replace(starts=index.starts - 1)
        assert np.isnan(kvcore.to_numpy(cache.ops.read_state(cache.pools, 0, stale))).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["packed", "by_head"])
def test_states_are_lent_where_they_lie(backend, layout):
    """In slots that follow each other, at one row of their rings; else, and of nobody's tokens, they are gathered."""
    cache = recurrent.create(backend, layout=layout)
    requests = [cache.admit() for _ in range(3)]
    tokens = {request: [7 * number, 8, 9, 1] for number, request in enumerate(requests)}
    recurrent.advance(cache, {request: ([], some) for request, some in tokens.items()})

    def lent(*asked):
        with cache.step(dict.fromkeys(asked, 0)) as step:
            found, wanted = step.layer(0).state_view(), step.layer(0).read_state()
            assert kvcore.to_numpy(found).tolist() == kvcore.to_numpy(wanted).tolist()
            assert found.shape == wanted.shape
            pool = next(pool for name, pool in cache.pools.items() if name.startswith("0.state"))
            return np.shares_memory(np.asarray(found), np.asarray(pool))

    assert lent(*requests) == lent(*requests[1:]) == (layout == "packed")
    assert not lent(*requests[::-1])
    recurrent.advance(cache, {requests[2]: (tokens[requests[2]], [3])})
    assert not lent(*requests)
    assert not lent(cache.admit())
    with cache.step({requests[0]: 1}) as step:
        step.layer(0).write_state(np.zeros((1, 2, 3, 4), np.float32))
        with pytest.raises(StepError, match="state_view after the write"):
            step.layer(0).state_view()
        step.abort()


@pytest.mark.parametrize("backend", BACKENDS)
def test_digest_depends_on_the_tokens_alone(backend):
    digests = set()
    for pieces, every in (([7], False), ([7], True), ([1] * 7, False), ([3, 4], True), ([2, 5], False)):
        cache = recurrent.create(backend)
        request, done = cache.admit(), []
        for count in pieces:
            new = list(range(len(done), len(done) + count))
            recurrent.advance(cache, {request: (done, new)}, every=every)
            done = done + new
        digests.add(cache.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_and_loaded_on_another_backend(backend, tmp_path):
    cache = recurrent.create(backend, recurrent.spec(state="bf16", conv="bf16"), prefix=kvcore.Periodic(2))
    request = cache.admit()
    recurrent.advance(cache, {request: ([], [5, 6, 7, 8])})
    cache.save(tmp_path / "cache.kv")
    for other in BACKENDS:
        loaded = kvcore.load(tmp_path / "cache.kv", backend=other, prefix=kvcore.Periodic(2))
        assert loaded.digest() == cache.digest()
        recurrent.advance(loaded, {loaded.requests[0]: ([5, 6, 7, 8], [1])})
        assert loaded.restorable([5, 6, 7, 8, 9]) == (4, 0, True)


def test_a_prompt_begins_where_a_step_ended():
    """Blocks are published wherever they are full, states where a step ended: a hit needs both."""
    cache = recurrent.create("reference", prefix="full")
    request, tokens = cache.admit(), list(range(1, 12))
    recurrent.advance(cache, {request: ([], tokens[:4])})
    recurrent.advance(cache, {request: (tokens[:4], tokens[4:])})
    assert cache.restorable(tokens) == (4, 0, True)
    other = cache.admit(tokens)
    assert other.cached_tokens == 4
    recurrent.advance(cache, {other: (tokens[:4], tokens[4:8])})
    assert cache.restorable(tokens) == (8, 0, True)


def test_nothing_is_replayed_short_of_the_whole_history():
    cache = recurrent.create("reference", prefix="zero")
    request, tokens = cache.admit(), list(range(1, 10))
    recurrent.advance(cache, {request: ([], tokens)})
    assert cache.restorable(tokens) == (0, 0, True)
    cache.checkpoint(request)
    assert cache.restorable([*tokens, 1]) == (9, 0, True)


def test_a_step_of_draft_layers_alone_leaves_a_length_without_a_state():
    spec = CacheSpec(
        layers=(LayerSpec(state=State(heads=1, key_dim=2)),),
        draft_layers=presets.classic(layers=1, key_heads=1, key_dim=2).layers,
        block_tokens=4,
    )
    cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=16, max_draft_tokens=2)
    request = cache.admit()
    with cache.step({request: 1}) as step:
        step.layer(0).write_state(np.ones((1, 1, 2), np.float32))
    with cache.step({request: 1}) as step:
        step.layer(1).append_kv(np.ones((1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32))
    with cache.step({request: 0}) as step, pytest.raises(StepError, match="of whose 2 tokens there is no state"):
        step.layer(0).read_state()
    cache.truncate(request, 1)
    with cache.step({request: 0}) as step:
        assert kvcore.to_numpy(step.layer(0).read_state()).tolist() == [[[1, 1]]]


def test_what_a_layer_is_refused():
    cache = recurrent.create("reference")
    request = cache.admit()
    states = np.zeros((1, 2, 3, 4), np.float32)
    step = cache.step({request: 2})
    handle = step.layer(0)
    for given in (states[0], np.zeros((2, 2, 3, 4), np.float32), states.astype(np.float64)):
        with pytest.raises(ShapeError, match="write_state: states"):
            handle.write_state(given)
    with pytest.raises(ShapeError, match="append_state: states"):
        handle.append_state(states)
    with pytest.raises(ShapeError, match="append_conv: rows"):
        handle.append_conv(np.zeros((2, 4), np.float32))
    with pytest.raises(StepError, match="role 'state'"):
        step.layer(1).read_state()
    handle.write_state(states)
    with pytest.raises(StepError, match="read_state, then write_state"):
        handle.read_state()
    for again in (lambda: handle.write_state(states), lambda: handle.append_state(np.zeros((2, 2, 3, 4), np.float32))):
        with pytest.raises(StepError, match="a second"):
            again()
    with pytest.raises(StepError, match="no rows for conv"):
        step.commit()
    assert request.length == 0


def test_bytes_and_rows():
    spec = recurrent.spec()
    plan = plan_cache(spec, max_requests=3, max_tokens=64, max_draft_tokens=2)
    assert [plan.region(0, role)[0].rows for role in ("state", "conv")] == [3, 5]
    assert plan.region(0, "state")[0].unit.nbytes == 3 * 2 * 3 * 4 * 4
    assert logical_bytes(spec, 0)["state"] == 0
    assert logical_bytes(spec, 5) == logical_bytes(spec, 500) | {"kv": logical_bytes(spec, 5)["kv"]}
    assert logical_bytes(spec, 500)["state"] == 4 * (24 + 6)
    assert logical_bytes(spec, 500)["conv"] == 4 * (3 * 5 + 1 * 4)
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("component", "where"),
    [
        (lambda: State(heads=0, key_dim=2), "heads"),
        (lambda: State(heads=1, key_dim=2, value_dim=0), "value_dim"),
        (lambda: State(heads=1, key_dim=3, format="fp4"), "format"),
        (lambda: State(heads=1, key_dim=128, format="index_fp4_68_h"), "format"),
        (lambda: Conv(dim=4, width=1), "width"),
        (lambda: Conv(dim=4, width="2"), "width"),
    ],
)
def test_components_that_cannot_be(component, where):
    with pytest.raises(SpecError) as caught:
        component()
    assert caught.value.where == where


def test_no_state_in_a_draft_layer():
    layer = LayerSpec(state=State(heads=1, key_dim=2))
    with pytest.raises(SpecError, match=r"draft_layers\[0\].state"):
        CacheSpec(layers=(layer,), draft_layers=(layer,), block_tokens=4)
