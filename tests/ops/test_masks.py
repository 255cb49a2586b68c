"""Masks of every kind of classic layer against the rule itself, position by position; and attention that obeys them."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import ShapeError
from tests.support import cases_of_masks as cases
from tests.support import scene

LEFT = [
    pytest.param(None, id="no padding"),
    pytest.param((0, 0), id="none in this step"),
    pytest.param((3, 0), id="one request"),
    pytest.param((6, 11), id="beyond the window, and beyond the prompt"),
]
KINDS = [pytest.param(layer, id=kind) for kind, layer in cases.KINDS.items()]
RINGS_OF_CHUNKS = {(3, 0): (4, 0), (6, 11): (8, 12)}  # whole chunks, where a ring holds no others


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("layer", KINDS)
def test_each_query_sees_what_it_should(backend, layer, left, drafts):
    if layer is cases.KINDS["chunked"]:
        left = RINGS_OF_CHUNKS.get(left, left)
    cases.run(layer, backend, left, drafts=drafts)


def test_right_padding_is_taken_out_and_put_back(backend):
    cache = scene.create([scene.classic()], backend)
    a, b = cache.admit(), cache.admit()
    batch = scene.filled([0, 1, 2, 3, 4, 100, 101, np.nan, np.nan, np.nan], 2, 4).reshape(2, 5, 2, 4)
    with cache.step({a: 5, b: 2}, pad_tokens=9) as step:
        rows = step.from_batch(batch)
        assert kvcore.to_numpy(rows)[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 100, 101, 0, 0]
        step.layer(0).append_kv(rows, scene.filled([*range(5), 100, 101, 0, 0], 2, 6))
        mask = kvcore.to_numpy(step.to_batch(step.layer(0).mask()))
    assert mask.shape == (2, 5, 5)
    assert mask.sum(axis=2).tolist() == [[1, 2, 3, 4, 5], [1, 2, 0, 0, 0]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param(np.zeros((2, 4, 3), np.float32), "5 columns", id="narrower than the longest"),
        pytest.param(np.zeros((3, 5, 3), np.float32), "2 requests", id="another batch"),
        pytest.param(np.zeros(2, np.float32), "2 requests", id="one axis"),
    ],
)
def test_batches_of_other_shapes_are_refused(backend, batch, message):
    cache = scene.create([scene.classic()], backend)
    step = cache.step({cache.admit(): 5, cache.admit(): 2})
    with pytest.raises(ShapeError, match=message):
        step.from_batch(batch)
    with pytest.raises(ShapeError, match="7 rows"):
        step.to_batch(np.zeros((6, 3), np.float32))
    step.abort()


@pytest.mark.parametrize(
    ("layers", "padding", "message"),
    [
        pytest.param([scene.classic(), scene.ring(4)], 1, r"layers\[1\].*classic layers", id="a latent layer"),
        pytest.param([scene.classic("ring", chunk=4)], 6, "multiples of the chunk, 4", id="a ring of chunks"),
        pytest.param([scene.classic()], -1, "0 or more", id="below 0"),
        pytest.param([scene.classic()], 1.5, "0 or more", id="no integer"),
        pytest.param([scene.classic()], True, "0 or more", id="a flag"),
    ],
)
def test_left_padding_that_cannot_be_is_refused_and_changes_nothing(backend, layers, padding, message):
    cache = scene.create(layers, backend)
    a = cache.admit()
    before = scene.raw(cache), cache.free_blocks
    with pytest.raises(ShapeError, match=message):
        cache.step({a: 9}, left_padding={a: padding})
    assert (scene.raw(cache), cache.free_blocks, a.length) == (*before, 0)


def test_left_padding_is_for_requests_of_the_step(backend):
    cache = scene.create([scene.classic()], backend)
    a, b = cache.admit(), cache.admit()
    for given in ({b: 1}, [1]):
        with pytest.raises(ShapeError, match="left_padding"):
            cache.step({a: 9}, left_padding=given)
