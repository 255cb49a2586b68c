"""R1: random lives of requests against an independent model: admissions with prefix hits, steps, failed steps, forks,
rollbacks, checkpoints, releases, export and import, snapshots saved and loaded, in part too, uses of released requests;
after each of them every count must be as the model says.

R6 comes with it: free and live units add up after every operation, and after a drain everything is free.
"""

from typing import Any

import kvcore
from kvcore.cache.loading import take_in
from kvcore.errors import RequestError, SnapshotError
from kvcore.portable import snapshot
from kvcore.testing.lives import NEW, RandomLife
from kvcore.testing.model import Divergence, Left, Model, require
from kvcore.testing.operations import Operation, operations_of, run_all
from tests.reliability import command
from tests.reliability.bare import BareCache, plan_of

KINDS = {
    "admit": 50,
    "step": 120,
    "fail": 20,
    "fork": 30,
    "truncate": 40,
    "release": 40,
    "point": 10,
    "export": 20,
    "import": 20,
    "save": 3,
    "stale": 10,
}
SEED_OPERATIONS = 10_000


def script(which: int, length: int) -> list[int]:
    """A prompt: scripts share beginnings, so that prefixes are found."""
    return [(position if position < 9 * (which % 5) else 100 * which + position) for position in range(length)]


class World(RandomLife):
    """A cache without bytes and its model, side by side."""

    def __init__(self, seed: int) -> None:
        policy = ("full", kvcore.Periodic(3), "zero", "off", "approximate")[seed % 5]
        latent = policy == "approximate"
        plan = plan_of(slots=3 + seed % 6, max_tokens=40 + 8 * (seed % 7), drafts=seed % 4, latent=latent)
        self.policy = policy
        super().__init__(BareCache(plan, prefix=policy), publishes=policy != "off", approximate=latent, ids=True)
        self.scripts: dict[int, int] = {}
        self.stale: list[kvcore.Request] = []
        self.parked: list[tuple[bytes, Left, int]] = []

    def apply(self, operation: Operation) -> None:
        """Do one operation on both, and compare."""
        what, id = operation.what, self.request_of(operation.a)
        self.happened[what] += 1
        if id is None and what not in ("stale", "import"):
            what = "admit"
        getattr(self, f"do_{what}")(id, operation)
        self.compare()

    def do_admit(self, _: int | None, operation: Operation) -> None:
        which = operation.b % 11
        id = self.admit(script(which, 1 + operation.c % 30))
        if id is not None:
            self.scripts[id] = which

    def do_step(self, id: int, operation: Operation, *, commit: bool = True) -> None:
        known = list(self.requests)
        chosen = {id: None} | {known[(operation.b >> shift) % len(known)]: None for shift in range(operation.b % 3)}
        new: dict[int, list[int]] = {}
        for place, each in enumerate(chosen):
            length = self.requests[each].length
            count = (operation.c >> 3 * place) % 8
            new[each] = script(self.scripts[each], length + count)[length:]
            if new[each] and operation.c % 13 == 0 and length + count > self.model.live[each].stored:
                new[each][-1] = 7777
        if self.step(new, commit=commit) and not commit:
            # Nothing is stored here, so nothing was put back: the rings remember how far they were written.
            for each, ids in new.items():
                told = self.model.live[each]
                told.highest = max(told.highest, len(told.tokens) + len(ids))

    def committed(self, new: NEW) -> None:
        super().committed(new)
        for each in new:
            require(list(self.requests[each].tokens or ()) == self.tokens(each), "other tokens")

    def do_fail(self, id: int, operation: Operation) -> None:
        self.do_step(id, operation, commit=False)

    def do_fork(self, id: int, _: Operation) -> None:
        fork = self.fork(id)
        if fork is not None:
            self.scripts[fork] = self.scripts[id]

    def do_truncate(self, id: int, operation: Operation) -> None:
        self.truncate(id, max(0, len(self.tokens(id)) - operation.b % (5 if operation.c % 4 else 40)))

    def do_release(self, id: int, _: Operation) -> None:
        self.stale = [*self.stale[-5:], self.release(id)]

    def do_point(self, id: int, _: Operation) -> None:
        told = self.model.live[id]
        if self.model.publishes and told.shares and len(told.tokens) >= told.stored:
            self.cache.checkpoint(self.requests[id])
            self.model.pointed(id)

    def do_export(self, id: int, operation: Operation) -> None:
        """Out to the host; half of the time its place goes to others."""
        found = self.export(id)
        if found is None:
            return
        self.parked = [*self.parked[-4:], (*found, self.scripts[id])]
        if operation.b % 2:
            self.do_release(id, operation)

    def do_import(self, _: int | None, operation: Operation) -> None:
        """An exported request comes back, perhaps damaged, perhaps into an empty one."""
        if not self.parked:
            return
        blob, left, which = self.parked[operation.a % len(self.parked)]
        empty = [id for id, told in self.model.live.items() if not told.tokens]
        if operation.c % 7 == 0:
            damaged = bytearray(blob)
            damaged[operation.b % len(blob)] ^= 1 << operation.c % 8
            try:
                self.cache.import_request(bytes(damaged))
            except SnapshotError:
                self.happened["damaged imports refused"] += 1
                return
            raise Divergence("a damaged request was taken in")
        id = self.take_in(blob, left, into=empty[0] if empty and operation.b % 3 == 0 else None)
        if id is not None:
            self.scripts[id] = which

    def do_save(self, id: int, operation: Operation) -> None:
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
        self.cache = BareCache(plan, prefix=self.policy)
        self.model = Model(plan, publishes=self.policy != "off", approximate=self.model.approximate)
        take_in(self.cache, saved, order, where="snapshot")
        require(len(self.cache.requests) == len(order), "another number of requests was loaded")
        self.stale = stale
        self.scripts = {}
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

    def do_stale(self, _: int | None, operation: Operation) -> None:
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


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """One life of a cache."""
    operations = operations_of(seed, int(options["operations"]), KINDS)
    world, failures = run_all(seed, lambda: World(seed), operations)
    happened = dict(world.happened) if isinstance(world, World) else {}
    return command.Told({"operations": len(operations), "happened": happened}, failures)


FIGURE = command.Figure("R1, R6", "operations", 40_000, 10_000_000, tell, {"operations": str(SEED_OPERATIONS)})

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
