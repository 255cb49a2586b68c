"""Names and page sizes in the words of vLLM, SGLang and KVCR; against their own classes where they are installed."""

import importlib.util
import math
from types import SimpleNamespace

import pytest
from msgspec import structs

from kvcore.errors import SpecError
from kvcore.interop import kvcr, sglang, vllm
from kvcore.spec import presets
from tests.support import scene, stories

FLASH = presets.deepseek_v4_flash(formats={"index_keys": "index_fp8_132_h"}, draft=False)
V41 = presets.deepseek_v4_1_flash(draft=False)
CLASSIC = presets.classic(layers=2, key_heads=2, key_dim=64, value_dim=32, window=128, full_every=2, block_tokens=16)


@pytest.mark.parametrize(
    ("role", "kind", "content", "page"),
    [
        # Page sizes as vLLM 0.32's own classes print them.
        pytest.param("2.entries", "MLAAttentionSpec", 37_376, 37_440, id="CSA entries"),
        pytest.param("3.entries", "MLAAttentionSpec", 1_168, 1_728, id="HCA entries, half padding"),
        pytest.param("2.index_keys", "MLAAttentionSpec", 8_448, 8_640, id="index keys"),
        pytest.param("0.window", "SlidingWindowMLASpec", 37_376, 37_440, id="window"),
        pytest.param("2.tail", "SlidingWindowMLASpec", 32_768, 32_832, id="CSA tail"),
        pytest.param("3.tail", "SlidingWindowMLASpec", 32_768, 32_832, id="HCA tail"),
    ],
)
def test_v4_pages_are_those_of_vllm(role, kind, content, page):
    (found,) = [record for record in vllm.kv_cache_specs(FLASH) if record.name == role]
    assert (found.kind, found.page_bytes) == (kind, page)
    states = found.arguments["block_size"] // found.arguments.get("tokens_per_state", 1)
    size = {"uint8": 1, "float32": 4}[found.arguments["dtype"]]
    row = found.arguments.get("state_content_bytes") or found.arguments["head_size"] * size
    assert states * row == content
    assert page == math.ceil(content / 576) * 576


def test_every_cache_of_vllm_has_our_page_size():
    if importlib.util.find_spec("vllm") is None:
        # The figures above were read off vLLM's classes; here only that records are complete is left to check.
        for spec in (FLASH, V41, CLASSIC):
            records = vllm.kv_cache_specs(spec)
            assert [record.name for record in records] == [f"{layer}.{role}" for layer, role, _ in spec.components()]
            assert all(record.page_bytes > 0 for record in records)
        return
    from vllm.v1 import kv_cache_interface

    for spec in (FLASH, V41, CLASSIC):
        for record in vllm.kv_cache_specs(spec):
            built = record.build(kv_cache_interface)
            assert built.page_size_bytes == record.page_bytes, record
            assert type(built).__name__ == record.kind


def test_v41_shares_and_rings():
    records = {record.name: record for record in vllm.kv_cache_specs(V41)}
    assert records["2.tail"].kind == "CircularBufferSpec"
    assert records["3.entries"].shared_from == 2
    assert records["20.entries"].arguments["tokens_per_state"] == 1


def test_classic_layers():
    records = vllm.kv_cache_specs(CLASSIC)
    assert [record.kind for record in records] == ["SlidingWindowSpec", "FullAttentionSpec"]
    assert {record.page_bytes for record in records} == {16 * 2 * (64 + 32) * 2}
    with pytest.raises(SpecError, match=r"layers\[0\].kv"):
        vllm.kv_cache_specs(presets.classic(layers=1, key_heads=2, key_dim=64, key_format="int8_row"))


def test_sglang_pools_cover_v4():
    found = sglang.pools(FLASH)
    assert {pool.name: (len(pool.layers), pool.hit) for pool in found} == {
        "swa": (43, "trailing_pages"),
        "deepseek_v4_c4": (21, "all_pages"),
        "deepseek_v4_c4_indexer": (21, "all_pages"),
        "deepseek_v4_c4_state": (21, "trailing_pages"),
        "deepseek_v4_c4_indexer_state": (21, "trailing_pages"),
        "deepseek_v4_c128": (20, "all_pages"),
        "deepseek_v4_c128_state": (20, "trailing_pages"),
    }
    with pytest.raises(SpecError, match="4 or 128"):
        sglang.pools(V41)


def test_kvcr_regions(backend):
    cache = scene.create(stories.LATENT, backend)
    fields = [kvcr.descriptor_fields(region) for region in kvcr.region_table(cache)]
    assert [found["label"] for found in fields] == [name.replace(".page", ":page") for name in cache.pools]
    assert sum(found["count"] * found["size"] for found in fields) == cache.nbytes
    assert len({found["addr"] for found in fields}) == len(fields)
    if importlib.util.find_spec("kvcr") is not None:
        built = kvcr.region_descriptors(cache)
        assert [found.label for found in built] == [found["label"] for found in fields]


def config_of(records):
    """A ``KVCacheConfig`` of vLLM's with a group for every cache: classes of their names, and their attributes."""

    def built(record):
        arguments = {"head_size_v": 0, **record.arguments, "dtype": f"torch.{record.arguments['dtype']}"}
        return type(record.kind, (SimpleNamespace,), {})(**arguments)

    groups = [
        SimpleNamespace(layer_names=[record.name], kv_cache_spec=built(record))
        for record in records
        if record.shared_from is None
    ]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize("spec", [FLASH, V41, CLASSIC], ids=["V4", "V4.1", "classic"])
def test_a_configuration_of_vllm_is_a_spec_again(spec):
    index = next((layer.index_keys for layer in spec.layers if layer.index_keys is not None), None)
    formats = {} if index is None else {"index_keys": index.format}
    given = None if index is None else {"heads": index.heads, "topk": index.topk}
    shares = {layer: part.shared_from for layer, _, part in spec.components() if part.shared_from is not None}
    found = vllm.spec_from(config_of(vllm.kv_cache_specs(spec)), index=given, formats=formats, shares=shares)
    assert found.block_tokens == spec.block_tokens
    for ours, theirs in zip(found.layers, spec.layers, strict=True):
        # vLLM's sliding windows of keys and values lie in blocks.
        paged = {
            role: structs.replace(part, storage="paged") if role == "kv" else part for role, part in theirs.components()
        }
        assert dict(ours.components()) == paged


def test_modes_and_models_of_vllm():
    def config(name="model.layers.0.self_attn.attn", kind="FullAttentionSpec", **changes):
        arguments = {
            "block_size": 16,
            "num_kv_heads": 8,
            "head_size": 128,
            "head_size_v": 128,
            "dtype": "torch.bfloat16",
        }
        group = SimpleNamespace(
            layer_names=[name], kv_cache_spec=type(kind, (SimpleNamespace,), {})(**{**arguments, **changes})
        )
        return SimpleNamespace(kv_cache_groups=[group])

    mode = SimpleNamespace(name="INT8_PER_TOKEN_HEAD")
    kv = vllm.spec_from(config(dtype="torch.int8", kv_quant_mode=mode)).layers[0].kv
    assert (kv.key_format, kv.key_heads, kv.value_dim) == ("int8_per_token_head", 8, None)
    assert vllm.spec_from(config(kind="ChunkedLocalAttentionSpec", attention_chunk_size=64)).layers[0].kv.chunk == 64
    mla = {"head_size_v": 0, "num_kv_heads": 1, "tokens_per_state": 1, "kind": "MLAAttentionSpec"}
    v32 = config(**mla, head_size=576, dtype="torch.uint8", state_content_bytes=656)
    v32.kv_cache_groups += config(
        "model.layers.0.self_attn.indexer.k_cache", **mla, head_size=132, dtype="torch.uint8"
    ).kv_cache_groups
    keys = "index_fp8_132_fp32scale"
    layer = vllm.spec_from(v32, index={"heads": 64, "topk": 2048}, formats={"index_keys": keys}).layers[0]
    assert (layer.entries.format, layer.index_keys.format, layer.index_keys.dim) == ("v32_656", keys, 128)
    wrong = [
        (v32, {}, "index={'heads'"),
        (v32, {"index": {"heads": 64, "topk": 2048}}, "formats={'index_keys'"),
        (config("attn"), {}, "names with a number"),
        (config("layers.1.attn"), {}, "all layers from 0 on"),
        (config(kind="MambaSpec"), {}, "MLAAttentionSpec"),
        (config(dtype="torch.uint8", kv_quant_mode=SimpleNamespace(name="NVFP4")), {}, "under NVFP4"),
        (SimpleNamespace(kv_cache_groups=config().kv_cache_groups * 2), {}, "a second kv"),
    ]
    for one, options, match in wrong:
        with pytest.raises(SpecError, match=match):
            vllm.spec_from(one, **options)


def pool(kind, **attributes):
    return type(kind, (SimpleNamespace,), {})(**attributes)


def test_pools_of_sglang_are_specs():
    heads = {"head_num": 4, "head_dim": 64, "v_head_dim": 32, "page_size": 16, "dtype": "torch.bfloat16"}
    spec = sglang.spec_from(pool("MHATokenToKVPool", **heads, layer_num=3))
    assert (len(spec.layers), spec.block_tokens, spec.layers[2].kv.value_dim) == (3, 16, 32)
    full, sliding = (pool("MHATokenToKVPool", **heads, layer_num=1) for _ in range(2))
    hybrid = pool(
        "SWAKVPool", full_kv_pool=full, swa_kv_pool=sliding, page_size=16, layers_mapping={0: (0, True), 1: (0, False)}
    )
    assert [layer.kv.window for layer in sglang.spec_from(hybrid, window=128).layers] == [128, None]
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64, "layer_num": 2}
    assert (
        sglang.spec_from(pool("MLATokenToKVPool", **latent, kv_cache_dim=576, dtype="torch.bfloat16"))
        .layers[0]
        .entries.dim
        == 576
    )
    v32 = pool("DSATokenToKVPool", **latent, kv_cache_dim=656, index_head_dim=128, dtype="torch.float8_e4m3fn")
    layer = sglang.spec_from(v32, index={"heads": 64, "topk": 2048}).layers[1]
    assert (layer.entries.format, layer.index_keys.format) == ("v32_656", "index_fp8_132_fp32scale")
    v4 = pool(
        "DeepSeekV4TokenToKVPool",
        compression_ratios=[0, 4, 128],
        sliding_window=128,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        page_size=256,
        kv_layout=SimpleNamespace(value="v4"),
    )
    found = sglang.spec_from(v4, index={"heads": 64, "topk": 512}, formats={"index_keys": "index_fp8_132_h"})
    assert [dict(layer.components()) for layer in found.layers] == [
        dict(layer.components()) for layer in (FLASH.layers[0], FLASH.layers[2], FLASH.layers[3])
    ]
    v41 = pool(
        "DeepSeekV4TokenToKVPool",
        **{**vars(v4), "kv_layout": SimpleNamespace(value="v41")},
        compressed_kv_layout=lambda ratio: SimpleNamespace(value={1: "v41_fp4", 2: "v41_fp4"}[ratio]),
        sources_by_ratio={2: [2, 8, 14], 1: [20]},
    )
    v41.compression_ratios = [0, 0, *[2] * 18, *[1] * 20]
    found = sglang.spec_from(v41, index={"heads": 32, "topk": 512})
    assert found.digest == V41.digest
    for one, options, match in [
        (pool("MambaPool"), {}, "MHATokenToKVPool"),
        (hybrid, {}, "window="),
        (v32, {}, "index="),
        (pool("MHATokenToKVPool", **{**heads, "dtype": "torch.uint8"}, layer_num=1), {}, "bfloat16"),
    ]:
        with pytest.raises(SpecError, match=match):
            sglang.spec_from(one, **options)
