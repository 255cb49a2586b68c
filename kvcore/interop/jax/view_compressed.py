"""One step of views whose layers compress (DeepSeek-V4) or go on from a state, as one shard computes it.

Entries are stored before they are scored and attended to, and a ring that has room for the step's rows beside those
that its first query sees is written before it is read: so XLA writes pools in place. Where it has no room, and where
a convolution's inputs are read, the write waits for what was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvcore.backends.jax_pallas.order import read_first
from kvcore.interop.jax.view_kinds import Kind, index_of
from kvcore.interop.jax.view_steps import Answer, State, step_of, without_rows

if TYPE_CHECKING:
    import jax

Arrays = dict[str, "jax.Array"]


def attend_compressed(
    kind: Kind, state: State, streams: Arrays, weights: Arrays, count: jax.Array, options: dict[str, float]
) -> Answer:
    """Store a window's rows and what closes of the tails, and attend to the window and the entries.

    Args:
        kind: of the shard.
        state: before the step.
        streams: ``query`` [B, S, H, d], ``rows`` [B, S, d]; ``kv`` and ``score`` [B, S, width] of the tail,
            ``index_kv`` and ``index_score`` of the indexer's, ``index_query`` and ``index_weights``, as the layer has
            them.
        weights: ``sink``, ``rope``, ``norm_weight``, ``index_norm_weight`` and ``scale``, where given.
        count: [B] tokens of each sequence.
        options: ``eps``, and ``scale`` where it is a number.
    """
    ops, layer, new = kind.ops, kind.layer, streams["query"].shape[1]
    index, after = step_of(kind, state, new, count)
    given = {name: ops.from_batch(index, array) for name, array in streams.items()}
    pools, selected = state.pools, None
    if layer.tail is not None:
        tails = ("kv", "score", "index_kv", "index_score")
        flush = {name: weights[name] for name in ("norm_weight", "index_norm_weight", "rope") if name in weights}
        # A sequence closes as many entries as its new tokens begin windows, and one more that they go on with.
        closed = len(index.slots) * -(-new // layer.tail.ratio)
        pools = ops.append_flush(
            pools, 0, index, *(given[name] for name in tails if name in given), newest=new, closed=closed,
            eps=options["eps"], **flush,
        )  # fmt: skip
    if layer.index_keys is not None:
        columns = max(1, kind.length // layer.index_keys.ratio)
        scores = ops.index_scores(pools, 0, index, given["index_query"], given["index_weights"], columns=columns)
        selected = ops.select(scores, min(layer.index_keys.topk, columns))
    asked = {name: found[name] for found in (options, weights) for name in ("sink", "scale", "rope") if name in found}

    def attend(pools: Any, rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        out, lse = ops.attend(pools, 0, index, given["query"], selected, rows=rows, **asked)
        return out, lse

    ring = ops.plan.region(0, "window")[0].rows
    if min(layer.window.window - 1 + new, kind.length) <= ring:  # type: ignore[union-attr]
        pools = ops.append_window(pools, 0, index, given["rows"])
        out, lse = attend(pools)
    else:
        (out, lse), later = read_first(lambda pools: attend(pools, given["rows"]), pools, index)
        pools = ops.append_window(pools, 0, later, given["rows"])
    out, lse = ops.to_batch(index, out, new), ops.to_batch(index, lse, new)
    return Answer(out.astype(streams["query"].dtype), without_rows(index, lse), after._replace(pools=dict(pools)))


def recall(
    kind: Kind, state: State, inputs: jax.Array | None, count: jax.Array, new: int
) -> tuple[jax.Array | None, jax.Array | None, State]:
    """A convolution's inputs [B, width - 1 + S, channels] and the states [B, ...] that a step goes on from.

    The inputs are stored, and the step's tokens counted.
    """
    ops, layer = kind.ops, kind.layer
    index, after = step_of(kind, state, new, count)
    states = None if layer.state is None else ops.read_state(state.pools, 0, index)
    if layer.conv is None or inputs is None:
        return None, states, after
    before, later = read_first(lambda pools: ops.gather_conv(pools, 0, index), state.pools, index)
    pools = ops.append_conv(state.pools, 0, later, ops.from_batch(index, inputs))
    return jnp.concatenate([before.astype(inputs.dtype), inputs], axis=1), states, after._replace(pools=dict(pools))


def store_states(kind: Kind, state: State, starts: jax.Array, states: jax.Array) -> State:
    """The states after the last token of every sequence that had one since ``starts`` [B]."""
    first, end = (jnp.minimum(lengths, kind.length) for lengths in (starts, state.lengths))
    index = index_of(kind, first, end, state.starts, 1, state.number)
    return state._replace(pools=dict(kind.ops.write_state(state.pools, 0, index, states, newest=1)))
