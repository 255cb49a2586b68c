"""Attention through FlashInfer: computed by a stand-in from what it is handed, held against the reference's."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore.backends.reference import ReferenceBackend  # noqa: E402
from kvcore.backends.torch_triton import flash, flash_infer  # noqa: E402
from kvcore.backends.torch_triton.backend import TorchOps  # noqa: E402
from kvcore.errors import BackendError  # noqa: E402
from kvcore.plan import plan_cache  # noqa: E402
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Window  # noqa: E402
from kvcore.spec.presets import deepseek_v3_2  # noqa: E402
from kvcore.step import StepRequest, build_index  # noqa: E402
from tests.support import fake_flashinfer  # noqa: E402

DIM, RATIO, BLOCK = 512, 4, 16
LENGTHS = {3: 40, 0: 3, 1: 32}
"""Slot -> tokens of a request's history, the step's included: ragged, one as long as its blocks."""
BLOCKS = {3: (5, 1, 6), 0: (4,), 1: (2, 0)}


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch):
    """The stand-in, where FlashInfer would be."""
    found = fake_flashinfer.installed()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    flash_infer.lacking.cache_clear()
    return found["flashinfer"]


def step_of(new, **padding):
    """The index of a step that brings each request's last tokens, ``new`` of them by slot."""
    rows = [StepRequest(slot, LENGTHS[slot] - count, count, BLOCKS[slot]) for slot, count in new.items()]
    return build_index(rows, max_blocks=3, **padding)


def both(layers, write):
    """(the reference's verbs, its pools, torch's verbs, pools of the same bytes), every request's history in them.

    Slots and blocks were others' before, and what is not written is poisoned.
    """
    plan = plan_cache(CacheSpec(layers=layers, block_tokens=BLOCK), max_requests=4, max_tokens=128, layout="packed")
    reference, ops = ReferenceBackend().create(plan), TorchOps(plan)
    pools = reference.allocate()
    for pool in pools.values():
        pool[...] = 0xFF
    for slots in ((1, 3), LENGTHS):
        for slot in slots:
            index = build_index([StepRequest(slot, 0, LENGTHS[slot], BLOCKS[slot])], max_blocks=3)
            for layer in range(len(layers)):
                pools = write(reference, pools, layer, index)
    return reference, pools, ops, {name: torch.from_numpy(pool.copy()) for name, pool in pools.items()}


def rows_of(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def assert_same(got, want, rounding=2.0**-7):
    """Outputs as far apart as their dtype's rounding allows, log-sums in base e; poison would be no number."""
    out = torch.from_numpy(np.asarray(want.out, np.float32))
    torch.testing.assert_close(got.out.float(), out, rtol=rounding, atol=rounding * float(out.abs().max()))
    torch.testing.assert_close(got.lse, torch.from_numpy(np.asarray(want.lse)), rtol=1e-5, atol=1e-5)


def latent(window, entries):
    layer = {"window": Window(dim=DIM, window=6, rows=9, format=window)}
    return LayerSpec(**layer, entries=Entries(dim=DIM, ratio=RATIO, format=entries) if entries else None)


@pytest.mark.parametrize(
    ("window", "entries", "picks", "heads"),
    [
        pytest.param("v4_584", "", False, 8, id="V4, window alone"),
        pytest.param("v4_584", "v4_584", True, 16, id="V4, picks"),
        pytest.param("v4_584", "v4_584", False, 3, id="V4, every entry"),
        pytest.param("v4_nvfp4_384", "v4_nvfp4_384", True, 8, id="V4 in four bits, picks"),
        pytest.param("v41_528", "", False, 7, id="V4.1, window alone"),
        pytest.param("v41_528", "v41_fp4_288", True, 5, id="V4.1, picks in FP4"),
        pytest.param("v41_528", "v41_528", False, 8, id="V4.1, every entry in FP8"),
    ],
)
def test_rows_are_attended_to_where_they_lie(flashinfer, window, entries, picks, heads):
    rng = np.random.default_rng(heads)

    def write(ops, pools, layer, index):
        pools = ops.append_window(pools, layer, index, rows_of(rng, len(index.positions), DIM))
        count = int(index.lengths[0]) // RATIO
        return ops.store_entries(pools, layer, index, rows_of(rng, count, DIM)) if entries else pools

    reference, known, ops, pools = both([latent(window, entries)] * 2, write)
    index = step_of({3: 2, 0: 1, 1: 3}, pad_tokens=8, pad_requests=4)
    q = torch.from_numpy(rows_of(rng, 8, heads, DIM)).bfloat16()
    selected = rng.permuted(np.tile(np.arange(-2, 10, dtype=np.int32), (8, 1)), axis=1) if picks else None
    sink = rows_of(rng, heads)
    sink[0] = -np.inf
    for layer in range(2):
        served = flash_infer.served(ops, layer, 120)
        call = served, ops.index(index), q, None if selected is None else torch.from_numpy(selected)
        assert flash_infer.misfit(*call, None) == ""
        got = flash_infer.attend(ops, pools, *call, torch.from_numpy(sink), 0.05)
        assert_same(got, reference.attend(known, layer, index, q.float().numpy(), selected, sink=sink, scale=0.05))
    # One wrapper for both.
    assert flashinfer.mla.SparseMLASm120Wrapper.runs == 2
    assert len(ops.wrappers) == 1


@pytest.mark.parametrize(
    ("served", "said"),
    [
        pytest.param(
            latent("bf16", ""),
            "packed v4_584, v4_nvfp4_384, v41_528, v41_528 and v41_fp4_288 rows",
            id="another format",
        ),
        pytest.param(
            latent("v4_584", "v41_528"),
            "packed v4_584, v4_nvfp4_384, v41_528, v41_528 and v41_fp4_288 rows",
            id="formats of two models",
        ),
        pytest.param(deepseek_v3_2().layers[0], "FlashInfer needs a window", id="V3.2"),
    ],
)
def test_layers_that_are_not_taken_say_why(served, said):
    ops = TorchOps(plan_cache(CacheSpec(layers=[served], block_tokens=64), max_requests=1, max_tokens=64))
    assert said in flash_infer.served(ops, 0, 120)
    assert "12.0 and 12.1" in flash_infer.served(ops, 0, 100)


def test_a_release_without_the_second_cache_is_not_used(flashinfer):
    def of_an_older_one(self, q, kv_cache, indices, output, sm_scale, *, extra_kv_cache=None, out_lse=None): ...

    flashinfer.mla.SparseMLASm120Wrapper.run = of_an_older_one
    flash_infer.lacking.cache_clear()
    ops = TorchOps(plan_cache(CacheSpec(layers=[latent("v4_584", "")]), max_requests=1))
    assert flash_infer.served(ops, 0, 121).endswith("of this flashinfer has no extra_indices, lse_scale")


@pytest.mark.parametrize(
    ("tokens", "heads", "change", "said"),
    [
        (1, 64, {"dtype": torch.float32}, "q is not bf16"),
        (1, 64, {"own": torch.zeros(1, DIM)}, "the ring does not hold the step's rows"),
        (1, 129, {}, "q has more than 128 heads"),
        (65, 24, {}, "65 queries have 24 heads"),
        (1, 24, {"formats": ("v4_nvfp4_384",)}, "1 queries have 24 heads"),
        (1, 48, {"formats": ("v4_nvfp4_384",)}, ""),
        (65, 32, {}, ""),
        (64, 24, {}, ""),
        (65, 24, {"formats": ("v41_528",)}, ""),
        (4, 64, {"columns": 1 << 15}, "lists of every entry would be long"),
    ],
)
def test_calls_that_are_not_taken_say_why(tokens, heads, change, said):
    served = flash.Served("window", 9, 6, "entries", 64, 4, change.get("formats", ("v4_584", "v4_584")))
    index = SimpleNamespace(block_table=torch.zeros(1, change.get("columns", 1), dtype=torch.int32))
    q = torch.zeros(tokens, heads, 4, dtype=change.get("dtype", torch.bfloat16))
    assert flash_infer.misfit(served, index, q, None, change.get("own")) == said


def classic(**how):
    return LayerSpec(kv=KV(key_heads=2, key_dim=64, **how))


def coded(format):
    return {"key_format": format, "value_format": format}


def write_kv(rng, heads=2, dim=64):
    def write(ops, pools, layer, index):
        k, v = (rows_of(rng, len(index.positions), heads, dim) for _ in range(2))
        return ops.append_kv(pools, layer, index, k, v)

    return write


@pytest.mark.parametrize(
    ("layer", "dtype", "sink"),
    [
        pytest.param(classic(), torch.bfloat16, True, id="bf16"),
        pytest.param(classic(window=21), torch.bfloat16, False, id="a window"),
        pytest.param(classic(**coded("fp16"), storage="slot"), torch.float16, True, id="fp16 in slots"),
        pytest.param(classic(**coded("fp8_row"), window=9), torch.bfloat16, True, id="fp8 with scales, a window"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_keys_and_values_are_attended_to_where_they_lie(flashinfer, layer, dtype, sink, padded):
    rng = np.random.default_rng(21)
    other = classic(window=11)
    reference, known, ops, pools = both([layer, layer, other], write_kv(rng))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    for number, new in enumerate(({3: 1, 0: 1, 1: 1}, {1: 1, 3: 1})):
        padding = {"pad_tokens": 4, "pad_requests": 4} if padded else {}
        index = step_of(new, **padding)
        given = ops.index(index)
        for at, dtype_of in enumerate((dtype, dtype, torch.bfloat16)):
            q = torch.from_numpy(rows_of(rng, len(index.positions), 6, 64)).to(dtype_of)
            sinks = rows_of(rng, 6) if sink else None
            served = flash_infer.served_kv(ops, at, 80)
            assert flash_infer.misfit_kv(ops, served, given, q, None) == ""
            got = flash_infer.attend_kv(
                ops, pools, served, given, q, None if sinks is None else torch.from_numpy(sinks), 0.2
            )
            assert got.out.dtype == dtype_of
            want = reference.attend_kv(known, at, index, q.float().numpy(), columns=40, sink=sinks, scale=0.2)
            assert_same(got, want)
        # Layers that are alike share a plan; the other has its own, and every step has new ones.
        assert (wrapper.runs, wrapper.plans) == (3 * (number + 1), 2 * (number + 1))
    assert sum(isinstance(one, wrapper) for one in ops.wrappers.values()) == 2
    wide = np.array([LENGTHS[slot] for slot in index.slots if slot >= 0])
    assert (
        flash_infer.pages_of(ops, served, given)[0].tolist()[1 : len(wide) + 1] == np.cumsum(-(-wide // BLOCK)).tolist()
    )


@pytest.mark.parametrize(
    ("layer", "capability", "said"),
    [
        pytest.param(classic(), 75, "from compute capability 8.0 on", id="an older GPU"),
        pytest.param(classic(window=8, storage="ring"), 90, "not rings", id="a ring"),
        pytest.param(classic(chunk=8), 90, "no chunks", id="chunks"),
        pytest.param(classic(**coded("int8_row")), 90, "does not read int8_row", id="another format"),
        pytest.param(classic(**coded("fp8_per_token_head")), 90, "do not begin on 16 bytes", id="scales in between"),
        pytest.param(classic(key_format="fp16", value_format="bf16"), 90, "that are alike", id="two formats"),
        pytest.param(LayerSpec(kv=KV(key_heads=1, key_dim=80)), 90, "heads of 64, 128, 256", id="80 channels"),
    ],
)
def test_classic_layers_that_are_not_taken_say_why(layer, capability, said):
    ops = TorchOps(
        plan_cache(CacheSpec(layers=[layer], block_tokens=16), max_requests=1, max_tokens=64, layout="packed")
    )
    assert said in flash_infer.served_kv(ops, 0, capability)


def test_scales_apart_are_read_in_planar_layout():
    layer = classic(**coded("fp8_per_token_head"))
    ops = TorchOps(
        plan_cache(CacheSpec(layers=[layer], block_tokens=16), max_requests=1, max_tokens=64, layout="planar")
    )
    assert flash_infer.served_kv(ops, 0, 89).scaled


@pytest.mark.parametrize(
    ("new", "change", "said"),
    [
        pytest.param({3: 2, 0: 1}, {}, flash_infer.ONE_TOKEN, id="two tokens of a request"),
        pytest.param({3: 1, 0: 0}, {}, flash_infer.ONE_TOKEN, id="none of another"),
        pytest.param({3: 1}, {"own": True}, "the step's own keys and values are given", id="rows that are not stored"),
        pytest.param({3: 1}, {"dtype": torch.float16}, "q is torch.float16 and keys are bf16", id="another dtype"),
        pytest.param({3: 1}, {"left": 3}, "the step has left padding", id="left padding"),
        pytest.param({3: 1}, {"blocks": (5, -1, 6)}, "blocks of a request lie elsewhere", id="a context shard"),
    ],
)
def test_steps_that_are_not_taken_say_why(new, change, said):
    ops = TorchOps(plan_cache(CacheSpec(layers=[classic()], block_tokens=BLOCK), max_requests=4, max_tokens=128))
    blocks = {**BLOCKS, 3: change.get("blocks", BLOCKS[3])}
    rows = [StepRequest(slot, LENGTHS[slot] - count, count, blocks[slot]) for slot, count in new.items()]
    index = build_index([row._replace(left_padding=change.get("left")) for row in rows], max_blocks=3)
    q = torch.zeros(len(index.positions), 2, 64, dtype=change.get("dtype", torch.bfloat16))
    served = flash_infer.served_kv(ops, 0, 90)
    assert flash_infer.misfit_kv(ops, served, ops.index(index), q, q if "own" in change else None) == said


def test_it_is_used_by_choice_alone(monkeypatch):
    monkeypatch.setenv("KVCORE_ATTENTION", "flashinfer")
    assert flash.chosen("cuda", 120) == "flashinfer"
    for wanted in ("auto", None):
        monkeypatch.setenv("KVCORE_ATTENTION", wanted) if wanted else monkeypatch.delenv("KVCORE_ATTENTION")
        assert flash.chosen("cpu") == "triton"


def test_a_package_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setenv("KVCORE_ATTENTION", "flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendError, match="flashinfer is not installed"):
        flash.chosen("cuda", 120)
