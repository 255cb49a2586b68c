"""The policy ``approximate``: a hit is as long as the blocks, and the last window alone is replayed, as a start."""

import numpy as np
import pytest

import kvcore
from kvcore.cli import main
from kvcore.errors import RequestError, SpecError
from kvcore.portable.blob import copy_request
from kvcore.spec import CacheSpec, Conv, LayerSpec, State, presets
from kvcore.store import BlockStore, HostTier, save
from tests.support import scene, stories
from tests.support.portable_form import opened
from tests.support.stories import LATENT, PAGED

PROMPT = list(range(100, 171))
HIT, START = 64, 57
"""Whole blocks of 16, and the longest ring, 7, before their end."""


def found_again(backend: str) -> tuple[kvcore.Cache, kvcore.Request]:
    """A cache that had the prompt, and a request that took its blocks over."""
    cache = stories.create(LATENT, backend, prefix="approximate")
    stories.tell(cache, {cache.admit(PROMPT): PROMPT})
    assert cache.restorable(PROMPT) == (HIT, HIT - START, False)
    assert cache.restorable(PROMPT[:16]) == (16, 7, False)
    request = cache.admit(PROMPT)
    assert (request.length, request.cached_tokens, request.blocks) == (START, START, cache.requests[0].blocks[:4])
    return cache, request


def test_rows_are_those_of_the_tokens_once_the_window_is_replayed(backend):
    """Where rows follow from tokens alone there is nothing to be near to: they are the same; blocks are not written."""
    cache, request = found_again(backend)
    before = scene.raw(cache)
    stories.tell(cache, {request: PROMPT[START:60]})
    beam = cache.fork(request)
    for one in (request, beam):
        stories.tell(cache, {one: PROMPT[60:HIT]})
    changed = {name.split(".")[1] for name in scene.changed(before, scene.raw(cache))}
    assert changed <= {"window", "tail", "index_tail"}
    for one in (request, beam):
        stories.tell(cache, {one: PROMPT[HIT:]})
        assert cache.digest([one]) == stories.retell(backend, LATENT, PROMPT)


def seen(cache: kvcore.Cache, request: kvcore.Request, ids: list[int]) -> list[np.ndarray]:
    """What queries of a step see of every layer: positions of the windows, and attention of all, and of one layer."""
    found = []
    with cache.step({request: ids}) as step:
        stories.feed(step, ids)
        q = np.linspace(-1, 1, len(ids) * 2 * 8, dtype=np.float32).reshape(len(ids), 2, 8)
        for number in range(len(cache.spec.layers)):
            handle = step.layer(number)
            window = handle.gather_window()
            found += [kvcore.to_numpy(window.positions), kvcore.to_numpy(window.values)]
            attended = handle.attend(cache.asarray(q))
            found += [kvcore.to_numpy(attended.out), kvcore.to_numpy(attended.lse)]
    return found


def test_no_query_sees_what_was_before_the_replay(backend):
    cache, request = found_again(backend)
    oracle, other = found_again("reference")
    for ids in (PROMPT[START:60], PROMPT[60:HIT], PROMPT[HIT:66]):
        ours, theirs = seen(cache, request, ids), seen(oracle, other, ids)
        for one, two in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-5)
        first = min(int(positions[positions >= 0].min()) for positions in ours[::4])
        assert first == (START if request.length <= HIT else request.length - 7)
    # By hand, of the layer that has a window alone: the second query of a replay sees two rows.
    cache, request = found_again(backend)
    positions, values, out, _ = seen(cache, request, PROMPT[START : START + 2])[-4:]
    (rows,) = (values[0][positions[0] >= 0].astype(np.float32),)
    assert positions[0][positions[0] >= 0].tolist() == [START, START + 1]
    q = np.linspace(-1, 1, 2 * 2 * 8, dtype=np.float32).reshape(2, 2, 8)[1]
    weights = np.exp(q @ rows.T * 8**-0.5)
    np.testing.assert_allclose(out[1], weights / weights.sum(1, keepdims=True) @ rows, rtol=1e-5, atol=1e-5)


def test_a_fork_in_mid_replay_sees_no_more(backend):
    cache, request = found_again(backend)
    stories.tell(cache, {request: PROMPT[START:59]})
    fork = cache.fork(request)
    ours, theirs = (seen(cache, one, PROMPT[59:61]) for one in (fork, request))
    assert int(ours[-4][ours[-4] >= 0].min()) == START
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, two)


def test_what_comes_of_a_replay_stays_approximate(backend):
    """A checkpoint of it, of its fork, and what goes on from that."""
    cache, request = found_again(backend)
    stories.tell(cache, {request: PROMPT[START:]})
    cache.checkpoint(cache.fork(request))
    asked = [*PROMPT, 5]
    assert cache.restorable(asked) == (71, 0, False)
    again = cache.admit(asked)
    stories.tell(cache, {again: asked[71:]})
    cache.checkpoint(again)
    assert cache.restorable([*asked, 6]) == (72, 0, False)


@pytest.mark.parametrize("way", ["blob", "snapshot", "copy"])
def test_what_leaves_a_cache_says_where_it_comes_from(backend, way, tmp_path, capsys):
    cache, request = found_again(backend)
    stories.tell(cache, {request: PROMPT[START:]})
    asked = [*PROMPT, 5]
    for policy in ("approximate", "full"):
        there = stories.create(LATENT, backend, prefix=policy)
        if way == "blob":
            moved = there.import_request(cache.export_request(request), salt="theirs")
        elif way == "copy":
            moved = copy_request(cache, request, there)
        else:
            cache.save(tmp_path / policy)
            there = kvcore.load(tmp_path / policy, backend=backend, prefix=policy)
            first, moved = there.requests
            assert not first.approximate
        assert moved.approximate
        assert there.fork(moved).approximate
        if way == "blob":
            found = there.restorable(asked, salt="theirs")
            assert found == ((64, 7, False) if policy == "approximate" else (0, 0, True))
    file = tmp_path / "request.kv"
    for one, said in ((request, True), (cache.requests[0], False)):
        blob = cache.export_request(one)
        file.write_bytes(blob)
        assert opened(blob)[0]["request"].get("approximate", False) is said
        assert main(["describe", str(file)]) == 0
        assert ("of an approximate replay" in capsys.readouterr().out) is said


def test_a_store_takes_none_of_it(backend):
    cache, request = found_again(backend)
    stories.tell(cache, {request: PROMPT[START:]})
    with pytest.raises(RequestError, match="of an approximate replay"):
        save(BlockStore([HostTier(1 << 20)]), cache, request, PROMPT)


def test_an_exact_request_takes_exact_checkpoints_along(backend):
    cache, request = found_again(backend)
    stories.tell(cache, {request: PROMPT[START:]})
    first = cache.requests[0]
    for one, length, exact in ((request, 0, False), (first, 71, True), (request, 71, True)):
        cache.checkpoint(one)
        assert opened(cache.export_request(first))[0]["request"]["checkpoints"] == [length] * (length > 0)
        assert opened(cache.export_request(request))[0]["request"]["checkpoints"] == [71]
        assert cache.restorable([*PROMPT, 5]).exact is exact


def test_a_checkpoint_is_exact_where_it_is_as_long(backend):
    cache = stories.create(LATENT, backend, prefix="approximate")
    first = cache.admit(PROMPT)
    stories.tell(cache, {first: PROMPT})
    cache.checkpoint(first)
    assert cache.restorable([*PROMPT, 5]) == (71, 0, True)
    request = cache.admit([*PROMPT, 5])
    assert seen(cache, request, [5])[0].min() == 71 - 5


@pytest.mark.parametrize(
    "layer",
    [PAGED.layers[1], LayerSpec(state=State(heads=2, key_dim=3)), LayerSpec(conv=Conv(dim=4, width=3))],
    ids=["classic", "state", "convolution"],
)
def test_layers_for_which_nobody_serves_it_are_named(layer, backend):
    spec = CacheSpec(layers=[LATENT.layers[0], layer], block_tokens=16)
    with pytest.raises(SpecError, match=r"'approximate' with layers\[1\]"):
        stories.create(spec, backend, prefix="approximate")


def test_v41_replays_one_window():
    """128 tokens, where exactness takes as many for every layer."""
    sizes = {"max_requests": 2, "max_tokens": 128, "backend": "reference"}
    spec = presets.deepseek_v4_1_flash_tiny()
    replays = {}
    for policy in ("approximate", "zero"):
        cache = kvcore.create_cache(spec, prefix=policy, **sizes)
        request = cache.admit(list(range(96)))
        with cache.step({request: 96}) as step:
            stories.feed(step, list(range(96)))
        replays[policy] = cache.restorable(list(range(96)))
    assert replays["approximate"] == (96, 8, False)
    assert replays["zero"].exact
    assert replays["zero"].replay == 6 * 8
