"""The launch of the flush."""

from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import BOUND, TAILS, is_native, options, registered
from kvcore.kernels.triton import flush
from kvcore.kernels.triton.shape import Stream, flush_cut


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
    streams = [Stream(bound.record, t.record, norm_weight is not None)]
    if with_index:
        streams.append(Stream(index_bound.record, it.record, index_norm_weight is not None))
    cut = flush_cut(
        streams,
        count,
        slots.shape[0],
        kv.itemsize,
        append=append,
        beside=beside,
        pairs=0 if frequencies is None else frequencies.shape[0],
        native=is_native(kv.device),
    )
    index_buffers = index_buffers or buffers
    flush.flush_kernel[cut.grid](
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
        count,
        slots.shape[0],
        block_table.shape[1],
        cut.programs,
        eps,
        **cut.constants,
        num_warps=cut.warps,
        **options(kv.device),
    )


def aligned(values: Tensor) -> Tensor:
    """Contiguous values that start on a 16-byte boundary, as wide loads need; a copy only where they don't.

    Asked inside the operator: while ``torch.compile`` traces, nobody knows where a tensor starts.
    """
    values = values.contiguous()
    return values.clone() if values.storage_offset() * values.itemsize % 16 else values
