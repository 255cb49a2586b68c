"""JAX on two GPUs under ``shard_map``: context-parallel decode beside one of them, and Triton kernels beside jax.numpy.

    KVCORE_COMMIT=... python -m benchmarks.two_gpus_jax --out records/two_gpus_jax.json [--parts decode] [--seconds 110]

``decode``: a CSA layer and an HCA layer of V4-Flash, requests of 256K and then of 1M tokens. The pools of both meshes
are filled with the same rows; then one decode step's verbs are timed one by one, inside jit: digests, attention, times,
bytes. ``kernels``: see ``benchmarks/two_gpus_kernels.py``. ``--tiny`` runs small sizes on two forced devices of the
CPU. The record is written after every measurement, and keeps what is there of parts that were not asked for.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if "--tiny" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import two_gpus_kernels
from benchmarks.two_gpus_kernels import index_of, reader
from benchmarks.written import write
from kvcore import environment
from kvcore.interop.jax.sharding import Sharded
from kvcore.ops import StepIndex
from kvcore.spec import CacheSpec, Rope
from kvcore.spec.presets import V4_FORMATS, v4_layer

FULL = {"lengths": (262_144, 1_048_576), "requests": 4, "chunk": 65_536, "repeats": 20}
TINY = {"lengths": (2048, 4096), "requests": 2, "chunk": 1024, "repeats": 2}
WARM = 3
NAMES = ("one GPU", "two GPUs")
PARTS = ("decode", "kernels")
HEADS, DIM, INDEX_DIM, TOPK, BLOCK = 64, 512, 128, 512, 256
CSA, HCA = 4, 128
SPEC = CacheSpec(
    layers=[v4_layer(CSA, overlap=True, formats=V4_FORMATS), v4_layer(HCA, overlap=False, formats=V4_FORMATS)],
    block_tokens=BLOCK,
    name="V4-Flash, CSA and HCA",
)
ROPE = Rope(dim=64, theta=160000.0)


def normal(seed: Any, *shape: int) -> jax.Array:
    """The same values on every device and mesh."""
    return jax.random.normal(jax.random.key(seed, impl="threefry2x32"), shape, jnp.float32)


class OnMesh:
    """The same requests on one device or on several; programs are compiled ahead, all at once."""

    def __init__(self, devices: int, sizes: dict[str, Any]) -> None:
        self.sizes, self.devices = sizes, devices
        self.requests: int = sizes["requests"]
        mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
        longest = sizes["lengths"][-1] + BLOCK * devices
        tokens = self.requests * longest
        self.sharded = Sharded(SPEC, mesh, max_requests=self.requests, max_tokens=tokens, layout="planar")
        self.pools = self.sharded.allocate()
        self.blocks = -(-longest // self.sharded.plan.block_tokens)
        self.pool_bytes = self.sharded.plan.nbytes
        self._programs: dict[str, Any] = {}

    def index(self, start: int, new: int, *, requests: int | None = None, rows: bool = True) -> StepIndex:
        """Of some requests, all of them unless told otherwise."""
        return self.sharded.index([index_of(requests or self.requests, self.blocks, start, new, rows=rows)])

    def compile(self) -> None:
        """Every program, several at once."""
        whole, chunk = self.sharded.spec(), self.sizes["chunk"]
        seed = self.sharded.put(np.int32(0))
        fill = self.sharded.step(partial(fill_chunk, chunk=chunk, requests=self.requests), (whole,), whole)
        begin = self.sharded.step(partial(new_tokens, requests=self.requests), (whole,), whole)
        wanted: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "fill": (fill, (self.index(0, chunk, rows=False), seed)),
            "write": (begin, (self.index(chunk - 1, 1), seed)),
        }
        picks = self.sharded.put(np.zeros((self.requests, TOPK), np.int32))
        read = self.index(chunk - 1, 1)
        for length in self.sizes["lengths"]:
            wanted[f"select {length}"] = self._reader(partial(select, columns=length // CSA)), (read,)
            wanted[f"HCA {length}"] = self._reader(partial(attend_all, columns=length // HCA)), (read,)
        wanted["CSA"] = self._reader(attend_picked, inputs=1), (read, picks)
        with ThreadPoolExecutor() as pool:
            lowered = {name: program.lower(self.pools, *inputs) for name, (program, inputs) in wanted.items()}
            self._programs = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))

    def _reader(self, verb: Callable[..., Any], inputs: int = 0) -> Any:
        whole = self.sharded.spec()
        return reader(self.sharded, verb, [whole] * inputs, whole)

    def fill(self, start: int, length: int) -> None:
        """Entries and index keys of tokens ``start`` to ``length``."""
        for first in range(start, length, self.sizes["chunk"]):
            index = self.index(first, self.sizes["chunk"], rows=False)
            self.pools, _ = self._programs["fill"](self.pools, index, self.sharded.put(np.int32(first)))

    def decode(self, length: int) -> dict[str, Any]:
        """The last token of ``length`` is new: written once, read many times."""
        index = self.index(length - 1, 1)
        self.pools, _ = self._programs["write"](self.pools, index, self.sharded.put(np.int32(length)))
        found: dict[str, Any] = {}
        calls = {
            "scores and selection": lambda: self._programs[f"select {length}"](self.pools, index),
            "CSA attention": lambda: self._programs["CSA"](self.pools, index, found["scores and selection"]),
            "HCA attention": lambda: self._programs[f"HCA {length}"](self.pools, index),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.sizes["repeats"] + WARM):
            for name, call in calls.items():
                started = time.perf_counter()
                found[name] = jax.block_until_ready(call())
                times[name].append(1e6 * (time.perf_counter() - started))
        us = {name: round(median(some[WARM:]), 1) for name, some in times.items()}
        return {
            "us": {**us, "both layers": round(sum(us.values()), 1)},
            "answers": {name: np.asarray(found[name][0], np.float32) for name in ("CSA attention", "HCA attention")},
            "picks": np.asarray(found["scores and selection"]),
            "digest": f"{self.sharded.digests(self.pools, self.index(length, 0, requests=1))[0]:016x}",
        }


def fill_chunk(ops: Any, pools: Any, index: StepIndex, seed: Any, *, chunk: int, requests: int) -> Any:
    """What a prefill that compresses itself would store."""
    csa, hca = requests * chunk // CSA, requests * chunk // HCA
    pools = ops.store_entries(pools, 0, index, normal(seed, csa, DIM), normal(seed + 1, csa, INDEX_DIM))
    return ops.store_entries(pools, 1, index, normal(seed + 2, hca, DIM)), seed


def new_tokens(ops: Any, pools: Any, index: StepIndex, seed: Any, *, requests: int) -> Any:
    """One token of every request: windows, tails, and the entries that close."""
    for layer, spec in enumerate(SPEC.layers):
        assert spec.tail is not None
        tail = [normal(seed + 10 + layer + part, requests, spec.tail.width) for part in (0, 50)]
        if spec.index_tail is not None:
            tail += [normal(seed + 30 + part, requests, spec.index_tail.width) for part in (0, 50)]
        pools = ops.append_window(pools, layer, index, normal(seed + 5 + layer, requests, DIM))
        pools = ops.append_flush(pools, layer, index, *tail, closed=requests, rope=ROPE)
    return pools, seed


def select(ops: Any, pools: Any, index: StepIndex, *, columns: int) -> Any:
    """Top 512 of the CSA layer's index keys."""
    count = len(index.positions)
    q, weights = normal(2, count, HEADS, INDEX_DIM), normal(3, count, HEADS)
    return ops.index_select(pools, 0, index, q, weights, TOPK, columns=columns)


def attend_picked(ops: Any, pools: Any, index: StepIndex, picks: Any) -> Any:
    """Window and selected entries of the CSA layer."""
    q = normal(1, len(index.positions), HEADS, DIM)
    return ops.attend(pools, 0, index, q, picks, sink=normal(4, HEADS))


def attend_all(ops: Any, pools: Any, index: StepIndex, *, columns: int) -> Any:
    """Window and all entries of the HCA layer."""
    count = len(index.positions)
    every = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None], (count, columns))
    return ops.attend(pools, 1, index, normal(5, count, HEADS, DIM), every, sink=normal(4, HEADS))


def compared(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """What two devices said beside what one did."""
    same = (one["picks"] == two["picks"]).all(axis=1)
    pairs = {name: (one["answers"][name], two["answers"][name]) for name in one["answers"]}
    largest = {name: float(np.abs(a - b)[same].max(initial=0)) for name, (a, b) in pairs.items()}
    return {
        **{name: one_of["us"] for name, one_of in zip(NAMES, (one, two), strict=True)},
        "speed_up": {name: round(one["us"][name] / us, 2) for name, us in two["us"].items()},
        "digest": one["digest"],
        "digests_equal": one["digest"] == two["digest"],
        "selections_equal": f"{int(same.sum())} of {len(same)}",
        "largest_difference": largest,
        "largest_value": {name: float(np.abs(a).max()) for name, (a, _) in pairs.items()},
    }


class Record:
    """The file that says what was found; written anew whenever something is."""

    def __init__(self, out: Path | None, device: str) -> None:
        self._out, self._started = out, time.monotonic()
        self.fields: dict[str, Any] = {}
        if out is not None and out.exists():
            found = json.loads(out.read_text(encoding="utf-8"))
            self.fields = {name: found[name] for name in PARTS if name in found}
        self._where = environment.of_script(device)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return round(time.monotonic() - self._started, 1)

    def part(self, name: str) -> None:
        """Begin a part: nothing of an older one is left."""
        self.fields[name] = {**self._where, "complete": False}

    def tell(self, part: str, **more: Any) -> None:
        """Add to a part."""
        self.fields[part].update(more, seconds=self.seconds)
        print(json.dumps(more), f"[{self.seconds} s]", flush=True)
        write(self.fields, self._out)


def decode(record: Record, devices: int, sizes: dict[str, Any], seconds: float) -> bool | None:
    """Context-parallel decode beside one device: whether they agree, None if the time was up."""
    meshes = [OnMesh(count, sizes) for count in (1, devices)]
    pool_bytes = {NAMES[number]: mesh.pool_bytes for number, mesh in enumerate(meshes)}
    record.tell("decode", requests=sizes["requests"], pool_bytes_a_device=pool_bytes)
    with ThreadPoolExecutor() as pool:
        list(pool.map(OnMesh.compile, meshes))
    record.tell("decode", compiled=True, how=meshes[0].sharded.ops.how)
    filled, agree = 0, True
    for length in sizes["lengths"]:
        if record.seconds > seconds:
            return None
        for mesh in meshes:
            mesh.fill(filled, length)
        filled = length
        found = compared(*(mesh.decode(length) for mesh in meshes))
        agree &= found["digests_equal"] and max(found["largest_difference"].values()) < 1e-4
        record.tell("decode", **{f"decode at {length}": found})
    return agree


def kernels(record: Record, wanted: str, sizes: dict[str, Any], seconds: float) -> bool | None:
    """Kernels beside ``jax.numpy``, mesh after mesh: whether they agree, None if the time was up."""
    record.tell("kernels", sizes=sizes)
    agree = True
    for axis, name in two_gpus_kernels.MESHES.items():
        if record.seconds > seconds:
            return None
        found = two_gpus_kernels.measured(axis, wanted, sizes)
        agree &= not found["faults"]
        record.tell("kernels", **{f"{axis} over {name}": found})
    return agree


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; 1 if something differs, 2 if the time was up before the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true", help="two forced devices of the CPU, small sizes")
    parser.add_argument("--devices", type=int, default=2, help="of the second mesh of decode")
    parser.add_argument("--kernels", default="triton" if jax.default_backend() == "gpu" else "portable")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    parser.add_argument("--seconds", type=float, default=110, help="begin nothing after this long")
    options = parser.parse_args(arguments)
    if options.out and not options.tiny and environment.commit() is None:
        parser.error("the record would not say of which commit it is: set KVCORE_COMMIT")
    kinds = [device.device_kind for device in jax.devices()[: options.devices]]
    record, status = Record(options.out, ", ".join(kinds)), 0
    for part in options.parts:
        record.part(part)
        if part == "decode":
            agree = decode(record, options.devices, TINY if options.tiny else FULL, options.seconds)
        else:
            small = two_gpus_kernels.TINY if options.tiny else two_gpus_kernels.FULL
            agree = kernels(record, options.kernels, small, options.seconds)
        if agree is None:
            print("the time is up")
            return 2
        record.tell(part, complete=True)
        status |= not agree
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
