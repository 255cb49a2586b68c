"""A recurrent model's rows go from torch to JAX and back in mid-generation; the tokens are those of its own cache."""

import jax
import pytest
import torch
from transformers import DynamicCache

import kvcore
from kvcore.interop.transformers import KVCache
from tests.support import recurrent_models
from tests.support import tiny_models as models


@pytest.mark.parametrize(
    "kind",
    ["qwen3_next", "qwen3_5_text", "nemotron_h", "jamba", "kimi_linear", "falcon_h1", "mamba2", "lfm2"],
)
def test_torch_to_jax_to_torch(kind: str, tmp_path) -> None:
    model, ids = recurrent_models.make(kind), models.token_ids(2, 9)
    cache, own = KVCache(model, batch=2, max_length=32), DynamicCache(config=model.config)
    with torch.no_grad():
        for held in (cache, own):
            model(ids, cache=held, use_cache=True)
        cache.save(tmp_path / "torch.kv")
        over_there = kvcore.load(tmp_path / "torch.kv", backend="jax_pallas")
        assert all(isinstance(pool, jax.Array) for pool in over_there.pools.values())
        assert over_there.digest() == cache.kv.digest()
        over_there.save(tmp_path / "jax.kv")
        back = KVCache(model, batch=2, max_length=32)
        back.load(tmp_path / "jax.kv")
        token = torch.tensor([[5], [7]])
        for _ in range(3):
            wanted, found = (model(token, cache=held, use_cache=True).logits[:, -1] for held in (own, back))
            torch.testing.assert_close(found, wanted)
            token = wanted.argmax(-1, keepdim=True)
