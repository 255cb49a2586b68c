"""SGLang's own pools, out of its wheel and on a CPU, adopted in place: its page and ring arithmetic is kvcore's."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import OutOfBlocks, ShapeError, SpecError
from kvcore.interop import sglang
from kvcore.interop.sglang_tensors import hybrid_from, pages_of, rings_of, tensors_from
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Tail, Window
from tests.engines.wheels import own_modules

pools, states, latent, methods = own_modules(
    "sglang",
    "srt.mem_cache.memory_pool",
    "srt.mem_cache.deepseek_v4_compress_state",
    "srt.mem_cache.deepseek_v4_memory_pool",
    "srt.layers.quantization.fp4_kv_cache_quant_method",
)

PAGE, TOKENS = 64, 150
COMMON = {"device": "cpu", "enable_memory_saver": False, "layer_num": 2}


class Saver:
    """Memory is not saved."""

    @classmethod
    def create(cls, **_):
        return cls()

    def region(self, _):
        return nullcontext()


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """What SGLang's pools ask of a platform, for a CPU."""
    for module in (pools, states, latent):
        monkeypatch.setattr(module, "maybe_init_custom_mem_pool", lambda **_: (False, None, None), raising=False)
        monkeypatch.setattr(module, "TorchMemorySaverAdapter", Saver, raising=False)
        monkeypatch.setattr(module, "ceil_div", lambda a, b: -(-a // b), raising=False)
        monkeypatch.setattr(module, "ceil_align", lambda a, b: -(-a // b) * b, raising=False)
    monkeypatch.setattr(pools.envs, "SGLANG_USE_HND_KVCACHE", SimpleNamespace(get=lambda: False), raising=False)
    plain_rows = SimpleNamespace(is_quantized=False)
    monkeypatch.setattr(pools, "UnquantizedKVCacheMethod", lambda: plain_rows)
    monkeypatch.setattr(pools.MHATokenToKVPool, "is_quantized_kv_cache", False)
    shapes = lambda self: ((self.size + self.page_size, self.head_num, self.head_dim),) * 2  # noqa: E731
    monkeypatch.setattr(pools.MHATokenToKVPool, "_kv_buffer_shapes", shapes)


def moved(spec, cache, request):
    """A request that went into a cache of kvcore's own and back into the pool, in other pages."""
    own = kvcore.create_cache(spec, backend="torch_triton", max_requests=1, max_tokens=512)
    there = own.import_request(cache.export_request(request))
    assert own.digest([there]) == cache.digest([request])
    return own.export_request(there)


def random(tensor):
    flat = tensor.view(-1).view(torch.uint8)
    flat[:] = torch.randint(0, 120, flat.shape, dtype=torch.uint8)


def adopted(pool, *buffers):
    """A pool's spec, a cache over it, and a request in three of its pages, with bytes of somebody's."""
    for tensor in buffers:
        random(tensor)
    tensors, layout = tensors_from(pool)
    spec = sglang.spec_from(pool)
    cache = kvcore.adopt(spec, tensors, layout=layout)
    return spec, cache, cache.admit(blocks=[4, 2, 3], length=TOKENS)


def test_keys_and_values_of_its_pool():
    pool = pools.MHATokenToKVPool(
        size=5 * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=8, enable_alt_stream=False, **COMMON
    )
    spec, cache, request = adopted(pool, *pool.k_buffer, *pool.v_buffer)
    # Its slots are page * page_size + offset.
    slots = [[4, 2, 3][at // PAGE] * PAGE + at % PAGE for at in range(TOKENS)]
    with cache.step({request: 0}) as step:
        keys, values, _ = step.layer(1).gather_kv()
    assert torch.equal(
        keys[0, :TOKENS], pool.k_buffer[1][slots].float() if keys.dtype == torch.float32 else pool.k_buffer[1][slots]
    )
    assert torch.equal(values[0, :TOKENS].float(), pool.v_buffer[1][slots].float())
    blob = moved(spec, cache, request)
    again = cache.import_request(blob, into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])
    others = [[5, 1, 0][at // PAGE] * PAGE + at % PAGE for at in range(TOKENS)]
    assert torch.equal(pool.k_buffer[0][others].view(torch.int16), pool.k_buffer[0][slots].view(torch.int16))


def test_keys_and_values_head_by_head(monkeypatch):
    monkeypatch.setattr(pools.envs, "SGLANG_USE_HND_KVCACHE", SimpleNamespace(get=lambda: True), raising=False)
    shapes = lambda self: ((self.num_pages, self.head_num, self.page_size, self.head_dim),) * 2  # noqa: E731
    monkeypatch.setattr(pools.MHATokenToKVPool, "_kv_buffer_shapes", shapes)
    pool = pools.MHATokenToKVPool(
        size=5 * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=8, enable_alt_stream=False, **COMMON
    )
    spec, cache, request = adopted(pool, *pool.k_buffer, *pool.v_buffer)
    with cache.step({request: 0}) as step:
        keys, values, _ = step.layer(1).gather_kv()
    for found, buffers in ((keys, pool.k_buffer), (values, pool.v_buffer)):
        # [pages, heads, rows, channels]
        want = torch.cat([buffers[1][page].transpose(0, 1) for page in (4, 2, 3)])[:TOKENS]
        assert torch.equal(found[0, :TOKENS].float(), want.float())
    blob = moved(spec, cache, request)
    again = cache.import_request(blob, into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])


def test_latent_rows_of_its_pool():
    pool = pools.MLATokenToKVPool(
        size=5 * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=16, qk_rope_head_dim=8, **COMMON
    )
    spec, cache, request = adopted(pool, *pool.kv_buffer)
    again = cache.import_request(moved(spec, cache, request), into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])
    slots, others = ([table[at // PAGE] * PAGE + at % PAGE for at in range(TOKENS)] for table in ([4, 2, 3], [5, 1, 0]))
    assert torch.equal(pool.kv_buffer[1][others].view(torch.int16), pool.kv_buffer[1][slots].view(torch.int16))


def floats(format, codes, scales):
    """What rows mean: of heads [rows, heads, bytes] and their scales [rows, heads, groups]."""
    if format == "mxfp8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        values = levels[(nibbles & 7).long()] * torch.where(nibbles >= 8, -1.0, 1.0)
    group = values.shape[-1] // scales.shape[-1]
    return values * torch.exp2(scales.float() - 127).repeat_interleave(group, -1)


def fill(*of):
    """Codes and scales of any bytes, none of them a NaN."""
    for codes, scales in zip(*of, strict=True):
        random(codes)
        scales.view(torch.uint8)[:] = torch.randint(120, 134, scales.shape, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["MHATokenToKVPoolMXFP8", "MHATokenToKVPoolFP4", "by a quant method"])
def test_codes_with_scales_in_tensors_of_their_own(kind, monkeypatch):
    heads = {"head_num": 2, "head_dim": 64, "enable_alt_stream": False}
    where = {"size": 5 * PAGE, "page_size": PAGE, **COMMON, **heads}
    if kind == "by a quant method":
        method = SimpleNamespace(
            name="fp4_mx_block16",
            create_buffers=methods.FP4MXBlock16KVCacheMethod.create_buffers.__get__(
                SimpleNamespace(
                    SCALE_BLOCK_SIZE=16, kv_storage_dtype=lambda: torch.uint8, dequant_workspace_dtype=lambda: None
                )
            ),
            dequant_workspace_dtype=lambda: None,
        )
        monkeypatch.setattr(pools.MHATokenToKVPool, "is_quantized_kv_cache", True)
        pool = pools.MHATokenToKVPool(dtype=torch.uint8, quant_method=method, **where)
    else:
        dtype = torch.float8_e4m3fn if kind.endswith("MXFP8") else torch.uint8
        pool = getattr(pools, kind)(dtype=dtype, **where)
    format = "mxfp8" if kind.endswith("MXFP8") else "fp4_mx_block16"
    fill(pool.k_buffer, pool.k_scale_buffer)
    fill(pool.v_buffer, pool.v_scale_buffer)
    spec = sglang.spec_from(pool)
    assert spec.layers[0].kv.key_format == format
    tensors, layout = tensors_from(pool)
    cache = kvcore.adopt(spec, tensors, layout=layout)
    request = cache.admit(blocks=[4, 2, 3], length=TOKENS)
    slots, others = ([table[at // PAGE] * PAGE + at % PAGE for at in range(TOKENS)] for table in ([4, 2, 3], [5, 1, 0]))
    with cache.step({request: 0}) as step:
        keys, values, _ = step.layer(1).gather_kv()
    bytes_of = lambda held: held.view(torch.uint8).reshape(len(held), 2, -1)  # noqa: E731
    for found, codes, scales in (
        (keys, pool.k_buffer, pool.k_scale_buffer),
        (values, pool.v_buffer, pool.v_scale_buffer),
    ):
        want = floats(format, bytes_of(codes[1])[slots], bytes_of(scales[1])[slots])
        assert torch.equal(found[0, :TOKENS].float(), want)
    # Into kvcore's own pools and back, to other pages: the engine finds the same codes there.
    again = cache.import_request(moved(spec, cache, request), into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])
    for held in (*pool.k_buffer, *pool.v_scale_buffer):
        assert torch.equal(bytes_of(held)[others], bytes_of(held)[slots])
    # And a step writes rows that it reads.
    rows = torch.randn(1, 2, 64)
    with cache.step({request: 1}) as step:
        for layer in range(2):
            step.layer(layer).append_kv(rows, rows)
    at = 3 * PAGE + TOKENS - 2 * PAGE
    stored = floats(format, bytes_of(pool.v_buffer[0])[[at]], bytes_of(pool.v_scale_buffer[0])[[at]])
    assert (stored - rows).abs().max() < rows.abs().max() * (0.07 if format == "mxfp8" else 0.27)


def test_latent_rows_in_four_bits():
    pool = pools.MLATokenToKVPoolFP4(
        size=5 * PAGE, page_size=PAGE, dtype=torch.uint8, kv_lora_rank=64, qk_rope_head_dim=32, **COMMON
    )
    fill(pool.kv_buffer, pool.kv_scale_buffer)
    spec = sglang.spec_from(pool)
    tensors, layout = tensors_from(pool)
    cache = kvcore.adopt(spec, tensors, layout=layout)
    request = cache.admit(blocks=[4, 2, 3], length=TOKENS)
    slots = [[4, 2, 3][at // PAGE] * PAGE + at % PAGE for at in range(TOKENS)]
    with cache.step({request: 0}) as step:
        rows = step.layer(1).gather_rows("entries").rows[0, :TOKENS]
    assert torch.equal(rows[:, :48], pool.kv_buffer[1][slots, 0])
    assert torch.equal(rows[:, 48:], pool.kv_scale_buffer[1][slots])
    again = cache.import_request(moved(spec, cache, request), into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])


def written_alike(spec, cache, request, *, dim, layer):
    """A step of one token writes rows that it reads: attention is that of a cache of the library's own.

    That cache, its request, and the rows that both layers got [2, 1, 2, dim].
    """
    own = kvcore.create_cache(spec, backend="torch_triton", max_requests=1, max_tokens=512)
    same = own.import_request(cache.export_request(request))
    rows, queries, found = torch.randn(2, 1, 2, dim), torch.randn(1, 4, dim), []
    for where, one in ((cache, request), (own, same)):
        with where.step({one: 1}) as step:
            for number in range(2):
                step.layer(number).append_kv(*rows)
            found.append(step.layer(layer).attend(queries).out)
    assert torch.equal(*found)
    return own, same, rows


def test_scales_of_pages_of_128_tokens_lie_in_chunks():
    page, length = 128, 300
    where = {"size": 5 * page, "page_size": page, "head_num": 2, "head_dim": 128, "enable_alt_stream": False, **COMMON}
    pool = pools.MHATokenToKVPoolMXFP8(dtype=torch.float8_e4m3fn, **where)
    assert pool.mxfp8_sf_interleaved
    fill(pool.k_buffer, pool.k_scale_buffer)
    fill(pool.v_buffer, pool.v_scale_buffer)
    spec = sglang.spec_from(pool)
    tensors, layout = tensors_from(pool)
    cache = kvcore.adopt(spec, tensors, layout=layout)
    request = cache.admit(blocks=[4, 2, 3], length=length)
    slots, others = (
        torch.tensor([table[at // page] * page + at % page for at in range(length)]) for table in ([4, 2, 3], [5, 1, 0])
    )

    def theirs(layer, slots):
        """Keys and values as SGLang itself finds their codes and scales."""
        sides = zip((pool.k_buffer, pool.v_buffer), pool._read_scales(layer, slots), strict=True)
        return [floats("mxfp8", held[layer][slots], scales.view(torch.uint8)) for held, scales in sides]

    with cache.step({request: 0}) as step:
        keys, values, _ = step.layer(1).gather_kv()
    assert all(
        torch.equal(found[0, :length].float(), want)
        for found, want in zip((keys, values), theirs(1, slots), strict=True)
    )
    again = cache.import_request(moved(spec, cache, request), into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])
    for layer in range(2):
        assert all(torch.equal(*pair) for pair in zip(theirs(layer, slots), theirs(layer, others), strict=True))
    own, same, rows = written_alike(spec, cache, request, dim=128, layer=1)
    slot = torch.tensor([3 * page + length - 2 * page])
    for stored, given in zip(theirs(0, slot), rows, strict=True):
        assert (stored - given).abs().max() < given.abs().max() * 0.07
    assert cache.digest([request]) == own.digest([same])
    # Heads of other dims have no layout there: SGLang's kernels move four scales as one word.
    narrow = pools.MHATokenToKVPoolMXFP8(dtype=torch.float8_e4m3fn, **{**where, "head_dim": 64})
    with pytest.raises(SpecError, match="heads of 128 channels"):
        tensors_from(narrow)


def nvfp4(monkeypatch, native):
    """A pool of ``NVFP4KVCacheMethod`` with a checkpoint's scales, and scales of rows as one backend has them."""
    told = {
        "kv_storage_dtype": torch.uint8,
        "dequant_workspace_dtype": None,
        "needs_native_fp4_scales": native,
        "needs_linear_scale_buffer": not native,
    }
    for name, value in told.items():
        monkeypatch.setattr(methods.NVFP4KVCacheMethod, name, lambda _, value=value: value)
    method = methods.NVFP4KVCacheMethod(num_layers=2, device="cpu", page_size=PAGE, native_scale_layout=native)
    method.k_scales_float, method.v_scales_float = [0.5, 3.0], [0.0371, 1.0]
    monkeypatch.setattr(pools.MHATokenToKVPool, "is_quantized_kv_cache", True)
    pool = pools.MHATokenToKVPool(
        dtype=torch.uint8, quant_method=method, size=5 * PAGE, page_size=PAGE, head_num=2, head_dim=64,
        enable_alt_stream=False, **COMMON,
    )  # fmt: skip
    scales = [pool.native_k_scale_buffer, pool.native_v_scale_buffer]
    scales = scales if native else [pool.k_scale_buffer, pool.v_scale_buffer]
    for held in (*pool.k_buffer, *pool.v_buffer, *scales[0], *scales[1]):
        random(held)
    return pool, scales


def scales_of(scales, part, layer, slots):
    """Scales [slots, heads, groups] where SGLang's kernels find them."""
    held = scales[part][layer]
    if held.ndim == 3:
        return held[slots]
    page, at = slots // PAGE, slots % PAGE
    if not part:
        return held[page, :, at]
    count = held.shape[-1]
    (swizzle,) = own_modules("sglang", "srt.layers.quantization.nvfp4_kv_cache")
    rows, columns = swizzle.nvfp4_v_scale_swizzle_indices(at[:, None], torch.arange(count)[None], count)
    return torch.stack([held[page[:, None], head, rows, columns] for head in range(held.shape[1])], dim=1)


@pytest.mark.parametrize("native", [False, True])
def test_codes_whose_layers_have_scales_too(native, monkeypatch):
    pool, scales = nvfp4(monkeypatch, native)
    spec = sglang.spec_from(pool)
    assert [layer.kv.scales for layer in spec.layers] == [(0.5, 0.0371), (3.0, 1.0)]
    tensors, layout = tensors_from(pool)
    cache = kvcore.adopt(spec, tensors, layout=layout)
    request = cache.admit(blocks=[4, 2, 3], length=TOKENS)
    slots, others = (
        torch.tensor([table[at // PAGE] * PAGE + at % PAGE for at in range(TOKENS)]) for table in ([4, 2, 3], [5, 1, 0])
    )

    def theirs(part, layer, slots):
        """As ``NVFP4KVQuantizeUtil.dequantize`` says: code, times scale of a group, times the layer's."""
        codes = (pool.k_buffer, pool.v_buffer)[part][layer][slots]
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        values = levels[(nibbles & 7).long()] * torch.where(nibbles >= 8, -1.0, 1.0)
        groups = scales_of(scales, part, layer, slots).contiguous().view(torch.float8_e4m3fn).float()
        scaled = values.unflatten(-1, (-1, 16)) * groups[..., None]
        return scaled.flatten(-2) * torch.tensor(pool.quant_method.get_bmm_scales(layer)[part])

    for layer in range(2):
        with cache.step({request: 0}) as step:
            keys, values, _ = step.layer(layer).gather_kv()
        for part, found in enumerate((keys, values)):
            assert torch.equal(found[0, :TOKENS].float(), theirs(part, layer, slots))
    again = cache.import_request(moved(spec, cache, request), into=cache.admit(blocks=[5, 1, 0]))
    assert cache.digest([again]) == cache.digest([request])
    for layer in range(2):
        for part in range(2):
            assert torch.equal(theirs(part, layer, slots), theirs(part, layer, others))
    own, same, rows = written_alike(spec, cache, request, dim=64, layer=0)
    assert cache.digest([request]) == own.digest([same])
    at = torch.tensor([3 * PAGE + TOKENS - 2 * PAGE])
    for part, given in enumerate(rows):
        assert (theirs(part, 0, at) - given).abs().max() < given.abs().max() * 0.2


def test_scales_in_the_layouts_of_two_backends_are_refused(monkeypatch):
    pool, _ = nvfp4(monkeypatch, True)
    pool.k_scale_buffer = pool.v_scale_buffer = pool.native_k_scale_buffer
    with pytest.raises(SpecError, match="scales of rows in two places"):
        tensors_from(pool)


def test_windows_entries_index_keys_and_states_of_its_deepseek_v4_pools():
    ratio, requests = 4, 3
    of_rows = {"dtype": torch.float8_e4m3fn, "qk_nope_head_dim": 448, "qk_rope_head_dim": 64, **COMMON, "layer_num": 1}
    windows = latent.DeepSeekV4SingleKVPool(size=6 * PAGE, page_size=PAGE, **of_rows)
    entries = latent.DeepSeekV4SingleKVPool(size=6 * PAGE // ratio, page_size=PAGE // ratio, **of_rows)
    keys = latent.DeepSeekV4IndexerPool(
        size=6 * PAGE // ratio, page_size=PAGE // ratio, dtype=torch.uint8, index_head_dim=128, use_fp4_indexer=False,
        **{**COMMON, "layer_num": 1},
    )  # fmt: skip
    tails = [
        states.CompressStatePool(
            size=requests * 8, ring_size=8, overlap=True, head_dim=dim, dtype=torch.float32, device="cpu",
            enable_memory_saver=False, ratio=ratio, request_scoped=True,
        )
        for dim in (512, 128)
    ]  # fmt: skip
    # As its kernels have it: pages of 576-byte multiples, values before scales.
    assert windows.kv_buffer[0].shape[1] == windows.bytes_per_page_padded == 37440
    for tensor in (windows.kv_buffer[0], entries.kv_buffer[0], keys.index_k_with_scale_buffer[0]):
        random(tensor)
    for tail in tails:
        tail.kv_score_buffer.kv_score.normal_()
    layer = LayerSpec(
        window=Window(dim=512, window=64, format="v4_584"),
        tail=Tail(dim=512, ratio=ratio, overlap=True),
        entries=Entries(dim=512, ratio=ratio, format="v4_584"),
        index_tail=Tail(dim=128, ratio=ratio, overlap=True),
        index_keys=IndexKeys(dim=128, ratio=ratio, heads=2, topk=4, format="index_fp8_132_h"),
    )
    spec = CacheSpec(layers=[layer], block_tokens=PAGE)
    roles = {
        "window": pages_of(windows)[0],
        "tail": rings_of(tails[0]),
        "entries": pages_of(entries)[0],
        "index_tail": rings_of(tails[1]),
        "index_keys": pages_of(keys)[0],
    }
    layout = {
        "window": "pages NL_X_NB_BSV_BSS",
        "tail": "rings NL_X_NB_BS_HS",
        "entries": "NL_X_NB_BSV_BSS",
        "index_tail": "rings NL_X_NB_BS_HS",
        "index_keys": "NL_X_NB_BSV_BSS",
    }
    cache = kvcore.adopt(spec, [roles[role] for role in spec.layers[0].roles], layout=layout, max_requests=requests)
    tables = {"window": [-1, 4, 2]}
    request = cache.admit(blocks=[3, 1, 5], pages=tables, slot=2, length=TOKENS)
    with cache.step({request: 0}) as step:
        raw = step.layer(0).gather_rows("tail")
        rows = step.layer(0).gather_rows("entries")
        window = step.layer(0).gather_rows("window")
    # The rows that SGLang itself hands over between prefill and decode.
    wanted = states.c4_state_transfer_indices(2, TOKENS, ring_size=8)
    live = raw.positions[0] >= 0
    found = raw.rows[0][live].contiguous().view(torch.float32)
    places = 2 * 8 + raw.positions[0][live] % 8
    assert set(places.tolist()) <= set(wanted.tolist())
    assert torch.equal(found, tails[0].kv_score_buffer.kv_score[places])
    # Entry n is row n % 16 of page n // 16; window row p of page p // 64.
    for number in (0, 17, 36):
        page = entries.kv_buffer[0][[3, 1, 5][number // 16]]
        at = number % 16
        assert rows.rows[0, number, :576].tolist() == page[at * 576 :][:576].tolist()
        assert rows.rows[0, number, 576:583].tolist() == page[16 * 576 + at * 8 :][:7].tolist()
    for row, position in zip(window.rows[0], window.positions[0].tolist(), strict=True):
        page = windows.kv_buffer[0][tables["window"][position // PAGE]]
        assert row[:576].tolist() == page[position % PAGE * 576 :][:576].tolist()
    blob = moved(spec, cache, request)
    again = cache.import_request(blob, into=cache.admit(blocks=[0, 2, 4], pages={"window": [0, 3, 1]}, slot=0))
    assert cache.digest([again]) == cache.digest([request])
    assert not np.isnan(tails[0].kv_score_buffer.kv_score[:8].numpy()).all()


@pytest.mark.parametrize("latent_rows", [False, True])
def test_states_of_its_hybrid_linear_models(latent_rows):
    params = SimpleNamespace(
        shape=SimpleNamespace(conv=[(6, 3)], temporal=(2, 4, 5)),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        is_kda=False,
    )
    carried = pools.MambaPool(size=5, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 1], device="cpu")
    where = {"size": 5 * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, **COMMON, "layer_num": 1}
    if latent_rows:
        full = pools.MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=8, **where)
    else:
        full = pools.MHATokenToKVPool(head_num=2, head_dim=8, enable_alt_stream=False, **where)
    pool = pools.HybridLinearKVPool(
        size=5 * PAGE, dtype=torch.bfloat16, page_size=PAGE, head_num=2, head_dim=8, full_attention_layer_ids=[2],
        device="cpu", mamba_pool=carried, full_kv_pool=full, use_mla=latent_rows,
    )  # fmt: skip
    for tensor in full.kv_buffer if latent_rows else (*full.k_buffer, *full.v_buffer):
        random(tensor)
    carried.mamba_cache.temporal.normal_()
    carried.mamba_cache.conv[0].normal_()
    # Request 3 has state 4, request 1 state 2.
    mapping = torch.tensor([0, 2, 0, 4], dtype=torch.int32)
    requests = SimpleNamespace(req_index_to_mamba_index_mapping=mapping)
    spec = sglang.spec_from(pool)
    tensors, descriptor, maps = hybrid_from(pool, requests)
    cache = kvcore.adopt(spec, tensors, layout=descriptor, maps=maps, max_requests=4)
    request = cache.admit(blocks=[4, 2, 3], slot=3, length=TOKENS)
    with cache.step({request: 0}) as step:
        states, inputs = step.layer(1).read_state(), step.layer(1).gather_conv()
    assert torch.equal(states[0].view(2, 4, 5), carried.mamba_cache.temporal[1, 4])
    assert torch.equal(inputs[0].float(), carried.mamba_cache.conv[0][1, 4].T.float())
    again = cache.import_request(moved(spec, cache, request), into=cache.admit(blocks=[5, 1, 0], slot=1))
    assert cache.digest([again]) == cache.digest([request])
    assert torch.equal(carried.mamba_cache.conv[0][:, 2], carried.mamba_cache.conv[0][:, 4])
    assert torch.equal(carried.mamba_cache.temporal[:, 2], carried.mamba_cache.temporal[:, 4])
    # A request without a state has no place; two of one state are refused.
    with pytest.raises(OutOfBlocks, match="no place of slot 2"):
        cache.admit(blocks=[5, 1, 0], slot=2, length=TOKENS)
    mapping[2] = 4
    with pytest.raises(ShapeError, match="not that of slot 3"):
        cache.admit(blocks=[5, 1, 0], slot=2, length=TOKENS)
    carried.mamba_cache.conv.append(carried.mamba_cache.conv[0])
    with pytest.raises(SpecError, match="2 convolutions"):
        sglang.spec_from(pool)
    with pytest.raises(SpecError, match=r"got SimpleNamespace.*HybridLinearKVPool") as caught:
        hybrid_from(SimpleNamespace(), requests)
    assert caught.value.where == "hybrid_from"


def test_pools_of_other_layouts_are_refused_by_name_and_reason():
    for kind, reason in (
        ("SWAKVPool", "full_to_swa_index_mapping"),
        ("DeepSeekV4TokenToKVPool", "mapped_from"),
        ("HybridLinearKVPool", "request pool"),
        ("Another", "MHATokenToKVPool"),
    ):
        with pytest.raises(SpecError, match=rf"{kind}.*{reason}"):
            tensors_from(type(kind, (SimpleNamespace,), {})())
    other = type("MHATokenToKVPool", (SimpleNamespace,), {})(kv_cache_layout="vectorized_5d", k_scale_buffer=None)
    with pytest.raises(SpecError, match="vectorized_5d"):
        tensors_from(other)
    with pytest.raises(SpecError, match="CompressStatePool"):
        rings_of(SimpleNamespace(online=True))
    with pytest.raises(SpecError, match="DeepSeekV4IndexerPool"):
        pages_of(SimpleNamespace())
