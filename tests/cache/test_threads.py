"""Several threads on one cache: verbs take turns, steps are not disturbed, the order of turns explains it all."""

import threading
import time

import pytest

from kvcore.errors import OutOfSlots, StepError
from tests.reliability import threads
from tests.support import stories
from tests.support.stories import LATENT


def test_others_wait_until_a_step_has_ended(backend):
    cache = stories.create(LATENT, backend)
    a, b = cache.admit(), cache.admit()
    started, order = threading.Event(), []

    def other():
        started.set()
        cache.release(b)
        order.append("released")
        stories.tell(cache, {a: [7]})
        order.append("stepped")

    with cache.step({a: [1, 2]}) as step:
        thread = threading.Thread(target=other)
        thread.start()
        started.wait()
        time.sleep(0.05)
        stories.feed(step, [1, 2])
        # The step's own thread is refused, not made to wait for itself.
        with pytest.raises(StepError):
            cache.release(b)
        order.append("step")
    thread.join(10)
    assert order == ["step", "released", "stepped"]
    assert cache.digest([a]) == stories.retell(backend, LATENT, [1, 2, 7])


def test_a_step_may_end_in_another_thread(backend):
    cache = stories.create(LATENT, backend)
    a = cache.admit()
    step = cache.step({a: [1, 2]})
    stories.feed(step, [1, 2])
    thread = threading.Thread(target=step.commit)
    thread.start()
    thread.join(10)
    stories.tell(cache, {a: [3]})
    assert cache.digest([a]) == stories.retell(backend, LATENT, [1, 2, 3])


def test_admission_never_gives_a_slot_twice(backend):
    cache = stories.create(LATENT, backend, max_requests=3, check=False)
    held, faults = set(), []

    def worker():
        for _ in range(60):
            try:
                request = cache.admit()
            except OutOfSlots:
                continue
            slot = request.slot
            if slot in held:
                faults.append(slot)
            held.add(slot)
            held.discard(slot)
            cache.release(request)

    workers = [threading.Thread(target=worker) for _ in range(8)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    assert faults == []
    assert cache.free_slots == 3


def test_each_thread_generates_as_if_alone(backend):
    cache = stories.create(LATENT, backend, max_requests=4, check=False)
    digests = {}

    def worker(number):
        request = cache.admit()
        for token in range(12):
            stories.tell(cache, {request: [100 * number + token]})
        digests[number] = cache.digest([request])

    workers = [threading.Thread(target=worker, args=(number,)) for number in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(120)
    assert digests == {
        number: stories.retell(backend, LATENT, range(100 * number, 100 * number + 12)) for number in range(4)
    }


def test_eight_threads_linearise():
    record = threads.run(threads=8, operations=300, seed=1)
    assert record["divergences"] == 0
    assert record["operations"] == 2400
    assert min(record["kinds"].values()) > 20


def test_the_check_notices_operations_out_of_order():
    plan, log = threads.plan_of(), []
    threads.drive(threads.Logged(plan, log), threads=1, operations=400, seed=3)  # one: the same log every time
    assert threads.replay(plan, log) is None
    both = [(at, log[at], log[at + 1]) for at in range(len(log) - 1)]
    swapped = next(at for at, one, two in both if one.what == two.what == "admit" and one.free != two.free)
    log[swapped], log[swapped + 1] = log[swapped + 1], log[swapped]
    assert threads.replay(plan, log) is not None
