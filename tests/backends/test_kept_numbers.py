"""What the torch backend keeps on the CPU from verb to verb: a step's numbers, and memory that nobody holds."""

import numpy as np
import pytest

from tests.support import scene

torch = pytest.importorskip("torch")

from kvcore.backends.reference import lifecycle as reference  # noqa: E402
from kvcore.backends.torch_triton import lifecycle  # noqa: E402
from kvcore.backends.torch_triton.cpu_views import Memory, Spare  # noqa: E402
from kvcore.ops import RawRows, StepIndex  # noqa: E402
from kvcore.step import StepRequest, build_index  # noqa: E402


def index_of(*rows):
    host = build_index(
        [StepRequest(slot=slot, start=start, new=new, blocks=[3, 1]) for slot, start, new in rows], max_blocks=4
    )
    return StepIndex(*(None if array is None else torch.from_numpy(array) for array in host))


def test_numbers_are_asked_once_an_index():
    memory, index = Memory(), index_of((2, 4, 1), (0, 1, 2))
    found = memory.of(index)
    assert memory.of(index) is found
    assert (found.starts, found.lengths, found.slots) == ([4, 1], [5, 3], [2, 0])
    assert found.few
    again = memory.of(index._replace(lengths=torch.tensor([5, 9], dtype=torch.int32)))
    assert again.lengths == [5, 9]
    assert not again.few  # its tokens are not those up to the new length
    assert memory.of(index_of((1, 0, 1))).slots == [1]


def test_blocks_of_another_shard_are_missed():
    index = index_of((2, 6, 1))
    index.block_table[0, 1] = -1
    found = Memory().of(index)
    assert [found.whole(rows) for rows in (8, 7, 4)] == [True, True, False]


@pytest.mark.parametrize("hold", [lambda a: a, lambda a: a[:1], lambda a: a.transpose(0, 1), lambda a: a.numpy()])
def test_memory_in_use_is_not_handed_out_again(hold):
    spare = Spare()
    first = spare.empty("key", (2, 3), torch.float32).fill_(1)
    place, held = first.data_ptr(), hold(first)
    del first
    second = spare.empty("key", (2, 3), torch.float32).fill_(2)
    assert second.data_ptr() != place
    assert np.asarray(held).max() == 1
    del second, held
    again = spare.empty("key", (2, 3), torch.float32)
    other = spare.empty("value", (2, 3), torch.float32)
    assert other.data_ptr() != again.data_ptr()


def test_memory_is_handed_out_again_while_it_fits():
    spare = Spare()
    place = spare.empty("key", (16, 8), torch.float32).data_ptr()
    assert spare.empty("key", (17, 8), torch.float32).data_ptr() == place  # an eighth of room
    assert spare.empty("key", (30, 8), torch.bfloat16).data_ptr() == place
    large = spare.empty("key", (64, 8), torch.float32)
    assert large.shape == (64, 8)
    assert large.is_contiguous()


def test_gathered_rows_stay_as_they_were():
    """A later gather does not write into what an earlier one returned."""
    cache = scene.create([scene.classic(), scene.classic("ring", window=4)], "torch_triton")
    a = cache.admit()
    scene.write(cache, {a: range(6)})
    with scene.at_rest(cache, a) as step:
        first = [step.layer(layer).gather_kv()[0] for layer in (0, 1)]
    kept = [values.clone() for values in first]
    scene.write(cache, {a: [100, 101]})
    with scene.at_rest(cache, a) as step:
        for layer in (0, 1):
            step.layer(layer).gather_kv()
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))


def test_places_of_one_component_are_not_lent_for_another():
    layers = [scene.classic("ring", key_format="bf16", value_dim=4, **seen) for seen in ({"window": 5}, {"chunk": 5})]
    cache = scene.create(layers, "torch_triton", layout="by_head")
    request = cache.admit()
    scene.write(cache, {request: range(13)})
    with cache.step({request: 0}) as step:
        # The chunk that position 12 is in has fewer rows than it is asked for.
        lent = [cache.ops.kv_view(cache.pools, layer, step.index, columns=5) for layer in (0, 1, 0)]
    assert [None if found is None else found[0].shape[:2] for found in lent] == [(1, 5), None, (1, 5)]


@pytest.mark.parametrize("elements", [1, 7, 64])
def test_a_digest_in_portions_is_that_of_the_whole(elements, monkeypatch):
    rng = np.random.default_rng(elements)
    raw = RawRows(
        torch.from_numpy(rng.integers(0, 256, (3, 9, 10), np.uint8)),
        torch.from_numpy(rng.integers(-1, 99, (3, 9), np.int32)),
    )
    whole = lifecycle.digest_rows(raw, 5)
    ours = reference.digest_rows(RawRows(raw.rows.numpy(), raw.positions.numpy()), 5)
    assert whole.tolist() == ours.tolist()
    monkeypatch.setattr(lifecycle, "DIGEST_WORDS", elements)
    assert torch.equal(lifecycle.digest_rows(raw, 5), whole)
