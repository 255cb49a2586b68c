"""Specs from configurations as they are published: what a file leaves unsaid, wrong fields, multimodal ones."""

import json
from types import SimpleNamespace

import pytest

import kvcore
from kvcore.cli import main
from kvcore.plan import plan_cache
from kvcore.spec import from_hf_config, presets
from kvcore.spec.named import load_spec

MIB = 2**20
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}
QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "hidden_size": 896}  # fmt: skip

V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "head_dim": 64, "index_head_dim": 32, "index_n_heads": 2,
      "index_topk": 4, "sliding_window": 8, "compress_ratios": [0, 4, 128]}  # fmt: skip
V32 = {"model_type": "deepseek_v32", "num_hidden_layers": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
       "index_head_dim": 128, "index_n_heads": 2, "index_topk": 4}  # fmt: skip

# What the released files say of the cache; transformers' class of V4.1 has the same defaults.
V41 = {"model_type": "deepseek_v41_text", "num_hidden_layers": 40, "head_dim": 512, "sliding_window": 128,
       "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "num_nextn_predict_layers": 3,
       "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "kv_source_layer_ids": [2, 8, 14, 20],
       "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "candidate_source_layer_id": 20}  # fmt: skip
V32_RELEASED = {"model_type": "deepseek_v32", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}  # fmt: skip


def kinds(spec: kvcore.spec.CacheSpec) -> str:
    """A letter a layer: f full, w window, c chunk."""
    return "".join("w" if layer.kv.window else "c" if layer.kv.chunk else "f" for layer in spec.layers)


# Layers and MiB at 131,072 tokens in bf16, as the published models have them.
PUBLISHED = [
    pytest.param(
        {"model_type": "gemma2", "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "hidden_size": 2304, "sliding_window": 4096},
        "wf" * 13, 6864, id="gemma2: every other layer is full"),
    pytest.param(
        {"model_type": "cohere2", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "hidden_size": 4096, "sliding_window": 4096, "sliding_window_pattern": 4},
        "wwwf" * 8, 4480, id="cohere2: every fourth layer is full"),
    pytest.param(
        {"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "hidden_size": 3584, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14},
        "f" * 14 + "w" * 14, 3696, id="qwen2: layers slide from one on"),
    pytest.param(
        {**QWEN2, "sliding_window": 32768, "max_window_layers": 21},
        "f" * 24, 24 * 64, id="qwen2: the window is off unless it is said to be on"),
    pytest.param(
        {"model_type": "gemma3_text", "num_hidden_layers": 7, "hidden_size": 2560, "sliding_window": 1024},
        "wwwwwfw", 6 * 4 + 512, id="gemma3: heads and widths of the model type"),
    pytest.param({**GPT_OSS, "num_hidden_layers": 3}, "wfw", None, id="gpt_oss: window of the model type"),
    pytest.param(
        {"model_type": "llama4_text", "num_hidden_layers": 5}, "cccfc", None, id="llama4: full without RoPE"),
    pytest.param(
        {"model_type": "exaone4", "num_hidden_layers": 6, "hidden_size": 4096, "sliding_window_pattern": "LLG"},
        "wwfwwf", None, id="exaone4: letters"),
    pytest.param(
        {"model_type": "exaone4", "num_hidden_layers": 3, "hidden_size": 4096, "sliding_window": None},
        "fff", None, id="exaone4: no window"),
    pytest.param(
        {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 4096, "sliding_window": None},
        "ff", None, id="mistral: null is no window"),
    pytest.param(
        {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 4096},
        "ww", None, id="mistral: unsaid is the window of the model type"),
    pytest.param(
        {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32}, "ff", None, id="gpt2: names of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "layers", "mib"), PUBLISHED)
@pytest.mark.parametrize("as_object", [True, False], ids=["object", "mapping"])
def test_published_files_give_the_layers_that_the_model_has(file, layers, mib, as_object):
    spec = from_hf_config(SimpleNamespace(**file) if as_object else file)
    assert kinds(spec) == layers
    if mib is not None:
        assert plan_cache(spec, max_requests=1, max_tokens=131072).nbytes == mib * MIB


def test_what_a_model_type_adds_to_a_file():
    gemma = from_hf_config({"model_type": "gemma3_text", "num_hidden_layers": 1, "hidden_size": 2560}).layers[0].kv
    assert (gemma.key_heads, gemma.key_dim, gemma.window) == (4, 256, 4096)
    gpt_oss = from_hf_config({"model_type": "gpt_oss", "num_hidden_layers": 1}).layers[0].kv
    assert (gpt_oss.key_heads, gpt_oss.key_dim, gpt_oss.window) == (8, 64, 128)
    # None is a word of its own: as many key heads as query heads, and the quotient
    said = {"num_key_value_heads": None, "head_dim": None, "num_attention_heads": 4, "hidden_size": 64}
    none = from_hf_config({"model_type": "gemma", "num_hidden_layers": 1, **said}).layers[0].kv
    assert (none.key_heads, none.key_dim) == (4, 16)


def test_the_released_files_of_deepseek_are_the_presets():
    spec, released = from_hf_config(V41), presets.deepseek_v4_1_flash()
    assert (spec.layers, spec.draft_layers, spec.block_tokens) == (released.layers, released.draft_layers, 256)
    assert from_hf_config(V32_RELEASED).layers == presets.deepseek_v3_2().layers
    # The whole file keeps it in a part, which need not say what it is; what it leaves out is as released.
    parts = V41, {"num_hidden_layers": 40}, {key: said for key, said in V41.items() if key != "model_type"}
    for part in parts:
        assert from_hf_config({"model_type": "deepseek_v41", "text_config": part}).layers == released.layers


def test_layers_of_v41_read_the_pool_of_the_closest_source():
    spec = from_hf_config({"model_type": "deepseek_v41_text", "num_hidden_layers": 7, "head_dim": 64})
    ratios = [layer.entries and layer.entries.ratio for layer in spec.layers]
    assert ratios == [None, None, 2, 2, 2, 1, 1]
    assert [layer.entries and layer.entries.share for layer in spec.layers] == [None, None, None, 2, 2, None, 5]
    assert [layer.tail is not None for layer in spec.layers] == [False, False, True, False, False, False, False]
    assert {layer.window.format for layer in spec.layers} == {"bf16"}


REFUSED = [
    pytest.param({**V41, "kv_source_layer_ids": [2, 14]}, "config.compress_ratios", "1 of layer 20", id="V4.1: pool"),
    pytest.param({**V41, "kv_source_layer_ids": [1, 20]}, "config.kv_source_layer_ids[0]", "1", id="V4.1: a window"),
    pytest.param({**V41, "kv_source_layer_ids": [3, 20]}, "config.compress_ratios", "2 of layer 2", id="V4.1: before"),
    pytest.param({**V41, "compress_ratios": [0] * 39}, "config.compress_ratios", "39 layers", id="V4.1: 39 of 40"),
    pytest.param({**V41, "compress_ratios": [0] * 44}, "config.compress_ratios", "44 layers", id="V4.1: drafts"),
    pytest.param({**V41, "compress_ratios": [0] * 40 + [2]}, "config.compress_ratios[40]", "2", id="V4.1: a draft's"),
    pytest.param({**GPT_OSS, "layer_types": ["full_attention"] * 3}, "config.layer_types", "3 layers", id="3 of 4"),
    pytest.param({**LLAMA, "layer_types": "full_attention"}, "config.layer_types", "full_attention", id="no list"),
    pytest.param({**LLAMA, "num_attention_heads": 0}, "config.num_attention_heads", "0", id="no heads"),
    pytest.param({**LLAMA, "num_hidden_layers": "8"}, "config.num_hidden_layers", "'8'", id="text"),
    pytest.param({**LLAMA, "num_hidden_layers": 2.5}, "config.num_hidden_layers", "2.5", id="half a layer"),
    pytest.param({**LLAMA, "num_hidden_layers": True}, "config.num_hidden_layers", "True", id="a truth value"),
    pytest.param({**LLAMA, "num_attention_heads": 7}, "config.hidden_size", "64", id="not a multiple"),
    pytest.param({**LLAMA, "sliding_window": 16}, "config.sliding_window", "16", id="a window that llama ignores"),
    pytest.param(
        {**GPT_OSS, "use_bidirectional_attention": True}, "config.use_bidirectional_attention", "True",
        id="bidirectional"),
    pytest.param({"model_type": ["llama"]}, "config.model_type", "['llama']", id="a list for a type"),
    pytest.param({**V4, "compress_ratios": 4}, "config.compress_ratios", "4", id="V4: one ratio"),
    pytest.param({**V4, "compress_rates": {"a": 1}}, "config.compress_rates", "{'a': 1}", id="V4: unknown rates"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "where", "got"), REFUSED)
def test_a_wrong_field_is_named(file, where, got):
    with pytest.raises(kvcore.errors.SpecError) as caught:
        from_hf_config(file)
    assert caught.value.where == where
    assert got in str(caught.value)


WRONG = ("8", "", 2.5, float("nan"), 0, -1, True, [], [None], {}, {"a": 1}, object(), b"1", (1, "x"), None)
FILES = [
    {**LLAMA, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 4},
    {**GPT_OSS, "sliding_window": 16, "num_key_value_heads": 2},
    {**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
    {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0],
     "no_rope_layer_interval": 4},
    {"model_type": "exaone4", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
     "sliding_window": 16, "sliding_window_pattern": 4},
    {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32},
    V32,
    V4,
    V41,
    {**V4, "compress_ratios": None, "layer_types": ["sliding_attention"] * 3, "compress_rates": {}},
]  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file["model_type"])
def test_no_single_wrong_field_ends_in_an_untyped_error(file):
    refused = 0
    for name in file:
        for value in WRONG:
            try:
                from_hf_config({**file, name: value})
            except kvcore.errors.SpecError as error:
                refused += 1
                assert error.where  # noqa: PT017  (most of many are refused, not all)
        absent = {other: said for other, said in file.items() if other != name}
        try:
            from_hf_config(absent)
        except kvcore.errors.SpecError:
            refused += 1
    assert refused > 5 * len(file)


@pytest.mark.parametrize("formats", [{"key": "nope"}, {"key": 3}, {"rows": "bf16"}], ids=str)
def test_wrong_formats_are_typed(formats):
    with pytest.raises(kvcore.errors.SpecError):
        from_hf_config(LLAMA, formats=formats)


class Multimodal:
    """A configuration that keeps its text decoder's in a part, as those of ``transformers`` do."""

    model_type = "llava"

    def get_text_config(self, decoder: bool = False) -> SimpleNamespace:
        assert decoder
        return SimpleNamespace(**LLAMA)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Multimodal(), id="object"),
        pytest.param(SimpleNamespace(model_type="llava", text_config=SimpleNamespace(**LLAMA)), id="attributes"),
        pytest.param({"model_type": "llava", "text_config": LLAMA}, id="file"),
    ],
)
def test_of_a_multimodal_model_the_text_decoder_counts(config):
    assert from_hf_config(config) == from_hf_config(LLAMA)


def test_an_unknown_decoder_of_a_multimodal_file_is_named():
    with pytest.raises(kvcore.errors.SpecError, match="abacus") as caught:
        from_hf_config({"model_type": "llava", "text_config": {"model_type": "abacus"}})
    assert caught.value.where == "config.text_config.model_type"


def test_a_configuration_file_is_a_spec_by_name(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_spec(str(path), "SPEC") == from_hf_config(LLAMA)
    assert main(["plan", str(path), "--max-tokens", "1Ki", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 4
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": "8"}))
    with pytest.raises(kvcore.errors.SpecError, match="num_hidden_layers"):
        load_spec(str(path), "SPEC")
    path.write_text(json.dumps({"layers": 3}))
    with pytest.raises(kvcore.errors.SpecError, match="schema_version"):
        load_spec(str(path), "SPEC")
