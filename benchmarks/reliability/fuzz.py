"""R1: random lives of requests against an independent model: admissions with prefix hits, steps, failed steps, forks,
rollbacks, checkpoints, releases, uses of released requests; after each of them every count must be as the model says.

R6 comes with it: free and live units add up after every operation, and after a drain everything is free.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import kvcore
from benchmarks.reliability import command
from benchmarks.reliability.bare import BareCache, plan_of
from benchmarks.reliability.model import Divergence, Model, require
from benchmarks.reliability.shrink import shrink
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError

KINDS = {"admit": 5, "step": 12, "fail": 2, "fork": 3, "truncate": 4, "release": 4, "point": 1, "stale": 1}
SEED_OPERATIONS = 10_000


class Operation(NamedTuple):
    """What to do, and numbers that choose among what is possible at that moment."""

    what: str
    a: int
    b: int
    c: int


def operations_of(seed: int, count: int) -> list[Operation]:
    """The operations of a seed."""
    choice = random.Random(seed)
    kinds = choice.choices(list(KINDS), list(KINDS.values()), k=count)
    return [Operation(what, *(choice.getrandbits(30) for _ in range(3))) for what in kinds]


def script(which: int, length: int) -> list[int]:
    """A prompt: scripts share beginnings, so that prefixes are found."""
    return [(position if position < 9 * (which % 5) else 100 * which + position) for position in range(length)]


class World:
    """A cache and its model, side by side."""

    def __init__(self, seed: int) -> None:
        policy = ("full", kvcore.Periodic(3), "zero", "off")[seed % 4]
        plan = plan_of(slots=3 + seed % 5, max_tokens=40 + 8 * (seed % 7), drafts=seed % 4)
        self.cache = BareCache(plan, prefix=policy)
        self.model = Model(plan, publishes=policy != "off")
        self.requests: dict[int, kvcore.Request] = {}
        self.scripts: dict[int, int] = {}
        self.stale: list[kvcore.Request] = []
        self.happened: Counter[str] = Counter()

    def apply(self, operation: Operation) -> None:
        """Do one operation on both, and compare."""
        known = list(self.requests)
        id = known[operation.a % len(known)] if known else None
        if operation.what == "admit" or id is None:
            self.admit(operation)
        else:
            getattr(self, operation.what)(id, operation)
        cache, model = self.cache, self.model
        require(cache.free_slots == model.free_slots, f"{cache.free_slots} free slots, not {model.free_slots}")
        require(cache.free_blocks == model.free_blocks, f"{cache.free_blocks} free blocks, not {model.free_blocks}")
        require(len(cache.requests) == len(model.live), "another number of live requests")

    def admit(self, operation: Operation) -> None:
        which, prompt = operation.b % 11, script(operation.b % 11, 1 + operation.c % 30)
        try:
            request = self.cache.admit(prompt)
        except OutOfSlots:
            require(self.model.free_slots == 0, "refused with a free slot")
            self.happened["out of slots"] += 1
            return
        self.model.admitted(request.id, request.slot)
        self.requests[request.id] = request
        self.scripts[request.id] = which
        if request.length:
            self.happened["hit"] += 1
            stored = self.cache.row(request).stored
            self.model.took_over(request.id, prompt, request.length, stored, list(request.blocks))

    def step(self, id: int, operation: Operation, *, commit: bool = True) -> None:
        known = list(self.requests)
        chosen = {id: None} | {known[(operation.b >> shift) % len(known)]: None for shift in range(operation.b % 3)}
        new: dict[int, list[int]] = {}
        for place, each in enumerate(chosen):
            length = self.requests[each].length
            count = (operation.c >> 3 * place) % 8
            new[each] = script(self.scripts[each], length + count)[length:]
            if new[each] and operation.c % 13 == 0 and length + count > self.model.live[each].stored:
                new[each][-1] = 7777
        needed, over = self.model.needs({each: len(ids) for each, ids in new.items()})
        try:
            step = self.cache.step({self.requests[each]: ids for each, ids in new.items()})
        except OutOfBlocks:
            require(over or needed > self.model.free_blocks, f"{needed} blocks were to be had")
            self.happened["out of blocks"] += 1
            return
        require(not over and needed <= self.model.free_blocks, "more blocks than there are")
        if not commit:
            # Rows were written; the rings remember how far, and what was evicted for the step stays so.
            taken = {block for each in new for block in self.requests[each].blocks} - set(self.model.holders)
            step.abort()
            self.model.took(list(taken))
            for each, ids in new.items():
                told = self.model.live[each]
                told.highest = max(told.highest, len(told.tokens) + len(ids))
            return
        step.commit()
        self.model.stepped(new, {each: list(self.requests[each].blocks) for each in new})
        for each in new:
            require(list(self.requests[each].tokens or ()) == self.model.live[each].tokens, "other tokens")

    def fail(self, id: int, operation: Operation) -> None:
        held = {each: request.blocks for each, request in self.requests.items()}
        self.step(id, operation, commit=False)
        require(held == {each: request.blocks for each, request in self.requests.items()}, "blocks after a rollback")

    def fork(self, id: int, _: Operation) -> None:
        try:
            fork = self.cache.fork(self.requests[id])
        except OutOfSlots:
            require(self.model.free_slots == 0, "a fork was refused with a free slot")
            return
        self.model.forked(id, fork.id, fork.slot)
        self.requests[fork.id], self.scripts[fork.id] = fork, self.scripts[id]
        require(fork.blocks == self.requests[id].blocks, "a fork with other blocks")

    def truncate(self, id: int, operation: Operation) -> None:
        request = self.requests[id]
        length = max(0, request.length - operation.b % (5 if operation.c % 4 else 40))
        try:
            self.cache.truncate(request, length)
        except RollbackError:
            require(length < self.model.deepest(id), f"{length} was refused")
            self.happened["too deep"] += 1
            return
        self.model.truncated(id, length)

    def release(self, id: int, _: Operation) -> None:
        request = self.requests.pop(id)
        self.cache.release(request)
        self.model.released(id)
        self.stale = [*self.stale[-5:], request]

    def point(self, id: int, _: Operation) -> None:
        told = self.model.live[id]
        if self.model.publishes and len(told.tokens) >= told.stored:
            self.cache.checkpoint(self.requests[id])

    def stale_uses(self, request: kvcore.Request) -> list[Any]:
        cache = self.cache
        return [
            lambda: cache.release(request),
            lambda: cache.fork(request),
            lambda: cache.truncate(request, 0),
            lambda: cache.step({request: 1}),
            lambda: request.length,
        ]

    def drain(self) -> None:
        """Release everything: then everything is free."""
        for request in list(self.requests.values()):
            self.cache.release(request)
            self.model.released(request.id)
        plan = self.cache.plan
        free = self.cache.free_slots, self.cache.free_blocks
        require(free == (plan.slots, plan.blocks), f"after a drain {free} are free")


def _stale(self: World, _: int, operation: Operation) -> None:
    """Use a released request."""
    if self.stale:
        use = self.stale_uses(self.stale[operation.b % len(self.stale)])[operation.c % 5]
        try:
            use()
        except RequestError:
            return
        raise Divergence("a released request was served")


def failure(seed: int, operations: list[Operation]) -> str | None:
    """What goes wrong when the operations are done from the start, or None."""
    world = World(seed)
    try:
        _all(world, operations)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return None


def _all(world: World, operations: list[Operation]) -> None:
    for operation in operations:
        if operation.what == "stale":
            _stale(world, 0, operation)
        else:
            world.apply(operation)
    world.drain()


def run(*, seeds: int, operations: int, first_seed: int = 0) -> dict[str, Any]:
    """Fuzz; a failure is printed with its seed and a shrunk trace."""
    happened: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    done = 0
    for seed in range(first_seed, first_seed + seeds):
        if len(failures) == 5 or command.spent():
            break
        done += 1
        todo = operations_of(seed, operations)
        world = World(seed)
        try:
            _all(world, todo)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            kind = type(error).__name__
            short = shrink(todo, lambda some, seed=seed, kind=kind: (failure(seed, list(some)) or "").startswith(kind))
            failures.append({"seed": seed, "error": failure(seed, short), "trace": [str(each) for each in short]})
            print(f"seed {seed}: {failure(seed, short)}", *short, sep="\n  ")
        happened += Counter(operation.what for operation in todo) + world.happened
    return {
        "figure": "R1, R6",
        "first_seed": first_seed,
        "seeds": done,
        "operations": done * operations,
        "divergences": len(failures),
        "failures": failures,
        "happened": dict(happened),
    }


if __name__ == "__main__":
    command.main(
        __doc__,
        lambda full, seed: run(
            seeds=1000 if full else 20, operations=SEED_OPERATIONS if full else 2000, first_seed=seed
        ),
    )
