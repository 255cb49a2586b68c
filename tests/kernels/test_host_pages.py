"""Pages that go through a device in chunks: all of them, each once, in order, however many there are."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvcore.backends.torch_triton.host_pages import BUFFERS, Buffers  # noqa: E402


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("incoming", [False, True])
def test_chunks_are_all_pages_in_order(rows, incoming):
    for count in range(1, 9 * rows):
        pages = np.arange(count * 4, dtype=np.int32).reshape(count, 4).view(np.uint8)
        buffers = Buffers(torch.device("cpu"), pages.copy(), rows, incoming=incoming)
        sizes, found = [], []
        if incoming:
            buffers.begin()
        for turn, some, room in buffers.chunks(incoming=incoming):
            sizes.append(some.stop - some.start)
            if incoming:
                found.append(room.numpy().copy())
            else:
                room.copy_(torch.from_numpy(pages[some] ^ 1))
                buffers.send(turn, some)
        buffers.wait()
        arrived = np.concatenate(found) if incoming else buffers.pages ^ 1
        assert (arrived == pages).all()
        assert sum(sizes) == count
        assert max(sizes) <= rows
        # Many that come in end with a smaller one.
        if incoming and rows == 8 and count % rows == 0 and len(sizes) > BUFFERS + 1:
            assert sizes[-1] < rows


def test_the_first_chunks_are_the_same_however_many_pages_follow():
    pages = np.arange(70 * 4, dtype=np.int32).reshape(70, 4).view(np.uint8)
    for count in range(1, 71):
        buffers = Buffers(torch.device("cpu"), pages, 8, incoming=True)
        buffers.begin()
        found = [room.numpy().copy() for _, _, room in buffers.of_first(count).chunks(incoming=True)]
        assert (np.concatenate(found) == pages[:count]).all()
