"""Every causal model type of transformers: a spec of the layers that its own cache would have, or what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import families, family_models
from kvcore.errors import SpecError
from kvcore.interop.transformers import KVCache
from kvcore.spec import CacheSpec, LayerSpec, from_hf_config
from kvcore.spec.families import FAMILIES, LATENT, MISSING
from kvcore.spec.presets import PRESETS
from kvcore.spec.recurrent_families import RECURRENT

ROOT = Path(__file__).parents[2]
KNOWN = {*FAMILIES, *LATENT, *RECURRENT, *MISSING, "deepseek_v4"}
SEEN = {
    "full_attention": (True, False),
    "sliding_attention": (True, False),
    "chunked_attention": (True, False),
    "indexed_attention": (True, False),
    "heavily_compressed_attention": (True, False),
    "compressed_sparse_attention": (True, False),
    "linear_attention": (False, True),
    "conv": (False, True),
    "hybrid": (True, True),
    "hybrid_sliding": (True, True),
    "dummy": (False, False),
}
"""transformers' kind of a layer -> whether it attends, and whether it carries something on."""


def shown(layer: LayerSpec) -> tuple[bool, bool]:
    attends = layer.kv is not None or layer.entries is not None or layer.window is not None
    return attends, layer.state is not None or layer.conv is not None


def configuration(kind: str) -> Any:
    try:
        return CONFIG_MAPPING[kind]()
    except Exception:  # noqa: BLE001 - a class that has no configuration by default
        return None


def spec_or_error(config: Any) -> CacheSpec | SpecError:
    try:
        return from_hf_config(config)
    except SpecError as error:
        return error


@pytest.mark.parametrize("letter", sorted({kind[0] for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}))
def test_a_spec_or_what_is_missing(letter: str) -> None:
    """Never another error, and never layers or windows that the model does not have."""
    for kind in sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind[0] == letter):
        config = configuration(kind)
        if config is None:
            assert kind == "gemma4_assistant"
            continue
        text = config.get_text_config(decoder=True)
        spec = spec_or_error(config)
        if isinstance(spec, SpecError):
            assert spec.where.startswith("config."), kind
            assert text.model_type in KNOWN or spec.where != "config.model_type", kind
            continue
        kinds, options = get_layer_types_and_kwargs(text)
        if (
            kind == "dory"
        ):  # its model appends layers to its cache, one for every run but the first of those in the middle
            kinds, options = kinds + kinds[16:36], options + options[16:36]
        assert [shown(layer) for layer in spec.layers] == [SEEN[found] for found in kinds], kind
        for layer, option in zip(spec.layers, options, strict=True):
            if layer.kv is not None:
                assert (layer.kv.window or layer.kv.chunk) == option.get("sliding_window"), kind


def test_most_model_types_have_a_spec() -> None:
    accepted = {*FAMILIES, *LATENT, *RECURRENT}
    assert len(accepted & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)) > 110
    assert not accepted & set(MISSING)


QWEN = {"model_type": "qwen3_next", "num_hidden_layers": 8, "hidden_size": 2048}
PUBLISHED = {
    "qwen3_next": (QWEN, [(False, True)] * 3 + [(True, False)], 8),
    "qwen3_next, another interval": (QWEN | {"full_attention_interval": 2}, [(False, True), (True, False)], 8),
    "jamba": (
        {"model_type": "jamba", "num_hidden_layers": 16, "hidden_size": 4096},
        [(False, True)] * 4 + [(True, False)] + [(False, True)] * 3,
        16,
    ),
    "bamba": (
        {"model_type": "bamba", "num_hidden_layers": 4, "hidden_size": 4096, "attn_layer_indices": [1, 3]},
        [(False, True), (True, False)],
        4,
    ),
    "nemotron_h": (
        {"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*E"},
        [(False, True), (False, False), (True, False), (False, False)],
        4,
    ),
    "kimi_linear": (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_attn_config": {
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        [(False, True)] * 3 + [(True, False)],
        4,
    ),
    "lfm2": (
        {"model_type": "lfm2", "num_hidden_layers": 4, "hidden_size": 2048, "full_attn_idxs": [2]},
        [(False, True), (False, True), (True, False), (False, True)],
        4,
    ),
    "granitemoehybrid": (
        {
            "model_type": "granitemoehybrid",
            "num_hidden_layers": 2,
            "hidden_size": 1536,
            "mamba_n_heads": 48,
            "layer_types": ["mamba", "attention"],
        },
        [(False, True), (True, False)],
        2,
    ),
    "falcon_h1": (
        {"model_type": "falcon_h1", "num_hidden_layers": 2, "hidden_size": 1024, "mamba_n_heads": 24},
        [(True, True)],
        2,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(name: str) -> None:
    """What a file says in words of its own: patterns, lists and parts."""
    config, period, layers = PUBLISHED[name]
    spec = from_hf_config(config | {"num_attention_heads": 16, "num_key_value_heads": 2})
    assert [shown(layer) for layer in spec.layers] == period * (layers // len(period))


def test_sizes_of_published_models() -> None:
    """Worked out from the released files by hand."""
    qwen = from_hf_config(QWEN).layers
    assert qwen[0].state is not None
    assert qwen[0].conv is not None
    assert qwen[0].state.shape == (32, 128, 128)
    assert (qwen[0].conv.channels, qwen[0].conv.width) == (2 * 16 * 128 + 32 * 128, 4)
    assert qwen[3].kv is not None
    assert (qwen[3].kv.key_heads, qwen[3].kv.key_dim) == (2, 256)
    kimi = from_hf_config(PUBLISHED["kimi_linear"][0]).layers
    assert kimi[0].state is not None
    assert kimi[0].state.shape == (32, 128, 128)
    assert kimi[3].entries is not None
    assert kimi[3].entries.dim == 576
    mamba2 = from_hf_config({"model_type": "mamba2", "num_hidden_layers": 1}).layers[0]
    assert mamba2.state is not None
    assert mamba2.conv is not None
    assert (mamba2.state.shape, mamba2.conv.channels) == ((128, 64, 128), 128 * 64 + 2 * 8 * 128)
    jamba = from_hf_config({"model_type": "jamba", "num_hidden_layers": 1, "hidden_size": 4096}).layers[0]
    assert jamba.state is not None
    assert jamba.state.shape == (8192, 16)


GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 4, "attention_k_eq_v": True}


def test_layers_of_other_heads_and_layers_that_keep_nothing() -> None:
    """A file and transformers' configuration say the same."""
    file = GEMMA4 | {"global_head_dim": 512, "num_global_key_value_heads": 2}
    spec = from_hf_config(file)
    assert [layer.kv and (layer.kv.key_heads, layer.kv.key_dim, layer.kv.window) for layer in spec.layers] == [
        *[*[(4, 256, 512)] * 5, (2, 512, None)],
        *[(4, 256, 512)] * 2,
        *[None] * 4,
    ]
    config = CONFIG_MAPPING["gemma4_text"](**{name: value for name, value in file.items() if name != "model_type"})
    assert from_hf_config(config) == spec


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"model_type": "nemotron_h", "num_hidden_layers": 4}, "config.hybrid_override_pattern"),
        ({"model_type": "nemotron_h", "num_hidden_layers": 2, "hybrid_override_pattern": "MX"}, "config.hybrid_"),
        ({"model_type": "lfm3", "num_hidden_layers": 2, "hidden_size": 64}, "config.layer_types"),
        ({"model_type": "mamba2", "num_hidden_layers": 2, "num_heads": "8"}, "config.num_heads"),
        (QWEN | {"layer_types": ["linear_attention"]}, "config.layer_types"),
        (QWEN | {"layer_types": ["sparse"] * 8}, "config.layer_types[0]"),
        (GEMMA4 | {"num_kv_shared_layers": 12}, "config.num_kv_shared_layers"),
        ({"model_type": "zaya"}, "config.model_type"),
    ],
)
def test_what_a_file_lacks(config: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_hf_config(config)
    assert caught.value.where.startswith(where)


def test_key_heads_that_follow_from_other_fields() -> None:
    """GPT-BigCode, Falcon and DBRX: what the classes of transformers make of it."""

    def heads(**fields: Any) -> int:
        kv = from_hf_config({"num_hidden_layers": 1, "hidden_size": 64, **fields}).layers[0].kv
        assert kv is not None
        return kv.key_heads

    for kind, name in (("gpt_bigcode", "n_head"), ("falcon", "num_attention_heads")):
        assert heads(model_type=kind, **{name: 8}) == 1
        assert heads(model_type=kind, multi_query=False, **{name: 8}) == 8
    assert heads(model_type="falcon", num_attention_heads=8, num_kv_heads=2, multi_query=False) == 2
    assert heads(model_type="falcon", num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True) == 8
    assert heads(model_type="dbrx", n_layers=1, n_heads=8, d_model=64, attn_config={"kv_n_heads": 4}) == 4


def test_values_of_another_width_and_more_heads_in_sliding_layers() -> None:
    file = {"model_type": "mimo_v2_flash", "num_hidden_layers": 6, "sliding_window_size": 128}
    kept = [layer.kv for layer in from_hf_config(file).layers]
    assert [kv and (kv.key_heads, kv.key_dim, kv.value_dim, kv.window) for kv in kept] == [
        (4, 192, 128, None),
        *[(8, 192, 128, 129)] * 4,
        (4, 192, 128, None),
    ]  # fmt: skip


def test_layers_that_take_what_another_layers_indexer_picked() -> None:
    """They keep no keys of an indexer; a configuration and the file that it writes say the same."""
    config = CONFIG_MAPPING["glm_moe_dsa"](num_hidden_layers=7, index_topk_freq=3)
    spec = from_hf_config(config)
    kinds = ["full" if layer.index_keys is not None else "shared" for layer in spec.layers]
    assert kinds == config.indexer_types == ["full", "full", "shared", "shared", "full", "shared", "shared"]
    file = {name: value for name, value in config.to_dict().items() if name != "indexer_types"}
    assert from_hf_config(file | {"index_topk_freq": 3}) == spec
    assert from_hf_config(file | {"index_topk_pattern": "FFSSFSS"}) == spec


@pytest.mark.parametrize(
    "kind", ["bailing_hybrid", "gemma4_text", "dory", "longcat_flash", "zamba", "zamba2", "hrm_text"]
)
def test_a_saved_configuration_gives_the_spec_of_the_object(kind: str) -> None:
    """What its class rewrites, or says by layer, is read as it is meant: the rotary part's width is not a head's."""
    config = CONFIG_MAPPING[kind]()
    spec = from_hf_config(config)
    for whole in (True, False):
        assert from_hf_config(json.loads(config.to_json_string(use_diff=not whole))) == spec
    if kind == "bailing_hybrid":
        assert spec.layers[0].state is not None
        assert spec.layers[0].state.key_dim == config.linear_head_dim != config.head_dim


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64}, "config.is_decoder"),
        ({"model_type": "bart", "num_hidden_layers": 2, "d_model": 64}, "config.is_encoder_decoder"),
        ({"model_type": "bart", "num_hidden_layers": 2, "is_encoder_decoder": False}, "config.decoder_layers"),
        ({"model_type": "bert", "is_decoder": True, "add_cross_attention": True}, "config.add_cross_attention"),
    ],
)
def test_encoders_are_no_decoders(config: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_hf_config(config)
    assert caught.value.where == where


def test_a_decoders_heads_are_not_its_encoders() -> None:
    config = CONFIG_MAPPING["whisper"](
        encoder_attention_heads=2, decoder_attention_heads=8, d_model=64, decoder_layers=3
    )
    config.is_encoder_decoder = False
    kept = [layer.kv for layer in from_hf_config(config).layers]
    assert [kv and (kv.key_heads, kv.key_dim) for kv in kept] == [(8, 8)] * 3


def test_models_that_no_cache_or_no_fixed_shapes_serve() -> None:
    """A model whose masks are cut by how many keys there are would give other tokens, silently."""
    for kind, options, match in (("gpt_neo", {"static": True}, "static=True"), ("mpt", {}, "every token again")):
        model = family_models.make(kind)
        with pytest.raises(SpecError, match=match):
            KVCache(model, batch=1, max_length=16, **options)


def test_a_layer_counts_what_it_has_stored_of_a_forward() -> None:
    model = family_models.make("llama")
    for cache in (KVCache(model, batch=1, max_length=16), DynamicCache(config=model.config)):
        rows = torch.ones(1, 2, 3, 8)
        cache.update(rows, rows, 0)
        assert [cache.get_seq_length(layer) for layer in (0, 1)] == [3, 0]


LINEAR_OF_KIMI = {
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    "kda_layers": [layer for layer in range(1, 28) if layer not in (4, 8, 12, 16, 20, 24, 27)],
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "qwen3_next_80b": {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "kimi_linear_48b": {
        "model_type": "kimi_linear", "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "linear_attn_config": LINEAR_OF_KIMI,
    },
    "jamba_v0_1": {
        "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2,
    },
    "nemotron_h_8b": {
        "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "falcon_h1_7b": {
        "model_type": "falcon_h1", "num_hidden_layers": 44, "hidden_size": 3072, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_d_conv": 4, "mamba_d_head": 128, "mamba_d_ssm": 3072,
        "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
    },
    "lfm2_1_2b": {
        "model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 8, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "qwen3_5_35b": {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "full_attention_interval": 4, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip
"""What the released configuration files say of the cache."""


@pytest.mark.parametrize("name", RELEASED)
def test_presets_of_hybrids_are_the_released_files(name: str) -> None:
    file = RELEASED[name]
    assert PRESETS[name]().layers == from_hf_config(file).layers
    given = {key: value for key, value in file.items() if key != "model_type"}
    assert PRESETS[name]().layers == from_hf_config(CONFIG_MAPPING[file["model_type"]](**given)).layers


@pytest.mark.parametrize("name", [name for name in RELEASED if name not in ("kimi_linear_48b", "jamba_v0_1")])
def test_bytes_of_a_hybrid_are_those_that_the_models_own_cache_takes(name: str) -> None:
    """Layer by layer in the released sizes, given one token by hand; they keep one input of a convolution too many."""
    file = RELEASED[name]
    config = CONFIG_MAPPING[file["model_type"]](**{key: value for key, value in file.items() if key != "model_type"})
    own, met = DynamicCache(config=config), set()
    for number, layer in enumerate(PRESETS[name]().layers):
        if layer in met:
            continue
        met.add(layer)
        if layer.kv is not None:
            rows = torch.zeros(1, layer.kv.key_heads, 1, layer.kv.key_dim, dtype=torch.bfloat16)
            own.update(rows, rows, number)
            held = own.layers[number].keys.nbytes + own.layers[number].values.nbytes
            assert held == sum(part.heads * part.format.row_bytes for part in layer.kv.parts)
        if layer.conv is not None:
            rows = torch.zeros(1, layer.conv.channels, 1, dtype=torch.bfloat16)
            own.update_conv_state(rows, number, conv_kernel_size=layer.conv.width)
            row = sum(part.heads * part.format.row_bytes for part in layer.conv.parts)
            assert own.layers[number].conv_states[0].nbytes == (layer.conv.span + 1) * row
        if layer.state is not None:
            own.update_recurrent_state(torch.zeros(1, *layer.state.shape), number)
            held = own.layers[number].recurrent_states[0].nbytes
            assert held == sum(part.heads * part.format.row_bytes for part in layer.state.parts)
    assert any(layer.conv for layer in met)
    assert any(layer.kv for layer in met)


SAMPLE = {"gpt_bigcode": ("greedy", "beams"), "zamba": ("left-padded", "quantised"), "hy_v4": ("chat", "quantised")}


def test_a_sample_of_the_table() -> None:
    """Way by way, beside the model's own cache."""
    for kind, ways in SAMPLE.items():
        found = families.row(kind, {name: families.WAYS[name] for name in ways})
        assert found["spec"] == families.WORKS
        assert [way["found"] for way in found["ways"].values()] == [families.WORKS] * len(ways), found


def test_a_cache_of_other_rows_is_noticed() -> None:
    """What compares tokens notices a cache that hands out others."""

    class Forgetful(KVCache):
        def update(self, keys: Any, values: Any, layer: int, *args: Any, **options: Any) -> Any:
            return super().update(keys * 0 if layer == 1 else keys, values, layer, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(families, "KVCache", Forgetful)
        found = families.row("llama", {"greedy": families.greedy})
    assert found["ways"]["greedy"]["found"] == families.OTHER


RECORD = json.loads((ROOT / "records" / "families.json").read_text())


def test_the_table_is_that_of_the_record_and_of_every_type() -> None:
    assert (ROOT / "docs" / "families.md").read_text() == families.page(RECORD)
    assert [found["type"] for found in RECORD["types"]] == list(family_models.TYPES)


def test_nothing_in_the_record_gave_other_tokens_or_an_untyped_error() -> None:
    """And what the table says has a spec does, as far as its model can be had."""
    ways = [way for found in RECORD["types"] for way in found.get("ways", {}).values()]
    assert {way["found"] for way in ways} <= {families.WORKS, families.REFUSED, families.NOT_OURS}
    whole = [found for found in RECORD["types"] if found.get("ways")]
    assert sum(found["ways"]["greedy"]["found"] == families.WORKS for found in whole) > 150
