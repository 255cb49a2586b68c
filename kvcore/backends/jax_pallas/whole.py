"""All that a latent layer does with its cache in a step, as one program: its verbs, traced together.

It is no verb. ``LayerHandle.decode`` has it where it calls a layer's verbs one by one elsewhere, each of which would be
a program of its own for every size of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.backends.jax_pallas import attention, buckets, indexer, programs, tail, verbs, window
from kvcore.backends.jax_pallas import rows as place
from kvcore.backends.jax_pallas.calls import TILED
from kvcore.backends.jax_pallas.order import read_first
from kvcore.backends.jax_pallas.rows import Held
from kvcore.ops import Attention, StepIndex, bounds, facade

if TYPE_CHECKING:
    from jax import Array

    from kvcore.backends.jax_pallas.layer import Layer
    from kvcore.ops.records import Compression, Streams, WholeLayer
    from kvcore.pools import Pools

TOKENS = frozenset({"q", "rows", "streams", "index_q", "index_weights"})
"""Arrays whose first axis counts a step's tokens."""


def whole_layer(
    self: Any, pools: Pools, layer: int, index: StepIndex, given: WholeLayer
) -> tuple[Pools, Attention, Array | None] | None:
    """Store what a layer is given, and attend: (pools, what attention gives, the window's rows if they are rotated).

    None, and nothing was done, where an array is traced or lies on several devices, and where Triton kernels run, each
    of which is a launch anyway.
    """
    rotation = given.rotation
    arrays = {
        "q": given.q,
        "rows": given.rows["window"][0],
        "streams": given.streams,
        "compression": None if given.streams is None else verbs.turning(given.compression),
        "turning": tail.frequencies_of(rotation.get("rope")),
        "rows_norm_weight": rotation.get("norm_weight"),
        "sink": given.sink,
        "scale": given.scale,
        "rope": tail.frequencies_of(given.rope),
    }
    if given.indexer is not None:
        arrays["index_q"], arrays["index_weights"] = given.indexer
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if self.kernels == "triton" or not buckets.is_known(arrays):
        return None
    options: dict[str, Any] = {"columns": given.columns}
    if given.indexer is not None:
        verbs.bucketed(self, facade.SIZES["index_select"], layer, index, options)
    counts = {name: "tokens" if name in TOKENS else None for name in arrays}
    fit, padded, arrays = verbs.fitted(self, pools, index, arrays, counts)
    newest = given.newest if self.place.whole else max(1, buckets.rounded(given.newest))
    closed = 0
    if given.streams is not None:
        # As many as steps of this size can close, so that those which close none are no program of their own.
        closed = bounds.closed(self.plan, layer, "entries", padded)
        closed = self.place.rows(given.closed) if self.place.whole else max(given.closed, closed)
    region, longest = self.plan.region(layer, "window")[0], self.plan.longest
    reach = self.plan.layers[layer].component("window").reach + newest
    options |= {
        "closed": closed,
        "eps": float(rotation.get("eps", 0)),
        "k": given.k,
        "has_room": (reach if longest is None else min(reach, longest)) <= region.rows,
    }
    kind = self.layers[layer]
    written = {name: pools[kind.names[name]] for name in kind.names}
    arrays |= {"index": padded, "now": {role: np.bool_(is_now) for role, is_now in given.now.items()}}
    run, names = programs.answering(store_and_attend), [kind.names[name] for name in sorted(written)]
    into, static = programs.written(pools, written, arrays), tuple(sorted(options.items()))
    # In one line, for nothing to come between.
    dict.update(into, zip(names, (found := run(kind, static, written, arrays))[0].values(), strict=True))
    out, lse, rows = verbs.trimmed(self, found[1], fit, "tokens", None, None)
    return programs.as_given(pools, into), Attention(out, lse), rows


def store_and_attend(
    layer: Layer,
    pools: Held,
    index: StepIndex,
    q: Array,
    rows: Array,
    now: dict[str, Array],
    *,
    streams: Streams | None = None,
    compression: Compression | None = None,
    index_q: Array | None = None,
    index_weights: Array | None = None,
    turning: Array | None = None,
    rows_norm_weight: Array | None = None,
    sink: Array | None = None,
    scale: Array | None = None,
    rope: Array | None = None,
    closed: int,
    eps: float,
    k: int,
    columns: int,
    has_room: bool,
) -> tuple[Held, tuple[Array, Array, Array | None]]:
    """A layer's step: pools, and (out, lse, the window's rows if they are rotated).

    Args:
        layer: with all of its roles.
        pools: its own.
        index: the step's.
        q: [T, H, d].
        rows: of the window, [T, d].
        now: role of a ring -> whether it gets the step's rows.
        streams: of the tails.
        compression: as the flush takes it, its rope as inverse frequencies.
        index_q: [T, H, d] of the indexer.
        index_weights: [T, H].
        turning: inverse frequencies by which the window's rows are rotated on their way.
        rows_norm_weight: [d] of a norm before that.
        sink: as for ``attend``; ``scale`` and ``rope`` likewise.
        scale: of the logits.
        rope: inverse frequencies.
        closed: entries, at most.
        eps: of the window's norm.
        k: entries that the indexer picks.
        columns: keys that it looks at.
        has_room: the ring has room for the step's rows beside those that its first query sees.
    """
    if streams is not None and compression is not None:
        pools = _flush(layer, pools, index, streams, compression, now, closed=closed)
    selected = None
    if index_q is not None and index_weights is not None:
        selected = indexer.index_select(layer, pools, index, index_q, index_weights, count=k, columns=columns)
    if turning is not None:
        rows = window.rotated_rows(layer, index, rows, rope=turning, norm_weight=rows_norm_weight, eps=eps)

    rotated = None if turning is None else rows

    def attend(pools: Held, own: Array | None = None) -> tuple[Array, Array]:
        how = {"rows": own, "sink": sink, "scale": scale, "rope": rope}
        out, lse = attention.attend(layer, pools, index, q, selected, **how)
        return out, lse

    if has_room:
        pools = window.append_window(layer, pools, place.only_if(now["window"], index), rows)
        return pools, (*attend(pools), rotated)
    (out, lse), later = read_first(lambda some: attend(Held(some, layer.kernels), rows), dict(pools), index)
    return window.append_window(layer, pools, place.only_if(now["window"], later), rows), (out, lse, rotated)


def _flush(layer, pools, index, streams, compression, now, *, closed):
    """Entries that close, and the step's own rows to the tails."""
    if pools.kernels not in TILED:
        return tail.flush(layer, pools, index, streams, compression, closed=closed, append=True, now=now)
    if closed:
        pools = tail.flush(layer, pools, index, streams, compression, closed=closed)
    for role, kv, score, _ in compression.each(streams):
        ring = layer.tail_of(role)
        pools = tail.append_tail(layer, pools, place.only_if(now[ring], index), kv, score, role=ring)
    return pools
