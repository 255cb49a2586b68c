"""What a request says of itself where it leaves a cache, and whether another cache can take it at its word."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import msgspec

from kvcore.errors import KvcoreError, OutOfBlocks, SnapshotError, SpecError
from kvcore.foreign import LARGEST_ID, LONGEST, shortened
from kvcore.plan import CachePlan
from kvcore.requests.request import Conversion, is_short
from kvcore.requests.tokens import is_salt
from kvcore.spec import CacheSpec, from_json, to_json

Refusal = Callable[..., KvcoreError]
"""An error of the way that something came, of ``got``, ``where`` and ``allowed``."""


MOST_CONVERSIONS = 64
"""That a request can have gone through."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request without its rows: all forms in which one leaves a cache say this of it.

    Attributes:
        length: tokens.
        floor: smallest length that the rows can be rolled back to.
        tokens: ids, or None if they are not known.
        salt: whose prefixes it may share, or None.
        checkpoints: lengths of the past states that come with it, ascending.
        converted: from which formats its rows were coded anew, first to last; empty for most, and then left out.
        approximate: whether some of its rows come of an approximate replay; left out where none do.
    """

    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None
    checkpoints: list[int]
    converted: list[Conversion] = []
    approximate: bool = False


def is_coherent(record: RequestRecord) -> bool:
    """Whether what a request that comes from elsewhere says of itself fits together."""
    tokens, lengths = record.tokens, [0, *record.checkpoints]
    if not 0 <= record.floor <= record.length <= LONGEST or not (record.salt is None or is_salt(record.salt)):
        return False
    if len(record.converted) > MOST_CONVERSIONS or not all(map(is_short, record.converted)):
        return False
    if not all(before < after <= record.length for before, after in pairwise(lengths)):
        return False
    return tokens is None or (
        len(tokens) == record.length and (not tokens or (min(tokens) >= 0 and max(tokens) <= LARGEST_ID))
    )


@lru_cache(maxsize=64)
def spec_text(spec: CacheSpec) -> str:
    """A spec as JSON, as records have it."""
    return to_json(spec)


def check_spec(spec: CacheSpec, text: str, hint: str = "Create the cache from the same spec.") -> None:
    """Refuse another spec than the cache's, naming the first difference."""
    if text == spec_text(spec):
        return
    try:
        other = from_json(text)
    except SpecError as error:
        raise SnapshotError(got=str(error), where="spec", allowed=f"digest {spec.digest[:16]}") from error
    if other.digest != spec.digest:
        raise SnapshotError(
            got=f"a spec with {first_difference(spec, other)}",
            where="spec",
            allowed=f"digest {spec.digest[:16]}",
            hint=hint,
        )


def check_length(plan: CachePlan, length: int, where: str) -> None:
    """Refuse a request that is longer than one of this cache can be.

    Raises:
        OutOfBlocks: it is.
    """
    longest = plan.longest
    if longest is not None and length > longest:
        raise OutOfBlocks(
            got=f"{length} tokens",
            where=where,
            allowed=f"{longest} tokens in one request",
            hint="Create the cache with a larger max_tokens, or max_request_tokens where that is less.",
        )


def first_difference(ours: CacheSpec, theirs: CacheSpec) -> str:
    """Path and both values of the first field in which two specs differ."""
    return difference_of(msgspec.to_builtins(ours), msgspec.to_builtins(theirs)) or "other fields"


def difference_of(ours: Any, theirs: Any) -> str | None:
    """The first difference of two trees of plain values, as ``first_difference`` says it; None if they are equal."""
    return _difference(ours, theirs, "")


def _difference(ours: Any, theirs: Any, path: str) -> str | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        left, right = cast("dict[str, Any]", ours), cast("dict[str, Any]", theirs)
        for key in [*left, *(key for key in right if key not in left)]:
            if path or key != "name":
                found = _difference(left.get(key), right.get(key), f"{path}.{key}".lstrip("."))
                if found:
                    return found
        return None
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        mine, other = cast("list[Any]", ours), cast("list[Any]", theirs)
        if len(mine) != len(other):
            return f"{path}: {len(other)} items instead of {len(mine)}"
        for number, pair in enumerate(zip(mine, other, strict=True)):
            found = _difference(*pair, f"{path}[{number}]")
            if found:
                return found
        return None
    return None if ours == theirs else f"{path} = {shortened(theirs)} instead of {ours!r}"
