"""What is changed about an input that somebody else could have written: values, structure, text, bytes.

Trees are what msgpack and JSON make of an input: dicts, lists, numbers, text, bytes. Every choice is drawn from the
random numbers that are given, so that an input is made again from its seed.
"""

import random
from collections.abc import Sequence
from typing import Any

INTEGERS = (
    -1,
    0,
    1,
    2,
    255,
    10**8,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63 - 1,
    2**64 - 1,
    -(2**31),
    -(2**63),
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    "",
    "0",
    "-1",
    "../outside",
    "/etc/passwd",
    "\x1b[2J\x1b]0;title\x07",
    "\u202etxt.exe",
    "\u2028",
    "\0",
    "a" * 5000,
    [],
    {},
    [[]],
    {"": {}},
    [0] * 2000,
    [-1] * 37,
)
DEEP = (40, 900, 5000)
DEEPEST = 12
"""Levels of a tree that are looked at; no valid input has more."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a tree but its root; of long lists only the ends, of deep ones only the beginning."""
    found = []
    if len(path) > DEEPEST:
        return []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
        items = items if len(items) <= 8 else [*items[:4], *items[-4:]]
    else:
        return []
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def at(tree: Any, path: Sequence[Any]) -> Any:
    """What lies at a path."""
    for key in path:
        tree = tree[key]
    return tree


def hostile_value(choice: random.Random, old: Any, sibling: Any) -> Any:
    """Something to stand where ``old`` stood; ``sibling`` is what another valid input has there."""
    kind = choice.choice(("integer", "other", "near", "type", "sibling", "wrap", "resize"))
    if kind == "sibling" and sibling is not None:
        return sibling
    if kind == "near" and isinstance(old, int) and not isinstance(old, bool):
        return choice.choice((old - 1, old + 1, -old, 2 * old, old ^ 1 << choice.randrange(40)))
    if kind == "type":
        return choice.choice(
            (str(old)[:5000], [old], {"value": old}, float(len(str(old)[:99])), repr(old)[:99].encode())
        )
    if kind == "wrap":
        for _ in range(choice.choice(DEEP)):
            old = [old]
        return old
    if kind == "resize" and isinstance(old, (str, bytes, list)):
        return choice.choice((old[: len(old) // 2], old + old, old[1:], old[::-1], old[:0]))
    return choice.choice(INTEGERS) if kind in ("integer", "near") else choice.choice(OTHERS)


def changed(choice: random.Random, tree: Any, sibling: Any) -> str:
    """Change one thing in a tree of dicts and lists, in place; returns what."""
    paths = places(tree)
    if not paths:
        return "nothing"
    path = choice.choice(paths)
    holder, key = at(tree, path[:-1]), path[-1]
    kind = choice.choices(("replace", "delete", "repeat", "swap", "rename", "add"), (10, 2, 2, 1, 1, 1))[0]
    if kind == "delete":
        del holder[key]
    elif kind == "repeat" and isinstance(holder, list):
        holder[key:key] = [holder[key]] * choice.choice((1, 2, 1000))
    elif kind == "swap":
        other = choice.choice(paths)
        place = at(tree, other[:-1]) if other[: len(path)] != path and path[: len(other)] != other else holder
        last = other[-1] if place is not holder else key
        holder[key], place[last] = place[last], holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[choice.choice(("", "\x1b[31m", f"{key}x", "__metadata__", "0.kv"))] = holder.pop(key)
    elif kind == "add":
        value = choice.choice((*INTEGERS, *OTHERS))
        if isinstance(holder, dict):
            holder["more"] = value
        else:
            holder.append(value)
    else:
        try:
            known = at(sibling, path)
        except (KeyError, IndexError, TypeError):
            known = None
        holder[key] = hostile_value(choice, holder[key], known)
        kind = "replace"
    return f"{kind} {'.'.join(map(str, path))}"


def changed_bytes(choice: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """(what, the bytes after it): flips, cuts, repeats, splices, foreign beginnings."""
    kind = choice.choice(
        ("flip", "flips", "byte", "cut", "lose", "repeat", "insert", "splice", "number", "nest", "empty")
    )
    bad = bytearray(data)
    first = choice.randrange(len(data)) if data else 0
    size = min(choice.choice((1, 2, 4, 8, 64, 4096)), len(data) - first)
    if kind in ("flip", "flips") and bad:
        for _ in range(1 if kind == "flip" else choice.randrange(2, 20)):
            bad[choice.randrange(len(bad))] ^= 1 << choice.randrange(8)
    elif kind == "byte" and bad:
        bad[first] = choice.choice((0, 0x7F, 0x80, 0xC0, 0xDB, 0xDD, 0xDF, 0xFF, 0x1B, 0x22, 0x5B, 0x7B))
    elif kind == "cut":
        del bad[first:]
    elif kind == "lose":
        del bad[first : first + size]
    elif kind == "repeat":
        bad[first:first] = data[first : first + size] * choice.choice((1, 2, 50))
    elif kind == "insert":
        bad[first:first] = choice.randbytes(size)
    elif kind == "splice":
        bad[first:] = other[choice.randrange(len(other) + 1) :]
    elif kind == "number":
        value = choice.choice((2**32 - 1, 2**31, 2**40, 2**63, 2**64 - 1))
        bad[first : first + 8] = value.to_bytes(8, choice.choice(("big", "little")))
    elif kind == "nest":
        bad[first:first] = choice.choice((b"[", b'{"a":', b"\x91", b"\x81\xa1a")) * choice.choice((900, 100_000))
    elif kind == "empty":
        bad = bytearray(choice.choice((b"", b"\0", b"[]", b"{}", b"null", b"\xc0", b"\x80", b"\xff" * 9)))
    return f"{kind} at {first}", bytes(bad)
