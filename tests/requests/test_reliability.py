"""The figures' short forms hold, and each of them notices the fault that it is there for."""

import pytest

import kvcore
from benchmarks import allocator, prefix_traces
from benchmarks.reliability import corruption, crash, fuzz, isolation, replay
from benchmarks.reliability.shrink import shrink
from kvcore import snapshot
from kvcore.blocks import BlockAllocator
from kvcore.content import HostRows
from kvcore.manager import Manager


def test_r1_r6_random_lives_equal_the_model():
    record = fuzz.run(seeds=8, operations=800)
    assert record["divergences"] == 0
    assert min(record["happened"].values()) > 10
    assert {"hit", "out of blocks", "out of slots", "too deep"} <= set(record["happened"])


def broken_drop(self, blocks):
    """Forgets one block in a while: a leak."""
    return DROP(self, blocks[1:] if len(blocks) == 3 else blocks)


def broken_shared(self, block, leaving=0):
    """Writes into published blocks."""
    return self._holders[block] - leaving > 1


def broken_deepest(*_):
    """Lets a rollback go anywhere."""
    return 0


def broken_release(self, request):
    """Keeps the blocks."""
    place = self._places.pop(request)
    self._free_slots.append(place.slot)
    return []


DROP = BlockAllocator.drop


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        pytest.param(BlockAllocator, "drop", broken_drop, id="a leak"),
        pytest.param(BlockAllocator, "is_shared", broken_shared, id="no copy on write of published blocks"),
        pytest.param(Manager, "deepest_truncation", broken_deepest, id="unbounded rollback"),
        pytest.param(Manager, "release", broken_release, id="blocks kept after release"),
    ],
)
def test_r1_notices_a_fault_and_shrinks_its_trace(monkeypatch, capsys, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    record = fuzz.run(seeds=4, operations=300)
    assert record["divergences"] > 0
    shortest = min(record["failures"], key=lambda failure: len(failure["trace"]))
    assert len(shortest["trace"]) <= 25
    assert f"seed {shortest['seed']}" in capsys.readouterr().out


def test_shrinking_keeps_what_the_failure_needs():
    assert shrink(list(range(200)), lambda some: {7, 91, 160} <= set(some)) == [7, 91, 160]


def test_r3_kills_and_power_losses_tear_nothing():
    found = crash.kills(12, 5, lambda path, data: snapshot.write(path, data))
    assert (found["torn"], found["lost"]) == (0, 0)
    found = crash.boundaries(5, 2)
    assert (found["torn"], found["lost"]) == (0, 0)
    assert found["power_losses"] == 3 * 2 * found["boundaries"]


def test_r3_notices_a_writer_in_place():
    assert crash.kills(25, 5, crash.in_place)["torn"] > 0


def test_r4_every_corruption_is_noticed():
    record = corruption.run(False, 11)
    assert (record["missed"], record["false_alarms"], record["restored_wrong"]) == (0, 0, 0)
    assert set(record["kinds"]) == set(corruption.KINDS)
    assert record["restored_beside_damage"] > 50
    loaded = {name.split()[0]: tally["loaded_wrong"] for name, tally in record["beside"].items()}
    assert loaded["safetensors"] > 0
    assert loaded["torch.save"] > 0


def test_r4_notices_pages_that_are_not_checked(monkeypatch, capsys):
    monkeypatch.setattr(snapshot, "damage", lambda *_: [])
    cache, (data, other) = corruption.snapshots()
    bad = bytearray(data)
    bad[-1] ^= 1
    noticed, _, wrong = corruption.verdict(bytes(bad), snapshot.parse(data), cache.ops)
    assert not noticed or wrong
    assert capsys.readouterr().out == ""
    assert other != data


def test_r5_nobody_reads_what_is_anothers(backend):
    record = isolation.run(gathers=1500, seed=3, backend=backend, turns=60)
    assert record["divergences"] == 0
    assert {"hit", "fork", "park", "back", "fail", "OutOfBlocks"} <= set(record["happened"])


def test_r5_notices_a_slot_that_keeps_its_rows(monkeypatch, capsys):
    # As if the blocks alone made a hit.
    monkeypatch.setattr("kvcore.sharing.write_rows", lambda _, pools, *__: pools)
    record = isolation.run(gathers=4000, seed=1)
    assert record["divergences"] > 0
    assert "seed" in capsys.readouterr().out


def test_r9_one_log_on_all_backends():
    record = replay.run(operations=60, seed=20, each=30)
    assert record["divergences"] == 0
    assert {"reference, packed", "torch_triton, packed"} <= set(record["caches"])


def test_the_allocator_is_fast_enough():
    # Of processor time, and a tenth of what is asked of an idle core: other work slows a shared one down.
    assert max(allocator.measure(16, 100_000, cached=False) for _ in range(3)) > 100_000


def test_policies_order_as_they_should():
    rows = prefix_traces.run(turns=12, blocks=4096, seed=4)
    for trace in prefix_traces.TRACES:
        full, p2048, p8192, points, zero = (row for row in rows if row["trace"] == trace)
        assert p2048["checkpoint_bytes"] >= p8192["checkpoint_bytes"] >= points["checkpoint_bytes"] > 0
        assert full["checkpoint_bytes"] > 0
        assert zero["checkpoint_bytes"] == 0
        assert p2048["reused"] >= p8192["reused"] >= points["reused"] > zero["reused"]
        assert full["replayed_a_turn"] == 0 < zero["replayed_a_turn"] <= 128 * 43
    assert prefix_traces.table(rows).count("\n") == 11
    assert prefix_traces.picture(rows).count("<rect") == 21


def test_a_checkpoint_of_flash_weighs_its_windows_and_its_last_csa_rows():
    spec = kvcore.spec.presets.deepseek_v4_flash(draft=False)
    assert prefix_traces.checkpoint_bytes(spec, 8192) == 3_214_336 + 2 * 430_080
    assert HostRows(prefix_traces.Weight(5), []).rows.nbytes == 5
