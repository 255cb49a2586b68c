"""A saved snapshot as a new cache."""

import os
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any

from kvcore.cache.cache import Cache
from kvcore.cache.create import create_cache
from kvcore.cache.state import CacheState
from kvcore.counts import as_count
from kvcore.errors import KvcoreError, OutOfBlocks, SnapshotError
from kvcore.plan import plan_cache
from kvcore.portable.saved import Saved
from kvcore.portable.snapshot import read
from kvcore.requests.manager import Request
from kvcore.requests.prefix import Policy
from kvcore.spec import CacheSpec

MOST_REQUESTS = 1 << 16
"""That a file may ask room for at once."""

UNIT_BYTES = 64
"""Of Python's integers for every slot and block."""

MOST_NAMED = 20
"""Damaged pages in one message."""


def load(
    path: str | PathLike[str],
    *,
    backend: str = "auto",
    device: str | None = None,
    requests: Sequence[int] | None = None,
    max_requests: int | None = None,
    max_tokens: int | None = None,
    max_draft_tokens: int | None = None,
    max_request_tokens: int | None = None,
    prefix: Policy = "off",
    layout: str = "auto",
    check: bool = False,
    strict: bool = True,
    canary: bool | int = False,
) -> Cache:
    """Read a snapshot into a new cache on any backend; ``cache.requests`` are in saved order.

    A file is taken at its word for ids and salts: with a ``prefix`` policy its requests serve others as they did where
    they were saved, so load only what you saved yourself, or leave ``prefix`` off.

    Args:
        path: a file that ``Cache.save`` wrote.
        backend, device, prefix, layout, check, canary: as for ``create_cache``.
        requests: numbers of the saved requests to load, in the order wanted; None loads all.
        max_requests, max_tokens, max_draft_tokens, max_request_tokens: of the new cache; None takes the saved
            cache's, or as much more as requests need that shared blocks. A file's word for them counts up to 65,536
            requests and as many bytes as this host has.
        strict: False loads the undamaged requests, leaves the others out and names their damaged pages in
            ``cache.damaged``.

    Raises:
        SnapshotError: not a snapshot, or damaged; the damaged pages of wanted requests are named. Sizes that only the
            file says, and that are more than its word counts for.
        ShapeError, SpecError, OutOfBlocks, OutOfSlots, BackendError: as for ``create_cache``; OutOfBlocks also where
            there is no memory to check the rows in.

    Example:
        >>> import tempfile
        >>> import kvcore
        >>> spec = kvcore.spec.presets.classic(layers=1, key_heads=1, key_dim=4)
        >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=2, max_tokens=512)
        >>> request = cache.admit()
        >>> folder = tempfile.TemporaryDirectory()
        >>> cache.save(folder.name + "/requests.kv")
        >>> len(kvcore.load(folder.name + "/requests.kv", backend="reference", max_requests=4).requests)
        1
        >>> folder.cleanup()
    """
    saved = read(path)
    chosen = list(range(len(saved.records))) if requests is None else list(requests)
    for place, number in enumerate(chosen):
        count = as_count(number)
        if count is None or count >= len(saved.records):
            allowed = f"numbers below {len(saved.records)}, the saved requests"
            raise SnapshotError(got=number, where="load: requests", allowed=allowed)
        chosen[place] = count
    given = {
        "max_requests": max_requests,
        "max_tokens": max_tokens,
        "max_draft_tokens": max_draft_tokens,
        "max_request_tokens": max_request_tokens,
    }
    sizes: dict[str, Any] = {
        name: getattr(saved.sizes, name) if value is None else value for name, value in given.items()
    }
    paged = any(component.growth == "block" for _, _, component in saved.spec.components())
    if max_tokens is None and paged:
        # Requests that shared blocks when they were saved have blocks of their own when they are loaded.
        block = saved.spec.block_tokens
        sizes["max_tokens"] = max(
            sizes["max_tokens"], sum(-(-record.length // block) * block for n in chosen if (record := saved.records[n]))
        )
    if None in (max_requests, max_tokens):
        _check_word(saved.spec, sizes, f"snapshot {path}")
    settings: dict[str, Any] = {"prefix": prefix, "layout": layout, "check": check, "canary": canary}
    cache = create_cache(saved.spec, backend=backend, device=device, **settings, **sizes)
    try:
        take_in(cache, saved, chosen, where=f"snapshot {path}", strict=strict)
    except KvcoreError:
        raise
    except MemoryError as error:
        # A file may describe rows so wide that the pools fit and what checks the rows does not.
        raise OutOfBlocks(
            got="more than the memory that is left",
            where=f"snapshot {path}",
            allowed="rows that can be checked in it",
            hint=(str(error).splitlines() or [""])[0][:200],
        ) from error
    return cache


def _check_word(spec: CacheSpec, sizes: dict[str, Any], where: str) -> None:
    """Refuse sizes that a file declares, before anything is made of them.

    Raises:
        SnapshotError: more requests than anybody serves at once, or more bytes than this host has.
    """
    plan = plan_cache(spec, **sizes)
    # Beside its bytes, a unit has a few integers.
    needed = plan.nbytes + UNIT_BYTES * (plan.slots + plan.blocks)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.slots > MOST_REQUESTS or needed > memory:
        raise SnapshotError(
            got=f"{plan.slots} requests and {plan.blocks} blocks, {needed} bytes",
            where=where,
            allowed=f"{MOST_REQUESTS} requests, {memory} bytes",
            hint="Give max_requests and max_tokens to load it into a cache of your own size.",
        )


def take_in(cache: Cache, saved: Saved, chosen: Sequence[int], *, where: str, strict: bool = True) -> None:
    """Check the pages of the chosen saved requests and admit those that are whole; see ``load``."""
    damaged = {number: saved.damage(number, cache.ops) for number in chosen}
    names = [str(piece) for pieces in damaged.values() for piece in pieces]
    if strict and names:
        raise SnapshotError(
            got="; ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED)),
            where=where,
            allowed="pages of their digests",
            hint="strict=False loads the requests that are whole.",
        )
    cache.damaged = tuple(names)
    for number in chosen:
        if not damaged[number]:
            cache.exclusive("load", partial(_restore, saved, number))


def _restore(saved: Saved, number: int, state: CacheState) -> Request:
    return saved.take_in(state, number)
