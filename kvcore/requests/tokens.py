"""What callers give as tokens, checked: counts, token ids, and the mapping that opens a step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, SupportsIndex, cast

from kvcore.arrays import check_plain
from kvcore.counts import as_count
from kvcore.errors import ShapeError
from kvcore.foreign import shortened


class TokenIds(Protocol):
    """Ids of tokens: a sequence or an array of integers of any kind."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Tokens = SupportsIndex | TokenIds
"""A number of tokens, or their ids."""

LONGEST_SALT = 4096
"""Bytes of UTF-8: a name or a digest; it is hashed at every look-up."""


def parse_tokens(value: object, where: str) -> tuple[int, list[int] | None]:
    """(count, ids or None) of a step's value for one request: a count >= 0 or a sequence of token ids."""
    count = as_count(value)
    if count is not None:
        return count, None
    ids = token_ids(value, where, "an integer, 0 or more, or a sequence of token ids")
    return len(ids), ids


def token_ids(value: object, where: str, allowed: str = "a sequence of token ids") -> list[int]:
    """A sequence of token ids as plain integers."""
    try:
        # An array without axes has a length only by name.
        shapeless = getattr(cast("Any", value), "shape", None) == ()
        sized = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not shapeless
        # An array's numbers are plain ones at once, not a framework's scalar each.
        plain: Any = getattr(value, "tolist", None)
        tokens = cast("Iterable[Any]", value if plain is None or not sized else plain())
    except (TypeError, RuntimeError) as error:
        # A tensor whose numbers cannot be had: a sparse one, or one without data.
        check_plain(value, where)
        raise ShapeError(got=type(value).__name__, where=where, allowed=allowed) from error
    if not sized or isinstance(value, (str, bytes, Mapping)):
        raise ShapeError(got=cast("Any", value), where=where, allowed=allowed)
    given = list(tokens)
    if set(map(type, given)) == {int} and min(given) >= 0 and max(given) < 1 << 64:
        return given
    ids: list[int] = []
    for token in given:
        number = as_count(token)
        if number is None or number >= 1 << 64:
            # What is masked is no number.
            check_plain(value, where)
            raise ShapeError(got=token, where=where, allowed="token ids, integers from 0 to 2^64 - 1")
        ids.append(number)
    return ids


def check_salt(salt: object, where: str) -> str | None:
    """A salt, or None for none; see ``is_salt``."""
    if salt is None or is_salt(salt):
        return cast("str | None", salt)
    allowed = f"text of 1 to {LONGEST_SALT:,} bytes in UTF-8, or None"
    raise ShapeError(got=shortened(salt), where=where, allowed=allowed)


def is_salt(salt: object) -> bool:
    """Whether keys can be made of a salt: text that is not empty, can be encoded, and is not huge."""
    if not isinstance(salt, str) or not 0 < len(salt) <= LONGEST_SALT:
        return False
    try:
        return len(salt.encode()) <= LONGEST_SALT
    except UnicodeEncodeError:
        return False


def as_mapping(value: object, where: str) -> Mapping[object, object]:
    """The argument of ``cache.step``, or of ``Step.commit``, if it is a mapping."""
    if value.__class__ is not dict and not isinstance(value, Mapping):
        raise ShapeError(got=type(value).__name__, where=where, allowed="a mapping {request: new tokens}")
    return cast("Mapping[object, object]", value)
