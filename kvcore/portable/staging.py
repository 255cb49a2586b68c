"""A request as pages and a manifest, and back: the one thing that every carrier moves."""

import hashlib
from typing import NamedTuple

import msgspec
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.errors import TransferError
from kvcore.foreign import UNREADABLE
from kvcore.portable.caches import Buffers, CacheInTurn
from kvcore.portable.page_digests import Array, PageDigests
from kvcore.portable.pages import PageLayout, page_layout
from kvcore.portable.rows import is_coherent, read_rows
from kvcore.portable.strips import move_at_once
from kvcore.requests.manager import Request
from kvcore.spec import CacheSpec, to_json
from kvcore.step import StepRequest, build_index

VERSION = 1

ROOT_BYTES = 32
"""Of a sha256."""

LARGEST_MANIFEST = 1 << 26
"""Bytes; ids and digests of ten million tokens take less."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an export is: everything but the pages.

    Attributes:
        version: of this and of the page layout.
        export: (exporter, number, generation) of the export that it was made for.
        spec: canonical JSON of the spec.
        length: tokens.
        floor: smallest length that the rows can be rolled back to.
        tokens: ids, or None if they are not known.
        salt: whose prefixes it may share, or None.
        digests: two lanes for every page of history, then for the record; sums over components of ``kvcore.digest``.
    """

    version: int
    export: tuple[str, int, int]
    spec: str
    length: int
    floor: int
    tokens: list[int] | None
    salt: str | None
    digests: list[tuple[int, int]]

    def encode(self) -> bytes:
        """As bytes, whose sha256 the handle carries."""
        return msgspec.msgpack.encode(self)


class Staged(NamedTuple):
    """A request ready to be moved: its manifest as bytes, and its pages."""

    manifest: bytes
    pages: Array


def root_of(manifest: bytes) -> bytes:
    """What a handle carries of a manifest."""
    return hashlib.sha256(manifest).digest()


def empty_pages(cache: Buffers, pages: int, page_bytes: int, *, on_device: bool) -> Array:
    """Pages of any content: on the host, or beside the pools of a torch cache."""
    if on_device:
        like = next(iter(cache.pools.values()))
        return like.new_empty((pages, page_bytes))
    return np.empty((pages, page_bytes), np.uint8)


def stage(cache: CacheInTurn, request: Request, export: tuple[str, int, int], *, on_device: bool = False) -> Staged:
    """Copy a request out of the pools into pages.

    Args:
        cache: of any backend; a shard of a cache stages the whole request.
        request: a live one.
        export: (exporter, number, generation) for the manifest.
        on_device: leave the pages on the device of a torch cache.

    Raises:
        RequestError: the request is still replaying the tokens of a prefix hit.
    """
    cache.manager.check_whole(request, "export")
    row, floor = cache.row(request), cache.least_length(request)
    layout = page_layout(cache.spec, floor, row.length)
    pages = empty_pages(cache, layout.pages, layout.page_bytes, on_device=on_device)
    # Padding is zeros: of the last page of history, and of the record.
    pages[max(0, layout.blocks - 1) :] = 0
    if not move_at_once(cache.ops, cache.pools, row, layout, pages):
        stage_one_by_one(cache, row, floor, layout, pages)
    manifest = Manifest(
        version=VERSION,
        export=export,
        spec=to_json(cache.spec),
        length=row.length,
        floor=floor,
        tokens=None if request.tokens is None else list(request.tokens),
        salt=request.salt,
        digests=PageDigests(cache.ops, layout).result(pages),
    )
    return Staged(manifest.encode(), pages)


def stage_one_by_one(cache: CacheInTurn, row: StepRequest, floor: int, layout: PageLayout, pages: Array) -> None:
    """Copy rows into pages component by component, on the host or on the device."""
    on_device = not isinstance(pages, np.ndarray)
    index = cache.ops.index(build_index([row], max_blocks=cache.plan.max_blocks))
    for strip in layout.paged:
        count = len(strip.numbers)
        raw = cache.ops.gather_rows(cache.pools, strip.layer, strip.role, index, columns=count)
        rows = raw.rows[0] if on_device else to_numpy(raw.rows)[0]
        full, rest = divmod(count, strip.rows)
        whole = rows[: full * strip.rows].reshape(full, strip.nbytes)
        pages[:full, strip.start : strip.stop] = whole
        if rest:
            pages[full, strip.start : strip.start + rest * strip.row_bytes] = rows[full * strip.rows :].reshape(-1)
    record = np.zeros(layout.state_pages * layout.page_bytes, np.uint8)
    held = read_rows(cache.ops, cache.pools, row, floor, growth="slot")
    for strip in layout.state:
        record[strip.start : strip.stop] = held[strip.layer, strip.role].rows.reshape(-1)
    if layout.state_pages:
        state = record.reshape(layout.state_pages, layout.page_bytes)
        pages[layout.blocks :] = cache.ops.asarray(state) if on_device else state


def parse(manifest: bytes, root: bytes) -> Manifest:
    """The manifest of a handle.

    Raises:
        TransferError: ``damaged``: these bytes are not what the handle was given for, or make no request.
    """
    if root_of(manifest) != root:
        raise TransferError(
            reason="damaged", got="a manifest of another export", where="manifest", allowed="bytes of the handle's root"
        )
    try:
        found = msgspec.msgpack.decode(manifest, type=Manifest)
    except UNREADABLE as error:
        raise TransferError(reason="damaged", got=str(error), where="manifest", allowed="as exported") from error
    if found.version != VERSION:
        raise TransferError(
            reason="damaged", got=f"version {found.version}", where="manifest", allowed=f"version {VERSION}"
        )
    if not is_coherent(found):
        got = f"{found.length} tokens, rows from {found.floor} on"
        raise TransferError(reason="damaged", got=got, where="manifest", allowed="numbers that fit together")
    return found


def layout_of(spec: CacheSpec, manifest: Manifest) -> PageLayout:
    """Where the rows lie in the pages of an export."""
    return page_layout(spec, manifest.floor, manifest.length)
