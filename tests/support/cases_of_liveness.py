"""What is live and what is visible, written out by brute force: the rule of each component, one length at a time.

The expected sets come from what a later token needs, token by token, and not from a formula for the bounds.
"""

import numpy as np

from kvcore.spec import KV, Entries, IndexKeys, Tail, Window

LENGTHS = range(24)

SIZES = {"key_heads": 1, "key_dim": 4}
COMPONENTS = {
    "window of 1": Window(dim=4, window=1, format="fp32"),
    "window of 5": Window(dim=4, window=5, format="fp32"),
    "tail with overlap": Tail(dim=4, ratio=3, overlap=True),
    "tail without": Tail(dim=4, ratio=4, overlap=False),
    "tail of ratio 1": Tail(dim=4, ratio=1, overlap=True),
    "entries": Entries(dim=4, ratio=4, format="fp32"),
    "index keys": IndexKeys(dim=4, ratio=3, heads=1, topk=1, format="fp32"),
    "full": KV(**SIZES),
    "slot": KV(**SIZES, storage="slot"),
    "paged, sliding": KV(**SIZES, window=5),
    "paged, chunked": KV(**SIZES, chunk=4),
    "ring, sliding": KV(**SIZES, storage="ring", window=5),
    "ring, chunked": KV(**SIZES, storage="ring", chunk=4),
}


def needed(component, length):
    """Rows that a component has at a length, as later tokens need them: a set of positions or of entry numbers."""
    before = range(length)
    match component:
        case Entries():
            return {p // component.ratio for p in before if (p // component.ratio + 1) * component.ratio <= length}
        case Tail():
            # A window that is still open, and the one before it where the next entry takes it along.
            reach = 1 if component.overlap else 0
            return {p for p in before if p // component.ratio >= length // component.ratio - reach}
        case Window():
            return {p for p in before if length - p <= component.window}
        case KV(storage="ring"):
            return {p for p in before if sees(component, length - 1, p, 0)}
        case KV():
            return set(before)
    raise AssertionError(component)


def sees(component, query, position, left):
    """Whether a query sees a position, where the first ``left`` positions are no tokens."""
    if position > query or position < left:
        return False
    if component.window is not None:
        return query - position < component.window
    if getattr(component, "chunk", None) is not None:
        return (query - left) // component.chunk == (position - left) // component.chunk
    return True


def gathered(component, start, length, left):
    """Positions of ``gather_kv``: all that is stored; of a ring, from the first that a query of the step sees."""
    if component.storage != "ring":
        return set(range(length))
    first = max(min(start, length - 1), left)
    return {p for p in range(length) if any(sees(component, query, p, left) for query in (first, *range(start, length)))
            or p > first}  # fmt: skip


def check(array, maximum, to_list):
    """Every component's bounds on arrays of a framework, and on ints, against the sets above."""
    for name, component in COMPONENTS.items():
        lengths = array(np.array(LENGTHS, np.int32))
        first, end = component.live_bounds(lengths, maximum)
        assert first.dtype == end.dtype == lengths.dtype, name
        assert first.shape == end.shape == lengths.shape, name
        for length, low, high in zip(LENGTHS, to_list(first), to_list(end), strict=True):
            assert set(range(low, high)) == needed(component, length) == set(component.live(length)), (name, length)
        # Padding rows of a step have length -1: nothing is live.
        first, end = component.live_bounds(array(np.array([-1], np.int32)), maximum)
        assert to_list(first)[0] >= to_list(end)[0], name
        if isinstance(component, KV):
            check_visible(name, component, array, maximum, to_list)


def check_visible(name, component, array, maximum, to_list):
    cases = [
        (start, start + new, left)
        for start in range(10)
        for new in (0, 1, 2, 7)
        for left in (0, 1, 3)
        if left < max(start + new, 1)
    ]
    columns = [array(np.array(column, np.int32)) for column in zip(*cases, strict=True)]
    first, end = component.visible_bounds(*columns, maximum)
    assert first.dtype == end.dtype == columns[0].dtype, name
    for case, low, high in zip(cases, to_list(first), to_list(end), strict=True):
        assert set(range(low, high)) == gathered(component, *case) == set(component.visible(*case)), (name, case)
    query, left = array(np.array([[q] for q in range(3, 12)], np.int32)), array(np.array([[3]], np.int32))
    found = to_list(component.first_visible(query, left, maximum)[:, 0])
    for number, first_of in zip(range(3, 12), found, strict=True):
        assert first_of == min(p for p in range(12) if sees(component, number, p, 3)), (name, number)
