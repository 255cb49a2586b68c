"""R8, short: whoever is killed, the other one has all of it or nothing, and says so in time."""

from tests.reliability import transfer


def test_r8_a_killed_peer_leaves_all_or_nothing():
    record = transfer.run(kills=4, seed=1, which=["file", "torch.distributed"])
    assert record["divergences"] == 0
    for found in record["carriers"].values():
        assert found["kills"] == 4
        assert found["outcomes"]["nobody killed: committed"] == 1
        assert found["outcomes"]["importer killed"] == 2
        assert found["longest_seconds"] < transfer.LONGEST


def test_r8_notices_an_exporter_that_hangs(monkeypatch):
    monkeypatch.setattr(transfer, "LONGEST", 1.0)
    context = transfer.multiprocessing.get_context("forkserver")
    # Stopped rather than killed: it holds its connection and says nothing.
    outcome, fine, _ = transfer.trial(context, "torch.distributed", "exporter", 0.0, stop=True)
    assert (outcome, fine) in {("hangs", False), ("timeout", False)}
