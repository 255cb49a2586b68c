"""FlashInfer's two wrappers by their own signatures, computed in fp64 from just the tensors that they are handed.

What is refused is what the release's Python and C++ refuse. ``tests/engines/test_flashinfer.py`` holds the signatures
against the wheel, where there is one.
"""

import math
import sys
from types import ModuleType, SimpleNamespace

import torch

from kvcore.backends.torch_triton.encoding import decode
from kvcore.spec import FORMATS

VERSION = "0.7.4"
SCALES = {"v4_584": 8, "v4_nvfp4_384": 32, "v41_528": 16, "v41_fp4_288": 32}
"""Bytes of a row behind all rows' other bytes."""


def rows_at(cache, indices, name):
    """Rows [n, dim] fp64 by physical index: a page holds its rows' data one after the other, then their scales."""
    pages, rows = cache.shape[:2]
    flat = cache.as_strided((pages, cache.stride(0)), (cache.stride(0), 1))
    size = FORMATS[name].row - SCALES[name]
    found = []
    for index in indices:
        page, row = divmod(int(index), rows)
        behind = rows * size + row * SCALES[name]
        found.append(torch.cat([flat[page, row * size :][:size], flat[page, behind:][: SCALES[name]]]))
    return decode(name, torch.stack(found)).double() if found else torch.zeros(0, 512, dtype=torch.float64)


def attended(q, k, v, scale):
    """(out [H, e], log-sum-exp [H]) of q [H, d] to k [n, d] and v [n, e]; zeros and -inf of no key."""
    if not len(k):
        return q.new_zeros((len(q), v.shape[1])), q.new_full((len(q),), -torch.inf)
    logits = q @ k.T * scale
    return logits.softmax(1) @ v, logits.logsumexp(1)


class SparseMLASm120Wrapper:
    """``flashinfer/mla/_sparse_mla_sm120/_api.py``."""

    runs = 0

    def __init__(
        self, max_num_tokens=None, max_num_heads=None, *, d_v=512, kv_scale_format="auto", kv_cache_format="fp8",
        extra_kv_fp4=False, compute_precision="default", device=None, backend="auto",
    ):  # fmt: skip
        assert (max_num_tokens, max_num_heads, d_v) == (None, None, 512)
        v41 = {"auto": False, "ue8m0_g32": True}[kv_scale_format]
        assert v41 or not extra_kv_fp4
        assert compute_precision == ("bf16" if v41 else "default")
        if kv_cache_format == "nvfp4":
            assert (v41, backend) == (False, "cake")
            self.main = "v4_nvfp4_384"
        else:
            assert (kv_cache_format, backend) == ("fp8", "auto")
            self.main = "v41_528" if v41 else "v4_584"
        self.extra, self.device = "v41_fp4_288" if extra_kv_fp4 else self.main, torch.device(device)

    def run(
        self, q, kv_cache, indices, output, sm_scale, *, topk_length=None, attn_sink=None, extra_kv_cache=None,
        extra_indices=None, extra_topk_length=None, out_lse=None, mid_out=None, mid_lse=None, prefill_impl=None,
        return_lse=False, lse_scale=1.0,
    ):  # fmt: skip
        assert (topk_length, attn_sink, extra_topk_length, mid_out, mid_lse, prefill_impl) == (None,) * 6
        assert not return_lse
        assert isinstance(sm_scale, float)
        tokens, heads, dim = q.shape
        assert (dim, q.dtype, q.device, q.is_contiguous()) == (512, torch.bfloat16, self.device, True)
        assert (output.shape, output.dtype, output.is_contiguous()) == (q.shape, q.dtype, True)
        assert (out_lse.shape, out_lse.dtype, out_lse.is_contiguous()) == (q.shape[:2], torch.float32, True)
        assert heads in (8, *range(16, 129, 16)) if self.main == "v4_nvfp4_384" else heads <= 128
        assert (extra_kv_cache is None) == (extra_indices is None)
        # FP4 entries are refused where there is no second cache.
        assert extra_kv_cache is not None or self.extra != "v41_fp4_288"
        if tokens > 64 and self.main == "v4_584":
            assert heads in (8, 16, 32, 64, 128)
            assert indices.shape[1] % 64 == 0
        sides = [(kv_cache, indices, self.main), (extra_kv_cache, extra_indices, self.extra)]
        sides = [side for side in sides if side[0] is not None]
        for cache, rows, name in sides:
            assert cache.dtype == torch.uint8
            assert cache.shape[2:] == (1, FORMATS[name].row)
            assert cache.stride(1) == FORMATS[name].row
            assert cache.stride(0) >= cache.shape[1] * FORMATS[name].row
            assert cache.data_ptr() % 16 == 0
            assert cache.stride(0) % 16 == 0
            assert (rows.dtype, rows.ndim, len(rows), rows.is_contiguous()) == (torch.int32, 2, tokens, True)
            assert rows.shape[1] > 0
        for token in range(tokens):
            keys = torch.cat([rows_at(cache, [i for i in rows[token] if i >= 0], name) for cache, rows, name in sides])
            out, lse = attended(q[token].double(), keys, keys, sm_scale)
            output[token], out_lse[token] = out.to(q.dtype), lse / math.log(2) * lse_scale
        type(self).runs += 1


class BatchDecodeWithPagedKVCacheWrapper:
    """``flashinfer/decode.py``, of which the kernels fa2."""

    plans = runs = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        assert (kv_layout, use_cuda_graph, use_tensor_cores, backend) == ("NHD", False, True, "fa2")
        assert (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer) == (None,) * 3
        assert (jit_args, jit_kwargs) == (None, None)
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()
        self.planned = None

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ):  # fmt: skip
        assert not deprecated_positional_args
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
        non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,
        q_len_per_req=1, is_causal=None, use_token_head_sf=False,
    ):  # fmt: skip
        assert (pos_encoding_mode, window_right, q_len_per_req) == ("NONE", 0, 1)
        others = logits_soft_cap, o_data_type, data_type, rope_scale, rope_theta, block_tables, seq_lens
        assert (*others, fixed_split_size, is_causal) == (None,) * 9
        assert not disable_split_kv
        assert non_blocking
        assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (indptr, indices, last_page_len))
        pages = indptr[1:] - indptr[:-1]
        assert len(pages) == len(last_page_len)
        assert len(indices) == int(indptr[-1])
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size) | (pages == 0)).all())
        # ``get_seq_lens``.
        lengths = torch.clamp(pages - 1, min=0) * page_size + last_page_len
        assert bool((lengths[pages == 0] == 0).all())
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        fp8 = kv_data_type == torch.float8_e4m3fn
        assert use_token_head_sf == fp8
        assert q_data_type in ((torch.float16, torch.bfloat16) if fp8 else (kv_data_type,))
        # Lists may be written anew once they were taken over.
        self.planned = SimpleNamespace(
            first=indptr.tolist(), pages=indices.tolist(), lengths=lengths.tolist(), heads=num_qo_heads,
            shape=(page_size, num_kv_heads, head_dim), window=window_left, q=q_data_type, kv=kv_data_type,
            scale=sm_scale, scaled=use_token_head_sf,
        )  # fmt: skip
        type(self).plans += 1

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        assert not args
        assert (q_scale, k_scale, v_scale, out, lse, enable_pdl, window_left, sinks, q_len_per_req) == (None,) * 9
        assert skip_softmax_threshold_scale_factor is None
        assert return_lse
        is_to = self.planned
        assert (q.shape, q.dtype) == ((len(is_to.lengths), is_to.heads, is_to.shape[2]), is_to.q)
        assert q.stride(2) == 1
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride()
        for side in (keys, values):
            assert (side.shape[1:], side.dtype, side.stride(3)) == (is_to.shape, is_to.kv, 1)
            assert side.data_ptr() % 16 == 0
            assert all(step * side.itemsize % 16 == 0 for step in side.stride()[:3])
        assert (kv_cache_sf is not None) == is_to.scaled
        for scales in kv_cache_sf or ():
            assert (scales.shape, scales.dtype) == (keys.shape[:3], torch.float32)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        for request, length in enumerate(is_to.lengths):
            first = 0 if is_to.window < 0 else max(0, length - 1 - is_to.window)
            k, v = (self._rows(side, request, first, length) for side in (keys, values))
            if kv_cache_sf is not None:
                k, v = (
                    rows * self._rows(scales, request, first, length)[..., None]
                    for rows, scales in zip((k, v), kv_cache_sf, strict=True)
                )
            for head in range(is_to.heads):
                of = head // (is_to.heads // is_to.shape[1])
                one, logs = attended(q[request, head : head + 1].double(), k[:, of], v[:, of], is_to.scale)
                out[request, head], lse[request, head] = one[0].to(q.dtype), logs[0] / math.log(2)
        type(self).runs += 1
        return out, lse

    def _rows(self, side, request, first, length):
        """Rows of a request from a position on, fp64."""
        begin, size = self.planned.first[request], self.planned.shape[0]
        rows = [side[self.planned.pages[begin + at // size], at % size] for at in range(first, length)]
        return torch.stack(rows).double() if rows else side[0, :0].double()


def module():
    """A module called flashinfer, with counters of its own."""
    found, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    found.BatchDecodeWithPagedKVCacheWrapper = type("Paged", (BatchDecodeWithPagedKVCacheWrapper,), {})
    mla.SparseMLASm120Wrapper = type("Sparse", (SparseMLASm120Wrapper,), {})
    found.mla = mla
    return found


def installed():
    """Names of modules, as ``sys.modules`` knows them, -> the stand-ins."""
    found = module()
    return {"flashinfer": found, "flashinfer.mla": found.mla}


def install():
    """The stand-in, for the rest of the process."""
    found = installed()
    sys.modules.update(found)
    return found["flashinfer"]
