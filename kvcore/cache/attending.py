"""What a step's queries are answered with: an indexer's scores and picks, and attention to what the layer holds.

Arguments are checked, then the backend's verb is asked for no more columns than the longest request needs. Calls whose
like has passed go straight to their launches (``again``). What a query may see must be there: the step's own rows, and
the entries that close with them, which may be another layer's.
"""

from typing import Any

from kvcore.cache.far import fetched
from kvcore.cache.ring_writes import DOOR, NO_STREAMS, NONE, RingWrites, StepContext, StepWrites
from kvcore.counts import check_count
from kvcore.errors import ShapeError, StepError
from kvcore.ops import Array, Attention, StepIndex
from kvcore.ops.arguments import (
    FLOATS,
    INDEX_QUERIES,
    UNKNOWN,
    check_array,
    check_float,
    check_indices,
    check_number,
    check_rope,
)
from kvcore.spec import KV, Entries, IndexKeys

HOW = "sink", "scale", "rope"
"""Options of ``attend``, in its order."""

NO_SHAPE: tuple[int, ...] = ()


def owner(layers: StepWrites, writes: RingWrites, role: str) -> RingWrites:
    """What the layer got that owns the pool a role reads."""
    plan = writes.context.plan
    memo = plan.layers[writes.number].memo
    number = memo.get(role)
    if number is None:
        number = memo[role] = plan.spec.owner(writes.number, role)
    return layers[number]


def require_entries(layers: StepWrites, writes: RingWrites, role: str, verb: str) -> None:
    """Verbs that let a query see the entries it completes need those stored first."""
    own = owner(layers, writes, role)
    if role not in own.stored and own.awaits_entries(role):
        raise StepError(
            got=f"{verb} while entries that close in this step are not stored",
            where=writes.where,
            allowed=f"step.layer({own.number}).flush or store_entries, then {verb}",
        )


def index_of_entries(layers: StepWrites, writes: RingWrites, role: str) -> StepIndex:
    """The index to read entries with: their count of before the step until the step's entries are stored."""
    index = writes.context.index
    return index._replace(lengths=index.starts) if owner(layers, writes, role).awaits_entries(role) else index


def index_of_all(layers: StepWrites, writes: RingWrites, role: str) -> StepIndex:
    """The same to read all of them, which must be there."""
    context = writes.context
    if context.far and role == "entries" and context.is_far(own := owner(layers, writes, role).number):
        fetched(context, own, None, writes.where)
    return index_of_entries(layers, writes, role)


def index_scores(layers: StepWrites, writes: RingWrites, q: Any, weights: Any) -> Array:
    """``LayerHandle.index_scores``."""
    found = _index_again(layers, writes, "index_scores", (q, weights))
    if found is not UNKNOWN:
        return found
    context, given = writes.context, (q, weights)
    q, weights, columns = _indexed(layers, writes, "index_scores", q, weights)
    found = context.ops.index_scores(context.held, writes.number, context.index, q, weights, columns=columns)
    writes.note("index_scores", given, {"columns": columns}, (q, weights, columns))
    return found


def index_select(layers: StepWrites, writes: RingWrites, q: Any, weights: Any, k: Any) -> Array:
    """``LayerHandle.index_select``."""
    if k is None and writes.spec.index_keys is not None:
        k = writes.spec.index_keys.topk
    found = _index_again(layers, writes, "index_select", (q, weights, k))
    if found is not UNKNOWN:
        return found
    context, given = writes.context, (q, weights, k)
    q, weights, columns = _indexed(layers, writes, "index_select", q, weights)
    k = check_topk(k)
    found = context.ops.index_select(context.held, writes.number, context.index, q, weights, k, columns=columns)
    writes.note("index_select", given, {"columns": columns}, (q, weights, k, columns))
    return found


def check_topk(k: Any) -> int:
    """How many entries an indexer is to pick for every token."""
    return k if type(k) is int and k >= 0 else check_count(ShapeError, "index_select: k", k, 0)


def _index_again(layers: StepWrites, writes: RingWrites, verb: str, given: tuple[Any, ...]) -> Any:
    """What a verb of the indexer gives whose arguments are known to pass; ``UNKNOWN``, with nothing done, else."""
    context, keys = writes.context, writes.spec.index_keys
    context.check_open()
    if keys is None or not context.known:
        return UNKNOWN
    require_entries(layers, writes, "index_keys", verb)
    return writes.again(verb, given, {"columns": index_columns(context, verb, keys)})


def index_columns(context: StepContext, verb: str, keys: IndexKeys) -> int:
    """Keys that are looked at: those of the longest request; some more by a verb that does not give all numbers."""
    return context.longest(keys.ratio) if verb == "index_scores" else context.within(keys.ratio)


def _indexed(layers: StepWrites, writes: RingWrites, verb: str, q: Any, weights: Any) -> tuple[Array, Array, int]:
    """Queries and weights that fit the layer's keys, and how many keys the longest request has."""
    context, given = writes.context, (q, weights)
    key = context.key_of("index_scores", writes.number, given)
    if key not in context.passed:
        q, weights = index_queries(writes, verb, q, weights)
        context.passes(key, given, (q, weights))
    keys: Any = writes.spec.index_keys
    require_entries(layers, writes, "index_keys", verb)
    return q, weights, index_columns(context, verb, keys)


def index_queries(writes: RingWrites, verb: str, q: Any, weights: Any) -> tuple[Array, Array]:
    """The indexer's queries and weights, checked."""
    ops, tokens = writes.context.ops, writes.context.tokens
    keys: IndexKeys = writes.component("index_keys", IndexKeys)
    q = check_float(ops, q, f"{verb}: q", (tokens, None, keys.dim), dtypes=INDEX_QUERIES)
    return q, check_float(ops, weights, f"{verb}: weights", (tokens, q.shape[1]))


def select(writes: RingWrites, scores: Any, k: Any) -> Array:
    """``LayerHandle.select``."""
    context = writes.context
    context.check_open()
    known = context.known.get(None, NONE).get("select")
    if known is not None and getattr(scores, "shape", NO_SHAPE)[:1] == (context.tokens,):
        found = known.again(DOOR, None, None, (scores, k), {})
        if found is not UNKNOWN:
            return found
    given = scores, k
    key = context.key_of("select", writes.number, given)
    if key not in context.passed:
        # No gradient comes from an order.
        scores = check_array(context.ops, scores, "select: scores", (context.tokens, None), FLOATS)
        k = check_count(ShapeError, "select: k", k, 0)
        context.passes(key, given, (scores, k))
    selected = context.ops.select(scores, k)
    if known is not None:
        known.note(DOOR, None, given, {}, (scores, k))
    return selected


def attend(
    layers: StepWrites, writes: RingWrites, q: Any, selected: Any, sink: Any, scale: Any, rope: Any
) -> Attention:
    """``LayerHandle.attend``."""
    context, spec, given, named = writes.context, writes.spec, (q, selected, sink, scale, rope), selected
    context.check_open()
    classic = spec.kv is not None
    found = _attend_again(layers, writes, *given)
    if found is not UNKNOWN:
        return found
    key = context.key_of("attend", writes.number, given)
    if key not in context.passed:
        checked = _kv_arguments(writes, *given) if classic else attend_arguments(writes, *given)
        context.passes(key, given, checked)
        q, selected, sink, scale, rope = checked
    at = context.held, writes.number, context.index
    if classic:
        writes.require("kv", "attend")
        k, v = writes.unwritten("kv") or NO_STREAMS
        columns = context.kv_columns(spec.kv, ended=True)  # type: ignore[arg-type]
        how: dict[str, Any] = {"columns": columns, "sink": sink, "scale": scale}
        found = context.ops.attend_kv(*at, q, k, v, **how)
        as_given = {**how, "sink": given[2], "scale": given[3]}
        writes.note("attend_kv", (given[0], k, v), as_given, (q, k, v, *how.values()))
        return found
    if spec.window is not None:
        writes.require("window", "attend")
    if spec.entries is not None:
        require_entries(layers, writes, "entries", "attend")
        if context.far and context.is_far(own := owner(layers, writes, "entries").number):
            selected, at = fetched(context, own, named, f"{writes.where}.attend"), (context.held, *at[1:])
    rows = writes.unwritten("window")
    how = {"rows": rows[0] if rows else None, "sink": sink, "scale": scale, "rope": rope}
    found = context.ops.attend(*at, q, selected, **how)
    if not context.far:
        as_given = {"rows": how["rows"], **dict(zip(HOW, given[2:], strict=True))}
        writes.note("attend", given[:2], as_given, (q, selected, *how.values()))
    return found


def _attend_again(
    layers: StepWrites, writes: RingWrites, q: Any, selected: Any, sink: Any, scale: Any, rope: Any
) -> Any:
    """``attend``, where its arguments are known to pass; ``UNKNOWN``, with nothing done, else."""
    context, spec = writes.context, writes.spec
    if not context.known or context.far:
        return UNKNOWN
    if spec.kv is not None:
        if selected is not None or rope is not None or ("kv" not in writes.own and context.tokens):
            return UNKNOWN
        how = {"columns": context.kv_columns(spec.kv, ended=True), "sink": sink, "scale": scale}
        return writes.again("attend_kv", (q, *(writes.unwritten("kv") or NO_STREAMS)), how)
    if spec.window is not None:
        writes.require("window", "attend")
    if spec.entries is not None:
        require_entries(layers, writes, "entries", "attend")
    rows = writes.unwritten("window")
    how = {"rows": rows[0] if rows else None, "sink": sink, "scale": scale, "rope": rope}
    return writes.again("attend", (q, selected), how)


def attend_arguments(writes: RingWrites, q: Any, selected: Any, sink: Any, scale: Any, rope: Any) -> tuple[Any, ...]:
    """Arguments of ``attend`` of a latent layer, checked."""
    ops, tokens = writes.context.ops, writes.context.tokens
    component = writes.spec.window or writes.component("entries", Entries)
    q = check_float(ops, q, "attend: q", (tokens, None, component.dim))
    if selected is not None:
        writes.component("entries", Entries)
        selected = check_indices(ops, selected, "attend: selected", tokens)
    sink = None if sink is None else check_float(ops, sink, "attend: sink", (q.shape[1],))
    scale = None if scale is None else check_number(scale, "attend: scale")
    return q, selected, sink, scale, check_rope(ops, rope, "attend: rope", component.dim)


def _kv_arguments(writes: RingWrites, q: Any, selected: Any, sink: Any, scale: Any, rope: Any) -> tuple[Any, ...]:
    """The same of a classic layer."""
    context, kv = writes.context, writes.component("kv", KV)
    q = check_float(context.ops, q, "attend: q", (context.tokens, None, kv.key_dim))
    heads = q.shape[1]
    for region in context.plan.layers[writes.number].regions["kv"]:
        if heads % region.heads:
            raise ShapeError(got=f"{heads} heads", where="attend: q", allowed=f"a multiple of {region.heads}")
    if selected is not None:
        raise ShapeError(got="selected entries", where="attend: selected", allowed="None on a classic layer")
    if rope is not None:
        raise ShapeError(got="a rotation", where="attend: rope", allowed="None on a classic layer")
    sink = None if sink is None else check_float(context.ops, sink, "attend: sink", (heads,))
    return q, None, sink, None if scale is None else check_number(scale, "attend: scale"), None
