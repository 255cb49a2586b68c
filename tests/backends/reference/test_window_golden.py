"""The sliding window against written traces: which position lies in which slot row, and who sees what."""

import math

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, LayerSpec, Window
from tests.support.backends_under_test import poison

W = 4


def make_cache(build, *, window=W, requests=2, drafts=0, dim=1):
    layer = LayerSpec(window=Window(dim=dim, window=window, format="fp32"))
    cache = build(CacheSpec(layers=[layer, layer]), max_requests=requests, max_draft_tokens=drafts)
    poison(cache)
    return cache


def values_of(positions, dim=1):
    """Row of position p: p + 100, so that no row looks like an unwritten one."""
    return np.repeat(np.array(positions, np.float32).reshape(-1, 1) + 100, dim, axis=1)


def feed(cache, request, start, new):
    """Append positions start .. start + new - 1 to both layers; what ``gather_window`` then says of layer 1."""
    with cache.step({request: new}) as step:
        step.layer(0).append_window(-values_of(range(start, start + new)))
        step.layer(1).append_window(values_of(range(start, start + new)))
        gathered = step.layer(1).gather_window()
    return kvcore.to_numpy(gathered.values)[0, :, 0], kvcore.to_numpy(gathered.positions)[0]


def ring_of(cache, request):
    """Positions in a slot's ring, row by row, read from the raw pool of layer 1."""
    stored = kvcore.to_numpy(cache.pools["1.window.page"])[request.slot].view("<f4")
    return [None if value == 0 else int(value) - 100 for value in stored.tolist()]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, [None] * 4), (3, [0, 1, 2, None]), (4, [0, 1, 2, 3]), (6, [4, 5, 2, 3]), (9, [8, 5, 6, 7]),
        (8, [4, 5, 6, 7]), (5, [4, 1, 2, 3]), (100, [96, 97, 98, 99]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", ["prefill", "token by token", "in twos"])
def test_where_a_prompt_lies(build, length, expected, split):
    """Slot row = position mod W, the last W positions; a step longer than the ring writes the survivors only."""
    cache = make_cache(build)
    cache.admit()
    request = cache.admit()
    size = {"prefill": max(length, 1), "token by token": 1, "in twos": 2}[split]
    for start in range(0, length, size):
        feed(cache, request, start, min(size, length - start))
    assert ring_of(cache, request) == expected


@pytest.mark.parametrize(
    ("t", "slots"), [(3, [0, 1, 2, 3]), (4, [1, 2, 3, 0]), (6, [3, 0, 1, 2]), (9, [2, 3, 0, 1]), (1, [0, 1]), (0, [0])]
)
def test_a_decode_step_reads_slots_from_the_oldest_position(build, t, slots):
    cache = make_cache(build)
    request = cache.admit()
    if t:
        feed(cache, request, 0, t)
    values, positions = feed(cache, request, t, 1)
    count = len(slots)
    assert [position % W for position in positions[:count]] == slots
    assert positions[:count].tolist() == [*range(t + 1 - count, t + 1)]
    assert values[:count].tolist() == [position + 100 for position in range(t + 1 - count, t + 1)]
    assert positions[count:].tolist() == [-1] * (W - count)
    assert not values[count:].any()


def seen_by_each(build, chunks):
    """Positions that each query of a prompt sees, found by attending with q = 0: every visible row weighs the same.

    The row of p has channel p equal to 1, so that n times the output marks the visible positions.
    """
    total = sum(chunks)
    cache = make_cache(build, dim=total)
    cache.admit()
    request = cache.admit()
    start, seen = 0, []
    for new in chunks:
        with cache.step({request: new}) as step:
            for number in (0, 1):
                step.layer(number).append_window(np.eye(total, dtype=np.float32)[start : start + new])
            out, lse = step.layer(1).attend(np.zeros((new, 1, total), np.float32))
        for weights, log_count in zip(kvcore.to_numpy(out)[:, 0], kvcore.to_numpy(lse)[:, 0], strict=True):
            visible = np.flatnonzero(weights).tolist()
            assert log_count == pytest.approx(math.log(len(visible)), abs=1e-6)
            np.testing.assert_allclose(weights[visible], 1 / len(visible), rtol=1e-6)
            seen.append(visible)
        start += new
    return seen


@pytest.mark.parametrize("chunks", [[6], [1] * 6, [3, 3], [1, 5], [5, 1], [4, 0, 2]], ids=str)
def test_who_sees_what_in_a_prompt_of_six(build, chunks):
    assert seen_by_each(build, chunks) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


@pytest.mark.parametrize("chunks", [[13], [2, 11], [11, 2], [5, 5, 3], [9, 4]], ids=str)
def test_a_step_longer_than_the_ring_still_sees_what_it_overwrites(build, chunks):
    assert seen_by_each(build, chunks) == [[*range(max(0, t - 3), t + 1)] for t in range(13)]


@pytest.mark.parametrize(("length", "count", "oldest"), [(127, 127, 0), (128, 128, 0), (129, 128, 1), (300, 128, 172)])
def test_a_window_of_128_holds_128_positions_the_newest_included(build, length, count, oldest):
    cache = make_cache(build, window=128, requests=1)
    request = cache.admit()
    values, positions = feed(cache, request, 0, length)
    assert positions.shape == (128,)
    assert positions[:count].tolist() == [*range(oldest, length)]
    assert values[:count].tolist() == [position + 100 for position in range(oldest, length)]
    assert (positions[count:] == -1).all()


def test_before_its_append_a_step_shows_the_window_as_it_was(build):
    cache = make_cache(build)
    request = cache.admit()
    feed(cache, request, 0, 5)
    with cache.step({request: 2}) as step:
        before = kvcore.to_numpy(step.layer(1).gather_window().positions)[0].tolist()
        for number in (0, 1):
            step.layer(number).append_window(values_of([5, 6]))
        after = kvcore.to_numpy(step.layer(1).gather_window().positions)[0].tolist()
    assert (before, after) == ([1, 2, 3, 4], [3, 4, 5, 6])


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_spare_rows_are_not_visible(build, drafts):
    """The ring is W + D long and position p lies in row p mod (W + D); a query still sees W positions."""
    cache = make_cache(build, drafts=drafts)
    request = cache.admit()
    _, positions = feed(cache, request, 0, 11)
    assert len(positions) == W + drafts
    assert positions.tolist() == [7, 8, 9, 10] + [-1] * drafts
    rows = W + drafts
    expected = {position % rows: position for position in range(11 - rows, 11)}
    assert ring_of(cache, request) == [expected[row] for row in range(rows)]
