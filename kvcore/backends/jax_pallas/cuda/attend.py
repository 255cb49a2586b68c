"""Attention over the window and the compressed entries, straight from the pools: one launch, or two for few queries."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from kvcore.backends.jax_pallas.cuda.arguments import covers, fields, floats, is_native, launched, record_of
from kvcore.backends.jax_pallas.cuda.choice import chip
from kvcore.kernels.triton.attend import attend_kernel
from kvcore.kernels.triton.cut import (
    LOG2_E,
    attend_constants,
    attend_cut,
    merge_constants,
    own_record,
    parts_of,
    splits_for,
)
from kvcore.kernels.triton.merge import merge_kernel

ROLES = ("window", "entries")


def attends(layer, index, q) -> bool:
    """True where the kernel covers every region that queries [T, H, d] attend to."""
    regions = [layer.regions[role][0] for role in ROLES if role in layer.regions]
    if not q.size or not len(index.slots) or not all(map(covers, regions)):
        return False
    return _parts(layer, q.dtype == jnp.bfloat16) is not None


def attend(layer, pools, index, q, selected, own, sink, scale, rope):
    """Out like q and lse [T, H] fp32 of queries q [T, H, d].

    Args:
        selected: entries [T, k], or None: all visible ones.
        own: the step's window rows as canonical bytes [T, row_bytes] where the ring does not hold them yet, or None.
        scale: of the logits, a number.
        rope: fp32 inverse frequencies by which outputs are turned back, or None.
    """
    given, q = q, floats(q)
    tokens, heads, dim = q.shape
    parts = _parts(layer, q.dtype == jnp.bfloat16)
    assert parts is not None, "see attends"
    window, entries = (layer.component(role) for role in ROLES)
    selected = None if selected is None or entries is None else selected.astype(jnp.int32)
    records, arguments = [], {}
    for role, mark in zip(ROLES, ("", "entry_"), strict=True):
        record, buffers = None, dict.fromkeys(("codes_ptr", "scales_ptr", "plain_ptr"), index.positions)
        if role in layer.regions:
            record, names = record_of(layer.regions[role][0])
            buffers = fields(pools, names)
        records.append(record)
        arguments |= {f"{mark}{name}": value for name, value in buffers.items()}
    own_of = None if own is None else own_record(records[0], layer.regions["window"][0].format)
    picks = 0 if selected is None else selected.shape[1]
    columns = index.block_table.shape[1]
    most = columns * layer.regions["entries"][0].rows if entries is not None and selected is None else picks
    keys = (window.window if window else 0) + most
    window_record, entry_record = records
    cut = attend_cut(chip(), tokens, heads, keys, parts, window_record, entry_record, picked=selected is not None)
    splits = splits_for(chip(), tokens, heads, keys, cut)
    out, lse = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    partial, sums = out, lse
    turned = {"PAIRS": 0 if rope is None else len(rope), "NATIVE": is_native()}
    if splits > 1:
        partial = jax.ShapeDtypeStruct((tokens, splits, heads, dim), jnp.float32)
        sums = jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32)
    arguments |= {
        "out_ptr": out,
        "lse_ptr": lse,
        "partial_ptr": partial,
        "partial_lse_ptr": sums,
        "q_ptr": q,
        "sink_ptr": lse if sink is None else sink,
        "selected_ptr": index.positions if selected is None else selected,
        "own_ptr": index.positions if own is None else own,
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "slots_ptr": index.slots,
        "starts_ptr": index.starts,
        "table_ptr": index.block_table,
        "frequencies_ptr": lse if rope is None else rope,
        "tokens": tokens,
        "heads": heads,
        "picks": picks,
        "table_columns": columns,
        "splits": splits,
        "scale": np.float32(scale * LOG2_E),
        **attend_constants(cut, window_record, entry_record, own_of, bf16=q.dtype == jnp.bfloat16),
        "WINDOW": window.window if window else 0,
        "RATIO": entries.ratio if entries else 0,
        "ALL": selected is None,
        "SINK": sink is not None,
        "SPLIT": splits > 1,
        **turned,
    }
    grid = (tokens * -(-heads // cut.heads) * splits,)
    _, found = launched(attend_kernel, grid, arguments, warps=cut.warps, contracted=True)
    if splits > 1:
        arguments = {
            "out_ptr": out,
            "lse_ptr": lse,
            "partial_ptr": found[2],
            "partial_lse_ptr": found[3],
            "sink_ptr": lse if sink is None else sink,
            "positions_ptr": index.positions,
            "frequencies_ptr": lse if rope is None else rope,
            "heads": heads,
            "splits": splits,
            **merge_constants(dim, splits),
            "SINK": sink is not None,
            **turned,
        }
        _, found = launched(merge_kernel, (tokens * heads,), arguments, warps=4, contracted=True)
    return found[0].astype(given.dtype), found[1]


def _parts(layer, bf16):
    return _parts_of(*(layer.regions[role][0] if role in layer.regions else None for role in ROLES), bf16)


@cache
def _parts_of(window, entries, bf16):
    return parts_of(*(None if region is None else record_of(region)[0] for region in (window, entries)), bf16=bf16)
