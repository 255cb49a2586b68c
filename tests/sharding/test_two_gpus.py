"""The benchmark of two GPUs in its tiny form, on gloo: that its parts run, agree, and fail alone."""

import json

import pytest

from benchmarks import two_gpus, two_gpus_move

pytest.importorskip("torch")


def test_every_part_runs_and_one_device_agrees_with_two(tmp_path):
    record, out = {}, tmp_path / "two.json"
    names = list(two_gpus.parts("tiny"))
    assert two_gpus.run("tiny", names, 120, record, out)
    assert json.loads(out.read_text()) == record
    assert record["capacity"]["ratio"] == 2
    pulls = record["move"]["pulls"]
    assert [pull["chunk_pages"] for pull in pulls] == list(two_gpus_move.CHUNKS[1:])
    assert all(pull["digests_equal"] for pull in pulls)
    for pull in pulls:
        assert (
            0 < pull["seconds"]["on the way"] < pull["seconds"]["until verified"] < pull["seconds"]["until committed"]
        )
    compared = [found for name, found in record.items() if name.startswith("decode")]
    assert len(compared) == 2
    for found in compared:
        assert found["digests_equal"]
        assert found["selections_equal"] == "2 of 2"
        # Outputs are bf16, of values of about 1.
        assert all(difference < 2**-7 for difference in found["largest_difference"].values())


def test_a_part_that_fails_is_recorded_and_the_next_one_runs():
    record = {}
    assert not two_gpus.run("tiny", ["no such part", "capacity"], 120, record, None)
    assert "KeyError: 'no such part'" in record["no such part"]["error"]
    assert record["capacity"]["ratio"] == 2


def test_a_part_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(two_gpus, "PART_SECONDS", 0)
    record = {}
    assert not two_gpus.run("tiny", ["capacity"], 120, record, None)
    assert record["capacity"]["error"] == "no answer in time of ranks [0, 1]"
