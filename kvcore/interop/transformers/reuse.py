"""Prefixes of prompts that a ``KVCache`` is told: what they are found by, and rows that start equally long."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

import kvcore
from kvcore import Request
from kvcore.errors import RequestError, ShapeError, SpecError
from kvcore.requests.prefix import Policy
from kvcore.spec import CacheSpec


class Prompt(NamedTuple):
    """One row's prompt: its ids, padding included, and what else its rows depend on."""

    ids: list[int]
    salt: str | None


def check_reusable(
    policy: Policy, *, static: bool, storage: Literal["paged", "slot"] | None, spec: CacheSpec | None
) -> None:
    """Refuse what leaves nothing that a later prompt could take over, and rows whose replay the model does not know."""
    if policy in ("zero", "approximate"):
        raise SpecError(got=repr(policy), where="prefix", allowed="'off', 'full' or kvcore.Periodic(tokens)")
    in_slots = spec is not None and any(layer.kv is not None and layer.kv.storage == "slot" for layer in spec.layers)
    if static or storage == "slot" or in_slots:
        raise SpecError(
            got="static=True" if static else "storage='slot'",
            where="KVCache: prefix",
            allowed="rows in blocks, which others can take over",
            hint="Leave it out, or prefix.",
        )


def prompts_of(tokens: Any, mask: Any, rows: int, salt: str | None, policy: Policy) -> list[Prompt]:
    """The rows of a table of ids, each with its padding in its salt."""
    if policy == "off":
        raise SpecError(
            got="prefix='off'", where="KVCache.admit", allowed="a cache made with prefix='full' or Periodic"
        )
    ids = torch.as_tensor(tokens)
    if ids.ndim != 2 or not ids.numel() or ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64):
        raise ShapeError(
            got=f"{ids.dtype} {list(ids.shape)}",
            where="KVCache.admit: tokens",
            allowed="ids [rows, tokens], none empty",
        )
    if len(ids) > rows:
        raise RequestError(got=f"{len(ids)} rows", where="KVCache.admit", allowed=f"at most {rows}: batch × beams")
    if salt is not None and not isinstance(salt, str):
        raise ShapeError(got=salt, where="KVCache.admit: salt", allowed="text or None")
    padding = _padding(mask, ids)
    salts = [f"{pad} of padding" * bool(pad) + (f"; {salt}" if pad and salt else salt or "") for pad in padding]
    return [Prompt(row, own or None) for row, own in zip(ids.tolist(), salts, strict=True)]


def _padding(mask: Any, ids: torch.Tensor) -> list[int]:
    """Positions at the left of every row that are no tokens."""
    if mask is None:
        return [0] * len(ids)
    seen = torch.as_tensor(mask).to(ids.device) != 0
    if seen.shape != ids.shape or not bool((seen == (seen.cumsum(1) > 0)).all()) or not bool(seen[:, -1].all()):
        raise ShapeError(
            got=f"a mask {list(seen.shape)}",
            where="KVCache.admit: attention_mask",
            allowed=f"{list(ids.shape)} of 0 at the left and 1 from the first token on",
        )
    return (~seen).sum(1).tolist()


def admitted(cache: kvcore.Cache, prompts: Sequence[Prompt]) -> list[Request]:
    """A request for every prompt, all of one length: the longest that all of them can take over."""
    length = len(prompts[0].ids) - 1
    found: set[int] = set()
    while len(found) != 1:
        found = {cache.restorable(each.ids, length, salt=each.salt).length for each in prompts}
        length = min(found)
    requests = _rows(cache, prompts, length)
    if len({request.length for request in requests}) > 1:
        # Room for one row has cost what another was to take over.
        for request in requests:
            cache.release(request)
        requests = _rows(cache, prompts, 0)
    return requests


def _rows(cache: kvcore.Cache, prompts: Sequence[Prompt], most: int) -> list[Request]:
    requests: list[Request] = []
    try:
        for each in prompts:
            requests.append(cache.admit(each.ids, salt=each.salt, reuse=most))  # noqa: PERF401 (kept if one is refused)
    except BaseException:
        for request in requests:
            cache.release(request)
        raise
    return requests


def keep(cache: kvcore.Cache, requests: Sequence[Request]) -> None:
    """Keep all that rows hold, right behind their prompts."""
    for request in requests:
        # Refused where prefixes were forgotten since, or ids with a crop.
        with contextlib.suppress(RequestError):
            cache.checkpoint(request)
