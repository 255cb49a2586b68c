"""The tables of planted faults fit the tree, and the runner tells a fault that is noticed from one that is not."""

from pathlib import Path

import pytest

from tests.reliability import planted
from tests.reliability.faults import FAULTS, ON_HOPPER, Fault

FILES = sorted({fault.file for fault in FAULTS})
EVERY = [*FAULTS, *ON_HOPPER]
ENTRIES = "kvcore/backends/torch_triton/entries.py"
OLD, NEW = (
    "place.numbers_from(torch.zeros_like(counts), counts, columns)",
    "place.numbers_from(counts * 0, counts - 1, columns)",
)


def test_there_are_enough_of_them():
    assert len(FAULTS) >= 150
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("file", sorted({fault.file for fault in EVERY}))
def test_what_a_fault_replaces_is_there_once(file):
    source = (planted.ROOT / file).read_text(encoding="utf-8")
    for fault in EVERY:
        if fault.file == file:
            text = planted.planted(source, fault)
            compile(text, file, "exec")
            assert text != source
            assert fault.why


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_judged_by_the_kit(file):
    assert any(run.kit for run in planted.ways_of(file))


def test_a_fault_whose_text_is_gone_is_an_error():
    with pytest.raises(ValueError, match="0 times"):
        planted.planted("", Fault("file", "old", "new", "why"))


def test_a_fault_is_noticed_and_none_is_not(monkeypatch):
    source = Path(planted.ROOT / ENTRIES).read_text(encoding="utf-8")
    assert source.count(OLD) == 1
    run = planted.kit("torch_triton", "gather_all_entries and fp32 and packed and ragged")
    monkeypatch.setattr(planted, "WAYS", {"*": (run,)})
    faults = [Fault(ENTRIES, OLD, NEW, "the last entry is left out"), Fault(ENTRIES, "", "", "nothing")]
    told = planted.run_all(faults, 2)
    record = planted.record_of(told, 0.0)
    assert source == Path(planted.ROOT / ENTRIES).read_text(encoding="utf-8")
    assert {one["why"]: one["noticed"] for one in told} == {faults[0].why: "kit", "nothing": ""}
    assert (record["all"]["kit"], record["faults"], record["divergences"]) == (1, 1, 0)


def test_what_a_record_says_was_noticed_is_not_judged_again():
    noticed, missed, new = (Fault(ENTRIES, "old", text, "why") for text in ("a", "b", "c"))
    told = [
        {"file": ENTRIES, "old": "old", "new": fault.new, "noticed": by}
        for fault, by in ((noticed, "kit"), (missed, ""))
    ]
    known, left = planted.taken_over({"told": told}, [missed, noticed, new])
    assert (known, left) == (told[:1], [missed, new])


def test_a_fault_can_be_judged_by_the_suite_alone(monkeypatch):
    runs = (planted.kit("torch_triton", "no such check"), planted.suite("tests/test_planted_faults.py", "-k", "gone"))
    monkeypatch.setattr(planted, "WAYS", {"*": runs})
    told = planted.judge(Fault(ENTRIES, "", "", "nothing"), "suite")
    assert (told["ran"], told["noticed"]) == ([" ".join(runs[1].arguments)], "")
