"""The conformance kit as a pytest plugin: ``pytest --pyargs kvcore.conformance --kv-backend=NAME --kv-report=FILE``.

pytest loads this module in every run of an environment that has kvcore, so it imports nothing until a test of the kit
is collected. There are no skips: a backend that was named and cannot run is a usage error; under ``all`` it is a line
in the summary and ``unavailable`` in the report.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcore.conformance.suite import Check
    from kvcore.parity.run import Subject
    from kvcore.spec import CacheSpec

KIT_NAME, TESTS = "kvcore.conformance", "kvcore.testing.kit"
"""What the command line calls the kit, and the package that has its tests."""

pytest.register_assert_rewrite(TESTS, "kvcore.testing.isolated")

ALL = "all"
RECORD = "kvcore.record"
"""Name of the property under which a test carries its record, through JUnit XML and across processes."""


class Kit:
    """What one run of the kit checks, worked out from the options.

    Attributes:
        spec: whose checks are run.
        subjects: backends that can run here.
        absent: backends that cannot, which only ``all`` allows.
    """

    def __init__(self, config: pytest.Config) -> None:
        from kvcore.conformance.specs import SPECS
        from kvcore.errors import KvcoreError
        from kvcore.parity.run import Subject
        from kvcore.plugins import registry
        from kvcore.spec.named import load_spec

        try:
            self.spec: CacheSpec = load_spec(
                str(config.getoption("--kv-spec")), "--kv-spec", **{name: make() for name, make in SPECS.items()}
            )
            known = registry()
        except KvcoreError as error:
            raise pytest.UsageError(str(error)) from error
        names = list(dict.fromkeys(config.getoption("--kv-backend") or ["reference"]))
        every = ALL in names
        for name in names:
            if name != ALL and name not in known.backends:
                reason = f" ({known.failed[name]})" if name in known.failed else ""
                raise pytest.UsageError(
                    f"--kv-backend={name}: no such backend{reason}; have {', '.join(known.backends)}"
                )
        self.device: str | None = config.getoption("--kv-device")
        infos = [info for name, info in known.backends.items() if every or name in names]
        found = [Subject(info, self.device) for info in infos]
        self.subjects = [subject for subject in found if not subject.reason]
        self.absent = [subject for subject in found if subject.reason]
        for subject in self.absent:
            if subject.info.name in names:
                raise pytest.UsageError(f"--kv-backend={subject.info.name} cannot run here: {subject.reason}")
        self._sampled = bool(config.getoption("--kv-sample"))
        self._checks: tuple[Check, ...] | None = None

    @property
    def checks(self) -> "tuple[Check, ...]":
        """The checks of the spec, or the sample of them that was asked for, made at first use."""
        from kvcore.conformance.suite import checks_of, sample_of

        if self._checks is None:
            every = checks_of(self.spec)
            self._checks = tuple(sample_of(every)) if self._sampled else every
            for subject in self.subjects:
                subject.introduce(self._checks[0].plan)
        return self._checks

    def subject(self, name: str) -> "Subject":
        """The backend of that name, which has said how it runs."""
        found = next(subject for subject in self.subjects if subject.info.name == name)
        if not found.how:
            found.introduce(self.checks[0].plan)
        return found


KIT = pytest.StashKey[Kit]()


def kit_of(config: pytest.Config) -> Kit:
    """The run's kit, worked out at first use.

    Raises:
        pytest.UsageError: an unknown backend or spec, or a named backend that cannot run here.
    """
    if KIT not in config.stash:
        config.stash[KIT] = Kit(config)
    return config.stash[KIT]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, all of which start with ``--kv-``."""
    group = parser.getgroup("kvcore", "kvcore: conformance of cache backends (with --pyargs kvcore.conformance)")
    group.addoption(
        "--kv-backend",
        action="append",
        metavar="NAME",
        help="backend to check, may be repeated; 'all' for every one that can run here (default: reference)",
    )
    group.addoption("--kv-device", metavar="DEVICE", help="device of the backends (default: each one's own choice)")
    group.addoption(
        "--kv-spec",
        default="conformance",
        metavar="NAME|FILE",
        help="preset or JSON file whose roles and formats are checked (default: all there are)",
    )
    group.addoption("--kv-report", metavar="FILE", help="write a parity report, for kvcore parity merge and show")
    group.addoption(
        "--kv-sample",
        action="store_true",
        help="of every verb and formats, each shape in one layout only: two fifths of the checks",
    )
    group.addoption(
        "--kv-shard",
        metavar="I/N",
        help="run only part I (from 0) of N; the parts' reports together, merged, are the whole run's",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the tests under the kit's name, and refuse at once what cannot be run or written."""
    if config.option.pyargs:
        config.args = [tests_of(given) for given in config.args]
    report = config.getoption("--kv-report")
    if report and not Path(report).absolute().parent.is_dir():
        raise pytest.UsageError(f"--kv-report={report}: no such folder")
    shard_of(config)
    # A backend that was named must run, whether or not a test asks for it.
    if config.getoption("--kv-backend") or report:
        kit_of(config)


def tests_of(given: str) -> str:
    """An argument of ``--pyargs``: the kit, or a part of it, as the package that has its tests."""
    rest = given.removeprefix(KIT_NAME)
    return TESTS + rest if given != rest and rest[:1] in ("", ".", ":") else given


def shard_of(config: pytest.Config) -> tuple[int, int]:
    """(number, of how many) parts of the kit this process runs.

    Raises:
        pytest.UsageError: ``--kv-shard`` is not I/N with 0 <= I < N.
    """
    given = str(config.getoption("--kv-shard") or "0/1")
    number, _, total = given.partition("/")
    if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise pytest.UsageError(f"--kv-shard={given}: I/N, with I from 0 to N - 1")
    return int(number), int(total)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this process's part of the kit.

    Checks of the same formats and layout stay together, since they need the same compiled code.
    """
    number, total = shard_of(config)
    if total == 1:
        return
    groups: dict[str, int] = {}
    parts: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {}).get("kv_check")
        group = item.nodeid if given is None else "/".join(given[0].id.split("/")[1:3])
        mine = groups.setdefault(group, len(groups)) % total == number
        parts[mine].append(item)
    config.hook.pytest_deselected(items=parts[False])
    items[:] = parts[True]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every check of every backend, or for every backend."""
    if "kv_check" in metafunc.fixturenames:
        kit = kit_of(metafunc.config)
        pairs = [(check, subject) for subject in kit.subjects for check in kit.checks]
        ids = [f"{subject.info.name}-{check.id}" for check, subject in pairs]
        metafunc.parametrize("kv_check", pairs, ids=ids)
    if "kv_backend" in metafunc.fixturenames:
        metafunc.parametrize("kv_backend", [subject.info.name for subject in kit_of(metafunc.config).subjects])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Let an interpreter of kernels overflow in silence, as hardware does.

    It computes in NumPy, which warns; kernels scale the channels of a whole tile, also those that are not stored so.
    """
    given = getattr(getattr(item, "callspec", None), "params", {})
    if "kv_check" in given:
        how = given["kv_check"][1].how
    elif "kv_backend" in given:
        how = kit_of(item.config).subject(given["kv_backend"]).how
    else:
        how = ""
    if not how.endswith("interpreter"):
        return (yield)
    import numpy as np

    with np.errstate(over="ignore"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Any:
    """Make a record of each test over a backend's requests; ``test_check`` makes its own."""
    given = getattr(getattr(item, "callspec", None), "params", {}).get("kv_backend")
    if given is None or call.when != "call":
        return (yield)
    from kvcore.testing.records import record_of, settle, to_text

    subject = kit_of(item.config).subject(given)
    record = record_of(item, call, subject)
    item.user_properties.append((RECORD, to_text(record)))
    report = yield
    settle(report, record)
    return report


@pytest.fixture
def kv_device(pytestconfig: pytest.Config) -> str | None:
    """Device of the backends, None for each one's own choice."""
    return kit_of(pytestconfig).device


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What is checked, if it is known by now."""
    if KIT not in config.stash:
        return []
    kit = config.stash[KIT]
    names = ", ".join(f"{subject.info.name} ({subject.how or 'not yet run'})" for subject in kit.subjects)
    return [f"kvcore: {names} against the reference, spec {kit.spec.name} {kit.spec.digest[:16]}"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the records: on the one process that has them all, under xdist too."""
    if report.when == "call":
        _collected.extend(value for name, value in report.user_properties if name == RECORD)


_collected: list[Any] = []


def pytest_sessionstart() -> None:
    """Start without records: one process may run several sessions."""
    _collected.clear()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count by status, name what could not run, write the report."""
    if KIT not in config.stash or hasattr(config, "workerinput") or not _collected:
        return
    import msgspec

    from kvcore import environment
    from kvcore.parity.records import Record, write
    from kvcore.parity.run import blocked, report_of

    kit = config.stash[KIT]
    records = [msgspec.json.decode(text, type=Record) for text in _collected]
    checked = {record.check for record in records}
    checks = [check for check in kit.checks if check.id in checked]
    records += [found for subject in kit.absent for check in checks if (found := blocked(check, subject))]
    terminalreporter.section("kvcore conformance")
    counts: dict[tuple[str, str, str], int] = {}
    for record in records:
        key = record.backend, record.how, record.status
        counts[key] = counts.get(key, 0) + 1
    for (backend, how, status), count in counts.items():
        terminalreporter.write_line(f"{backend}{f' ({how})' if how else ''}: {count} {status}")
    for subject in kit.absent:
        terminalreporter.write_line(f"{subject.info.name} cannot run here: {subject.reason}")
    path = config.getoption("--kv-report")
    if path:
        command = shlex.join(["pytest", *environment.typed(sys.argv[1:])])
        subjects: list[Subject] = [*kit.subjects, *kit.absent]
        report = report_of(kit.spec, subjects, records, command=command)
        Path(path).write_bytes(write(report, packed=path.endswith(".gz")))
        terminalreporter.write_line(f"report: {path}")
