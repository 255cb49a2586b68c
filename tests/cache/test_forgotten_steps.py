"""Steps that nobody ends: dropped, of a thread that has ended, of one that goes on; and locks in one order."""

import threading
import time
import weakref

import pytest

from kvcore.errors import StepError
from kvcore.handoff import Exporter
from kvcore.portable.transport import reference
from tests.support import stories
from tests.support.stories import LATENT

LONG = list(range(200, 212))


def world(backend):
    cache = stories.create(LATENT, backend)
    a = cache.admit()
    stories.tell(cache, {a: list(range(9))})
    return cache, a, cache.digest([a])


def in_thread(act):
    """What ``act`` returns or raises in a thread of its own, which has ended."""
    found = []

    def run():
        try:
            found.append(act())
        except Exception as error:  # noqa: BLE001 - handed to who asked
            found.append(error)

    thread = threading.Thread(target=run, name="the other")
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return found[0]


@pytest.mark.parametrize("fed", [False, True], ids=["at once", "with rows in it"])
def test_a_step_that_is_dropped_is_rolled_back(backend, fed):
    cache, a, before = world(backend)
    step = cache.step({a: LONG})
    if fed:
        stories.feed(step, LONG)
    del step
    assert (cache.digest([a]), a.length) == (before, 9)
    stories.tell(cache, {a: LONG})
    assert cache.digest([a]) == stories.retell(backend, LATENT, [*range(9), *LONG])


def test_a_step_whose_handle_is_kept_is_dropped_all_the_same(backend):
    cache, a, before = world(backend)
    layer = cache.step({a: 1}).layer(0)
    assert cache.digest([a]) == before
    with pytest.raises(StepError, match="ended"):
        layer.gather_window()


def test_a_with_block_that_gives_its_step_no_name_ends_it(backend):
    cache, a, before = world(backend)

    def nameless():
        with cache.step({a: 2}):
            cache.admit()
            with pytest.raises(StepError, match="while a step is open"):
                cache.truncate(a, 3)

    with pytest.raises(StepError, match="no rows for"):
        nameless()
    assert (cache.digest([a]), a.length) == (before, 9)


def test_a_step_whose_name_is_gone_in_its_block_is_committed(backend):
    cache, a, _ = world(backend)
    step = cache.step({a: LONG})
    with step:
        stories.feed(step, LONG)
        del step
        cache.admit()
    assert cache.digest([a]) == stories.retell(backend, LATENT, [*range(9), *LONG])


def test_a_step_of_a_thread_that_has_ended_is_rolled_back(backend):
    cache, a, before = world(backend)
    step = in_thread(lambda: cache.step({a: [7]}))
    stories.feed(step, [7])
    assert (cache.digest([a]), a.length) == (before, 9)
    with pytest.raises(StepError, match="ended"):
        step.commit()


def test_another_thread_is_not_the_owner_though_it_has_its_number(backend):
    cache, a, before = world(backend)
    steps, idents = [], set()

    def opens():
        idents.add(threading.get_ident())
        steps.append(cache.step({a: [7]}))

    def refused():
        idents.add(threading.get_ident())
        return cache.digest([a])

    in_thread(opens)
    # Threads one after another are mostly given the same number.
    for _ in range(20):
        assert in_thread(refused) == before
    assert len(idents) < 21


def test_a_step_stays_open_while_it_is_held(backend):
    cache, a, _ = world(backend)
    step = cache.step({a: [7]})
    with pytest.raises(StepError, match="End the step first"):
        cache.digest()
    stories.feed(step, [7])
    with step:
        hasattr(step, "__exit__")
        with pytest.raises(StepError):
            cache.release(a)
    assert a.length == 10


def test_a_wait_for_another_threads_step_ends_in_time_and_says_whose_it_is(backend):
    cache, a, _ = world(backend)
    cache.turn_timeout = 0.2
    with cache.step({a: [7]}) as step:
        start = time.monotonic()
        error = in_thread(lambda: cache.digest([a]))
        assert isinstance(error, StepError)
        assert "MainThread" in str(error)
        assert "turn_timeout" in error.hint
        assert 0.15 < time.monotonic() - start < 20
        stories.feed(step, [7])
    assert a.length == 10


def test_whoever_waits_to_export_keeps_nobody_from_the_desk(backend):
    cache, a, _ = world(backend)
    b = cache.admit()
    desk = Exporter(cache)
    handle = desk.export(a)
    waiting = threading.Thread(target=desk.export, args=(a,), daemon=True)
    with cache.step({b: [1]}) as step:
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        answered = []
        # In this thread it would wait for ever where locks are taken in another order.
        asking = threading.Thread(target=lambda: answered.append(desk.manifest(*reference(handle))), daemon=True)
        asking.start()
        asking.join(10)
        assert len(answered) == 1
        stories.feed(step, [1])
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_ended_step_is_not_kept_alive_by_its_cache(backend):
    cache, a, _ = world(backend)
    step = cache.step({a: 0})
    seen = weakref.ref(step)
    step.commit()
    del step
    assert seen() is None
