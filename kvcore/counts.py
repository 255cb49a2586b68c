"""Counts as kvcore accepts them: plain integers, never booleans, floats or text."""

from kvcore.errors import KvcoreError


def is_count(value: object, least: int = 0) -> bool:
    """True for an ``int`` of at least ``least``; ``True`` and ``1.0`` are not counts."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(kind: type[KvcoreError], where: str, value: object, least: int) -> None:
    """Raise ``kind`` unless ``value`` is a count of at least ``least``."""
    if not is_count(value, least):
        raise kind(got=value, where=where, allowed=f"an integer, {least} or more")
