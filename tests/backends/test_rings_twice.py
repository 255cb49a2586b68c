"""Rings that lie twice by head: both copies hold the same, and what is lent is what is gathered."""

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore.errors import RollbackError
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from tests.support.backends_under_test import poison

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 16
KINDS = {
    "sliding": {"window": 6},
    "chunked": {"chunk": 5},
    "sliding bf16, keys decoded": {"window": 6, "key_format": "int8_row", "value_format": "bf16"},
}


def spec_of(kind):
    kv = KV(
        **{"key_format": "fp32", **KINDS[kind]}, key_heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM, storage="ring"
    )
    return CacheSpec(layers=(LayerSpec(kv=kv), LayerSpec(kv=kv)), block_tokens=4)


def create(kind, backend, drafts=2, layout="by_head"):
    spec = spec_of(kind)
    cache = kvcore.create_cache(spec, backend=backend, max_requests=4, max_draft_tokens=drafts, layout=layout)
    poison(cache)
    return cache


def rows_of(name, positions):
    """Keys and values [n, heads, dim] that tell whose they are, of which position, head and channel; exact in bf16."""
    at = (29 * name + np.asarray(positions, np.float32)[:, None, None]) % 64
    head, channel = np.arange(HEADS)[:, None] / 2, np.arange(VALUE_DIM) % 2 / 4
    values = (at + head + channel).astype(np.float32)
    return values[:, :, :KEY_DIM], values


def feed(cache, names, new):
    """One step of ``new`` tokens for each of ``names`` {request: name}; its layer 1 is read: (lent, gathered).

    Layer 0 appends and lends in one go: the same, but for the sign.
    """
    with cache.step(dict.fromkeys(names, new)) as step:
        spans = [rows_of(name, range(request.length, request.length + new)) for request, name in names.items()]
        k, v = (np.concatenate(side) for side in zip(*spans, strict=True))
        at_once = step.layer(0).append_kv_view(k, v)
        layer = step.layer(1)
        layer.append_kv(-k, -v)
        lent = layer.kv_view()
        assert (at_once is None) == (lent is None)
        for one, other in zip(at_once or (), lent or (), strict=True):
            assert (kvcore.to_numpy(one) == -kvcore.to_numpy(other)).all()
        return lent, layer.gather_kv()


def assert_copies_agree(cache):
    held = {name: kvcore.to_numpy(pool).view(np.uint8) for name, pool in cache.pools.items()}
    for region in cache.plan.regions:
        for name, size in region.buffers.values():
            units = held[name].reshape(-1, region.heads, region.copies, size // region.heads // region.copies)
            assert (units == units[:, :, :1]).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_both_copies_hold_the_same_whatever_happens(kind, backend, rng):
    """Steps of every size, aborts, truncations, forks, slots used again, requests that leave and come back."""
    cache, names = create(kind, backend), {}

    def admit():
        names[cache.admit()] = int(rng.integers(2))

    def release(request):
        del names[request]
        cache.release(request)

    def fail(request):
        before = cache.digest()
        step = cache.step({request: int(rng.choice([1, 3, 9]))})
        step.layer(1).append_kv(*rows_of(7, range(len(step.positions))))
        step.abort()
        assert cache.digest() == before

    def truncate(request):
        with suppress(RollbackError):  # what was imported or cut before goes back no further
            cache.truncate(request, max(0, request.length - int(rng.integers(3))))

    def leave(request):
        blob, name = cache.export_request(request), names[request]
        release(request)
        names[cache.import_request(blob)] = name

    def fork(request):
        names[cache.fork(request)] = names[request]

    for _ in range(60):
        if not names or (cache.free_slots and rng.random() < 0.3):
            admit()
        request = list(names)[rng.integers(len(names))]
        chosen = rng.choice(["feed", "feed", "feed", "fail", "truncate", "release", "leave", "fork"])
        if chosen == "feed":
            _, (_, values, positions) = feed(cache, {request: names[request]}, int(rng.choice([1, 1, 1, 2, 3, 9, 25])))
            seen = kvcore.to_numpy(positions)[0]
            wanted = -rows_of(names[request], seen)[1]
            assert (kvcore.to_numpy(values)[0] == wanted).all()
            assert seen[-1] == request.length - 1
        elif chosen == "fork":
            if cache.free_slots:
                fork(request)
        else:
            {"fail": fail, "truncate": truncate, "release": release, "leave": leave}[chosen](request)
        assert_copies_agree(cache)


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_a_ring_is_lent_wherever_it_has_wrapped(kind, requests):
    """In every decode step, and bit by bit what a copy in order would be; two requests lie a slot apart."""
    cache = create(kind, "torch_triton")
    names = {cache.admit(): number for number in range(requests)}
    feed(cache, names, 11)
    for _ in range(30):
        lent, (keys, values, positions) = feed(cache, names, 1)
        assert lent is not None
        at = kvcore.to_numpy(positions)
        assert (at[:, -1] == [request.length - 1 for request in names]).all()
        for side, copied in enumerate((keys, values)):
            got = kvcore.to_numpy(lent[side])
            assert (got == kvcore.to_numpy(copied)).all()
            for request, name in enumerate(names.values()):
                assert (got[request] == -rows_of(name, at[request])[side]).all()


@pytest.mark.parametrize(
    ("lengths", "even"), [((12, 14), True), ((14, 15, 16), True), ((12, 14, 13), False), ((14, 12, 12), False)]
)
def test_requests_of_different_lengths_are_lent_what_lies_evenly(lengths, even):
    cache = create("sliding", "torch_triton")
    names = {cache.admit(): number for number in range(len(lengths))}
    for (request, name), length in zip(names.items(), lengths, strict=True):
        feed(cache, {request: name}, length)
    lent, (_, values, positions) = feed(cache, names, 1)
    assert kvcore.to_numpy(positions).tolist() == [list(range(length - 5, length + 1)) for length in lengths]
    for found in (values, lent[1]) if even else (values,):
        for name, at, got in zip(names.values(), kvcore.to_numpy(positions), kvcore.to_numpy(found), strict=True):
            assert (got == -rows_of(name, at)[1]).all()
    assert (lent is not None) == even


def test_what_is_lent_after_an_abort_is_what_was_there_before():
    cache = create("sliding", "torch_triton")
    names = {cache.admit(): 0}
    feed(cache, names, 20)
    before = cache.digest()
    step = cache.step(dict.fromkeys(names, 2))
    step.layer(1).append_kv(*rows_of(9, range(2)))
    assert step.layer(1).kv_view() is not None
    step.abort()
    assert cache.digest() == before
    (keys, values), _ = feed(cache, names, 1)
    for got, want in zip((keys, values), rows_of(0, range(15, 21)), strict=True):
        assert (kvcore.to_numpy(got)[0] == -want).all()


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["by_head", "packed"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@pytest.mark.parametrize("new", [1, 2, 4, 12])
def test_an_abort_leaves_every_length_that_truncation_reaches(kind, drafts, new, layout, backend):
    """Whatever the ring's fill: never wrapped, about to, wrapped, cut back before; all digests are those without it."""
    for length, cut in ((3, 0), (8, 0), (9, 0), (10, 0), (11, 0), (23, 0), (23, min(drafts, 2))):
        with_abort, without = (_history(create(kind, backend, drafts, layout), length, cut) for _ in range(2))
        cache, request = with_abort
        step = cache.step({request: new})
        for layer in (0, 1):
            step.layer(layer).append_kv(*rows_of(9, range(new)))
        step.abort()
        found, wanted = (_digests(*each) for each in (with_abort, without))
        assert found == wanted
        assert len(found) > min(drafts, length - cut) - cut


def _history(cache, length, cut):
    request = cache.admit()
    for new in (length - 2, 1, 1):
        feed(cache, {request: 1}, new)
    cache.truncate(request, length - cut)
    return cache, request


def _digests(cache, request):
    """Length -> digest, from the request's length down to the smallest that it can be truncated to."""
    found = {}
    while True:
        found[request.length] = cache.digest()
        if request.length == 0:
            return found
        try:
            cache.truncate(request, request.length - 1)
        except RollbackError:
            return found


@pytest.mark.parametrize(
    ("kind", "layout", "tokens", "wanted"),
    [
        pytest.param("sliding", "by_head", None, [(9, 2), (9, 2)], id="a window, a row to spare, two drafts; twice"),
        pytest.param("chunked", "by_head", None, [(8, 2), (8, 2)], id="a chunk, likewise"),
        pytest.param("sliding", "packed", None, [(8, 1), (8, 1)], id="other layouts: once, nothing to spare"),
        pytest.param("sliding bf16, keys decoded", "by_head", None, [(9, 1), (9, 2)], id="decoded rows once"),
    ],
)
def test_what_is_planned_for_a_ring(kind, layout, tokens, wanted):
    plan = plan_cache(spec_of(kind), max_requests=3, max_tokens=tokens, max_draft_tokens=2, layout=layout)
    regions = plan.region(1, "kv")
    assert [(region.rows, region.copies) for region in regions] == wanted
    rows = [region.heads * region.format.row for region in regions]
    each = sum(size * rows * copies for size, (rows, copies) in zip(rows, wanted, strict=True))
    assert plan.nbytes == 3 * 2 * each


def test_a_ring_that_no_request_can_fill_lies_once():
    """Beside a layer that bounds what a request can hold: nothing wraps, so there is nothing to unroll."""
    full = KV(key_heads=HEADS, key_dim=KEY_DIM, storage="slot", key_format="fp32")
    layers = (LayerSpec(kv=full), spec_of("sliding").layers[0])
    for tokens, wanted in ((9, (9, 1)), (10, (9, 2))):
        plan = plan_cache(
            CacheSpec(layers=layers), max_requests=1, max_tokens=tokens, max_draft_tokens=2, layout="by_head"
        )
        assert [(region.rows, region.copies) for region in plan.region(1, "kv")] == [wanted] * 2
        assert [(region.rows, region.copies) for region in plan.region(0, "kv")] == [(tokens, 1)] * 2


def test_nan_is_stored_as_one_nan_in_both_copies(backend):
    """A NaN of any payload becomes the code's own, whoever stores it."""
    cache = create("sliding bf16, keys decoded", backend)
    request = cache.admit()
    k, v = (side.astype(ml_dtypes.bfloat16) for side in rows_of(0, range(1)))
    v.view(np.uint16)[0, 1, 3] = 0xFFC5
    with cache.step({request: 1}) as step:
        for layer in (0, 1):
            step.layer(layer).append_kv(k, v)
    region = cache.plan.region(1, "kv")[1]
    ((name, size),) = region.buffers.values()
    rows = kvcore.to_numpy(cache.pools[name]).reshape(4, size)[0].view(np.uint16).reshape(HEADS, 2, 9, VALUE_DIM)
    assert rows[1, :, 0, 3].tolist() == [0x7FC0, 0x7FC0]
    assert_copies_agree(cache)
