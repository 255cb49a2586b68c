"""The engine of ``examples/serve``: whatever runs beside a request, it gets the tokens that it gets alone."""

import random

import pytest
import torch
from transformers import DynamicCache

from examples.serve import Ask, Engine
from kvcore.errors import OutOfBlocks, RequestError, ShapeError
from kvcore.interop.transformers import PackedModel
from tests.support import tiny_models as models

MODELS = {"full": models.multi_head, "sliding": models.sliding, "mixed, sinks": models.gpt_oss}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in MODELS.items()}


def alone(model, ask):
    """The best tokens one by one, with the model's own cache."""
    answer, ids, cache = [], list(ask.prompt), DynamicCache(config=model.config)
    with torch.no_grad():
        while len(answer) < ask.new and not set(answer[-1:]) & ask.stop:
            ids = [int(model(torch.tensor([ids]), cache=cache).logits[0, -1].argmax())]
            answer += ids
    return answer


def asks_of(seed, count=6):
    """Prompts that begin alike in part, some of them repetitive, so that drafts are made."""
    choose = random.Random(seed)
    system = [choose.randrange(models.VOCABULARY) for _ in range(18)]
    asks = []
    for _ in range(count):
        own = [choose.randrange(models.VOCABULARY) for _ in range(choose.randint(1, 5))] * choose.choice([1, 3])
        asks.append(Ask(system[: choose.choice([0, 9, 18, 18])] + own, new=choose.randint(1, 14)))
    return asks


def served(model, asks, **options):
    """The engine, once all have their answers and everything is given back."""
    engine = Engine(PackedModel(model), **{"max_requests": 4, "block_tokens": 4, **options})
    for ask in asks:
        engine.submit(ask)
    engine.run()
    for lane in engine.lanes.values():
        assert (lane.cache.free_blocks, lane.cache.free_slots) == (lane.cache.plan.blocks, lane.cache.plan.slots)
    return engine


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_one_by_one(made, kind):
    """Small pools, small budgets and drafts: requests make room for one another, and drafts are taken back."""
    preempted = hits = refused = 0
    for seed in range(5 if kind == "full" else 2):
        asks = asks_of(seed)
        drafts = 3 * (seed % 2)
        lane = served(made[kind], asks, budget=(5, 64)[seed % 2], drafts=drafts, max_tokens=56).lanes["default"]
        for ask in asks:
            assert ask.answer == alone(made[kind], ask), seed
            assert (ask.reason, len(ask.times)) == ("length", ask.new)
        preempted += lane.preemptions
        hits += lane.reused
        refused += lane.drafted - lane.accepted
    assert hits > 0
    if kind == "full":
        assert preempted > 0
        assert refused > 0


def test_drafts_save_steps(made):
    few, many = (Ask([7, 8, 9] * 6, new=24) for _ in range(2))
    steps = []
    for ask, drafts in ((many, 0), (few, 6)):
        engine = Engine(PackedModel(made["full"]), max_requests=1, max_tokens=64, drafts=drafts)
        list(engine.stream(ask))
        steps.append(len(set(ask.times)) if not drafts else engine.lanes["default"].accepted)
    assert few.answer == many.answer == alone(made["full"], few)
    assert steps[0] == 24
    assert steps[1] > 0


def test_a_prompt_waits_for_its_beginning(made):
    """Eight prompts at once that begin alike: what they share is computed once."""
    system = list(range(1, 33))
    asks = [Ask([*system, 40 + number], new=2) for number in range(4)]
    ran = []

    class Counting(PackedModel):
        def logits(self, cache, batch, last=None):
            ran.append(sum(map(len, batch.values())))
            return super().logits(cache, batch, last)

    engine = Engine(Counting(made["full"]), max_requests=4, max_tokens=256, block_tokens=8, budget=16)
    for ask in asks:
        engine.submit(ask)
    engine.run()
    assert sum(ran) == 33 + 3 * 1 + 4 * 1
    assert [ask.answer for ask in asks] == [alone(made["full"], ask) for ask in asks]


def test_formats_side_by_side_and_salts(made):
    lanes = {"exact": None, "small": {"key": "int8_row", "value": "int8_row"}}
    prompt = list(range(20, 45))
    asks = [Ask(prompt, new=6, lane=lane, salt=salt) for lane in lanes for salt in (None, "a", "a")]
    engine = served(made["full"], asks, lanes=lanes, max_tokens=256)
    assert all(ask.answer == alone(made["full"], ask) for ask in asks if ask.lane == "exact")
    assert len({tuple(ask.answer) for ask in asks if ask.lane == "small"}) == 1
    small, exact = engine.lanes["small"].cache, engine.lanes["exact"].cache
    assert small.nbytes < exact.nbytes / 2
    assert [lane.reused for lane in engine.lanes.values()] == [24, 24]


def test_streams_stops_draws_and_ends(made):
    model = PackedModel(made["full"])
    engine = Engine(model, max_requests=2, max_tokens=128, block_tokens=4)
    told, plain = [], Ask([3, 4, 5], new=12, tell=lambda token: told.append(token))
    assert list(engine.stream(plain)) == plain.answer == told[:-1]
    assert told[-1] is None
    stop = plain.answer[4]
    short = Ask([3, 4, 5], new=12, stop=frozenset([stop]))
    assert list(engine.stream(short)) == plain.answer[: plain.answer.index(stop) + 1]
    assert short.reason == "stop"
    # A draw depends on its seed and place, not on who is there.
    drawn = [Ask([3, 4, 5], new=12, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    list(engine.stream(drawn[0]))
    for ask in drawn[1:]:
        engine.submit(ask)
    engine.run()
    assert drawn[0].answer == drawn[1].answer != drawn[2].answer
    running, waiting = engine.submit(Ask([1], new=50)), engine.submit(Ask([2], new=50))
    engine.step()
    last = engine.submit(Ask([9], new=3))
    for ask in (running, waiting):
        engine.cancel(ask)
    engine.run()
    assert [running.reason, waiting.reason, last.reason] == ["cancelled", "cancelled", "length"]
    assert len(running.answer) == 1
    assert not engine.busy


def test_what_cannot_be_served_is_refused(made, monkeypatch):
    engine = Engine(PackedModel(made["full"]), max_requests=2, max_tokens=32, block_tokens=4)
    for error, ask in [
        (OutOfBlocks, Ask([1] * 20, new=13)),
        (ShapeError, Ask([], new=1)),
        (ShapeError, Ask([1], new=0)),
        (RequestError, Ask([1], lane="other")),
        (ShapeError, Ask([1], new=1, salt="")),
        (ShapeError, Ask([-1], new=1)),
        (ShapeError, Ask([1, models.VOCABULARY], new=1)),
    ]:
        with pytest.raises(error):
            engine.submit(ask)
        assert not engine.busy
    done = engine.submit(Ask([1], new=1))
    engine.run()
    with pytest.raises(RequestError):
        engine.submit(done)
    bad, good = engine.submit(Ask([9], new=2)), engine.submit(Ask([5, 6], new=2))
    forward = made["full"].forward

    def failing(*arguments, input_ids, **options):
        if 9 in input_ids:
            raise RuntimeError("nine")
        return forward(*arguments, input_ids=input_ids, **options)

    with monkeypatch.context() as patched:
        patched.setattr(made["full"], "forward", failing)
        with pytest.raises(RuntimeError, match="nine"):
            engine.step()
    # Nothing has changed, so whoever is at fault can go.
    engine.cancel(bad)
    engine.run()
    assert good.answer == alone(made["full"], good)
