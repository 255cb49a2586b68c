"""``KvcoreStorage``: chunks of LMCache in a store of kvcore's, verified whenever they come back.

A storage plug-in: ``storage_plugins: ["kvcore"]`` with ``extra_config`` of ``storage_plugin.kvcore.module_path:
kvcore.interop.lmcache_storage``, ``storage_plugin.kvcore.class_name: KvcoreStorage`` and what ``kvcore.folder``,
``kvcore.bytes`` and ``kvcore.host_bytes`` say. LMCache is imported when the class is asked for; names are those of
LMCache 0.5.6. A chunk's page has its shape, dtype and kind before its bytes, under LMCache's own key.
"""

# pyright: reportUntypedBaseClass=false

import hashlib
import importlib
from functools import cache
from typing import Any

import msgspec

from kvcore.interop.stores import store_of

BASE = "lmcache.v1.storage_backend.abstract_backend"
MEMORY = "lmcache.v1.memory_management"


class Chunk(msgspec.Struct, array_like=True):
    """What is before a chunk's bytes."""

    shape: list[int]
    dtype: str
    kind: str


def __getattr__(name: str) -> Any:
    if name == "KvcoreStorage":
        return storage()
    raise AttributeError(name)


@cache
def storage() -> Any:
    """The class, over LMCache's ``StoragePluginInterface``."""
    base: Any = importlib.import_module(BASE)
    memory: Any = importlib.import_module(MEMORY)
    torch: Any = importlib.import_module("torch")

    class KvcoreStorage(base.StoragePluginInterface):
        """See the module."""

        def __init__(
            self,
            dst_device: str = "cpu",
            config: Any = None,
            metadata: Any = None,
            local_cpu_backend: Any = None,
            loop: Any = None,
        ) -> None:
            super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
            extra: dict[str, Any] = getattr(config, "extra_config", None) or {}
            self.store = store_of(extra, "kvcore.")

        def contains(self, key: Any, pin: bool = False) -> bool:
            """Whether a chunk is there, or at a peer; none is pinned: what goes meanwhile is a miss."""
            del pin
            return self.store.longest([_key(key)]) == 1

        def exists_in_put_tasks(self, key: Any) -> bool:
            """Never: a chunk is there when putting it returns."""
            del key
            return False

        def batched_submit_put_task(
            self, keys: Any, objs: Any, transfer_spec: Any = None, on_complete_callback: Any = None
        ) -> None:
            """Keep chunks."""
            del transfer_spec
            for key, chunk in zip(keys, objs, strict=True):
                about = chunk.metadata
                head = Chunk(list(about.shape), str(about.dtype).rpartition(".")[2], about.fmt.name)
                text = msgspec.msgpack.encode(head)
                data = b"".join((len(text).to_bytes(4, "little"), text, bytes(chunk.byte_array)))
                self.store.put(_key(key), data)
                if on_complete_callback is not None:
                    on_complete_callback(key)

        def get_blocking(self, key: Any) -> Any:
            """A chunk in memory that the local backend allots; None: missing, damaged, or no room."""
            page = self.store.get(_key(key))
            if page is None:
                return None
            size = int.from_bytes(page[:4], "little")
            head, data = msgspec.msgpack.decode(page[4 : 4 + size], type=Chunk), page[4 + size :]
            kind, dtype = memory.MemoryFormat[head.kind], getattr(torch, head.dtype)
            chunk = self.local_cpu_backend.allocate(torch.Size(head.shape), dtype, kind)
            if chunk is None:
                return None
            place = chunk.tensor.view(-1).view(torch.uint8)
            place[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return chunk

        def pin(self, key: Any) -> bool:
            """Whether it is there; see ``contains``."""
            return self.contains(key)

        def unpin(self, key: Any) -> bool:
            """Likewise."""
            return self.contains(key)

        def remove(self, key: Any, force: bool = True) -> bool:
            """Let a chunk go."""
            del force
            return self.store.remove(_key(key))

        def get_allocator_backend(self) -> Any:
            """Whose memory chunks are in."""
            return self.local_cpu_backend

        def close(self) -> None:
            """Have everything on the last tier."""
            self.store.flush()

    return KvcoreStorage


def _key(key: Any) -> bytes:
    return hashlib.sha256(key.to_string().encode()).digest()
