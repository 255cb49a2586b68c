"""Integers as kvcore accepts them: whatever ``operator.index`` takes, NumPy's too; no booleans, floats or text."""

import operator
from typing import Any, cast

from kvcore.errors import KvcoreError


def as_integer(value: object) -> int | None:
    """The plain integer that ``value`` is, or None: booleans are none, nor are arrays with axes."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or getattr(value, "shape", ()) != ():
        return None
    # A framework's boolean, which some of them turn into 0 or 1.
    if str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(cast("Any", value))
    # A tensor without data raises RuntimeError, one that is traced an error of its own kind of TypeError.
    except (TypeError, RuntimeError):
        return None


def as_count(value: object, least: int = 0) -> int | None:
    """The plain integer that ``value`` is, if it is at least ``least``; None for all else."""
    number = as_integer(value)
    return None if number is None or number < least else number


def is_count(value: object, least: int = 0) -> bool:
    """True for an integer of at least ``least``; ``True`` and ``1.0`` are not counts."""
    return as_count(value, least) is not None


def check_count(kind: type[KvcoreError], where: str, value: object, least: int) -> int:
    """The value as a plain integer.

    Raises:
        kind: it is not a count of at least ``least``.
    """
    number = as_count(value, least)
    if number is None:
        # Text in quotes: "32" is none, though it looks like one.
        got = repr(value) if isinstance(value, str) else value
        raise kind(got=got, where=where, allowed=f"an integer, {least} or more")
    return number
