"""Which code runs a verb under JAX and why: tables of four specs, on a TPU and a CPU; strict mode; what traces do."""

import jax
import jax.numpy as jnp
import pytest

from kvcore.backends.jax_pallas import JaxBackend, JaxOps, choice, indexer
from kvcore.errors import BackendError
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec, presets

INT8 = {"key_format": "int8_row", "value_format": "int8_row"}
SPECS = {
    "V4-Flash": (presets.deepseek_v4_flash(), 2),
    "V3 latent": (presets.deepseek_v3_2(), 0),
    "classic int8": (CacheSpec(layers=[LayerSpec(kv=KV(key_heads=8, key_dim=128, **INT8))], block_tokens=16), 0),
    "sliding": (
        CacheSpec(layers=[LayerSpec(kv=KV(key_heads=8, key_dim=64, window=128, storage="ring"))], block_tokens=16),
        0,
    ),
}
MOVED = ("pallas and jax.numpy", "rows are moved by Pallas, encoded and decoded by jax.numpy")
OWN = ", else pallas and jax.numpy: rows of the step are given"
LONG = "more than 8192 scores a token"
TURNS = ", else pallas and jax.numpy: a rope turns more than 128 channels"
TILES = " in layout tpu_tile"
UNITS = ("reset_slots", "poison", "copy_slots", "copy_blocks", "digest_rows", "move_strips", "digest_strips")


def covered(formats: str, more: str = "") -> tuple[str, str]:
    return "pallas", f"kernels cover {formats}{TILES}{more}"


V4 = {
    "append_window": covered("v4_584"),
    "append_rotated_window": covered("v4_584"),
    "gather_window": covered("v4_584", OWN),
    "append_tail": MOVED,
    "append_index_tail": MOVED,
    "compress": MOVED,
    "flush": covered("v4_584 and tail and index_fp4_68_h", TURNS),
    "append_flush": covered("v4_584 and tail and index_fp4_68_h", TURNS),
    "store_entries": covered("v4_584"),
    "store_entries(index_keys)": covered("index_fp4_68_h"),
    "gather_entries": covered("v4_584"),
    "gather_all_entries": covered("v4_584"),
    "gather_all_entries(index_keys)": covered("index_fp4_68_h"),
    "index_scores": covered("index_fp4_68_h"),
    "select": covered("index_fp4_68_h", f", else jax.numpy: {LONG}"),
    "index_select": covered("index_fp4_68_h", f", else pallas and jax.numpy: {LONG}"),
    "attend": covered("v4_584", f"{OWN}; entries are not selected, and too many"),
    **dict.fromkeys(("gather_rows", "store_rows", "read_ring", "restore_ring"), MOVED),
}
V3 = {
    "store_entries": covered("v32_656"),
    "store_entries(index_keys)": covered("index_fp8_132_fp32scale"),
    "gather_entries": covered("v32_656"),
    "gather_all_entries": covered("v32_656"),
    "gather_all_entries(index_keys)": covered("index_fp8_132_fp32scale"),
    "index_scores": covered("index_fp8_132_fp32scale"),
    "select": covered("index_fp8_132_fp32scale", f", else jax.numpy: {LONG}"),
    "index_select": covered("index_fp8_132_fp32scale", f", else pallas and jax.numpy: {LONG}"),
    "attend": covered("v32_656", f"{OWN}; entries are not selected, and too many"),
    **dict.fromkeys(("gather_rows", "store_rows"), MOVED),
}
NO_VIEWS = ("none", "arrays of JAX never change: there are no views of pools")
CLASSIC = {
    **dict.fromkeys(("append_kv", "gather_kv", "append_kv_view", "gather_rows", "store_rows"), MOVED),
    "kv_view": NO_VIEWS,
    "attend_kv": covered("int8_row", ", else pallas and jax.numpy: k and v are given; too many columns"),
}
IN_SLOTS = "attention reads blocks of tiles, and rows are in slots of layout tpu_tile"
SLIDING = {
    **CLASSIC,
    **dict.fromkeys(("read_ring", "restore_ring"), MOVED),
    "attend_kv": ("pallas and jax.numpy", IN_SLOTS),
}
ON_TPU = {"V4-Flash": V4, "V3 latent": V3, "classic int8": CLASSIC, "sliding": SLIDING}


def made(name: str, device: str, kernels: str, layout: str) -> JaxOps:
    plan = plan_cache(SPECS[name][0], max_requests=1, max_tokens=1024, layout=layout)
    return JaxOps(plan, device, None, kernels)


def table(ops: JaxOps, layer: int | None) -> dict[str, tuple[str, str]]:
    return {choice.verb: choice[2:] for choice in ops.explain() if choice.layer == layer}


@pytest.mark.parametrize("name", SPECS)
def test_tables_of_a_tpu(name: str) -> None:
    ops = made(name, "tpu", "tpu", "tpu_tile")
    assert table(ops, SPECS[name][1]) == ON_TPU[name]
    assert table(ops, None) == dict.fromkeys(UNITS, ("jax.numpy", "whole units are bytes, which XLA copies"))


@pytest.mark.parametrize("name", SPECS)
def test_tables_of_a_cpu(name: str) -> None:
    found = table(made(name, "cpu", "portable", "planar"), SPECS[name][1])
    plain = ("jax.numpy", "there are no kernels for a CPU")
    assert found == {verb: NO_VIEWS if verb == "kv_view" else plain for verb in ON_TPU[name]}


@pytest.mark.parametrize(
    ("device", "layout", "wanted", "why"),
    [
        ("tpu", "packed", None, "Pallas kernels read layout tpu_tile, this is packed"),
        ("cuda", "packed", "portable", "KVCORE_JAX_KERNELS=portable"),
        ("cuda", "packed", None, "jax_triton and triton is not installed"),
        ("cuda", "tpu_tile", None, "layout tpu_tile is for a TPU"),
    ],
)
def test_why_no_kernel_runs(monkeypatch, device: str, layout: str, wanted: str | None, why: str) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda _: None)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    if wanted is not None:
        monkeypatch.setenv(choice.VARIABLE, wanted)
    ops = made("V4-Flash", device, "portable", layout)
    assert table(ops, 2)["flush"] == ("jax.numpy", why)
    with pytest.raises(BackendError, match=f"layers.0., append_window: got jax.numpy, because: {why}"):
        ops.check_strict()


def test_rows_that_kernels_do_not_know() -> None:
    spec = CacheSpec(layers=[presets.v4_layer(0, overlap=False, formats={"window": "nf4_b64"})], block_tokens=256)
    plan = plan_cache(spec, max_requests=1, max_tokens=256, layout="tpu_tile")
    ops = JaxOps(plan, "tpu", None, "tpu")
    why = "no kernel encodes and decodes rows of nf4_b64"
    assert table(ops, 0)["append_window"] == ("pallas and jax.numpy", why)
    with pytest.raises(BackendError, match=why):
        ops.check_strict()


def test_strict_mode_is_asked_when_verbs_are_bound(monkeypatch) -> None:
    monkeypatch.setenv("KVCORE_STRICT", "1")
    plan = plan_cache(SPECS["sliding"][0], max_requests=1, max_tokens=256, layout="tpu_tile")
    with pytest.raises(BackendError, match=r"attend_kv: got pallas and jax\.numpy"):
        JaxBackend().create(plan, device="cpu:interpret")
    JaxBackend().create(plan, device="cpu")  # where jax.numpy is the best there is


def test_a_trace_that_leaves_its_kernel_is_refused(monkeypatch) -> None:
    scores = jax.ShapeDtypeStruct((1, 8193), jnp.float32)

    def select(scores: jax.Array) -> jax.Array:
        return indexer.select(scores, 4, "tpu")

    jax.eval_shape(select, scores)
    monkeypatch.setenv("KVCORE_STRICT", "1")
    with pytest.raises(BackendError, match=r"select: got jax\.numpy, because: k = 4 of 8193 scores"):
        jax.eval_shape(lambda scores: select(scores), scores)
    jax.eval_shape(lambda scores: indexer.select(scores, 4), scores)
