"""Triton kernels under ``shard_map`` beside ``jax.numpy``, on two GPUs: bytes of pools, results, times.

The part ``kernels`` of ``python -m benchmarks.two_gpus_jax``. On a mesh of two devices, once over each logical axis,
two sets of pools are given the same rows. What is stored as it was given must be equal to the byte; entries that a
flush computes, and what is read, agree within the tolerance table. Both read the same pools.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.conformance import outputs
from kvcore.conformance.agreement import compare_output
from kvcore.interop.jax.sharding import RULES, Axes, Sharded
from kvcore.ops import StepIndex
from kvcore.spec import KV, CacheSpec, LayerSpec, Rope
from kvcore.spec.presets import V4_FORMATS, v4_layer
from kvcore.step import StepRequest, build_index

FULL = {
    "requests": 16,
    "history": 16_384,
    "prefill": 512,
    "decode": 8,
    "heads": 64,
    "topk": 512,
    "repeats": 20,
    "window": 128,
    "index_heads": 64,
    "kv_heads": 8,
    "kv_dim": 128,
}
TINY = {
    "requests": 2,
    "history": 64,
    "prefill": 6,
    "decode": 2,
    "heads": 16,
    "topk": 16,
    "repeats": 1,
    "window": 16,
    "index_heads": 16,
    "kv_heads": 2,
    "kv_dim": 16,
}
MESHES = {"requests": "data", "blocks": "context", "heads": "model"}
"""Logical axis -> the mesh's only one, two devices long."""

DIM, INDEX_DIM, RATIO, BLOCK = 512, 128, 4, 256
ROPE = Rope(dim=64, theta=160000.0)
COMPUTED = {"entries": "rope", "index_keys": "rope"}
"""Role that a flush writes -> the row of the tolerance table."""

ROWS, HEADS = Axes("requests"), Axes("requests", "heads")
QUERIES, BATCH = Axes("requests", "query_heads"), Axes("requests", None, "heads")
STREAMS = {
    # name -> (width of a token's row, 0 for the classic layer's heads; where it lies)
    "window": (DIM, ROWS),
    "kv": (2 * DIM, ROWS),
    "score": (2 * DIM, ROWS),
    "index_kv": (2 * INDEX_DIM, ROWS),
    "index_score": (2 * INDEX_DIM, ROWS),
    "k": (0, HEADS),
    "v": (0, HEADS),
}


def spec_of(sizes: dict[str, int]) -> CacheSpec:
    """V4-Flash's CSA layer, and a classic ring."""
    csa = {"window": sizes["window"], "index_heads": sizes["index_heads"], "index_topk": sizes["topk"]}
    ring = {"key_heads": sizes["kv_heads"], "key_dim": sizes["kv_dim"], "window": sizes["window"]}
    layers = (
        v4_layer(RATIO, overlap=True, formats=V4_FORMATS, **csa),
        LayerSpec(kv=KV(**ring, key_format="fp8_row", storage="ring")),
    )
    return CacheSpec(layers=layers, block_tokens=BLOCK)


def fill(ops: Any, pools: Any, index: StepIndex, seed: Any, *, count: int) -> Any:
    """Entries and index keys as a caller that compresses itself stores them."""
    keys = [jax.random.fold_in(jax.random.key(number, impl="threefry2x32"), seed[0]) for number in range(2)]
    given = (jax.random.normal(key, (count, dim), jnp.float32) for key, dim in zip(keys, (DIM, INDEX_DIM), strict=True))
    return ops.store_entries(pools, 0, index, *given), ()


def write(ops: Any, pools: Any, index: StepIndex, given: dict[str, Any], *, newest: int, closed: int) -> Any:
    """Append, and flush what closes."""
    streams = (given[name] for name in ("kv", "score", "index_kv", "index_score"))
    pools = ops.append_flush(pools, 0, index, *streams, newest=newest, closed=closed, rope=ROPE)
    pools = ops.append_window(pools, 0, index, given["window"])
    return ops.append_kv(pools, 1, index, given["k"], given["v"]), ()


def gather(ops: Any, pools: Any, index: StepIndex, picks: Any, *, columns: int) -> Any:
    """Rows of the window, picked entries and the classic ring's rows, decoded."""
    window, entries = ops.gather_window(pools, 0, index), ops.gather_entries(pools, 0, index, picks)
    k, v, _ = ops.gather_kv(pools, 1, index, columns=columns)
    valid = (window.positions >= 0)[:, :, None]
    return jnp.where(valid, window.values, 0), jnp.where(entries.valid[:, :, None], entries.values, 0), k, v


def select(ops: Any, pools: Any, index: StepIndex, q: Any, weights: Any, *, columns: int, topk: int) -> Any:
    """The best index keys."""
    return ops.index_select(pools, 0, index, q, weights, topk, columns=columns)


def attend(ops: Any, pools: Any, index: StepIndex, q: Any, picks: Any) -> Any:
    """Window and picked entries."""
    return ops.attend(pools, 0, index, q, picks).out


def scores(ops: Any, pools: Any, index: StepIndex, q: Any, weights: Any, *, columns: int, over: Any) -> Any:
    """Of all shards' index keys."""
    found = ops.index_scores(pools, 0, index, q, weights, columns=columns)
    return lax.pmax(found, over) if over else found


def rows_of(ops: Any, pools: Any, index: StepIndex, *, columns: int, new: int) -> Any:
    """Canonical rows of the newest entries of every request, of each role that a flush computes."""
    return [ops.gather_rows(pools, 0, role, index, columns=columns).rows[:, -new:] for role in COMPUTED]


def index_of(requests: int, blocks: int, start: int, new: int, *, rows: bool) -> StepIndex:
    """Every request's tokens ``start`` to ``start + new``, in ``blocks`` blocks of its own.

    Without ``rows`` for verbs that look at lengths only.
    """
    found = [StepRequest(place, start, new, range(place * blocks, (place + 1) * blocks)) for place in range(requests)]
    index = build_index(found, max_blocks=blocks)
    return index if rows else index._replace(positions=index.positions[:0], request_index=index.request_index[:0])


def reader(sharded: Sharded, verb: Callable[..., Any], lies: Iterable[Any], outs: Any) -> Any:
    """A compiled function of pools, an index and inputs, which lie so, that leaves the pools as they are."""
    where = {"in_specs": (sharded.specs, sharded.spec("requests"), *lies), "out_specs": outs}
    return jax.jit(jax.shard_map(partial(verb, sharded.ops), mesh=sharded.mesh, check_vma=False, **where))


class OnMesh:
    """Pools of one kind of kernels on a mesh, and every program, compiled ahead."""

    def __init__(self, mesh: Any, kernels: str, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        longest = sizes["history"] + sizes["prefill"] + sizes["decode"]
        tokens = sizes["requests"] * -(-longest // (2 * BLOCK)) * 2 * BLOCK
        given = {"max_requests": sizes["requests"], "max_tokens": tokens, "layout": "packed"}
        self.sharded = Sharded(spec_of(sizes), mesh, RULES, kernels=kernels, **given)
        self.pools = self.sharded.allocate()
        self.shards = self.sharded.shards["requests"]
        self.local = sizes["requests"] // self.shards
        self.blocks = -(-longest // self.sharded.plan.block_tokens)
        self.entries, self.longest = longest // RATIO, longest
        self.programs: dict[str, Any] = {}

    def index(self, start: int, new: int, *, rows: bool = True) -> StepIndex:
        """Every request's tokens ``start`` to ``start + new``, in blocks of its own."""
        index = index_of(self.local, self.blocks, start, new, rows=rows)
        return self.sharded.index([index] * self.shards)

    def compile(self, inputs: "Inputs", workers: ThreadPoolExecutor) -> None:
        """Lower one after the other, since Triton compiles then, and let the rest run beside."""
        sizes, local, read = self.sizes, self.local, self.index(self.longest - 1, 1)
        axes = {name: lies for name, (_, lies) in STREAMS.items()}
        prefill = partial(write, newest=sizes["prefill"], closed=local * -(-sizes["prefill"] // RATIO))
        columns = {"columns": self.entries}
        over = self.sharded.rules.axes("blocks")
        filled = self.index(0, sizes["history"], rows=False)
        newest = {"columns": self.entries, "new": self.entries - sizes["history"] // RATIO}
        wanted = {
            "fill": (partial(fill, count=local * sizes["history"] // RATIO), (ROWS,), None, filled, (inputs.seeds,)),
            "prefill": (prefill, (axes,), None, self.index(0, sizes["prefill"]), (inputs.prefill,)),
            "decode": (partial(write, newest=1, closed=local), (axes,), None, read, (inputs.decode[0],)),
            "rows": (partial(rows_of, **newest), (), ROWS, self.index(self.longest, 0, rows=False), ()),
            "scores": (partial(scores, over=over, **columns), (ROWS, ROWS), ROWS, read, inputs.indexed),
            "select": (partial(select, topk=sizes["topk"], **columns), (ROWS, ROWS), ROWS, read, inputs.indexed),
            "gather": (
                partial(gather, columns=sizes["window"]),
                (ROWS,),
                (ROWS, ROWS, BATCH, BATCH),
                read,
                (inputs.picks,),
            ),
            "attend": (attend, (QUERIES, ROWS), QUERIES, read, (inputs.q, inputs.picks)),
        }
        lowered = {}
        for name, (verb, lies, outs, index, given) in wanted.items():
            if outs is None:
                program = self.sharded.step(verb, lies, (), mode="decode")
            else:
                program = self._reader(verb, lies, outs)
            lowered[name] = workers.submit(program.lower(self.pools, index, *given).compile)
        self.programs = {name: future.result() for name, future in lowered.items()}

    def _reader(self, verb: Callable[..., Any], axes: Any, outs: Any) -> Any:
        def lies(some: Any) -> Any:
            return jax.tree.map(lambda one: self.sharded.spec(*one, mode="decode"), some)

        return reader(self.sharded, verb, lies(axes), lies(outs))

    def write(self, name: str, index: StepIndex, given: Any) -> Any:
        """Run a program that writes; the pools that it leaves."""
        self.pools, _ = self.programs[name](self.pools, index, given)
        return self.pools

    def places(self) -> list[int]:
        """Where every shard of every pool lies."""
        return [part.data.unsafe_buffer_pointer() for pool in self.pools.values() for part in pool.addressable_shards]


class Inputs:
    """The same rows and queries for both; of many requests and in fp32, but queries, which are bf16."""

    def __init__(self, sharded: Sharded, sizes: dict[str, int]) -> None:
        rng, requests = np.random.default_rng(0), sizes["requests"]

        def put(axes: Axes, *shape: int) -> jax.Array:
            return sharded.put(rng.standard_normal(shape, np.float32), *axes, mode="decode")

        def streams(new: int) -> dict[str, jax.Array]:
            heads = sizes["kv_heads"], sizes["kv_dim"]
            return {
                name: put(lies, requests * new, *((width,) if width else heads))
                for name, (width, lies) in STREAMS.items()
            }

        self.seeds = sharded.put(np.arange(sharded.shards["requests"], dtype=np.int32), "requests")
        self.prefill = streams(sizes["prefill"])
        self.decode = [streams(1) for _ in range(sizes["decode"])]
        self.q = put(QUERIES, requests, sizes["heads"], DIM).astype(jnp.bfloat16)
        self.indexed = (
            put(ROWS, requests, sizes["index_heads"], INDEX_DIM).astype(jnp.bfloat16),
            put(ROWS, requests, sizes["index_heads"]),
        )
        self.picks = sharded.put(np.zeros((requests, sizes["topk"]), np.int32), "requests")


class Found:
    """What is recorded of a mesh.

    Attributes:
        record: as JSON.
        faults: what differs more than it may, in words.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"differing_bytes": {}, "largest_difference": {}}
        self.faults: list[str] = []

    def bytes_of(self, what: str, one: OnMesh, other: OnMesh, *, computed: bool) -> None:
        """Bytes that differ, of every pool; none may, but of entries that were ``computed``."""
        found = {name: int(unequal(pool, other.pools[name])) for name, pool in one.pools.items()}
        self.record["differing_bytes"][what] = found
        for name, count in found.items():
            if count and not (computed and name.split(".")[1] in COMPUTED):
                self.faults.append(f"{what}: {count} bytes of {name}")

    def agree(self, want: outputs.Output, got: Any) -> None:
        """A result beside the wanted one, by the tolerance table."""
        found = compare_output(want, want._replace(array=np.asarray(got)))
        self.record["largest_difference"][want.name] = found.max_abs
        if found.mismatches:
            self.faults.append(f"{want.name}: {found.mismatches} values, {found.first_mismatch}")


@jax.jit
def unequal(one: Any, other: Any) -> Any:
    """How many elements differ."""
    return jnp.sum(one != other, dtype=jnp.int32)


def timed(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median µs of each, by turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for place, call in enumerate(calls):
            started = time.perf_counter()
            jax.block_until_ready(call())
            times[place].append(1e6 * (time.perf_counter() - started))
    return [round(median(some), 1) for some in times]


def measured(axis: str, kernels: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Fill, prefill and decode on a mesh cut over one logical axis; what differs, and times of a decode step."""
    mesh = jax.make_mesh((2,), (MESHES[axis],), devices=jax.devices()[:2])
    ours, plain = (OnMesh(mesh, name, sizes) for name in (kernels, "portable"))
    inputs, found, start = Inputs(plain.sharded, sizes), Found(), sizes["history"]
    with ThreadPoolExecutor() as workers:
        for one in (ours, plain):
            one.compile(inputs, workers)

    steps = [("fill", plain.index(0, start, rows=False), inputs.seeds)]
    for what, new, given in (("prefill", sizes["prefill"], [inputs.prefill]), ("decode", 1, inputs.decode)):
        for one in given:
            steps.append((what, plain.index(start, new), one))
            start += new
    places = ours.places()
    for what, *step in steps:
        for one in (ours, plain):
            one.write(what, *step)
        found.bytes_of(what, ours, plain, computed=what != "fill")

    whole = plain.index(start, 0, rows=False)
    rows = [one.programs["rows"](one.pools, whole) for one in (ours, plain)]
    for (role, operation), got, want in zip(COMPUTED.items(), *rows, strict=True):
        (region,) = plain.sharded.plan.region(0, role)
        axes = ("request", "row", "byte")
        found.agree(outputs.computed_rows(role, np.asarray(want), region.format, operation, axes=axes), got)

    def both(name: str, index: StepIndex, *given: Any) -> list[Callable[[], Any]]:
        # Pools are looked up by each call: those that were donated are gone.
        return [lambda one=one: one.programs[name](plain.pools, index, *given) for one in (ours, plain)]

    index = plain.index(start - 1, 1)
    scored, chosen = both("scores", index, *inputs.indexed), both("select", index, *inputs.indexed)
    picks = chosen[1]()
    gathered, attended = both("gather", index, picks), both("attend", index, inputs.q, picks)
    got, want = (np.asarray(call()) for call in scored)
    found.agree(outputs.close("scores", want, "scores", "token", "entry", precision="fp32"), got)
    found.agree(outputs.selection("select", np.asarray(picks), want), chosen[0]())
    for what, got, want in zip(("window", "entries", "keys", "values"), gathered[0](), gathered[1](), strict=True):
        found.agree(outputs.exact(f"gather: {what}", np.asarray(want), *map(str, range(want.ndim))), got)
    got, want = (np.asarray(call().astype(jnp.float32)) for call in attended)
    found.agree(outputs.close("attend", want, "attention", "token", "head", "channel", precision="bf16"), got)

    again = [partial(one.write, "decode", index, inputs.decode[-1]) for one in (ours, plain)]
    calls = {"append and flush": again, "gather": gathered, "select": chosen, "attend": attended}
    names = kernels, "portable" if kernels != "portable" else "portable again"
    us = {what: dict(zip(names, timed(some, sizes["repeats"]), strict=True)) for what, some in calls.items()}
    if places != ours.places():
        found.faults.append("pools have moved")
    return {"kernels": ours.sharded.ops.how, **found.record, "us": us, "faults": found.faults}
