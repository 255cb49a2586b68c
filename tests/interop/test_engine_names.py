"""Names and page sizes in the words of vLLM, SGLang and KVCR; against their own classes where they are installed."""

import importlib.util
import math

import pytest

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
