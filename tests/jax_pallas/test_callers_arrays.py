"""What a caller gave is what JAX holds, whatever the caller writes into its own memory afterwards."""

import numpy as np
import pytest

import kvcore
from tests.support import scene


@pytest.mark.parametrize("offset", [0, 4, 32])
def test_memory_of_any_alignment_is_copied(offset: int) -> None:
    cache = scene.create([scene.ring(4)], "jax_pallas")
    whole = np.zeros(9 * 64 * 4 + 128, np.uint8)
    first = -whole.ctypes.data % 64 + offset
    mine = whole[first : first + 9 * 64 * 4].view(np.float32).reshape(9, 64)
    mine[...] = 3
    taken = cache.asarray(mine)
    mine[...] = 7
    assert (kvcore.to_numpy(taken) == 3).all()
