"""What a layout stores, it reads back: real pools of every format, layout and block size, filled with 0xFF before."""

import numpy as np
import pytest

import kvcore
from kvcore.spec import LAYOUTS, CacheSpec, Entries, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.support.backends_under_test import Codec, poison
from tests.support.built_in_formats import ANY_DIM, FIXED_DIM

OVER_CHANNELS = {**FIXED_DIM, **ANY_DIM}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "dim"), OVER_CHANNELS.items(), ids=OVER_CHANNELS)
def test_stored_rows_come_back(build, name, dim, layout, rng):
    """Two requests in one step, blocks given out in turn; the last block is partly filled."""
    for rows in (1, 2, 3, 32, 64, 256):
        spec = CacheSpec(layers=[LayerSpec(entries=Entries(dim=dim, ratio=1, format=name))], block_tokens=rows)
        cache = build(spec, max_requests=2, max_tokens=4 * rows + 2, layout=layout)
        poison(cache)
        first, second = cache.admit(), cache.admit()
        lengths = (1, 2) if rows == 1 else (rows - 1, 2) if rows > 64 else (rows + 1, rows - 1)
        values = rng.standard_normal((sum(lengths), dim)).astype(np.float32)
        with cache.step(dict(zip((first, second), lengths, strict=True))) as step:
            step.layer(0).store_entries(values)
            gathered = step.layer(0).gather_rows("entries")
        found, positions = kvcore.to_numpy(gathered.rows), kvcore.to_numpy(gathered.positions)
        expected = Codec("reference").encode(name, values)
        start = 0
        for request, length in enumerate(lengths):
            assert np.array_equal(found[request, :length], expected[start : start + length]), f"{rows} rows a block"
            assert positions[request, :length].tolist() == [*range(length)]
            assert not found[request, length:].any()
            assert (positions[request, length:] == -1).all()
            start += length


def test_pool_07_a_pool_beyond_two_gibibytes():
    """Row 0 and row 3,700,000 of 584 bytes each: the pool is reserved, not filled."""
    spec = CacheSpec(layers=[LayerSpec(entries=Entries(dim=292, ratio=1, format="bf16"))], block_tokens=1)
    cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=3_700_001)
    assert cache.nbytes == 3_700_001 * 584 == 2_160_800_584
    row = StepRequest(slot=0, start=0, new=2, blocks=[0, 3_700_000])
    index = cache.ops.index(build_index([row], max_blocks=2))
    values = np.stack([np.full(292, 3.0), np.full(292, -5.0)]).astype(np.float32)
    pools = cache.ops.store_entries(cache.pools, 0, index, values)
    found = cache.ops.gather_rows(pools, 0, "entries", index, columns=2).rows[0].view("<u2")
    assert (found[0] == 0x4040).all()
    assert (found[1] == 0xC0A0).all()
