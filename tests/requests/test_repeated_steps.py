"""Steps that repeat the last one are as if all of them had been looked at, whatever comes in between."""

import random

import pytest

import kvcore
from kvcore.arrays import to_numpy
from kvcore.errors import OutOfBlocks, RollbackError
from kvcore.spec import CacheSpec, LayerSpec, presets
from kvcore.step import StepNumbers

WINDOWS = presets.classic(layers=1, key_heads=1, key_dim=4, window=6, block_tokens=4)
PLAIN = presets.classic(layers=1, key_heads=1, key_dim=4, block_tokens=4)
MIXED = CacheSpec(
    layers=[LayerSpec(kv=PLAIN.layers[0].kv), LayerSpec(kv=WINDOWS.layers[0].kv)], block_tokens=PLAIN.block_tokens
)


def opened(spec, backend, prefix):
    how = {"max_requests": 5, "max_tokens": 160, "max_draft_tokens": 2, "prefix": prefix}
    return kvcore.create_cache(spec, backend=backend, **how)


class Pair:
    """Two caches that are asked the same; one of them has every step looked at whole."""

    def __init__(self, *how):
        self.caches = opened(*how), opened(*how)
        self.held = []
        # Indices of steps that are not padded, and what they said.
        self.kept = []

    def both(self, act):
        """What ``act`` gives of each, or the error that it raises of both."""
        found = []
        for number, cache in enumerate(self.caches):
            if number:
                cache._state.manager.forget_last()
            try:
                found.append(act(cache, number))
            except (OutOfBlocks, RollbackError) as error:
                found.append(error)
        one, other = found
        assert isinstance(one, Exception) == isinstance(other, Exception)
        return None if isinstance(one, Exception) else found

    def admit(self, ids):
        found = self.both(lambda cache, _: cache.admit(ids))
        self.held.append(found)

    def step(self, chosen, count, padding, *, abort, look, ask):
        """A step of some requests, committed or not; its index, asked for or not, is that of the other."""
        before = [[pair[n].length for pair in chosen] for n in (0, 1)] if look else None

        def run(cache, number):
            pairs = {pair[number]: count for pair in chosen}
            step = cache.step(pairs, pad_tokens=padding, pad_requests=padding)
            found = step.index if ask or number else step._device_index
            index = [to_numpy(array).copy() for array in found.arrays]
            if found is not step._device_index or (ask and padding is None):
                self.kept.append((found, index))
            if look:
                assert before[number] == [pair[number].length for pair in chosen]
            if abort:
                step.abort()
            else:
                cache.pools = cache.pools
                step.commit()
            return index

        found = self.both(run)
        for one, other in zip(*found, strict=True) if found else ():
            assert one.tolist() == other.tolist()

    def compare(self):
        for index, said in self.kept:
            for array, want in zip(index.arrays, said, strict=True):
                assert to_numpy(array).tolist() == want.tolist()
        one, other = (cache._state.manager for cache in self.caches)
        for first, second in self.held:
            mine, theirs = one.place(first), other.place(second)
            assert mine == theirs
            assert first.blocks == second.blocks
            assert one.deepest_truncation(first) == other.deepest_truncation(second)
        assert one.free_blocks == other.free_blocks
        assert one.free_slots == other.free_slots


@pytest.mark.parametrize("prefix", ["off", "full"])
@pytest.mark.parametrize("spec", [PLAIN, WINDOWS, MIXED], ids=["blocks", "rings", "both"])
@pytest.mark.parametrize("backend", ["reference", "torch_triton"])
def test_lives_with_long_runs_of_one_step_are_those_that_are_looked_at_whole(backend, spec, prefix):
    if backend == "torch_triton":
        pytest.importorskip("torch")
    rng, pair = random.Random(f"{backend} {prefix}"), Pair(spec, backend, prefix)
    for _ in range(150):
        kind = rng.choice(["admit", "truncate", "release", "fork", "prefill", "look", "run", "run", "run", "run"])
        if kind == "admit" and len(pair.held) < 5:
            pair.admit(rng.choice([None, list(range(9)), list(range(5))]))
        if not pair.held:
            continue
        number = rng.randrange(len(pair.held))
        if kind == "release":
            for cache, request in zip(pair.caches, pair.held.pop(number), strict=True):
                cache.release(request)
        elif kind == "fork" and len(pair.held) < 5:
            pair.held.append(
                [cache.fork(request) for cache, request in zip(pair.caches, pair.held[number], strict=True)]
            )
        elif kind == "truncate":
            less = rng.randrange(3)
            pair.both(
                lambda cache, n, at=number, less=less: cache.truncate(
                    pair.held[at][n], max(0, pair.held[at][n].length - less)
                )
            )
        elif kind == "prefill":
            some, abort = pair.held[number : number + 1], rng.random() < 0.2
            pair.step(some, rng.choice([1, 3, 5]), None, abort=abort, look=False, ask=True)
        elif kind == "look":
            pair.compare()
        elif kind == "run":
            chosen = rng.sample(pair.held, rng.randint(1, len(pair.held)))
            padding = rng.choice([None, 5])
            for _ in range(rng.randint(1, 9)):
                abort, look, ask = (rng.random() < share for share in (0.1, 0.1, 0.2))
                pair.step(chosen, 1, padding, abort=abort, look=look, ask=ask)
    pair.compare()


def test_a_run_of_one_step_is_not_looked_at_again(monkeypatch):
    cache = opened(PLAIN, "reference", "off")
    held = [cache.admit() for _ in range(3)]
    made = []
    monkeypatch.setattr(StepNumbers, "next", lambda *given, real=StepNumbers.next: made.append(1) or real(*given))
    for _ in range(12):
        with cache.step(dict.fromkeys(held, 1)):
            cache.pools = cache.pools
    assert len(made) == 11
    assert [request.length for request in held] == [12] * 3


def test_the_index_of_a_repeated_step_takes_the_place_of_the_one_before_unless_somebody_asked_for_that():
    pytest.importorskip("torch")
    cache = opened(PLAIN, "torch_triton", "off")
    held, kept, places = [cache.admit() for _ in range(3)], [], []
    for number in range(10):
        with cache.step(dict.fromkeys(held, 1)) as step:
            places.append(step._device_index.lengths.data_ptr())
            assert step._device_index.lengths.tolist() == [number + 1] * 3
            if number == 4:
                kept.append((step.positions, [4] * 3))
            if number == 7:
                kept += (step.index.lengths, [8] * 3), (step.request_index, [0, 1, 2])
            cache.pools = cache.pools
    lent = places[1]
    assert [place == lent for place in places] == [number not in (0, 5, 8) for number in range(10)]
    # Steps that have ended are told of themselves still.
    kept.append((step.index.starts, [9] * 3))
    with cache.step(dict.fromkeys(held, 1)):
        cache.pools = cache.pools
    assert [array.tolist() for array, _ in kept] == [said for _, said in kept]


@pytest.mark.parametrize("count", [True, 1.0], ids=["a truth value", "a float"])
def test_what_equals_one_is_no_count(count):
    cache = opened(PLAIN, "reference", "off")
    request = cache.admit()
    for _ in range(2):
        with cache.step({request: 1}):
            cache.pools = cache.pools
    with pytest.raises(kvcore.errors.ShapeError):
        cache.step({request: count})
    assert request.length == 2


def test_a_step_of_fewer_tokens_than_it_had_is_not_repeated():
    cache = opened(PLAIN, "reference", "off")
    request = cache.admit()
    for _ in range(2):
        with cache.step({request: 1}):
            cache.pools = cache.pools
    step = cache.step({request: 1})
    cache.pools = cache.pools
    step.commit({request: 0})
    with cache.step({request: 1}) as step:
        assert step.positions.tolist() == [2]
        cache.pools = cache.pools
    assert request.length == 3
