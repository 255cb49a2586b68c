"""The launch of the flush."""

from functools import cache, lru_cache
from typing import Any

from kvcore.kernels.triton import flush
from kvcore.kernels.triton.launches.launching import BOUND, POOLS, TAILS, Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.shape import FlushConfig, Stream, flush_config

TAIL = ("kv_tail", "score_tail")


@lru_cache(4096)
def _flush(
    records: tuple[int, ...], normed: tuple[bool, bool], count: int, requests: int, given_bytes: int, append: bool,
    beside: bool, pairs: int, ahead: int, native: bool,
) -> tuple[FlushConfig, Kernel]:  # fmt: skip
    streams = [
        Stream(BOUND[record].record, TAILS[tail].record, norm)
        for record, tail, norm in zip(records[::2], records[1::2], normed, strict=False)
    ]
    options = {"append": append, "beside": beside, "pairs": pairs, "native": native}
    config = flush_config(streams, count, requests, given_bytes, **options)
    warps = config.grid[0] * config.grid[1] * config.warps
    return config, _kernel(tuple(config.constants.items()), config.warps, warps <= ahead)


@cache
def _kernel(constants: tuple[tuple[str, Any], ...], warps: int, ahead: bool) -> Kernel:
    """One for all steps that are cut alike."""
    named = dict(constants)
    first = (*POOLS, *(TAIL if named["APPEND"] else ()))
    writes = *first, *(f"index_{name}" for name in first), "scratch", "arrivals"
    return Kernel(flush.flush_kernel, named, warps, writes=writes, zeroed=("arrivals",), ahead=ahead)


@launch("buffers", "index_buffers", "tail_buffers", "index_tail_buffers", "scratch", "arrivals")
def flush_rows(
    to: Framework, kv: Array, score: Array, tail_buffers: list[Array], buffers: list[Array],
    norm_weight: Array | None, index_kv: Array | None, index_score: Array | None, index_tail_buffers: list[Array],
    index_buffers: list[Array], index_norm_weight: Array | None, frequencies: Array | None, positions: Array,
    request_index: Array, slots: Array, starts: Array, lengths: Array, stored: Array, block_table: Array,
    scratch: Array | None, arrivals: Array | None, records: list[int], eps: float, append: bool, beside: bool,
) -> None:  # fmt: skip
    """Pool, norm, rotate, encode and store every entry that the step completes, and its index key.

    Args:
        scratch, arrivals: fp32 and zeroed int32, rows of pooled channels and counters for every window that can close
            at once.
        records: numbers of the entries' record and tail, then of the index keys' record and tail where there are any;
            else their lists of buffers are empty.
        append: write the step's own rows to the tails, too.
        beside: they replace none that a window closing in this step needs, so any program may write them at any time.
    """
    count, requests = positions.shape[0], slots.shape[0]
    if count == 0:
        return
    bound, t = BOUND[records[0]], TAILS[records[1]]
    index_bound, it = (BOUND[records[2]], TAILS[records[3]]) if len(records) > 2 else (bound, t)
    kv, score = to.aligned(kv), to.aligned(score)
    config, kernel = _flush(
        tuple(records), (norm_weight is not None, index_norm_weight is not None), count, requests,
        4 if kv.dtype == to.float32 else 2, append, beside, 0 if frequencies is None else frequencies.shape[0],
        to.ahead(kv), to.native(kv),
    )  # fmt: skip
    scratch = to.part(scratch, 0, (config.windows * power_of_two(bound.record.dim),), to.float32)
    # Without index keys the kernel is given the entries twice, and reads them once.
    to.run(
        kernel,
        config.grid,
        (
            kv, score, *t.given(to, tail_buffers), *bound.given(buffers),
            kv if norm_weight is None else to.dense(norm_weight),
            kv if index_kv is None else to.aligned(index_kv), score if index_score is None else to.aligned(index_score),
            *it.given(to, index_tail_buffers or tail_buffers), *index_bound.given(index_buffers or buffers),
            kv if index_norm_weight is None else to.dense(index_norm_weight),
            scratch if frequencies is None else frequencies,
            positions, request_index, slots, starts, lengths, stored, block_table,
            scratch, to.part(arrivals, 0, (config.windows,), to.int32),
        ),
        (count, requests, block_table.shape[1], config.programs, eps),
    )  # fmt: skip
