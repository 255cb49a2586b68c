"""R5: nobody reads what is another's, or what was freed, whatever happens in between.

Every row of every component says whose it is: the token's number, which stands for one request's history only, that
request and its slot's generation, the position, the layer and the role. Requests share prefixes, fork, roll back, are
preempted and come back, wrap their rings and reuse slots and blocks under pressure; what is freed is filled with NaN.
Every row that is gathered is compared with what its owner was told; compressed entries are the exact means of theirs.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import kvcore
from kvcore.errors import OutOfBlocks, OutOfSlots, RequestError, RollbackError
from kvcore.portable.rows import owned
from kvcore.spec import CacheSpec, LayerSpec
from kvcore.testing.names import Stream
from kvcore.testing.operations import Operation, operations_of, run_all
from kvcore.testing.tagged_rows import append_layer
from tests.reliability import command
from tests.support import scene

DIM = 6
SALT = "one tenant"
SPECS = (
    CacheSpec(
        layers=[
            scene.compressed(4, window=5, dim=DIM, key_dim=DIM),
            scene.compressed(2, overlap=False, window=3, dim=DIM, indexer=False),
            scene.ring(6, dim=DIM),
        ],
        block_tokens=4,
        name="compressed",
    ),
    CacheSpec(
        layers=[
            scene.ring(5, dim=DIM),
            scene.classic(heads=1, dim=DIM, value_dim=DIM),
            scene.classic("ring", chunk=4, heads=1, dim=DIM, value_dim=DIM),
            scene.classic("ring", window=6, heads=1, dim=DIM, value_dim=DIM),
        ],
        block_tokens=4,
        name="classic",
    ),
)
KINDS = {
    "admit": 1,
    "step": 3,
    "fork": 1,
    "truncate": 1,
    "release": 0.6,
    "park": 0.8,
    "back": 1,
    "fail": 1,
    "point": 0.3,
}
CARRY, VALUES = 64, 128
"""Added to a row's role: its carry half, the values of a K-V row."""


class Foreign(Exception):
    """A row that its reader was never told."""


class Owner(NamedTuple):
    """What one request holds: its tokens' numbers, those it must still be told, and where its rings begin."""

    tokens: list[int]
    rest: list[int]
    begins: int = 0


class Story:
    """One cache under pressure, and what each request was told: a number for every token."""

    def __init__(self, seed: int, backend: str, device: str | None) -> None:
        self.spec = SPECS[seed % 2]
        policy = ("off", "full", kvcore.Periodic(3), "zero", "full")[seed // 2 % 5]
        sizes = {"max_requests": 5, "max_tokens": 120, "max_draft_tokens": 2, "prefix": policy, "check": True}
        self.cache = scene.create(self.spec, backend, device=device, **sizes)
        # Compiled code sees one shape.
        self.padding = {"pad_tokens": 64, "pad_requests": 8} if backend == "jax_pallas" else {}
        self.held: dict[kvcore.Request, Owner] = {}
        self.parked: list[tuple[bytes, Owner]] = []
        self.gone: list[kvcore.Request] = []
        # Histories that were rolled back or released: prompts may begin like them.
        self.past: list[list[int]] = []
        # Number of a token -> (number, position, request, generation): what its rows say.
        self.marks = np.zeros((4096, DIM), np.float32)
        self.next = 1
        self.happened: Counter[str] = Counter()
        self.gathers = self.rows = 0

    def apply(self, operation: Operation) -> None:
        """One event, then everybody reads everything."""
        what = operation.what
        if not self.held and what not in ("admit", "back"):
            what = "admit"
        try:
            getattr(self, what)(operation)
            self.happened[what] += 1
        except (OutOfBlocks, OutOfSlots, RollbackError) as error:
            self.happened[type(error).__name__] += 1
        self.read()

    def finish(self) -> None:
        """Everybody leaves."""
        for request in list(self.held):
            self.cache.release(request)
        if (self.cache.free_slots, self.cache.free_blocks) != (self.cache.plan.slots, self.cache.plan.blocks):
            raise Foreign("something is held after a drain")

    def one(self, number: int) -> kvcore.Request:
        return list(self.held)[number % len(self.held)]

    def admit(self, operation: Operation) -> None:
        # Most of them start as somebody else did.
        known = [owner.tokens for owner in (*self.held.values(), *(owner for _, owner in self.parked))] + self.past
        start = known[operation.a % len(known)] if known and operation.a % 10 < 7 else []
        prompt = start[: len(start) - operation.b % (len(start) // 3 + 1)]
        prompt = prompt + list(range(self.next, self.next + 1 + operation.c % 5))
        request = self.cache.admit(prompt, salt=SALT)
        self.name(prompt[-1 - operation.c % 5 :], request, len(prompt) - 1 - operation.c % 5)
        replaying = self.cache._state.row(request).stored > request.length
        self.held[request] = Owner(
            prompt[: request.length], prompt[request.length :], request.length if replaying else 0
        )
        self.happened["hit"] += request.length > 0
        self.happened["hit to replay"] += replaying

    def name(self, numbers: Sequence[int], request: kvcore.Request, position: int) -> None:
        """New tokens: from now on their rows are this request's."""
        for place, number in enumerate(numbers):
            self.marks[number, :4] = number, position + place, request.id, request.generation
        self.next = max([self.next, *(number + 1 for number in numbers)])

    def step(self, operation: Operation, *, fail: bool = False) -> None:
        chosen = {self.one(operation.a >> 3 * place): None for place in range(1 + operation.b % len(self.held))}
        new: dict[kvcore.Request, list[int]] = {}
        for place, request in enumerate(chosen):
            owner = self.held[request]
            count = (0, 1, 2, 9, 9)[(operation.c >> 3 * place) % 5]
            ids = owner.rest[:count]
            fresh = list(range(self.next, self.next + count - len(ids)))
            self.name(fresh, request, len(owner.tokens) + len(ids))
            new[request] = ids + fresh
        with self.cache.step(new, **self.padding) as step:
            fill(step, self.marks, [token for ids in new.values() for token in ids])
            if fail:
                step.abort()
                return
        for request, ids in new.items():
            owner = self.held[request]
            self.held[request] = owner._replace(tokens=owner.tokens + ids, rest=owner.rest[len(ids) :])

    def fail(self, operation: Operation) -> None:
        self.step(operation, fail=True)

    def fork(self, operation: Operation) -> None:
        source = self.one(operation.a)
        self.held[self.cache.fork(source)] = self.held[source]

    def truncate(self, operation: Operation) -> None:
        request = self.one(operation.a)
        length = max(0, request.length - operation.b % 4)
        shorter = length < request.length
        self.cache.truncate(request, length)
        if shorter:
            owner = self.held[request]
            self.past = [*self.past[-5:], owner.tokens]
            self.held[request] = owner._replace(tokens=owner.tokens[:length], rest=[])

    def point(self, operation: Operation) -> None:
        if self.cache._state.prefix.on and not self.replays(request := self.one(operation.a)):
            self.cache.checkpoint(request)

    def replays(self, request: kvcore.Request) -> bool:
        return self.cache._state.row(request).stored > request.length

    def release(self, operation: Operation) -> None:
        request = self.one(operation.a)
        self.past = [*self.past[-5:], self.held.pop(request).tokens]
        self.cache.release(request)
        self.gone = [*self.gone[-3:], request]

    def park(self, operation: Operation) -> None:
        """Preempt: out to the host, and its place to others; refused while it replays."""
        request = self.one(operation.a)
        try:
            blob = self.cache.export_request(request)
        except RequestError:
            if not self.replays(request):
                raise
            return
        if self.replays(request):
            raise Foreign("an export of rings that are not complete")
        self.parked.append((blob, self.held.pop(request)))
        self.cache.release(request)

    def back(self, operation: Operation) -> None:
        if self.parked:
            number = operation.a % len(self.parked)
            blob, owner = self.parked[number]
            self.held[self.cache.import_request(blob, salt=SALT)] = owner
            del self.parked[number]

    def read(self) -> None:
        """Every request reads every component, and what is gone reads nothing."""
        for request in self.gone:
            try:
                self.cache.step({request: 0})
            except RequestError:
                continue
            raise Foreign("a released request was served")
        requests = list(self.held)
        if not requests:
            return
        padding = {**self.padding, "pad_tokens": 0} if self.padding else {}
        with self.cache.step(dict.fromkeys(requests, 0), **padding) as step:
            for layer, role, component in owned(self.spec):
                parts = gathered(step.layer(layer), role)
                for number, request in enumerate(requests):
                    self.check(request, layer, role, component, [part[number] for part in parts])

    def check(self, request: kvcore.Request, layer: int, role: str, component: Any, parts: list[np.ndarray]) -> None:
        """The rows that a request reads are those that it was told, all of them, and zeros beside them."""
        owner = self.held[request]
        *values, positions = parts
        live = list(component.live(len(owner.tokens)))
        here = positions >= 0
        if positions[here].tolist() != [number * component.tokens_per_row for number in live]:
            raise Foreign(f"{layer}.{role}: positions {positions[here].tolist()} instead of {live}")
        wanted = expected(self.marks, owner, layer, role, component, live)
        for part, rows in zip(values, wanted, strict=True):
            wrong = np.flatnonzero((part[here] != rows).any(axis=1))
            if len(wrong):
                row = wrong[0]
                read, wanted_row = part[here][row].tolist(), rows[row].tolist()
                raise Foreign(f"{request} read in {layer}.{role}, row {live[row]}: {read}, and was told {wanted_row}")
            if part[~here].any():
                raise Foreign(f"{request} read in {layer}.{role} more than {len(live)} rows")
        self.rows += len(live)
        self.gathers += 1


def codes(layer: int, role: str) -> tuple[int, int]:
    """What the last two channels of a row say: its layer, its role."""
    return 1 + layer, 1 + ("window", "tail", "entries", "index_tail", "index_keys", "kv").index(role)


def rows_of(marks: np.ndarray, numbers: Sequence[int], layer: int, role: str, add: int = 0) -> np.ndarray:
    """[n, DIM] fp32: the rows of these tokens."""
    rows = marks[list(numbers)].copy()
    rows[:, 4:] = codes(layer, role)
    rows[:, 5] += add
    return rows


def expected(marks: np.ndarray, owner: Owner, layer: int, role: str, component: Any, live: list[int]):
    """What a component of a request holds, one array a part; before ``begins`` its rings are as a fresh slot."""
    if role in ("entries", "index_keys"):
        return [np.array([entry(marks, owner.tokens, layer, role, component, i) for i in live]).reshape(-1, DIM)]
    numbers = [owner.tokens[position] for position in live]
    if role == "kv":
        found = [rows_of(marks, numbers, layer, role), rows_of(marks, numbers, layer, role, VALUES)]
    elif role == "window":
        found = [rows_of(marks, numbers, layer, role)]
    else:
        halves = [rows_of(marks, numbers, layer, role)]
        if component.overlap:
            halves = [rows_of(marks, numbers, layer, role, CARRY), *halves]
        kv = np.concatenate(halves, axis=1)
        found = [kv, np.zeros_like(kv)]
    unwritten = [place for place, position in enumerate(live) if position < owner.begins]
    if component.span is not None and unwritten:
        for number, part in enumerate(found):
            part[unwritten] = -np.inf if number == 1 and role != "kv" else 0
    return found


def entry(marks: np.ndarray, tokens: list[int], layer: int, role: str, component: Any, number: int) -> np.ndarray:
    """One compressed entry: the mean of its window's rows and, with overlap, of the carry halves before it."""
    ratio = component.tokens_per_row
    tail = "tail" if role == "entries" else "index_tail"
    rows = [rows_of(marks, tokens[number * ratio : (number + 1) * ratio], layer, tail)]
    # The compressors of the first layer overlap.
    if layer == 0 and number:
        rows.append(rows_of(marks, tokens[(number - 1) * ratio : number * ratio], layer, tail, CARRY))
    return np.concatenate(rows).mean(axis=0, dtype=np.float64).astype(np.float32)


def fill(step: Any, marks: np.ndarray, numbers: Sequence[int]) -> None:
    """Give every layer of a step its rows; padding rows are NaN."""
    total = len(step.positions)

    def padded(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows, np.full((total - len(rows), *rows.shape[1:]), np.nan, np.float32)])

    for layer, spec in enumerate(step.cache.spec.layers):

        def rows(stream: Stream, *shape: int, spec: LayerSpec = spec) -> np.ndarray:
            if stream.part == "score":
                return padded(np.zeros((len(numbers), *shape), np.float32))
            overlaps = stream.role.endswith("tail") and getattr(spec, stream.role).overlap
            halves = [rows_of(marks, numbers, stream.layer, stream.role, VALUES if stream.part == "value" else 0)]
            if overlaps:
                halves = [rows_of(marks, numbers, stream.layer, stream.role, CARRY), *halves]
            return padded(np.concatenate(halves, axis=1).reshape(len(numbers), *shape))

        append_layer(step.layer(layer), layer, spec, rows, flush={})


def gathered(handle: Any, role: str) -> list[np.ndarray]:
    """The values of a role's parts, [Q, n, width] each, and positions [Q, n], as its reader gives them."""
    if role == "window":
        found = handle.gather_window()
    elif role == "entries":
        found = handle.gather_all_entries()
        found = (found.values, found.positions)
    elif role == "index_keys":
        found = handle.gather_all_index_keys()
        found = (found.values, found.positions)
    elif role == "kv":
        found = handle.gather_kv()
    else:
        raw = handle.gather_rows(role)
        both = kvcore.to_numpy(raw.rows).view(np.float32)
        width = both.shape[2] // 2
        found = (both[..., :width], both[..., width:], raw.positions)
    *values, positions = (kvcore.to_numpy(array) for array in found)
    return [*(part.reshape(*positions.shape, math.prod(part.shape[2:])) for part in values), positions]


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """One story."""
    operations = operations_of(seed, int(options["operations"]), KINDS)
    story, failures = run_all(seed, lambda: Story(seed, options["backend"], options["device"] or None), operations)
    counts: dict[str, Any] = {"stories": 1, "gathers": 0}
    if isinstance(story, Story):
        counts |= {"gathers": story.gathers, "rows": story.rows, "requests": story.cache._state.manager._next_id}
        counts["happened"] = dict(story.happened)
    return command.Told(counts, failures)


FIGURE = command.Figure(
    "R5", "gathers", 5_000, 1_000_000, tell, {"backend": "reference", "device": "", "operations": "150"}
)

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
