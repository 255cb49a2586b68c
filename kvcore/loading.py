"""A saved snapshot as a new cache."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvcore.cache import Cache, create_cache
from kvcore.content import owned, positions_of, to_raw
from kvcore.errors import SnapshotError
from kvcore.prefix import Policy
from kvcore.snapshot import damage, read


def load(
    path: str | PathLike[str],
    *,
    backend: str = "auto",
    device: str | None = None,
    requests: Sequence[int] | None = None,
    max_requests: int | None = None,
    max_tokens: int | None = None,
    max_draft_tokens: int | None = None,
    prefix: Policy = "off",
    layout: str = "auto",
    check: bool = False,
    strict: bool = True,
) -> Cache:
    """Read a snapshot into a new cache on any backend; ``cache.requests`` are in saved order.

    Args:
        path: a file that ``Cache.save`` wrote.
        backend, device, prefix, layout, check: as for ``create_cache``.
        requests: numbers of the saved requests to load, in the order wanted; None loads all.
        max_requests, max_tokens, max_draft_tokens: of the new cache; None takes the saved cache's.
        strict: False loads the undamaged requests and leaves the damaged ones out.

    Raises:
        SnapshotError: not a snapshot, or damaged; the damaged pages of wanted requests are named.
        ShapeError, SpecError, OutOfBlocks, OutOfSlots, BackendError: as for ``create_cache``.
    """
    saved = read(path)
    chosen = list(range(len(saved.requests))) if requests is None else list(requests)
    for number in chosen:
        if number not in range(len(saved.requests)):
            allowed = f"0 to {len(saved.requests) - 1}"
            raise SnapshotError(got=number, where="load: requests", allowed=allowed)
    given = {"max_requests": max_requests, "max_tokens": max_tokens, "max_draft_tokens": max_draft_tokens}
    sizes: dict[str, Any] = {name: saved.sizes[name] if value is None else value for name, value in given.items()}
    cache = create_cache(saved.spec, backend=backend, device=device, prefix=prefix, layout=layout, check=check, **sizes)
    damaged = {number: damage(saved, cache.plan, cache.ops, number) for number in chosen}
    if strict and any(damaged.values()):
        names = [f"request {number}: {page}" for number, pages in damaged.items() for page in pages]
        raise SnapshotError(
            got="; ".join(names),
            where=f"snapshot {path}",
            allowed="pages of their digests",
            hint="strict=False loads the requests that are whole.",
        )
    for number in chosen:
        if damaged[number]:
            continue
        content = {
            (layer, role): to_raw(
                cache.ops,
                saved.arrays[f"{number}.{layer}.{role}"],
                positions_of(component, saved.requests[number].length),
            )
            for layer, role, component in owned(saved.spec)
        }
        cache.install(cache.admit(), saved.requests[number].length, saved.requests[number].tokens, content)
    return cache
