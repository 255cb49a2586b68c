"""Steps of layer views over four devices, compiled: what is moved, and what goes over the mesh.

python mesh_in_place.py cpu|v6e
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get("XLA_FLAGS", "")

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcore.interop.jax import absent_mesh, inspect_in_place
from kvcore.interop.jax.stack import init_stack
from kvcore.interop.jax.views import view_shapes
from kvcore.spec import KV, CacheSpec, LayerSpec, presets

BATCH, LENGTH, NEW, HEADS, DIM = 8, 2048, 1, 4, 128
HCA = presets.deepseek_v4_flash_tiny(draft=False).layers[2]


def classic(**fields: Any) -> LayerSpec:
    return LayerSpec(kv=KV(key_heads=HEADS, key_dim=DIM, **fields))


KINDS = {
    "full": classic(),
    "sliding": classic(storage="ring", window=256),
    "compressed": HCA,
}
STACKED = CacheSpec(layers=[KINDS["full"]] * 3)
ON_A_TPU = ("full",)


def rows(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((BATCH, NEW, *shape), jnp.float32)


def attend(view: Any, q: Any, k: Any, v: Any) -> Any:
    return view.attend(q, k, v)[::-1]


def step_of(kind: str) -> tuple[Any, ...]:
    """A step, which returns the view first, and its inputs."""
    if kind == "compressed":
        return compressed, rows(HEADS, 512), rows(512), rows(HCA.tail.width)
    return attend, rows(2 * HEADS, DIM), rows(HEADS, DIM), rows(HEADS, DIM)


def compressed(view: Any, q: Any, rows: Any, tail: Any) -> Any:
    return view.attend_compressed(q, rows, tail=(tail, tail), rope=jnp.ones(32))[::-1]


def scanned(stack: Any, q: Any, k: Any, v: Any) -> Any:
    """A scan over the layers of a stack."""

    def layer(carry: Any, number: Any) -> Any:
        stack, q = carry
        out, _, view = stack.layer(number).attend(q, k, v)
        return (stack.with_layer(number, view), out), None

    return jax.lax.scan(layer, (stack, q), jnp.arange(3))[0]


def together(*stacks: Any) -> int:
    """Two steps of stacks that are alike; how many arrays they leave, pools apart, that are equal to rounding."""
    rng, run = np.random.default_rng(0), jax.jit(scanned, donate_argnums=0)
    found: list[Any] = []
    q, k, v = (jnp.asarray(rng.standard_normal(each.shape, np.float32)) for each in step_of("full")[1:])
    for stack in stacks:
        for _ in range(2):
            stack, out = run(stack, q, k, v)
        found.append((out, stack.numbers))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)
    return len(jax.tree.leaves(found[0]))


def spread(mesh: Any) -> Callable[..., Any]:
    """A step that brings a whole pool to every device: what is looked for must be found."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(view: Any) -> Any:
        whole = {name: jax.lax.with_sharding_constraint(pool, everywhere) for name, pool in view.pools.items()}
        return view, [jnp.sort(pool.reshape(-1))[:2] for pool in whole.values()]

    return step


def main(where: str) -> None:
    """Compile, and say what was found."""
    tpu = where != "cpu"
    mesh = (
        absent_mesh(where, data=2, model=2) if tpu else Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    )

    def view(kind: str) -> Any:
        return view_shapes(CacheSpec(layers=[KINDS[kind]]), batch=BATCH, max_length=LENGTH, mesh=mesh)[0]

    found = {}
    for kind in ON_A_TPU if tpu else KINDS:
        step, *inputs = step_of(kind)
        found[kind] = inspect_in_place(step, view(kind), *inputs)
    if not tpu:
        alone, stack = (init_stack(STACKED, batch=BATCH, max_length=LENGTH, mesh=on) for on in (None, mesh))
        found["stack"] = inspect_in_place(scanned, stack, *step_of("full")[1:])
        print(f"{together(alone, stack)} arrays of a stack are those of one device")
        found["spread"] = inspect_in_place(spread(mesh), view("full"))
    for name, one in found.items():
        place = "in place" if one.alias_bytes >= one.pool_bytes else "not in place"
        print(f"{name}, {one.device}: {place}, {len(one.moves)} moves, {len(one.exchanges)} exchanges", flush=True)
        assert not tpu or one.temporary_bytes < one.pool_bytes // 10


if __name__ == "__main__":
    main(sys.argv[1])
