"""One step of a model's cache, every layer, twice: as one pure function for ``jit``, and through handles."""

from typing import Any, NamedTuple

import jax
import numpy as np

import kvcore
from kvcore.ops import StepIndex
from kvcore.pools import Pools
from kvcore.spec import CacheSpec, presets

CSA_HCA = CacheSpec(layers=presets.deepseek_v4_flash_tiny(block_tokens=16).layers[1:3], block_tokens=16)
HEADS = 4


class Given(NamedTuple):
    """What a model gives one latent layer: rows, compressor rows, finished entries, queries, selected entries."""

    rows: Any
    tail: Any
    index_tail: Any
    entries: Any
    keys: Any
    q: Any
    picks: Any


def given(spec: CacheSpec, tokens: int, closed: int, rng: np.random.Generator) -> list[Given]:
    """Random input for ``tokens`` token rows and at most ``closed`` entries that close."""

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found = []
    for layer in spec.layers:
        tail, index_tail = (
            tuple(floats(2, tokens, part.width)) if part else None for part in (layer.tail, layer.index_tail)
        )
        keys = floats(closed, layer.index_keys.dim) if layer.index_keys else None
        picks = np.argsort(rng.random((tokens, 24)), axis=1)[:, :6].astype(np.int32) - 2
        dim = layer.window.dim
        found.append(
            Given(floats(tokens, dim), tail, index_tail, floats(closed, dim), keys, floats(tokens, HEADS, dim), picks)
        )
    return found


def functional(
    ops: Any, pools: Pools, index: StepIndex, inputs: list[Given], *, flush: bool = False, closed: int = 0
) -> tuple[Pools, list[Any]]:
    """The step as a pure function of arrays. Up to ``1 + spare`` new tokens a request, so rings are written at once."""
    outs = []
    for number, x in enumerate(inputs):
        pools = ops.append_window(pools, number, index, x.rows)
        pools = ops.append_tail(pools, number, index, *x.tail)
        index_tail = (None, None) if x.index_tail is None else x.index_tail
        if x.index_tail is not None:
            pools = ops.append_index_tail(pools, number, index, *x.index_tail)
        if flush:
            pools = ops.flush(pools, number, index, *x.tail, *index_tail, closed=closed)
        else:
            pools = ops.store_entries(pools, number, index, x.entries, x.keys)
        outs.append(ops.attend(pools, number, index, x.q, x.picks).out)
        outs.append(ops.attend(pools, number, index, x.q).out)
    return pools, outs


def through_handles(step: Any, inputs: list[Given], *, flush: bool = False) -> list[np.ndarray]:
    """The same step through a cache's handles."""
    outs = []
    for number, x in enumerate(inputs):
        layer = step.layer(number)
        layer.append_window(x.rows)
        layer.append_tail(*x.tail)
        if x.index_tail is not None:
            layer.append_index_tail(*x.index_tail)
        if flush:
            layer.flush()
        else:
            count = len(layer.closed.entry_index)
            layer.store_entries(x.entries[:count], None if x.keys is None else x.keys[:count])
        outs += [layer.attend(x.q, x.picks).out, layer.attend(x.q).out]
    return [kvcore.to_numpy(out) for out in outs]


def caches(layout: str = "planar", spec: CacheSpec = CSA_HCA, **sizes: int) -> tuple[kvcore.Cache, kvcore.Cache]:
    """The same cache on the reference and on JAX."""
    sizes = {"max_requests": 3, "max_tokens": 192, "max_draft_tokens": 3, **sizes}
    return tuple(
        kvcore.create_cache(spec, backend=backend, layout=layout, **sizes) for backend in ("reference", "jax_pallas")
    )


def pointers(pools: Pools) -> list[int]:
    """Where the arrays lie."""
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pools)]
