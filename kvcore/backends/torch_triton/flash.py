"""FlashMLA's sparse decode in place of the Triton attention, where it is installed and the shape fits.

The choice is made when the verbs are created and can be forced with the environment variable KVCORE_ATTENTION:
``auto``, ``triton``, ``flash_mla`` or ``torch``, plain operations. Nothing is copied: ``kvcore.interop.flash_mla`` says
how pools are handed over.
"""

import inspect
import os
from functools import cache
from typing import Any

import torch

from kvcore.errors import BackendError, ShapeError
from kvcore.ops import Attention, PagedView, RingView

VARIABLE = "KVCORE_ATTENTION"
CHOICES = ("auto", "triton", "flash_mla", "torch")
FORMAT = "v4_584"
HEADS = (64, 128)
ALIGNED = 64
"""FlashMLA takes index lists whose length is a multiple of this."""
MOST_LISTED = 1 << 22
"""Rows that are listed at most for queries that select none: 16 MiB."""


def chosen(device: str, capability: int | None = None) -> str:
    """``triton``, ``flash_mla`` or ``torch``, for a device of which CUDA's capability is asked unless it is given.

    Raises:
        BackendError: KVCORE_ATTENTION is something else, or asks for FlashMLA where that is not usable.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise BackendError(got=wanted, where=VARIABLE, allowed=", ".join(CHOICES))
    if wanted == "flash_mla":
        missing = unusable()
        if missing:
            raise BackendError(got=wanted, where=VARIABLE, allowed=f"auto, triton or torch: {missing}")
    if wanted != "auto":
        return wanted
    kind = torch.device(device)
    if kind.type != "cuda":
        return "triton"
    major = torch.cuda.get_device_capability(kind)[0] if capability is None else capability // 10
    from kvcore.kernels.triton import device as gpu

    # On Hopper the pipelined kernel takes less time in every shape that was measured, and no lists of rows.
    faster = major == 10 or (major == 9 and not gpu.GLUON)
    return "flash_mla" if faster and not unusable() else "triton"


def unusable() -> str:
    """Why FlashMLA can't be called with ``v4_584`` rows; empty where it can.

    Its release of 2026-09-30 reads V4.1 rows alone; forks keep the older kernels and ask for them by ``use_legacy``.
    """
    try:
        import flash_mla  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        return f"flash_mla is not installed, or does not load ({error})"
    known = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    if "use_legacy" in known:
        return "" if flash_mla.has_legacy() else "this flash_mla was built without its older kernels"
    return "this flash_mla has no kernels for v4_584 rows" if "enable_batch_invariant" in known else ""


def fits(
    ops: Any, layer: int, index: Any, q: torch.Tensor, selected: torch.Tensor | None, own: torch.Tensor | None
) -> bool:
    """Whether FlashMLA takes the call: packed ``v4_584`` rows, 64 or 128 heads in bf16, a written ring."""
    if q.dtype != torch.bfloat16 or q.shape[1] not in HEADS or own is not None or not len(q):
        return False
    return (selected is not None or len(q) * every(ops, layer, index) <= MOST_LISTED) and not never(ops, layer)


def every(ops: Any, layer: int, index: Any) -> int:
    """Entries of a request at most, by the table of blocks; 0 of a layer without."""
    if ops.component(layer, "entries") is None:
        return 0
    return index.block_table.shape[1] * ops.plan.region(layer, "entries")[0].rows


def never(ops: Any, layer: int) -> str:
    """Why FlashMLA takes no call of a layer; "" where it takes those that ``fits`` lets pass."""
    if ops.component(layer, "window") is None:
        return "FlashMLA needs a window"
    roles = ("window",) if ops.component(layer, "entries") is None else ("window", "entries")
    regions = [ops.plan.region(layer, role)[0] for role in roles]
    if all((r.format.name, r.layout) == (FORMAT, "packed") for r in regions):
        return ""
    return f"FlashMLA reads packed {FORMAT} rows"


def attend(
    ops: Any,
    pools: Any,
    layer: int,
    index: Any,
    q: torch.Tensor,
    selected: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    frequencies: torch.Tensor | None = None,
) -> Attention:
    """Attention of q [T, H, 512] to the window and the entries, each query a batch entry of its own.

    Args:
        frequencies: of pairs of last channels by which kernels turn outputs back; None: of none.
    """
    from flash_mla import flash_mla_with_kvcache  # type: ignore[import-not-found]

    window, entries, window_cache, entries_cache = rows_of(ops, pools, layer, index, selected)
    extra: dict[str, Any] = {}
    if entries_cache is not None:
        extra = {"extra_k_cache": entries_cache, "extra_indices_in_kvcache": entries[:, None]}
    if "use_legacy" in inspect.signature(flash_mla_with_kvcache).parameters:
        extra["use_legacy"] = True
    arrays = (array for array in extra.values() if isinstance(array, torch.Tensor))
    shapes = (*q.shape, *window_cache.shape[:2], *(tuple(array.shape) for array in arrays))
    out, lse = flash_mla_with_kvcache(
        q[:, None].contiguous(),
        window_cache,
        None,
        None,
        q.shape[2],
        metadata(str(q.device), shapes),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window[:, None],
        attn_sink=None if sink is None else sink.to(torch.float32).contiguous(),
        **extra,
    )
    out, lse = out[:, 0], lse[:, :, 0].contiguous()
    # FlashMLA says +inf where a query has no key.
    if not hasattr(ops, "workspaces"):
        return Attention(out, torch.nan_to_num(lse, torch.nan, -torch.inf, -torch.inf))
    from kvcore.backends.torch_triton import launch

    launch.calls().flash_answer(out, lse, index.positions, frequencies)
    return Attention(out, lse)


def rows_of(ops: Any, pools: Any, layer: int, index: Any, selected: torch.Tensor | None) -> tuple[Any, Any, Any, Any]:
    """(window's rows [T, n], entries' rows [T, k], the ring as a cache, the blocks as one); None without entries.

    The entries are the selected ones, or all.
    """
    positions, request = index.positions, index.request_index
    (region,) = ops.plan.region(layer, "window")
    buffers = {name: pools[name] for name, _ in region.buffers.values()}
    ring = RingView(region.format, region.unit, buffers, index.slots, region.rows, index.lengths)
    span = ops.component(layer, "window").window
    paged, ratio, most = None, 0, every(ops, layer, index)
    if most and (selected is None or selected.shape[1]):
        (region,) = ops.plan.region(layer, "entries")
        ratio = ops.component(layer, "entries").ratio
        buffers = {name: pools[name] for name, _ in region.buffers.values()}
        counts = index.lengths // ratio
        paged = PagedView(region.format, region.unit, buffers, index.block_table, region.rows, counts)
    caches = k_cache(ring), None if paged is None else k_cache(paged)
    if hasattr(ops, "workspaces"):
        # One launch where torch would take a dozen.
        from kvcore.backends.torch_triton import launch

        numbers = None if paged is None or selected is None else selected.to(torch.int32).contiguous()
        most = most if selected is None else 0
        sizes = [span, ring.slot_rows, 1 if paged is None else paged.block_rows, ratio, most, ALIGNED]
        found = launch.calls().flash_rows(positions, request, index.slots, index.block_table, numbers, sizes)
        return *found, *caches
    window = aligned(window_indices(ring, positions, request, span))
    if paged is None:
        return window, None, *caches
    if selected is None:
        selected = torch.arange(most, dtype=torch.int32, device=positions.device).expand(len(positions), most)
    seen = torch.where(selected < ((positions + 1) // ratio)[:, None], selected, -1)
    return window, aligned(entry_indices(paged, seen, positions, request)), *caches


@cache
def metadata(device: str, shapes: tuple[Any, ...]) -> Any:
    """FlashMLA's schedule for calls of these shapes: it is made by the first and serves all that follow."""
    from flash_mla import get_mla_metadata  # type: ignore[import-not-found]

    return get_mla_metadata()[0]


def aligned(indices: torch.Tensor) -> torch.Tensor:
    """Indices [T, n] with -1 appended up to a multiple of 64."""
    return torch.nn.functional.pad(indices, (0, -indices.shape[1] % ALIGNED), value=-1).contiguous()


def k_cache(view: RingView | PagedView) -> Any:
    """The pool as [pages, rows, 1, 584] uint8: the same memory, first stride the page's bytes."""
    if view.format.name != FORMAT or view.layout.layout != "packed":
        got = f"{view.format.name} in layout {view.layout.layout}"
        raise ShapeError(got=got, where="flash_mla.k_cache", allowed=f"{FORMAT} in layout packed")
    (pool,) = view.buffers.values()
    rows, size = view.layout.rows, view.format.row
    return pool.as_strided((pool.shape[0], rows, 1, size), (pool.stride(0), size, size, 1))


def window_indices(view: RingView, positions: Any, request_index: Any, window: int) -> Any:
    """[T, window] int32 ring rows of the last ``window`` positions up to each query, ascending, -1 beyond."""
    known = request_index >= 0
    slots = torch.where(known, view.slots[request_index.clamp(min=0).long()], -1)[:, None]
    first = (positions + 1 - window).clamp(min=0)[:, None]
    seen = first + torch.arange(window, dtype=positions.dtype, device=positions.device)
    rows = slots * view.slot_rows + seen % view.slot_rows
    return torch.where((seen <= positions[:, None]) & (slots >= 0), rows, -1).to(torch.int32)


def entry_indices(view: PagedView, selected: Any, positions: Any, request_index: Any) -> Any:
    """[T, k] int32 block rows of selected entries; -1 stays -1, and so does what lies beyond a request's entries."""
    request = request_index.clamp(min=0).long()[:, None]
    columns = view.block_table.shape[1]
    column = (selected.clamp(min=0) // view.block_rows).clamp(max=columns - 1).long()
    block = view.block_table[request, column]
    known = (selected >= 0) & (selected < view.counts[request]) & (request_index >= 0)[:, None] & (block >= 0)
    return torch.where(known & (positions >= 0)[:, None], block * view.block_rows + selected % view.block_rows, -1).to(
        torch.int32
    )
