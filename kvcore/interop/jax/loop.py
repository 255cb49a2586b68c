"""A decode loop on the device: the index of every token is arithmetic on the one of a step that reserved them all.

The host opens one step of as many tokens as the loop may bring, which takes their blocks; inside ``lax.while_loop`` or
``lax.scan`` each round's index follows from how many tokens every request took so far; then the host commits those.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kvcore.ops import StepIndex

__all__ = ["by_request", "next_tokens"]


def next_tokens(index: StepIndex, taken: jax.Array, active: jax.Array | None = None) -> StepIndex:
    """The index of one more token of every request that goes on: pure, and of the same shape in every round.

    Token rows are those of the requests that go on, in their order, then padding: ``request_index`` says whose each
    is, and ``kvcore.interop.jax.loop.by_request`` puts what a round gives back in the requests' order. A request stops
    where the step's tokens end; nothing of it is written from then on.

    Args:
        index: of the step that reserved the tokens: ``cache.step({request: most})``, its index.
        taken: [Q] tokens of every request so far, 0 at first; then ``taken + (found.lengths - found.starts)``.
        active: [Q] bool, which requests go on; None: all.

    Returns:
        An index of Q token rows.
    """
    start = index.starts + taken
    live = (start < index.lengths) & (index.slots >= 0)
    if active is not None:
        live &= active
    order = jnp.argsort(~live, stable=True).astype(jnp.int32)
    kept = live[order]
    return index._replace(
        positions=jnp.where(kept, start[order], -1),
        request_index=jnp.where(kept, order, -1),
        starts=start,
        lengths=start + live.astype(jnp.int32),
    )


def by_request(index: StepIndex, rows: jax.Array, others: Any) -> jax.Array:
    """Rows [Q, ...] of a round's tokens in the requests' order, ``others`` [Q, ...] for requests that had none."""
    others = jnp.asarray(others)
    # Padding is no request's: beyond the end, where writes are dropped.
    where = jnp.where(index.request_index >= 0, index.request_index, len(others))
    return others.at[where].set(rows.astype(others.dtype), mode="drop")
