"""A report as one self-contained HTML file: no scripts, nothing fetched from elsewhere, light and dark.

Everything shown comes from the report; the page knows no backend and runs no check.
"""

import math
from typing import Any, NamedTuple

from kvcore.errors import BackendError
from kvcore.parity.records import FAILING, STATUSES, Record, Report
from kvcore.parity.show import cell_text, summarise

PICTURE = (640, 300)
MARGIN = (58, 16, 44, 18)
"""Left, right, bottom and top room for the axes, in picture units."""


class Point(NamedTuple):
    """One format in the quality picture: place, label, and the label's place."""

    x: float
    y: float
    label: str
    anchor: str


class Rung(NamedTuple):
    """One rung of the ladder of evidence, and who stands on it."""

    name: str
    meaning: str
    reached: str


LADDER = (
    ("portable", "equal to the reference in jax.numpy on a CPU", ("jax", "cpu")),
    (
        "interpreted",
        "Pallas kernels equal to the reference in the TPU interpreter, races and bounds checked",
        ("interpreter",),
    ),
    ("compiled", "accepted by the real TPU compiler, compiled program checked, not run", ("ahead of time",)),
    ("run", "run on a TPU", ("tpu v",)),
)
"""What can be known of TPU kernels, weakest first; the words are looked for in how a column ran."""


def render(report: Report) -> str:
    """The page.

    Raises:
        BackendError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise BackendError(
            got="jinja2 is not installed",
            where="parity html",
            allowed="reports as HTML with jinja2",
            hint='pip install "kvcore[report]"',
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvcore.parity"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary = summarise(report)
    return environment.get_template("report.html.jinja").render(
        report=report,
        summary=summary,
        cell_text=cell_text,
        verdict=_verdict(report),
        status_of=_status_of,
        records_of=lambda verb, column: _records_of(report, verb, column),
        statuses=STATUSES,
        ladder=[Rung(name, meaning, _reached(report, words)) for name, meaning, words in LADDER],
        points=_points(report),
        ticks=_ticks(),
        picture=PICTURE,
        margin=MARGIN,
    )


def _verdict(report: Report) -> str:
    if report.failures:
        return f"{len(report.failures)} of {len(report.checks)} checks fail"
    return "everything that was compared agrees" if report.agrees else "nothing was compared"


def _status_of(cell: Any) -> str:
    """The status that colours a cell: a failing one if there is any, else the most frequent."""
    if cell is None:
        return "none"
    for status in FAILING:
        if status in cell.counts:
            return status
    return max(cell.counts, key=lambda status: cell.counts[status])


def _records_of(report: Report, verb: str, column: Any) -> list[Record]:
    """A cell's records, those that fail first."""
    found = [
        record
        for record in report.checks
        if record.verb == verb and (record.backend, record.how) == (column.backend, column.how)
    ]
    return sorted(found, key=lambda record: (record.status not in FAILING, record.check))


def _reached(report: Report, words: tuple[str, ...]) -> str:
    names = sorted(
        {
            f"{record.backend} ({record.how})"
            for record in report.checks
            if record.status == "agree"
            and "jax" in record.backend
            and all(word in f"{record.backend} {record.how}".lower() for word in words)
        }
    )
    return ", ".join(names) or "no record"


def _points(report: Report) -> list[Point]:
    """Formats in the picture: bits a channel to the right, error upwards on a log scale."""
    return [
        Point(_x(quality.bits), _y(quality.error), quality.format, "end" if quality.bits > 24 else "start")
        for quality in report.quality
        if quality.error > 0
    ]


def _ticks() -> dict[str, list[tuple[float, str]]]:
    bits = [4, 8, 16, 32]
    errors = [1e-1, 1e-2, 1e-3, 1e-4]
    return {"x": [(_x(bit), str(bit)) for bit in bits], "y": [(_y(error), f"{error:g}") for error in errors]}


def _x(bits: float) -> float:
    left, right, _, _ = MARGIN
    return left + (math.log2(bits) - 1.8) / 3.4 * (PICTURE[0] - left - right)


def _y(error: float) -> float:
    _, _, bottom, top = MARGIN
    return top + (-math.log10(error) - 0.5) / 4.5 * (PICTURE[1] - top - bottom)
