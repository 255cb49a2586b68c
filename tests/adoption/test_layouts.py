"""Engines' paged tensors adopted where they lie: what is read, written, moved and rolled back is the engine's own."""

import numpy as np
import pytest

import kvcore
from kvcore import adoption
from kvcore.errors import BackendError, ShapeError, SpecError
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, presets
from tests.support.engine import BLOCKS, COUNTS, HEADS, LAYERS, PAGED, ROWS, SPEC, Engine, rows_of

KINDS = {"numpy": "reference", "torch": "torch_triton"}
OURS = [7, 3, 5]


def ours(backend, length):
    """The same request in a cache of the library's own."""
    cache = kvcore.create_cache(SPEC, backend=backend, max_requests=2, max_tokens=64)
    request = cache.admit()
    with cache.step({request: length}) as step:
        for layer in range(LAYERS):
            keys, values = (np.stack([rows_of(layer, part, p) for p in range(length)]) for part in (0, 1))
            step.layer(layer).append_kv(keys, values)
    return cache, request


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", PAGED)
def test_a_request_of_an_engine_is_a_request(layout, kind, rng):
    engine = Engine(layout, kind)
    engine.write(OURS, 0, 20)
    cache = kvcore.adopt(SPEC, engine.tensors, layout=layout)
    assert cache.backend.name == KINDS[kind]
    request = cache.admit(blocks=OURS, length=20)
    assert (request.length, request.blocks) == (20, (7, 3))
    cache.compare(request, engine.read)
    other, same = ours(KINDS[kind], 20)
    assert cache.digest([request]) == other.digest([same])
    assert cache.export_request(request) == other.export_request(same)

    # A step writes where the engine reads, and attends to what the engine wrote.
    new = rng.standard_normal((LAYERS, 2, 15, HEADS, 8)).astype(np.float32)
    q = rng.standard_normal((15, 4, 8)).astype(np.float32)
    attended = []
    for here, one in ((cache, request), (other, same)):
        with here.step({one: 15}) as step:
            for layer in range(LAYERS):
                step.layer(layer).append_kv(new[layer, 0], new[layer, 1])
                attended.append(kvcore.to_numpy(step.layer(layer).attend(q).out))
    for found, right in zip(attended[:LAYERS], attended[LAYERS:], strict=True):
        np.testing.assert_allclose(found, right, atol=1e-6)
    assert (engine.at(1, 1, 3, 5) == new[1, 1, 1]).all()
    assert (engine.at(2, 0, 5, 2) == new[2, 0, 14]).all()
    assert request.blocks == (7, 3, 5)
    assert cache.digest([request]) == other.digest([same])

    # Rollback and a second try; then what a step that failed wrote is as if it had never been.
    for here, one in ((cache, request), (other, same)):
        here.truncate(one, 25)
        failed = here.step({one: 5})
        failed.layer(0).append_kv(new[0, 0, :5], new[0, 1, :5])
        failed.abort()
    assert cache.digest([request]) == other.digest([same])
    moved = cache.import_request(other.export_request(same), into=cache.admit(blocks=[0, 9]))
    assert cache.digest([moved]) == cache.digest([request])
    assert (engine.at(0, 0, 9, 8) == engine.at(0, 0, 3, 8)).all()
    # Nobody else's block was touched.
    for block in set(range(BLOCKS)) - {0, 9, *OURS}:
        assert not any(
            engine.at(layer, part, block, row).any() for layer in (0, 2) for part in (0, 1) for row in (0, 15)
        )


def test_hnd_memory_behind_an_nhd_shape():
    """As vLLM gives it out: the shape says NHD, the strides say what is."""
    import torch

    engine = [torch.zeros(2, BLOCKS, HEADS, ROWS, 8).permute(0, 1, 3, 2, 4) for _ in range(LAYERS)]
    cache = kvcore.adopt(SPEC, engine, layout="NL_X_TWO_NB_BS_NH_HS")
    blob = (lambda found: found[0].export_request(found[1]))(ours("torch_triton", 20))
    request = cache.import_request(blob, into=cache.admit(blocks=[4, 1]))
    for position in range(20):
        found = engine[1][1, (4, 1)[position // ROWS], position % ROWS]
        assert (found.numpy() == rows_of(1, 1, position)).all()
    cache.compare(request, lambda layer, part, block, row: engine[layer][int(part == "value"), block, row])


@pytest.mark.parametrize("kind", KINDS)
def test_latent_rows_and_planes_of_scales(kind, rng):
    """V3.2's: rows of 656 bytes side by side, and index keys whose scales follow all keys of a block."""
    layer = LayerSpec(
        entries=Entries(dim=576, ratio=1, format="v32_656"),
        index_keys=IndexKeys(dim=128, ratio=1, heads=4, topk=8, format="index_fp8_132_fp32scale"),
    )
    spec = CacheSpec(layers=(layer, layer), block_tokens=64, name="two of v3.2")
    tensors = [np.zeros((6, 64, width), np.uint8) for _ in range(2) for width in (656, 132)]
    if kind == "torch":
        import torch

        tensors = [torch.from_numpy(tensor) for tensor in tensors]
    layout = {"entries": "NL_X_NB_BS_HS", "index_keys": "NL_X_NB_BSV_BSS"}
    cache = kvcore.adopt(spec, tensors, layout=layout)
    own = kvcore.create_cache(spec, backend=KINDS[kind], max_requests=1, max_tokens=128)
    request = own.admit()
    with own.step({request: 100}) as step:
        for number in range(2):
            values = rng.standard_normal((100, 576)).astype(np.float32)
            step.layer(number).store_entries(values, rng.standard_normal((100, 128)).astype(np.float32))
    moved = cache.import_request(own.export_request(request), into=cache.admit(blocks=[5, 2]))
    assert cache.digest([moved]) == own.digest([request])
    # The library's own packed pages are those of the engines.
    entries, keys = (
        kvcore.to_numpy(own.pools[f"1.{role}.page"])[request.blocks[0]] for role in ("entries", "index_keys")
    )
    assert (np.asarray(tensors[2])[5].reshape(-1) == entries[: 64 * 656]).all()
    assert (np.asarray(tensors[3])[5].reshape(-1) == keys[: 64 * 132]).all()
    # Side by side and plane after plane have one shape.
    with pytest.raises(SpecError, match="may be NL_X_NB_BS_HS or NL_X_NB_BSV_BSS"):
        kvcore.adopt(spec, tensors)


@pytest.mark.parametrize(("layout", "shape"), [("NL_X_NB_BS_HS", (4, 16, 24)), ("NL_X_NBBS_ONE_HS", (64, 1, 24))])
def test_latent_rows_of_one_field(layout, shape, rng):
    spec = CacheSpec(
        layers=(LayerSpec(entries=Entries(dim=24, ratio=1, format="fp32")),) * 2, block_tokens=16, name="mla"
    )
    engine = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    cache = kvcore.adopt(spec, engine)
    assert cache.descriptor == adoption.describe(spec, engine, layout)
    request = cache.admit(blocks=[3, 0], length=18)
    rows = engine[1].reshape(4, 16, 24)
    cache.compare(request, lambda layer, _, block, row: engine[layer].reshape(4, 16, 24)[block, row])
    with cache.step({request: 1}) as step:
        step.layer(1).store_entries(np.ones((1, 24), np.float32))
        step.layer(0).store_entries(np.ones((1, 24), np.float32))
        (found,) = kvcore.to_numpy(step.layer(1).gather_rows("entries").rows)
    assert (found[:18].view(np.float32) == np.concatenate([rows[3], rows[0, :2]])).all()
    assert (rows[0, 2] == 1).all()


def test_the_only_layout_of_a_shape_needs_no_name():
    engine = Engine("NL_X_TWO_NB_BS_NH_HS")
    found = adoption.describe(SPEC, engine.tensors)
    assert found == adoption.describe(SPEC, engine.tensors, "NL_X_TWO_NB_BS_NH_HS")
    assert adoption.from_json(adoption.to_json(found)) == found


@pytest.mark.parametrize(
    ("layout", "counts", "names"),
    [
        ("NL_X_TWO_NB_BS_NH_HS", {"NB": 2}, "NL_X_TWO_NB_BS_NH_HS or NL_X_NB_TWO_BS_NH_HS"),
        ("NL_X_NB_TWO_BS_NH_HS", {}, "NL_X_NB_TWO_BS_NH_HS or NL_X_NB_NH_BS_TWO_HS"),
        ("NL_X_TWO_NB_NH_BS_HS", {"NH": ROWS}, "NL_X_TWO_NB_BS_NH_HS or NL_X_TWO_NB_NH_BS_HS"),
        ("NL_X_NB_NH_BS_CS", {"NH": ROWS}, "NL_X_NB_BS_NH_CS or NL_X_NB_NH_BS_CS"),
    ],
)
def test_two_layouts_of_one_shape_are_refused_by_name(layout, counts, names):
    spec = presets.classic(
        layers=LAYERS, key_heads=counts.get("NH", HEADS), key_dim=8, block_tokens=ROWS, key_format="fp32"
    )
    engine = Engine(layout, counts=counts)
    with pytest.raises(SpecError, match=names):
        kvcore.adopt(spec, engine.tensors)
    assert kvcore.adopt(spec, engine.tensors, layout=layout).descriptor.blocks == counts.get("NB", BLOCKS)


def test_pairs_and_two_lists_of_two_layers_are_refused_by_name():
    spec = presets.classic(layers=2, key_heads=HEADS, key_dim=8, block_tokens=ROWS, key_format="fp32")
    square = [[np.zeros((BLOCKS, ROWS, HEADS, 8), np.float32) for _ in range(2)] for _ in range(2)]
    with pytest.raises(SpecError, match="NL_X_TWO_X_NB_BS_NH_HS or TWO_X_NL_X_NB_BS_NH_HS"):
        kvcore.adopt(spec, square)


def bad(layout="NL_X_TWO_NB_BS_NH_HS", **counts):
    return Engine(layout, counts=counts).tensors


@pytest.mark.parametrize(
    ("tensors", "options", "error", "match"),
    [
        pytest.param(lambda: bad(BS=8), {}, SpecError, "shapes of", id="other blocks"),
        pytest.param(lambda: bad(BS=8), {"layout": PAGED[0]}, ShapeError, "16 along BS", id="other blocks, named"),
        pytest.param(lambda: bad(NH=3), {"layout": PAGED[0]}, ShapeError, "2 along NH", id="other heads"),
        pytest.param(lambda: bad(TWO=3), {"layout": PAGED[0]}, ShapeError, "2 along TWO", id="keys, values and more"),
        pytest.param(lambda: bad()[:2], {"layout": PAGED[0]}, ShapeError, "3 components", id="a layer is missing"),
        pytest.param(
            lambda: [t.astype(np.float16) for t in bad()], {"layout": PAGED[0]}, ShapeError, "dtype", id="fp16"
        ),
        pytest.param(lambda: [t[..., ::2] for t in bad(HS=16)], {"layout": PAGED[0]}, ShapeError, "no gaps", id="gaps"),
        pytest.param(
            lambda: [t[:, ::-1] for t in bad()], {"layout": PAGED[0]}, ShapeError, "ascending", id="backwards"
        ),
        pytest.param(bad, {"layout": "NHD"}, SpecError, "one of NL_X", id="a name that is none"),
        pytest.param(bad, {"layout": PAGED[0], "backend": "jax_pallas"}, BackendError, "reference", id="other backend"),
        pytest.param(list, {}, ShapeError, "one or more", id="nothing"),
        pytest.param(lambda: "tensors", {}, ShapeError, "arrays of NumPy, torch", id="text"),
        pytest.param(
            lambda: [np.broadcast_to(t[:, :1], t.shape) for t in bad()],
            {"layout": PAGED[0]},
            ShapeError,
            "cannot be written",
            id="blocks that are one",
        ),
    ],
)
def test_tensors_of_another_kind_are_refused(tensors, options, error, match):
    with pytest.raises(error, match=match):
        kvcore.adopt(SPEC, tensors(), **options)


def test_components_in_slots_that_are_no_rings_are_refused():
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=8, storage="slot"))])
    with pytest.raises(SpecError, match=r"layers\[0\].kv, which lies in slots and is no ring"):
        kvcore.adopt(spec, [np.zeros((4, 4), np.uint8)])


def test_the_counts_of_the_scene_tell_layouts_apart():
    assert len({COUNTS[axis] for axis in ("TWO", "NB", "BS", "HS", "NL")}) == 5
