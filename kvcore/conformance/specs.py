"""The spec that a conformance run checks when no other is named: every role, format and storage there is, made small.

Sizes are odd on purpose: blocks of 24 tokens, ratios 1, 2, 3, 4 and 8, heads and dims that differ, a declared ring, a
shared pool, so that nothing passes because two numbers happen to be equal.
"""

import math

import msgspec

from kvcore.spec import FORMATS, KV, CacheSpec, Conv, Entries, Format, IndexKeys, LayerSpec, State, Tail, Window

NAME = "conformance"
OVER_TOKENS = "over_tokens"
BLOCK_TOKENS = 24
LATENT_DIM = 96
INDEX_DIM = 128
WINDOW = 7
GLOBAL_SCALE = 0.37


def conformance_spec() -> CacheSpec:
    """All formats that are registered when it is called, so that a third party's format is checked like a built-in."""
    over_channels = [format for format in FORMATS.values() if format.tokens == 1]
    latent = [format for format in over_channels if not _is_index(format)]
    index = [format for format in over_channels if _is_index(format)]
    classic = [format for format in over_channels if format.dim is None and not _is_index(format)]
    layers = [
        *_shared_layers(),
        *(_latent_layer(number, format) for number, format in enumerate(latent)),
        *(_indexed_layer(number, format) for number, format in enumerate(index)),
        *(_kv_layer(format) for format in classic),
        *_kv_storages(),
        *_recurrent_layers(),
    ]
    return CacheSpec(layers=tuple(layers), block_tokens=BLOCK_TOKENS, name=NAME)


def over_tokens_spec() -> CacheSpec:
    """Keys and values in every format over tokens, whose groups need blocks of another size."""
    over = [format for format in FORMATS.values() if format.tokens > 1]
    layers = [
        *(_kv_layer(format) for format in over),
        *(
            LayerSpec(
                kv=KV(
                    key_heads=2,
                    key_dim=32,
                    value_heads=1,
                    value_dim=64,
                    window=window,
                    key_format=of_keys,
                    value_format=of_values,
                )
            )
            for window, of_keys, of_values in (
                (None, "int4_ch32", "int4_g32"),
                (7, "bf16", "int4_ch32"),
                (45, "int4_ch32", "mxfp4"),
            )
        ),
    ]
    return CacheSpec(layers=layers, block_tokens=math.lcm(*(format.tokens for format in over)), name=OVER_TOKENS)


def _is_index(format: Format) -> bool:
    return format.dim == INDEX_DIM or format.hadamard


def _latent_layer(number: int, format: Format) -> LayerSpec:
    """A format as window and as entries; overlapping and plain compressors take turns."""
    dim = format.dim or LATENT_DIM
    ratio, overlap = ((4, True), (8, False), (3, False), (2, True))[number % 4]
    rows = 2 * ratio + 3 if overlap else None
    return LayerSpec(
        window=Window(dim=dim, window=WINDOW, format=format.name),
        tail=Tail(dim=dim, ratio=ratio, overlap=overlap, rows=rows),
        entries=Entries(dim=dim, ratio=ratio, format=format.name),
    )


def _indexed_layer(number: int, format: Format) -> LayerSpec:
    """A format as index keys beside small entries."""
    dim = format.dim or INDEX_DIM
    ratio, overlap = ((4, True), (2, False))[number % 2]
    return LayerSpec(
        tail=Tail(dim=LATENT_DIM, ratio=ratio, overlap=overlap),
        entries=Entries(dim=LATENT_DIM, ratio=ratio, format="bf16"),
        index_tail=Tail(dim=dim, ratio=ratio, overlap=overlap),
        index_keys=IndexKeys(
            dim=dim,
            ratio=ratio,
            heads=3,
            topk=4,
            format=format.name,
            global_scale=GLOBAL_SCALE if format.global_scaled else 1.0,
        ),
    )


def _shared_layers() -> list[LayerSpec]:
    """Layer 0 with pools of ratio 1, and a layer that reads them."""
    return [
        LayerSpec(
            window=Window(dim=512, window=WINDOW, format="v41_528"),
            entries=Entries(dim=512, ratio=1, format="v41_fp4_288", share=share),
            index_keys=IndexKeys(dim=INDEX_DIM, ratio=1, heads=3, topk=4, format="index_fp4_68", share=share),
        )
        for share in (None, 0)
    ]


def _kv_layer(format: Format) -> LayerSpec:
    """A format for keys and values, paged: two key heads to one value head of another width."""
    scales = (GLOBAL_SCALE, 1.0) if format.global_scaled else msgspec.UNSET
    kv = KV(key_heads=2, key_dim=64, value_heads=1, value_dim=128, key_format=format.name, scales=scales)
    return LayerSpec(kv=kv)


def _kv_storages() -> list[LayerSpec]:
    """Every storage with every way of seeing, the values in another format than the keys; then keys and values alike.

    One of them has more heads of values than of keys.
    """
    ways = [("slot", None, None), ("paged", 7, None), ("paged", None, 5), ("ring", 7, None), ("ring", None, 5)]
    kinds = [("int8_row", "bf16", *way) for way in ways] + [("bf16", None, *way) for way in ways[:2]]
    return [
        LayerSpec(
            kv=KV(
                key_heads=2,
                value_heads=4 if storage == "ring" and chunk else None,
                key_dim=64,
                storage=storage,
                window=window,
                chunk=chunk,
                key_format=keys,
                value_format=values,
            )
        )
        for keys, values, storage, window, chunk in kinds
    ]


def _recurrent_layers() -> list[LayerSpec]:
    """States as matrices and as rows, convolutions of several widths, in plain and in coded formats."""
    return [
        LayerSpec(
            state=State(heads=3, key_dim=6, value_dim=10, format="fp32"), conv=Conv(dim=34, width=4, format="bf16")
        ),
        LayerSpec(state=State(heads=7, key_dim=4, format="bf16"), conv=Conv(dim=10, heads=3, width=2, format="fp32")),
        LayerSpec(state=State(heads=2, key_dim=8, value_dim=8, format="int8_row")),
    ]


SPECS = {NAME: conformance_spec, OVER_TOKENS: over_tokens_spec}
"""The kit's own specs by name."""
