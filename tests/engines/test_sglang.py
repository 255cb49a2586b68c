"""SGLang's own classes, out of its wheel: the storage of its hierarchical cache, with a host pool around."""

import pytest
import torch

from kvcore.interop import sglang, sglang_storage
from kvcore.spec import presets
from kvcore.store import BlockStore, DiskTier, HostTier
from tests.engines.wheels import own_modules

(storage,) = own_modules(
    "sglang",
    "srt.mem_cache.hicache_storage",
)

PAGE, ELEMENTS = 4, 4 * 10


class HostPool:
    """A pool of pages of ``PAGE`` tokens."""

    page_size = PAGE

    def __init__(self, pages):
        self.rows = torch.zeros(pages * PAGE, 10, dtype=torch.bfloat16)

    def get_data_page(self, index, flat=True):
        page = self.rows[index : index + PAGE]
        return page.reshape(-1) if flat else page

    def get_dummy_flat_data_page(self):
        return torch.zeros(ELEMENTS, dtype=torch.bfloat16)

    def set_from_flat_data_page(self, index, page):
        self.rows[index : index + PAGE] = page.view(PAGE, 10)


def made(store, **changes):
    given = {
        "tp_rank": 0,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "m",
    }
    config = storage.HiCacheStorageConfig(**{**given, **changes, "extra_config": {"store": store}})
    one = sglang_storage.KvcoreStorage(config)
    assert isinstance(one, storage.HiCacheStorage)
    one.register_mem_pool_host(HostPool(6))
    return one


def test_pages_come_back_as_they_went_and_damaged_ones_do_not(tmp_path):
    tiers = [HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)]
    store = BlockStore(tiers)
    first = made(store)
    first.mem_pool_host.rows[:] = torch.randn(24, 10)
    keys, places = ["a", "b", "c"], torch.arange(12) + 8
    assert first.batch_set_v1(keys, places) == [True] * 3
    second = made(store)
    assert (second.batch_exists([*keys, "d"]), second.exists("d")) == (3, False)
    assert second.batch_get_v1(keys, torch.arange(12)) == [True] * 3
    assert torch.equal(second.mem_pool_host.rows[:12], first.mem_pool_host.rows[8:20])
    # Another rank has pages of its own; latent rows are the same for all.
    assert made(store, tp_rank=1).batch_exists(keys) == 0
    made(store, is_mla_model=True).set("x", torch.ones(4))
    assert made(store, is_mla_model=True, tp_rank=1).get("x").view(torch.float32).tolist() == [1] * 4
    # A flipped bit: that page and what is behind it is not filled.
    key = second._key("b")
    tiers[0].put(key, bytes(bytearray(tiers[0].get(key))[:-1]) + b"\xff")
    third = made(store)
    assert third.batch_get_v1(keys, torch.arange(12)) == [True, False, False]
    assert not third.mem_pool_host.rows[4:].any()
    assert third.get("a", torch.zeros(3)) is None
    assert third.batch_get(["a", "b"])[1] is None
    third.clear()
    assert third.batch_exists(keys) == 0


def test_names_of_pools_are_its_own():
    known = {name.value for name in storage.PoolName}
    assert {pool.name for pool in sglang.pools(presets.deepseek_v4_flash(draft=False))} <= known
    with pytest.raises(AttributeError):
        _ = sglang_storage.Nothing
