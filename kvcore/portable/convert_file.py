"""A blob or a snapshot of one spec as a file of another that differs in formats: ``convert`` for what lies in files."""

from collections.abc import Callable
from typing import NamedTuple

from kvcore.errors import SnapshotError
from kvcore.ops import Ops
from kvcore.portable.blob import head_of, opened, pages_of
from kvcore.portable.convert import Converted, convert, spec_of
from kvcore.portable.record import RequestRecord
from kvcore.portable.snapshot import SavedRequest, Snapshot, bound, parse
from kvcore.spec import CacheSpec

Target = Callable[[CacheSpec], CacheSpec]
"""From the file's spec, the one wanted."""

MadeOps = Callable[[CacheSpec], Ops]
"""A backend's verbs for a spec: encoders and decoders."""


class ConvertedFile(NamedTuple):
    """A file made of another.

    Attributes:
        data: all of it.
        source, spec: what it was of, and is.
        records: of its requests.
    """

    data: bytes
    source: CacheSpec
    spec: CacheSpec
    records: list[RequestRecord]


def converted_file(data: memoryview, target: Target, ops: MadeOps, where: str) -> ConvertedFile:
    """The blob or snapshot with its requests in other formats; nothing of it is left out.

    Args:
        data: the file, of version 2 of the portable form.
        target: gives the spec that is wanted.
        ops: gives encoders and decoders.
        where: for messages.

    Raises:
        SnapshotError: neither, damaged anywhere, of version 1, or of a spec that differs from the target in more.
        SpecError: what ``target`` raises.
    """
    try:
        saved = parse(data, where)
    except SnapshotError as no_snapshot:
        try:
            blob = opened(data, where)
        except SnapshotError:
            raise no_snapshot from None
        request, source = (blob.described, pages_of(blob)), spec_of(blob.described, where)
        spec = target(source)
        made = convert(*request, source, spec, ops(spec), where)
        return ConvertedFile(_blob(made), source, spec, [made.record])
    if not isinstance(saved, Snapshot):
        raise SnapshotError(
            got="a snapshot of version 1",
            where=where,
            allowed="one of version 2",
            hint="kvcore.load it and Cache.save it once.",
        )
    spec = target(saved.spec)
    verbs = ops(spec)
    done: list[Converted] = []
    for number, one in enumerate(saved.requests):
        if not isinstance(one, SavedRequest):
            raise SnapshotError(got=f"request {number}: {one}", where=where, allowed="requests that are whole")
        done.append(convert(one.described, one.pages, saved.spec, spec, verbs, f"{where}: request {number}"))
    data_out = bound(spec, saved.sizes, [_blob(made) for made in done])
    return ConvertedFile(data_out, saved.spec, spec, [made.record for made in done])


def _blob(made: Converted) -> bytes:
    return head_of(made.manifest) + made.pages.tobytes()
