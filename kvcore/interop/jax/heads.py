"""Heads of classic layers over shards of a JAX mesh: equal shares where keys' and values' divide, else all on each."""

import msgspec

from kvcore.spec import KV, CacheSpec, LayerSpec


def divides(component: KV, shards: int) -> bool:
    """Whether keys' and values' heads are so many shards' equal shares."""
    return not any(part.heads % shards for part in component.parts)


def layer_with_heads(layer: LayerSpec, shards: int) -> LayerSpec:
    """A layer of one shard: its share of the heads, or all where they do not divide."""
    if layer.kv is None or not divides(layer.kv, shards):
        return layer
    keys, values = (part.heads // shards for part in layer.kv.parts)
    return msgspec.structs.replace(layer, kv=msgspec.structs.replace(layer.kv, key_heads=keys, value_heads=values))


def with_heads(spec: CacheSpec, shards: int) -> CacheSpec:
    """The spec of one shard."""
    layers, drafts = (
        tuple(layer_with_heads(layer, shards) for layer in found) for found in (spec.layers, spec.draft_layers)
    )
    return msgspec.structs.replace(spec, layers=layers, draft_layers=drafts)
