"""The benchmark of codes: what it takes for a cache is what a cache gives back, and its baselines do what they say."""

import numpy as np
import pytest
import torch

import kvcore
from benchmarks import codes_of_others
from benchmarks import quality_of_codes as quality
from kvcore.spec import KV, CacheSpec, LayerSpec

ROWS = np.random.default_rng(8).standard_normal((70, 1, 64)).astype(np.float32)


@pytest.mark.parametrize("method", ["int8_row", "int4_g32", "int4_ch32 keys, int4_g32 values"])
def test_coded_rows_are_those_that_a_cache_gives_back(method):
    keys, values = quality.METHODS[method]()
    names = (method, method) if " " not in method else ("int4_ch32", "int4_g32")
    layer = LayerSpec(kv=KV(key_heads=1, key_dim=64, key_format=names[0], value_format=names[1]))
    spec = CacheSpec(layers=[layer], block_tokens=64)
    cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=128)
    rows = torch.from_numpy(ROWS).bfloat16().float()
    with cache.step({cache.admit(): 70}) as step:
        step.layer(0).append_kv(rows.numpy(), rows.numpy())
        found = [kvcore.to_numpy(part)[0, :, 0].astype(np.float32) for part in step.layer(0).gather_kv()[:2]]
    query, key = torch.tensor([[69]]), torch.arange(70)[None]
    for side, given in zip((keys, values), found, strict=True):
        assert side.code is not None
        coded, raw = side.code(rows.numpy()[:, 0]), side.raw(query, key)[0].numpy()
        assert np.array_equal(np.where(raw[:, None], rows.numpy()[:, 0], coded), given)


def test_bits_and_what_stays_raw():
    keys, values = quality.METHODS["int4_ch64 keys, int4_g64 values"]()
    assert (keys.bits, values.bits, keys.tokens, values.tokens) == (4.5, 4.5, 64, 64)
    assert keys.raw_tokens(1024) == 31.5
    keys, values = quality.METHODS["KIVI, 2 bits, residual 128"]()
    assert (keys.bits, values.bits, keys.raw_tokens(256), values.raw_tokens(128)) == (3.0, 3.0, 63.5, 64.5)
    at = torch.arange(200)
    assert values.raw(at[150:151, None], at[None])[0].nonzero().min() == 23
    assert keys.raw(at[150:151, None], at[None])[0].nonzero().min() == 128


@pytest.mark.parametrize(("method", "most"), [("KIVI, 4 bits, residual 128", 0.08), ("NVFP4", 0.13)])
def test_the_error_of_a_baseline(method, most):
    rows = np.random.default_rng(9).standard_normal((256, 64)).astype(np.float32)
    for side in quality.METHODS[method]():
        assert side.code is not None
        assert 0.01 < np.sqrt(np.mean((side.code(rows) - rows) ** 2)) < most


def test_a_rotation_is_undone():
    rows = ROWS[:, 0]
    assert np.allclose(codes_of_others.rotated(lambda turned: turned)(rows), rows, atol=1e-5)
