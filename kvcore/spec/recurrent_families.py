"""The families of models with recurrent layers, one entry each: what their layers carry on, beside what they attend to.

Names of fields, defaults and patterns are those of the configuration classes of ``transformers`` 5.24, as in
``kvcore.spec.families``. States are fp32 and convolutions' inputs bf16 unless formats say otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvcore.spec.config_fields import Fields
from kvcore.spec.layer_schedules import FULL, SLIDING, Family, Schedule, full, said

LINEAR, CONV, HYBRID, HYBRID_SLIDING = "linear_attention", "conv", "hybrid", "hybrid_sliding"
NOTHING = ("moe", "mlp")
"""Kinds of layers that keep nothing."""

LEGACY = {"mamba": LINEAR, "attention": FULL, "recurrent": LINEAR}
"""What published files call kinds of layers otherwise."""

ATTENTION_OF = {FULL: FULL, SLIDING: SLIDING, HYBRID: FULL, HYBRID_SLIDING: SLIDING}
"""Kind of a layer -> that of its attention."""

KINDS = (FULL, SLIDING, LINEAR, CONV, HYBRID, HYBRID_SLIDING, *NOTHING, *LEGACY)


class Carried(NamedTuple):
    """What a recurrent layer carries on.

    Attributes:
        state: (heads, key dim, value dim), the last of which may be None; None without a state.
        channels: of the short convolution's inputs.
        width: positions that it covers.
    """

    state: tuple[int, int, int | None] | None
    channels: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """What a model type with recurrent layers adds to its configuration.

    Attributes:
        schedule: the kinds of its layers, where ``layer_types`` does not say them.
        carried: what a recurrent layer carries on.
        attention: of its other layers; None where there are none.
        latent: they keep one latent row a token.
        types: what the configuration calls the kinds of its layers; "" where nothing says them.
    """

    schedule: Schedule
    carried: Callable[[Fields], Carried]
    attention: Family | None = None
    latent: bool = False
    types: str = "layer_types"


def delta_net(**defaults: int) -> Callable[[Fields], Carried]:
    """Gated delta nets: a state of key by value dims for every value head, one convolution over q, k and v."""

    def carried(fields: Fields) -> Carried:
        heads = fields.size("linear_num_key_heads", defaults.get("key_heads"))
        key_heads = heads or fields.integer("num_attention_heads")
        value_heads = fields.size("linear_num_value_heads", defaults.get("value_heads")) or key_heads
        key_dim = fields.size("linear_key_head_dim", defaults.get("key_dim"))
        key_dim = key_dim or int(0.75 * fields.integer("hidden_size") / key_heads)
        value_dim = fields.size("linear_value_head_dim", defaults.get("value_dim")) or 2 * key_dim
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return Carried((value_heads, key_dim, value_dim), channels, fields.integer("linear_conv_kernel_dim", 4))

    return carried


def kimi_delta(fields: Fields) -> Carried:
    """Kimi delta attention: square states, one convolution for each of q, k and v; published in a part of its own."""
    found = fields.get("linear_attn_config")
    part = fields if found is None else Fields(found, fields.path("linear_attn_config"))
    of = {"heads": "num_heads", "dim": "head_dim", "width": "short_conv_kernel_size"}
    if found is None:
        of = {"heads": "linear_num_heads", "dim": "linear_head_dim", "width": "linear_conv_kernel_dim"}
    heads, dim, width = part.integer(of["heads"], 32), part.integer(of["dim"], 128), part.integer(of["width"], 4)
    return Carried((heads, dim, dim), 3 * heads * dim, width)


def bailing_delta(fields: Fields) -> Carried:
    """The same under the names of attention; once a configuration is read, ``head_dim`` is the rotary part's width."""
    heads, dim = fields.integer("num_attention_heads", 32), fields.size("linear_head_dim", None)
    dim = dim or fields.integer("head_dim", 128)
    return Carried((heads, dim, dim), 3 * heads * dim, fields.integer("short_conv_kernel_size", 4))


def mamba(
    *, state: str = "state_size", width: str = "conv_kernel", expand: str = "expand", inner: str = ""
) -> Callable[[Fields], Carried]:
    """Mamba: every channel has a state of its own; ``inner``: the field that may say how many there are."""

    def carried(fields: Fields) -> Carried:
        channels = fields.size(inner, None) if inner else None
        channels = channels or fields.integer(expand, 2) * fields.integer("hidden_size")
        return Carried((channels, fields.integer(state, 16), None), channels, fields.integer(width, 4))

    return carried


def mamba2(
    *, heads: str, dim: str, groups: str, state: str, width: str, inner: str = "", defaults: tuple[int, ...]
) -> Callable[[Fields], Carried]:
    """Mamba-2: a state of head by state dims for every head; the convolution runs over x, B and C.

    ``defaults``: heads, dim (0: ``mamba_expand`` times the hidden size over the heads), groups, state.
    """

    def carried(fields: Fields) -> Carried:
        count = fields.integer(heads, defaults[0])
        said = fields.get(dim, defaults[1])
        size = 0 if said in ("auto", 0, None) or not dim else fields.integer(dim, defaults[1])
        if not size:
            whole = fields.size(inner, None) if inner else None
            whole = whole or fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
            size = whole // count
        states = fields.integer(state, defaults[3])
        channels = count * size + 2 * fields.integer(groups, defaults[2]) * states
        return Carried((count, size, states), channels, fields.integer(width, 4))

    return carried


def short_conv(width: int) -> Callable[[Fields], Carried]:
    """LFM2: a gated short convolution, and no state."""

    def carried(fields: Fields) -> Carried:
        return Carried(None, fields.integer("hidden_size"), fields.integer("conv_L_cache", width))

    return carried


def every(kind: str) -> Schedule:
    """All layers are of one kind."""

    def schedule(fields: Fields, count: int) -> list[str]:
        del fields
        return [kind] * count

    return schedule


def full_every(period: int, name: str) -> Schedule:
    """Every ``period``-th layer attends, the others are recurrent; ``name``: the field that may say another period."""

    def schedule(fields: Fields, count: int) -> list[str]:
        step = fields.integer(name, period)
        return [LINEAR if (layer + 1) % step else FULL for layer in range(count)]

    return schedule


def jamba_layers(fields: Fields, count: int) -> list[str]:
    """One layer of every period attends."""
    period, offset = fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4, least=0)
    return [FULL if layer % period == offset else LINEAR for layer in range(count)]


def zamba_layers(fields: Fields, count: int) -> list[str]:
    """The third layer attends as well, and from the fourth on one of every period."""
    period, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, least=0)
    later = [HYBRID if layer % period == offset else LINEAR for layer in range(max(count - 3, 0))]
    return [LINEAR, LINEAR, HYBRID, *later][:count]


def zamba_state(fields: Fields) -> Carried:
    """Zamba: Mamba's channels in groups; nothing but x goes through the convolution."""
    channels, heads = (
        fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        fields.integer("n_mamba_heads", 2),
    )
    state = heads, channels // heads, fields.integer("mamba_d_state", 16)
    return Carried(state, channels, fields.integer("mamba_d_conv", 4))


def zamba_head(heads: int) -> Callable[[Fields], int]:
    """Zamba: the shared block attends to what is twice as wide as a layer."""

    def head_dim(fields: Fields) -> int:
        return 2 * fields.integer("hidden_size") // fields.integer("num_attention_heads", heads)

    return head_dim


def bamba_layers(fields: Fields, count: int) -> list[str]:
    """Those that are listed attend."""
    attend = fields.integers("attn_layer_indices") or []
    return [FULL if layer in attend else LINEAR for layer in range(count)]


def lfm2_layers(fields: Fields, count: int) -> list[str]:
    """Those that are listed attend; without a list all do."""
    attend = fields.integers("full_attn_idxs")
    return [FULL if attend is None or layer in attend else CONV for layer in range(count)]


def kimi_layers(fields: Fields, count: int) -> list[str]:
    """Those that the part on linear attention lists, from 1 on."""
    found = fields.get("linear_attn_config")
    if found is None:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    attend = Fields(found, fields.path("linear_attn_config")).integers("full_attn_layers") or []
    return [FULL if layer + 1 in attend else LINEAR for layer in range(count)]


def nemotron_layers(fields: Fields, count: int) -> list[str]:
    """A letter for each layer."""
    letters = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) < count or set(pattern) - set(letters):
        fields.fail("hybrid_override_pattern", f"{count} letters M (Mamba-2), * (attention), - (MLP) or E (experts)")
    return [letters[letter] for letter in pattern[:count]]


def kinds_of(family: Recurrent, fields: Fields) -> list[str]:
    """Each layer's kind, in the names of transformers."""
    types = fields.names_of(family.types, KINDS) if family.types else None
    count = fields.layers(None if types is None else len(types))
    if types is None:
        return family.schedule(fields, count)
    if len(types) < count:
        fields.fail(family.types, f"{count} kinds or more")
    return [LEGACY.get(kind, kind) for kind in types[:count]]


_BAMBA = mamba2(
    heads="mamba_n_heads", dim="mamba_d_head", groups="mamba_n_groups", state="mamba_d_state", width="mamba_d_conv",
    defaults=(128, 0, 1, 256),
)  # fmt: skip
_QWEN = delta_net(key_heads=16, value_heads=32, key_dim=128, value_dim=128)

RECURRENT: dict[str, Recurrent] = {
    "bailing_hybrid": Recurrent(schedule=full_every(6, "layer_group_size"), carried=bailing_delta, latent=True),
    "bamba": Recurrent(
        schedule=bamba_layers, carried=_BAMBA, types="", attention=Family(schedule=full, heads=32, key_heads=8)
    ),
    "falcon_h1": Recurrent(
        schedule=every(HYBRID),
        carried=mamba2(
            heads="mamba_n_heads",
            dim="mamba_d_head",
            groups="mamba_n_groups",
            state="mamba_d_state",
            width="mamba_d_conv",
            inner="mamba_d_ssm",
            defaults=(128, 0, 1, 256),
        ),
        types="",
        attention=Family(schedule=full, heads=32, key_heads=8),
    ),
    "falcon_mamba": Recurrent(schedule=every(LINEAR), carried=mamba(inner="intermediate_size"), types=""),
    "granitemoehybrid": Recurrent(
        schedule=every(LINEAR), carried=_BAMBA, attention=Family(schedule=full, heads=32, key_heads=None)
    ),
    "jamba": Recurrent(
        schedule=jamba_layers,
        carried=mamba(state="mamba_d_state", width="mamba_d_conv", expand="mamba_expand"),
        types="",
        attention=Family(schedule=full, heads=32, key_heads=8),
    ),
    "kimi_linear": Recurrent(schedule=kimi_layers, carried=kimi_delta, latent=True),
    "lara_mini": Recurrent(schedule=said, carried=_QWEN, attention=Family(schedule=said, heads=16, key_heads=4)),
    "lfm2": Recurrent(
        schedule=lfm2_layers, carried=short_conv(3), attention=Family(schedule=full, heads=32, key_heads=8)
    ),
    "lfm2_moe": Recurrent(schedule=said, carried=short_conv(3), attention=Family(schedule=full, heads=32, key_heads=8)),
    "lfm3": Recurrent(
        schedule=said, carried=short_conv(7), attention=Family(schedule=said, heads=16, key_heads=4, head_dim=128)
    ),
    "mamba": Recurrent(schedule=every(LINEAR), carried=mamba(inner="intermediate_size"), types=""),
    "mamba2": Recurrent(
        schedule=every(LINEAR),
        carried=mamba2(
            heads="num_heads",
            dim="head_dim",
            groups="n_groups",
            state="state_size",
            width="conv_kernel",
            defaults=(128, 64, 8, 128),
        ),
        types="",
    ),
    "nemotron_h": Recurrent(
        schedule=nemotron_layers,
        carried=mamba2(
            heads="mamba_num_heads",
            dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            width="conv_kernel",
            defaults=(128, 64, 8, 128),
        ),
        types="layers_block_type",
        attention=Family(schedule=full, heads=32, key_heads=8, head_dim=128),
    ),
    "olmo_hybrid": Recurrent(schedule=said, carried=delta_net(), attention=Family(schedule=full, heads=30)),
    "qwen3_5_moe_text": Recurrent(
        schedule=full_every(4, "full_attention_interval"),
        carried=_QWEN,
        attention=Family(schedule=full, heads=16, key_heads=2, head_dim=256),
    ),
    "qwen3_5_text": Recurrent(
        schedule=full_every(4, "full_attention_interval"),
        carried=_QWEN,
        attention=Family(schedule=full, heads=16, key_heads=4, head_dim=256),
    ),
    "qwen3_next": Recurrent(
        schedule=full_every(4, "full_attention_interval"),
        carried=_QWEN,
        attention=Family(schedule=full, heads=16, key_heads=2, head_dim=256),
    ),
    "zamba": Recurrent(
        schedule=zamba_layers,
        carried=zamba_state,
        types="layers_block_type",
        attention=Family(
            schedule=full, heads=16, key_heads=16, head_dim=zamba_head(16), names={"head_dim": "attention_head_dim"}
        ),
    ),
    "zamba2": Recurrent(
        schedule=said,
        carried=mamba2(
            heads="n_mamba_heads",
            dim="",
            groups="mamba_ngroups",
            state="mamba_d_state",
            width="mamba_d_conv",
            defaults=(8, 0, 1, 64),
        ),
        types="layers_block_type",
        attention=Family(schedule=full, heads=32, head_dim=zamba_head(32), names={"head_dim": "attention_head_dim"}),
    ),
}
"""Model types with recurrent layers."""
