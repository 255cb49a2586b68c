"""The spec of a ``transformers`` model's cache, in formats of the user's choice.

A model attends to the rows as plain numbers, so the default format is its own dtype: the cache then holds exactly the
values that the model's own cache would hold.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, KV, CacheSpec, LayerSpec, from_hf_config

KEYS = {role: (role,) for role in ("window", "entries", "index_keys")} | {"kv": ("key", "value")}
"""Role -> what ``formats`` may name in it. Tails are always fp32."""


def cache_spec(
    config: Any,
    formats: str | Mapping[str, str] | None = None,
    *,
    default: str = "bf16",
    block_tokens: int | None = None,
    storage: Literal["paged", "slot"] = "paged",
    rings: bool = True,
) -> CacheSpec:
    """The spec for a configuration, its formats replaced.

    Args:
        config: the model's configuration; a multimodal one's text decoder counts.
        formats: one format for everything, or by name: ``window``, ``entries``, ``index_keys``, ``key``, ``value``.
        default: format of whatever ``formats`` leaves out.
        block_tokens: as for ``from_hf_config``.
        storage: of classic layers that keep every position.
        rings: keep of sliding layers only what later tokens see; False: every position, in ``storage``.

    Raises:
        SpecError: the model type or a format is not supported, or ``formats`` names what the model does not have.
    """
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    spec = from_hf_config(decoder, block_tokens=block_tokens)
    named = {key for layer in spec.layers for role, _ in layer.components() for key in KEYS.get(role, ())}
    chosen = dict.fromkeys(named, formats) if isinstance(formats, str) else dict(formats or {})
    for key in chosen:
        if key not in named:
            raise SpecError(got=key, where="formats", allowed=", ".join(sorted(named)))
    choose = {**dict.fromkeys(named, default), **chosen}
    layers = tuple(_adapted(layer, choose, storage, rings) for layer in spec.layers)
    # The models of transformers do not run draft layers.
    return msgspec.structs.replace(spec, layers=layers, draft_layers=())


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
    if kv.chunk is None:
        return msgspec.structs.replace(kv, storage=kept)
    # Left padding shifts where a row's chunks begin, and the cache is not told of padding. A window as long as a chunk
    # holds every position that a shifted chunk can need; the model's mask picks from it.
    return msgspec.structs.replace(kv, chunk=None, window=kv.chunk, storage="ring" if rings else storage)
