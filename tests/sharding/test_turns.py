"""Ranks as threads that take turns: the same log as on gloo, in one process."""

import pytest

from kvcore.sharding import torch as exchange
from tests.reliability import shards
from tests.reliability.turns import Abandoned, TurnExchange, Turns
from tests.support import sharded


def test_all_hear_what_the_members_of_a_group_say_in_their_order():
    turns = Turns(4)

    def work(rank):
        group = (0, 2) if rank in (0, 2) else (1, 3)
        return [turns.gather(rank, group, (rank, number)) for number in range(3)] + turns.gather(
            rank, (3, 2, 1, 0), rank
        )

    found = turns.run(work)
    assert found[0] == found[2] == [[(0, n), (2, n)] for n in range(3)] + [3, 2, 1, 0]
    assert found[1] == found[3] == [[(1, n), (3, n)] for n in range(3)] + [3, 2, 1, 0]


def test_the_first_failure_is_raised_and_ends_the_others():
    turns, ended = Turns(3), []

    def work(rank):
        if rank == 1:
            raise ValueError("rank 1")
        try:
            turns.gather(rank, (0, 1, 2), rank)
        finally:
            ended.append(rank)

    with pytest.raises(ValueError, match="rank 1"):
        turns.run(work)
    assert ended == [0]  # rank 2 had not begun


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([(0, 1), (1, 2), (2, 0)], id="each waits for the next"),
        pytest.param([(0, 1), (0, 1), None], id="fine"),
        pytest.param([(0, 1), None, None], id="one waits for nobody"),
    ],
)
def test_ranks_that_wait_for_each_other_are_told_so(groups):
    turns = Turns(3)

    def work(rank):
        return groups[rank] and turns.gather(rank, groups[rank], rank)

    if groups[1] == groups[0]:
        assert turns.run(work) == [[0, 1], [0, 1], None]
    else:
        with pytest.raises(Abandoned, match="do not make the same calls"):
            turns.run(work)


@pytest.mark.parametrize("which", range(len(shards.SPECS)))
def test_one_log_on_all_plans_at_once(monkeypatch, which):
    monkeypatch.setattr(shards, "EACH", 15)
    told = shards.tell(3 + which, {"over": "threads"})
    assert told.failures == []
    assert told.counts["operations"] == 15
    assert told.counts["ranks"] == 2 + 2 + 4 + 8
    assert told.counts["digests_compared"] == 16 * 3
    assert told.counts["attention_compared"] > 0


@pytest.mark.parametrize("fault", sharded.FAULTS)
def test_a_fault_is_noticed(monkeypatch, fault):
    name, broken = sharded.FAULTS[fault]
    right = getattr(exchange.TorchExchange, name)
    monkeypatch.setattr(TurnExchange, name, lambda self, *arguments: broken(right, self, *arguments))
    one, plans = shards.lives(3, 25, {"CP2": (1, 2)}, 0)
    assert shards.differences(one, plans["CP2"])


def test_one_rank_of_a_plan_that_is_wrong_is_noticed():
    one, plans = shards.lives(3, 10, {"CP2": (1, 2)}, 0)
    assert shards.differences(one, plans["CP2"]) == []
    attended = next(iter(plans["CP2"][0].attention.values()))
    attended[0] += 1
    (only,) = shards.differences(one, plans["CP2"])
    assert only.startswith("rank 0: ")
    assert "out differs by 1.0" in only
