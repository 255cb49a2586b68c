"""Classic attention of torch on the CPU, piece by piece over rows as they lie, against the reference's loops."""

import ml_dtypes
import numpy as np
import pytest
import torch

import kvcore
from kvcore.backends.torch_triton import cpu_attention
from kvcore.errors import NonFiniteError, ShapeError, StepError
from kvcore.spec import KV, CacheSpec, LayerSpec
from tests.support.backends_under_test import BACKENDS, poison

KINDS = {
    "paged": {},
    "contiguous": {"storage": "slot"},
    "sliding ring": {"storage": "ring", "window": 6},
    "sliding, paged": {"window": 6},
    "chunked ring": {"storage": "ring", "chunk": 5},
}
FORMATS = ["fp32", "bf16", "fp16", "int8_row", "nf4_b64"]
STEPS = [(3, 9), (1, 1), (0, 1), (2, 1), (1, 0), (1, 1), (1, 1)]
"""New tokens of two requests, step by step: a prompt beyond the window, drafts, single tokens, none."""

HEADS, KEY_HEADS, DIM = 6, 2, 64


@pytest.fixture
def pieces_of_four(monkeypatch):
    """Pieces smaller than a block and a window; the list grows by one for every attention that was in pieces."""
    taken, attend = [], cpu_attention.attend

    def counted(*arguments, **options):
        found = attend(*arguments, **options)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(cpu_attention, "PIECE", 4)
    monkeypatch.setattr(cpu_attention, "attend", counted)
    return taken


def create(backend, check=False, **kv):
    layers = [LayerSpec(kv=KV(key_heads=KEY_HEADS, key_dim=DIM, **kv)) for _ in range(2)]
    spec = CacheSpec(layers=layers, block_tokens=8)
    options = {"max_requests": 3, "max_tokens": 96, "max_draft_tokens": 1, "check": check}
    return kvcore.create_cache(spec, backend=backend, **options)


def caches(**kv):
    made = [create(name, **kv) for name in BACKENDS]
    for cache in made:
        poison(cache)
    return made


def attended(made, steps, fill, sink=None):
    """(out, lse) of every step and backend, on layer 1; ``fill(tokens)`` gives q, k, v."""
    requests = [[cache.admit() for _ in steps[0]] for cache in made]
    for counts in steps:
        q, k, v = fill(sum(counts))
        found = []
        for cache, mine in zip(made, requests, strict=True):
            with cache.step(dict(zip(reversed(mine), counts, strict=True))) as step:
                step.layer(0).append_kv(v, k)
                step.layer(1).append_kv(k, v)
                found.append([kvcore.to_numpy(part) for part in step.layer(1).attend(q, sink=sink)])
        yield found


def rows(rng, dtype=np.float32):
    return lambda tokens: [
        (3 * rng.standard_normal((tokens, heads, DIM))).astype(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sink", [pytest.param(None, id="no sink"), pytest.param(True, id="sink")])
def test_agrees_with_the_reference(kind, form, sink, rng, pieces_of_four):
    sink = np.linspace(-2, 9, HEADS, dtype=np.float32) if sink else None
    for want, got in attended(caches(**KINDS[kind], key_format=form), STEPS, rows(rng), sink):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
    assert sum(pieces_of_four) >= len(STEPS) - 2  # all but prompts beyond a ring


@pytest.mark.parametrize("forms", [("fp32", "bf16"), ("fp16", "fp32"), ("bf16", "fp16")], ids="-".join)
@pytest.mark.parametrize("kind", ["paged", "sliding ring"])
def test_keys_and_values_of_two_plain_formats(kind, forms, rng, pieces_of_four):
    keys, values = forms
    for want, got in attended(caches(**KINDS[kind], key_format=keys, value_format=values), STEPS, rows(rng)):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
    assert sum(pieces_of_four) >= len(STEPS) - 2


SHARERS = [(2, 0, 3), (1, 1, 1), (0, 4, 1), (3, 2, 2), (1, 1, 1)]
"""New tokens of a request, of a stranger, and of a fork of the first, step by step."""


@pytest.mark.parametrize("form", ["fp32", "int8_row"])
@pytest.mark.parametrize("kind", ["paged", "sliding, paged"])
def test_requests_that_share_blocks_look_at_them_in_one_product(kind, form, rng, monkeypatch):
    """Also where a stranger's tokens lie between theirs, and where windows end at different rows of a shared block."""
    products, right = [], cpu_attention.over_rows

    def counted(*arguments):
        products.append(arguments[6].count)
        return right(*arguments)

    monkeypatch.setattr(cpu_attention, "over_rows", counted)
    made, fill, alike = caches(**KINDS[kind], key_format=form), rows(rng), []
    first = fill(19)[1:]
    for cache in made:
        requests = [cache.admit(), cache.admit()]
        with cache.step({requests[0]: 19}) as step:
            for number in range(2):
                step.layer(number).append_kv(*first)
        alike.append([*requests, cache.fork(requests[0])])
    for counts in SHARERS:
        q, k, v = fill(sum(counts))
        found = []
        for cache, mine in zip(made, alike, strict=True):
            with cache.step(dict(zip(mine, counts, strict=True))) as step:
                step.layer(0).append_kv(v, k)
                step.layer(1).append_kv(k, v)
                found.append([kvcore.to_numpy(part) for part in step.layer(1).attend(q)])
        want, got = found
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
    if kind == "paged" and form == "fp32":
        assert 5 in products  # the two that share, in their first step


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_one_length_are_a_batch_where_their_rows_are_evenly_spaced(kind, rng, monkeypatch):
    """Four that lie evenly, then three of them that do not, in either order."""
    batches, right = [], cpu_attention.over_rows

    def counted(*arguments):
        batches.append((arguments[6].batch, arguments[6].count))
        return right(*arguments)

    monkeypatch.setattr(cpu_attention, "over_rows", counted)
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=KEY_HEADS, key_dim=DIM, **KINDS[kind]))], block_tokens=8)
    options = {"max_requests": 4, "max_tokens": 128, "max_draft_tokens": 1}
    made = [kvcore.create_cache(spec, backend=name, **options) for name in BACKENDS]
    fill, requests = rows(rng), [[cache.admit() for _ in range(4)] for cache in made]
    everyone, some = (0, 1, 2, 3), (0, 1, 3)
    for members, count in [(everyone, 5), (everyone, 2), (some, 1), (some, 2), (some[::-1], 1), (some, 9), (some, 1)]:
        q, k, v = fill(len(members) * count)
        found = []
        for cache, mine in zip(made, requests, strict=True):
            with cache.step({mine[number]: count for number in members}) as step:
                layer = step.layer(0)
                layer.append_kv(k, v)
                found.append([kvcore.to_numpy(part) for part in layer.attend(q)])
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
    assert {(4, 2), (2, 1)} <= set(batches)


def test_bf16_queries_get_bf16_answers(rng, pieces_of_four):
    for want, got in attended(caches(), STEPS, rows(rng, ml_dtypes.bfloat16)):
        assert got[0].dtype == ml_dtypes.bfloat16
        tipped = want[0] != got[0]
        assert tipped.mean() <= 1 / 64
        np.testing.assert_allclose(got[0].astype(np.float32), want[0].astype(np.float32), rtol=2**-7, atol=1e-5)
    assert all(pieces_of_four)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["key", "value"])
def test_what_is_not_finite_stays_with_the_queries_that_see_it(side, bad, rng, pieces_of_four):
    """The third of four tokens of a request is bad: the two before it are not touched."""
    fill = rows(rng)

    def spoiled(tokens):
        q, k, v = fill(tokens)
        (k if side == "key" else v)[4, 1, 7] = bad
        return q, k, v

    ((want, got),) = attended(caches(), [(2, 4)], spoiled)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
    assert np.isfinite(got[0][:4]).all()
    assert pieces_of_four == [False]


def test_lent_rows_are_the_pools_own_memory(rng):
    """And are refused where they would have to be copied: before the append, of a format to be decoded, and in a ring
    whose step brings more tokens than it takes before the commit."""
    for form, kind, lent in (("fp32", "paged", True), ("fp32", "sliding ring", False), ("int8_row", "paged", False)):
        cache = caches(**KINDS[kind], key_format=form)[1]
        _, k, v = rows(rng)(5)
        with cache.step({cache.admit(): 5}) as step:
            step.layer(0).append_kv(k, v)
            layer = step.layer(1)
            assert layer.kv_view() is None
            layer.append_kv(k, v)
            found = layer.kv_view()
            assert (found is not None) == lent
            if found is not None:
                assert (kvcore.to_numpy(found[0])[0] == k).all()
                assert (kvcore.to_numpy(found[1])[0] == v).all()
                found[0].zero_()
                assert not kvcore.to_numpy(layer.gather_kv()[0]).any()


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8_row"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_append_and_borrow_in_one_go_are_both(kind, form, rng):
    """For one request and for two of one length, on every backend, also where nothing is lent."""
    for cache in caches(**KINDS[kind], key_format=form):
        requests = [cache.admit(), cache.admit()]
        for new, some in ((5, 2), (1, 2), (1, 1), (2, 1), (1, 2), (1, 1)):
            _, k, v = rows(rng)(new * some)
            with cache.step(dict.fromkeys(requests[:some], new)) as step:
                at_once, after = step.layer(0).append_kv_view(k, v), step.layer(1)
                after.append_kv(k, v)
                lent = after.kv_view()
                assert (at_once is None) == (lent is None)
                want = after.gather_kv()[:2]
                for found in (at_once or step.layer(0).gather_kv()[:2], lent or want):
                    for got, copied in zip(found, want, strict=True):
                        assert (kvcore.to_numpy(got) == kvcore.to_numpy(copied)).all()


def test_what_passed_for_one_layer_stands_for_arrays_like_it_alone(rng):
    """Layer 1 refuses, or detaches, what layer 0 was not given."""
    cache = create("torch_triton", key_format="fp32")
    request = cache.admit()
    k, v = (torch.from_numpy(array) for array in rows(rng)(2)[1:])
    wrong = {"another shape": (k[:1], v), "another dtype": (k, v.double()), "no array": (k, v.tolist())}
    with cache.step({request: 2}) as step:
        step.layer(0).append_kv_view(k, v)
        for given in wrong.values():
            with pytest.raises(ShapeError, match="append_kv"):
                step.layer(1).append_kv_view(*given)
        with pytest.raises(ShapeError, match="append_kv: key"):
            step.layer(1).append_kv_view(k.clone().requires_grad_(), v)
        with torch.no_grad():
            lent = step.layer(1).append_kv_view(k.clone().requires_grad_(), v)
    assert torch.equal(lent[0][0], k)
    assert not lent[0].requires_grad


def test_a_refused_append_and_borrow_changes_nothing(rng):
    cache = create("torch_triton", check=True, key_format="fp32")
    request = cache.admit()
    _, k, v = rows(rng)(2)
    with cache.step({request: 2}) as step:
        step.layer(0).append_kv_view(k, v)
        step.layer(1).append_kv(k, v)
    before = cache.digest()
    bad = np.full_like(k, np.nan)
    for given, error in (((k[:1], v), ShapeError), ((k, v[:, :, :1]), ShapeError), ((bad, v), NonFiniteError)):
        step = cache.step({request: 2})
        with pytest.raises(error, match="append_kv"):
            step.layer(0).append_kv_view(*given)
        step.layer(0).append_kv_view(k, v)
        with pytest.raises(StepError, match="a second append to kv"):
            step.layer(0).append_kv_view(k, v)
        with pytest.raises(error, match="append_kv"):
            step.layer(1).append_kv_view(*given)
        step.abort()
        assert cache.digest() == before


@pytest.mark.parametrize("form", ["fp8_row", "int8_row", "nf4_b64", "mxfp4", "bf16"])
@pytest.mark.parametrize("kind", ["paged", "contiguous", "sliding ring"])
def test_stored_rows_are_never_rounded_again(kind, form, rng):
    """Each row's bytes are those it got when it was appended, whatever comes later and however large."""
    for cache in caches(**KINDS[kind], key_format=form, value_format="int8_row"):
        request, before = cache.admit(), None
        for scale in (1.0, 1e4, 1e-4, 100.0, 1.0):
            _, k, v = (scale * array for array in rows(rng)(1))
            with cache.step({request: 1}) as step:
                step.layer(0).append_kv(k, v)
                step.layer(1).append_kv(k, v)
            with cache.step({request: 0}) as step:
                stored = kvcore.to_numpy(step.layer(1).gather_rows("kv").rows)[0]
            assert before is None or (stored[: len(before)] == before).all()
            assert len(stored) == request.length
            before = stored
