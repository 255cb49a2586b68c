"""Steps of a cache over a mesh of 4 × 2 devices against a reference cache for every shard; run in its own process.

python sharded_steps.py auto|explicit [PROCESS PROCESSES PORT]
"""

import os
import sys

KIND, (PROCESS, PROCESSES, PORT) = sys.argv[1], (map(int, sys.argv[2:]) if len(sys.argv) > 2 else (0, 1, 0))
os.environ["JAX_PLATFORMS"] = "cpu"
DEVICES = f"--xla_force_host_platform_device_count={8 // PROCESSES} "
os.environ["XLA_FLAGS"] = DEVICES + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

import kvcore  # noqa: E402
from kvcore.interop.jax.sharding import Sharded  # noqa: E402
from kvcore.spec import KV, CacheSpec, LayerSpec, Tail, Window  # noqa: E402

DATA, MODEL = 4, 2
SPEC = CacheSpec(
    layers=(
        LayerSpec(window=Window(dim=512, window=4), tail=Tail(dim=512, ratio=4, overlap=True)),
        LayerSpec(kv=KV(key_heads=4, key_dim=16, value_heads=2, value_dim=32, key_format="int8_row")),
        LayerSpec(kv=KV(key_heads=3, key_dim=16)),  # does not divide: on every shard of the model axis
    ),
    block_tokens=8,
)
SIZES = {"max_tokens": 32 * DATA, "max_requests": 2 * DATA, "layout": "planar"}
TOKENS, REQUESTS = 6, 2


def step(ops, pools, index, rows, tail, k, v, k3, v3, q):
    """What one shard does."""
    pools = ops.append_window(pools, 0, index, rows)
    pools = ops.append_tail(pools, 0, index, tail, tail)
    pools = ops.append_kv(pools, 1, index, k, v)
    pools = ops.append_kv(pools, 2, index, k3, v3)
    return pools, ops.attend_kv(pools, 1, index, q, columns=16).out


def main() -> None:
    """Run three steps; every shard's bytes and outs must be its reference's."""
    if PROCESSES > 1:
        jax.distributed.initialize(f"localhost:{PORT}", PROCESSES, PROCESS)
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[KIND]
    mesh = jax.make_mesh((DATA, MODEL), ("data", "model"), axis_types=(kind, kind))
    sharded = Sharded(SPEC, mesh, **SIZES)
    rows, heads = sharded.spec("requests"), sharded.spec("requests", "heads")
    run = sharded.step(step, (rows, rows, heads, heads, rows, rows, heads), heads)
    pools = sharded.allocate()
    assert len(jax.devices()) == 8
    assert pools["1.kv.key_codes"].sharding.is_equivalent_to(jax.NamedSharding(mesh, heads), 2)

    # A reference for every shard: one request shard's tokens, one model shard's heads.
    local = {"max_tokens": 32, "max_requests": 2, "layout": "planar", "backend": "reference"}
    caches = {(d, m): kvcore.create_cache(sharded.plan.spec, **local) for d in range(DATA) for m in range(MODEL)}
    requests = {at: [cache.admit() for _ in range(REQUESTS)] for at, cache in caches.items()}
    rng = np.random.default_rng(0)
    places = None
    for counts in ((4, 1), (1, 0), (2, 4)):
        given = [
            rng.standard_normal((DATA * TOKENS, *shape)).astype(np.float32)
            for shape in ((512,), (1024,), (4, 16), (2, 32), (3, 16), (3, 16), (4, 16))
        ]
        steps = {
            at: cache.step(dict(zip(requests[at], counts, strict=True)), pad_tokens=TOKENS, pad_requests=REQUESTS)
            for at, cache in caches.items()
        }
        index = sharded.index([steps[d, 0].index for d in range(DATA)])
        axes = ((), (), ("heads",), ("heads",), (), (), ("heads",))
        inputs = [sharded.put(array, "requests", *more) for array, more in zip(given, axes, strict=True)]
        before = pools
        pools, out = run(pools, index, *inputs)
        assert all(array.is_deleted() for array in before.values())
        wanted = {}
        for (d, m), one in steps.items():
            mine = [array[d * TOKENS : (d + 1) * TOKENS] for array in given]
            for number in (2, 3, 6):
                size = mine[number].shape[1] // MODEL
                mine[number] = mine[number][:, m * size : (m + 1) * size]
            one.layer(0).append_window(mine[0])
            one.layer(0).append_tail(mine[1], mine[1])
            one.layer(1).append_kv(mine[2], mine[3])
            one.layer(2).append_kv(mine[4], mine[5])
            wanted[d, m] = one.layer(1).attend(mine[6]).out
            one.commit()
        devices = {device: at for at, device in np.ndenumerate(mesh.devices)}
        for shard in out.addressable_shards:
            np.testing.assert_allclose(shard.data, wanted[devices[shard.device]], rtol=1e-5, atol=1e-5)
        for name, pool in pools.items():
            for shard in pool.addressable_shards:
                held = kvcore.to_numpy(caches[devices[shard.device]].pools[name])
                assert np.asarray(shard.data).tobytes() == held.tobytes(), (name, devices[shard.device], counts)
        found = [s.data.unsafe_buffer_pointer() for pool in pools.values() for s in pool.addressable_shards]
        assert places in (None, found), "pools have moved"
        places = found
    print(f"{len(found)} shards of pools agree", flush=True)


if __name__ == "__main__":
    main()
