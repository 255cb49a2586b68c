"""What callers give as tokens, checked: counts, token ids, and the mapping that opens a step."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvcore.counts import as_count
from kvcore.errors import ShapeError


def parse_tokens(value: object, where: str) -> tuple[int, list[int] | None]:
    """(count, ids or None) of a step's value for one request: a count >= 0 or a sequence of token ids."""
    count = as_count(value)
    if count is not None:
        return count, None
    ids = token_ids(value, where)
    return len(ids), ids


def token_ids(value: object, where: str) -> list[int]:
    """A sequence of token ids as plain integers."""
    sized = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    # An array without axes has a length only by name.
    if not sized or isinstance(value, (str, bytes, Mapping)) or getattr(cast("Any", value), "shape", None) == ():
        raise ShapeError(
            got=cast("Any", value), where=where, allowed="an integer, 0 or more, or a sequence of token ids"
        )
    ids: list[int] = []
    # An array's numbers are plain ones at once, not a framework's scalar each.
    plain: Any = getattr(value, "tolist", None)
    for token in cast("Iterable[Any]", value if plain is None else plain()):
        number = as_count(token)
        if number is None or number >= 1 << 64:
            raise ShapeError(got=token, where=where, allowed="token ids, integers from 0 to 2^64 - 1")
        ids.append(number)
    return ids


def check_salt(salt: object, where: str) -> str | None:
    """A salt: text that is not empty, or None."""
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise ShapeError(got=salt, where=where, allowed="text that is not empty, or None")


def as_mapping(value: object) -> Mapping[object, object]:
    """The argument of ``cache.step``, if it is a mapping."""
    if not isinstance(value, Mapping):
        raise ShapeError(got=type(value).__name__, where="step", allowed="a mapping {request: new tokens}")
    return cast("Mapping[object, object]", value)
