"""Left padding of a step's requests, checked at the door: how many of a request's first positions are no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcore.counts import check_count
from kvcore.errors import ShapeError
from kvcore.requests.request import Request
from kvcore.spec import CacheSpec


def left_padding_of(spec: CacheSpec, requests: Sequence[Request], given: object) -> list[int] | None:
    """Positions of padding of each of the step's requests, 0 where none is given; None: the step has none.

    Raises:
        ShapeError: not a mapping of the step's requests to counts; or a layer that compresses padding with tokens, or
            whose ring drops rows by chunks that do not begin with the first token.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ShapeError(got=type(given).__name__, where="step: left_padding", allowed="{request: positions}")
    counts = dict(cast("Mapping[Any, Any]", given))
    found = [counts.pop(request, 0) for request in requests]
    if counts:
        raise ShapeError(got=next(iter(counts)), where="step: left_padding", allowed="requests of the step")
    found = [check_count(ShapeError, "step: left_padding", count, 0) for count in found]
    for number, layer in enumerate(spec.all_layers):
        kv = layer.kv
        if kv is None:
            raise ShapeError(
                got="left padding",
                where=f"step: {spec.path(number)}",
                allowed="classic layers",
                hint="Give each request its own tokens alone: requests of a step may differ in length.",
            )
        if kv.storage != "ring" or kv.chunk is None:
            continue
        for count in found:
            if count % kv.chunk:
                raise ShapeError(
                    got=f"{count} positions of left padding",
                    where=f"step: {spec.path(number)}",
                    allowed=f"multiples of the chunk, {kv.chunk}",
                    hint="A ring of whole chunks cannot hold shifted ones: storage='slot' or 'paged' can.",
                )
    return found
