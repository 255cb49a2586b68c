"""The spec of a ``transformers`` model's cache, in formats of the user's choice.

A model attends to the rows as plain numbers, so the default format is its own dtype: the cache then holds exactly the
values that the model's own cache would hold.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, KV, CacheSpec, LayerSpec, from_hf_config

KEYS = {role: (role,) for role in ("window", "entries", "index_keys", "state", "conv")} | {"kv": ("key", "value")}
"""Role -> what ``formats`` may name in it. Tails are always fp32."""

Formats = str | Mapping[str, str | Mapping[str, str]]
"""One format for everything, or by name: of a role, or of a layer, ``"layers[0]"``, one format or several by role."""


def decoder_of(config: Any) -> Any:
    """The part of a configuration that describes the text decoder."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _alone(config: Any) -> Any:
    """The same as a decoder's that attends to no encoder: keys and values of one are in a cache beside this one."""
    if not getattr(config, "is_encoder_decoder", False):
        return decoder_of(config)
    found = decoder_of(config)
    # What transformers makes of one configuration for both lacks the names that a decoder's sizes have.
    found = copy.deepcopy(config if found.model_type == config.model_type else found)
    found.is_encoder_decoder = found.add_cross_attention = False
    return found


def cache_spec(
    config: Any,
    formats: Formats | None = None,
    *,
    default: str = "bf16",
    block_tokens: int | None = None,
    storage: Literal["paged", "slot"] = "paged",
    rings: bool = True,
) -> CacheSpec:
    """The spec for a configuration, its formats replaced.

    Args:
        config: the model's configuration; a multimodal one's text decoder counts.
        formats: one format for everything, or by role: ``window``, ``entries``, ``index_keys``, ``key``, ``value``,
            ``state``, ``conv``; or
            by layer, which goes before roles: ``{"key": "int8_row", "layers[0]": "bf16"}``, or by both:
            ``{"layers[0]": {"value": "bf16"}}``.
        default: format of whatever ``formats`` leaves out.
        block_tokens: as for ``from_hf_config``.
        storage: of classic layers that keep every position.
        rings: keep of sliding layers only what later tokens see; False: every position, in ``storage``.

    Raises:
        SpecError: the model type or a format is not supported, or ``formats`` names what the model does not have.
    """
    spec = from_hf_config(_alone(config), block_tokens=block_tokens)
    chosen = _chosen(spec, formats, default)
    layers = tuple(_adapted(layer, choose, storage, rings) for layer, choose in zip(spec.layers, chosen, strict=True))
    # The models of transformers do not run draft layers.
    return msgspec.structs.replace(spec, layers=layers, draft_layers=())


def _chosen(spec: CacheSpec, formats: Formats | None, default: str) -> list[dict[str, str]]:
    """The formats of every layer, by name."""
    named = [{key for role in layer.roles for key in KEYS.get(role, ())} for layer in spec.layers]
    # States are as precise as a model computes them, whatever its weights are.
    chosen = [dict.fromkeys(names, default) | dict.fromkeys(names & {"state"}, "fp32") for names in named]
    if formats is None:
        return chosen
    if not isinstance(formats, (str, Mapping)):
        raise SpecError(
            got=formats,
            where="formats",
            allowed="a format's name, or names by role or by layer",
            hint='For example {"key": "int8_row", "layers[0]": "bf16"}.',
        )
    by_role = formats if isinstance(formats, str) else {key: at for key, at in formats.items() if key not in _of(spec)}
    for names, choose in zip(named, chosen, strict=True):
        choose.update(_by_name(by_role, names, set().union(*named), "formats", layers=len(named)))
    for place, at in () if isinstance(formats, str) else formats.items():
        number = _of(spec).get(place)
        if number is not None:
            chosen[number].update(_by_name(at, named[number], named[number], f"formats[{place!r}]"))
    return chosen


def _of(spec: CacheSpec) -> dict[str, int]:
    """What ``formats`` calls the layers -> their numbers."""
    return {spec.path(number): number for number in range(len(spec.layers))}


def _by_name(given: object, names: set[str], known: set[str], where: str, *, layers: int = 0) -> dict[str, str]:
    """What a format, or a mapping of names to formats, says of those of ``known`` that a layer has: ``names``."""
    allowed = ", ".join(sorted(known)) + (f", layers[0] to layers[{layers - 1}]" if layers else "")
    if isinstance(given, str):
        return dict.fromkeys(names, _checked(given, where))
    if not isinstance(given, Mapping):
        raise SpecError(got=given, where=where, allowed=f"a format's name, or a mapping of {allowed}")
    by_name = cast("Mapping[object, object]", given)
    for key in by_name:
        if key not in known:
            raise SpecError(got=key, where=where, allowed=allowed)
    return {str(key): _checked(form, f"{where}[{key!r}]") for key, form in by_name.items() if key in names}


def _checked(form: object, where: str) -> str:
    """A format's name, known."""
    if not isinstance(form, str):
        raise SpecError(got=form, where=where, allowed="a format's name")
    try:
        FORMATS[form]
    except SpecError as error:
        raise SpecError(got=form, where=where, allowed=error.allowed, hint=error.hint) from None
    return form


def _adapted(layer: LayerSpec, choose: Mapping[str, str], storage: str, rings: bool) -> LayerSpec:
    changed: dict[str, Any] = {}
    for role, component in layer.components():
        if isinstance(component, KV):
            changed[role] = _adapted_kv(component, choose, storage, rings)
        elif role in KEYS:
            changed[role] = msgspec.structs.replace(component, format=choose[role])
    keys = changed.get("index_keys")
    if keys is not None and FORMATS[keys.format].hadamard:
        raise SpecError(
            got=keys.format,
            where="formats['index_keys']",
            allowed="a format without rotation",
            hint="The model scores unrotated keys; rotated ones suit index_scores, which rotates the query too.",
        )
    return msgspec.structs.replace(layer, **changed)


def _adapted_kv(kv: KV, choose: Mapping[str, str], storage: str, rings: bool) -> KV:
    kv = msgspec.structs.replace(kv, key_format=choose["key"], value_format=choose["value"])
    kept = kv.storage if kv.storage == "ring" and rings else storage
    if kv.tail is not None:  # groups of tokens lie in blocks alone
        return kv
    if kv.chunk is None:
        return msgspec.structs.replace(kv, storage=kept)
    # Left padding shifts where a row's chunks begin, and the cache is not told of padding. A window as long as a chunk
    # holds every position that a shifted chunk can need; the model's mask picks from it.
    return msgspec.structs.replace(kv, chunk=None, window=kv.chunk, storage="ring" if rings else storage)
