"""From an SGLang engine's pool of keys and values to a spec: what its layers hold, as far as the pool says.

SGLang is not imported: pools are known by their classes' names and read by their attributes (those of SGLang 0.5.23).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from kvcore.errors import SpecError
from kvcore.interop.vllm_config import CODES
from kvcore.spec import KV, CacheSpec, Conv, Entries, IndexKeys, LayerSpec, State, Tail, Window
from kvcore.spec.presets import V41_FORMATS, v41_layer

LATENTS = {
    "v4": "v4_584",
    "v41": "v41_528",
    "v41_fp4": "v41_fp4_288",
    "v41_new": "v41_528",
    "v41_fp4_new": "v41_fp4_288",
}
"""``KVLayout`` -> format of a row; ``new`` are those in which a row's scales follow it."""

STATES = {4: True, 128: False}
"""Ratios of SGLang's compressed pools -> whether their windows overlap."""

SHARED = (1, 2)
"""Those of DeepSeek-V4.1, whose layers read the pools of the closest source before them."""

ONLINE = "state"
"""Role of what is left of a compressor's states where SGLang compresses them as they come: largest score, sum of
weights, weighted values."""


class Given(NamedTuple):
    """What a pool does not say."""

    window: int | None
    index: Mapping[str, int] | None
    formats: Mapping[str, str]

    def keys(self, dim: int, ratio: int, format: str | None) -> IndexKeys:
        """Index keys, with the heads and top-k that are given."""
        if self.index is None or not {"heads", "topk"} <= set(self.index):
            raise SpecError(
                got=self.index,
                where="spec_from: index",
                allowed="index={'heads': ..., 'topk': ...}: a pool does not say them",
            )
        format = self.formats.get("index_keys", format)
        if format is None:
            raise SpecError(got="no format of index keys", where="spec_from: formats", allowed="{'index_keys': ...}")
        return IndexKeys(dim=dim, ratio=ratio, format=format, **self.index)


def spec_from(
    pool: Any,
    *,
    window: int | None = None,
    index: Mapping[str, int] | None = None,
    formats: Mapping[str, str] | None = None,
    name: str = "",
) -> CacheSpec:
    """The spec of a pool: ``MHATokenToKVPool``, ``SWAKVPool``, ``MLATokenToKVPool``, DSA's and DeepSeek-V4's.

    Args:
        pool: SGLang's.
        window: of the sliding layers of a hybrid, which the pool does not say.
        index: ``{"heads": 64, "topk": 2048}`` of indexers, likewise.
        formats: role -> format, where the pool leaves it open: ``index_keys`` of DeepSeek-V4.
        name: of the spec.

    Raises:
        SpecError: another pool, a dtype that is no element code, or what must be given and is not.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> kind = type("MHATokenToKVPool", (Some,), {})
        >>> pool = kind(head_num=8, head_dim=128, v_head_dim=128, layer_num=2, page_size=64, dtype="torch.bfloat16")
        >>> spec_from(pool).layers[1].kv.key_heads
        8
    """
    kind = type(pool).__name__
    if kind not in READERS:
        raise SpecError(got=kind, where="spec_from", allowed=", ".join(READERS))
    given = Given(window, index, formats or {})
    return CacheSpec(layers=tuple(READERS[kind](pool, given)), block_tokens=pool.page_size, name=name)


def coded(pool: Any) -> str | None:
    """The format of rows whose scales lie in tensors of their own; None of a pool that has none of those."""
    method = getattr(getattr(pool, "quant_method", None), "name", "")
    return CODED.get(type(pool).__name__) or (method if method in (*CODED.values(), SCALED) else None)


def _kv(
    pool: Any, window: int | None = None, storage: Literal["paged", "ring"] = "paged", scales: Any = msgspec.UNSET
) -> LayerSpec:
    code, values = _code(pool), getattr(pool, "v_head_dim", None)
    dim = None if values in (None, pool.head_dim) else values
    rows = {"key_heads": pool.head_num, "key_dim": pool.head_dim, "value_dim": dim, "key_format": code}
    return LayerSpec(kv=KV(window=window, storage=storage, scales=scales, **rows))


def _code(pool: Any) -> str:
    format = coded(pool)
    if format is not None:
        return format
    dtype = str(pool.dtype).rpartition(".")[2]
    if dtype not in CODES:
        raise SpecError(got=dtype, where=f"spec_from: {type(pool).__name__}.dtype", allowed=", ".join(CODES))
    return CODES[dtype]


def _by_heads(pool: Any, given: Given) -> list[LayerSpec]:
    if coded(pool) != SCALED:
        return [_kv(pool, given.window)] * pool.layer_num
    # Layers are numbered as the model's, of which a rank may have some.
    first, scales = getattr(pool, "start_layer", 0) or 0, pool.quant_method.get_bmm_scales
    return [_kv(pool, given.window, scales=scales(first + number)) for number in range(pool.layer_num)]


def _hybrid(pool: Any, given: Given) -> list[LayerSpec]:
    if given.window is None:
        raise SpecError(got="no window", where="spec_from", allowed="window=, of the sliding layers")
    return [
        _kv(pool.swa_kv_pool, given.window, "ring") if sliding else _kv(pool.full_kv_pool)
        for _, (_, sliding) in sorted(pool.layers_mapping.items())
    ]


def _linear(pool: Any, given: Given) -> list[LayerSpec]:
    """Layers that attend to everything, and those that carry a state and a convolution's inputs on."""
    full, states = pool.full_kv_pool, pool.mamba_pool
    if type(full).__name__ not in READERS:
        raise SpecError(got=type(full).__name__, where="spec_from", allowed=", ".join(READERS))
    attending = READERS[type(full).__name__](full, given)
    found = {number: attending[place] for number, place in pool.full_attention_layer_id_mapping.items()}
    inputs, *others = states.mamba_cache.conv
    if others or states.mamba_cache.temporal.ndim != 5:
        got = f"{1 + len(others)} convolutions and states of shape {tuple(states.mamba_cache.temporal.shape)}"
        raise SpecError(
            got=got, where="spec_from", allowed="a convolution and a state [heads, rows, columns] of a layer"
        )
    heads, rows, columns = states.mamba_cache.temporal.shape[2:]
    channels, width = inputs.shape[2:]
    state = State(heads=heads, key_dim=rows, value_dim=columns, format=_dtype(states.mamba_cache.temporal))
    conv = Conv(dim=channels, width=width + 1, format=_dtype(inputs))
    found |= {number: LayerSpec(state=state, conv=conv) for number in states.mamba_layer_ids}
    first = min(found)
    if sorted(found) != [*range(first, first + len(found))]:
        raise SpecError(got=f"layers {sorted(found)}", where="spec_from", allowed="layers that follow one another")
    return [found[number] for number in sorted(found)]


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).rpartition(".")[2]
    if name not in CODES:
        raise SpecError(got=name, where="spec_from: states", allowed=", ".join(CODES))
    return CODES[name]


def _latent(pool: Any, given: Given) -> list[LayerSpec]:
    del given
    return [LayerSpec(entries=_entries(pool))] * pool.layer_num


def _entries(pool: Any) -> Entries:
    dim = pool.kv_lora_rank + pool.qk_rope_head_dim
    return Entries(dim=dim, ratio=1, format="v32_656" if pool.kv_cache_dim == 656 else _code(pool))


def _sparse(pool: Any, given: Given) -> list[LayerSpec]:
    keys = given.keys(pool.index_head_dim, 1, "index_fp8_132_fp32scale")
    return [LayerSpec(entries=_entries(pool), index_keys=keys)] * pool.layer_num


def _v4(pool: Any, given: Given) -> list[LayerSpec]:
    layout = getattr(pool.kv_layout, "value", pool.kv_layout)
    dim, keys = pool.qk_nope_head_dim + pool.qk_rope_head_dim, pool.indexer_head_dim
    format = _latent_format(layout)
    window = Window(dim=dim, window=pool.sliding_window, format=format)
    found: list[LayerSpec] = []
    for number, ratio in enumerate(pool.compression_ratios):
        if ratio == 0:
            found.append(LayerSpec(window=window))
            continue
        if ratio in SHARED:
            entries = _latent_format(pool.compressed_kv_layout(ratio))
            found.append(_of_source(pool, given, number, {"window": format, "entries": entries}))
            continue
        if ratio not in STATES:
            raise SpecError(got=f"ratio {ratio}", where="spec_from", allowed="0, 1, 2, 4 or 128")
        overlap, online = STATES[ratio], _online(pool, number, dim)
        found.append(
            LayerSpec(
                window=window,
                tail=None if online else Tail(dim=dim, ratio=ratio, overlap=overlap),
                state=online,
                entries=Entries(dim=dim, ratio=ratio, format=format),
                index_tail=Tail(dim=keys, ratio=ratio, overlap=overlap) if overlap else None,
                index_keys=given.keys(keys, ratio, None) if overlap else None,
            )
        )
    return found


def _latent_format(layout: Any) -> str:
    layout = getattr(layout, "value", layout)
    if layout not in LATENTS:
        raise SpecError(got=layout, where="spec_from: kv_layout", allowed=", ".join(LATENTS))
    return LATENTS[layout]


def _of_source(pool: Any, given: Given, number: int, formats: Mapping[str, str]) -> LayerSpec:
    """A layer that reads entries and index keys of a source, which may be itself."""
    ratio, dim = pool.compression_ratios[number], pool.qk_nope_head_dim + pool.qk_rope_head_dim
    keys = given.keys(pool.indexer_head_dim, ratio, V41_FORMATS["index_keys"])
    return v41_layer(
        ratio,
        number,
        pool.sources_by_ratio[ratio],
        formats={**formats, "index_keys": keys.format},
        dim=dim,
        window=pool.sliding_window,
        index_dim=keys.dim,
        index_heads=keys.heads,
        index_topk=keys.topk,
    )


def _online(pool: Any, number: int, dim: int) -> State | None:
    """What is left of a layer's states where they are compressed as they come: one row of a request."""
    every = getattr(pool, "compress_state_pools", None)
    states = None if every is None else every[number]
    if states is None or not states.online:
        return None
    return State(heads=3, key_dim=dim, format=CODES[str(states.kv_score_buffer.kv_score.dtype).rpartition(".")[2]])


SCALED = "nvfp4"
"""The method whose layers have a scale of their keys, and one of their values, beside those of rows."""

CODED = {
    "MHATokenToKVPoolMXFP8": "mxfp8",
    "MHATokenToKVPoolFP4": "fp4_mx_block16",
    "MLATokenToKVPoolFP4": "fp4_mx_block16",
}
"""A pool's class -> format of rows whose scales lie in tensors of their own."""

READERS: dict[str, Callable[[Any, Given], list[LayerSpec]]] = {
    "MHATokenToKVPool": _by_heads,
    "SWAKVPool": _hybrid,
    "UnifiedMHATokenToKVPool": _by_heads,
    "UnifiedSWAKVPool": _hybrid,
    "MHATokenToKVPoolMXFP8": _by_heads,
    "MHATokenToKVPoolFP4": _by_heads,
    "MLATokenToKVPool": _latent,
    "MLATokenToKVPoolFP4": _latent,
    "UnifiedMLATokenToKVPool": _latent,
    "DSATokenToKVPool": _sparse,
    "DeepSeekV4TokenToKVPool": _v4,
    "HybridLinearKVPool": _linear,
    "UnifiedHybridLinearKVPool": _linear,
}
"""A pool's class -> what its layers hold."""
