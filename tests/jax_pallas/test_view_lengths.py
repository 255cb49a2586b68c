"""Lengths and starts that are set beside what is stored: refused, or, inside jit, no row is shown that is not there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.errors import KvcoreError, RollbackError, ShapeError
from kvcore.interop.jax.views import CacheViews, init_views
from kvcore.spec import KV, CacheSpec, LayerSpec

LENGTH = 16
RING = {"key_heads": 1, "key_dim": 2, "key_format": "fp32", "storage": "ring"}
FULL = {**RING, "storage": "paged"}


def made(batch: int = 1, **options: Any) -> CacheViews:
    layers = [LayerSpec(kv=KV(**RING, window=4)), LayerSpec(kv=KV(**RING, chunk=4)), LayerSpec(kv=KV(**FULL))]
    return init_views(CacheSpec(layers=layers, block_tokens=4), batch=batch, max_length=LENGTH, **options)


def rows(values: Any) -> jax.Array:
    values = jnp.asarray(values, jnp.float32)
    return jnp.broadcast_to(values[:, :, None, None], (*values.shape, 1, 2))


def written(views: CacheViews, count: int, batch: int = 1, first: int = 0) -> CacheViews:
    """Values ``first``, ``first + 1`` ... one by one, in every layer."""
    for value in range(first, first + count):
        views = stepped(views, rows([[value]] * batch))
    return views


@jax.jit
def stepped(views: CacheViews, row: jax.Array) -> CacheViews:
    for layer, view in enumerate(views):
        views = views.with_layer(layer, view.append(row, row).view)
    return views


def seen(views: CacheViews, layer: int, value: float) -> list[list[float]]:
    """What the query of one more token sees, by sequence: values, which are where ``positions`` say there is a row."""
    row = rows([[value]] * len(views[0].lengths))
    found = appended(views[layer], row)
    keys, mask = np.asarray(found.keys)[:, :, 0, 0], np.asarray(found.mask)[:, 0]
    assert (np.asarray(found.positions)[mask] >= 0).all()
    assert not keys[np.asarray(found.positions) < 0].any()
    return [keys[b, mask[b]].tolist() for b in range(len(keys))]


appended = jax.jit(lambda view, row: view.append(row, row))
inside = jax.jit(lambda views, lengths: views.insert_index(lengths, 0))


def test_a_ring_does_not_go_back_to_rows_that_it_has_lost() -> None:
    views = written(made(), 10)
    with pytest.raises(RollbackError, match="layer 0: got 2 columns back"):
        views.insert_index([8], 0)
    assert views[0].lengths.tolist() == [10]
    assert seen(views, 0, 10) == [[7, 8, 9, 10]]


def test_inside_jit_only_rows_that_are_left_are_seen() -> None:
    back = inside(written(made(), 10), jnp.asarray([8]))
    assert [view.lengths.tolist() for view in back] == [[8]] * 3
    assert seen(back, 0, 90) == [[6, 7, 90]]
    assert seen(back, 1, 90) == [[90]]
    assert seen(back, 2, 90) == [[*range(8), 90]]
    # The next ones see what is there by then, and as much as a window has.
    later = written(back, 3, first=90)
    assert seen(later, 0, 93) == [[90, 91, 92, 93]]
    assert seen(later, 1, 93) == [[90, 91, 92, 93]]


@pytest.mark.parametrize(("length", "window", "chunk"), [(9, [6, 7, 8, 90], [8, 90]), (10, [7, 8, 9, 90], [8, 9, 90])])
def test_as_far_as_a_ring_reaches_lengths_are_exact(length: int, window: list[float], chunk: list[float]) -> None:
    views = written(made(), 10)
    for back in (views.insert_index([length], 0), inside(views, jnp.asarray([length]))):
        assert seen(back, 0, 90) == [window]
        assert seen(back, 1, 90) == [chunk]
        assert seen(back, 2, 90) == [[*range(length), 90]]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_ring_that_has_not_wrapped_goes_anywhere_back(length: int) -> None:
    back = written(made(), 4).insert_index([length], 0)
    for layer in range(3):
        assert seen(back, layer, 90) == [[*range(length), 90]]


def test_back_to_nothing_is_a_fresh_start() -> None:
    views = written(made(), 10)
    for back in (views.insert_index([0], 0), inside(views, jnp.asarray([0]))):
        again = written(back, 3, first=20)
        for layer in range(3):
            assert seen(again, layer, 23) == [[20, 21, 22, 23]]


def test_where_nothing_before_is_needed_a_ring_goes_back() -> None:
    """A chunk's first column, and the first after left padding."""
    chunked = written(made(), 10).views[1]
    views = CacheViews([chunked], CacheSpec(layers=(chunked.kind.layer,), block_tokens=4))
    assert seen(views.insert_index([8], 0), 0, 90) == [[90]]
    assert seen(views.insert_index([4], 0), 0, 90) == [[90]]
    with pytest.raises(RollbackError):
        views.insert_index([5], 0)
    padded = written(made(starts=[7]), 10)
    assert seen(padded.insert_index([7], 0), 0, 90) == [[90]]


def test_going_back_twice_does_not_bring_rows_back() -> None:
    """What is lost stays lost, whatever lengths were in between; and a length is no way forward again."""
    views = written(made(), 10)
    back = inside(inside(views, jnp.asarray([8])), jnp.asarray([7]))
    assert seen(back, 0, 90) == [[6, 90]]
    forward = inside(back, jnp.asarray([9]))
    assert forward[0].lengths.tolist() == [7]
    with pytest.raises(ShapeError, match="2 beyond the present one"):
        back.insert_index([9], 0)


def test_only_the_sequences_that_go_back_are_changed() -> None:
    views = written(made(3), 10, batch=3)
    back = jax.jit(lambda views, lengths: views.insert_index(lengths, 1))(views, jnp.asarray([8, 9]))
    assert back[0].lengths.tolist() == [10, 8, 9]
    assert seen(back, 0, 90) == [[7, 8, 9, 90], [6, 7, 90], [6, 7, 8, 90]]


def test_a_sequence_that_is_inserted_brings_what_its_ring_holds() -> None:
    back = inside(written(made(), 10), jnp.asarray([8]))
    into = written(made(2), 2, batch=2).insert(back, 1)
    assert seen(into, 0, 90) == [[0, 1, 90], [6, 7, 90]]
    arrays, metadata = back.to_pure()
    assert seen(CacheViews.from_pure(arrays, metadata), 0, 90) == [[6, 7, 90]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda views: views.insert_index([4], 0), "1 beyond the present one; allowed: the present length or less"),
        (lambda views: views.insert_index([-1], 0), "got -1; allowed: 0 or more"),
        (lambda views: views.insert_index([1], 1), "slot"),
        (lambda views: views.insert_starts([-1], 0), "allowed: 0 to 16"),
        (lambda views: views.insert_starts([17], 0), "allowed: 0 to 16"),
        (lambda _: made(starts=[17]), "init_views: starts: got 17 to 17; allowed: 0 to 16"),
        (lambda _: made(starts=[0, 0]), "init_views: starts"),
        (lambda views: views[2].append(rows([[3, 4]]), rows([[3, 4]]), new=[3]), "append: new: got 3 to 3; allowed: 0"),
        (lambda views: views[2].append(rows([[3, 4]]), rows([[3, 4]]), new=[-1]), "append: new: got -1 to -1"),
        (lambda views: views[2].append(rows([[3, 4]]), rows([[3, 4]]), new=[1, 1]), "append: new"),
        (lambda views: views[2].append(rows([[3, 4]]), rows([[3]])), "append: values"),
        (lambda views: views[2].append(rows([[3]]).astype(jnp.int32), rows([[3]])), "append: keys: got dtype int32"),
        (lambda views: views[2].append_latents(rows([[3]])), "append_latents.*allowed: append"),
    ],
)
def test_what_was_never_written_is_refused(call: Any, message: str) -> None:
    views = written(made(), 3)
    with pytest.raises(KvcoreError, match=message):
        call(views)
    assert views[2].lengths.tolist() == [3]


def test_inside_jit_more_tokens_than_columns_are_the_columns() -> None:
    row = rows([[3, 4]])
    found = jax.jit(lambda view, new: view.append(row, row, new))(written(made(), 3)[2], jnp.asarray([5]))
    assert found.view.lengths.tolist() == [5]
    assert np.asarray(found.keys)[0, np.asarray(found.positions)[0] >= 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_window_longer_than_a_sequence_can_be_is_read_after_it_is_written() -> None:
    views = init_views(
        CacheSpec(layers=[LayerSpec(kv=KV(**RING, window=4096))], block_tokens=4), batch=1, max_length=LENGTH
    )
    assert views[0].kind.ring_rows == LENGTH
    row = rows([range(10)])
    views = views.with_layer(0, views[0].append(row, row).view)
    assert seen(views.insert_index([2], 0), 0, 90) == [[0, 1, 90]]
