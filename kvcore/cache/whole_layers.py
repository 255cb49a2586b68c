"""A latent layer's step in one call: as one program of a backend that has it, or as its launches, looked up once.

A verb of its own writes a ring once nothing in the step can still need what it overwrites. A program of the backend
reads first, so that rows are stored at once, too, which take the place of rows of the step alone: what reads the step's
rows after that has them from the step itself, as ever. Older rows are not overwritten before the commit, which an abort
must find as they were.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.cache import attending, compression
from kvcore.cache.ring_writes import NO_STREAMS, NONE, RingWrites
from kvcore.ops import Array, Attention
from kvcore.ops.arguments import UNKNOWN
from kvcore.ops.records import Compression, WholeLayer


class Decode(NamedTuple):
    """What ``LayerHandle.decode`` was given, by its arguments' names; ``rows`` are the rings', by role."""

    q: Any
    rows: dict[str, tuple[Any, ...]]
    indexer: tuple[Any, Any] | None
    k: Any
    rope: Any
    rotate: bool
    window_norm_weight: Any
    norm_weight: Any
    index_norm_weight: Any
    eps: Any
    sink: Any
    scale: Any


def takes_whole(writes: RingWrites, given: Decode) -> bool:
    """Whether a layer that shares nothing is given all of its rows, with nothing to fetch or settle before."""
    context, spec = writes.context, writes.spec
    memo = context.plan.layers[writes.number].memo
    if "whole" not in memo:
        roles = {role for role in ("window", "tail", "index_tail") if getattr(spec, role) is not None}
        alone = all(getattr(component, "shared_from", None) is None for _, component in spec.components())
        memo["whole"] = roles if alone and (spec.entries is None or spec.tail is not None) else None
    if given.rows.keys() != memo["whole"] or (given.indexer is not None and spec.index_keys is None):
        return False
    return not context.far and (context.unflushed is None or context.unflushed is writes)


def as_program(writes: RingWrites, given: Decode) -> Attention | None:
    """What attention gives after one program stored and attended; None, and nothing was done, where there is none."""
    if writes.context.whole is None or not (given.rotate or given.window_norm_weight is None):
        return None
    rotation: Mapping[str, Any] = NONE
    if given.rotate:
        rotation = compression.rotation(writes, given.rope, given.window_norm_weight, given.eps)
    asked = _checked(writes, given)._replace(rotation=rotation)
    return store_and_attend(writes, asked, compression.flushed_roles(writes)[0])


def call_of(writes: RingWrites, given: Decode) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options that its launches are known by."""
    context, keys, k, columns = writes.context, writes.spec.index_keys, given.k, None
    if given.indexer is not None and keys is not None:
        k, columns = keys.topk if k is None else k, context.within(keys.ratio)
    rows = given.rows
    streams = *(rows.get("tail") or NO_STREAMS), *(rows.get("index_tail") or NO_STREAMS)
    return (given.q, *rows["window"], *streams, *(given.indexer or NO_STREAMS)), {
        "rotate": given.rotate,
        "newest": context.most_new,
        "k": k,
        "columns": columns,
        "window_norm_weight": given.window_norm_weight,
        "rope": given.rope,
        "eps": given.eps,
        "norm_weight": given.norm_weight,
        "index_norm_weight": given.index_norm_weight,
        "sink": given.sink,
        "scale": given.scale,
    }


def again(writes: RingWrites, given: Decode, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """What attention gives after all was stored, where all of it is known to pass; ``UNKNOWN``, nothing done, else."""
    found = writes.decode_again(given.rows, *call)
    if found is not UNKNOWN and "tail" in given.rows:
        writes.stored.update(compression.flushed_roles(writes)[0])
    return found


def _checked(writes: RingWrites, given: Decode) -> WholeLayer:
    """What its verbs are given by all but the window's rotation, checked as they do."""
    context, keys, index, k, columns = writes.context, writes.spec.index_keys, given.indexer, given.k, 0
    rows: dict[str, tuple[Array, ...]] = {}
    for role, arrays in given.rows.items():
        rows[role] = writes.checked(role, arrays)
        context.check_outside(f"append_{role}", rows[role])
    compressed, closed = Compression(), 0
    if "tail" in rows:
        flushing = given.norm_weight, given.eps, given.rope, given.index_norm_weight
        context.check_outside("flush", flushing)
        entries = compression.own_entries(writes, "flush")
        compressed = Compression(*compression.flush_options(writes, entries, *flushing))
        closed = context.closed_count(entries.ratio)
    if index is not None and keys is not None:
        index = attending.index_queries(writes, "index_select", *index)
        columns = attending.index_columns(context, "index_select", keys)
        k = keys.topk if k is None else attending.check_topk(k)
    asked = given.q, None, given.sink, given.scale, given.rope
    q, _, sink, scale, rope = attending.attend_arguments(writes, *asked)
    return WholeLayer(
        q=q,
        rows=rows,
        rotation=NONE,
        now=NONE,
        compression=compressed,
        closed=closed,
        newest=context.most_new,
        indexer=index,
        k=k or 0,
        columns=columns,
        sink=sink,
        scale=scale,
        rope=rope,
    )


def store_and_attend(writes: RingWrites, given: WholeLayer, flushed: Sequence[str]) -> Attention | None:
    """What attention gives after all that a layer is given was stored.

    None, and nothing was done, where its verbs are to be called one by one.

    Args:
        writes: of a layer that got nothing yet.
        given: checked, but for ``now``.
        flushed: roles that a flush stores.
    """
    context = writes.context
    run = context.whole
    if run is None or writes.own or not context.tokens:
        return None
    waits = frozenset(role for role in given.rows if writes.writing(role).waits)
    is_new = bool(waits) and not any(row.start and row.new for row in context.rows)
    for role in given.rows:
        writes.keep_overwritten(role)
    # Copies: the caller may fill its buffer with the next layer's rows before the step ends.
    own = {role: context.copied(rows) if role in waits else rows for role, rows in given.rows.items()}
    now = {role: is_new or role not in waits for role in given.rows}
    found = run(context.held, writes.number, context.index, given._replace(now=now))
    if found is None:
        return None
    pools, answer, rotated = found
    context.replace(pools)
    if rotated is not None:
        own["window"] = (rotated,)
    writes.own.update(own)
    writes.waiting = {role: rows for role, rows in own.items() if role in waits}
    writes.ahead = waits if is_new else writes.ahead
    writes.stored.update(flushed)
    return answer
