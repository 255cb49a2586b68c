"""``KvcoreStorage``: pages of SGLang's hierarchical cache in a store of kvcore's, verified whenever they come back.

A storage back-end for ``--hicache-storage-backend dynamic``; SGLang is imported when the class is asked for. Keys are
SGLang's own, and with them the rank that a page is of. Names are those of SGLang 0.5.23.
"""

# pyright: reportUntypedBaseClass=false

import hashlib
import importlib
import json
from functools import cache
from typing import Any

from kvcore.interop.stores import store_of

BASE = "sglang.srt.mem_cache.hicache_storage"

RANKS = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")


def __getattr__(name: str) -> Any:
    if name == "KvcoreStorage":
        return storage()
    raise AttributeError(name)


@cache
def storage() -> Any:
    """The class, over SGLang's ``HiCacheStorage``."""
    base: Any = importlib.import_module(BASE)
    torch: Any = importlib.import_module("torch")

    class KvcoreStorage(base.HiCacheStorage):
        """See the module.

        Args:
            storage_config: SGLang's, with an ``extra_config`` as ``store_of`` reads it.
        """

        def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
            del kwargs
            extra: Any = storage_config.extra_config or {}
            extra = json.loads(extra) if isinstance(extra, str) else extra
            self.store = store_of(extra)
            config = storage_config
            # Pages of latent rows are the same on all ranks of a tensor-parallel group, but for context shards.
            heads = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
            others = [getattr(config, name) for name in RANKS]
            order = "pages first" if config.is_page_first_layout else "layers first"
            self._about = f"{config.model_name}/{order}/{'.'.join(map(str, (*heads, *others)))}/"

        def _key(self, key: str) -> bytes:
            return hashlib.sha256((self._about + key).encode()).digest()

        def exists(self, key: str) -> bool:
            """Whether a page is there."""
            return self.store.has(self._key(key))

        def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
            """How many, from the first on, are there."""
            del extra_info
            return self.store.longest([self._key(key) for key in keys])

        def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
            """A page's bytes, in ``target_location`` if there is one; None: missing, or damaged."""
            del target_sizes
            page = self.store.get(self._key(key))
            if page is None:
                return None
            found = torch.frombuffer(bytearray(page), dtype=torch.uint8)
            if target_location is None:
                return found
            if target_location.numel() * target_location.element_size() != len(found):
                return None
            target_location.view(-1).view(torch.uint8).copy_(found)
            return target_location

        def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
            """Each as ``get``."""
            del target_sizes
            places = [None] * len(keys) if target_locations is None else target_locations
            self.store.fetch([self._key(key) for key in keys])
            return [self.get(key, place) for key, place in zip(keys, places, strict=True)]

        def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
            """Keep a page; whether it is there now."""
            del target_sizes
            given = target_location if value is None else value
            data = given.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return self.store.put(self._key(key), data)

        def batch_set(
            self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
        ) -> bool:
            """Each as ``set``; whether all are there."""
            del target_sizes
            given = target_locations if values is None else values
            kept = [self.set(key, value) for key, value in zip(keys, given, strict=True)]
            return all(kept)

        def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
            """Pages into the host pool; behind the first that is missing or damaged none is filled."""
            del extra_info
            pool, done = self.mem_pool_host, list[bool]()
            self.store.fetch([self._key(key) for key in keys])
            for number, key in enumerate(keys):
                place = host_indices[number * pool.page_size]
                page = self.get(key, pool.get_dummy_flat_data_page()) if all(done) else None
                if page is not None:
                    pool.set_from_flat_data_page(place, page)
                done.append(page is not None)
            return done

        def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
            """Pages out of the host pool."""
            del extra_info
            pool = self.mem_pool_host
            places = [host_indices[number * pool.page_size] for number in range(len(keys))]
            return [
                self.exists(key) or self.set(key, pool.get_data_page(place, flat=True))
                for key, place in zip(keys, places, strict=True)
            ]

        def clear(self) -> None:
            """Let all pages go."""
            self.store.clear()

    return KvcoreStorage
