"""How fast a request leaves a cache and comes back, verified, on one core of a CPU: megabytes of rows a second.

Two requests: keys and values of eight layers (64 MiB), and DeepSeek-V4-Flash's rows (windows, tails, entries and index
keys of 43 layers). ``digest`` is ``Cache.digest``; ``lanes`` the backend's digest of rows that lie in memory; beside
them what the same bytes cost a copy, and the hashes of libraries. Every move is checked: the digest of what arrived is
that of what left. ``compiled`` says whether the digest runs in C, as it does in a process that has digested much, where
a compiler is found.

``restore`` is 100K tokens of V4-Flash out of a store in the host's memory, verified.

Seconds are those of the process, so that others on the machine count for little; the caches that they share still do.

    OMP_NUM_THREADS=1 python -m benchmarks.movement --out records/movement_cpu.json
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from benchmarks.written import write
from kvcore import environment
from kvcore import store as stores
from kvcore.arrays import to_numpy
from kvcore.digest import native
from kvcore.handoff import Direct, Exporter, pull
from kvcore.ops import RawRows
from kvcore.portable.record import RequestRecord
from kvcore.spec import KV, CacheSpec, LayerSpec, presets
from kvcore.store import BlockStore, HostTier

MiB = 1 << 20


def keys_and_values(tokens: int) -> tuple[CacheSpec, int]:
    """Eight layers of 8 heads of 128 channels in bf16: 32 KiB a token."""
    kv = KV(key_heads=8, key_dim=128)
    return CacheSpec(layers=(LayerSpec(kv=kv),) * 8, block_tokens=64, name="kv_8x8x128"), tokens


def deepseek(tokens: int) -> tuple[CacheSpec, int]:
    """V4-Flash, whose history is compressed: many small rows."""
    return presets.deepseek_v4_flash(), tokens * 2


SCENES = {"keys and values": keys_and_values, "deepseek v4 flash": deepseek}


def filled(spec: CacheSpec, backend: str, tokens: int) -> tuple[Any, Any]:
    """A cache with room for two requests, one of them of that many tokens, every byte of its pools of any value."""
    cache = kvcore.create_cache(spec, backend=backend, max_requests=2, max_tokens=2 * tokens + 512)
    rng = np.random.default_rng(0)
    noise = {
        name: rng.integers(0, 256, pool.shape, np.uint8) if pool.nbytes else np.zeros(pool.shape, np.uint8)
        for name, pool in cache.pools.items()
    }
    cache.pools = cache.pools.replace({name: cache.asarray(array) for name, array in noise.items()})
    # Rows are bytes here and nothing is computed: whatever lies in the pools is the request's.
    record = RequestRecord(length=tokens, floor=tokens, tokens=None, salt=None, checkpoints=[])
    request = cache.exclusive("fill", lambda state: state.restore(record, lambda _ops, pools, _row: pools))
    return cache, request


def best(act: Callable[[], Any], repeats: int, after: Callable[[Any], Any] = lambda _: None) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        found = act()
        times.append(time.process_time() - start)
        after(found)
        del found
    return min(times)


def moves(spec: CacheSpec, backend: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of every way in which one request moves, and its bytes."""
    cache, request = filled(spec, backend, tokens)
    right = cache.digest([request])
    blob = cache.export_request(request)
    seconds: dict[str, float] = {}

    def arrived(moved: Any) -> None:
        if cache.digest([moved]) != right:
            raise SystemExit(f"{backend}: what arrived is not what left")
        cache.release(moved)

    seconds["digest"] = best(lambda: cache.digest([request]), repeats)
    seconds["export"] = best(lambda: cache.export_request(request), repeats)
    seconds["import"] = best(lambda: cache.import_request(blob), repeats, arrived)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.kv"
        seconds["save"] = best(lambda: cache.save(path, requests=[request]), repeats)
        seconds["load"] = best(lambda: kvcore.load(path, backend=backend), repeats)
    desk = Exporter(cache)

    def hand_over() -> Any:
        return pull(cache, desk.export(request), Direct(desk), timeout=600.0)

    seconds["export and pull"] = best(hand_over, repeats, arrived)
    return {"bytes": len(blob), "seconds": seconds}


def restored(backend: str, repeats: int) -> dict[str, Any]:
    """Seconds of a long request's way into a store in the host's memory and back; ``far`` leaves what is selected."""
    spec = presets.deepseek_v4_flash(draft=False)
    tokens = 100_000 // spec.block_tokens * spec.block_tokens
    cache, request = filled(spec, backend, tokens)
    right, store, ids = cache.digest([request]), BlockStore([HostTier(1 << 33)]), range(tokens)

    def arrived(moved: Any) -> None:
        stores.bring(cache, moved)
        if cache.digest([moved]) != right:
            raise SystemExit(f"{backend}: what arrived is not what left")
        cache.release(moved)

    seconds = {
        "save": best(lambda: (store.clear(), stores.save(store, cache, request, ids)), repeats),
        "restore": best(lambda: stores.load(store, cache, ids), repeats, arrived),
        "restore far": best(lambda: stores.load(store, cache, ids, far=True), repeats, arrived),
    }
    return {"bytes": store.tiers[0].used, "seconds": seconds}


def lanes(backend: str, repeats: int) -> dict[str, Any]:
    """Seconds of the digest of 64 MiB of rows of 2 KiB, as many as the keys and values of one layer."""
    rows = np.random.default_rng(1).integers(0, 256, (1, 16384, 4096), np.uint8)
    cache = kvcore.create_cache(keys_and_values(64)[0], backend=backend, max_requests=1, max_tokens=64)
    positions = cache.asarray(np.arange(16384, dtype=np.int32)[None])
    raw = RawRows(cache.asarray(rows), positions)
    return {"bytes": rows.nbytes, "seconds": {"lanes": best(lambda: to_numpy(cache.ops.digest_rows(raw, 1)), repeats)}}


def memory(repeats: int) -> dict[str, Any]:
    """Seconds of a copy and of hashes of 64 MiB."""
    rows = np.random.default_rng(1).integers(0, 256, 64 * MiB, np.uint8)
    there = np.empty_like(rows)
    pages = [rows[first : first + 2 * MiB] for first in range(0, len(rows), 2 * MiB)]
    seconds = {
        "copy": best(lambda: np.copyto(there, rows), repeats),
        "copy to new memory": best(rows.copy, repeats),
        "sha256": best(lambda: [hashlib.sha256(page).digest() for page in pages], repeats),
    }
    return {"bytes": rows.nbytes, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="reference,torch_triton,jax_pallas")
    parser.add_argument("--tokens", type=int, default=2048, help="2,048 are 64 MiB of keys and values")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--restore", default="reference,torch_triton,jax_pallas", help="backends of 100K tokens")
    parser.add_argument("--before", type=Path, help="a record of an older commit, to be kept beside this one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compiled = native.wait() is not None
    found: dict[str, Any] = {}

    def keep(backend: str, scene: str, measured: dict[str, Any]) -> None:
        """What is known stays known, if the rest comes to no end."""
        found.setdefault(backend, {})[scene] = measured
        for name, seconds in measured["seconds"].items():
            rate = measured["bytes"] / seconds / 1e6
            print(f"{backend:14} {scene:18} {name:20} {seconds * 1e3:10.1f} ms {rate:10.0f} MB/s", flush=True)
        about = environment.of_script()
        record = {"environment": about, "tokens": args.tokens, "compiled": compiled, "measured": found}
        if args.before:
            record["before"] = json.loads(args.before.read_text())
        write(record, args.out)

    keep("memory", "", memory(args.repeats))
    for backend in args.backends.split(","):
        keep(backend, "rows in memory", lanes(backend, args.repeats))
        for scene in args.scenes.split(","):
            spec, tokens = SCENES[scene](args.tokens)
            keep(backend, scene, moves(spec, backend, tokens, args.repeats))
    for backend in filter(None, args.restore.split(",")):
        keep(backend, "100K tokens of V4", restored(backend, args.repeats))


if __name__ == "__main__":
    main()
