"""FlashInfer's attention in place of the Triton kernels, where KVCORE_ATTENTION=flashinfer asks for it and a call fits.

Two of its wrappers read pools as they lie, and nothing is copied:

* ``flashinfer.mla.SparseMLASm120Wrapper``, on compute capability 12.0 and 12.1, reads a window's rows and entries in
  the formats of ``PAIRS``, by the lists of rows that FlashMLA is given (``flash``).
* ``flashinfer.BatchDecodeWithPagedKVCacheWrapper`` with its kernels fa2, from 8.0 on, reads keys and values in bf16 or
  fp16, or in e4m3 with a scale for every token and head, where each request brings one token. It is planned on the
  host, once a step for layers that are alike, so the host waits for the step's numbers; no graph can hold that.

A sink is applied to what they answer without one: with one, their log-sums include it. ``auto`` never chooses
FlashInfer: nothing of it was measured.
"""

import inspect
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.backends.torch_triton import flash
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import DTYPES
from kvcore.ops import Attention
from kvcore.plan import Region
from kvcore.spec import Place

V41 = {"kv_scale_format": "ue8m0_g32", "compute_precision": "bf16"}
PAIRS: dict[tuple[str, str], dict[str, Any]] = {
    ("v4_584", "v4_584"): {},
    ("v4_nvfp4_384", "v4_nvfp4_384"): {"kv_cache_format": "nvfp4", "backend": "cake"},
    ("v41_528", "v41_528"): V41,
    ("v41_528", "v41_fp4_288"): {**V41, "extra_kv_fp4": True},
}
"""Formats of a window and of the entries beside it -> how the wrapper is made. Of V4.1's rows products are in bf16."""
SPARSE = (120, 121)
"""Compute capabilities with kernels for these rows."""
MOST_HEADS, FEW = 128, 64
HEADS = {"v4_584": (8, 16, 32, 64, 128), "v4_nvfp4_384": (8, *range(16, 129, 16))}
"""Heads that more queries than ``FEW`` at once must have, of four bits any number of queries."""
PAGED = 80
"""The least compute capability of the paged decode."""
DIMS = (64, 128, 256)
ALIGNED = 16
"""Bytes that addresses of heads must be multiples of."""
WORKSPACE = 128 << 20
"""Bytes for sums of parts, as FlashInfer recommends; zero before they are first used."""
UNMEASURED = "by choice alone, nothing of it was measured"
ONE_TOKEN = "requests bring other than one token each"


def served(ops: Any, layer: int, capability: int) -> flash.Served | str:
    """What calls to the sparse kernels must know of a layer, or why they take none of it."""
    if capability not in SPARSE:
        return "FlashInfer reads such rows on compute capability 12.0 and 12.1"
    found = flash.served(ops, layer, "FlashInfer", tuple(PAIRS))
    return found if isinstance(found, str) else lacking() or found


@cache
def lacking() -> str:
    """What a release's sparse kernels do not take yet; empty where they take all of it."""
    import flashinfer.mla  # type: ignore[import-not-found]

    wrapper = getattr(flashinfer.mla, "SparseMLASm120Wrapper", None)
    known = () if wrapper is None else inspect.signature(wrapper.run).parameters
    missing = [name for name in ("extra_kv_cache", "extra_indices", "out_lse", "lse_scale") if name not in known]
    return f"SparseMLASm120Wrapper.run of this flashinfer has no {', '.join(missing)}" if missing else ""


def misfit(
    served: flash.Served, index: Any, q: torch.Tensor, selected: torch.Tensor | None, own: torch.Tensor | None
) -> str:
    """Why the sparse kernels do not take a call; empty where they do."""
    heads, format = q.shape[1], served.formats[0]
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    if q.dtype != torch.bfloat16:
        return "q is not bf16"
    if own is not None:
        return "the ring does not hold the step's rows"
    if heads > MOST_HEADS:
        return f"q has more than {MOST_HEADS} heads"
    if (len(q) > FEW or format == "v4_nvfp4_384") and heads not in HEADS.get(format, (heads,)):
        return f"{len(q)} queries have {heads} heads"
    return "" if flash.listed(served, index, q, selected) else "lists of every entry would be long"


def attend(
    ops: Any,
    pools: Any,
    served: flash.Served,
    index: Any,
    q: torch.Tensor,
    selected: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    frequencies: torch.Tensor | None = None,
) -> Attention:
    """Attention of q [T, H, 512] to the window and the entries; parameters are those of ``flash.attend``."""
    window, entries = flash.rows_of(ops, served, index, selected)
    formats, extra = served.formats[:1], {}
    if entries is not None:
        formats = served.formats
        extra = {
            "extra_kv_cache": flash.pool_cache(pools[served.entries], served.block, formats[1]),
            "extra_indices": entries,
        }
    q = q.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    sparse(ops, formats, q.device).run(
        q,
        flash.pool_cache(pools[served.window], served.ring, formats[0]),
        window,
        out,
        scale,
        out_lse=lse,
        lse_scale=math.log(2),
        **extra,
    )
    if frequencies is not None:
        from kvcore.backends.torch_triton import launch

        launch.calls().inverse_rope_rows(out, index.positions, frequencies)
    return sunk(out, lse, sink)


def sparse(ops: Any, formats: tuple[str, ...], device: torch.device) -> Any:
    """The wrapper for rows of these formats, which keeps what its kernels write on the way."""
    key = "flashinfer", formats
    if key not in ops.wrappers:
        from flashinfer.mla import SparseMLASm120Wrapper  # type: ignore[import-not-found]

        ops.wrappers[key] = SparseMLASm120Wrapper(device=device, **PAIRS[formats[0], formats[-1]])
    return ops.wrappers[key]


def sunk(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> Attention:
    """An answer without a sink, given one in the denominator."""
    if sink is not None:
        # Of no key at all, and a sink of -inf, the difference is no number; out is zero there.
        out.mul_(torch.sigmoid(lse - sink.to(torch.float32)).nan_to_num_(0.0)[..., None])
    return Attention(out, lse)


class Paged(NamedTuple):
    """What calls to the paged decode must know of a classic layer.

    Attributes:
        regions: of keys and of values.
        growth: what a page is, a block or a slot, with ``rows`` rows.
        heads: of keys; ``dim`` channels each.
        window: of the layer, 0 without.
        code: of the numbers; ``scaled`` where each token and head has a scale.
    """

    regions: tuple[Region, ...]
    growth: str
    rows: int
    heads: int
    dim: int
    window: int
    code: str
    scaled: bool


def served_kv(ops: Any, layer: int, capability: int) -> Paged | str:
    """What calls to the paged decode must know of a layer, or why it takes none of it."""
    component, (keys, values) = ops.component(layer, "kv"), ops.plan.region(layer, "kv")
    if capability < PAGED or torch.version.hip:
        return "FlashInfer's paged decode is CUDA's, from compute capability 8.0 on"
    if component.ratio > 1:
        return "FlashInfer knows no groups of tokens"
    if component.chunk is not None:
        return "FlashInfer knows no chunks"
    if component.span is not None:
        return "FlashInfer reads rows in order, not rings"
    if (keys.format, keys.heads, keys.layout) != (values.format, values.heads, values.layout):
        return "FlashInfer reads keys and values that are alike"
    codes, *others = keys.format.fields
    scaled = codes.code == "e4m3" and codes.group == 0 and [(one.dims, one.code) for one in others] == [(1, "fp32")]
    if not scaled and not (codes.code in ("bf16", "fp16") and not others):
        return f"FlashInfer does not read {keys.format.name}"
    if codes.dims not in DIMS:
        return f"FlashInfer reads heads of {', '.join(map(str, DIMS))} channels"
    if not all(_lies_well(keys, one, ALIGNED if one is keys.unit.places[0] else 4) for one in keys.unit.places):
        return f"heads of {keys.format.name} in layout {keys.layout} do not begin on {ALIGNED} bytes"
    window = component.window or 0
    return Paged((keys, values), keys.growth, keys.rows, keys.heads, codes.dims, window, codes.code, scaled)


def _lies_well(region: Region, one: Place, aligned: int) -> bool:
    """Whether a field's numbers lie as in memory, and all of them begin on multiples of ``aligned`` bytes."""
    unit = region.buffers[one.buffer][1]
    return region.even and not one.split and not any(each % aligned for each in (one.base, one.stride, unit))


def misfit_kv(ops: Any, paged: Paged, index: Any, q: torch.Tensor, own: torch.Tensor | None) -> str:
    """Why the paged decode does not take a call; empty where it does."""
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return "a step that is compiled or captured cannot be planned on the host"
    if own is not None:
        return "the step's own keys and values are given"
    if q.dtype not in ((torch.bfloat16, torch.float16) if paged.scaled else (DTYPES[paged.code],)):
        return f"q is {q.dtype} and keys are {paged.code}"
    if index.left_padding is not None:
        return "the step has left padding"
    found = pages_of(ops, paged, index)
    return found if isinstance(found, str) else ""


def pages_of(ops: Any, paged: Paged, index: Any) -> tuple[torch.Tensor, ...] | str:
    """(first page of each request [Q + 1], pages, rows in the last one [Q]) on the host, or why there are none.

    Made once a step for all layers whose pages are alike.
    """
    host = ops.host(index)
    key = "flashinfer", paged.growth, paged.rows
    if key not in host.kept:
        host.kept[key] = _pages(paged, host, index)
    return host.kept[key]


def _pages(paged: Paged, host: Any, index: Any) -> tuple[torch.Tensor, ...] | str:
    slots, starts, lengths = (np.array(one, np.int32) for one in (host.slots, host.starts, host.lengths))
    real = slots >= 0
    if index.positions.tolist() != np.where(real, starts, -1).tolist() or (lengths != starts + 1)[real].any():
        return ONE_TOKEN
    if paged.growth == "slot":
        counts, pages = np.minimum(lengths, 1), slots[real]
    else:
        counts, table = -(-lengths // paged.rows), index.block_table.cpu().numpy()
        pages = table[np.arange(table.shape[1]) < counts[:, None]]
        if (pages < 0).any():
            return "blocks of a request lie elsewhere"
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    last = lengths - (counts - (counts > 0)) * paged.rows
    return tuple(map(torch.from_numpy, (first, pages, last.astype(np.int32))))


def attend_kv(
    ops: Any, pools: Any, paged: Paged, index: Any, q: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> Attention:
    """Attention of q [Q, H, dim], a token of each request, to the layer's keys and values."""
    sides = [_numbers_of(pools, region, paged) for region in paged.regions]
    extra: dict[str, Any] = {"kv_cache_sf": tuple(scales for _, scales in sides)} if paged.scaled else {}
    out, lse = planned(ops, paged, index, q, scale).run(
        q.contiguous(), tuple(codes for codes, _ in sides), return_lse=True, **extra
    )
    return sunk(out, lse.mul_(math.log(2)), sink)


def _numbers_of(pools: Any, region: Region, paged: Paged) -> tuple[Any, Any]:
    """(codes [pages, rows, heads, dim], scales [pages, rows, heads] or None) where they lie."""
    codes, *scales = region.unit.places
    found: Any = [place.numbers(pools, region, one, torch.float32) for one in scales]
    return place.numbers(pools, region, codes, DTYPES[paged.code]), found[0][..., 0] if found else None


def planned(ops: Any, paged: Paged, index: Any, q: torch.Tensor, scale: float) -> Any:
    """A wrapper that was planned for the step: there is one for all layers that are alike."""
    kept, key = ops.host(index).kept, ("flashinfer", paged[1:], q.shape[1], q.dtype, scale)
    if key not in kept:
        wrapper = ops.wrappers.get(key)
        if wrapper is None:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

            space = ops.wrappers.get("flashinfer")
            if space is None:
                space = ops.wrappers["flashinfer"] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
            wrapper = BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True, backend="fa2")
            ops.wrappers[key] = wrapper
        wrapper.plan(
            *pages_of(ops, paged, index),
            q.shape[1],
            paged.heads,
            paged.dim,
            paged.rows,
            window_left=paged.window - 1,
            q_data_type=q.dtype,
            kv_data_type=DTYPES[paged.code],
            sm_scale=scale,
            **({"use_token_head_sf": True} if paged.scaled else {}),
        )
        kept[key] = wrapper
    return kept[key]
