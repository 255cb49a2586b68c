"""Attention to entries that a request's queries share: on the CPU they are decoded once and multiplied as they are."""

import numpy as np
import pytest

import kvcore
from kvcore.backends.torch_triton import cpu_attention
from kvcore.spec import CacheSpec, Entries, LayerSpec

DIM, HEADS = 16, 3
SPEC = CacheSpec(layers=[LayerSpec(entries=Entries(dim=DIM, ratio=1, format="fp32"))], block_tokens=8)


@pytest.fixture
def calls(monkeypatch):
    """How often torch's fused attention was called."""
    found, plain = [], cpu_attention.fused

    def counted(*arguments, **options):
        found.append(arguments[0].shape)
        return plain(*arguments, **options)

    monkeypatch.setattr(cpu_attention, "fused", counted)
    return found


def attended(backend, steps, *, sink=None, spoilt=None, by=np.nan):
    """out and lse of every step {request: new tokens}; ``spoilt``: a row of the last one that is not finite."""
    random = np.random.default_rng(0)
    cache = kvcore.create_cache(SPEC, backend=backend, max_requests=3, max_tokens=96, device="cpu")
    requests, found = {}, []
    for number, step in enumerate(steps):
        for name in step:
            requests.setdefault(name, None)
            if requests[name] is None:
                requests[name] = cache.admit()
        tokens = sum(step.values())
        rows, q = (random.standard_normal(shape, np.float32) for shape in ((tokens, DIM), (tokens, HEADS, DIM)))
        if spoilt is not None and number == len(steps) - 1:
            # Queries' logits of it are minus infinity where it is not NaN: nothing but the value shows.
            rows[spoilt, 0], q[..., 0] = by, -1
        with cache.step({requests[name]: count for name, count in step.items()}) as handle:
            layer = handle.layer(0)
            layer.store_entries(cache.asarray(rows))
            given = None if sink is None else cache.asarray(np.full(HEADS, sink, np.float32))
            out = layer.attend(cache.asarray(q), sink=given, scale=0.5)
            found += [kvcore.to_numpy(out.out), kvcore.to_numpy(out.lse)]
    return found


STEPS = {
    "one row, one token": ([{"a": 5}, {"a": 1}], 2),
    "rows of unequal length": ([{"a": 9, "b": 2}, {"a": 1, "b": 1, "c": 1}], 1),
    "several new tokens each": ([{"a": 4, "b": 4}, {"a": 3, "b": 3}], 2),
    "uneven steps go the other way": ([{"a": 2, "b": 5}], 0),
    "a row without new tokens, too": ([{"a": 3, "b": 3}, {"a": 2, "b": 0}], 1),
}


@pytest.mark.parametrize("sink", [None, 0.3])
@pytest.mark.parametrize("kind", STEPS)
def test_the_reference_is_met(kind, sink, calls):
    steps, fused = STEPS[kind]
    wanted = attended("reference", steps, sink=sink)
    for want, got in zip(wanted, attended("torch_triton", steps, sink=sink), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    assert len(calls) == fused


@pytest.mark.parametrize("by", [np.nan, np.inf])
@pytest.mark.parametrize("spoilt", [1, 2])
def test_a_row_that_is_not_finite_stays_with_those_who_see_it(spoilt, by):
    steps = [{"a": 4}, {"a": 3}]
    wanted, got = (attended(backend, steps, spoilt=spoilt, by=by) for backend in ("reference", "torch_triton"))
    for one, other in zip(wanted, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-6, atol=2e-6)
    assert np.isfinite(got[-2][:spoilt]).all()
    assert np.isnan(got[-2][spoilt:, :, 0]).all()
