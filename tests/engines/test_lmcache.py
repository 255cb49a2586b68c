"""LMCache's own classes, out of its wheel: the base of its storage plug-ins, and the names of its layouts."""

import zipfile
from types import SimpleNamespace

import pytest
import torch

from kvcore import adoption
from kvcore.interop import lmcache_storage
from kvcore.store import BlockStore, DiskTier, HostTier
from tests.engines.wheels import own_modules, wheel_of

(backend,) = own_modules(
    "lmcache",
    "v1.storage_backend.abstract_backend",
)

NOT_ROWS = {"NL_X_NP_X_NB_BS_ONE_HS"}
"""Rows of pools that a layer has several of: no component of kvcore is kept so."""

BEYOND = {"NL_X_NB_NC_BSV_BSS", "NL_X_NB_HS_BS"}
"""Of SGLang's pools, which LMCache does not name: pages of index keys in a block, and inputs that are shifted."""


class Kinds:
    """Stands for ``MemoryFormat``, which compiled code makes."""

    def __class_getitem__(cls, name):
        return SimpleNamespace(name=name)


class Chunk:
    def __init__(self, shape, dtype, kind):
        self.tensor = torch.zeros(shape, dtype=dtype)
        self.metadata = SimpleNamespace(shape=torch.Size(shape), dtype=dtype, fmt=kind)

    @property
    def byte_array(self):
        return memoryview(self.tensor.view(-1).view(torch.uint8).numpy())


def key(name):
    return SimpleNamespace(to_string=lambda: name)


def test_chunks_come_back_as_they_went_and_damaged_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(lmcache_storage.importlib.import_module(lmcache_storage.MEMORY), "MemoryFormat", Kinds)
    tier = DiskTier(tmp_path, 1 << 20)
    store = BlockStore([HostTier(1 << 20), tier])
    config = SimpleNamespace(extra_config={"kvcore.store": store})
    local = SimpleNamespace(allocate=Chunk)
    one = lmcache_storage.KvcoreStorage("cpu", config, None, local, None)
    assert isinstance(one, backend.StoragePluginInterface)
    chunk = Chunk((2, 3, 5), torch.bfloat16, SimpleNamespace(name="KV_2LTD"))
    chunk.tensor[:] = torch.randn(2, 3, 5)
    told = []
    one.batched_submit_put_task([key("a"), key("b")], [chunk, chunk], on_complete_callback=told.append)
    assert len(told) == 2
    assert (one.contains(key("a")), one.contains(key("c")), one.exists_in_put_tasks(key("a"))) == (True, False, False)
    found = one.get_blocking(key("a"))
    assert torch.equal(found.tensor, chunk.tensor)
    assert found.metadata.fmt.name == "KV_2LTD"
    one.close()
    other = lmcache_storage.KvcoreStorage(
        "cpu", SimpleNamespace(extra_config={"kvcore.folder": str(tmp_path)}), None, local, None
    )
    assert torch.equal(other.get_blocking(key("b")).tensor, chunk.tensor)
    held = lmcache_storage._key(key("a"))
    path = tier._path(held)
    data = bytearray(path.read_bytes())
    data[-3] ^= 8
    path.write_bytes(data)
    assert other.get_blocking(key("a")) is None
    assert not other.contains(key("a"))
    assert other.remove(key("b"))
    assert not other.pin(key("b"))
    with pytest.raises(AttributeError):
        _ = lmcache_storage.Nothing


def test_its_layouts_are_those_of_the_table():
    folder = "lmcache/v1/gpu_connector/kv_format/specs/"
    files = [
        name.removeprefix(folder)
        for name in zipfile.ZipFile(wheel_of("lmcache")).namelist()
        if name.startswith(folder) and name != folder
    ]
    names = {name.removesuffix(".py").upper() for name in files} - {"", "__INIT__", "BASE", "REGISTRY"}
    assert names - NOT_ROWS == set(adoption.LAYOUTS) - BEYOND
