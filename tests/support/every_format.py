"""A request with rows of every format and every component, as small as can be; golden files hold it."""

from typing import Any

import kvcore
from kvcore.spec import KV, CacheSpec, Conv, Entries, IndexKeys, LayerSpec, State, Tail, Window
from tests.support import stories

TOKENS = 70
"""A full block and part of the next; over tokens, two closed groups of 32 or one of 64, and an open one."""

HEADS = ("bf16", "fp16", "fp32", "int8_row", "fp8_row", "nf4_b64", "mxfp4", "int4_g32", "int4_g64")
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "mxfp8", "fp4_mx_block16", "nvfp4")
LATENT = ("v4_584", "v41_528", "v41_fp4_288", "row_580", "mxfp4_368", "v4_nvfp4_384")
INDEX = ("index_fp8_132", "index_fp8_132_fp32scale", "index_fp4_68", "index_nvfp4")


def _entries(format: str, dim: int, key: str) -> LayerSpec:
    scale = {"global_scale": 0.25} if "nvfp4" in key else {}
    return LayerSpec(
        window=Window(dim=dim, window=2, format=format),
        entries=Entries(dim=dim, ratio=32, format=format),
        index_keys=IndexKeys(dim=128, ratio=32, heads=1, topk=1, format=key, **scale),
    )


def _scales(format: str) -> dict[str, Any]:
    return {"scales": (0.25, 3.0)} if format == "nvfp4" else {}


def spec() -> CacheSpec:
    """Of all of them; blocks of 64 tokens."""
    keys = [name for one in INDEX for name in (one, f"{one}_h")]
    latent = [("v32_656", 576), ("v32_nvfp4_352", 576), *((name, 512) for name in LATENT), ("v32_nvfp4_432", 576)]
    classic = [KV(key_heads=2, key_dim=8, key_format=name) for name in HEADS]
    over = [
        KV(key_heads=1, key_dim=32, key_format="int4_ch32", value_format="int4_g32"),
        KV(key_heads=2, key_dim=4, value_dim=6, key_format="int4_ch64", value_format="int4_ch64"),
    ]
    rings = [
        KV(key_heads=1, key_dim=4, storage="ring", window=5),
        KV(key_heads=1, key_dim=4, storage="ring", chunk=6),
        KV(key_heads=1, key_dim=2, storage="slot"),
    ]
    tails = [
        LayerSpec(
            window=Window(dim=8, window=3, format="fp32"),
            tail=Tail(dim=8, ratio=ratio, overlap=overlap),
            entries=Entries(dim=8, ratio=ratio, format="fp32"),
            index_tail=Tail(dim=8, ratio=ratio, overlap=overlap) if overlap else None,
            index_keys=IndexKeys(dim=8, ratio=ratio, heads=1, topk=1, format="bf16") if overlap else None,
        )
        for ratio, overlap in ((4, True), (8, False))
    ]
    return CacheSpec(
        layers=(
            *(LayerSpec(kv=kv) for kv in (*classic, *over, *rings)),
            *(LayerSpec(kv=KV(key_heads=2, key_dim=8, key_format=name, **_scales(name))) for name in PER_TOKEN_HEAD),
            *(_entries(name, dim, keys[number % len(keys)]) for number, (name, dim) in enumerate(latent)),
            *(_entries("fp16", 128, key) for key in keys[len(latent) :]),
            *tails,
            LayerSpec(state=State(heads=2, key_dim=3, value_dim=4), conv=Conv(dim=5, width=4, heads=2)),
            LayerSpec(state=State(heads=3, key_dim=2, format="bf16"), conv=Conv(dim=4, width=2, format="fp32")),
        ),
        block_tokens=64,
        name="every format",
    )


def told(backend: str = "reference") -> tuple[kvcore.Cache, Any]:
    """A cache and its request, whose tokens came in two steps."""
    cache = stories.create(spec(), backend, max_requests=2, max_tokens=256, max_draft_tokens=1)
    request = cache.admit()
    for first, end in ((0, TOKENS - 3), (TOKENS - 3, TOKENS)):
        tokens = list(range(first, end))
        with cache.step({request: len(tokens)}) as step:
            stories.feed(step, tokens)
    return cache, request


def used(found: CacheSpec) -> set[str]:
    """Names of the formats of all parts."""
    return {part.format.name for _, _, component in found.components() for part in component.parts}


def kinds(found: CacheSpec) -> set[type]:
    """Classes of components."""
    return {type(component) for _, _, component in found.components()}
