"""The families of decoder models whose layers hold keys and values, one entry each: what a configuration leaves unsaid.

A published ``config.json`` says less than the model has: what equals the family's default is left out, and the kind of
each layer follows from a pattern. The defaults and patterns are those of the configuration classes of ``transformers``
5.24 (``models/*/configuration_*.py``), whose names the fields keep.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcore.spec.config_fields import Fields
from kvcore.spec.layer_schedules import (
    WINDOW,
    Family,
    alternating_below_layer,
    by_letters_or_period,
    chunked_with_rope,
    dbrx_heads,
    dory_restated,
    dory_runs,
    every,
    falcon_heads,
    from_layer_on,
    full,
    half_of_local_attention,
    hrm_runs,
    mimo_layers,
    mimo_window,
    multi_query,
    said,
    sliding_without_rope,
    ungrouped,
    windowed,
    without,
)

_GPT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
_GEMMA4 = Family(
    schedule=every(6, last=True),
    heads=8,
    key_heads=4,
    head_dim=256,
    whole=Family(
        schedule=said,
        head_dim=512,
        names={"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    ),
    shared=("num_kv_shared_layers", 0),
)

_DECODER = (("is_decoder", True, False), ("add_cross_attention", False, False))


def _encoder(heads: int) -> Family:
    """An encoder whose layers are told to be a decoder's."""
    return Family(schedule=full, heads=heads, key_heads=ungrouped, decoder=_DECODER)


def _seq2seq(layers: str = "decoder_layers", heads: str = "decoder_attention_heads", default: bool = True) -> Family:
    """The decoder of an encoder-decoder, without the encoder, whose sizes have the usual names."""

    def restated(fields: Fields) -> Fields:
        return fields.restated(
            {"num_hidden_layers": fields.integer(layers), "num_attention_heads": fields.integer(heads)}
        )

    decoder = ("is_encoder_decoder", False, default)
    names = {"hidden_size": "d_model"}
    return Family(schedule=full, key_heads=ungrouped, names=names, decoder=(decoder,), restated=restated)


FAMILIES: dict[str, Family] = {
    "afmoe": Family(schedule=every(4, name="global_attn_every_n_layers"), heads=16, head_dim=128),
    "apertus": Family(schedule=full, heads=32),
    "apertus1p5_text": Family(schedule=full, heads=32),
    "arcee": Family(schedule=full, heads=32),
    "aria_text": Family(schedule=full, heads=32),
    "bart": _seq2seq(),
    "beam": Family(schedule=every(6, last=True), heads=48, key_heads=8, head_dim=128),
    "bert": _encoder(12),
    "bert-generation": _encoder(16),
    "big_bird": _encoder(12),
    "bigbird_pegasus": _seq2seq(),
    "biogpt": Family(schedule=full, heads=16),
    "bitnet": Family(schedule=full, heads=20, key_heads=5),
    "blenderbot": _seq2seq(),
    "blenderbot-small": _seq2seq(),
    "bloom": Family(schedule=full, heads=8, names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}),
    "camembert": _encoder(12),
    "codegen": Family(schedule=full, heads=16, names=_GPT),
    "cohere": Family(schedule=full, heads=64),
    "cohere2": Family(schedule=every(4, name="sliding_window_pattern"), heads=64),
    "cohere2_moe": Family(schedule=said, heads=64, head_dim=128),
    "cohere_compass_text": Family(schedule=said, heads=64, head_dim=128),
    "cpmant": Family(schedule=full, heads=32, head_dim=128, names={"head_dim": "dim_head"}),
    "ctrl": Family(schedule=full, heads=16, names=_GPT),
    "cwm": Family(schedule=every(4, first=0), heads=48, key_heads=8, head_dim=128),
    "data2vec-text": _encoder(12),
    "dbrx": Family(
        schedule=full,
        heads=16,
        key_heads=dbrx_heads,
        names={"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"},
    ),
    "diffllama": Family(schedule=full, heads=32),
    "doge": Family(schedule=windowed(), heads=8),
    "dory": Family(schedule=every(4), heads=16, key_heads=4, head_dim=256, restated=dory_restated, runs=dory_runs),
    "dots1": Family(schedule=said, heads=32, key_heads=32),
    "electra": _encoder(4),
    "emu3_text_model": Family(schedule=full, heads=32, key_heads=8),
    "ernie": _encoder(12),
    "ernie4_5": Family(schedule=full, heads=16, key_heads=2, head_dim=128),
    "ernie4_5_moe": Family(schedule=full, heads=20, key_heads=4),
    "exaone": Family(schedule=full, heads=32),
    "exaone4": Family(schedule=by_letters_or_period, heads=32, key_heads=32),
    "exaone_moe": Family(schedule=said, heads=32, key_heads=32),
    "falcon": Family(schedule=full, heads=71, key_heads=falcon_heads),
    "flex_olmo": Family(schedule=full, heads=32),
    "flint": Family(schedule=said, heads=32, key_heads=4, head_dim=128),
    "gemma": Family(schedule=full, heads=16, key_heads=16, head_dim=256),
    "gemma2": Family(schedule=every(2), heads=8, key_heads=4, head_dim=256),
    "gemma3_text": Family(schedule=every(6, name="sliding_window_pattern"), heads=8, key_heads=4, head_dim=256),
    "gemma3n_text": Family(schedule=every(5), heads=8, key_heads=2, head_dim=256, shared=("num_kv_shared_layers", 15)),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "git": Family(schedule=full, heads=12, key_heads=ungrouped),
    "glm": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "glm4": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "glm4_moe": Family(schedule=full, heads=96, key_heads=8, rounds=True),
    "gpt2": Family(schedule=full, heads=12, names=_GPT),
    "gpt_bigcode": Family(schedule=full, heads=12, key_heads=multi_query, names=_GPT),
    "gpt_neo": Family(
        schedule=full, heads=16, names={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    ),
    "gpt_neox": Family(schedule=full, heads=64),
    "gpt_neox_japanese": Family(schedule=full, heads=32),
    "gpt_oss": Family(schedule=every(2), heads=64, key_heads=8, head_dim=64),
    "gptj": Family(schedule=full, heads=16, names=_GPT),
    "granite": Family(schedule=full, heads=32),
    "granite_swa": Family(schedule=every(4, first=0), heads=20, key_heads=4),
    "granitemoe": Family(schedule=full, heads=32),
    "granitemoe_swa": Family(schedule=every(4, first=0), heads=32),
    "granitemoeshared": Family(schedule=full, heads=32),
    "helium": Family(schedule=full, heads=20, key_heads=20, head_dim=128),
    "hrm_text": Family(schedule=full, heads=12, key_heads=ungrouped, head_dim=128, runs=hrm_runs),
    "hunyuan_v1_dense": Family(schedule=full, heads=32),
    "hunyuan_v1_moe": Family(schedule=full, heads=32),
    "hy_v3": Family(schedule=full, heads=64, key_heads=8, head_dim=128),
    "hyperclovax": Family(schedule=full, heads=32),
    "internlm3": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "iquestcoder": Family(schedule=full, heads=40, key_heads=8, head_dim=128),
    "jais2": Family(schedule=full, heads=26, head_dim=128),
    "jetmoe": Family(schedule=full, heads=32, key_heads=16, head_dim=128, names={"head_dim": "kv_channels"}),
    "kolibri1": Family(schedule=every(5), heads=48, key_heads=4, head_dim=128),
    "laguna": Family(schedule=said, heads=48, key_heads=8, head_dim=128),
    "llama": Family(schedule=full, heads=32),
    "llama4_text": Family(schedule=chunked_with_rope, heads=40, key_heads=8, head_dim=128),
    "marian": _seq2seq(),
    "mbart": _seq2seq(),
    "megatron-bert": _encoder(16),
    "mellum": Family(schedule=said, heads=32, key_heads=4, head_dim=128),
    "mimo_v2_flash": Family(
        schedule=mimo_layers,
        heads=64,
        key_heads=4,
        head_dim=192,
        value_dim=128,
        sliding_heads=2,
        window=mimo_window,
    ),
    "minimax_m2": Family(schedule=full, heads=48, key_heads=8, head_dim=128),
    "minimax_m3_vl_text": Family(
        schedule=without("sparse_attention_config", "an indexer over blocks of keys is not part of a spec"),
        heads=64,
        key_heads=4,
        head_dim=128,
    ),
    "ministral": Family(schedule=windowed(default=WINDOW), heads=32, key_heads=8),
    "ministral3": Family(schedule=windowed(), heads=32, key_heads=8, head_dim=128),
    "mistral": Family(schedule=windowed(default=WINDOW), heads=32, key_heads=8),
    "mixtral": Family(schedule=windowed(), heads=32, key_heads=8),
    "modernbert-decoder": Family(
        schedule=every(3, name="global_attn_every_n_layers", first=0),
        heads=12,
        key_heads=ungrouped,
        window=half_of_local_attention,
    ),
    "moshi": Family(schedule=windowed(default=3000), heads=32),
    "mpt": Family(
        schedule=full,
        heads=16,
        key_heads=ungrouped,
        names={"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"},
    ),
    "mvp": _seq2seq(),
    "nanochat": Family(schedule=full, heads=6, key_heads=6),
    "nemotron": Family(schedule=full, heads=48),
    "olmo": Family(schedule=full, heads=32),
    "olmo2": Family(schedule=full, heads=32),
    "olmo3": Family(schedule=every(4), heads=32),
    "olmoe": Family(schedule=full, heads=16),
    "opt": Family(schedule=full, heads=12),
    "pegasus": _seq2seq(),
    "persimmon": Family(schedule=full, heads=64, key_heads=ungrouped),
    "phi": Family(schedule=full, heads=32),
    "phi3": Family(schedule=windowed(), heads=32),
    "phi4_multimodal": Family(schedule=windowed(), heads=32, key_heads=8),
    "phimoe": Family(schedule=windowed(), heads=32, key_heads=8),
    "plbart": _seq2seq(),
    "prophetnet": _seq2seq("num_decoder_layers", "num_decoder_attention_heads"),
    "qwen2": Family(schedule=from_layer_on, heads=32, key_heads=32),
    "qwen2_moe": Family(schedule=alternating_below_layer, heads=16, key_heads=16),
    "qwen3": Family(schedule=from_layer_on, heads=32, key_heads=32, head_dim=128),
    "qwen3_moe": Family(schedule=windowed(default=WINDOW, switched=True), heads=32, key_heads=4),
    "rembert": _encoder(18),
    "roberta": _encoder(12),
    "roberta-prelayernorm": _encoder(12),
    "roc_bert": _encoder(12),
    "roformer": _encoder(12),
    "sarvam_moe": Family(schedule=full, heads=64, key_heads=4, head_dim=64),
    "seed_oss": Family(schedule=full, heads=80, key_heads=8, head_dim=128),
    "smollm3": Family(schedule=sliding_without_rope, heads=16, key_heads=4),
    "solar_open": Family(schedule=full, heads=64, key_heads=8, head_dim=128),
    "stablelm": Family(schedule=full, heads=32, key_heads=32),
    "starcoder2": Family(schedule=windowed(), heads=24, key_heads=2),
    "trocr": _seq2seq(default=False),
    "vaultgemma": Family(schedule=every(2), heads=8, key_heads=4, head_dim=256),
    "whisper": _seq2seq(),
    "xglm": Family(
        schedule=full,
        heads=16,
        names={"num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads", "hidden_size": "d_model"},
    ),
    "xlm-roberta": _encoder(12),
    "xlm-roberta-xl": _encoder(32),
    "xmod": _encoder(12),
}
"""Model types whose layers hold keys and values of full, sliding or chunked attention, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """What a model type with latent attention (MLA), one row a token for all heads, adds to its configuration.

    Attributes:
        indexed: with an indexer (DSA).
        indexers: (fields, number of layers) -> which layers have one of their own; None: all.
        sublayers: that attend, in what the configuration calls a layer.
        names: standard name -> what this family calls it.
    """

    indexed: bool = False
    indexers: Callable[[Fields, int], list[bool]] | None = None
    sublayers: int = 1
    names: dict[str, str] = field(default_factory=dict[str, str])


def _indexers(otherwise: Callable[[Fields, int], list[bool]]) -> Callable[[Fields, int], list[bool]]:
    """What ``indexer_types`` says: "full" where a layer has an indexer, "shared" where it takes what another picked."""

    def indexers(fields: Fields, count: int) -> list[bool]:
        types = fields.names_of("indexer_types", ("full", "shared"))
        found = otherwise(fields, count) if types is None else [kind == "full" for kind in types]
        if len(found) < count:
            fields.fail("indexer_types", f"{count} kinds or more")
        return found[:count]

    return indexers


def _fourth_after_the_first(fields: Fields, count: int) -> list[bool]:
    del fields
    return [layer == 0 or (layer - 1) % 4 == 0 for layer in range(count)]


def _glm_indexers(fields: Fields, count: int) -> list[bool]:
    pattern = fields.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - {"F", "S"}:
            fields.fail("index_topk_pattern", "letters F (an indexer) and S (what another layer picked)")
        return [letter == "F" for letter in pattern]
    step, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, least=0)
    return [max(layer - offset + 1, 0) % step == 0 for layer in range(count)]


LATENT: dict[str, Latent] = {
    "axk1": Latent(),
    "axk2": Latent(indexed=True),
    "deepseek_v2": Latent(),
    "deepseek_v3": Latent(),
    "deepseek_v32": Latent(indexed=True),
    "glm4_moe_lite": Latent(),
    "glm_moe_dsa": Latent(indexed=True, indexers=_indexers(_glm_indexers)),
    "hy_v4": Latent(indexed=True, indexers=_indexers(_fourth_after_the_first)),
    "longcat_flash": Latent(sublayers=2, names={"num_hidden_layers": "num_layers"}),
    "minicpm3": Latent(),
    "sarvam_mla": Latent(),
    "youtu": Latent(),
}
"""Model types with latent attention in every layer."""

_CROSS = "cross-attention: keys and values of an encoder's output, which grow with nothing"

MISSING: dict[str, str] = {
    **dict.fromkeys(("mllama_text_model", "musicgen_decoder", "musicgen_melody_decoder"), _CROSS),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), "four short convolutions in one layer"),
    "blt": "three models in one, with a cache each",
    "dots3_note_text": "layers that share an indexer, beside sliding ones of other heads",
    "minimax": "lightning attention, for which its model has a cache of its own",
    "openai-gpt": "a cache: the model takes none",
    "qwen4_exp_text": "an indexer of compressed keys beside recurrent layers",
    "recurrent_gemma": "a state that the model does not keep in its cache",
    "reformer": "buckets of a hash",
    "rwkv": "several states in one layer",
    "xlm": "a cache: the model takes none",
    "xlnet": "memories of earlier segments, which are no cache of tokens",
    "xlstm": "several states in one layer",
    "zaya": "values that follow from the token before, beside two convolutions",
}
"""Model type -> the part of its cache that no component stands for, where it is known."""
