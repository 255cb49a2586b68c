"""One rule table, many meshes: a story of four requests on forced host devices; prints what differs.

python mesh_plans.py auto|explicit PLAN[,PLAN] STEPS [PROCESS PROCESSES PORT]

A plan is shards over requests × blocks × heads, as in 2x4x1. Answers are compared with the reference's. Digests are
compared with those of one device, since compressed entries are computed, and their last bits are each backend's own.
"""

import os
import sys
from math import prod

KIND, PLANS, STEPS = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
PROCESS, PROCESSES, PORT = (int(word) for word in sys.argv[4:]) if len(sys.argv) > 4 else (0, 1, 0)
os.environ["JAX_PLATFORMS"] = "cpu"
DEVICES = f"--xla_force_host_platform_device_count={8 // PROCESSES} "
os.environ["XLA_FLAGS"] = DEVICES + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from kvcore.interop.jax.sharding import Sharded  # noqa: E402
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window  # noqa: E402
from kvcore.step import StepRequest, build_index  # noqa: E402
from tests.support import scene  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

BLOCK, REQUESTS, DRAFTS, TOPK = 8, 4, 2, 5
SPEC = CacheSpec(
    layers=(
        LayerSpec(
            window=Window(dim=64, window=6, format="bf16"),
            tail=Tail(dim=64, ratio=4, overlap=True),
            entries=Entries(dim=64, ratio=4, format="fp32"),
            index_tail=Tail(dim=128, ratio=4, overlap=True),
            index_keys=IndexKeys(dim=128, ratio=4, heads=2, topk=TOPK, format="index_fp8_132"),
        ),
        LayerSpec(kv=KV(key_heads=4, key_dim=16, value_heads=2, value_dim=32, key_format="int8_row")),
        LayerSpec(kv=KV(key_heads=3, key_dim=16)),  # does not divide: on every shard of the model axis
        LayerSpec(kv=KV(key_heads=2, key_dim=16, storage="ring", window=5)),
    ),
    block_tokens=BLOCK,
)
ROPE = Rope(dim=16, theta=10000.0)
SINK = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
LENGTHS = (61, 9, 30, 0)
"""Tokens of every request after the first step; then all go on by one or two."""

LONGEST = 128
INPUTS = {
    # name and layer -> shape of a token's row
    "window": (64,),
    "tail": (128,),
    "score": (128,),
    "index": (256,),
    "index_score": (256,),
    "q0": (4, 64),
    "iq": (2, 128),
    "weights": (2,),
    "k1": (4, 16),
    "v1": (2, 32),
    "q1": (4, 16),
    "k2": (3, 16),
    "v2": (3, 16),
    "q2": (3, 16),
    "k3": (2, 16),
    "v3": (2, 16),
    "q3": (4, 16),
}
OUTS = ("picks", "out0", "out1", "out2", "out3")


def counts_of(number: int) -> list[int]:
    """New tokens of every request in a step."""
    return list(LENGTHS) if number == 0 else [(number + request) % 3 for request in range(REQUESTS)]


def tokens_of(number: int, request: int) -> dict[str, np.ndarray]:
    """A request's inputs of a step, the same on every mesh."""
    rng = np.random.default_rng((number, request))
    count = counts_of(number)[request]
    return {name: rng.standard_normal((count, *shape), np.float32) for name, shape in INPUTS.items()}


def step(ops, pools, index, given):
    """What one shard does with its tokens: every layer reads what is older, and its own new rows, then stores them."""
    closed = len(index.positions)
    streams = given["tail"], given["score"], given["index"], given["index_score"]
    pools = ops.append_flush(pools, 0, index, *streams, closed=closed, rope=ROPE)
    columns = LONGEST // 4
    picks = ops.index_select(pools, 0, index, given["iq"], given["weights"], TOPK, columns=columns)
    out0 = ops.attend(pools, 0, index, given["q0"], picks, rows=given["window"], sink=SINK).out
    pools = ops.append_window(pools, 0, index, given["window"])
    outs = {"picks": picks, "out0": out0}
    for layer in (1, 2):
        pools = ops.append_kv(pools, layer, index, given[f"k{layer}"], given[f"v{layer}"])
        outs[f"out{layer}"] = ops.attend_kv(pools, layer, index, given[f"q{layer}"], columns=LONGEST).out
    ring = given["k3"], given["v3"]
    outs["out3"] = ops.attend_kv(pools, 3, index, given["q3"], *ring, columns=5 + closed).out
    return ops.append_kv(pools, 3, index, *ring), outs


class OnMesh:
    """The story on one mesh."""

    def __init__(self, plan: str) -> None:
        self.shape = tuple(map(int, plan.split("x")))
        kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[KIND]
        devices = np.array(jax.devices()[: prod(self.shape)]).reshape(self.shape)
        mesh = Mesh(devices, ("data", "context", "model"), axis_types=(kind,) * 3)
        self.replicas, context, _ = self.shape
        sizes = {"max_tokens": REQUESTS * LONGEST, "max_requests": REQUESTS, "max_draft_tokens": DRAFTS}
        self.sharded = Sharded(SPEC, mesh, layout="planar", **sizes)
        assert self.sharded.shards == {"requests": self.replicas, "blocks": context, "heads": self.shape[2]}
        cut = {name: ("requests", *["heads"] * self.cuts(name)) for name in INPUTS}
        outs = {name: self.sharded.spec("requests", *["heads"] * self.cuts(name)) for name in OUTS}
        self.cut = cut
        self.run = self.sharded.step(step, ({name: self.sharded.spec(*axes) for name, axes in cut.items()},), outs)
        self.pools = self.sharded.allocate()
        self.lengths = [0] * REQUESTS
        self.index = None

    def cuts(self, name: str) -> bool:
        """Whether an input's or out's heads are cut: those of layers all of whose heads divide."""
        kv = SPEC.layers[int(name[-1])].kv if name[-1].isdecimal() else None
        return kv is not None and not any(part.heads % self.shape[2] for part in kv.parts)

    def tell(self, number: int) -> list[dict[str, np.ndarray]]:
        """One step; every request's outs."""
        counts = counts_of(number)
        shards = [range(shard, REQUESTS, self.replicas) for shard in range(self.replicas)]
        tokens = max(sum(counts[request] for request in some) for some in shards) + 1
        size = -(-LONGEST // self.sharded.plan.block_tokens)
        indices, inputs = [], {name: [] for name in INPUTS}
        for some in shards:
            rows = [
                StepRequest(place, self.lengths[request], counts[request], range(place * size, (place + 1) * size))
                for place, request in enumerate(some)
            ]
            indices.append(build_index(rows, max_blocks=size, pad_tokens=tokens, pad_requests=len(some)))
            for name, shape in INPUTS.items():
                mine = np.concatenate([tokens_of(number, request)[name] for request in some])
                padding = np.full((tokens - len(mine), *shape), np.nan, np.float32)
                inputs[name].append(np.concatenate([mine, padding]))
        self.index = self.sharded.index(indices)
        given = {name: self.sharded.put(np.concatenate(parts), *self.cut[name]) for name, parts in inputs.items()}
        self.pools, outs = self.run(self.pools, self.index, given)
        whole = {name: everywhere(self.sharded, array) for name, array in outs.items()}
        found: list[dict[str, np.ndarray]] = [{} for _ in range(REQUESTS)]
        for shard, some in enumerate(shards):
            first = shard * tokens
            for request in some:
                found[request] = {name: array[first : first + counts[request]] for name, array in whole.items()}
                first += counts[request]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return found

    def digests(self) -> list[int]:
        """Of every request."""
        found = self.sharded.digests(self.pools, self.index)
        order = [request for shard in range(self.replicas) for request in range(shard, REQUESTS, self.replicas)]
        return [found[order.index(request)] for request in range(REQUESTS)]


def everywhere(sharded: Sharded, array: jax.Array) -> np.ndarray:
    """The whole of an array that is spread over processes."""
    return np.asarray(jax.jit(lambda given: given, out_shardings=jax.NamedSharding(sharded.mesh, jax.P()))(array))


class OnReference:
    """The story in a reference cache, request by request."""

    def __init__(self) -> None:
        sizes = {"max_requests": REQUESTS, "max_tokens": REQUESTS * LONGEST, "max_draft_tokens": DRAFTS}
        self.cache = scene.create(SPEC, "reference", check=True, **sizes)
        self.requests = [self.cache.admit() for _ in range(REQUESTS)]

    def tell(self, number: int) -> list[dict[str, np.ndarray]]:
        """One step; every request's outs."""
        found = []
        for request, count in enumerate(counts_of(number)):
            given = tokens_of(number, request)
            with self.cache.step({self.requests[request]: count}) as one:
                first, *classic = (one.layer(layer) for layer in range(4))
                first.append_window(given["window"])
                first.append_tail(given["tail"], given["score"])
                first.append_index_tail(given["index"], given["index_score"])
                first.flush(rope=ROPE)
                picks = first.select(first.index_scores(given["iq"], given["weights"]), TOPK)
                outs = {"picks": picks, "out0": first.attend(given["q0"], picks, sink=SINK).out}
                for layer, handle in enumerate(classic, 1):
                    handle.append_kv(given[f"k{layer}"], given[f"v{layer}"])
                    outs[f"out{layer}"] = handle.attend(given[f"q{layer}"]).out
            found.append({name: np.asarray(array) for name, array in outs.items()})
        return found


def main() -> None:
    """Tell the story everywhere, and compare after every step."""
    if PROCESSES > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{PORT}", PROCESSES, PROCESS)
    assert len(jax.devices()) == 8
    digests: list[list[int]] = []
    for plan in ["1x1x1"] * (PROCESSES == 1) + PLANS:
        reference, mesh, compared = OnReference(), OnMesh(plan), 0
        for number in range(STEPS):
            wanted, got = reference.tell(number), mesh.tell(number)
            for request in range(REQUESTS):
                for name, array in wanted[request].items():
                    same = np.array_equal if name == "picks" else lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-5)
                    compared += 1
                    if not same(got[request][name], array):
                        print(f"{plan}: step {number}, request {request}: {name} differs")
            if len(digests) == number:
                digests.append(mesh.digests())
            if digests[number] != mesh.digests():
                print(f"{plan}: step {number}: digests differ")
        print(f"{plan}: {compared} answers compared", flush=True)
    print("digests", *(f"{one:016x}" for one in digests[-1]), flush=True)


if __name__ == "__main__":
    main()
