"""Prefill and decode with activations in different places, on 2 × 2 × 2 forced devices, against the reference.

python mesh_modes.py auto|explicit

In a prefill tokens are cut over the context and the model axis; in a decode step query heads are, over the model axis.
One function is given for both, and the shapes of a step choose. Pools must not move between the two.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import numpy as np
from jax.sharding import AxisType

from kvcore.interop.jax.sharding import RULES, Axes, Sharded
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Tail, Window
from kvcore.step import StepRequest, build_index
from tests.support import scene

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SPEC = CacheSpec(
    layers=(
        LayerSpec(
            window=Window(dim=64, window=6, format="bf16"),
            tail=Tail(dim=64, ratio=4, overlap=True),
            entries=Entries(dim=64, ratio=4, format="fp32"),
        ),
        LayerSpec(kv=KV(key_heads=4, key_dim=16, value_heads=2, value_dim=32, key_format="int8_row")),
        LayerSpec(kv=KV(key_heads=3, key_dim=16)),  # does not divide: on every shard of the model axis
    ),
    block_tokens=8,
)
MODES = {"prefill": {"query_length": ("context", "model"), "query_heads": None}}
REPLICAS, REQUESTS, LONGEST = 2, 4, 64
DECODE, PREFILL = 2, 36
"""Tokens that a shard's steps are padded to: one a request, or what four shards of the query length divide."""

SINK = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
STEPS = ((21, 9, 14, 0), (1, 1, 1, 1), (1, 0, 1, 1), (2, 30, 1, 5), (1, 1, 0, 1))
"""New tokens of every request; requests 0 and 2 are on the first shard."""

TOKENS = ("requests", "query_length")
INPUTS = {
    # name -> (shape of a token's row, where it comes from by mode, what the verbs want of it)
    "window": ((64,), (TOKENS,), Axes("requests")),
    "tail": ((128,), (TOKENS,), Axes("requests")),
    "score": ((128,), (TOKENS,), Axes("requests")),
    "q0": ((4, 64), (TOKENS, "query_heads"), Axes(TOKENS, "query_heads")),
    "k1": ((4, 16), ("requests", "heads"), Axes("requests", "heads")),
    "v1": ((2, 32), ("requests", "heads"), Axes("requests", "heads")),
    "q1": ((4, 16), ("requests", "heads"), Axes("requests", "heads")),
    "k2": ((3, 16), (TOKENS,), Axes("requests")),
    "v2": ((3, 16), (TOKENS,), Axes("requests")),
    "q2": ((3, 16), (TOKENS,), Axes(TOKENS)),
}
OUTS = {
    "out0": Axes(TOKENS, "query_heads"),
    "out1": Axes("requests", "heads"),
    "out2": Axes(TOKENS),
}
LIES = {
    "prefill": {"out0": (("data", "context", "model"),), "out1": ("data", "model")},
    "decode": {"out0": ("data", "model"), "out1": ("data", "model")},
}
"""Mode -> axes of the mesh that an out's dimensions are cut over."""


def step(ops, pools, index, queries, sink, given):
    """What one shard does: whole rows are stored, and its own queries answered."""
    closed = len(index.positions)
    pools = ops.append_flush(pools, 0, index, given["tail"], given["score"], closed=closed)
    out0 = ops.attend(pools, 0, queries, given["q0"], rows=given["window"], sink=sink).out
    pools = ops.append_window(pools, 0, index, given["window"])
    for layer in (1, 2):
        pools = ops.append_kv(pools, layer, index, given[f"k{layer}"], given[f"v{layer}"])
    out1 = ops.attend_kv(pools, 1, index, given["q1"], columns=LONGEST).out
    out2 = ops.attend_kv(pools, 2, queries, given["q2"], columns=LONGEST).out
    return pools, {"out0": out0, "out1": out1, "out2": out2}


def tokens_of(number: int, request: int) -> dict[str, np.ndarray]:
    """A request's inputs of a step."""
    rng = np.random.default_rng((number, request))
    return {
        name: rng.standard_normal((STEPS[number][request], *shape), np.float32) for name, (shape, *_) in INPUTS.items()
    }


def expected() -> list[list[dict[str, np.ndarray]]]:
    """Every step's outs of every request, in a reference cache."""
    cache = scene.create(SPEC, "reference", check=True, max_requests=REQUESTS, max_tokens=REQUESTS * LONGEST)
    requests, found = [cache.admit() for _ in range(REQUESTS)], []
    for number, counts in enumerate(STEPS):
        found.append([])
        for request, count in enumerate(counts):
            given = tokens_of(number, request)
            with cache.step({requests[request]: count}) as one:
                first, second, third = (one.layer(layer) for layer in range(3))
                first.append_window(given["window"])
                first.append_tail(given["tail"], given["score"])
                first.flush()
                outs = {"out0": first.attend(given["q0"], sink=SINK).out}
                for layer, handle in ((1, second), (2, third)):
                    handle.append_kv(given[f"k{layer}"], given[f"v{layer}"])
                    outs[f"out{layer}"] = handle.attend(given[f"q{layer}"]).out
            found[-1].append({name: np.asarray(array) for name, array in outs.items()})
    return found


def arrays_of(sharded: Sharded, number: int, lengths: list[int]):
    """(index, inputs) of a step, every input where the step's mode says that it comes from."""
    counts = STEPS[number]
    shards = [range(shard, REQUESTS, REPLICAS) for shard in range(REPLICAS)]
    tokens = DECODE if max(counts) == 1 else PREFILL
    size = -(-LONGEST // sharded.plan.block_tokens)
    indices, inputs = [], {name: [] for name in INPUTS}
    for some in shards:
        rows = [
            StepRequest(place, lengths[request], counts[request], range(place * size, (place + 1) * size))
            for place, request in enumerate(some)
        ]
        indices.append(build_index(rows, max_blocks=size, pad_tokens=tokens, pad_requests=len(some)))
        for name, (shape, *_) in INPUTS.items():
            mine = np.concatenate([tokens_of(number, request)[name] for request in some])
            inputs[name].append(np.concatenate([mine, np.full((tokens - len(mine), *shape), np.nan, np.float32)]))
    index = sharded.index(indices)
    mode = sharded.mode_of(index)
    put = {name: sharded.put(np.concatenate(parts), *INPUTS[name][1], mode=mode) for name, parts in inputs.items()}
    return mode, index, put


def main() -> None:
    """Tell the story with modes, and without them; compare outs, places and bytes."""
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[sys.argv[1]]
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "model"), axis_types=(kind,) * 3)
    sizes = {"max_requests": REQUESTS, "max_tokens": REQUESTS * LONGEST, "layout": "planar"}
    sharded = Sharded(SPEC, mesh, RULES, modes=MODES, **sizes)
    plain = Sharded(SPEC, mesh, RULES, **sizes)
    assert [sharded.splits_heads(layer) for layer in range(3)] == [False, True, False]
    inputs = sharded.queries, Axes("query_heads"), {name: wanted for name, (*_, wanted) in INPUTS.items()}
    run = sharded.step(step, inputs, OUTS)
    as_decode = plain.step(step, inputs, OUTS, mode="decode")
    pools, others, lengths, places = sharded.allocate(), plain.allocate(), [0] * REQUESTS, None
    for number, wanted in enumerate(expected()):
        mode, index, given = arrays_of(sharded, number, lengths)
        sink = sharded.put(SINK)
        pools, outs = run(pools, index, index, sink, given)
        for name, axes in LIES[mode].items():
            assert outs[name].sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(*axes)), outs[name].ndim), name
        for name, pool in pools.items():
            assert pool.sharding.is_equivalent_to(jax.NamedSharding(mesh, plain.specs[name]), pool.ndim), name
        found = [part.data.unsafe_buffer_pointer() for pool in pools.values() for part in pool.addressable_shards]
        assert places in (None, found), "pools have moved"
        places = found
        # The rules of no mode in particular: whole tokens on every shard, the same bytes.
        others, _ = as_decode(others, index, index, sink, given)
        assert all(pools[name].tobytes() == others[name].tobytes() for name in pools), number
        rows, compared = len(index.positions) // REPLICAS, 0
        for shard in range(REPLICAS):
            first = shard * rows
            for request in range(shard, REQUESTS, REPLICAS):
                count = STEPS[number][request]
                for name, array in outs.items():
                    got = np.asarray(array)[first : first + count]
                    np.testing.assert_allclose(got, wanted[request][name], rtol=1e-5, atol=1e-5, err_msg=name)
                    compared += 1
                first += count
        lengths = [length + count for length, count in zip(lengths, STEPS[number], strict=True)]
        print(f"{mode}: {compared} answers", flush=True)


if __name__ == "__main__":
    main()
