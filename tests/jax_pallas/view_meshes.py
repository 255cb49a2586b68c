"""Layer views over 4 × 2 forced devices beside views on one, and their pure forms from mesh to mesh.

Steps are in the caller's jit on Auto axes, by themselves on Explicit ones.

python view_meshes.py auto|explicit
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kvcore.errors import ShapeError, SpecError
from kvcore.interop.jax.views import CacheViews, init_views
from kvcore.spec import KV, CacheSpec, LayerSpec

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

BATCH, LENGTH = 4, 16
LAYERS = {
    # what it is -> (component, heads of one of two shards of the model axis)
    "paged": (KV(key_heads=4, key_dim=16, value_heads=2, value_dim=32, key_format="int8_row"), (2, 1)),
    "keys divide, values do not": (KV(key_heads=4, key_dim=16, value_heads=1, storage="slot"), (4, 1)),
    "chunked": (KV(key_heads=2, key_dim=16, key_format="fp32", storage="ring", chunk=4), (1, 1)),
}
SPEC = CacheSpec(layers=[LayerSpec(kv=kv) for kv, _ in LAYERS.values()], block_tokens=4)
STARTS = [2, 0, 1, 0]
STEPS = ((6, None), (1, None), (6, [4, 1, 0, 6]), (1, None))
"""(Columns of a step, tokens of every sequence where the batch is padded on the right.)"""


def rows(layer: int, number: int, columns: int, batch: int = BATCH) -> list[np.ndarray]:
    """Keys and values of a layer's step."""
    rng, kv = np.random.default_rng((layer, number)), list(LAYERS.values())[layer][0]
    return [rng.standard_normal((batch, columns, part.heads, part.format.dim), np.float32) for part in kv.parts]


@jax.jit
def inside(view, keys, values, new):
    return view.append(keys, values, new)


def told(views: CacheViews, *, jitted: bool) -> tuple[CacheViews, list[np.ndarray]]:
    """Every step on every layer, and all that they showed; steps are the views' own, or in the caller's jit."""
    shown = []
    for number, (columns, new) in enumerate(STEPS):
        for layer in range(len(views)):
            tokens = jnp.asarray([columns] * BATCH if new is None else new, jnp.int32)
            given = [jnp.asarray(array) for array in rows(layer, number, columns)]
            appended = (inside if jitted else type(views[layer]).append)(views[layer], *given, tokens)
            views = views.with_layer(layer, appended.view)
            valid = np.asarray(appended.positions) >= 0
            # What is no row may hold anything.
            k, v = (np.where(valid[:, :, None, None], np.asarray(array), 0) for array in appended[:2])
            shown += [
                k,
                v,
                np.asarray(appended.mask),
                np.asarray(appended.positions),
                np.asarray(appended.view.lengths),
            ]
    return views, shown


def pure(views: CacheViews) -> tuple[list[dict[str, np.ndarray]], dict]:
    """The pure form, through what a file could hold."""
    arrays, metadata = views.to_pure()
    return jax.tree.map(np.asarray, arrays), json.loads(json.dumps(metadata))


def same(one: object, other: object, what: str) -> None:
    """Equal to the bit, leaf by leaf."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    different = [number for number, (a, b) in enumerate(pairs) if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
    print(f"{what}: {len(pairs)} arrays" + (f", DIFFERENT {different}" if different else ""), flush=True)


def lies(views: CacheViews, requests: int) -> None:
    """Each device's part of every pool is a whole cache of its sequences and heads."""
    for view, (kv, heads) in zip(views, LAYERS.values(), strict=True):
        local = LayerSpec(
            kv=KV(
                **{
                    **{name: getattr(kv, name) for name in kv.__struct_fields__},
                    "key_heads": heads[0],
                    "value_heads": heads[1],
                }
            )
        )
        alone = init_views(CacheSpec(layers=[local], block_tokens=4), batch=BATCH // requests, max_length=LENGTH)[0]
        for name, pool in view.pools.items():
            shapes = {part.data.shape for part in pool.addressable_shards}
            assert shapes == {alone.pools[name].shape}, (kv, name, shapes, alone.pools[name].shape)
        assert {part.data.shape for part in view.lengths.addressable_shards} == {(BATCH // requests,)}


def main() -> None:
    """Tell the story on one device and on eight."""
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[sys.argv[1]]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    sizes = {"max_length": LENGTH, "starts": STARTS}
    one, many = init_views(SPEC, batch=BATCH, **sizes), init_views(SPEC, batch=BATCH, **sizes, mesh=mesh)
    lies(many, 4)
    (one, wanted), (many, shown) = told(one, jitted=False), told(many, jitted=sys.argv[1] == "auto")
    same(wanted, shown, "appended")
    lies(many, 4)
    same(one.to_pure()[0], pure(many)[0], "pure form")
    donated(many)

    # Sequences from elsewhere: one, which is on every data shard, and four, which are cut as these are.
    lone = [init_views(SPEC, batch=1, max_length=LENGTH, starts=[1], mesh=on) for on in (None, mesh)]
    for layer in range(len(SPEC.layers)):
        new = [jnp.asarray(array) for array in rows(layer, 99, 5, 1)]
        lone = [views.with_layer(layer, views[layer].append(*new).view) for views in lone]
    inserted = one.insert(lone[0], 2), many.insert(lone[1], 2)
    lies(inserted[1], 4)
    same(inserted[0].to_pure(), inserted[1].to_pure(), "inserted one")
    same(one.to_pure()[0], many.to_pure()[0], "what they were inserted into")
    changed = [views.insert(views, 0).insert_starts([3, 1], 1).insert_index(4, 3) for views in inserted]
    same(changed[0].to_pure(), changed[1].to_pure(), "inserted all, other starts and lengths")
    refused(lambda: many.insert(lone[0], 2), SpecError, "insert: rules")
    refused(lambda: many.insert(lone[1], 4), ShapeError, "insert: slot")

    # A pure form has no mesh; heads of two shards become those of four, or of one.
    arrays, metadata = pure(many)
    wanted = [one[layer].append(*map(jnp.asarray, rows(layer, 7, 2))) for layer in range(len(one))]
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    for name, on, rules in (
        ("no mesh", None, {}),
        ("another mesh", other, {"requests": "data", "heads": "model"}),
        ("the batch over all", other, {"requests": ("data", "model")}),
    ):
        moved = CacheViews.from_pure(arrays, metadata, mesh=on, **({"rules": rules} if rules else {}))
        same(arrays, pure(moved)[0], f"pure form of {name}")
        found = [moved[layer].append(*map(jnp.asarray, rows(layer, 7, 2))) for layer in range(len(moved))]
        for before, after in zip(wanted, found, strict=True):
            valid = np.asarray(before.positions)[:, :, None, None] >= 0
            assert np.array_equal(before.positions, after.positions)
            assert np.array_equal(np.where(valid, before.keys, 0), np.where(valid, after.keys, 0))
            assert np.array_equal(np.where(valid, before.values, 0), np.where(valid, after.values, 0))
    refused(
        lambda: init_views(SPEC, batch=4, max_length=LENGTH, mesh=mesh, rules={"blocks": "data"}), SpecError, "blocks"
    )
    refused(
        lambda: init_views(SPEC, batch=4, max_length=LENGTH, mesh=mesh, rules={"batch": "data"}), SpecError, "rules"
    )


def donated(views: CacheViews) -> None:
    """A step of all layers takes every array that it is given, a copy of these, and leaves as many."""
    step = jax.jit(
        lambda views, new: [view.append(*rows).view for view, rows in zip(views, new, strict=True)], donate_argnums=0
    )
    copies = jax.tree.map(jnp.copy, list(views))
    leaves = jax.tree.leaves(copies)
    after = step(copies, [[jnp.asarray(array) for array in rows(layer, 50, 1)] for layer in range(len(views))])
    print(f"donated: {sum(leaf.is_deleted() for leaf in leaves)} of {len(jax.tree.leaves(after))} arrays", flush=True)


def refused(call, error, where: str) -> None:
    """The call raises that error, which names the place."""
    with pytest.raises(error) as raised:
        call()
    assert where in raised.value.where, raised.value


if __name__ == "__main__":
    main()
