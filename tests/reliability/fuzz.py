"""R1: random lives of requests against an independent model: admissions with prefix hits, steps, failed steps, forks,
rollbacks, checkpoints, releases, export and import, snapshots saved and loaded, in part too, uses of released requests;
after each of them every count must be as the model says.

R6 comes with it: free and live units add up after every operation, and after a drain everything is free.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import kvcore
from kvcore.cache.loading import take_in
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError, SnapshotError
from kvcore.portable import snapshot
from tests.reliability import command
from tests.reliability.bare import BareCache, plan_of
from tests.reliability.model import Divergence, Left, Model, require
from tests.reliability.shrink import told

KINDS = {
    "admit": 50,
    "step": 120,
    "fail": 20,
    "fork": 30,
    "truncate": 40,
    "release": 40,
    "point": 10,
    "export": 20,
    "import_": 20,
    "save": 3,
    "stale": 10,
}
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
        self.policy = policy
        self.cache = BareCache(plan, prefix=policy)
        self.model = Model(plan, publishes=policy != "off")
        self.requests: dict[int, kvcore.Request] = {}
        self.scripts: dict[int, int] = {}
        self.stale: list[kvcore.Request] = []
        self.parked: list[tuple[bytes, Left, int]] = []
        self.happened: Counter[str] = Counter()

    def apply(self, operation: Operation) -> None:
        """Do one operation on both, and compare."""
        known = list(self.requests)
        self.happened[operation.what.strip("_")] += 1
        id = known[operation.a % len(known)] if known else None
        if operation.what == "stale":
            self.use_stale(operation)
        elif operation.what == "import_":
            self.import_(operation)
        elif operation.what == "admit" or id is None:
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
            stored = self.cache._state.row(request).stored
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
        if self.model.publishes and told.shares and len(told.tokens) >= told.stored:
            self.cache.checkpoint(self.requests[id])

    def export(self, id: int, operation: Operation) -> None:
        """Out to the host; half of the time its place goes to others."""
        request = self.requests[id]
        try:
            blob = self.cache.export_request(request)
        except RequestError:
            require(self.model.replays(id), "an export was refused")
            self.happened["exports refused in a replay"] += 1
            return
        require(not self.model.replays(id), "an export in the middle of a replay")
        self.parked = [*self.parked[-4:], (blob, self.model.left(id), self.scripts[id])]
        if operation.b % 2:
            self.release(id, operation)

    def import_(self, operation: Operation) -> None:
        """An exported request comes back, perhaps damaged, perhaps into an empty one."""
        if not self.parked:
            return
        blob, left, which = self.parked[operation.a % len(self.parked)]
        empty = [id for id, told in self.model.live.items() if not told.tokens]
        into = empty[0] if empty and operation.b % 3 == 0 else None
        if operation.c % 7 == 0:
            blob = bytearray(blob)
            blob[operation.b % len(blob)] ^= 1 << operation.c % 8
            try:
                self.cache.import_request(bytes(blob))
            except SnapshotError:
                self.happened["damaged imports refused"] += 1
                return
            raise Divergence("a damaged request was taken in")
        blocks = -(-len(left.tokens) // self.model.block_tokens)
        try:
            request = self.cache.import_request(blob, into=None if into is None else self.requests[into])
        except OutOfSlots:
            require(into is None and self.model.free_slots == 0, "an import was refused with a free slot")
            return
        except OutOfBlocks:
            require(blocks > self.model.free_blocks, "an import was refused with free blocks")
            return
        if into is None:
            self.model.admitted(request.id, request.slot)
        # No salt was said: nobody may find it.
        self.model.imported(request.id, left, list(request.blocks), shares=False)
        self.requests[request.id], self.scripts[request.id] = request, which

    def save(self, id: int, operation: Operation) -> None:
        """Some of the requests into a snapshot, and some of those into a cache that takes the place of this one."""
        known = list(self.requests)
        chosen = [id, *(each for each in known if each != id and operation.b >> each % 30 & 1)]
        replaying = [each for each in chosen if self.model.replays(each)]
        try:
            data = snapshot.to_bytes(self.cache._state, [self.requests[each] for each in chosen])
        except RequestError:
            require(bool(replaying), "a snapshot was refused")
            return
        require(not replaying, "a snapshot in the middle of a replay")
        saved = snapshot.parse(data)
        lefts = [self.model.left(each) for each in chosen]
        which = [self.scripts[each] for each in chosen]
        order = [number for number in range(len(chosen)) if not operation.c >> number & 1]
        while sum(-(-len(lefts[n].tokens) // self.model.block_tokens) for n in order) > self.model.blocks:
            order.pop()
        plan, stale = self.cache.plan, [*self.requests.values()][:3]
        self.drain()
        self.cache, self.model = BareCache(plan, prefix=self.policy), Model(plan, publishes=self.policy != "off")
        take_in(self.cache, saved, order, where="snapshot")
        require(len(self.cache.requests) == len(order), "another number of requests was loaded")
        self.stale = stale
        self.requests, self.scripts = {}, {}
        for number, request in zip(order, self.cache.requests, strict=True):
            require(list(request.tokens or ()) == lefts[number].tokens, "other tokens were loaded")
            self.model.admitted(request.id, request.slot)
            self.model.imported(request.id, lefts[number], list(request.blocks), shares=True)
            self.requests[request.id], self.scripts[request.id] = request, which[number]

    def stale_uses(self, request: kvcore.Request) -> list[Any]:
        cache = self.cache
        return [
            lambda: cache.release(request),
            lambda: cache.fork(request),
            lambda: cache.truncate(request, 0),
            lambda: cache.step({request: 1}),
            lambda: cache.export_request(request),
            lambda: cache.digest([request]),
            lambda: request.length,
        ]

    def use_stale(self, operation: Operation) -> None:
        """Use a released request, perhaps one of a cache that is gone."""
        if self.stale:
            uses = self.stale_uses(self.stale[operation.b % len(self.stale)])
            try:
                uses[operation.c % len(uses)]()
            except RequestError:
                return
            raise Divergence("a released request was served")

    def finish(self) -> None:
        self.drain()

    def drain(self) -> None:
        """Release everything: then everything is free."""
        for request in list(self.requests.values()):
            self.cache.release(request)
            self.model.released(request.id)
        self.requests = {}
        plan = self.cache.plan
        free = self.cache.free_slots, self.cache.free_blocks
        require(free == (plan.slots, plan.blocks), f"after a drain {free} are free")


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """One life of a cache."""
    operations = operations_of(seed, int(options["operations"]))
    world, failures = told(seed, lambda: World(seed), operations)
    happened = dict(world.happened) if isinstance(world, World) else {}
    return command.Told({"operations": len(operations), "happened": happened}, failures)


FIGURE = command.Figure("R1, R6", "operations", 40_000, 10_000_000, tell, {"operations": str(SEED_OPERATIONS)})

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
