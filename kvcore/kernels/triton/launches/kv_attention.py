"""The launch of classic attention: its kernel, and the merge of its parts."""

from functools import cache, lru_cache
from importlib import import_module
from math import lcm
from typing import Any

from kvcore.kernels.triton import attend_kv
from kvcore.kernels.triton.attend import LOG2_E
from kvcore.kernels.triton.attend_kv import Work, config_for, sides_of, span_of, whole_tiles, work_for
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches.attention import merge, parts_for
from kvcore.kernels.triton.launches.launching import BOUND, Array, Framework, Kernel, launch
from kvcore.kernels.triton.packed import PackedWork, packed_work, programs_of


def _outputs(to: Framework, q: Array, records: list[int]) -> tuple[Array, Array]:
    shape = *q.shape[:2], BOUND[records[1]].record.dim
    return to.empty(shape, q.dtype, q), to.empty(shape[:2], to.float32, q)


@launch("workspace", outputs=_outputs)
def attend_kv_rows(
    to: Framework, q: Array, sink: Array | None, own_keys: Array | None, own_values: Array | None, positions: Array,
    request_index: Array, slots: Array, starts: Array, block_table: Array, left_padding: Array | None,
    keys: list[Array], values: list[Array], workspace: Array, records: list[int], sizes: list[int], scale: float,
    bf16: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of q [tokens, heads, key dim], contiguous: out [tokens, heads, value dim] and lse [tokens, heads].

    Args:
        own_keys, own_values: [tokens, heads, row_bytes] canonical rows of the step where the pools do not hold them.
        keys, values: the pools' buffers.
        workspace: fp32, for ``splits`` · tokens · heads · (value dim + 1) numbers where ``splits`` > 1.
        records: of the keys, the values, the own keys and values; -1 where there are none.
        sizes: window and chunk (0 without), splits.
        bf16: operands may be multiplied in bf16 where they are bf16 numbers.
    """
    out, lse = _outputs(to, q, records)
    tokens, heads, _ = q.shape
    if not tokens:
        return out, lse
    window, chunk, splits = sizes
    native, has_left = to.native(q), left_padding is not None
    beside, parts = lse if sink is None else sink, parts_for(to, workspace, out, lse, splits)
    k, v, left = BOUND[records[0]], BOUND[records[1]], left_padding if has_left else starts
    step = tokens, slots.shape[0], heads
    packed = None
    if to.gluon and bf16 and own_keys is None and work_for(*step, k.record.heads, v.record.heads).each == 1:
        packed = packed_work(k.record, v.record, to.props(q))
    seen: tuple[Any, ...] = window, chunk, sink is not None, block_table.shape[1], splits, scale * LOG2_E
    if packed is not None:
        kernel = _packed(*records[:2], packed, has_left)
        programs = programs_of(tokens, heads, k.record.heads, v.record.heads)
        arrays = *k.given(keys)[:2], *v.given(values)[:2], positions, request_index, block_table, left
        numbers = heads, *seen
    else:
        work, kernel = _attend(*records, to.props(q), bf16, *step, has_left, native)
        programs = work.programs
        arrays = (
            *k.given(keys), *v.given(values), positions if own_keys is None else own_keys,
            positions if own_values is None else own_values, positions, request_index, slots, starts, block_table, left,
        )  # fmt: skip
        numbers = tokens, heads, work.each, *seen
    to.run(kernel, (programs * splits,), (out, lse, *parts, q, beside, *arrays), numbers)
    merge(to, out, lse, parts, beside, positions, positions, splits, sunk=sink is not None, native=native)
    return out, lse


@cache
def _packed(keys: int, values: int, packed: PackedWork, left: bool) -> Kernel:
    # Older releases of Triton lack Gluon, which is not asked for before it is known to be there.
    kernel = import_module("kvcore.kernels.triton.attend_packed").attend_packed_kernel
    k, v = BOUND[keys].record, BOUND[values].record
    constants = {
        "K": k, "V": v, "SK": packed.keys, "SV": packed.values, "LEFT": left, "GROUPS": lcm(k.heads, v.heads),
        "KEYS": packed.config.keys, "DEPTH": packed.config.stages,
    }  # fmt: skip
    return Kernel(kernel, constants, 1, writes=("out", "lse", "partial", "partial_lse"), fused=True)


@lru_cache(4096)
def _attend(
    keys: int, values: int, own_keys: int, own_values: int, props: DeviceProps, bf16: bool, tokens: int, requests: int,
    heads: int, left: bool, native: bool,
) -> tuple[Work, Kernel]:  # fmt: skip
    k, v = BOUND[keys].record, BOUND[values].record
    own = (BOUND[own_keys].record, BOUND[own_values].record) if own_keys >= 0 else None
    sides = sides_of(k, v, own, bf16=bf16, native=native)
    assert sides is not None
    work, config = work_for(tokens, requests, heads, k.heads, v.heads), config_for(props, sides)
    span = span_of(work.each)
    constants = {
        "K": k, "V": v, "NK": own[0] if own else k, "NV": own[1] if own else v, "SK": sides[0], "SV": sides[1],
        "OWN": own is not None, "LEFT": left, "GROUPS": work.groups, "HEADS": work.heads, "SPAN": span,
        "ROWS": max(16, work.heads * span), "KEYS": config.keys, "WHOLE": whole_tiles(k, config),
        "STAGES": config.stages, "SPREAD": max(1, 32 * config.warps // config.keys), "NATIVE": native,
    }  # fmt: skip
    return work, _kernel(tuple(constants.items()), config.warps)


@cache
def _kernel(constants: tuple[tuple[str, Any], ...], warps: int) -> Kernel:
    """One for all calls that are cut alike."""
    writes = "out", "lse", "partial", "partial_lse"
    return Kernel(attend_kv.attend_kv_kernel, dict(constants), warps, writes=writes, fused=True)
