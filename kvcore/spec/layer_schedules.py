"""What a decoder's layers are: kinds from patterns, and key heads and windows that follow from other fields.

A published ``config.json`` says less than the model has: what equals the family's default is left out, and the kind of
each layer follows from a pattern. The patterns are those of the configuration classes of ``transformers`` 5.24
(``models/*/configuration_*.py``), whose names the fields keep.
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


KeyHeads = Callable[[Fields, int], int]
"""(fields, query heads) -> key heads, where a family says them in its own way."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model type adds to its configuration.

    Attributes:
        schedule: the kinds of its layers.
        key_heads: ``num_key_value_heads`` where the configuration does not say it, or what follows from other fields;
            None: as many as query heads.
        head_dim: likewise; None: ``hidden_size`` over the heads, in whole numbers unless it ``rounds``.
        heads: ``num_attention_heads`` likewise; None: it must be said.
        value_dim: ``v_head_dim`` likewise, where values have a width of their own; None: as wide as keys.
        sliding_heads: times ``num_key_value_heads`` in sliding layers.
        window: of sliding layers, where it is not ``sliding_window``.
        names: standard name -> what this family calls it, which goes before it.
        whole: the same for layers of full attention, where they have other heads than sliding ones.
        shared: name of the field that says how many of the last layers read earlier ones' keys, and its default.
        decoder: what a configuration says if its layers are a decoder's that nothing else feeds: fields, values, and
            what is meant unless said.
        restated: the same configuration in the words of others.
        runs: (fields, kinds) -> those of everything that is kept, where layers are run several times a token.
        rounds: see ``head_dim``.
    """

    schedule: Schedule
    key_heads: int | KeyHeads | None = None
    head_dim: int | Callable[[Fields], int] | None = None
    heads: int | None = None
    value_dim: int | None = None
    sliding_heads: int = 1
    window: Callable[[Fields], int] | None = None
    names: dict[str, str] = field(default_factory=dict[str, str])
    whole: "Family | None" = None
    shared: tuple[str, int] | None = None
    decoder: tuple[tuple[str, bool, bool], ...] = ()
    restated: Callable[[Fields], Fields] | None = None
    runs: Callable[[Fields, list[str]], list[str]] | None = None
    rounds: bool = False


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


def without(name: str, part: str, schedule: Schedule = full) -> Schedule:
    """Another schedule, of configurations that do not ask for a part which no component stands for."""

    def checked(fields: Fields, count: int) -> list[str]:
        fields.refuse(name, f"nothing: {part}")
        return schedule(fields, count)

    return checked


def mimo_layers(fields: Fields, count: int) -> list[str]:
    """MiMo-V2: the first layer and every sixth are full; published files list it, 1 where a layer slides."""
    listed = fields.flags("hybrid_layer_pattern", count)
    if listed:
        return [SLIDING if slides else FULL for slides in listed]
    return [FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(count)]


def mimo_window(fields: Fields) -> int:
    """MiMo-V2: ``sliding_window_size`` leaves the token itself out."""
    size = fields.size("sliding_window_size", None)
    return fields.integer("sliding_window", 129) if size is None else size + 1


def half_of_local_attention(fields: Fields) -> int:
    """ModernBERT: both sides of a token together, where the window itself is not said."""
    said = fields.size("sliding_window", None)
    return said or fields.integer("local_attention", 128, least=2) // 2


def multi_query(fields: Fields, heads: int) -> int:
    """GPT-BigCode: one key head, unless it is switched off."""
    return 1 if fields.flag("multi_query", True) else heads


def falcon_heads(fields: Fields, heads: int) -> int:
    """Falcon: keys are repeated for every query head in the new architecture; otherwise one, or as many as said."""
    if fields.flag("new_decoder_architecture", False):
        return heads
    return 1 if fields.flag("multi_query", True) else fields.size("num_kv_heads", None) or heads


def dbrx_heads(fields: Fields, heads: int) -> int:
    """DBRX: said in a part of the configuration."""
    del heads
    found = fields.get("attn_config")
    return 1 if found is None else Fields(found, fields.path("attn_config")).integer("kv_n_heads", 1)


def ungrouped(fields: Fields, heads: int) -> int:
    """As many as query heads, whatever a configuration calls ``num_key_value_heads``."""
    del fields
    return heads


def hrm_runs(fields: Fields, kinds: list[str]) -> list[str]:
    """HRM: stacks are run in cycles; once that is worked out, the number of layers in a stack is said beside it."""
    if fields.get("num_layers_per_stack") is not None:
        return kinds
    return kinds * (fields.integer("H_cycles", 2) * (fields.integer("L_cycles", 3) + 1))


def dory_runs(fields: Fields, kinds: list[str]) -> list[str]:
    """Dory: layers in the middle are run several times, and every run but the first is kept behind all layers."""
    if fields.get("recurrent_kv_cache_mode", "per_loop") == "last_loop":
        return kinds
    first, last = fields.integer("n_input_layers", 16, least=0), fields.integer("n_output_layers", 16, least=0)
    count = fields.size("n_recurrent_layers", None, least=0) or max(len(kinds) - first - last, 0)
    return kinds + kinds[first : first + count] * (fields.integer("n_recurrent_loops", 2) - 1)


def dory_restated(fields: Fields) -> Fields:
    """Dory: files list attention and MLP as layers of their own."""
    types = fields.names_of("layer_types", (*KINDS, "mlp"))
    if types is None or "mlp" not in types:
        return fields
    counts = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    halves = {name: fields.integer(name) // 2 for name in counts if fields.get(name) is not None}
    return fields.restated({"layer_types": types[::2], **halves})
