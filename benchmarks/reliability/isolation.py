"""R5: nobody reads what is another's, or what was freed, whatever happens in between.

Every row of every component says which token it belongs to, and no token is told twice. Requests share prefixes, fork,
roll back, are preempted and come back, wrap their rings and reuse slots and blocks under pressure; freed storage is
filled with NaN (``check=True``). Every row that is gathered is compared with what its owner was told.
"""

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import scene

import kvcore
from benchmarks.reliability import command
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.spec import CacheSpec

SPEC = CacheSpec(
    layers=[scene.ring(5), scene.classic(heads=1, dim=2), scene.classic("ring", chunk=4, heads=1, dim=2)],
    block_tokens=4,
)


class Foreign(Exception):
    """A row that its reader was never told."""


class Story:
    """One cache under pressure, and what each request was told: a number for every token."""

    def __init__(self, seed: int, backend: str) -> None:
        self.choice = random.Random(seed)
        policy = self.choice.choice(["off", "full", "full", kvcore.Periodic(3)])
        sizes = {"max_requests": 5, "max_tokens": 72, "max_draft_tokens": 2, "prefix": policy, "check": True}
        self.cache = scene.create(SPEC, backend, **sizes)
        self.told: dict[kvcore.Request, list[int]] = {}
        self.parked: list[tuple[bytes, list[int]]] = []
        self.gone: list[kvcore.Request] = []
        self.rows = 0
        self.gathers = 0
        self.happened: Counter[str] = Counter()
        self.next = 0

    def turn(self) -> None:
        """One random event, then everybody reads everything."""
        what = self.choice.choice(
            ["admit", "step", "step", "step", "fork", "truncate", "release", "park", "back", "fail"]
        )
        if not self.told:
            what = self.choice.choice(["admit", "back"])
        try:
            getattr(self, what)()
            self.happened[what] += 1
        except (OutOfBlocks, OutOfSlots, RollbackError) as error:
            self.happened[type(error).__name__] += 1
        self.read()

    def admit(self) -> None:
        # Half of them start as somebody else did.
        start = self.choice.choice(list(self.told.values())) if self.told and self.choice.random() < 0.7 else []
        prompt = start[: self.choice.randint(len(start) // 2, len(start))] + self.new(self.choice.randrange(1, 6))
        request = self.cache.admit(prompt)
        self.told[request] = prompt[: request.length]
        self.happened["hit"] += request.length > 0

    def new(self, count: int) -> list[int]:
        """Tokens that nobody was ever told; exact in fp32."""
        self.next += count
        return list(range(self.next - count, self.next))

    def step(self, *, fail: bool = False) -> None:
        chosen = self.choice.sample(list(self.told), self.choice.randint(1, len(self.told)))
        new = {request: self.new(self.choice.choice((0, 1, 1, 2, 9))) for request in chosen}
        with self.cache.step(new) as step:
            scene.fill(step, [token for ids in new.values() for token in ids])
            if fail:
                step.abort()
                return
        for request, ids in new.items():
            self.told[request] = self.told[request] + ids

    def fail(self) -> None:
        self.step(fail=True)

    def fork(self) -> None:
        source = self.choice.choice(list(self.told))
        self.told[self.cache.fork(source)] = self.told[source]

    def truncate(self) -> None:
        request = self.choice.choice(list(self.told))
        length = max(0, request.length - self.choice.randrange(4))
        self.cache.truncate(request, length)
        self.told[request] = self.told[request][:length]

    def release(self) -> None:
        request = self.choice.choice(list(self.told))
        del self.told[request]
        self.cache.release(request)
        self.gone = [*self.gone[-3:], request]

    def park(self) -> None:
        """Preempt: out to the host, and its place to others."""
        request = self.choice.choice(list(self.told))
        self.parked.append((self.cache.export_request(request), self.told.pop(request)))
        self.cache.release(request)

    def back(self) -> None:
        if self.parked:
            blob, told = self.parked[0]
            self.told[self.cache.import_request(blob)] = told
            del self.parked[0]

    def read(self) -> None:
        """Every request reads every component."""
        for request in self.gone:
            try:
                self.cache.step({request: 0})
            except RequestError:
                continue
            raise Foreign("a released request was served")
        requests = list(self.told)
        if not requests:
            return
        with self.cache.step(dict.fromkeys(requests, 0)) as step:
            for layer, component in enumerate((SPEC.layers[0].window, SPEC.layers[1].kv, SPEC.layers[2].kv)):
                handle = step.layer(layer)
                gathered = handle.gather_window() if layer == 0 else handle.gather_kv()
                positions = kvcore.to_numpy(gathered[-1])
                values = [kvcore.to_numpy(part) for part in gathered[:-1]]
                values = [part.reshape(*positions.shape, math.prod(part.shape[2:])) for part in values]
                for row, request in enumerate(requests):
                    self.check(request, component, positions[row], [part[row] for part in values])

    def check(self, request: kvcore.Request, component: Any, positions: np.ndarray, values: list[np.ndarray]) -> None:
        """The rows that a request reads are those that it was told, all of them, and zeros beside them."""
        told = self.told[request]
        live = component.live(len(told))
        here = positions >= 0
        wanted = np.array([told[position] for position in live], np.float32)
        if positions[here].tolist() != list(live):
            raise Foreign(f"positions {positions[here].tolist()} instead of {list(live)}")
        for sign, part in zip((1, -1), values, strict=False):
            if not (part[here] == sign * wanted[:, None]).all() or part[~here].any():
                raise Foreign(f"{request} read {part[here][:, 0].tolist()} and was told {wanted.tolist()}")
        self.rows += len(wanted)
        self.gathers += 1


def run(*, gathers: int, seed: int, backend: str = "reference", turns: int = 150) -> dict[str, Any]:
    """Tell stories until enough was gathered (a gather: one component of one request)."""
    done = rows = requests = 0
    happened: Counter[str] = Counter()
    failures: list[str] = []
    stories_told = 0
    while done < gathers and len(failures) < 5 and not command.spent():
        story = Story(seed + stories_told, backend)
        for turn in range(turns):
            try:
                story.turn()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                failures.append(f"seed {seed + stories_told}, turn {turn}: {error!r}")
                print(failures[-1])
                break
        stories_told += 1
        done += story.gathers
        rows += story.rows
        requests += story.cache._manager._next_id
        happened += story.happened
    return {
        "figure": "R5",
        "backend": backend,
        "seed": seed,
        "stories": stories_told,
        "requests": requests,
        "gathers": done,
        "rows": rows,
        "divergences": len(failures),
        "failures": failures,
        "happened": dict(happened),
    }


if __name__ == "__main__":
    command.main(__doc__, lambda full, seed: run(gathers=1_000_000 if full else 5_000, seed=seed))
