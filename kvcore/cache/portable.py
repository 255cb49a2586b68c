"""The verbs of a cache that let a request leave it: export, import, snapshots."""

from collections.abc import Sequence
from os import PathLike

from kvcore.cache.base import CacheBase
from kvcore.cache.turns import exclusive
from kvcore.portable import blob as blobs
from kvcore.portable import snapshot
from kvcore.requests.manager import Request
from kvcore.requests.tokens import check_salt


class PortableVerbs(CacheBase):
    """What leaves a cache is a finished copy in canonical form, the same from every backend and layout."""

    @exclusive("export_request")
    def export_request(self, request: Request, *, checkpoints: bool = True) -> bytes:
        """All that a request holds, as one self-contained blob: a finished copy that any backend can import.

        Args:
            request: a live one.
            checkpoints: whether those of its tokens go with it, so that prompts find there what they find here. Each
                is as large as the request's rings: under ``prefix="full"`` one for every block.

        Raises:
            RequestError: stale, foreign, or still replaying the tokens of a prefix hit. StepError: a step is open.
        """
        return blobs.export(self, self._manager.check(request), checkpoints=checkpoints)

    @exclusive("import_request")
    def import_request(self, blob: bytes, into: Request | None = None, *, salt: str | None = None) -> Request:
        """Take in an exported request; generation goes on where it was.

        Digests tell damage, not deceit: whoever made the blob may have written any rows beside any ids. So it is you
        who says whom its prefixes may serve; the blob's own salt counts for nothing.

        Args:
            blob: from ``export_request`` of a cache with the same spec, on any backend.
            into: a request without tokens to fill; None admits one.
            salt: as for ``admit``: prefixes of the request, and of what follows it, may be found by requests of this
                salt. None: they are not published. With ``into`` it is that request's own salt.

        Raises:
            SnapshotError: the blob is damaged or of another spec (the first difference is named).
            OutOfSlots, OutOfBlocks: no room. ShapeError: the salt is no text. RequestError: ``into`` is stale, foreign,
            not empty or of another salt. Nothing is changed.
        """
        return blobs.import_(self, blob, into, check_salt(salt, "import_request: salt"))

    def _copy_from(self, other: "PortableVerbs", request: Request) -> Request:
        """A request with the rows of one of another cache of the same spec, on any backend, in this process.

        As export and import do it, but nothing is digested.
        """
        return self._arrive(other._leave(request))

    @exclusive("copy")
    def _leave(self, request: Request) -> blobs.Leaving:
        return blobs.leave(self, self._manager.check(request))

    @exclusive("copy")
    def _arrive(self, leaving: blobs.Leaving) -> Request:
        return blobs.arrive(self, leaving)

    def save(
        self, path: str | PathLike[str], requests: Sequence[Request] | None = None, *, checkpoints: bool = True
    ) -> None:
        """Write a verified snapshot of some or all requests; the file appears whole or not at all.

        Args:
            path: of the file.
            requests: in the order wanted; None for all live ones.
            checkpoints: as for ``export_request``.

        Raises:
            RequestError: stale, foreign, or still replaying a prefix hit. StepError: a step is open.
            OSError: the disk refused; a file of that name is as it was, or the new one, whole.
            BackendError: safetensors is not installed. SnapshotError: a layer has a component of outside code, which no
            file's spec can say.
        """
        # The bytes are a finished copy: others need not wait for the disk.
        snapshot.write(path, self._snapshot(requests, checkpoints))

    @exclusive("save")
    def _snapshot(self, requests: Sequence[Request] | None, checkpoints: bool) -> bytes:
        chosen = [self._manager.check(request) for request in (self.requests if requests is None else requests)]
        return snapshot.to_bytes(self, chosen, checkpoints=checkpoints)
