"""The families of decoder models whose layers hold keys and values, one entry each: what a configuration leaves unsaid.

A published ``config.json`` says less than the model has: what equals the family's default is left out, and the kind of
each layer follows from a pattern. The defaults and patterns are those of the configuration classes of ``transformers``
5.24 (``models/*/configuration_*.py``), whose names the fields keep.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcore.errors import SpecError
from kvcore.spec.config_fields import Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)

WINDOW = 4096
"""``sliding_window`` of a sliding layer where the configuration does not say it, but for those of ``WINDOWS``."""

WINDOWS = {
    "afmoe": 1024,
    "beam": 512,
    "cwm": 8192,
    "flint": 513,
    "gemma3n_text": 512,
    "gemma4_text": 512,
    "gemma4_unified_text": 512,
    "gpt_oss": 128,
    "granite_swa": 128,
    "granitemoe_swa": 128,
    "kolibri1": 513,
}
CHUNK = 8192
"""``attention_chunk_size`` likewise."""

Schedule = Callable[[Fields, int], list[str]]
"""(fields, number of layers) -> each layer's kind, where the configuration has no ``layer_types``."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model type adds to its configuration.

    Attributes:
        schedule: the kinds of its layers.
        key_heads: ``num_key_value_heads`` where the configuration does not say it; None: as many as query heads.
        head_dim: likewise; None: ``hidden_size`` over the heads.
        heads: ``num_attention_heads`` likewise; None: it must be said.
        names: standard name -> what this family calls it.
        whole: the same for layers of full attention, where they have other heads than sliding ones.
        shared: name of the field that says how many of the last layers read earlier ones' keys, and its default.
    """

    schedule: Schedule
    key_heads: int | None = None
    head_dim: int | None = None
    heads: int | None = None
    names: dict[str, str] = field(default_factory=dict[str, str])
    whole: "Family | None" = None
    shared: tuple[str, int] | None = None


def full(fields: Fields, count: int) -> list[str]:
    """Every layer attends to everything; a window is nothing that such a model would look at."""
    for name in ("sliding_window", "attention_chunk_size"):
        fields.refuse(name, "nothing: layers of this model type attend to every position")
    return [FULL] * count


def said(fields: Fields, count: int) -> list[str]:
    """What nothing but ``layer_types`` says."""
    del count
    raise SpecError(got="nothing", where=fields.path("layer_types"), allowed="the kind of each layer")


def windowed(*, default: int | None = None, switched: bool = False) -> Schedule:
    """All layers have ``sliding_window``, or none; ``switched``: only if ``use_sliding_window`` says so."""

    def schedule(fields: Fields, count: int) -> list[str]:
        used = not switched or fields.flag("use_sliding_window", False)
        return [SLIDING if used and fields.size("sliding_window", default, least=0) else FULL] * count

    return schedule


def every(period: int, *, name: str | None = None, first: int = 1, last: bool = False) -> Schedule:
    """Every ``period``-th layer is full, the others slide.

    Args:
        period: from one full layer to the next.
        name: the field that may say another period.
        first: what is added to a layer's number: 0 where the first layer is full.
        last: the last layer is full in any case.
    """

    def schedule(fields: Fields, count: int) -> list[str]:
        step = period if name is None else fields.integer(name, period)
        kinds = [FULL if (layer + first) % step == 0 else SLIDING for layer in range(count)]
        return [*kinds[:-1], FULL] if last else kinds

    return schedule


def by_letters_or_period(fields: Fields, count: int) -> list[str]:
    """EXAONE 4: a period, or letters such as ``LLLG`` that repeat; without a window every layer is full."""
    if not fields.size("sliding_window", WINDOW, least=0):
        return [FULL] * count
    pattern = fields.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        return every(4, name="sliding_window_pattern")(fields, count)
    if not pattern or set(pattern) - {"L", "G"}:
        fields.fail("sliding_window_pattern", "a period, or letters L (sliding) and G (full)")
    letters = [pattern[layer % len(pattern)] for layer in range(count - 1)] + ["G"]
    return [FULL if letter == "G" else SLIDING for letter in letters]


def from_layer_on(fields: Fields, count: int) -> list[str]:
    """Qwen2 and Qwen3: layers from ``max_window_layers`` on slide, if the window is switched on at all."""
    if not fields.flag("use_sliding_window", False) or not fields.size("sliding_window", WINDOW, least=0):
        return [FULL] * count
    first = fields.integer("max_window_layers", 28, least=0)
    return [SLIDING if layer >= first else FULL for layer in range(count)]


def alternating_below_layer(fields: Fields, count: int) -> list[str]:
    """Qwen2-MoE: every other layer below ``max_window_layers`` slides, if the window is switched on at all."""
    if not fields.flag("use_sliding_window", False):
        return [FULL] * count
    end = fields.integer("max_window_layers", 28, least=0)
    return [SLIDING if layer % 2 == 0 and layer < end else FULL for layer in range(count)]


def chunked_with_rope(fields: Fields, count: int) -> list[str]:
    """Llama 4: layers with RoPE see their chunk, those without see everything."""
    if not fields.size("attention_chunk_size", CHUNK, least=0):
        return [FULL] * count
    return [CHUNKED if rope else FULL for rope in _has_rope(fields, count)]


def sliding_without_rope(fields: Fields, count: int) -> list[str]:
    """SmolLM 3: layers without RoPE slide, if the window is switched on at all."""
    if not fields.flag("use_sliding_window", False) or not fields.size("sliding_window", None, least=0):
        return [FULL] * count
    return [FULL if rope else SLIDING for rope in _has_rope(fields, count)]


def _has_rope(fields: Fields, count: int) -> list[bool]:
    said = fields.flags("no_rope_layers", count)  # 1 means that the layer has it
    if said:
        return said
    interval = fields.integer("no_rope_layer_interval", 4)
    return [(layer + 1) % interval != 0 for layer in range(count)]


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

FAMILIES: dict[str, Family] = {
    "afmoe": Family(schedule=every(4, name="global_attn_every_n_layers"), heads=16, head_dim=128),
    "apertus": Family(schedule=full, heads=32),
    "apertus1p5_text": Family(schedule=full, heads=32),
    "arcee": Family(schedule=full, heads=32),
    "aria_text": Family(schedule=full, heads=32),
    "beam": Family(schedule=every(6, last=True), heads=48, key_heads=8, head_dim=128),
    "biogpt": Family(schedule=full, heads=16),
    "bitnet": Family(schedule=full, heads=20, key_heads=5),
    "bloom": Family(schedule=full, heads=8, names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}),
    "codegen": Family(schedule=full, heads=16, names=_GPT),
    "cohere": Family(schedule=full, heads=64),
    "cohere2": Family(schedule=every(4, name="sliding_window_pattern"), heads=64),
    "cohere2_moe": Family(schedule=said, heads=64, head_dim=128),
    "cohere_compass_text": Family(schedule=said, heads=64, head_dim=128),
    "cpmant": Family(schedule=full, heads=32, head_dim=128, names={"head_dim": "dim_head"}),
    "ctrl": Family(schedule=full, heads=16, names=_GPT),
    "cwm": Family(schedule=every(4, first=0), heads=48, key_heads=8, head_dim=128),
    "diffllama": Family(schedule=full, heads=32),
    "doge": Family(schedule=windowed(), heads=8),
    "dots1": Family(schedule=said, heads=32, key_heads=32),
    "emu3_text_model": Family(schedule=full, heads=32, key_heads=8),
    "ernie4_5": Family(schedule=full, heads=16, key_heads=2, head_dim=128),
    "ernie4_5_moe": Family(schedule=full, heads=20, key_heads=4),
    "exaone": Family(schedule=full, heads=32),
    "exaone4": Family(schedule=by_letters_or_period, heads=32, key_heads=32),
    "exaone_moe": Family(schedule=said, heads=32, key_heads=32),
    "flex_olmo": Family(schedule=full, heads=32),
    "flint": Family(schedule=said, heads=32, key_heads=4, head_dim=128),
    "gemma": Family(schedule=full, heads=16, key_heads=16, head_dim=256),
    "gemma2": Family(schedule=every(2), heads=8, key_heads=4, head_dim=256),
    "gemma3_text": Family(schedule=every(6, name="sliding_window_pattern"), heads=8, key_heads=4, head_dim=256),
    "gemma3n_text": Family(schedule=every(5), heads=8, key_heads=2, head_dim=256, shared=("num_kv_shared_layers", 15)),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "glm4": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "glm4_moe": Family(schedule=full, heads=96, key_heads=8),
    "gpt2": Family(schedule=full, heads=12, names=_GPT),
    "gpt_bigcode": Family(schedule=full, heads=12, names=_GPT),
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
    "mellum": Family(schedule=said, heads=32, key_heads=4, head_dim=128),
    "minimax_m2": Family(schedule=full, heads=48, key_heads=8, head_dim=128),
    "ministral": Family(schedule=windowed(default=WINDOW), heads=32, key_heads=8),
    "ministral3": Family(schedule=windowed(), heads=32, key_heads=8, head_dim=128),
    "mistral": Family(schedule=windowed(default=WINDOW), heads=32, key_heads=8),
    "mixtral": Family(schedule=windowed(), heads=32, key_heads=8),
    "nanochat": Family(schedule=full, heads=6, key_heads=6),
    "nemotron": Family(schedule=full, heads=48),
    "olmo": Family(schedule=full, heads=32),
    "olmo2": Family(schedule=full, heads=32),
    "olmo3": Family(schedule=every(4), heads=32),
    "olmoe": Family(schedule=full, heads=16),
    "opt": Family(schedule=full, heads=12),
    "persimmon": Family(schedule=full, heads=64),
    "phi": Family(schedule=full, heads=32),
    "phi3": Family(schedule=windowed(), heads=32),
    "phi4_multimodal": Family(schedule=windowed(), heads=32, key_heads=8),
    "phimoe": Family(schedule=windowed(), heads=32, key_heads=8),
    "qwen2": Family(schedule=from_layer_on, heads=32, key_heads=32),
    "qwen2_moe": Family(schedule=alternating_below_layer, heads=16, key_heads=16),
    "qwen3": Family(schedule=from_layer_on, heads=32, key_heads=32, head_dim=128),
    "qwen3_moe": Family(schedule=windowed(default=WINDOW, switched=True), heads=32, key_heads=4),
    "sarvam_moe": Family(schedule=full, heads=64, key_heads=4, head_dim=64),
    "seed_oss": Family(schedule=full, heads=80, key_heads=8, head_dim=128),
    "smollm3": Family(schedule=sliding_without_rope, heads=16, key_heads=4),
    "solar_open": Family(schedule=full, heads=64, key_heads=8, head_dim=128),
    "stablelm": Family(schedule=full, heads=32, key_heads=32),
    "starcoder2": Family(schedule=windowed(), heads=24, key_heads=2),
    "vaultgemma": Family(schedule=every(2), heads=8, key_heads=4, head_dim=256),
    "xglm": Family(
        schedule=full,
        heads=16,
        names={"num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads", "hidden_size": "d_model"},
    ),
}
"""Model types whose layers hold keys and values of full, sliding or chunked attention, and nothing else."""

_ENCODER = "keys and values of an encoder's layers: nothing is generated with them token by token"
_CROSS = "cross-attention: keys and values of an encoder's output, which grow with nothing"

MISSING: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta"),
            *("xlm-roberta-xl", "xlnet", "xmod"),
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "git", "marian", "mbart"),
            *("mllama_text_model", "musicgen_decoder", "musicgen_melody_decoder", "mvp", "pegasus", "plbart"),
            *("prophetnet", "trocr", "whisper"),
        ),
        _CROSS,
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), "four short convolutions in one layer"),
    "blt": "three models in one, with a cache each",
    "dbrx": "heads that a part of the configuration says (attn_config)",
    "dory": "layers that are listed twice, with and without attention",
    "dots3_note_text": "layers that share an indexer, beside sliding ones of other heads",
    "falcon": "key heads that follow from multi_query and new_decoder_architecture",
    "hrm_text": "layers that are run several times a token",
    "hy_v4": "layers that share an indexer",
    "longcat_flash": "two latent attentions in one layer",
    "mimo_v2_flash": "values of another width, and other heads, in sliding layers",
    "minimax": "lightning attention, for which its model has a cache of its own",
    "minimax_m3_vl_text": "an indexer over blocks of keys",
    "modernbert-decoder": "a window that is said in halves (local_attention)",
    "moshi": "a depth decoder beside the main one",
    "mpt": "biases by position (ALiBi) that reach beyond what is stored",
    "openai-gpt": "a cache: the model takes none",
    "qwen4_exp_text": "an indexer of compressed keys beside recurrent layers",
    "recurrent_gemma": "a state that the model does not keep in its cache",
    "reformer": "buckets of a hash",
    "rwkv": "several states in one layer",
    "xlstm": "several states in one layer",
    "zamba": "states in several groups of heads",
    "zaya": "values that follow from the token before, beside two convolutions",
}
"""Model type -> the part of its cache that no component stands for, where it is known."""
