"""Requests over time on JAX: hand-overs to and from other frameworks, snapshots, prefixes, forks, drafts."""

from importlib.util import find_spec

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec
from tests.requests import test_approximate as approximate
from tests.support import hand_over, stories

TORCH = ["torch_triton"] if find_spec("torch") else []
ROUTES = [("reference", "jax_pallas", "reference"), ("jax_pallas", "reference", "jax_pallas")]
ROUTES += [(torch, "jax_pallas", "reference") for torch in TORCH]
PADDING = {"pad_tokens": 16, "pad_requests": 2}
PROMPT = list(range(100, 145))


@pytest.mark.sampled
@pytest.mark.parametrize("spec", hand_over.SPECS.values(), ids=lambda spec: spec.name)
@pytest.mark.parametrize("backends", ROUTES, ids=" to ".join)
def test_a_hand_over_travels_as_the_bytes_written_down(spec: CacheSpec, backends: tuple[str, ...]) -> None:
    # Torch's legs leave the same bytes in the session that has torch: so torch to JAX to the reference is proved too.
    assert hand_over.route(spec, backends, pad_tokens=8, pad_requests=1) == hand_over.BLOBS[spec.name]


def tell(cache: kvcore.Cache, new: dict[kvcore.Request, list[int]]) -> None:
    """One committed step, padded to one shape on JAX."""
    padding = PADDING if cache.backend.name == "jax_pallas" else {}
    with cache.step(new, **padding) as step:
        stories.feed(step, [token for ids in new.values() for token in ids])


def told(tokens: list[int], **sizes: object) -> tuple[kvcore.Cache, kvcore.Request]:
    """A cache on JAX, and a request that got the tokens in pieces of at most 15."""
    cache = stories.create(stories.LATENT, "jax_pallas", **sizes)
    cache.admit()
    request = cache.admit(tokens)
    for start in range(0, len(tokens), 15):
        tell(cache, {request: tokens[start : start + 15]})
    return cache, request


def test_what_was_computed_here_goes_elsewhere_and_comes_back(tmp_path) -> None:
    cache, request = told(PROMPT)
    blob = cache.export_request(request)
    cache.save(tmp_path / "cache.kv", [request])
    there = stories.create(stories.LATENT, "reference", layout="planar")
    moved = there.import_request(blob)
    loaded = kvcore.load(tmp_path / "cache.kv", backend="reference")
    assert there.digest([moved]) == loaded.digest() == cache.digest([request])
    assert there.export_request(moved) == blob
    there.save(tmp_path / "again.kv", [moved])
    # Back on JAX it goes on as if it had never left.
    home = stories.create(stories.LATENT, "jax_pallas", layout="packed")
    home.import_request(there.export_request(moved))
    again = kvcore.load(tmp_path / "again.kv", backend="jax_pallas", layout="tpu_tile")
    digests = []
    for where, who in ((cache, request), (home, home.requests[0]), (again, again.requests[0])):
        tell(where, {who: [1, 2, 3]})
        digests.append(where.digest([who]))
    assert len(set(digests)) == 1


def test_drafts_that_are_rolled_back_leave_what_a_run_without_them_leaves(rng: np.random.Generator) -> None:
    cache, request = told(PROMPT[:20], max_draft_tokens=3)
    plain, other = told(PROMPT[:20], max_draft_tokens=3)
    while request.length < 40:
        # One token and three drafts, of which the first so many are right.
        start, right = request.length, int(rng.integers(4))
        tell(cache, {request: [*PROMPT[start : start + 1 + right], *[9] * (3 - right)]})
        cache.truncate(request, start + 1 + right)
        for token in PROMPT[start : start + 1 + right]:
            tell(plain, {other: [token]})
        assert cache.digest([request]) == plain.digest([other])


def test_hits_and_forks_are_as_told_from_the_start() -> None:
    cache, request = told(PROMPT, prefix="full")
    wanted = cache.digest([request])
    hit = cache.admit(PROMPT)
    assert hit.cached_tokens == 32
    tell(cache, {hit: PROMPT[32:]})
    assert cache.digest([hit]) == wanted
    fork = cache.fork(hit)
    tell(cache, {fork: [5], request: [6]})
    assert cache.digest([hit]) == wanted
    assert len({cache.digest([each]) for each in (request, hit, fork)}) == 3


def test_a_number_beyond_the_prompt_publishes_what_lies_within() -> None:
    cache = stories.create(stories.LATENT, "jax_pallas", prefix="full")
    request = cache.admit(PROMPT[:20])
    for start in (0, 15):
        with cache.step({request: 15}, **PADDING) as step:
            stories.feed(step, PROMPT[start : start + 15])
    assert (request.length, request.tokens) == (30, None)
    assert cache.restorable(PROMPT).length == 16
    hit = cache.admit(PROMPT)
    assert hit.cached_tokens == 16
    alone = cache.admit()
    tell(cache, {alone: PROMPT[:16]})
    assert cache.digest([hit]) == cache.digest([alone])


def test_numbers_publish_a_prompt_and_its_checkpoints_go_along(tmp_path) -> None:
    cache = stories.create(stories.LATENT, "jax_pallas", prefix="full", max_request_tokens=50, max_draft_tokens=1)
    request = cache.admit(PROMPT, salt="a")
    for start in range(0, len(PROMPT), 15):
        with cache.step({request: 15}, **PADDING) as step:
            stories.feed(step, PROMPT[start : start + 15])
    assert step.index.block_table.shape[1] == 4
    assert request.tokens == tuple(PROMPT)
    there = stories.create(stories.LATENT, "reference", prefix="full", max_draft_tokens=3)
    moved = there.import_request(cache.export_request(request), salt="a")
    there.save(tmp_path / "cache.kv", [moved])
    home = kvcore.load(tmp_path / "cache.kv", backend="jax_pallas", prefix="full", max_request_tokens=50)
    assert there.digest([moved]) == home.digest() == cache.digest([request])
    for each in (cache, there, home):
        assert [each.restorable(PROMPT, n, salt="a").length for n in (15, 16, 31, 45)] == [0, 16, 16, 32]
        hit = each.admit(PROMPT, salt="a")
        assert hit.cached_tokens == 32
        tell(each, {hit: PROMPT[32:]})
    assert home.digest(home.requests[-1:]) == cache.digest(cache.requests[-1:])
    cache.reset_prefix_cache()
    assert cache.restorable(PROMPT, salt="a").length == 0
    with pytest.raises(kvcore.OutOfBlocks, match="max_request_tokens"):
        cache.step({request: 6}, **PADDING)


def test_a_replay_that_is_approximate_sees_nothing_before_it():
    cache, request = approximate.found_again("jax_pallas")
    oracle, other = approximate.found_again("reference")
    for ids in (approximate.PROMPT[57:60], approximate.PROMPT[60:66]):
        ours, theirs = (approximate.seen(*each, ids) for each in ((cache, request), (oracle, other)))
        for one, two in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-5)
