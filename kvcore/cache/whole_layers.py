"""A layer's step as one call of a backend that has it: which of its rows the rings get in it, and what is noted after.

A verb of its own writes a ring once nothing in the step can still need what it overwrites. Here the backend reads
first, so that rows are stored at once, too, which take the place of rows of the step alone: what reads the step's rows
after that has them from the step itself, as ever. Older rows are not overwritten before the commit, which an abort must
find as they were.
"""

from collections.abc import Sequence

from kvcore.cache.ring_writes import RingWrites
from kvcore.ops import Attention
from kvcore.ops.records import WholeLayer


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
