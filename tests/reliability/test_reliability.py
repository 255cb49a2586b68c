"""The figures' short forms hold, and each of them notices the faults that it is there for, with seed and trace."""

import base64
import json
import zlib

import pytest

import kvcore
from benchmarks import allocator, prefix_traces
from kvcore.portable import snapshot
from kvcore.portable.rows import HostRows
from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.manager import Manager
from kvcore.testing.operations import shrink
from tests.reliability import (
    command,
    corruption,
    crash,
    descriptors,
    fuzz,
    hybrid,
    isolation,
    merge,
    mutate,
    one_bit,
    replay,
    threads,
)


def test_r1_r6_random_lives_equal_the_model():
    record = command.work(fuzz.FIGURE, 12_000, operations="1500")
    assert record["divergences"] == 0
    assert record["ran"][0]["seeds"] == 8
    happened = record["counts"]["happened"]
    assert min(happened.values()) > 10
    assert {kind.strip("_") for kind in fuzz.KINDS} <= set(happened)
    assert {"hit", "out of blocks", "out of slots", "too deep", "damaged imports refused"} <= set(happened)
    assert happened["exports refused in a replay"] > 10


def test_r13_hybrids_equal_the_model_and_every_wrong_state_is_noticed():
    record = command.work(hybrid.FIGURE, 600, operations="150", planted="1")
    assert record["failures"] == []
    assert min(record["counts"]["noticed"].values()) > 5
    assert set(record["counts"]["noticed"]) == set(hybrid.FAULTS)
    assert set(record["counts"]["happened"]) == set(hybrid.WEIGHTS)


def test_r14_one_bit_is_found_wherever_it_lies(monkeypatch):
    assert one_bit.run(pages=400, seed=3)["missed"] == dict.fromkeys(one_bit.PLACES, 0)
    monkeypatch.setattr("kvcore.store.seal.hmac.compare_digest", lambda *_: True)
    monkeypatch.setattr("kvcore.portable.importer.damaged", lambda *_: [])
    monkeypatch.setattr("kvcore.portable.snapshot.damaged", lambda *_: [])
    missed = one_bit.run(pages=400, seed=3)["missed"]
    assert [name for name, count in missed.items() if count > 1] == ["file", "host tier", "on its way"]


def test_r15_a_wrong_descriptor_is_refused_or_shows(monkeypatch):
    found = descriptors.run(count=60, seed=2)
    assert (found["divergences"], found["descriptors"]) == (0, found["named"] + 60)
    assert min(found["refused"], found["shown by rows"]) > 20
    monkeypatch.setattr("kvcore.adoption.cache.AdoptedCache.compare", lambda *_, **__: None)
    assert descriptors.run(count=0, seed=2)["divergences"] > 20


def assert_told_short(record, capsys, longest):
    """Every failure is printed with its seed and a shrunk trace; the shortest of them is at most that long."""
    assert record["divergences"] == len(record["failures"]) > 0
    printed = capsys.readouterr().out
    for failure in record["failures"]:
        assert f"seed {failure['seed']}: {failure['error']}" in printed
        assert all(line in printed for line in failure["trace"])
    assert 0 < min(len(failure["trace"]) for failure in record["failures"]) <= longest


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


def broken_check_whole(*_):
    """Lets a request leave whose windows are not there yet."""


def broken_truncate(self, request, length):
    """Keeps one block too many."""
    held = self._places[request].blocks
    freed = TRUNCATE(self, request, length)
    if len(held) > len(self._places[request].blocks):
        self.blocks.hold(held[0])
    return freed


TRUNCATE = Manager.truncate


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        pytest.param(BlockAllocator, "drop", broken_drop, id="a leak"),
        pytest.param(BlockAllocator, "is_shared", broken_shared, id="no copy on write of published blocks"),
        pytest.param(Manager, "deepest_truncation", broken_deepest, id="unbounded rollback"),
        pytest.param(Manager, "release", broken_release, id="blocks kept after release"),
        pytest.param(Manager, "truncate", broken_truncate, id="a block held twice after a rollback"),
        pytest.param(Manager, "check_whole", broken_check_whole, id="a replaying request may leave"),
    ],
)
def test_r1_notices_a_fault_and_shrinks_its_trace(monkeypatch, capsys, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    record = command.work(fuzz.FIGURE, 2500, operations="500")
    assert_told_short(record, capsys, 25)


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
    record = command.work(corruption.FIGURE, 1000, first_seed=11)
    assert record["divergences"] == 0
    counts = record["counts"]
    assert set(counts["kinds"]) == set(corruption.KINDS)
    assert counts["restored_beside_damage"] > 50
    loaded = {name.split()[0]: tally["loaded_wrong"] for name, tally in counts["beside"].items()}
    assert loaded["safetensors"] > 0
    assert loaded["torch.save"] > 0


def test_r4_notices_pages_that_are_not_checked(monkeypatch, capsys):
    monkeypatch.setattr(snapshot.Snapshot, "damage", lambda *_: [])
    monkeypatch.setattr(corruption, "SEED_CORRUPTIONS", 20)
    record = command.work(corruption.FIGURE, 20, beside="no")
    assert_told_short(record, capsys, 1)


@pytest.mark.parametrize("first_seed", [6, 7], ids=["compressed", "classic"])
def test_r5_nobody_reads_what_is_anothers(backend, first_seed):
    record = command.work(isolation.FIGURE, 4000, first_seed=first_seed, backend=backend, operations="60")
    assert record["divergences"] == 0
    assert {"hit", "fork", "park", "back", "fail", "point"} <= set(record["counts"]["happened"])


def without_rows(_, pools, *__):
    """As if the blocks alone made a hit."""
    return pools


def keep_pools(_, pools, *__):
    """A verb that moves nothing."""
    return pools


REFERENCE = "kvcore.backends.reference.backend.ReferenceOps"


@pytest.mark.parametrize(
    ("name", "fault", "seed"),
    [
        pytest.param("kvcore.cache.state.write_rows", without_rows, 2, id="a hit without its rings"),
        pytest.param(f"{REFERENCE}.copy_slots", keep_pools, 0, id="a fork without its slot's rows"),
    ],
)
def test_r5_notices_a_fault_and_shrinks_its_trace(monkeypatch, capsys, name, fault, seed):
    monkeypatch.setattr(name, fault)
    record = command.work(isolation.FIGURE, 1, first_seed=seed)
    assert_told_short(record, capsys, 12)


def test_r9_one_log_on_all_backends():
    record = command.work(replay.FIGURE, 80, first_seed=20, operations="40", backends="reference,torch_triton")
    assert record["divergences"] == 0
    assert record["counts"]["happened"]["digests compared"] == 16


def test_r9_notices_a_backend_that_differs(monkeypatch, capsys):
    # One block of a copy on write goes astray.
    monkeypatch.setattr("kvcore.backends.torch_triton.backend.TorchOps.copy_blocks", keep_pools)
    record = command.work(replay.FIGURE, 100, first_seed=2, backends="reference,torch_triton")
    assert_told_short(record, capsys, 12)


@pytest.mark.parametrize(
    ("workers", "longest"),
    [
        pytest.param(1, 6, id="the same turns every time"),
        # How many requests are alive at the first release, none of which the log can do without, is a matter of time.
        pytest.param(2, 50, id="turns as they come"),
    ],
)
def test_r7_names_the_seed_and_a_short_log(monkeypatch, capsys, workers, longest):
    # As if a release came a turn too late.
    real = threads._explain

    def late(model, event):
        if event.what != "release":
            real(model, event)

    monkeypatch.setattr(threads, "_explain", late)
    record = threads.run(threads=workers, operations=200, seed=5)
    assert_told_short(record, capsys, longest)


def shard(first_seed, count, **options):
    return command.work(fuzz.FIGURE, count, first_seed=first_seed, operations="50", **options)


def test_shards_add_up_to_what_one_process_would_have_told():
    whole, parts = shard(3, 200), [shard(5, 100), shard(3, 100)]
    merged = command.merged(parts)
    assert merged["counts"] == whole["counts"]
    assert [(part["first_seed"], part["seeds"]) for part in merged["ran"]] == [(3, 2), (5, 2)]
    assert (merged["form"], command.finished(whole)["form"]) == ("a part", "short")
    assert command.merged([merged, shard(100, 50)])["counts"]["operations"] == 250


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        pytest.param([(4, 100, "50")], "seed 4 is told twice", id="the same seeds twice"),
        pytest.param([(9, 100, "60")], "options", id="other options"),
    ],
)
def test_shards_that_do_not_fit_are_refused(tmp_path, capsys, others, reason):
    records = [shard(3, 100), *(command.work(fuzz.FIGURE, n, first_seed=s, operations=o) for s, n, o in others)]
    paths = [tmp_path / f"{number}.json" for number in range(len(records))]
    for path, record in zip(paths, records, strict=True):
        command.write(command.finished(record), path)
    assert merge.main([str(tmp_path / "out.json"), *map(str, paths)]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
    assert merge.main([str(tmp_path / "out.json"), str(paths[0])]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["counts"] == records[0]["counts"]


def test_a_shard_ends_when_its_time_is_over():
    record = command.work(fuzz.FIGURE, 10**9, operations="50", seconds=0.2)
    assert 0 < record["counts"]["operations"] < 10**6
    assert not command.spent()


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


@pytest.mark.parametrize("kinds", [mutate.MAIN, "handle,file,config", mutate.OLD])
def test_r10_what_comes_from_elsewhere_is_taken_or_refused_by_type(kinds):
    names = kinds.split(",")
    record = command.work(mutate.FIGURE, len(names) * mutate.SEED_INPUTS, first_seed=0, kinds=kinds)
    assert record["divergences"] == 0, record["failures"]
    counts = record["counts"]
    assert counts["kinds"] == dict.fromkeys(names, mutate.SEED_INPUTS)
    # Most are refused; some were changed where nothing depends on it.
    for name in names:
        happened = counts["happened"][name]
        assert sum(happened.values()) == mutate.SEED_INPUTS
        assert 0 < happened["taken"] < mutate.SEED_INPUTS // 2


def sleepless(*_):
    """As if positions were made before it is known whether there are rows for them."""
    while True:
        pass


def greedy(*_):
    """Room for what is declared."""
    return bytearray(1 << 40)


def careless(*_):
    """Anything fits together."""
    return True


@pytest.mark.parametrize(
    ("name", "fault", "said", "kind", "inputs"),
    [
        pytest.param("kvcore.portable.version1.is_coherent", careless, "blob", "blob of 0.1.0", 250, id="careless"),
        # An input that has no end takes all of its time, so there are few of them.
        pytest.param("kvcore.portable.pages.least_kept", sleepless, "TooLong", "blob", 25, id="no end"),
        pytest.param("kvcore.portable.pages.least_kept", greedy, "MemoryError", "blob", 250, id="no bound"),
    ],
)
def test_r10_notices_a_fault_and_keeps_the_input(monkeypatch, capsys, name, fault, said, kind, inputs):
    monkeypatch.setattr(name, fault)
    monkeypatch.setattr(mutate, "SECONDS", 0.1)
    monkeypatch.setattr(mutate, "SEED_INPUTS", inputs)
    record = command.work(mutate.FIGURE, 6 * 250, kinds=kind)
    assert record["divergences"] == len(record["failures"]) > 0
    failure = record["failures"][0]
    assert said in failure["error"]
    assert f"seed {failure['seed']}: {failure['error']}" in capsys.readouterr().out
    number = int(failure["error"].split(":")[0].split()[-1])
    packed = next(line for line in failure["trace"] if line.startswith("input, zlib: ")).removeprefix("input, zlib: ")
    assert zlib.decompress(base64.b64decode(packed)) == mutate.mutated(kind, failure["seed"], number)[1]
