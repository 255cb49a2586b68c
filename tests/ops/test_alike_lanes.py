"""Lanes of several regions in one pass are those of each."""

import numpy as np
import pytest

from kvcore import digest
from kvcore.digest import AT_ONCE, alike_lanes, row_lanes


@pytest.mark.parametrize(
    ("regions", "columns", "size", "start", "step"),
    [
        (3, 7, 16, 0, 1),
        (1, 1, 4, 5, 4),
        (5, 128, 584, 900, 1),
        (40, 300, 68, 0, 4),
        (2, AT_ONCE // 4 + 1, 16, 3, 1),
        (3, 5, 13, 0, 1),
        (0, 5, 16, 0, 1),
        (3, 0, 16, 0, 1),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_regions_together_are_regions_alone(regions, columns, size, start, step, compiled, rng, monkeypatch):
    run = digest.native.wait() if compiled else None
    if compiled and run is None:
        pytest.skip("no compiler")
    rows = rng.integers(0, 256, (regions, columns, size), np.uint8)
    positions = start + step * np.arange(columns)
    salts = [int(salt) for salt in rng.integers(0, 1 << 32, regions)]
    expected = [row_lanes(one[None], positions[None], salt)[0] for one, salt in zip(rows, salts, strict=True)]
    monkeypatch.setattr(digest, "native", lambda _: run)
    found = alike_lanes(rows, positions, salts)
    assert found.shape == (regions, 2)
    assert np.array_equal(found, np.reshape(expected, (regions, 2)))
