"""What a parity report holds: data only, the same in memory and in the file."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvcore.conformance.locate import Mismatch
from kvcore.conformance.verb import Rule
from kvcore.errors import SpecError
from kvcore.foreign import UNREADABLE, shortened
from kvcore.ops.tolerances import Bound
from kvcore.parity.quality import Quality

SCHEMA = "kvcore.parity/1"

Status = Literal["agree", "disagree", "error", "unsupported", "known_gap", "unavailable"]

STATUSES: dict[Status, str] = {
    "agree": "same bytes, or values within the tolerance",
    "disagree": "other bytes or values than the reference's",
    "error": "the backend raised, or a known gap has closed and must be taken off its list",
    "known_gap": "disagrees or raises, as the backend's own list of gaps says",
    "unsupported": "the backend does not declare what the check needs",
    "unavailable": "the backend cannot run here",
}
"""Every status and its meaning, the good one first; all but it and the last three fail a run."""

FAILING: frozenset[Status] = frozenset({"disagree", "error"})


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One check of one backend.

    Attributes:
        check: ``verb/formats/layout/shape``; stable, and the source of the check's seeds.
        backend: the backend's name.
        how: how it ran: ``cpu``, ``cuda (NVIDIA H100)``, ``cpu, Triton interpreter`` … Empty if it did not.
        status: see ``STATUSES``.
        rule: ``storage``, ``arithmetic`` or ``selection``.
        max_abs: largest finite difference of values.
        max_ulp: the same in steps of the result's precision.
        mismatches: elements that break the rule.
        first_mismatch: the first of them; None where there is none.
        detail: why there is no result, or a remark on one.
        seconds: time in the backend's verbs and in comparing, inputs not counted.
    """

    check: str
    backend: str
    how: str
    status: Status
    rule: Rule
    max_abs: float = 0.0
    max_ulp: int = 0
    mismatches: int = 0
    first_mismatch: Mismatch | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def verb(self) -> str:
        """The verb that was checked."""
        return self.check.split("/", 1)[0]


class SpecRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The spec that was checked: records of different digests do not speak of the same thing."""

    name: str
    digest: str


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backend's part of one run: on what it ran, and with which versions.

    Attributes:
        backend: name.
        how: as in its records.
        device: as the verbs name it; empty if the backend could not run.
        reason: why it could not, or empty.
        kvcore: version.
        commit: git commit of the checkout, with ``+`` if it had changes; None outside one.
        python: version.
        versions: distribution -> version, of what is installed.
        platform: operating system and machine.
        command: what was typed.
    """

    backend: str
    how: str
    device: str
    reason: str
    kvcore: str
    commit: str | None
    python: str
    versions: dict[str, str]
    platform: str
    command: str


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole report.

    Attributes:
        schema: version of this file format.
        spec: what was checked.
        runs: who was checked, where and how.
        tolerances: the table that the arithmetic rule used.
        checks: the records, by backend, in the order of the checks.
        quality: how the formats compare on one sample, for the picture.
    """

    schema: str
    spec: SpecRef
    runs: tuple[Run, ...]
    tolerances: tuple[Bound, ...]
    checks: tuple[Record, ...]
    quality: tuple[Quality, ...] = ()

    @property
    def failures(self) -> tuple[Record, ...]:
        """Records that make a run fail."""
        return tuple(record for record in self.checks if record.status in FAILING)

    @property
    def agrees(self) -> bool:
        """True if something was compared and nothing failed: no evidence is not agreement."""
        return not self.failures and any(record.status == "agree" for record in self.checks)


class _Head(msgspec.Struct):
    """What a report begins with: the only field that is looked at before it is known to be one."""

    schema: Any = None


GZIP = b"\x1f\x8b"

LARGEST_BYTES = 1 << 27
"""Of a report as JSON: sixteen times the largest that there is."""


MOST_QUALITIES = 64
"""Formats that a picture has room for."""


def write(report: Report, *, packed: bool = False) -> bytes:
    """The report as JSON, packed by gzip on request (to a thirtieth) and then the same bytes for the same report."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    return gzip.compress(text, mtime=0) if packed else text


def read(path: str | Path) -> Report:
    """A report from a file, packed or not.

    Raises:
        SpecError: the file cannot be read or is not a report of this schema.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        allowed = f"a parity report of schema {SCHEMA}"
        raise SpecError(got=error.strerror or str(error), where=str(path), allowed=allowed) from error
    return parse(content, str(path))


def parse(content: bytes, where: str = "record") -> Report:
    """A report from a file's bytes; see ``read``."""
    allowed = f"a parity report of schema {SCHEMA}"
    try:
        text = _unpacked(content)
        fits = len(text) <= LARGEST_BYTES
        # What else there is is skipped until it is known to be a report: its objects take many times its bytes.
        schema = msgspec.json.decode(text, type=_Head).schema if fits else None
        report = msgspec.json.decode(text, type=Report) if schema == SCHEMA else None
    except (gzip.BadGzipFile, EOFError, zlib.error, *UNREADABLE) as error:
        raise SpecError(got=str(error), where=where, allowed=allowed) from error
    if report is None:
        got = f"schema {shortened(schema)}" if fits else f"more than {LARGEST_BYTES} bytes"
        raise SpecError(got=got, where=where, allowed=allowed)
    for record in report.checks:
        if record.check.count("/") < 3:
            raise SpecError(
                got=f"check {shortened(record.check)}", where=where, allowed="ids of verb/formats/layout/shape"
            )
    if len(report.quality) > MOST_QUALITIES or not all(quality.bits > 0 for quality in report.quality):
        got = f"{len(report.quality)} formats for the picture"
        raise SpecError(got=got, where=where, allowed=f"{MOST_QUALITIES} or fewer, each of more than 0 bits")
    return report


def _unpacked(content: bytes) -> bytes:
    """The content, unpacked if it is packed: a little more than may be, at most, however much a file unpacks to."""
    if not content.startswith(GZIP):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        return file.read(LARGEST_BYTES + 1)
