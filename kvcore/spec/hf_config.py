"""Specs from ``transformers`` configurations: DeepSeek-V4, V4.1, latent attention, recurrent layers, classic decoders.

Only fields are read, so any object with the same attributes will do, or a ``config.json`` as a mapping, and
``transformers`` need not be installed. What such a file leaves unsaid is derived as its model type does
(``kvcore.spec.families``), or asked for.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from kvcore.errors import SpecError
from kvcore.spec.components import Entries, IndexKeys
from kvcore.spec.config_fields import Fields
from kvcore.spec.families import FAMILIES, LATENT, MISSING
from kvcore.spec.formats import FORMATS
from kvcore.spec.kv import KV
from kvcore.spec.layer_schedules import CHUNK, CHUNKED, FULL, KINDS, SLIDING, WINDOW, WINDOWS, Family
from kvcore.spec.model import CacheSpec, LayerSpec
from kvcore.spec.presets import V4_FORMATS, V41_FORMATS, v4_layer, v41_layer
from kvcore.spec.recurrent import Conv, State
from kvcore.spec.recurrent_families import ATTENTION_OF, CONV, HYBRID, HYBRID_SLIDING, LINEAR, RECURRENT, kinds_of

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
        config: a ``transformers`` configuration, any object with the attributes of one, or a published ``config.json``
            as a mapping; of a multimodal model the text decoder counts.
        formats: by role (``window``, ``entries``, ``index_keys``, ``state``, ``conv``) or side (``key``, ``value``);
            what is left out gets the engines' format where the dims fit it, else bf16, and states fp32.
        block_tokens: of the spec; None takes 256, or the next multiple of every ratio.

    Raises:
        SpecError: an unknown ``model_type``, a missing field, a value of the wrong type or out of range, or an
            inconsistent schedule, by the field's name. A DeepSeek-V4 configuration must say its schedule: by
            ``compress_ratios`` (entries beyond ``num_hidden_layers`` become draft layers) or by ``layer_types``.

    Example:
        >>> from kvcore.spec import from_hf_config
        >>> config = {"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 32}
        >>> config |= {"num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096}
        >>> layer = from_hf_config(config, formats={"key": "fp8_row", "value": "fp8_row"}).layers[0]
        >>> layer.kv.key_heads, layer.kv.key_dim, layer.kv.window
        (8, 128, 4096)
    """
    fields = _decoder(config)
    kind = fields.get("model_type")
    chosen = dict(formats or {})
    reads = _READERS.get(kind) if isinstance(kind, str) else None
    if reads is not None:
        return reads(kind, fields, chosen, block_tokens)
    known = isinstance(kind, str) and kind in MISSING
    raise SpecError(
        got=f"{kind}, which needs {MISSING[kind]}" if known else kind,
        where=f"{fields.where}.model_type",
        allowed=", ".join(_READERS),
        hint="Compose a CacheSpec from LayerSpec and components for other models.",
    )


def _decoder(config: Any) -> Fields:
    """The fields of the text decoder: the configuration itself, or the part that a multimodal one keeps it in."""
    if hasattr(config, "get_text_config"):
        return Fields(config.get_text_config(decoder=True))
    whole = Fields(config)
    text = whole.get("text_config")
    if text is None or isinstance(text, str):
        return whole
    found = Fields(text, "config.text_config")
    # A part that does not say what it is is the whole's own kind.
    return found if found.get("model_type") is not None else found.restated({"model_type": whole.get("model_type")})


def _deepseek_v4(kind: str, fields: Fields, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    del kind
    _check_formats(formats, V4_FORMATS)
    schedule = _schedule(fields)
    count = fields.layers()
    if len(schedule) < count:
        raise SpecError(got=f"{len(schedule)} layers", where="config: schedule", allowed=f"{count} or more")
    dim, index_dim = fields.integer("head_dim"), fields.integer("index_head_dim")
    dims = {"window": dim, "entries": dim, "index_keys": index_dim}
    chosen = {role: formats.get(role) or _fitting(V4_FORMATS[role], dims[role]) for role in V4_FORMATS}
    layers = [
        v4_layer(
            ratio,
            overlap=overlap,
            formats=chosen,
            dim=dim,
            window=fields.integer("sliding_window"),
            index_dim=index_dim,
            index_heads=fields.integer("index_n_heads"),
            index_topk=fields.integer("index_topk"),
        )
        for ratio, overlap in schedule
    ]
    return CacheSpec(
        layers=tuple(layers[:count]),
        draft_layers=tuple(layers[count:]),
        block_tokens=block_tokens or _block_tokens([ratio for ratio, _ in schedule if ratio]),
        name="deepseek_v4",
    )


def _deepseek_v41(kind: str, fields: Fields, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    """Windows everywhere; compressed pools of the layers that are sources, which those after them read."""
    del kind
    _check_formats(formats, V41_FORMATS)
    ratios, drafts = _v41_ratios(fields)
    sources = _v41_sources(fields, ratios)
    dim, index_dim = fields.integer("head_dim", 512), fields.integer("index_head_dim", 128)
    dims = {"window": dim, "entries": dim, "index_keys": index_dim}
    chosen = {role: formats.get(role) or _fitting(V41_FORMATS[role], dims[role]) for role in V41_FORMATS}
    window = fields.integer("sliding_window", 128)
    heads, topk = fields.integer("index_n_heads", 32), fields.integer("index_topk", 512)
    layers = tuple(
        v41_layer(
            ratio,
            number,
            sources,
            formats=chosen,
            dim=dim,
            window=window,
            index_dim=index_dim,
            index_heads=heads,
            index_topk=topk,
        )
        for number, ratio in enumerate([*ratios, *[0] * drafts])
    )
    return CacheSpec(
        layers=layers[: len(ratios)],
        draft_layers=layers[len(ratios) :],
        block_tokens=block_tokens or _block_tokens([ratio for ratio in ratios if ratio]),
        name="deepseek_v41",
    )


def _v41_ratios(fields: Fields) -> tuple[list[int], int]:
    """The ratio of every layer, and how many draft layers follow: what the list does not say are windows alone."""
    count, drafts = fields.layers(40), fields.integer("num_nextn_predict_layers", 3, least=0)
    ratios = fields.integers("compress_ratios")
    if ratios is None:
        # The released schedule's shape, for as many layers as there are.
        windows, pairs = min(2, count), 18 if count == 40 else max(0, count - min(2, count) + 1) // 2
        ratios = [0] * windows + [2] * pairs + [1] * (count - windows - pairs)
    if not count <= len(ratios) <= count + drafts:
        allowed = f"{count} layers and at most {drafts} draft layers"
        raise SpecError(got=f"{len(ratios)} layers", where=fields.path("compress_ratios"), allowed=allowed)
    for number, ratio in enumerate(ratios[count:], count):
        if ratio:
            raise SpecError(got=ratio, where=fields.path(f"compress_ratios[{number}]"), allowed="0: a draft layer")
    return ratios[:count], drafts


def _v41_sources(fields: Fields, ratios: list[int]) -> list[int]:
    """The layers that own compressed pools: those that are listed, or the first of every run of one ratio."""
    sources = fields.integers("kv_source_layer_ids")
    if sources is None:
        released = len(ratios) == 40 and ratios == [0, 0, *[2] * 18, *[1] * 20]
        runs = [n for n, ratio in enumerate(ratios) if ratio and (n == 0 or ratios[n - 1] != ratio)]
        sources = [2, 8, 14, 20] if released else runs
    for place, source in enumerate(sources):
        if source >= len(ratios) or not ratios[source]:
            raise SpecError(
                got=source,
                where=fields.path(f"kv_source_layer_ids[{place}]"),
                allowed=f"a layer below {len(ratios)} whose ratio is 1 or more",
            )
    for number, ratio in enumerate(ratios):
        before = [source for source in sources if source <= number]
        if ratio and (not before or ratios[max(before)] != ratio):
            raise SpecError(
                got=f"{ratio} of layer {number}",
                where=fields.path("compress_ratios"),
                allowed="the ratio of the closest layer of kv_source_layer_ids at or before it",
                hint="A layer reads that one's pools.",
            )
    return sources


def _schedule(fields: Fields) -> list[tuple[int, bool]]:
    """(ratio, overlap) of every layer, draft layers last; ratio 0 is the window alone."""
    rates = _rates(fields)
    ratios = fields.integers("compress_ratios")
    if ratios is not None:
        kinds = {ratio: bool(V4_KINDS[name]) for name, ratio in rates.items()}
        for number, ratio in enumerate(ratios):
            if ratio and ratio not in kinds:
                allowed = ", ".join(map(str, [0, *kinds]))
                raise SpecError(got=ratio, where=f"config.compress_ratios[{number}]", allowed=allowed)
        return [(ratio, bool(ratio) and kinds[ratio]) for ratio in ratios]
    types = fields.names_of("layer_types", tuple(V4_KINDS))
    if types is None:
        raise SpecError(
            got="neither", where="config", allowed="compress_ratios or layer_types", hint="There is no safe default."
        )
    return [(rates.get(name, 0), bool(V4_KINDS[name])) for name in types]


def _rates(fields: Fields) -> dict[str, int]:
    """Tokens an entry of each kind of layer that has any."""
    known = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    said = fields.get("compress_rates")
    if not said:
        return known
    rates = Fields(said, fields.path("compress_rates"))
    found = {name: rates.integer(name) for name in known if isinstance(said, Mapping) and name in said}
    if not isinstance(said, Mapping) or len(found) < len(cast("Mapping[str, Any]", said)):
        fields.fail("compress_rates", f"a mapping from {' and '.join(known)} to tokens an entry")
    return found


def _latent(kind: str, fields: Fields, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    """Compressed key-value latent ‖ rotary key, one entry a token; V3.2 adds its indexer's keys."""
    family = LATENT[kind]
    # The formats that engines use for V3.2; V2 and V3 are served in bf16.
    defaults = (
        {"entries": "v32_656", "index_keys": "index_fp8_132_fp32scale"} if family.indexed else {"entries": "bf16"}
    )
    _check_formats(formats, defaults)
    dims = {"entries": fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")}
    if family.indexed:
        dims["index_keys"] = fields.integer("index_head_dim")
    chosen = {role: formats.get(role) or _fitting(format, dims[role]) for role, format in defaults.items()}
    plain = LayerSpec(entries=Entries(dim=dims["entries"], ratio=1, format=chosen["entries"]))
    count = fields.renamed(family.names).layers() * family.sublayers
    if not family.indexed:
        return CacheSpec(layers=(plain,) * count, block_tokens=block_tokens or 256, name=kind)
    keys = IndexKeys(
        dim=dims["index_keys"],
        ratio=1,
        heads=fields.integer("index_n_heads"),
        topk=fields.integer("index_topk"),
        format=chosen["index_keys"],
    )
    indexed = msgspec.structs.replace(plain, index_keys=keys)
    own = [True] * count if family.indexers is None else family.indexers(fields, count)
    layers = tuple(indexed if has else plain for has in own)
    return CacheSpec(layers=layers, block_tokens=block_tokens or 256, name=kind)


def _kv(kind: str, fields: Fields, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    """Keys and values of full, sliding or chunked attention."""
    _check_formats(formats, {"key": "", "value": ""})
    family = FAMILIES[kind]
    _check_decoder(family, fields)
    if family.restated is not None:
        fields = family.restated(fields)
    kept = _attention(kind, family, fields, formats)
    kinds = _kinds(family, fields.renamed(family.names))
    count = len(kinds)
    if family.shared is not None:
        # The last layers read the keys of earlier ones, and keep none.
        count -= fields.integer(*family.shared, least=0)
        if count < 1:
            fields.fail(family.shared[0], f"fewer than {len(kinds)}, the layers")
    layers = [kept(number, found) if number < count else LayerSpec() for number, found in enumerate(kinds)]
    return CacheSpec(layers=tuple(layers), block_tokens=block_tokens or 256, name=kind)


def _check_decoder(family: Family, fields: Fields) -> None:
    """Refuse an encoder, and a decoder that attends to one."""
    for name, wanted, default in family.decoder:
        if fields.flag(name, default) != wanted:
            raise SpecError(
                got=not wanted,
                where=fields.path(name),
                allowed=f"{wanted}: keys and values of an encoder, or of its output, do not grow with tokens",
                hint="transformers' class for causal language models says so in the configuration of its models.",
            )


def _attention(
    kind: str, family: Family, fields: Fields, formats: Mapping[str, str]
) -> Callable[[int, str], LayerSpec]:
    """(number, kind) of a layer -> its keys and values."""
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):
        fields.fail("use_bidirectional_attention", "false: tokens that see later ones leave nothing that can be cached")
    by_layer = fields.get("per_layer_config") is not None

    def heads_of(own: Fields, found: str) -> tuple[int, int]:
        """Key heads of a layer, and their width."""
        heads = own.integer("num_attention_heads", family.heads)
        if callable(family.key_heads):
            key_heads = family.key_heads(own, heads)
        else:
            key_heads = own.size("num_key_value_heads", family.key_heads) or heads
        key_heads *= family.sliding_heads if found == SLIDING else 1
        if by_layer or family.whole is None or found != FULL:
            return key_heads, head_dim_of(own, heads)
        names, wide = family.whole.names, None
        if fields.flag("attention_k_eq_v", False):
            wide = fields.size(names["num_key_value_heads"], None)
        default = family.whole.head_dim
        return wide or key_heads, fields.integer(names["head_dim"], None if callable(default) else default)

    def head_dim_of(own: Fields, heads: int) -> int:
        default = family.head_dim
        said = own.size("head_dim", None if callable(default) else default)
        return said or (default(own) if callable(default) else _quotient(own, heads, family.rounds))

    def window_of(own: Fields) -> int:
        if family.window is not None:
            return family.window(own)
        return own.integer("sliding_window", WINDOWS.get(kind, WINDOW))

    def kept(number: int, found: str) -> LayerSpec:
        own = fields.of_layer(number).renamed(family.names)
        key_heads, head_dim = heads_of(own, found)
        window = window_of(own) if found == SLIDING else None
        chunk = own.integer("attention_chunk_size", CHUNK) if found == CHUNKED else None
        component = KV(
            key_heads=key_heads,
            key_dim=head_dim,
            value_dim=None if family.value_dim is None else own.integer("v_head_dim", family.value_dim),
            storage="paged" if window is None and chunk is None else "ring",
            window=window,
            chunk=chunk,
            key_format=formats.get("key", "bf16"),
            value_format=formats.get("value"),
        )
        return LayerSpec(kv=component)

    return kept


def _recurrent(kind: str, fields: Fields, formats: dict[str, str], block_tokens: int | None) -> CacheSpec:
    """Layers with states and short convolutions, beside others that attend, or in them."""
    family = RECURRENT[kind]
    attend = {"entries": "bf16"} if family.latent else {"key": "bf16", "value": ""} if family.attention else {}
    _check_formats(formats, {**attend, "state": "fp32", "conv": "bf16"})
    kinds = kinds_of(family, fields)
    carried, kept = family.carried(fields), None
    if family.latent:
        kept = _latent_rows(fields, formats)
    elif family.attention is not None:
        kept = _attention(kind, family.attention, fields, formats)
    conv = Conv(dim=carried.channels, width=carried.width, format=formats.get("conv", "bf16"))
    state = None
    if carried.state is not None:
        heads, key_dim, value_dim = carried.state
        state = State(heads=heads, key_dim=key_dim, value_dim=value_dim, format=formats.get("state", "fp32"))

    def layer(number: int, found: str) -> LayerSpec:
        attends = ATTENTION_OF.get(found)
        if attends is not None and kept is None:
            raise SpecError(got=found, where=fields.path(family.types), allowed="recurrent layers alone")
        own = LayerSpec() if attends is None or kept is None else kept(number, attends)
        if found in (LINEAR, HYBRID, HYBRID_SLIDING):
            return msgspec.structs.replace(own, state=state, conv=conv)
        return msgspec.structs.replace(own, conv=conv) if found == CONV else own

    layers = tuple(layer(number, found) for number, found in enumerate(kinds))
    return CacheSpec(layers=layers, block_tokens=block_tokens or 256, name=kind)


def _latent_rows(fields: Fields, formats: Mapping[str, str]) -> Callable[[int, str], LayerSpec]:
    """One latent row a token in every layer that attends."""
    dim = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
    layer = LayerSpec(entries=Entries(dim=dim, ratio=1, format=formats.get("entries", "bf16")))

    def kept(number: int, kind: str) -> LayerSpec:
        del number, kind
        return layer

    return kept


def _kinds(family: Family, fields: Fields) -> list[str]:
    """``full_attention``, ``sliding_attention`` or ``chunked_attention`` of every layer."""
    count = fields.layers()
    types = fields.names_of("layer_types", KINDS)
    if types is None:
        types = family.schedule(fields, count)
    if len(types) < count:
        raise SpecError(got=f"{len(types)} layers", where=fields.path("layer_types"), allowed=f"{count} or more")
    return types[:count] if family.runs is None else family.runs(fields, types[:count])


def _quotient(fields: Fields, heads: int, rounds: bool) -> int:
    """Width of a head that has none of its own."""
    width = fields.integer("hidden_size")
    if width % heads and not rounds:
        raise SpecError(
            got=width,
            where=fields.path("hidden_size"),
            allowed=f"a multiple of {heads} heads",
            hint="Or say head_dim.",
        )
    return width // heads


def _check_formats(formats: Mapping[str, str], allowed: Mapping[str, str]) -> None:
    for name in formats:
        if name not in allowed:
            raise SpecError(got=name, where="formats", allowed=", ".join(allowed))


def _fitting(format: str, dim: int) -> str:
    return format if FORMATS[format].dim == dim else "bf16"


def _block_tokens(ratios: list[int]) -> int:
    step = math.lcm(*ratios) if ratios else 1
    return -(-256 // step) * step


_READERS: dict[str, Callable[[str, Fields, dict[str, str], int | None], CacheSpec]] = {
    "deepseek_v4": _deepseek_v4,
    "deepseek_v41": _deepseek_v41,
    "deepseek_v41_text": _deepseek_v41,
    **dict.fromkeys(LATENT, _latent),
    **dict.fromkeys(FAMILIES, _kv),
    **dict.fromkeys(RECURRENT, _recurrent),
}
"""Model type -> what reads its configuration."""
