"""FlashMLA's sparse decode in place of the Triton attention, where it is installed and the shape fits.

The choice is made when the verbs are created and can be forced with the environment variable KVCORE_ATTENTION:
``auto``, ``triton``, ``flash_mla``, ``flashinfer`` (see ``flash_infer``, which shares the lists of rows) or ``torch``,
plain operations. Nothing is copied: ``kvcore.interop.flash_mla`` says how pools are handed over.
"""

import inspect
import os
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kvcore.errors import BackendError, ShapeError
from kvcore.ops import Attention, PagedView, RingView
from kvcore.spec import FORMATS

VARIABLE = "KVCORE_ATTENTION"
CHOICES = ("auto", "triton", "flash_mla", "flashinfer", "torch")
FORMAT = "v4_584"
HEADS = (64, 128)
ALIGNED = 64
"""FlashMLA takes index lists whose length is a multiple of this."""
MOST_LISTED = 1 << 22
"""Rows that are listed at most for queries that select none: 16 MiB."""


def chosen(device: str, capability: int | None = None) -> str:
    """A choice, for a device of which CUDA's capability is asked unless it is given; ``auto`` is none.

    Raises:
        BackendError: KVCORE_ATTENTION is something else, or asks for a package that is not usable.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise BackendError(got=wanted, where=VARIABLE, allowed=", ".join(CHOICES))
    if wanted in ("flash_mla", "flashinfer"):
        missing = unusable() if wanted == "flash_mla" else not_loaded(wanted)
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
    missing = not_loaded("flash_mla")
    if missing:
        return missing
    import flash_mla  # type: ignore[import-not-found]

    known = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    if "use_legacy" in known:
        return "" if flash_mla.has_legacy() else "this flash_mla was built without its older kernels"
    return "this flash_mla has no kernels for v4_584 rows" if "enable_batch_invariant" in known else ""


def not_loaded(package: str) -> str:
    """Why a package is not there; empty where it is."""
    try:
        import_module(package)
    except (ImportError, OSError) as error:
        return f"{package} is not installed, or does not load ({error})"
    return ""


class Served(NamedTuple):
    """What FlashMLA's calls must know of a layer.

    Attributes:
        window: name of the window's pool, of whose slots each has ``ring`` rows; ``span`` positions are seen.
        entries: the same of the entries, "" without; ``block`` of them in a block, each of ``ratio`` tokens, else 0.
        formats: of the window, and of the entries if there are any.
    """

    window: str
    ring: int
    span: int
    entries: str
    block: int
    ratio: int
    formats: tuple[str, ...] = (FORMAT,)


def served(
    ops: Any, layer: int, who: str = "FlashMLA", pairs: tuple[tuple[str, str], ...] = ((FORMAT, FORMAT),)
) -> Served | str:
    """What calls must know of a layer, or why a package that reads these formats of window and entries takes none."""
    if ops.component(layer, "window") is None:
        return f"{who} needs a window"
    roles = ("window",) if ops.component(layer, "entries") is None else ("window", "entries")
    regions = [ops.plan.region(layer, role)[0] for role in roles]
    formats = tuple(region.format.name for region in regions)
    if any(region.layout != "packed" for region in regions) or formats not in {pair[: len(formats)] for pair in pairs}:
        known = (" and ".join(dict.fromkeys(pair)) for pair in pairs)
        return f"{who} reads packed {', '.join(known)} rows"
    names = [name for region in regions for name in dict.fromkeys(name for name, _ in region.buffers.values())]
    found = names[0], regions[0].rows, ops.component(layer, "window").window
    if len(regions) == 1:
        return Served(*found, "", 0, 0, formats)
    return Served(*found, names[1], regions[1].rows, ops.component(layer, "entries").ratio, formats)


def fits(served: Served, index: Any, q: torch.Tensor, selected: torch.Tensor | None, own: torch.Tensor | None) -> bool:
    """Whether FlashMLA takes the call: 64 or 128 heads in bf16, a written ring, lists that are not too long."""
    if q.dtype != torch.bfloat16 or q.shape[1] not in HEADS or own is not None or not len(q):
        return False
    return listed(served, index, q, selected)


def listed(served: Served, index: Any, q: torch.Tensor, selected: torch.Tensor | None) -> bool:
    """Whether lists of the entries that queries attend to are not too long."""
    return selected is not None or len(q) * index.block_table.shape[1] * served.block <= MOST_LISTED


def attend(
    ops: Any,
    pools: Any,
    served: Served,
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

    window, entries = rows_of(ops, served, index, selected)
    window_cache, extra = pool_cache(pools[served.window], served.ring), options(flash_mla_with_kvcache)
    entries_cache = None
    if entries is not None:
        entries_cache = pool_cache(pools[served.entries], served.block)
        extra = {**extra, "extra_k_cache": entries_cache, "extra_indices_in_kvcache": entries[:, None]}
    shapes = tuple(
        None if array is None else array.shape for array in (q, window_cache, window, entries_cache, entries)
    )
    out, lse = flash_mla_with_kvcache(
        q[:, None].contiguous(),
        window_cache,
        None,
        None,
        q.shape[2],
        metadata(q.device, shapes),
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


@cache
def options(function: Any) -> dict[str, bool]:
    """What a release is given beside arrays: those that need it are asked for their older kernels."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(function).parameters else {}


def rows_of(ops: Any, served: Served, index: Any, selected: torch.Tensor | None) -> tuple[Any, Any]:
    """(window's rows [T, n], entries' rows [T, k]: of the selected entries or of all; None without entries)."""
    positions, request, slots, table = index.positions, index.request_index, index.slots, index.block_table
    some = bool(served.block) and (selected is None or selected.shape[1] > 0)
    most = table.shape[1] * served.block if selected is None else 0
    if hasattr(ops, "workspaces"):
        # One launch where torch would take a dozen.
        from kvcore.backends.torch_triton import launch

        numbers = selected.to(torch.int32).contiguous() if some and selected is not None else None
        sizes = [served.span, served.ring, max(1, served.block), served.ratio if some else 0, most, ALIGNED]
        window, entries = launch.calls().flash_rows(positions, request, slots, table, numbers, sizes)
        return window, entries if some else None
    window = aligned(ring_rows(slots, served.ring, positions, request, served.span))
    if not some:
        return window, None
    if selected is None:
        selected = torch.arange(most, dtype=torch.int32, device=positions.device).expand(len(positions), most)
    seen = torch.where(selected < ((positions + 1) // served.ratio)[:, None], selected, -1)
    counts = index.lengths // served.ratio
    return window, aligned(block_rows(table, served.block, counts, seen, positions, request))


@cache
def metadata(device: torch.device, shapes: tuple[Any, ...]) -> Any:
    """FlashMLA's schedule for calls of these shapes: it is made by the first and serves all that follow."""
    from flash_mla import get_mla_metadata  # type: ignore[import-not-found]

    return get_mla_metadata()[0]


def aligned(indices: torch.Tensor) -> torch.Tensor:
    """Indices [T, n] with -1 appended up to a multiple of 64."""
    return torch.nn.functional.pad(indices, (0, -indices.shape[1] % ALIGNED), value=-1).contiguous()


def pool_cache(pool: torch.Tensor, rows: int, format: str = FORMAT) -> torch.Tensor:
    """A pool [pages, bytes] as [pages, rows, 1, 584] uint8: the same memory, first stride the page's bytes."""
    size = FORMATS[format].row
    return pool.as_strided((pool.shape[0], rows, 1, size), (pool.stride(0), size, size, 1))


def k_cache(view: RingView | PagedView) -> Any:
    """``pool_cache`` of a view's pool.

    Raises:
        ShapeError: it holds no ``v4_584`` rows in packed pages.
    """
    if view.format.name != FORMAT or view.layout.layout != "packed":
        got = f"{view.format.name} in layout {view.layout.layout}"
        raise ShapeError(got=got, where="flash_mla.k_cache", allowed=f"{FORMAT} in layout packed")
    (pool,) = view.buffers.values()
    return pool_cache(pool, view.layout.rows)


def window_indices(view: RingView, positions: Any, request_index: Any, window: int) -> Any:
    """[T, window] int32 ring rows of the last ``window`` positions up to each query, ascending, -1 beyond."""
    return ring_rows(view.slots, view.slot_rows, positions, request_index, window)


def entry_indices(view: PagedView, selected: Any, positions: Any, request_index: Any) -> Any:
    """[T, k] int32 block rows of selected entries; -1 stays -1, and so does what lies beyond a request's entries."""
    return block_rows(view.block_table, view.block_rows, view.counts, selected, positions, request_index)


def ring_rows(slots: Any, ring: int, positions: Any, request_index: Any, window: int) -> Any:
    """``window_indices`` of rings of ``ring`` rows in ``slots``."""
    known = request_index >= 0
    slots = torch.where(known, slots[request_index.clamp(min=0).long()], -1)[:, None]
    first = (positions + 1 - window).clamp(min=0)[:, None]
    seen = first + torch.arange(window, dtype=positions.dtype, device=positions.device)
    rows = slots * ring + seen % ring
    return torch.where((seen <= positions[:, None]) & (slots >= 0), rows, -1).to(torch.int32)


def block_rows(table: Any, rows: int, counts: Any, selected: Any, positions: Any, request_index: Any) -> Any:
    """``entry_indices`` of blocks of ``rows`` entries in ``table``."""
    request = request_index.clamp(min=0).long()[:, None]
    column = (selected.clamp(min=0) // rows).clamp(max=table.shape[1] - 1).long()
    block = table[request, column]
    known = (selected >= 0) & (selected < counts[request]) & (request_index >= 0)[:, None] & (block >= 0)
    return torch.where(known & (positions >= 0)[:, None], block * rows + selected % rows, -1).to(torch.int32)
