"""The memory of SGLang's pools as ``kvcore.adopt`` takes it: views of their buffers, and the layout's name.

SGLang is not imported; names and layouts are those of 0.5.23. A pool's page of latent rows is padded to a multiple of
576 bytes, and has all rows' values before all rows' scales; states of a compressor are a ring for each request slot.
"""

from typing import Any

from kvcore.errors import SpecError

VALUES_AND_SCALES = {"DeepSeekV4SingleKVPool": "kv_buffer", "DeepSeekV4IndexerPool": "index_k_with_scale_buffer"}
"""Pools of pages -> the attribute with a tensor [pages, bytes] for every layer."""


def tensors_from(pool: Any) -> tuple[list[Any], dict[str, str]]:
    """(tensors, layout) of a pool of keys and values, of latent rows, or of those with index keys, for ``adopt``.

    Args:
        pool: ``MHATokenToKVPool``, ``MLATokenToKVPool`` or ``DSATokenToKVPool``, whose spec ``spec_from`` gives.

    Returns:
        Views, in the spec's order; blocks are the pool's pages, block n the slots ``n * page_size`` and following.

    Raises:
        SpecError: another pool, or one that lays its memory out otherwise.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> import numpy as np
        >>> buffers = {"k_buffer": [np.zeros((80, 2, 8))], "v_buffer": [np.zeros((80, 2, 8))]}
        >>> pool = type("MHATokenToKVPool", (Some,), {})(page_size=16, kv_cache_layout="nhd", **buffers)
        >>> tensors, layout = tensors_from(pool)
        >>> layout, [one.shape for one in tensors[0]]
        ({'kv': 'TWO_X_NL_X_NBBS_NH_HS'}, [(80, 2, 8)])
    """
    kind = type(pool).__name__
    if kind == "MHATokenToKVPool":
        laid = pool.kv_cache_layout
        if laid not in ("nhd", "hnd") or getattr(pool, "k_scale_buffer", None) is not None:
            raise _other(laid, "nhd or hnd, whose rows are not quantised")
        if laid == "nhd":
            return [list(pool.k_buffer), list(pool.v_buffer)], {"kv": "TWO_X_NL_X_NBBS_NH_HS"}
        # Pages [heads, rows, channels] as rows of heads, which lie where they lie.
        views = [[held.swapaxes(1, 2) for held in buffers] for buffers in (pool.k_buffer, pool.v_buffer)]
        return views, {"kv": "TWO_X_NL_X_NB_BS_NH_HS"}
    if kind == "MLATokenToKVPool":
        return list(pool.kv_buffer), {"entries": "NL_X_NBBS_ONE_HS"}
    if kind == "DSATokenToKVPool":
        keys = _pages(pool.index_k_with_scale_buffer, pool.page_size)
        layout = {"entries": "NL_X_NBBS_ONE_HS", "index_keys": "NL_X_NB_BSV_BSS"}
        return [one for pair in zip(pool.kv_buffer, keys, strict=True) for one in pair], layout
    reasons = {
        "SWAKVPool": "rows of sliding layers lie where full_to_swa_index_mapping says, which changes with every step",
        "DeepSeekV4TokenToKVPool": "its parts have tables of their own: pages_of and rings_of give those of each",
        "HybridLinearKVPool": "states belong to slots of the request pool, not to it",
    }
    allowed = "MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool"
    hint = f"Refused: {reasons[kind]}." if kind in reasons else ""
    raise SpecError(got=kind, where="tensors_from", allowed=allowed, hint=hint)


def pages_of(pool: Any) -> list[Any]:
    """Pages [pages, rows, bytes of a row] of every layer of one of DeepSeek-V4's pools, for ``NL_X_NB_BSV_BSS``.

    Args:
        pool: ``DeepSeekV4SingleKVPool`` (windows or entries) or ``DeepSeekV4IndexerPool``.

    Raises:
        SpecError: another pool, or index keys in the layout of AMD's kernels.
    """
    kind = type(pool).__name__
    buffers = getattr(pool, VALUES_AND_SCALES.get(kind, ""), None)
    if buffers is None:
        raise _other(kind, " or ".join(VALUES_AND_SCALES))
    return _pages(buffers, pool.page_size, pool.get_bytes_per_token())


def rings_of(pool: Any) -> Any:
    """Rings [slots of requests, rows, width] of a ``CompressStatePool``, for ``"rings NL_X_NB_BS_HS"``.

    Row p of a request's ring is ``req_pool_idx * ring_size + p % ring_size``.

    Raises:
        SpecError: another pool; states that SGLang compresses as they come, of which one row is left.
    """
    if type(pool).__name__ != "CompressStatePool" or pool.online:
        raise _other(f"{type(pool).__name__}, online {getattr(pool, 'online', None)}", "CompressStatePool with rings")
    rows = pool.kv_score_buffer.kv_score
    slots = (len(rows) - 1) // pool.ring_size
    return rows[: slots * pool.ring_size].reshape(slots, pool.ring_size, rows.shape[1])


def _pages(buffers: Any, rows: int, size: int | None = None) -> list[Any]:
    """Views [pages, rows, bytes of a row] of pages [pages, bytes], which may be longer."""
    found: list[Any] = []
    for held in buffers:
        width = held.shape[1] // rows if size is None else size
        found.append(held[:, : rows * width].unflatten(1, (rows, width)))
    return found


def _other(got: Any, allowed: str) -> SpecError:
    return SpecError(got=got, where="tensors_from", allowed=allowed)
