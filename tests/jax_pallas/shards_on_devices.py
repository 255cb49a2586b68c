"""A program for eight forced host devices: caches over a mesh against the reference; prints what differs."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import numpy as np
from jax.sharding import AxisType

import kvcore
from kvcore.errors import SpecError
from kvcore.sharding import jax as jax_shards
from kvcore.spec import Rope
from tests.support import stories

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
SIZES = {"max_requests": 3, "max_tokens": 512, "max_draft_tokens": 2}
STEPS = ((19, 3), (44, 0), (1, 1))


def mesh_of(shards: int, *names: str) -> jax.sharding.Mesh:
    """The first devices."""
    shape = (shards,) if len(names) == 1 else (1, shards)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:shards])


def told(cache: kvcore.Cache) -> dict[str, np.ndarray]:
    """Two requests over a few steps; everything readable in the last one, then a fork, a rollback and a move."""
    requests, found = [cache.admit(), cache.admit()], {}
    for number, counts in enumerate(STEPS):
        starts = [sum(step[place] for step in STEPS[:number]) for place in range(2)]
        new = {
            request: list(range(start, start + count))
            for request, start, count in zip(requests, starts, counts, strict=True)
        }
        tokens = [token for ids in new.values() for token in ids]
        with cache.step(new) as step:
            stories.feed(step, tokens)
            if number == len(STEPS) - 1:
                found |= read(step, tokens)
    found["digest"] = np.array(cache.digest(), np.uint64)
    beam = cache.fork(requests[0])
    cache.truncate(requests[0], 62)
    blob = cache.export_request(requests[0])
    found["blob"] = np.frombuffer(blob, np.uint8)
    cache.release(requests[0])
    moved = cache.import_request(blob)
    stories.tell(cache, {moved: [7], beam: [8]})
    found["digest after a fork and a move"] = np.array(cache.digest([beam, moved]), np.uint64)
    return found


def read(step: object, tokens: list[int]) -> dict[str, np.ndarray]:
    """Every reader of every layer."""
    positions, found = kvcore.to_numpy(step.positions), {}
    for number, layer in enumerate(step.cache.spec.layers):
        handle = step.layer(number)
        for role, _ in layer.components():
            found[f"{number} {role}"] = handle.gather_rows(role)
        kind = layer.kv or layer.window or layer.entries
        q = stories.rows(f"q{number}", tokens, positions, 2, kind.key_dim if layer.kv else kind.dim)
        picks = None
        if layer.index_keys is not None:
            iq = stories.rows("iq", tokens, positions, 2, layer.index_keys.dim)
            weights = stories.rows("iw", tokens, positions, 2)
            picks = handle.select(handle.index_scores(iq, weights), 6)
            found[f"{number} picks"] = (picks,)
            inputs = map(step.cache.asarray, (iq, weights))
            found[f"{number} at once"] = (
                step.cache.ops.index_select(step.cache.pools, number, step.index, *inputs, 6),
            )
            found[f"{number} picked"] = handle.gather_entries(picks)
            found[f"{number} all"] = handle.gather_all_entries()
        if layer.kv is not None:
            found[f"{number} kv"] = handle.gather_kv()
        # Latent layers' outputs are turned back after the shards' parts were merged.
        rope = None if layer.kv else Rope(dim=64, theta=100.0)
        found[f"{number} attention"] = handle.attend(q, picks, sink=np.array([0.5, -1], np.float32), rope=rope)
    return {f"{key} {part}": kvcore.to_numpy(array) for key, parts in found.items() for part, array in enumerate(parts)}


def main() -> None:
    """Compare two, four and eight shards with the reference."""
    spec = stories.STORED
    one = told(kvcore.create_cache(spec, backend="reference", **SIZES))
    for shards in map(int, sys.argv[1:]):
        cache = jax_shards.create_cache(spec, mesh=mesh_of(shards, "context"), **SIZES)
        for name, parts in (("1.entries.page", shards), ("0.window.page", 1)):
            held = [len(part.data) for part in cache.pools[name].addressable_shards]
            print(f"{shards} shards: {name}: {held == [len(cache.pools[name]) // parts] * shards}")
        found = told(cache)
        for key, expected in one.items():
            got = found[key]
            if "attention" in key:
                same = np.allclose(got, expected, rtol=1e-5, atol=1e-5)
            else:
                same = got.tobytes() == expected.tobytes()
            if not same:
                print(f"{shards} shards: {key} differs")
        print(f"{shards} shards: {len(one)} answers compared")
    try:
        jax_shards.create_cache(spec, mesh=mesh_of(2, "data", "context"), **SIZES)
    except SpecError as error:
        print(f"refused: {error.where}")


if __name__ == "__main__":
    main()
