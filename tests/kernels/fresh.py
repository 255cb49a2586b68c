"""What a fresh slot holds, reset from what is kept on the device and pool by pool, printed as JSON; in a process of its
own under TRITON_INTERPRET=1, see ``test_fresh``.
"""

import json

import torch

import kvcore
from kvcore.backends.torch_triton import cuda_units
from kvcore.spec import presets


def reset(most: int) -> dict[str, object]:
    """Of slots of at most so many bytes: whether they are kept, and what the pools hold after a slot was reset."""
    cuda_units.MOST_FRESH = most
    spec = presets.deepseek_v4_flash_tiny(draft=False)
    cache = kvcore.create_cache(
        spec, backend="torch_triton", device="cpu", layout="packed", max_requests=2, max_tokens=64
    )
    assert "interpreter" in cache.ops.how
    for pool in cache.pools.values():
        pool.fill_(0xFF)
    cache.admit()
    fresh = cache._state.ops.fresh
    return {"kept": cuda_units.FRESH_PAGE in fresh, "pools": {n: pool.tolist() for n, pool in cache.pools.items()}}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps([reset(most) for most in (cuda_units.MOST_FRESH, 0)]))
