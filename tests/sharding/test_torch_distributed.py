"""Caches over torch.distributed on gloo: two and four context shards, and replicas, against one device."""

import numpy as np
import pytest

from tests.reliability import shards
from tests.support import gloo, sharded, stories


@pytest.fixture(scope="module")
def processes():
    """Groups of processes by size, each started once."""
    groups: dict[int, gloo.Processes] = {}

    def of(count: int) -> gloo.Processes:
        if count not in groups:
            groups[count] = gloo.Processes(count)
        return groups[count]

    yield of
    for group in groups.values():
        group.close()


LENGTHS = {"more than a page on each of four shards, nothing, less than a page": [130, 0, 3], "one token": [1]}
"""The last step brings the second half of each, so one token is a decode step that only the first shard sees."""


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("name", sharded.SPECS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_reader_answers_what_one_device_does(processes, name, context, lengths):
    one = sharded.read_everything(name, 1, lengths)
    for rank, found in enumerate(processes(context).run(sharded.read_everything, name, context, lengths)):
        assert found.keys() == one.keys()
        for key, expected in one.items():
            if "attention" in key:
                # Sums in another order; bf16 outputs are rounded once, by half a unit in the last of 8 places.
                bound = 1e-2 if "bfloat16" in key else 1e-5
                got, expected = (array.astype(np.float32) for array in (found[key], expected))
                np.testing.assert_allclose(got, expected, rtol=bound, atol=bound, err_msg=f"rank {rank}: {key}")
            else:
                assert found[key].dtype == expected.dtype, key
                assert found[key].tobytes() == expected.tobytes(), f"rank {rank}: {key}"


@pytest.mark.parametrize("context", [2, 4])
def test_ties_go_to_the_lowest_entry_whoever_holds_it(processes, context):
    one = sharded.ties(1)
    for found in processes(context).run(sharded.ties, context):
        assert (found == one).all()
    # Query 199 sees 50 entries: those at 3 mod 5 score 1, unless they lose it again at 1 mod 7.
    assert one[199].tolist() == [3, 13, 18, 23, 28, 33]


@pytest.mark.parametrize("name", ["stored", "mixed"])
def test_a_request_moves_from_one_shard_to_four_and_back(processes, name):
    cache = sharded.create(name, 1)
    request = cache.admit()
    stories.tell(cache, {request: list(range(77))})
    blob = cache.export_request(request)
    stories.tell(cache, {request: list(range(500, 540))})
    for again, digest, later in processes(4).run(sharded.moved, name, blob, 4):
        assert again == blob
        assert digest == cache.digest([request])
        home = sharded.create(name, 1)
        assert home.digest([home.import_request(later)]) == digest


def test_history_costs_each_of_four_shards_a_quarter(processes):
    assert processes(4).run(sharded.pool_bytes, 4) == [sharded.pool_bytes(1) // 4] * 4


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("a paged window", "SpecError: layers[1].kv: got context=2"),
        ("a mesh without names", "SpecError: mesh: got dimensions without names; allowed: requests and context"),
        ("a mesh of heads", "SpecError: mesh: got dimensions heads"),
        ("not a torch backend", "BackendError: backend"),
        ("a budget too small", "OutOfBlocks: budget_bytes"),
    ],
)
def test_what_cannot_be_is_refused(processes, which, message):
    for text in processes(2).run(sharded.refused, which):
        assert text.startswith(message), text


@pytest.mark.parametrize(
    ("plan", "seed"),
    [pytest.param(name, 5 + number, id=name) for number, name in enumerate(shards.PLANS)],
)
def test_one_log_gives_the_digests_and_attention_of_one_device(processes, plan, seed):
    replicas, context = shards.PLANS[plan]
    for which in range(len(shards.SPECS)):
        one = shards.life(seed, 25, 1, 1, which)
        ranks = processes(replicas * context).run(shards.life, seed, 25, replicas, context, which)
        assert shards.differences(one, ranks) == []
        assert len(one.digests) == 5


@pytest.mark.parametrize("fault", [*sharded.FAULTS, "pages of others stored"])
def test_the_log_notices_a_fault(processes, fault):
    one = shards.life(3, 25, 1, 1, 0)
    if fault in sharded.FAULTS:
        ranks = processes(2).run(sharded.broken_life, fault, 3, 25, 2, 0)
    else:
        ranks = processes(2).run(sharded.unmasked_life, 3, 25, 2, 0)
    assert shards.differences(one, ranks)


def test_a_plan_without_shards_is_an_ordinary_cache(processes):
    digests = processes(2).run(shards.life, 9, 10, 2, 1, 1)
    assert digests[0].digests == digests[1].digests == shards.life(9, 10, 1, 1, 1).digests
