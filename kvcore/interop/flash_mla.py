"""The cache as FlashMLA's sparse decode takes it: the pools themselves as key caches, rows as physical indices.

FlashMLA (``flash_mla_with_kvcache`` with an fp8 cache) wants pages of ``v4_584`` rows as a tensor [pages, rows, 1, 584]
whose first stride is the page's bytes, and for every query the physical rows ``page * rows + row`` as int32, -1 where
there is none. The window is one cache, the compressed entries are the extra one. Nothing is copied; FlashMLA itself is
not imported.

The second stride says 584, but row r does not begin at ``r * 584``: a page holds all codes and rope first, 576 bytes a
row, then all scales, 8 bytes a row. Only kernels that know the page may read the tensor.
"""

from typing import Any, NamedTuple

from kvcore.backends.torch_triton.flash import FORMAT, entry_indices, k_cache, window_indices
from kvcore.cache.inside import writes_of
from kvcore.errors import StepError

__all__ = ["FORMAT", "SparseDecode", "entry_indices", "k_cache", "sparse_decode", "window_indices"]

Array = Any


class SparseDecode(NamedTuple):
    """Arguments of the sparse decode, T queries as a batch of T with one query each.

    Attributes:
        k_cache: [slots, ring rows, 1, 584] uint8, the window.
        indices: [T, 1, window] int32 rows of it, ascending by position, -1 beyond.
        extra_k_cache: [blocks, block rows, 1, 584] uint8, the entries; None for a layer without.
        extra_indices: [T, 1, k] int32 rows of it, -1 where the selection has none.
    """

    k_cache: Array
    indices: Array
    extra_k_cache: Array | None
    extra_indices: Array | None


def sparse_decode(
    layer: Any, positions: Array, request_index: Array, window: int, selected: Array | None
) -> SparseDecode:
    """Everything that FlashMLA needs of a layer in an open step, after ``append_window``.

    Args:
        layer: a handle, ``step.layer(i)``, of a torch cache in the packed layout.
        positions: [T] positions of the queries, ``step.positions``.
        request_index: [T] their requests, ``step.request_index``.
        window: positions that a query sees, its own included.
        selected: [T, k] entries by logical index, as ``select`` returns them; None for a layer without entries.

    Raises:
        ShapeError: the pools are not ``v4_584`` in packed pages.
        StepError: the step brings more tokens than the ring has spare rows, so its window rows wait for the commit; or
            it replays a hit under the policy ``approximate``, whose windows begin later than FlashMLA knows.
    """
    if writes_of(layer).context.index.left_padding is not None:
        raise StepError(
            got="a step that replays the window of a prefix hit", where="sparse_decode", allowed="layer.attend(q)"
        )
    ring = layer.window_view()
    extra = layer.entries_view() if selected is not None else None
    return SparseDecode(
        k_cache(ring),
        window_indices(ring, positions, request_index, window)[:, None],
        None if extra is None else k_cache(extra),
        None
        if extra is None or selected is None
        else entry_indices(extra, selected, positions, request_index)[:, None],
    )
