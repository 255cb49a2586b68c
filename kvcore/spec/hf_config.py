"""Specs from ``transformers`` configurations: DeepSeek-V4, latent attention (V2, V3, V3.2) and classic decoders.

Only attributes are read, so any object with the same names will do and ``transformers`` need not be installed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.errors import SpecError
from kvcore.spec.components import KV, Entries, IndexKeys
from kvcore.spec.formats import FORMATS
from kvcore.spec.model import CacheSpec, LayerSpec
from kvcore.spec.presets import V4_FORMATS, v4_layer

CLASSIC = frozenset(
    (
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "helium",
        "llama",
        "llama4_text",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    )
)
"""Model types whose layers hold keys and values of full, sliding or chunked attention, and nothing else."""

LATENT = {"deepseek_v2": False, "deepseek_v3": False, "deepseek_v32": True}
"""Model types with latent attention (MLA), one row a token for all heads; True: with an indexer (DSA)."""

V4_KINDS = {
    "sliding_attention": None,
    "compressed_sparse_attention": True,
    "heavily_compressed_attention": False,
}
"""DeepSeek-V4's layer types: None is the window alone, True is CSA (overlapping windows), False is HCA."""


def from_hf_config(
    config: Any, *, formats: Mapping[str, str] | None = None, block_tokens: int | None = None
) -> CacheSpec:
    """The spec of a model's cache from its configuration.

    Args:
        config: a ``transformers`` configuration, or any object with the attributes of one.
        formats: by role (``window``, ``entries``, ``index_keys``) or side (``key``, ``value``); what is left out gets
            the engines' format where the dims fit it, else bf16.
        block_tokens: of the spec; None takes 256, or the next multiple of every ratio.

    Raises:
        SpecError: an unknown ``model_type``, a missing attribute, or an inconsistent schedule. A DeepSeek-V4
            configuration must say its schedule: by ``compress_ratios`` (entries beyond ``num_hidden_layers`` become
            draft layers) or by ``layer_types``.
    """
    kind = getattr(config, "model_type", None)
    chosen = dict(formats or {})
    if kind == "deepseek_v4":
        return _deepseek_v4(config, chosen, block_tokens)
    if kind in LATENT:
        return _latent(config, chosen, block_tokens)
    if kind in CLASSIC:
        return _classic(config, chosen, block_tokens)
    raise SpecError(
        got=kind,
        where="config.model_type",
        allowed=", ".join(["deepseek_v4", *LATENT, *sorted(CLASSIC)]),
        hint="Compose a CacheSpec from LayerSpec and components for other models.",
    )


def _deepseek_v4(config: Any, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    _check_formats(formats, V4_FORMATS)
    schedule = _schedule(config)
    count = _attribute(config, "num_hidden_layers")
    if len(schedule) < count:
        raise SpecError(got=f"{len(schedule)} layers", where="config: schedule", allowed=f"{count} or more")
    dim, index_dim = _attribute(config, "head_dim"), _attribute(config, "index_head_dim")
    dims = {"window": dim, "entries": dim, "index_keys": index_dim}
    chosen = {role: formats.get(role) or _fitting(V4_FORMATS[role], dims[role]) for role in V4_FORMATS}
    layers = [
        v4_layer(
            ratio,
            overlap=overlap,
            formats=chosen,
            dim=dim,
            window=_attribute(config, "sliding_window"),
            index_dim=index_dim,
            index_heads=_attribute(config, "index_n_heads"),
            index_topk=_attribute(config, "index_topk"),
        )
        for ratio, overlap in schedule
    ]
    return CacheSpec(
        layers=tuple(layers[:count]),
        draft_layers=tuple(layers[count:]),
        block_tokens=block_tokens or _block_tokens([ratio for ratio, _ in schedule if ratio]),
        name="deepseek_v4",
    )


def _schedule(config: Any) -> list[tuple[int, bool]]:
    """(ratio, overlap) of every layer, draft layers last; ratio 0 is the window alone."""
    rates: Mapping[str, int] = getattr(config, "compress_rates", None) or {
        "compressed_sparse_attention": 4,
        "heavily_compressed_attention": 128,
    }
    ratios: Sequence[int] | None = getattr(config, "compress_ratios", None)
    if ratios is not None:
        kinds = {ratio: bool(V4_KINDS[name]) for name, ratio in rates.items()}
        for number, ratio in enumerate(ratios):
            if ratio and ratio not in kinds:
                allowed = ", ".join(map(str, [0, *kinds]))
                raise SpecError(got=ratio, where=f"config.compress_ratios[{number}]", allowed=allowed)
        return [(ratio, bool(ratio) and kinds[ratio]) for ratio in ratios]
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is None:
        raise SpecError(
            got="neither", where="config", allowed="compress_ratios or layer_types", hint="There is no safe default."
        )
    for number, name in enumerate(types):
        if name not in V4_KINDS:
            raise SpecError(got=name, where=f"config.layer_types[{number}]", allowed=", ".join(V4_KINDS))
    return [(rates.get(name, 0), bool(V4_KINDS[name])) for name in types]


def _latent(config: Any, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    """Compressed key-value latent ‖ rotary key, one entry a token; V3.2 adds its indexer's keys."""
    has_indexer = LATENT[config.model_type]
    # The formats that engines use for V3.2; V2 and V3 are served in bf16.
    defaults = {"entries": "v32_656", "index_keys": "index_fp8_132_fp32scale"} if has_indexer else {"entries": "bf16"}
    _check_formats(formats, defaults)
    dims = {"entries": _attribute(config, "kv_lora_rank") + _attribute(config, "qk_rope_head_dim")}
    if has_indexer:
        dims["index_keys"] = _attribute(config, "index_head_dim")
    chosen = {role: formats.get(role) or _fitting(format, dims[role]) for role, format in defaults.items()}
    layer = LayerSpec(
        entries=Entries(dim=dims["entries"], ratio=1, format=chosen["entries"]),
        index_keys=IndexKeys(
            dim=dims["index_keys"],
            ratio=1,
            heads=_attribute(config, "index_n_heads"),
            topk=_attribute(config, "index_topk"),
            format=chosen["index_keys"],
        )
        if has_indexer
        else None,
    )
    layers = (layer,) * _attribute(config, "num_hidden_layers")
    return CacheSpec(layers=layers, block_tokens=block_tokens or 256, name=config.model_type)


def _classic(config: Any, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    _check_formats(formats, {"key": "", "value": ""})
    heads = _attribute(config, "num_attention_heads")
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or _attribute(config, "hidden_size") // heads
    key_format = formats.get("key", "bf16")

    def kv(*, window: int | None = None, chunk: int | None = None) -> LayerSpec:
        component = KV(
            key_heads=key_heads,
            key_dim=head_dim,
            storage="paged" if window is None and chunk is None else "ring",
            window=window,
            chunk=chunk,
            key_format=key_format,
            value_format=formats.get("value"),
        )
        return LayerSpec(kv=component)

    layers = [
        kv(
            window=_attribute(config, "sliding_window") if kind == "sliding_attention" else None,
            chunk=_attribute(config, "attention_chunk_size") if kind == "chunked_attention" else None,
        )
        for kind in _kinds(config)
    ]
    return CacheSpec(layers=tuple(layers), block_tokens=block_tokens or 256, name=config.model_type)


def _kinds(config: Any) -> list[str]:
    """``full_attention``, ``sliding_attention`` or ``chunked_attention`` of every layer."""
    count = _attribute(config, "num_hidden_layers")
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        chunked = getattr(config, "attention_chunk_size", None)
        kind = "sliding_attention" if sliding else "chunked_attention" if chunked else "full_attention"
        return [kind] * count
    allowed = ("full_attention", "sliding_attention", "chunked_attention")
    for number, name in enumerate(types):
        if name not in allowed:
            raise SpecError(got=name, where=f"config.layer_types[{number}]", allowed=", ".join(allowed))
    return list(types[:count])


def _attribute(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise SpecError(got="nothing", where=f"config.{name}", allowed="an integer")
    return value


def _check_formats(formats: Mapping[str, str], allowed: Mapping[str, str]) -> None:
    for name in formats:
        if name not in allowed:
            raise SpecError(got=name, where="formats", allowed=", ".join(allowed))


def _fitting(format: str, dim: int) -> str:
    return format if FORMATS[format].dim == dim else "bf16"


def _block_tokens(ratios: list[int]) -> int:
    step = math.lcm(*ratios) if ratios else 1
    return -(-256 // step) * step
