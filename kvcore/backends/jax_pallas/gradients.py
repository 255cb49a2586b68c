"""The refusal of gradients that storing would make 0.

A stored row is bytes: JAX takes the derivative of an encoding for 0, in silence, also where the row is read again in
the same step. So what a verb stores, and its pools, go through an identity whose derivative is an error. It is raised
while JAX differentiates, inside any transformation, and a compiled program has nothing of it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvcore.errors import ShapeError

STORED = "The cache is for inference: pass jax.lax.stop_gradient(...) where no gradient is meant to go through it."


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _identity(where: str, hint: str, arrays: Any) -> Any:
    del where, hint
    return arrays


@_identity.defjvp
def _refuse(where: str, hint: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise ShapeError(
        got="a differentiated array", where=where, allowed="arrays that no gradient is asked of", hint=hint
    )


def constant(where: str, arrays: Any, hint: str = STORED) -> Any:
    """Arrays, any pytree, as they are; to differentiate by one of floats is a ``ShapeError`` that says where."""
    leaves, tree = jax.tree.flatten(arrays)
    places = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    if places:
        for place, leaf in zip(places, _identity(where, hint, [leaves[place] for place in places]), strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(tree, leaves)
