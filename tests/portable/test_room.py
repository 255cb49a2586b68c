"""Bytes that nobody wrote zeros into: of their own, as many as were asked for, and filled before they are seen."""

import numpy as np
import pytest

from kvcore.portable import room


@pytest.mark.parametrize("size", [0, 1, 2, 4095, 4096, 100_000, room.LARGE - 1, room.LARGE, room.LARGE + 5000])
def test_bytes_are_as_many_and_its_owner_s(size):
    one, other = room.bytes_of_any_content(size), room.bytes_of_any_content(size)
    assert (type(one), len(one), len(other)) == (bytes, size, size)
    if size >= room.PAGE:
        first, second = (np.frombuffer(held, np.uint8).ctypes.data for held in (one, other))
        assert abs(first - second) >= size
        assert other[size:] == b""


def test_what_there_is_no_memory_for():
    with pytest.raises((MemoryError, OverflowError)):
        room.bytes_of_any_content(1 << 62)
