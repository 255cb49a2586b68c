"""The page of a report: what it says, that it stands alone, and that a browser shows it."""

import re
from itertools import pairwise

import msgspec
import pytest

from kvcore import parity
from kvcore.parity.evidence import environments, evidence
from kvcore.parity.groups import grouped, single
from kvcore.parity.html import render
from kvcore.parity.picture import LINE, draw
from kvcore.parity.quality import Quality
from kvcore.parity.records import STATUSES, Record, Report
from kvcore.parity.show import summarise
from kvcore.plugins import KnownGap
from kvcore.spec import CacheSpec, LayerSpec, Window
from tests.conformance import broken
from tests.parity import browser

pytest.importorskip("jinja2")

SPEC = CacheSpec(
    layers=(LayerSpec(window=Window(dim=8, window=3, format="fp32")),), block_tokens=8, name="one <window>"
)


def page(*infos, check: str = "??????_window/*") -> str:
    return render(parity.run(SPEC, list(infos) or [broken.info()], only=check, command="kvcore parity run"))


def record(check: str, status: str = "agree", **fields) -> Record:
    return Record(
        check=check, backend="jax_pallas", how=fields.pop("how", "cpu"), status=status, rule="storage", **fields
    )


@pytest.fixture(scope="module")
def mixed() -> str:
    gap = KnownGap(check="append_window/*/packed/*", status="not_yet", reason="being written")
    return page(
        broken.info(),
        broken.info(broken.RingOffByOne, name="ring", known_gaps=[gap]),
        broken.info(name="chip", probe=lambda: "no <such> chip"),
    )


def test_the_page_loads_nothing(mixed: str) -> None:
    assert browser.faults(mixed) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<script src="https://example.org/a.js"></script>', "fetches https://example.org/a.js"),
        ("<script>1</script>", "has a script"),
        ('<img src="//example.org/a.png">', "fetches //example.org/a.png"),
        ('<link rel="stylesheet" href="a.css">', "fetches a.css"),
        ("<style>@import 'a.css';</style>", "style fetches @import 'a.css'"),
        ("<style>p { background: url(a.png) }</style>", "style fetches url(a.png)"),
        ('<a href="#gone">x</a>', "link to #gone leads nowhere"),
    ],
)
def test_a_page_that_does_not_stand_alone_is_seen(text: str, fault: str) -> None:
    assert fault in browser.faults(text)


def test_what_an_agreeing_page_says() -> None:
    text = page()
    assert "everything that was compared agrees" in text
    assert "44 agree" in text  # two verbs, three layouts, seven shapes, one of edges and one of outputs that are held
    assert "packed, planar, tpu_tile × no_tokens, one_token, exactly_full, one_over, ragged, longer, padded" in text
    assert "spec one &lt;window&gt;" in text.lower()
    assert "<details open" not in text


def test_what_a_disagreeing_page_says(mixed: str) -> None:
    assert "13 of 132 checks fail" in mixed  # 6 shapes in 2 layouts, and the gap is closed where there are no tokens
    assert "likely cause: shifted by one row" in mixed
    assert "not_yet: being written" in mixed
    assert "no &lt;such&gt; chip" in mixed
    assert '<td class="mono">append_window/fp32/planar/ragged</td><td class="disagree">disagree</td>' in mixed
    assert mixed.count("<details open") == 1
    for status in STATUSES:
        assert status in mixed


def test_nothing_compared_is_not_shown_as_agreement() -> None:
    text = page(broken.info(probe=lambda: "no such chip"))
    assert "nothing was compared" in text
    assert 'class="verdict unsupported"' in text


def test_what_failed_stands_alone_and_the_rest_is_grouped() -> None:
    records = [
        *(record(f"verb/a.m4/{layout}/{shape}") for layout in ("packed", "planar") for shape in ("one", "two")),
        record("verb/a.m4/tpu_tile/one", max_abs=0.5, max_ulp=3),
        record("verb/b/any/one"),
        record("verb/b/any/two", "unsupported", detail="does not declare b"),
        record("verb/b/any/three", "disagree", mismatches=1),
    ]
    assert [found.check for found in single(records)] == ["verb/b/any/three"]
    assert [(g.status, g.formats, g.cases, g.count, g.max_abs, g.max_ulp, g.detail) for g in grouped(records)] == [
        ("agree", "a.m4", "packed, planar × one, two; tpu_tile × one", 5, 0.5, 3, ""),
        ("agree", "b", "one", 1, 0.0, 0, ""),
        ("unsupported", "b", "two", 1, 0.0, 0, "does not declare b"),
    ]


@pytest.mark.parametrize(
    ("how", "status", "rungs"),
    [
        ("cpu", "agree", ["jax_pallas (cpu): 1 agree", "no record", "no record", "no record"]),
        (
            "cpu, Pallas TPU interpreter",
            "disagree",
            ["no record", "jax_pallas (cpu, Pallas TPU interpreter): 1 disagree", "no record", "no record"],
        ),
        (
            "TPU v5e compiler, ahead of time",
            "agree",
            ["no record", "no record", "jax_pallas (TPU v5e compiler, ahead of time): 1 agree", "no record"],
        ),
        (
            "tpu (TPU v6 lite)",
            "agree",
            ["no record", "no record", "no record", "jax_pallas (tpu (TPU v6 lite)): 1 agree"],
        ),
        ("cpu", "unsupported", ["no record"] * 4),
    ],
)
def test_ladder_of_evidence(how: str, status: str, rungs: list[str]) -> None:
    from kvcore.parity.html import LADDER, _reached

    report = parity.run(SPEC, [broken.info()], only="append_window/*/packed/ragged")
    found = parity.Report(
        schema=report.schema,
        spec=report.spec,
        runs=report.runs,
        tolerances=report.tolerances,
        checks=(record("append_window/fp32/packed/ragged", status, how=how),),
        quality=report.quality,
    )
    assert [_reached(found, fits)[0] for _, _, fits in LADDER] == rungs


def of(*records: Record) -> Report:
    report = parity.run(SPEC, [broken.info()], only="append_window/*/packed/ragged")
    return msgspec.structs.replace(report, checks=records)


def test_the_strongest_evidence_comes_first_and_chips_with_equal_counts_are_one_column() -> None:
    compiled = "TPU {}, compiled ahead of time by libtpu 1, not run"
    ways = [compiled.format(chip) for chip in ("v4", "v5e", "v6e")] + ["cpu, Pallas TPU interpreter", "cpu", "cuda (x)"]
    found = of(
        *(record("verb/a/any/one", how=how) for how in ways),
        record("verb/a/any/two", how="cuda (x)"),
        record("verb/a/any/two", "disagree", how=ways[2], mismatches=1),
    )
    columns = evidence(summarise(found))
    assert [(column.how, column.total.counts) for column in columns if column.total] == [
        ("cuda (x)", {"agree": 2}),
        ("cpu", {"agree": 1}),
        ("cpu, Pallas TPU interpreter", {"agree": 1}),
        (ways[2], {"agree": 1, "disagree": 1}),
        ("TPU v4, v5e, compiled ahead of time by libtpu 1, not run", {"agree": 1}),
    ]


def test_a_dash_and_a_smaller_number_say_of_how_many() -> None:
    found = of(
        *(record(f"first/a/any/{number}", how="cuda (x)") for number in range(3)),
        record("first/a/any/0", how="cpu"),
        record("second/a/any/0", how="cpu"),
    )
    text = re.sub(r"<[^>]*>|\s+", " ", render(found))
    assert re.search(r"first +3 +1 +of 3 ", text)
    assert re.search(r"second +– +of 1 +1 ", text)
    assert re.search(r"verbs with checks +1 of 2 +2 of 2 ", text)


def test_runs_with_equal_versions_are_one_line() -> None:
    report = parity.run(SPEC, [broken.info()], only="append_window/*/packed/ragged", command="one")
    (run,) = report.runs
    again = [
        msgspec.structs.replace(run, command=command, how=how) for command, how in (("two", "cpu"), ("two", "gpu"))
    ]
    other = msgspec.structs.replace(run, versions={**run.versions, "numpy": "1"})
    found = environments(msgspec.structs.replace(report, runs=(run, *again, other)))
    assert [(one.ways, one.commands) for one in found] == [(("cpu", "gpu"), ("one", "two")), (("cpu",), ("one",))]


def test_labels_of_formats_do_not_cover_one_another() -> None:
    crowd = [Quality(format=f"format_{n}", bits=8 + n / 10, error=0.02 + n / 1e4) for n in range(6)]
    picture = draw([*crowd, Quality(format="exact", bits=32.0, error=0.0)])
    assert {point.label for point in picture.points} == {quality.format for quality in crowd}
    lines = sorted(point.label_y for point in picture.points)
    assert all(later - earlier >= LINE for earlier, later in pairwise(lines))
    assert all(point.label_y < picture.bottom for point in picture.points)


@pytest.mark.skipif(browser.chromium() is None, reason="no Chromium on PATH")
def test_the_page_fits_a_phone_and_its_table_keeps_its_head(mixed: str) -> None:
    assert browser.layout(mixed) == []
    wide = mixed.replace("<h1>", '<h1 style="width: 2000px">')
    assert "pixels wide in a window of 390" in browser.layout(wide, (390,))[0]
    loose = mixed.replace("position: sticky", "position: static").replace("max-height: 85vh", "max-height: 5rem")
    assert browser.layout(loose, (390,)) == ["the table's head scrolls away at 390 pixels"]


@pytest.mark.skipif(browser.chromium() is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page(mixed: str, tmp_path, dark: bool) -> None:
    (tmp_path / "page.html").write_text(mixed, encoding="utf-8")
    (tmp_path / "blank.html").write_text(
        f"<body style='background: {'#0d1117' if dark else '#fff'}'>", encoding="utf-8"
    )
    assert not browser.is_blank(browser.picture(tmp_path / "page.html", tmp_path / "page.png", dark=dark))
    assert browser.is_blank(browser.picture(tmp_path / "blank.html", tmp_path / "blank.png", dark=dark))
