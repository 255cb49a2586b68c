"""Every kind of layer view, and one step of a model over two layers of it: append, then attend to what comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcore.interop.jax.views import CacheViews, init_views
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec

BATCH, LENGTH, HEADS, DIM = 2, 90, 2, 32
WINDOW = 24


def classic(format: str = "bf16", **fields: Any) -> LayerSpec:
    return LayerSpec(kv=KV(key_heads=HEADS, key_dim=DIM, key_format=format, **fields))


KINDS = {
    "full, paged": classic(),
    "full, contiguous": classic("fp32", storage="slot"),
    "sliding": classic(storage="ring", window=WINDOW),
    "sliding, paged": classic(window=WINDOW),
    "chunked": classic("fp32", storage="ring", chunk=WINDOW),
    "int8_row": classic("int8_row"),
    "fp8_row, sliding": classic("fp8_row", storage="ring", window=WINDOW),
    "mxfp4": classic("mxfp4"),
    "latent": LayerSpec(entries=Entries(dim=DIM, ratio=1, format="bf16")),
    "latent and index keys": LayerSpec(
        entries=Entries(dim=DIM, ratio=1, format="bf16"),
        index_keys=IndexKeys(dim=128, ratio=1, heads=2, topk=4, format="index_fp8_132_fp32scale"),
    ),
}


def made(kind: str, layers: int = 2, **options: Any) -> CacheViews:
    # Blocks that the length does not fill: what is gathered is not of a pool's size.
    spec = CacheSpec(layers=(KINDS[kind],) * layers, block_tokens=16)
    return init_views(spec, batch=BATCH, max_length=LENGTH, **options)


def given(kind: str, new: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """A layer's input of one step: keys and values, or latent rows and index keys."""
    rng, layer = np.random.default_rng(seed), KINDS[kind]
    rows = [(HEADS, DIM)] * 2 if layer.kv is not None else [(part.dim,) for _, part in layer.components()]
    return tuple(jnp.asarray(rng.standard_normal((BATCH, new, *row), np.float32)) for row in rows)


def appended(view: Any, arrays: tuple[jax.Array, ...]) -> Any:
    return view.append(*arrays) if view.kind.layer.kv is not None else view.append_latents(*arrays)


def attended(found: Any, query: jax.Array) -> jax.Array:
    """Softmax attention [B, S, heads, dim] to what an append shows; a query that sees nothing gets zeros."""
    if hasattr(found, "keys"):
        keys, values = found.keys, found.values
    else:
        keys = values = jnp.repeat(found.rows[:, :, None], HEADS, axis=2)
    keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    logits = jnp.einsum("bshd,bnhd->bhsn", query, keys)
    weights = jnp.where(found.mask[:, None], jnp.exp(logits), 0)
    total = jnp.sum(weights, axis=3, keepdims=True)
    return jnp.einsum("bhsn,bnhd->bshd", weights / jnp.where(total == 0, 1, total), values)


def step(views: CacheViews, arrays: tuple[jax.Array, ...]) -> tuple[CacheViews, jax.Array]:
    """All layers of a model: every one appends the same rows, and their outs are added."""
    outs = jnp.zeros((BATCH, arrays[0].shape[1], HEADS, DIM))
    query = jnp.broadcast_to(arrays[0].reshape(*arrays[0].shape[:2], -1, DIM), outs.shape)
    for number, view in enumerate(views):
        found = appended(view, arrays)
        outs = outs + attended(found, query)
        views = views.with_layer(number, found.view)
    return views, outs


def copied(compiled: Any, pools: Any) -> list[str]:
    """Instructions of a compiled function that copy or transpose as many elements as some pool has, of its dtype."""
    names = {"uint8": "u8", "float32": "f32"}
    sizes = {(names[str(pool.dtype)], pool.size) for pool in jax.tree.leaves(pools)}
    found = []
    for line in compiled.as_text().splitlines():
        shape, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")[2].partition("]")
        dtype, _, sizes_of = shape.lstrip("(").partition("[")
        if any(f" {move}(" in rest for move in ("copy", "copy-start", "transpose")):
            count = int(np.prod([int(size) for size in sizes_of.split(",") if size]))
            found += [line.strip()] if (dtype, count) in sizes else []
    return found
