"""Engines that are killed with -9 at every boundary of what their connectors do: nothing torn, nothing of others.

A process runs an engine's connector over a folder, and ends itself at the n-th operation on the disk; for every n until
it gets through. Another engine then takes what the folder has: all of it right, and no less than what was acknowledged.
"""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from kvcore.interop import lmcache_storage
from kvcore.portable.disk import Disk
from kvcore.store import BlockStore, DiskTier, HostTier
from tests.engines import test_lmcache, test_sglang, test_vllm, test_vllm_groups

OPERATIONS = ("create", "write", "flush", "close", "rename", "flush_folder", "remove", "sweep_folder", "read")
MOST = 2000
"""Operations of any of these lives are fewer."""


class Mortal(Disk):
    """Ends its process before the n-th operation, or in the middle of writing."""

    def __init__(self, number):
        super().__init__()
        self.left = number


def _mortal(name):
    def run(self, *given):
        self.left -= 1
        if self.left < 0:
            if name == "write":
                file, data = given
                Disk.write(self, file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(Disk, name)(self, *given)

    return run


for _name in OPERATIONS:
    setattr(Mortal, _name, _mortal(_name))


def store_of(folder, disk=None):
    """What lies on the disk alone is found: the host's tier has room for nothing."""
    return BlockStore([HostTier(1), DiskTier(folder, 1 << 24, disk=disk)])


class Vllm:
    """One group, whose blocks all stay."""

    tokens = tuple((7 * number) % 89 for number in range(52))
    engine = test_vllm.Engine

    def write(self, store):
        self.engine(store).run("a", list(self.tokens))

    def read(self, store):
        """Blocks that another engine did not have to compute; all its rows are checked."""
        engine = self.engine(store)
        blocks, failed = engine.run("b", list(self.tokens))
        engine.check(self.tokens, blocks)
        assert failed == set()
        return (len(self.tokens) - engine.computed) // test_vllm.ROWS

    whole = 3


class Groups(Vllm):
    """Windows and states beside, in groups of their own."""

    tokens = Vllm.tokens[:36]
    engine = test_vllm_groups.Engine
    whole = 2

    def read(self, store):
        engine = self.engine(store)
        found = engine.run("b", list(self.tokens))
        assert engine.failed == 0
        return found // test_vllm_groups.STEP


class Sglang:
    """Pages of a host pool."""

    keys = ("a", "b", "c")
    whole = 3

    def rows(self):
        return torch.randn(24, 10, generator=torch.Generator().manual_seed(3)).bfloat16()

    def write(self, store):
        one = test_sglang.made(store)
        one.mem_pool_host.rows[:] = self.rows()
        one.batch_set_v1([*self.keys], torch.arange(12) + 8)

    def read(self, store):
        one = test_sglang.made(store)
        found = one.batch_get_v1([*self.keys], torch.arange(12))
        count = sum(found)
        assert found == [True] * count + [False] * (3 - count)
        assert torch.equal(one.mem_pool_host.rows[: 4 * count], self.rows()[8 : 8 + 4 * count])
        assert not one.mem_pool_host.rows[4 * count :].any()
        return count


class Lmcache:
    """Chunks."""

    names = ("a", "b", "c")
    whole = 3

    def made(self, store):
        config = SimpleNamespace(extra_config={"kvcore.store": store})
        return lmcache_storage.KvcoreStorage("cpu", config, None, SimpleNamespace(allocate=test_lmcache.Chunk), None)

    def chunk(self, number):
        kind = SimpleNamespace(name="KV_2LTD")
        chunk = test_lmcache.Chunk((2, 3, 5), torch.bfloat16, kind)
        chunk.tensor[:] = torch.arange(30).view(2, 3, 5) + 100 * number
        return chunk

    def write(self, store):
        keys = [test_lmcache.key(name) for name in self.names]
        self.made(store).batched_submit_put_task(keys, [self.chunk(number) for number in range(3)])

    def read(self, store):
        one = self.made(store)
        found = [one.get_blocking(test_lmcache.key(name)) for name in self.names]
        for number, chunk in enumerate(found):
            assert chunk is None or torch.equal(chunk.tensor, self.chunk(number).tensor)
        return sum(chunk is not None for chunk in found)


def run(life, folder, number):
    """Whether a process got through."""
    child = os.fork()
    if not child:
        try:
            life.write(store_of(folder, Mortal(number)))
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


@pytest.mark.parametrize("life", [Vllm(), Groups(), Sglang(), Lmcache()], ids=lambda life: type(life).__name__)
def test_a_killed_engine_leaves_whole_blocks_or_none(life, tmp_path, monkeypatch):
    monkeypatch.setattr(
        lmcache_storage.importlib.import_module(lmcache_storage.MEMORY), "MemoryFormat", test_lmcache.Kinds
    )
    found, kills = [], 0
    for number in range(MOST):
        folder = tmp_path / str(number)
        through = run(life, folder, number)
        store = store_of(folder) if folder.exists() else None
        found.append(0 if store is None else life.read(store))
        if store is not None:
            assert store.damaged == []
            # Whoever is there now has made the rest whole, and swept what was left half written.
            again = store_of(folder)
            assert life.read(again) >= found[-1]
            assert again.damaged == []
        if through:
            break
        kills += 1
    # What was named before a kill is there after it.
    assert found == sorted(found)
    assert (found[0], found[-1], kills > 10) == (0, life.whole, True)
    again = tmp_path / "0"
    life.write(store_of(again))
    assert life.read(store_of(again)) == life.whole
    assert not [path for path in again.rglob("*") if path.name.endswith(".tmp")]
