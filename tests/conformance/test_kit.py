"""The kit as a user runs it: a pytest of its own, with good and with broken backends."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from kvcore.spec import CacheSpec, LayerSpec, Window, to_json

ROOT = Path(__file__).parents[2]
SMALL = CacheSpec(layers=(LayerSpec(window=Window(dim=8, window=3, format="fp32")),), block_tokens=8, name="one window")
WINDOWS = "test_check and append_window"


class Ran(NamedTuple):
    code: int
    text: str
    folder: Path

    def report(self) -> dict:
        return json.loads((self.folder / "report.json").read_text())


@pytest.fixture
def kit(tmp_path):
    """Run the kit on a small spec with one more backend, called ``broken``."""
    (tmp_path / "spec.json").write_text(to_json(SMALL))

    def run(*arguments: str, backend: str = "ReferenceOps", only: str = WINDOWS) -> Ran:
        # Where kvcore is installed its entry point loads the plug-in already.
        installed = any(entry.name == "kvcore" for entry in entry_points(group="pytest11"))
        own = [] if installed else ["-p", "kvcore.testing.plugin"]
        line = [sys.executable, "-m", "pytest", *own, "-p", "tests.conformance.kit_backends"]
        line += ["--pyargs", "kvcore.conformance", "-p", "no:cacheprovider", "-W", "error", "-k", only]
        line += ["--kv-spec=spec.json", "--kv-report=report.json", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KIT_BACKEND": backend}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout + done.stderr, tmp_path)

    return run


def test_a_sound_backend_passes(kit, tmp_path) -> None:
    ran = kit("--kv-backend=broken", f"--junitxml={tmp_path / 'junit.xml'}")
    assert ran.code == 0, ran.text
    assert "22 passed" in ran.text
    assert "broken (cpu): 22 agree" in ran.text
    report = ran.report()
    assert (report["schema"], report["spec"]["digest"]) == ("kvcore.parity/1", SMALL.digest)
    assert {record["status"] for record in report["checks"]} == {"agree"}
    assert [(run["backend"], run["how"]) for run in report["runs"]] == [("broken", "cpu")]
    assert report["runs"][0]["command"].endswith("--kv-report=report.json --kv-backend=broken --junitxml=junit.xml")
    names = {element.get("name") for element in ElementTree.parse(ran.folder / "junit.xml").iter("property")}
    assert names == {"kvcore.record"}


def test_a_broken_backend_fails_with_a_diagnosis(kit) -> None:
    ran = kit("--kv-backend=broken", backend="RingOffByOne")
    assert ran.code == 1
    assert "19 failed, 3 passed" in ran.text
    assert "likely cause: shifted by one row" in ran.text
    statuses = [record["status"] for record in ran.report()["checks"]]
    assert (statuses.count("disagree"), statuses.count("agree")) == (19, 3)


def test_parts_make_up_the_whole(kit) -> None:
    checks = []
    for part in range(3):
        ran = kit("--kv-backend=broken", f"--kv-shard={part}/3")
        assert ran.code == 0, ran.text
        checks += [record["check"] for record in ran.report()["checks"]]
    assert len(checks) == len(set(checks)) == 22


def test_a_sample_has_each_shape_in_one_layout(kit) -> None:
    ran = kit("--kv-sample")
    assert ran.code == 0, ran.text
    checks = [record["check"].split("/") for record in ran.report()["checks"]]
    assert len(checks) == len({(formats, shape) for _, formats, _, shape in checks}) == 8


def test_the_reference_is_checked_unless_another_is_named(kit) -> None:
    ran = kit()
    assert ran.code == 0
    assert {record["backend"] for record in ran.report()["checks"]} == {"reference"}


def test_a_named_backend_that_cannot_run_is_a_usage_error(kit) -> None:
    ran = kit("--kv-backend=broken", backend="absent")
    assert ran.code == 4
    assert "--kv-backend=broken cannot run here: no such chip" in ran.text
    assert not (ran.folder / "report.json").exists()


def test_an_unknown_backend_is_a_usage_error(kit) -> None:
    ran = kit("--kv-backend=brokne")
    assert ran.code == 4
    assert "--kv-backend=brokne: no such backend; have reference" in ran.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--kv-spec=nowhere.json"], "--kv-spec: got 'nowhere.json'", id="no spec"),
        pytest.param(["--kv-report=no/such/folder.json"], "no such folder", id="nowhere to write"),
        pytest.param(["--kv-shard=3/3"], "--kv-shard=3/3", id="no such part"),
        pytest.param(["--kv-shard=half"], "--kv-shard=half", id="a part that is no number"),
    ],
)
def test_other_usage_errors(kit, arguments: list[str], message: str) -> None:
    ran = kit(*arguments)
    assert ran.code == 4
    assert message in ran.text


def test_under_all_what_cannot_run_is_reported(kit) -> None:
    ran = kit("--kv-backend=all", backend="absent")
    assert ran.code == 0, ran.text
    assert "broken cannot run here: no such chip" in ran.text
    assert "skipped" not in ran.text
    absent = [record for record in ran.report()["checks"] if record["backend"] == "broken"]
    assert len(absent) == 22
    assert {(record["status"], record["detail"]) for record in absent} == {("unavailable", "no such chip")}


def test_a_known_gap_is_an_expected_failure(kit) -> None:
    ran = kit("--kv-backend=broken", backend="gap", only=f"{WINDOWS} and ragged")
    assert ran.code == 0
    assert "4 xfailed" in ran.text
    assert {record["status"] for record in ran.report()["checks"]} == {"known_gap"}


def test_a_known_gap_that_has_closed_fails(kit) -> None:
    ran = kit("--kv-backend=broken", backend="closed gap", only=f"{WINDOWS} and ragged")
    assert ran.code == 1
    assert "take it off the list" in ran.text


def test_records_survive_several_processes(kit) -> None:
    pytest.importorskip("xdist")
    ran = kit("--kv-backend=broken", "-n", "2")
    assert ran.code == 0, ran.text
    assert len(ran.report()["checks"]) == 22


@pytest.mark.parametrize(
    ("backend", "test"),
    [
        pytest.param("NothingRestored", "test_life_cycle", id="a failed step is not undone"),
        pytest.param("BlocksNotCopied", "test_life_cycle", id="copy on write copies nothing"),
        pytest.param("SlotsNotCopied", "test_life_cycle", id="a fork has no window"),
        pytest.param("FirstTableForAll", "test_chunks_do_not_matter", id="first request's table for all"),
        pytest.param("OldestChunkWins", "test_chunks_do_not_matter", id="the oldest rows of a long step are kept"),
        pytest.param("RingOffByOne", "test_stored_bytes_are_the_reference", id="ring off by one"),
        pytest.param("ScaleRoundedDown", "test_stored_bytes_are_the_reference", id="scale one binade low"),
        pytest.param("SlotsMixedUp", "test_chunks_do_not_matter", id="rows in another request's slot"),
        pytest.param("RingOffByOne", "test_isolation and wrap", id="ring off by one, read back"),
        pytest.param("FirstTableForAll", "test_isolation and several", id="first request's table for all, read back"),
        pytest.param("FirstTableOnRead", "test_isolation and several", id="first request's table when reading"),
        pytest.param("SlotsNotCopied", "test_isolation and forks", id="a fork without a window, read back"),
        pytest.param("BlocksNotCopied", "test_isolation and forks", id="copy on write copies nothing, read back"),
        pytest.param("NothingRestored", "test_isolation and failed", id="a failed step, read back"),
        pytest.param("RowsOfNobody", "test_isolation and several", id="rows beyond a request's own"),
        pytest.param("PaddingWritten", "test_isolation and padding", id="padding written, read back"),
        pytest.param("NothingRestored", "test_bad_input_in_a_step and commit", id="a refused commit is not undone"),
        pytest.param("WritesLate", "test_buffers_are_reused", id="the caller's arrays are read too late"),
        pytest.param("blocks kept by an abort", "test_life_cycle", id="an aborted step keeps its blocks"),
        pytest.param(
            "blocks kept by an abort", "test_isolation and failed", id="an aborted step keeps its blocks, seen"
        ),
        pytest.param("blocks kept by a copy", "test_life_cycle", id="a block that was replaced is kept"),
        pytest.param("blocks kept by a copy", "test_isolation and forks", id="a block that was replaced is kept, seen"),
        pytest.param("DeviceIgnored", "test_bad_input_device", id="any device will do"),
    ],
)
def test_life_cycles_catch(kit, backend: str, test: str) -> None:
    ran = kit("--kv-backend=broken", "-x", backend=backend, only=test)
    assert ran.code == 1, ran.text
    records = [record for record in ran.report()["checks"] if record["status"] == "disagree"]
    assert records
    assert {record["check"].split("/")[0] for record in records} == {test.split()[0].removeprefix("test_")}


def test_a_sound_backend_lives(kit) -> None:
    ran = kit(
        "--kv-backend=broken",
        only="test_life or test_stored or test_exchange or test_isolation or test_bad_input or test_buffers",
    )
    assert ran.code == 0, ran.text
    assert "skipped" not in ran.text


def test_the_plugin_costs_nothing_where_it_is_not_used() -> None:
    code = "import sys, kvcore.testing.plugin; assert not {'numpy', 'torch', 'msgspec', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
