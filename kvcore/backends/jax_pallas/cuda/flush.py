"""The flush: every entry that a step completes, pooled, encoded and stored, and the tails' rows, in one launch."""

import jax
import jax.numpy as jnp
import numpy as np

from kvcore.backends.jax_pallas.cuda.arguments import (
    covers,
    fields,
    is_native,
    keeps_tail,
    record_of,
    tail_of,
    tails,
    updated,
)
from kvcore.backends.jax_pallas.cuda.call import As
from kvcore.kernels.triton.flush import flush_kernel
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.shape import Stream, flush_cut


def flushes(layer, roles) -> bool:
    """True where a flush of these roles (``entries``, ``index_keys``) is one launch."""
    return all(covers(layer.regions[role][0]) and keeps_tail(layer, layer.tail_of(role)) for role in roles)


def flush(layer, pools, index, streams, rope, *, eps, append, newest):
    """Pools with every entry that the step completes pooled, normed, rotated, encoded and stored, in one launch.

    Args:
        streams: role -> (kv, score, norm weight or None), ``entries`` first, then ``index_keys`` if there are any.
        append: store the step's own raw rows in the tails, too.
        newest: most new tokens of a request.
    """
    count, requests = len(index.positions), len(index.slots)
    if not count:
        return pools
    wide = any(array.dtype != jnp.bfloat16 for kv, score, _ in streams.values() for array in (kv, score))
    cuts, written, arguments, spare = [], [], {}, []
    # Without index keys the kernel is given the entries twice, and reads them once.
    for (role, (kv, score, weight)), mark in zip([*streams.items()] * 2, ("", "index_"), strict=False):
        kv, score = (array.astype(jnp.float32 if wide else jnp.bfloat16) for array in (kv, score))
        (region,), (ring,) = layer.regions[role], layer.regions[layer.tail_of(role)]
        record, names = record_of(region, layer.global_scale(role))
        tail, tail_names = tail_of(layer, layer.tail_of(role))
        given = {
            "kv_ptr": kv,
            "score_ptr": score,
            **tails(pools, tail_names),
            **fields(pools, names),
            "norm_ptr": kv if weight is None else weight,
        }
        arguments |= {f"{mark}{name}": value for name, value in given.items()}
        cuts.append(Stream(record, tail, weight is not None))
        written += [*names, *(tail_names if append else [])]
        spare.append(ring.rows - layer.component(layer.tail_of(role)).span)
    cuts = cuts[: len(streams)]
    options = {
        "append": append,
        "beside": newest <= min(spare),
        "pairs": 0 if rope is None else len(rope),
        "native": is_native(),
    }
    cut = flush_cut(cuts, count, requests, 4 if wide else 2, **options)
    arguments |= {
        "frequencies_ptr": As(index.positions, "float32") if rope is None else rope,
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "slots_ptr": index.slots,
        "starts_ptr": index.starts,
        "lengths_ptr": index.lengths,
        "stored_ptr": index.stored,
        "table_ptr": index.block_table,
        "scratch_ptr": jax.ShapeDtypeStruct((cut.windows * power_of_two(cuts[0].record.dim),), jnp.float32),
        "arrivals_ptr": jax.ShapeDtypeStruct((cut.windows,), jnp.int32),
        "count": count,
        "requests": requests,
        "table_columns": index.block_table.shape[1],
        "programs": cut.programs,
        "eps": np.float32(eps),
        **cut.constants,
    }
    return updated(pools, flush_kernel, cut.grid, arguments, written, warps=cut.warps, zeroed=("arrivals_ptr",))
