"""The one order that XLA must be told: what reads a pool as it was, before what writes it."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from kvcore.ops import StepIndex

Found = TypeVar("Found")
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def read_first(read: Callable[[Any], Found], pools: Any, index: StepIndex) -> tuple[Found, StepIndex]:
    """What ``read(pools)`` gives, and the index to write a ring's rows with after it, in place.

    A step that brings more tokens than a ring has to spare overwrites rows that its first queries still see: those are
    read with the step's own rows beside, then the rows are stored. Left alone, XLA reads while it writes, from a copy
    of the pool. With the index that comes back a write has to wait until all of ``read`` was computed.
    """
    shapes, known = jax.eval_shape(read, pools), _always(pools, index)

    def kept(pools: Any) -> tuple[Found, jax.Array]:
        found = read(pools)
        # 0 as ever, but not before there is something to look at.
        some = [leaf.reshape(-1)[0].astype(jnp.float32) > 0 for leaf in jax.tree.leaves(found) if leaf.size]
        return found, (~known & some[0] if some else ~known).astype(jnp.int32)

    def never(pools: Any) -> tuple[Found, jax.Array]:
        del pools
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes), jnp.zeros((), jnp.int32)

    # A conditional is one operation, whose results are kept: no part is computed again from pools that were written.
    found, none = lax.cond(known, kept, never, pools)
    return found, index._replace(slots=index.slots + none)


def _always(pools: Any, index: StepIndex) -> jax.Array:
    """True, which XLA can't know before it runs: no length is below 0, and no byte or word is as large as that."""
    if isinstance(index.lengths, Tracer):
        return jnp.min(index.lengths, initial=0) >= 0
    first = jax.tree.leaves(pools)[0].reshape(-1)[0]
    return lax.bitcast_convert_type(first, UNSIGNED[first.dtype.itemsize]).astype(jnp.float32) < 1e30
