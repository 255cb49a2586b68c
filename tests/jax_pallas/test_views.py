"""Layer views: a dense cache in a model's own state, padded on either side, whatever its layers."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.errors import KvcoreError, OutOfBlocks, ShapeError, SnapshotError, SpecError
from kvcore.interop.jax.views import init_views
from kvcore.spec import KV, CacheSpec, LayerSpec, presets

HEADS, DIM = 2, 4
SIZES = {"key_heads": HEADS, "key_dim": DIM, "value_dim": 6, "key_format": "fp32"}
LAYERS = {
    "full, paged": KV(**SIZES),
    "full, contiguous": KV(**SIZES, storage="slot"),
    "sliding": KV(**SIZES, storage="ring", window=4),
    "chunked": KV(**SIZES, storage="ring", chunk=4),
}
REACH = {"sliding": lambda p: max(0, p - 3), "chunked": lambda p: p // 4 * 4}
SPEC = CacheSpec(layers=[LayerSpec(kv=kv) for kv in LAYERS.values()], block_tokens=4)
LENGTH = 16


def rows(positions):
    """Keys and values [B, S, heads, dim] that carry their positions, 1000 apart from sequence to sequence."""
    values = np.asarray(positions, np.float32) + 1000 * np.arange(len(positions))[:, None]
    return [jnp.asarray(np.broadcast_to(values[:, :, None, None], (*values.shape, HEADS, dim))) for dim in (DIM, 6)]


def seen(appended):
    """What every query sees: [B][S] lists of key values, each equal to its value row and its column."""
    keys, values = np.asarray(appended.keys, np.float32), np.asarray(appended.values, np.float32)
    assert (keys[:, :, :, :1] == values[:, :, :, :1]).all()
    columns = np.asarray(appended.positions) + 1000 * np.arange(len(keys))[:, None]
    mask = np.asarray(appended.mask)
    for sequence, query in np.argwhere(mask.any(axis=2)):
        assert (keys[sequence, mask[sequence, query], 0, 0] == columns[sequence, mask[sequence, query]]).all()
    return [[keys[b, some, 0, 0].astype(int).tolist() for some in mask[b]] for b in range(len(mask))]


@pytest.mark.sampled
@pytest.mark.parametrize("cut", [(10,), (6, 4), (1, 8, 1), (3, 3, 4)], ids=str)
@pytest.mark.parametrize("layer", list(LAYERS))
def test_every_query_sees_what_it_should(layer, cut):
    view = init_views(SPEC, batch=2, max_length=LENGTH)[list(LAYERS).index(layer)]
    start = 0
    for new in cut:
        positions = range(start, start + new)
        appended = view.append(*rows([positions] * 2))
        first = REACH.get(layer, lambda _: 0)
        wanted = [[[*range(first(p), p + 1)] for p in positions]]
        wanted.append([[1000 + p for p in some] for some in wanted[0]])
        assert seen(appended) == wanted
        view, start = appended.view, start + new
    assert view.lengths.tolist() == [10, 10]


def test_left_padding_is_never_seen():
    views = init_views(SPEC, batch=2, max_length=LENGTH, starts=[2, 0])
    appended = views[0].append(*rows([range(5)] * 2))
    assert seen(appended)[0] == [[], [], [2], [2, 3], [2, 3, 4]]
    assert seen(appended)[1][4] == [1000, 1001, 1002, 1003, 1004]
    later = appended.view.append(*rows([[5], [5]]))
    assert seen(later) == [[[2, 3, 4, 5]], [[1000, 1001, 1002, 1003, 1004, 1005]]]


@pytest.mark.parametrize("layer", ["full, paged", "sliding"])
def test_right_padding_is_neither_stored_nor_counted(layer):
    view = init_views(SPEC, batch=2, max_length=LENGTH)[list(LAYERS).index(layer)]
    padded = [[0, 1, 999, 999], [0, 1, 2, 3]]
    appended = view.append(*rows(padded), new=[2, 4])
    assert seen(appended)[0] == [[0], [0, 1], [], []]
    assert appended.view.lengths.tolist() == [2, 4]
    later = appended.view.append(*rows([[2], [4]]))
    first = 1001 if layer == "sliding" else 1000
    assert seen(later) == [[[0, 1, 2]], [[*range(first, 1005)]]]


def test_insert_places_a_sequence_and_leaves_everything_else_as_it_was():
    views, one = init_views(SPEC, batch=3, max_length=LENGTH), init_views(SPEC, batch=1, max_length=LENGTH)
    for layer in range(len(SPEC.layers)):
        views = views.with_layer(layer, views[layer].append(*rows([range(7)] * 3)).view)
        one = one.with_layer(layer, one[layer].append(*rows([range(5)])).view)
    before = jax.tree.map(np.asarray, views.to_pure()[0])
    placed = views.insert(one, 1)
    for layer in range(len(SPEC.layers)):
        assert placed[layer].lengths.tolist() == [7, 5, 7]
        appended = placed[layer].append(*rows([[7], [5 - 1000], [7]]))
        sees = seen_values(appended)
        first = REACH.get(list(LAYERS)[layer], lambda _: 0)
        assert sees[1] == [[*range(first(5), 6)]]
        assert sees[2] == [[2000 + p for p in range(first(7), 8)]]
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(views.to_pure()[0]), strict=True)
    )
    with pytest.raises(ShapeError, match="slot"):
        views.insert(one, 3)
    with pytest.raises(SpecError, match="spec"):
        views.insert(init_views(presets.classic(layers=1, key_heads=2, key_dim=4), batch=1, max_length=LENGTH), 0)


def seen_values(appended):
    keys, mask = np.asarray(appended.keys, np.float32), np.asarray(appended.mask)
    return [[keys[b, some, 0, 0].astype(int).tolist() for some in mask[b]] for b in range(len(mask))]


def test_starts_and_lengths_of_single_sequences():
    views = init_views(SPEC, batch=3, max_length=LENGTH)
    for layer in range(len(SPEC.layers)):
        views = views.with_layer(layer, views[layer].append(*rows([range(5)] * 3)).view)
    changed = views.insert_starts(3, 1).insert_index([2, 4], 1)
    assert changed[0].lengths.tolist() == [5, 2, 4]
    assert changed[0].starts.tolist() == changed[3].starts.tolist() == [0, 3, 0]
    assert views[0].lengths.tolist() == [5, 5, 5]
    assert seen(changed[0].append(*rows([[5], [2], [4]]))) == [
        [[*range(6)]],
        [[]],
        [[*range(2000, 2005)]],
    ]


@pytest.mark.parametrize("form", ["bf16", "int8_row", "nf4_b64"])
def test_a_pure_form_comes_back_whole(form):
    layers = [
        LayerSpec(kv=KV(key_heads=1, key_dim=64, key_format=form, storage="ring", window=4)),
        LayerSpec(kv=KV(key_heads=1, key_dim=64)),
    ]
    views = init_views(CacheSpec(layers=layers, block_tokens=8), batch=2, max_length=LENGTH, starts=[1, 0])
    new = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 1, 64), dtype=np.float32))
    for layer in (0, 1):
        views = views.with_layer(layer, views[layer].append(new, new).view)
    arrays, metadata = views.to_pure()
    again = type(views).from_pure(jax.tree.map(np.asarray, arrays), json.loads(json.dumps(metadata)))
    assert again.spec == views.spec
    assert len(again) == 2
    step = jnp.ones((2, 1, 1, 64))
    for one, other in zip(views, again, strict=True):
        for a, b in zip(
            jax.tree.leaves(one.append(step, step)), jax.tree.leaves(other.append(step, step)), strict=True
        ):
            assert np.array_equal(np.asarray(a), np.asarray(b))
    with pytest.raises(SnapshotError):
        type(views).from_pure([arrays[1], arrays[0]], metadata)
    lacking = [{name: metadata[name] for name in metadata if name != left_out} for left_out in metadata]
    for bad in (*lacking, {**metadata, "spec": {1, 2}}, [], None):
        with pytest.raises(SnapshotError, match="from_pure"):
            type(views).from_pure(arrays, bad)
    for bad in ({"spec": {}}, {"batch": -1}, {"batch": "2"}, {"max_length": 0}, {"max_length": None}):
        with pytest.raises(KvcoreError):
            type(views).from_pure(arrays, {**metadata, **bad})


def test_columns_beyond_the_end_are_refused_and_dropped_inside_jit():
    view = init_views(SPEC, batch=2, max_length=LENGTH)[1]
    view = view.append(*rows([range(15)] * 2)).view
    with pytest.raises(OutOfBlocks, match="17 columns"):
        view.append(*rows([[15, 16]] * 2))
    appended = jax.jit(lambda view, k, v: view.append(k, v))(view, *rows([[15, 16]] * 2))
    assert appended.view.overflowed.tolist() == [True, True]
    assert seen(appended)[0] == [[*range(16)], []]


@pytest.mark.parametrize("form", ["int8_row", "fp8_row", "mxfp4"])
def test_stored_rows_are_never_rounded_again(form):
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=1, key_dim=64, key_format=form))], block_tokens=8)
    view = init_views(spec, batch=1, max_length=LENGTH)[0]
    new = jnp.asarray(np.random.default_rng(1).standard_normal((1, 6, 1, 64), dtype=np.float32))
    first = view.append(new[:, :1], new[:, :1])
    kept, view = np.asarray(first.keys[0, 0]), first.view
    for column in range(1, 6):
        appended = view.append(new[:, column : column + 1] * 100.0**column, new[:, column : column + 1])
        view = appended.view
        assert np.array_equal(np.asarray(appended.keys[0, 0]), kept)


def test_equal_layers_share_a_trace_and_nothing_is_changed_in_place():
    traced = []

    @jax.jit
    def step(view, keys, values):
        traced.append(view.kind)
        return view.append(keys, values).view

    views = init_views(
        presets.classic(layers=5, key_heads=HEADS, key_dim=DIM, value_dim=6, window=4, full_every=5, block_tokens=4),
        batch=2,
        max_length=LENGTH,
    )
    for start, layer in itertools.product((0, 1), range(5)):
        before = views
        views = views.with_layer(layer, step(views[layer], *rows([[start]] * 2)))
        assert before[layer].lengths.tolist() == [start, start]
    assert len(traced) == 2
    assert not views[0].is_empty
    assert "window 4" in repr(views)
