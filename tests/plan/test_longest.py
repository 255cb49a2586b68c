"""The most tokens that one request can hold: smaller rings and tables, and everything else as it is without."""

import pytest

import kvcore
from kvcore.errors import OutOfBlocks
from tests.support import scene, stories
from tests.support.backends_under_test import BACKENDS
from tests.support.stories import LATENT, MIXED, STORED

TOKENS = list(range(300, 330))
LONGEST = 27
SMALL = {"max_request_tokens": LONGEST, "max_draft_tokens": 2}


@pytest.mark.parametrize("layout", ["auto", "packed"])
@pytest.mark.parametrize("longest", [3, 5, LONGEST])
@pytest.mark.parametrize("spec", [LATENT, MIXED], ids=lambda spec: spec.name)
def test_what_a_request_holds_does_not_depend_on_the_bound(backend, spec, longest, layout):
    """Whole prompts, pieces, single tokens, drafts that are taken back, in rings of fewer rows than their window."""
    cache = stories.create(spec, backend, layout=layout, max_request_tokens=longest, max_draft_tokens=1)
    free = stories.create(spec, backend, layout=layout, max_draft_tokens=1)
    assert cache.nbytes < free.nbytes or longest > 7
    other = [each.admit() for each in (cache, free)]
    for each, request in zip((cache, free), other, strict=True):
        stories.tell(each, {request: TOKENS[: longest - 2]})
        for token in TOKENS[longest - 2 : longest]:
            stories.tell(each, {request: [token]})
        each.truncate(request, longest - 1)
    assert cache.digest() == free.digest() == stories.retell(backend, spec, TOKENS[: longest - 1])
    with cache.step({other[0]: 1}) as step:
        assert step.index.block_table.shape[1] == -(-longest // spec.block_tokens)
        stories.feed(step, [7])
    stories.tell(free, {other[1]: [7]})
    assert cache.digest() == free.digest()


def test_one_token_more_is_refused_and_changes_nothing(backend):
    cache = stories.create(MIXED, backend, prefix="full", **SMALL)
    request, other = cache.admit(), cache.admit()
    stories.tell(cache, {request: TOKENS[:LONGEST], other: TOKENS[:4]})
    before, free, digest = scene.raw(cache), cache.free_blocks, cache.digest()
    with pytest.raises(OutOfBlocks) as caught:
        cache.step({other: 1, request: 1})
    assert caught.value.allowed == f"{LONGEST} tokens in one request (max_request_tokens)"
    assert (scene.raw(cache), cache.free_blocks, cache.digest()) == (before, free, digest)
    stories.tell(cache, {other: [1]})


@pytest.mark.parametrize("spec", [LATENT, MIXED, STORED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("target", BACKENDS)
def test_requests_move_between_caches_of_other_bounds(backend, target, spec, tmp_path):
    """Rings of other sizes hold the same rows: digests are equal, and what is too long is refused."""
    small = stories.create(spec, backend, **SMALL)
    large = stories.create(spec, target, max_draft_tokens=5)
    request = small.admit()
    stories.tell(small, {request: TOKENS[:25]})
    moved = large.import_request(small.export_request(request))
    stories.tell(large, {moved: TOKENS[25:27]})
    back = small.import_request(large.export_request(moved))
    assert large.digest([moved]) == small.digest([back])
    small.save(tmp_path / "small.kv")
    loaded = kvcore.load(tmp_path / "small.kv", backend=target)
    assert loaded.plan.max_request_tokens == LONGEST
    assert loaded.digest() == small.digest()
    assert kvcore.load(tmp_path / "small.kv", backend=target, max_request_tokens=100).digest() == small.digest()
    stories.tell(large, {moved: TOKENS[27:28]})
    before = scene.raw(small)
    with pytest.raises(OutOfBlocks):
        small.import_request(large.export_request(moved))
    assert (scene.raw(small), small.free_slots) == (before, 2)


def test_layers_in_slots_need_no_other_size(backend):
    spec = kvcore.spec.CacheSpec(layers=[scene.classic("slot"), scene.classic("ring", window=40)])
    cache = kvcore.create_cache(spec, backend=backend, max_requests=2, max_request_tokens=12)
    assert {region.rows for region in cache.plan.regions} == {12}
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:12]})
    with pytest.raises(OutOfBlocks, match="12 tokens in one request"):
        cache.step({request: 1})
    assert scene.read(cache, lambda step, layer: [len(rows) for rows in kept(step, layer)], request, layer=1) == [12]


def kept(step, layer):
    """Positions of each request's rows in a layer."""
    _, _, positions = step.layer(layer).gather_kv()
    return [[int(p) for p in row if p >= 0] for row in kvcore.to_numpy(positions)]
