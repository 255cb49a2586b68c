"""The launch of the flush."""

from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import BOUND, TAILS, is_native, registered
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import flush
from kvcore.kernels.triton.shape import FlushCut, Stream, flush_cut


@lru_cache(4096)
def _flush(
    records: tuple[int, ...],
    normed: tuple[bool, bool],
    count: int,
    requests: int,
    given_bytes: int,
    append: bool,
    beside: bool,
    pairs: int,
    native: bool,
) -> tuple[FlushCut, Launcher]:
    streams = [
        Stream(BOUND[record].record, TAILS[tail].record, norm)
        for record, tail, norm in zip(records[::2], records[1::2], normed, strict=False)
    ]
    options = {"append": append, "beside": beside, "pairs": pairs, "native": native}
    cut = flush_cut(streams, count, requests, given_bytes, **options)
    return cut, _launcher(tuple(cut.constants.items()), cut.warps)


@cache
def _launcher(constants: tuple[tuple[str, Any], ...], warps: int) -> Launcher:
    """One for all steps that are cut alike."""
    return Launcher(flush.flush_kernel, dict(constants), warps)


@registered(("buffers", "index_buffers", "tail_buffers", "index_tail_buffers", "scratch", "arrivals"))
def flush_rows(
    kv: Tensor,
    score: Tensor,
    tail_buffers: list[Tensor],
    buffers: list[Tensor],
    norm_weight: Tensor | None,
    index_kv: Tensor | None,
    index_score: Tensor | None,
    index_tail_buffers: list[Tensor],
    index_buffers: list[Tensor],
    index_norm_weight: Tensor | None,
    frequencies: Tensor | None,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    stored: Tensor,
    block_table: Tensor,
    scratch: Tensor,
    arrivals: Tensor,
    records: list[int],
    eps: float,
    append: bool,
    beside: bool,
) -> None:
    """Pool, norm, rotate, encode and store every entry that the step completes, and its index key.

    Args:
        records: numbers of the entries' record and tail, then of the index keys' record and tail where there are any;
            else their lists of buffers are empty.
        append: write the step's own rows to the tails, too.
        beside: they replace none that a window closing in this step needs, so any program may write them at any time.
    """
    count = positions.shape[0]
    if count == 0:
        return
    bound, t = BOUND[records[0]], TAILS[records[1]]
    with_index = len(records) > 2
    index_bound, it = (BOUND[records[2]], TAILS[records[3]]) if with_index else (bound, t)
    kv, score = aligned(kv), aligned(score)
    index_kv = None if index_kv is None else aligned(index_kv)
    index_score = None if index_score is None else aligned(index_score)
    cut, run = _flush(
        tuple(records),
        (norm_weight is not None, index_norm_weight is not None),
        count,
        slots.shape[0],
        kv.itemsize,
        append,
        beside,
        0 if frequencies is None else len(frequencies),
        is_native(kv.device),
    )
    index_buffers = index_buffers or buffers
    run(
        cut.grid,
        (
            kv,
            score,
            *t.given(tail_buffers),
            buffers[bound.codes],
            buffers[bound.scales],
            buffers[bound.plain],
            kv if norm_weight is None else norm_weight.contiguous(),
            kv if index_kv is None else index_kv,
            score if index_score is None else index_score,
            *it.given(index_tail_buffers or tail_buffers),
            index_buffers[index_bound.codes],
            index_buffers[index_bound.scales],
            index_buffers[index_bound.plain],
            kv if index_norm_weight is None else index_norm_weight.contiguous(),
            scratch if frequencies is None else frequencies,
            positions,
            request_index,
            slots,
            starts,
            lengths,
            stored,
            block_table,
            scratch,
            arrivals,
        ),
        (count, slots.shape[0], block_table.shape[1], cut.programs, eps),
    )


def aligned(values: Tensor) -> Tensor:
    """Contiguous values that start on a 16-byte boundary, as wide loads need; a copy only where they don't.

    Asked inside the operator: while ``torch.compile`` traces, nobody knows where a tensor starts.
    """
    values = values.contiguous()
    return values.clone() if values.storage_offset() * values.itemsize % 16 else values
