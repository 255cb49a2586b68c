"""R7: eight threads on one cache; the order in which their turns were taken explains every answer.

Each thread admits, steps, forks, rolls back and releases requests of its own choice, also those that other threads
admitted. What happened is logged inside the cache's turns; the log, replayed alone on the model, must allow all of it.
The backend here keeps no bytes, so that the locking and counting is all that is measured.
"""

import contextlib
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.errors import KvcoreError, OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.testing.model import Divergence, Model, require
from kvcore.testing.operations import shrink
from tests.reliability import command
from tests.reliability.bare import BareCache, plan_of


class Event(NamedTuple):
    """One turn: what was asked, what came of it (an error's name, or the values), and the free units after it."""

    what: str
    asked: Any
    outcome: Any
    free: tuple[int, int]


class Logged:
    """A cache whose every turn is written down before the next one begins."""

    def __init__(self, plan, log):
        self.cache = BareCache(plan)
        self.log = log

    def turn(self, what, asked, act):
        """Do something and log it in one turn of the cache."""
        with self.cache._state._lock:
            try:
                outcome = act()
            except KvcoreError as error:
                outcome = type(error)
            self.log.append(Event(what, asked, outcome, (self.cache.free_slots, self.cache.free_blocks)))
        return outcome


def drive(logged: Logged, *, threads: int, operations: int, seed: int) -> None:
    """Let the threads loose."""
    requests: list[Any] = []
    # Let threads change places in the middle of a verb, which they do not in a few milliseconds.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def worker(number: int) -> None:
        choice = random.Random(seed * 1000 + number)
        for _ in range(operations):
            one_operation(logged, requests, choice)

    workers = [threading.Thread(target=worker, args=(number,)) for number in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    sys.setswitchinterval(interval)


def one_operation(logged: Logged, requests: list[Any], choice: random.Random) -> None:
    """One random operation on one of the requests that any thread admitted, released ones included."""
    cache = logged.cache
    known = list(requests)
    request = choice.choice(known[-12:]) if known else None
    what = choice.choices(("admit", "step", "fork", "truncate", "release"), (4, 8, 2, 3, 4))[0] if known else "admit"
    if what == "admit":

        def admit():
            new = cache.admit()
            return new, new.id, new.slot

        outcome = logged.turn(what, None, admit)
        if isinstance(outcome, tuple):
            requests.append(outcome[0])
    elif what == "step":
        count = choice.randint(0, 9)

        def step():
            with cache.step({request: count}):
                pass
            return list(request.blocks)

        logged.turn(what, (request.id, count), step)
    elif what == "fork":

        def fork():
            new = cache.fork(request)
            return new, new.id, new.slot

        outcome = logged.turn(what, request.id, fork)
        if isinstance(outcome, tuple):
            requests.append(outcome[0])
    elif what == "truncate":
        back = choice.randint(0, 4)

        def truncate():
            length = max(0, request.length - back)
            try:
                cache.truncate(request, length)
            except RollbackError:
                return length, RollbackError
            return length, None

        logged.turn(what, request.id, truncate)
    else:
        logged.turn(what, request.id, lambda: cache.release(request))
        # Most are forgotten; some stay, to be used although they are gone.
        if choice.random() < 0.9 and request in requests:
            with contextlib.suppress(ValueError):
                requests.remove(request)


def replay(plan, log: Sequence[Event]) -> tuple[int, str] | None:
    """(number of the first event that the model does not allow, why), or None."""
    model = Model(plan, publishes=False)
    for number, event in enumerate(log):
        try:
            _explain(model, event)
            require(event.free == (model.free_slots, model.free_blocks), f"free {event.free}")
        except Divergence as divergence:
            return number, str(divergence)
    return None


def failure(plan, log: list[Event], seed: int, number: int, why: str) -> dict[str, Any]:
    """A failure's record, printed too: the last of the events contradicts the ones that are left before it."""
    last = log[number]
    short = shrink(log[:number], lambda some: replay(plan, [*some, last]) == (len(some), why))
    print(f"seed {seed}: {why}", *short, last, sep="\n  ")
    return {"seed": seed, "error": why, "trace": [str(event) for event in (*short, last)]}


def _explain(model: Model, event: Event) -> None:
    what, asked, outcome, _ = event
    if what == "admit":
        _admitted(model, outcome, None)
        return
    id = asked[0] if what == "step" else asked
    if id not in model.live:
        require(outcome is RequestError, "a released request was used")
        return
    if what == "step":
        count, over = model.needs({id: asked[1]})
        if over or count > model.free_blocks:
            require(outcome is OutOfBlocks, f"{count} blocks of {model.free_blocks} were enough")
        else:
            require(isinstance(outcome, list), "a step was refused")
            model.stepped({id: [0] * asked[1]}, {id: outcome})
    elif what == "fork":
        _admitted(model, outcome, id)
    elif what == "truncate":
        length, error = outcome
        if length < model.deepest(id):
            require(error is RollbackError, "a rollback went too deep")
        else:
            require(error is None, "a rollback was refused")
            model.truncated(id, length)
    else:
        require(outcome is None, "a release was refused")
        model.released(id)


def _admitted(model: Model, outcome: Any, source: int | None) -> None:
    if model.free_slots == 0:
        require(outcome is OutOfSlots, "admitted beyond capacity")
        return
    require(isinstance(outcome, tuple), "an admission was refused")
    _, id, slot = outcome
    if source is None:
        model.admitted(id, slot)
    else:
        model.forked(source, id, slot)


def run(*, threads: int, operations: int, seed: int) -> dict[str, Any]:
    """Drive, replay, and say what was found."""
    plan, log = plan_of(), []
    drive(Logged(plan, log), threads=threads, operations=operations, seed=seed)
    found = replay(plan, log)
    failures = [failure(plan, log, seed, *found)] if found else []
    kinds = Counter(event.what for event in log)
    errors = Counter(event.outcome.__name__ for event in log if isinstance(event.outcome, type))
    return {
        "figure": "R7",
        "threads": threads,
        "operations": len(log),
        "seed": seed,
        "divergences": len(failures),
        "failures": failures,
        "kinds": dict(kinds),
        "refusals": dict(errors),
    }


if __name__ == "__main__":
    command.main(__doc__, lambda full, seed: run(threads=8, operations=100_000 if full else 1_000, seed=seed))
