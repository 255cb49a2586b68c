"""The families of decoder models whose layers hold keys and values, one entry each: what a configuration leaves unsaid.

A published ``config.json`` says less than the model has: what equals the family's default is left out, and the kind of
each layer follows from a pattern. The defaults and patterns are those of the configuration classes of ``transformers``
5.24 (``models/*/configuration_*.py``), whose names the fields keep.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcore.spec.config_fields import Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)

WINDOW = 4096
"""``sliding_window`` of a sliding layer where the configuration does not say it, but for those of ``WINDOWS``."""

WINDOWS = {"gpt_oss": 128}
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
    """

    schedule: Schedule
    key_heads: int | None = None
    head_dim: int | None = None
    heads: int | None = None
    names: dict[str, str] = field(default_factory=dict[str, str])


def full(fields: Fields, count: int) -> list[str]:
    """Every layer attends to everything; a window is nothing that such a model would look at."""
    for name in ("sliding_window", "attention_chunk_size"):
        fields.refuse(name, "nothing: layers of this model type attend to every position")
    return [FULL] * count


def windowed(*, default: int | None = None, switched: bool = False) -> Schedule:
    """All layers have ``sliding_window``, or none; ``switched``: only if ``use_sliding_window`` says so."""

    def schedule(fields: Fields, count: int) -> list[str]:
        used = not switched or fields.flag("use_sliding_window", False)
        return [SLIDING if used and fields.size("sliding_window", default, least=0) else FULL] * count

    return schedule


def every(period: int, *, name: str | None = None) -> Schedule:
    """Every ``period``-th layer is full, the others slide; ``name``: the field that may say another period."""

    def schedule(fields: Fields, count: int) -> list[str]:
        step = period if name is None else fields.integer(name, period)
        return [FULL if (layer + 1) % step == 0 else SLIDING for layer in range(count)]

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


FAMILIES: dict[str, Family] = {
    "cohere": Family(schedule=full, heads=64),
    "cohere2": Family(schedule=every(4, name="sliding_window_pattern"), heads=64),
    "ernie4_5": Family(schedule=full, heads=16, key_heads=2, head_dim=128),
    "exaone4": Family(schedule=by_letters_or_period, heads=32, key_heads=32),
    "gemma": Family(schedule=full, heads=16, key_heads=16, head_dim=256),
    "gemma2": Family(schedule=every(2), heads=8, key_heads=4, head_dim=256),
    "gemma3_text": Family(schedule=every(6, name="sliding_window_pattern"), heads=8, key_heads=4, head_dim=256),
    "glm": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "glm4": Family(schedule=full, heads=32, key_heads=2, head_dim=128),
    "gpt2": Family(
        schedule=full,
        heads=12,
        names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"},
    ),
    "gpt_neox": Family(schedule=full, heads=64),
    "gpt_oss": Family(schedule=every(2), heads=64, key_heads=8, head_dim=64),
    "granite": Family(schedule=full, heads=32),
    "helium": Family(schedule=full, heads=20, key_heads=20, head_dim=128),
    "llama": Family(schedule=full, heads=32),
    "llama4_text": Family(schedule=chunked_with_rope, heads=40, key_heads=8, head_dim=128),
    "ministral": Family(schedule=windowed(default=WINDOW), heads=32, key_heads=8),
    "mistral": Family(schedule=windowed(default=WINDOW), heads=32, key_heads=8),
    "mixtral": Family(schedule=windowed(), heads=32, key_heads=8),
    "nemotron": Family(schedule=full, heads=48),
    "olmo": Family(schedule=full, heads=32),
    "olmo2": Family(schedule=full, heads=32),
    "olmo3": Family(schedule=every(4), heads=32),
    "olmoe": Family(schedule=full, heads=16),
    "phi": Family(schedule=full, heads=32),
    "phi3": Family(schedule=windowed(), heads=32),
    "qwen2": Family(schedule=from_layer_on, heads=32, key_heads=32),
    "qwen2_moe": Family(schedule=alternating_below_layer, heads=16, key_heads=16),
    "qwen3": Family(schedule=from_layer_on, heads=32, key_heads=32, head_dim=128),
    "qwen3_moe": Family(schedule=windowed(default=WINDOW, switched=True), heads=32, key_heads=4),
    "seed_oss": Family(schedule=full, heads=80, key_heads=8, head_dim=128),
    "smollm3": Family(schedule=sliding_without_rope, heads=16, key_heads=4),
    "stablelm": Family(schedule=full, heads=32, key_heads=32),
    "starcoder2": Family(schedule=windowed(), heads=24, key_heads=2),
}
"""Model types whose layers hold keys and values of full, sliding or chunked attention, and nothing else."""
