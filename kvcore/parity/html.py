"""A report as one self-contained HTML file: no scripts, nothing fetched from elsewhere, light and dark.

Everything shown comes from the report; the page knows no backend and runs no check.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvcore.errors import BackendError
from kvcore.foreign import printable
from kvcore.parity.evidence import checks, environments, evidence, most, ordered
from kvcore.parity.groups import grouped, single
from kvcore.parity.picture import draw
from kvcore.parity.records import FAILING, STATUSES, Record, Report
from kvcore.parity.show import Column, summarise

TPU_BACKEND = "jax"
"""What the name of a backend with TPU kernels contains."""


class Rung(NamedTuple):
    """One rung of the ladder of evidence, and who stands on it."""

    name: str
    meaning: str
    reached: str
    status: str


LADDER: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("portable", "equal to the reference in jax.numpy on a CPU", lambda how: how == "cpu"),
    (
        "interpreted",
        "Pallas kernels equal to the reference in the TPU interpreter, races and bounds checked",
        lambda how: "interpreter" in how.lower(),
    ),
    (
        "compiled",
        "accepted by the real TPU compiler, compiled program checked, not run",
        lambda how: "ahead of time" in how.lower(),
    ),
    ("run", "run on a TPU", lambda how: how.startswith("tpu (")),
)
"""What can be known of TPU kernels, weakest first, and which ways of running are evidence of it."""


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
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary = summarise(report)
    columns = evidence(summary)
    return environment.get_template("report.html.jinja").render(
        report=report,
        summary=summary,
        columns=columns,
        ordered=ordered(columns, summary),
        environments=environments(report),
        most=most(summary),
        checks=checks,
        verdict=_verdict(report),
        records_of=_by_cell(report),
        single=single,
        grouped=grouped,
        statuses=STATUSES,
        ladder=[Rung(name, meaning, *_reached(report, fits)) for name, meaning, fits in LADDER],
        picture=draw(report.quality),
    )


def _shown(value: Any) -> Any:
    """What the page shows of a value: text without control characters; markup is the page's own."""
    return printable(value, lines=True) if type(value) is str else value


def _verdict(report: Report) -> str:
    if report.failures:
        return f"{len(report.failures):,} of {len(report.checks):,} checks fail"
    return "everything that was compared agrees" if report.agrees else "nothing was compared"


def _by_cell(report: Report) -> Callable[[str, Column], list[Record]]:
    """The records of a verb and a column."""
    cells: dict[tuple[str, str, str], list[Record]] = {}
    for record in report.checks:
        cells.setdefault((record.verb, record.backend, record.how), []).append(record)
    return lambda verb, column: cells.get((verb, column.backend, column.how), [])


def _reached(report: Report, fits: Callable[[str], bool]) -> tuple[str, str]:
    """Who has records of a rung, with counts, and the status that colours them."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for record in report.checks:
        if TPU_BACKEND in record.backend and fits(record.how) and record.status in ("agree", *FAILING):
            cell = counts.setdefault((record.backend, record.how), {})
            cell[record.status] = cell.get(record.status, 0) + 1
    if not counts:
        return "no record", "unsupported"
    texts = [f"{backend} ({how}): {_counts(cell)}" for (backend, how), cell in counts.items()]
    fails = any(status in FAILING for cell in counts.values() for status in cell)
    return "; ".join(texts), "disagree" if fails else "agree"


def _counts(cell: dict[Any, int]) -> str:
    return ", ".join(f"{count:,} {status}" for status, count in cell.items())
