"""The digest of rows in the host's memory against its definition, worked out word by word in Python's integers."""

import numpy as np
import pytest

from kvcore import digest


def mixed(value):
    """murmur3's 32-bit finaliser."""
    for shift, factor in zip(digest.MIX_SHIFTS, (*digest.MIX_FACTORS, 1), strict=True):
        value = (value ^ value >> shift) * factor & digest.MASK
    return value


def defined(rows, positions, salt):
    """[requests, 2], as ``kvcore.digest`` says it."""
    found = np.zeros((len(rows), 2), np.int64)
    for request, (held, places) in enumerate(zip(rows, positions.tolist(), strict=True)):
        for row, position in zip(held, places, strict=True):
            data = bytes(row) + bytes(-len(row) % 4)
            for number in range(len(data) // 4 if position >= 0 else 0):
                word = int.from_bytes(data[4 * number : 4 * number + 4], "little")
                place = position * digest.POSITION_FACTOR + number * digest.WORD_FACTOR + salt
                for lane, seed in enumerate(digest.LANE_SEEDS):
                    found[request, lane] += mixed(word ^ mixed(place + seed & digest.MASK))
    return found & digest.MASK


SHAPES = [(1, 1, 4), (3, 5, 7), (2, 40, 64), (1, 90, 33), (7, 6, 12), (5, 3, 0), (0, 3, 4), (4, 0, 4), (1, 2, 900)]
POSITIONS = {
    "neighbours": lambda _, shape: np.arange(shape[0] * shape[1]).reshape(shape),
    "every fourth": lambda _, shape: np.arange(shape[0] * shape[1]).reshape(shape) * 4 + 11,
    "the same for all": lambda _, shape: np.broadcast_to(np.arange(shape[1]), shape),
    "backwards": lambda _, shape: (1 << 30) - np.arange(shape[0] * shape[1]).reshape(shape),
    "any, some of nothing": lambda rng, shape: rng.integers(-2, 2**31 - 1, shape),
    "nothing": lambda _, shape: np.full(shape, -1),
}


@pytest.fixture(params=["NumPy", "C"])
def way(request, monkeypatch):
    """Who digests: the compiled function, which a process has only once it has digested much, or NumPy."""
    run = digest.native.wait() if request.param == "C" else None
    assert (run is None) == (request.param == "NumPy")
    monkeypatch.setattr(digest, "native", lambda _: run)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("at_once", [16, 64, digest.AT_ONCE])
@pytest.mark.usefixtures("way")
def test_rows_of_any_shape_in_portions_of_any_size(rng, monkeypatch, positions, at_once):
    monkeypatch.setattr(digest, "AT_ONCE", at_once)
    monkeypatch.setattr(digest, "_kept", digest.local())
    for shape in SHAPES:
        rows = rng.integers(0, 256, shape, np.uint8)
        places = POSITIONS[positions](rng, shape[:2]).astype(np.int32)
        found = digest.row_lanes(rows, places, 0xDEADBEEF)
        assert found.dtype == np.int64
        assert (found == defined(rows, places, 0xDEADBEEF)).all(), shape


@pytest.mark.usefixtures("way")
def test_rows_that_lie_apart_or_across_words(rng):
    wide = rng.integers(0, 256, (3, 9, 41), np.uint8)
    places = np.arange(27, dtype=np.int32).reshape(3, 9)
    for rows in (wide[:, :, :40], wide[:, :, 1:9], wide[:, ::-1, 3:31], wide.transpose(0, 1, 2)[:, :, ::2]):
        assert (digest.row_lanes(rows, places, 5) == defined(rows, places, 5)).all()
    # What one call leaves in a thread's arrays is nothing to the next.
    again = digest.row_lanes(wide[:1, :2, :40], places[:1, :2], 5)
    assert (again == defined(wide[:1, :2, :40], places[:1, :2], 5)).all()


@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (3, 4), (2, 5)])
@pytest.mark.usefixtures("way")
def test_nothing_is_read_beyond_positions_that_are_too_few(rng, shape):
    with pytest.raises(ValueError, match="shape"):
        digest.row_lanes(rng.integers(0, 256, (3, 5, 64), np.uint8), np.zeros(shape, np.int32), 5)


@pytest.mark.usefixtures("way")
def test_read_only_rows_are_read(rng):
    rows = rng.integers(0, 256, (1, 4, 8), np.uint8)
    rows.flags.writeable = False
    places = np.arange(4)[None]
    assert (digest.row_lanes(rows, places, 0) == defined(rows, places, 0)).all()
