"""Ready-made specs against the published configurations."""

from types import SimpleNamespace

import pytest

from kvcore.errors import SpecError
from kvcore.spec import CacheSpec, from_hf_config, presets


def roles(layer):
    return {role for role, _ in layer.components()}


WINDOW_ONLY = {"window"}
HCA = {"window", "tail", "entries"}
CSA = {"window", "tail", "entries", "index_tail", "index_keys"}


def schedule(spec):
    """Compression ratio of every main layer, 0 for window only."""
    return [0 if layer.entries is None else layer.entries.ratio for layer in spec.layers]


@pytest.mark.parametrize(
    ("preset", "expected", "topk"),
    [
        pytest.param(presets.deepseek_v4_flash, [0, 0, *[4, 128] * 20, 4], 512, id="Flash: 2 window, 21 CSA, 20 HCA"),
        pytest.param(presets.deepseek_v4_pro, [128, 128, *[4, 128] * 29, 4], 1024, id="Pro: 30 CSA, 31 HCA"),
    ],
)
def test_v4_schedule(preset, expected, topk):
    spec = preset()
    assert schedule(spec) == expected
    assert (spec.block_tokens, len(spec.draft_layers)) == (256, 1)
    for layer, ratio in zip(spec.layers, expected, strict=True):
        assert roles(layer) == {0: WINDOW_ONLY, 4: CSA, 128: HCA}[ratio]
        assert (layer.window.dim, layer.window.window, layer.window.format) == (512, 128, "v4_584")
        if ratio:
            assert (layer.tail.dim, layer.tail.ratio, layer.tail.overlap) == (512, ratio, ratio == 4)
            assert (layer.entries.dim, layer.entries.format, layer.entries.share) == (512, "v4_584", None)
        if ratio == 4:
            keys = layer.index_keys
            assert (keys.dim, keys.heads, keys.topk, keys.format) == (128, 64, topk, "index_fp4_68_h")
            assert (layer.index_tail.dim, layer.index_tail.ratio, layer.index_tail.overlap) == (128, 4, True)
    assert roles(spec.draft_layers[0]) == WINDOW_ONLY


@pytest.mark.parametrize(
    ("preset", "layers", "csa", "hca"), [("deepseek_v4_flash", 43, 21, 20), ("deepseek_v4_pro", 61, 30, 31)]
)
def test_v4_layer_counts(preset, layers, csa, hca):
    ratios = schedule(presets.PRESETS[preset]())
    assert (len(ratios), ratios.count(4), ratios.count(128)) == (layers, csa, hca)


def test_v41_schedule_and_sharing():
    spec = presets.deepseek_v4_1_flash()
    assert schedule(spec) == [0, 0, *[2] * 18, *[1] * 20]
    owners = {number: spec.owner(number, "entries") for number in range(2, 40)}
    assert owners == {
        **dict.fromkeys(range(2, 8), 2),
        **dict.fromkeys(range(8, 14), 8),
        **dict.fromkeys(range(14, 20), 14),
        **dict.fromkeys(range(20, 40), 20),
    }
    assert {number: spec.owner(number, "index_keys") for number in owners} == owners
    for number, layer in enumerate(spec.layers):
        assert (layer.window.dim, layer.window.window, layer.window.format) == (512, 128, "v41_528")
        assert layer.index_tail is None
        # Ratio 1 compresses nothing, and only an owner compresses at all.
        assert (layer.tail is not None) == (number in (2, 8, 14))
        if layer.tail is not None:
            assert (layer.tail.dim, layer.tail.ratio, layer.tail.overlap) == (512, 2, False)
        if layer.entries is not None:
            assert layer.entries.format == "v41_fp4_288"
            keys = layer.index_keys
            assert (keys.dim, keys.heads, keys.topk, keys.format) == (128, 32, 512, "index_fp4_68")
    assert [roles(layer) for layer in spec.draft_layers] == [WINDOW_ONLY] * 3


@pytest.mark.parametrize(
    ("tiny", "real"),
    [
        (presets.deepseek_v4_flash_tiny, presets.deepseek_v4_flash),
        (presets.deepseek_v4_pro_tiny, presets.deepseek_v4_pro),
        (presets.deepseek_v4_1_flash_tiny, presets.deepseek_v4_1_flash),
    ],
)
def test_a_tiny_twin_has_every_kind_of_layer_with_true_rows(tiny, real):
    small, large = tiny(), real()
    assert len(small.layers) <= 6
    assert small.block_tokens == 32

    def kinds(spec):
        """Roles, row bytes and whether pools are shared: what distinguishes layers, sizes of windows aside."""
        return {
            tuple(
                (role, tuple(part.format.row_bytes for part in c.parts), c.shared_from is None)
                for role, c in layer.components()
            )
            for layer in spec.layers
        }

    assert kinds(small) == kinds(large)
    assert len(small.draft_layers) >= 1


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if "_v4" in name])
def test_keywords_of_the_latent_presets(name):
    preset = presets.PRESETS[name]
    assert preset(draft=False).draft_layers == ()
    assert preset(block_tokens=512).block_tokens == 512
    chosen = {"window": "bf16", "entries": "fp32", "index_keys": "fp16"}
    spec = preset(formats=chosen)
    for _, role, component in spec.components():
        if role in chosen:
            assert component.format == chosen[role]
    partly = preset(formats={"index_keys": "index_fp8_132_h"})
    window = next(component for _, role, component in partly.components() if role == "window")
    assert window.format == ("v41_528" if "v4_1" in name else "v4_584")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        pytest.param({"formats": {"keys": "bf16"}}, "formats", id="unknown role"),
        pytest.param({"formats": {"window": "v5"}}, "format", id="unknown format"),
        pytest.param({"formats": {"entries": "index_fp4_68"}}, "dim", id="a format for index keys"),
        pytest.param({"block_tokens": 100}, "block_tokens", id="100 is no multiple of 128"),
        pytest.param({"block_tokens": 0}, "block_tokens", id="no tokens a block"),
    ],
)
def test_presets_refuse(arguments, where):
    with pytest.raises(SpecError) as caught:
        presets.deepseek_v4_flash(**arguments)
    assert caught.value.where == where


def test_gemma_has_five_sliding_layers_to_one_full():
    spec = presets.gemma_3_1b()
    kinds = [layer.kv.window for layer in spec.layers]
    assert kinds == [None if number % 6 == 5 else 512 for number in range(26)]
    assert {(layer.kv.key_heads, layer.kv.key_dim) for layer in spec.layers} == {(1, 256)}
    assert {layer.kv.storage for layer in spec.layers if layer.kv.window} == {"ring"}


@pytest.mark.parametrize(("preset", "window", "storage"), [("llama_3_8b", None, "paged"), ("mistral_7b", 4096, "ring")])
def test_uniform_classic_presets(preset, window, storage):
    spec = presets.PRESETS[preset]()
    found = {(c.key_heads, c.key_dim, c.window, c.storage, c.key_format) for _, _, c in spec.components()}
    assert found == {(8, 128, window, storage, "bf16")}
    assert len(spec.layers) == 32


def test_classic_with_different_values():
    spec = presets.classic(layers=2, key_heads=3, key_dim=24, value_heads=6, value_dim=16, value_format="fp32")
    key, value = spec.layers[1].kv.parts
    assert (key.name, key.heads, key.format.row_bytes) == ("key", 3, 48)
    assert (value.name, value.heads, value.format.row_bytes) == ("value", 6, 64)


def test_v32_has_one_latent_row_and_one_key_a_token():
    spec = presets.deepseek_v3_2()
    assert len(spec.layers) == 61
    assert {roles(layer) == {"entries", "index_keys"} for layer in spec.layers} == {True}
    assert spec.layers[7].entries.ratio == spec.layers[7].index_keys.ratio == 1
    assert (spec.layers[0].entries.dim, spec.layers[0].index_keys.topk) == (576, 2048)


def test_every_preset_is_named_after_itself():
    for name, preset in presets.PRESETS.items():
        spec = preset()
        assert isinstance(spec, CacheSpec)
        assert spec.name == name


@pytest.mark.parametrize(
    ("model_type", "rank", "formats", "keys"),
    [
        pytest.param("deepseek_v2", 512, ("bf16", None), None, id="V2"),
        pytest.param("deepseek_v3", 512, ("bf16", None), None, id="V3"),
        pytest.param("deepseek_v32", 512, ("v32_656", "index_fp8_132_fp32scale"), 128, id="V3.2"),
        pytest.param("deepseek_v32", 16, ("bf16", "index_fp8_132_fp32scale"), 128, id="a smaller V3.2"),
    ],
)
def test_latent_attention_keeps_one_row_a_token(model_type, rank, formats, keys):
    config = SimpleNamespace(
        model_type=model_type,
        num_hidden_layers=3,
        kv_lora_rank=rank,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_n_heads=64,
        index_topk=2048,
    )
    spec = from_hf_config(config)
    assert len(spec.layers) == 3
    for layer in spec.layers:
        assert (layer.entries.dim, layer.entries.ratio, layer.entries.format) == (rank + 64, 1, formats[0])
        found = (layer.index_keys.dim, layer.index_keys.format) if layer.index_keys else (None, None)
        assert found == (keys, formats[1])
