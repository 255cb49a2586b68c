"""Caches with ``canary``: what is not as it was written is named, and what is stays unnamed, whichever way it came."""

import pickle

import numpy as np
import pytest

import kvcore
from kvcore import check_words
from kvcore.cache import Fault
from kvcore.errors import BackendError, FaultError, SpecError
from kvcore.ops.canary import Known
from kvcore.plan import plan_cache
from kvcore.spec import presets
from tests.reliability import canary, command
from tests.support import recurrent, stories


def create(spec, backend="reference", **options):
    return kvcore.create_cache(
        spec, backend=backend, **{"max_requests": 4, "max_tokens": 256, "max_draft_tokens": 3, "canary": 1, **options}
    )


def test_perturbations_are_named_and_nothing_else_is():
    record = command.work(canary.FIGURE, 40, backend="reference")
    assert record["divergences"] == 0, record["failures"]
    record = command.work(canary.FIGURE, 20, first_seed=3, backend="torch_triton")
    assert record["divergences"] == 0, record["failures"]


@pytest.mark.parametrize("part", ["_seen", "_rows", "_of_index", "_misplaced"])
def test_the_figure_notices_what_is_not_looked_at(part, monkeypatch, capsys):
    if part == "_misplaced":
        monkeypatch.setattr("kvcore.cache.canary.Canary._misplaced", lambda *_: [])
    elif part == "_seen":
        monkeypatch.setattr("kvcore.cache.canary._seen", lambda _, rows: (0 * rows.starts, 0 * rows.starts))
    else:
        monkeypatch.setattr(f"kvcore.ops.canary.{part}", lambda *_, **__: [])
    record = command.work(canary.FIGURE, 100)
    assert record["divergences"] > 0
    assert "seed" in capsys.readouterr().out


def test_a_check_word_sees_every_bit_and_the_rows_place():
    rows = np.random.default_rng(0).integers(0, 256, (1, 22), np.uint8)
    number = np.array([7])
    pieces = ((0, 16), (16, 6))
    (word,) = check_words.check_words(rows, number, 5, pieces)
    others = {int(check_words.check_words(rows, at, salt, pieces)[0]) for at, salt in ((number + 1, 5), (number, 6))}
    for bit in range(22 * 8):
        flipped = rows.copy()
        flipped[0, bit // 8] ^= 1 << bit % 8
        others.add(int(check_words.check_words(flipped, number, 5, pieces)[0]))
    assert len(others) == 2 + 22 * 8
    assert int(word) not in others
    assert check_words.table_hash([3, 1, 2]) != check_words.table_hash([1, 3, 2])


def test_words_are_planned_to_the_byte_and_only_where_they_are_asked_for():
    sizes = {"max_requests": 3, "max_tokens": 256, "max_draft_tokens": 2}
    plain, watched = plan_cache(stories.LATENT, **sizes), plan_cache(stories.LATENT, **sizes, canary=4)
    assert plain.stored == plain.regions == watched.regions
    assert not plain.watched
    for one in watched.watched:
        rows = one.regions[0].rows
        assert one.words.unit.nbytes == 4 * -(-rows // one.stride)
        assert one.stride == (4 if one.component.growth == "slot" or rows % 4 == 0 else 1)
    words = sum(watched.units(one.words) * one.words.unit.nbytes for one in watched.watched)
    assert watched.nbytes == plain.nbytes + words
    cache = create(stories.LATENT, canary=True)
    assert cache.plan.canary == 16
    assert cache.nbytes == cache.plan.nbytes
    assert "0.entries.check_word" in cache.pools
    assert create(stories.LATENT, canary=False)._state.canary is None
    budget = plan_cache(stories.PAGED, max_requests=2, budget_bytes=40_000, canary=1)
    assert budget.total_bytes <= 40_000


@pytest.mark.parametrize("canary", [0, -1, 1.5, "reads", None, (1 << 30) + 1, 1 << 70])
def test_what_is_no_sample_is_refused(canary):
    with pytest.raises(SpecError, match="canary"):
        create(stories.PAGED, canary=canary)


def test_caches_without_a_canary_have_no_faults_to_tell_of():
    with pytest.raises(SpecError, match="canary=False"):
        create(stories.PAGED, canary=False).faults()


def test_pools_that_nobody_can_look_at_are_refused(monkeypatch):
    monkeypatch.setattr("kvcore.ops.canary.host_view", lambda _: None)
    with pytest.raises(BackendError, match="canary"):
        create(stories.PAGED)


def perturbed(cache, layer, role, request, position):
    """Flip a bit of a row."""
    watched = next(one for one in cache.plan.watched if (one.layer, one.role) == (layer, role))
    region = watched.regions[0]
    number = position // watched.component.tokens_per_row
    unit = request.slot if region.growth == "slot" else request.blocks[number // region.rows]
    place = region.unit.places[0]
    pool = cache._state.pools[region.buffers[place.buffer][0]]
    pool[unit, place.base + number % region.rows * region.steps[0] * place.stride] ^= 4


def fill(step):
    """Zeros for all that recurrent layers must be given for one token."""
    for number, layer in enumerate(step.cache.spec.layers):
        handle = step.layer(number)
        if layer.state is not None:
            handle.write_state(np.zeros((1, *layer.state.shape), np.float32))
        if layer.conv is not None:
            handle.append_conv(np.zeros((1, layer.conv.channels), np.float32))
        if layer.kv is not None:
            handle.append_kv(*[np.zeros((1, 1, 2), np.float32)] * 2)


@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
def test_recurrent_layers_are_looked_after_too(backend, every):
    cache = create(recurrent.spec(), backend)
    request = cache.admit()
    tokens = []
    for count in (5, 1, 1, 2):
        recurrent.advance(cache, {request: (tokens, list(range(count)))}, every=every)
        tokens += range(count)
    assert cache.faults() == ()
    for role, position in (("state", 8), ("conv", 6)):
        perturbed(cache, 0, role, request, position)
        told = (Fault(request, "row", 0, role, position),)
        assert cache.faults() == told
        with pytest.raises(FaultError) as caught, cache.step({request: 1}) as step:
            fill(step)
        assert caught.value.faults == told
        assert request.length == len(tokens)
        perturbed(cache, 0, role, request, position)
    recurrent.advance(cache, {request: (tokens, [1])}, every=every)


def test_rows_that_a_long_step_takes_the_place_of_are_looked_at_before(backend):
    cache = create(stories.LATENT, backend)
    request = cache.admit()
    stories.tell(cache, {request: range(20)})
    perturbed(cache, 0, "window", request, 17)
    with pytest.raises(FaultError, match="step: got layer 0, window, position 17 of request 0"):
        cache.step({request: 40})
    assert (request.length, cache._state.step) == (20, None)
    free = cache.free_blocks
    perturbed(cache, 0, "window", request, 17)
    stories.tell(cache, {request: range(40)})
    assert cache.free_blocks < free
    assert cache.faults() == ()


def test_steps_that_fail_and_padded_ones_leave_the_words_as_they_belong(backend):
    cache = create(stories.LATENT, backend)
    first, second = cache.admit(), cache.admit()
    stories.tell(cache, {first: range(30), second: range(17)})
    for tokens in (1, 3, 12):
        step = cache.step({first: tokens, second: 1})
        stories.feed(step, [*range(tokens), 1])
        step.abort()
        assert cache.faults() == ()
    for token in range(5):
        with cache.step({first: [token], second: [token]}, pad_tokens=4, pad_requests=3) as step:
            stories.feed(step, [token, token])
    assert cache.faults() == ()


@pytest.mark.parametrize("window", [None, 7])
def test_tokens_that_a_commit_leaves_out_are_no_faults(backend, window):
    cache = create(presets.classic(layers=1, key_heads=1, key_dim=8, block_tokens=16, window=window), backend)
    request, length = cache.admit(), 0
    for reserved, kept in ((14, 14), (4, 1), (3, 0), (4, 2), (3, 3)):
        rows = cache.asarray(np.full((reserved, 1, 8), length + 1, np.float32))
        with cache.step({request: reserved}) as step:
            cache.pools = cache.ops.append_kv(cache.pools, 0, step.index, rows, rows)
            step.commit({request: kept})
        length += kept
        assert (request.length, cache.faults()) == (length, ())
    perturbed(cache, 0, "kv", request, length - 1)
    assert cache.faults() == (Fault(request, "row", 0, "kv", length - 1),)


def test_what_was_refused_is_as_it_was_and_the_others_go_on(backend):
    # Without rows to spare a step takes the place of rows that are alive again once it is rolled back.
    cache = create(stories.LATENT, backend, max_draft_tokens=0)
    first, second = cache.admit(), cache.admit()
    stories.tell(cache, {first: range(30), second: range(22)})
    perturbed(cache, 3, "window", second, second.length - 1)
    with (
        pytest.raises(FaultError, match="window, position 21 of request 1"),
        cache.step({first: [1], second: [1]}, pad_tokens=4, pad_requests=3) as step,
    ):
        stories.feed(step, [1, 1])
    assert cache.faults() == (Fault(second, "row", 3, "window", 21),)
    stories.tell(cache, {first: [1]})
    cache.release(second)
    assert cache.faults() == ()


def test_every_copy_of_a_row_is_looked_at():
    cache = create(stories.MIXED, "torch_triton", layout="by_head")
    request = cache.admit()
    stories.tell(cache, {request: range(20)})
    watched = next(one for one in cache.plan.watched if (one.layer, one.role) == (2, "kv"))
    region = watched.regions[0]
    assert region.copies == 2
    row = 18 % region.rows
    for copy in range(2):
        pool = cache.pools["2.kv.key_heads"]
        pool[request.slot, (row + copy * region.rows) * region.unit.places[0].stride] ^= 1
        assert cache.faults() == (Fault(request, "row", 2, "kv", 18),)
        pool[request.slot, (row + copy * region.rows) * region.unit.places[0].stride] ^= 1


@pytest.mark.parametrize("prefix", ["zero", "full", kvcore.Periodic(8)], ids=str)
def test_rows_that_come_from_elsewhere_have_their_words(prefix, tmp_path):
    cache = create(stories.MIXED, prefix=prefix)
    prompt = list(range(100, 129))
    first = cache.admit(prompt)
    stories.tell(cache, {first: prompt[:16]})
    stories.tell(cache, {first: prompt[16:]})
    hit = cache.admit(prompt)
    assert hit.length
    stories.tell(cache, {hit: prompt[hit.length :]})
    cache.save(tmp_path / "requests.kv")
    loaded = kvcore.load(tmp_path / "requests.kv", backend="torch_triton", canary=1, prefix=prefix)
    for one in (cache, loaded):
        one.import_request(cache.export_request(first))
        assert one.faults() == ()
        stories.tell(one, {request: [1, 2, 3] for request in one.requests})
        assert one.faults() == ()
    perturbed(loaded, 0, "entries", loaded.requests[1], 8)
    assert {fault.request for fault in loaded.faults()} == {loaded.requests[1]}


def test_a_device_tells_later_and_the_next_step_hears_of_it(monkeypatch):
    class Late(Known):
        def ready(self):
            return there

    cache = create(stories.PAGED)
    request = cache.admit()
    stories.tell(cache, {request: range(10)})
    monkeypatch.setattr("kvcore.ops.canary.Known", Late)
    there = False
    perturbed(cache, 0, "kv", request, 3)
    stories.tell(cache, {request: [1]})
    assert request.length == 11
    there = True
    with pytest.raises(FaultError, match="kv, position 3 of request 0"):
        cache.step({request: 1})
    there = False
    stories.tell(cache, {request: [1]})
    # Whoever asks waits, and is told once.
    assert cache.faults([request]) == (Fault(request, "row", 0, "kv", 3),)
    perturbed(cache, 0, "kv", request, 3)
    assert cache.faults() == ()


def test_errors_travel_without_the_requests():
    cache = create(stories.PAGED)
    request = cache.admit()
    stories.tell(cache, {request: range(3)})
    cache._state.manager.place_of(request).length = 2
    with pytest.raises(FaultError, match="length of request 0") as caught:
        cache.step({request: 1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.faults) == (str(caught.value), ())
    assert [str(fault) for fault in caught.value.faults] == ["length of request 0"]
