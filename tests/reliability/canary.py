"""R12: bytes, block tables, slots and lengths perturbed in a running cache; all that touches sampled rows is named.

A cache with ``canary`` runs requests that share prefixes, fork, go back and leave for another cache. In between one
thing is changed behind its back: bits of a row, rows or whole units exchanged, a number in the table of requests, or
one in an open step's index. A step that reads it must be refused, and name what was changed; ``cache.faults()`` too.
Then it is put back, and both must be content. On a GPU, where nothing waits, ``cache.faults()`` is asked, and at last a
step after the one that read something.
"""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import kvcore
from kvcore.cache import Fault
from kvcore.errors import FaultError
from kvcore.plan import Region, Watched
from kvcore.spec import KV, CacheSpec, LayerSpec
from tests.reliability import command
from tests.support import scene, stories

SPECS = (
    stories.LATENT,
    stories.MIXED,
    stories.STORED,
    stories.DRAFTED,
    CacheSpec(
        layers=[
            LayerSpec(kv=KV(key_heads=2, key_dim=4, value_dim=6, storage="slot", key_format="int8_row")),
            scene.classic("ring", window=5, key_format="fp16"),
        ],
        name="slots",
    ),
)
SAMPLES = (1, 2, 3, 16)
SEED_PERTURBATIONS = 20
LONGEST = 120


class Perturbed(NamedTuple):
    """What was done to a cache.

    Attributes:
        requests: of whom it must be told.
        what: as in ``Fault``.
        rows: (layer, role, position) of the rows that must be named, all that may be; none where it is no row.
        back: puts it back.
    """

    requests: set[kvcore.Request]
    what: str
    rows: set[tuple[int, str, int]]
    back: Callable[[], None]


class World:
    """A cache under way, and what is done to it."""

    def __init__(self, seed: int, backend: str, device: str | None) -> None:
        self.choice = random.Random(seed)
        self.spec = SPECS[seed % len(SPECS)]
        self.cache = kvcore.create_cache(
            self.spec, backend=backend, device=device, max_requests=6, max_tokens=640, max_draft_tokens=3,
            prefix="off" if seed % 3 else "full", canary=SAMPLES[seed // len(SPECS) % len(SAMPLES)],
        )  # fmt: skip
        self._run()

    def _run(self) -> None:
        cache, choice = self.cache, self.choice
        first, second = cache.admit(), cache.admit()
        prompts = {
            request: [choice.randrange(99) for _ in range(choice.randrange(36, 60))] for request in (first, second)
        }
        for request, prompt in prompts.items():
            cut = choice.randrange(1, len(prompt))
            stories.tell(cache, {request: prompt[:cut]})
            stories.tell(cache, {request: prompt[cut:]})
        fork = cache.fork(first)
        for token in range(choice.randrange(4, 9)):
            stories.tell(cache, {first: [token], second: [token + 1], fork: [token + 2]})
        cache.truncate(first, first.length - 2)
        stories.tell(cache, {first: [5]})
        cache.import_request(cache.export_request(second))
        cache.release(second)
        again = prompts[first]
        found = cache.admit(again)
        stories.tell(cache, {found: again[found.length :]})
        with contextlib.suppress(stories.Failed), cache.step({first: [1, 2], fork: [3]}) as step:
            stories.feed(step, [1, 2, 3])
            raise stories.Failed

    def rows(self) -> list[tuple[kvcore.Request, Watched, int]]:
        """Every sampled row that a step could see."""
        return [
            (request, watched, number)
            for request in self.cache.requests
            for watched in self.cache.plan.watched
            for number in watched.component.live(request.length)
            if number % self.cache.plan.canary == 0
        ]

    def unit(self, request: kvcore.Request, watched: Watched, number: int) -> tuple[int, int]:
        """(unit, row in it) of a row."""
        rows = watched.regions[0].rows
        slot = watched.component.growth == "slot"
        return request.slot if slot else request.blocks[number // rows], number % rows

    def readers(self, watched: Watched, number: int, unit: int) -> set[kvcore.Request]:
        """Who sees that row there."""
        return {
            request
            for request in self.cache.requests
            if number in watched.component.live(request.length) and self.unit(request, watched, number)[0] == unit
        }

    def bytes_of(self, region: Region, row: int) -> Iterator[tuple[str, int]]:
        """(pool, byte in a unit) of every stored byte of a row, in its first copy."""
        row_step, head_step = region.steps
        for place in region.unit.places:
            for head in range(region.heads):
                start = place.base + (row * row_step + head * head_step) * place.stride
                yield from ((region.buffers[place.buffer][0], start + byte) for byte in range(place.nbytes))

    def write(self, name: str, change: Callable[[np.ndarray], None]) -> Callable[[], None]:
        """Change a pool's bytes [units, bytes] behind the cache's back; returns what puts them back."""
        pools = self.cache._state.pools
        before = kvcore.to_numpy(pools[name])
        after = before.copy()
        change(after.reshape(len(after), -1).view(np.uint8))
        scene.put(self.cache, name, after)
        return functools.partial(scene.put, self.cache, name, before)

    def perturb(self) -> tuple[str, Perturbed] | None:
        """(kind, what was done); None where there is nothing of the kind to be done."""
        kind = self.choice.choice(KINDS)
        found = getattr(self, f"_{kind}")()
        return None if found is None else (kind, found)

    def _row(self) -> tuple[Watched, int, int, int, Perturbed]:
        request, watched, number = self.choice.choice(self.rows())
        unit, row = self.unit(request, watched, number)
        named = {(watched.layer, watched.role, number * watched.component.tokens_per_row)}
        told = Perturbed(self.readers(watched, number, unit), "row", named, lambda: None)
        return watched, number, unit, row, told

    def _bits(self) -> Perturbed:
        watched, _, unit, row, told = self._row()
        name, byte = self.choice.choice([place for region in watched.regions for place in self.bytes_of(region, row)])

        def change(pool: np.ndarray) -> None:
            pool[unit, byte] ^= self.choice.choice([1 << self.choice.randrange(8), self.choice.randrange(1, 256)])

        return told._replace(back=self.write(name, change))

    def _zeros(self) -> Perturbed | None:
        """A row that was never written."""
        watched, _, unit, row, told = self._row()
        places = [place for region in watched.regions for place in self.bytes_of(region, row)]
        pools = {name: kvcore.to_numpy(self.cache._state.pools[name]) for name in {name for name, _ in places}}
        flat = {name: pool.reshape(len(pool), -1).view(np.uint8) for name, pool in pools.items()}
        if not any(flat[name][unit, byte] for name, byte in places):
            return None
        backs = [
            self.write(name, lambda pool, name=name: _fill(pool, unit, [byte for of, byte in places if of == name]))
            for name in flat
        ]
        return told._replace(back=lambda: [back() for back in backs] and None)

    def _exchange(self) -> Perturbed | None:
        """Two rows of a unit have changed places."""
        watched, number, unit, row, told = self._row()
        other = self.choice.randrange(watched.regions[0].rows)
        one, two = ([place for region in watched.regions for place in self.bytes_of(region, at)] for at in (row, other))
        pools = {name for name, _ in one}
        flat = {name: _flat(kvcore.to_numpy(self.cache._state.pools[name])) for name in pools}
        if all(flat[a][unit, at] == flat[b][unit, to] for (a, at), (b, to) in zip(one, two, strict=True)):
            return None
        # The other one is named too, if it is one that somebody sees.
        step, sample = watched.component.tokens_per_row, self.cache.plan.canary
        near = range(max(0, number - watched.regions[0].rows), number + watched.regions[0].rows)
        also = {n for n in near if n % watched.regions[0].rows == other and n % sample == 0}
        readers = {n: self.readers(watched, n, unit) for n in also}
        rows = {*told.rows, *((watched.layer, watched.role, n * step) for n, seen in readers.items() if seen)}

        def change(pool: np.ndarray, name: str) -> None:
            first, second = ([byte for of, byte in places if of == name] for places in (one, two))
            pool[unit, first], pool[unit, second] = pool[unit, second].copy(), pool[unit, first].copy()

        backs = [self.write(name, functools.partial(change, name=name)) for name in pools]
        return told._replace(
            requests=told.requests.union(*readers.values()), rows=rows, back=lambda: [back() for back in backs] and None
        )

    def _place(self, what: str, change: Callable[[Any], Any]) -> Perturbed | None:
        """A number in the table of requests."""
        request = self.choice.choice(self.cache.requests)
        place = self.cache._state.manager.place_of(request)
        before = getattr(place, what)
        after = change(before)
        if after == before:
            return None
        setattr(place, what, after)
        return Perturbed({request}, what, set(), lambda: setattr(place, what, before))

    def _slot(self) -> Perturbed | None:
        return self._place("slot", lambda _: self.choice.randrange(self.cache.plan.slots))

    def _length(self) -> Perturbed | None:
        return self._place("length", lambda length: max(0, length + self.choice.choice((-17, -3, -1, 1, 2, 40))))

    def _blocks(self) -> Perturbed | None:
        return self._place("blocks", lambda blocks: self._other_blocks(blocks))

    def _other_blocks(self, blocks: Sequence[int]) -> tuple[int, ...]:
        changed = list(blocks)
        if changed:
            at, other = (self.choice.randrange(len(changed)) for _ in range(2))
            if self.choice.randrange(2):
                changed[at], changed[other] = changed[other], changed[at]
            else:
                changed[at] = self.choice.randrange(self.cache.plan.blocks)
        return tuple(changed)


KINDS = ("bits", "bits", "bits", "zeros", "exchange", "slot", "length", "blocks", "blocks")
"""What is done to a cache at rest; indices of open steps come beside."""


def _flat(pool: np.ndarray) -> np.ndarray:
    return pool.reshape(len(pool), -1).view(np.uint8)


def _fill(pool: np.ndarray, unit: int, places: Sequence[int]) -> None:
    pool[unit, places] = 0


def unnoticed(told: Sequence[Fault], done: Perturbed) -> str | None:
    """What is wrong with what was told, or None."""
    if done.what != "row":
        named = {fault.request for fault in told if fault.what == done.what}
        return None if done.requests <= named else f"{told}, not {done.what} of {done.requests}"
    named = {fault.request for fault in told}
    rows = {(fault.layer, fault.role, fault.position) for fault in told}
    if not (named and named <= done.requests and rows and rows <= done.rows):
        return f"{told}, not {done.rows} of {done.requests}"
    return None


def stepped(cache: kvcore.Cache, requests: Sequence[kvcore.Request]) -> Sequence[Fault]:
    """What a step of one token each is refused for."""
    lengths = [request.length for request in requests]
    try:
        stories.tell(cache, {request: [7] for request in requests})
    except FaultError as error:
        if [request.length for request in requests] != lengths:
            return ()
        return error.faults
    return ()


def in_step(world: World) -> tuple[str, str | None] | None:
    """An index that is changed while its step is open: (kind, what is wrong or None); the world is not used again.

    What is undone then is undone where the index says.
    """
    cache, choice = world.cache, world.choice
    request = choice.choice(cache.requests)
    name = choice.choice(("slots", "starts", "lengths", "block_table"))
    if not cache.ops.in_place or (name == "block_table" and not request.blocks):
        return None
    told: Sequence[Fault] = ()
    try:
        with cache.step({request: [3]}) as step:
            stories.feed(step, [3])
            array = getattr(step._device_index, name)
            at = (0, choice.randrange(len(request.blocks))) if name == "block_table" else (0,)
            array[at] += choice.choice((-1, 1)) if name != "slots" else 1 if int(array[at]) == 0 else -1
    except FaultError as error:
        told = error.faults
    told = told or cache.faults()
    what = {"slots": "slot", "block_table": "blocks"}.get(name, "length")
    wrong = None if any(fault.request is request and fault.what == what for fault in told) else f"{told} of {name}"
    return f"index {name}", wrong


def late(world: World) -> tuple[str, str | None]:
    """A row that a step on a GPU has read: (kind, what is wrong with what the next one says or None)."""
    import torch

    done = world._bits()
    reader = sorted(done.requests, key=lambda each: each.id)[:1]
    told = stepped(world.cache, reader)
    torch.cuda.synchronize()
    return "bits, late", unnoticed(told or stepped(world.cache, reader), done)


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """Perturb one cache again and again."""
    failures: list[dict[str, Any]] = []
    kinds: Counter[str] = Counter()
    steps = 0

    def fail(error: str) -> None:
        print(f"seed {seed}: {error}")
        failures.append({"seed": seed, "error": error, "trace": []})

    on_gpu = options["device"].startswith("cuda")
    world = World(seed, options["backend"], options["device"] or None)
    while sum(kinds.values()) < SEED_PERTURBATIONS and not failures:
        cache, choice = world.cache, world.choice
        if (perturbed := world.perturb()) is None:
            continue
        kind, done = perturbed
        kinds[kind] += 1
        reader = choice.choice(sorted(done.requests, key=lambda each: each.id))
        for where in ("faults()",) if on_gpu else ("step", "faults()"):
            told = cache.faults() if where == "faults()" else stepped(cache, [reader])
            if (wrong := unnoticed(told, done)) is not None:
                fail(f"{world.spec.name}, one in {cache.plan.canary}, {kind}, {where}: {wrong}")
        done.back()
        if cache.faults():
            fail(f"a false alarm after {kind}: {cache.faults()}")
        some = choice.sample(cache.requests, 2)
        if choice.randrange(4) == 0 and max(request.length for request in some) < LONGEST:
            # What was refused left the cache as it was: it goes on.
            stories.tell(cache, {request: [choice.randrange(99)] for request in some})
            steps += 1
    if (found := late(world) if on_gpu and seed % 2 else in_step(world)) is not None:
        kind, wrong = found
        kinds[kind] += 1
        if wrong:
            fail(f"{world.spec.name}, {kind}: {wrong}")
    return command.Told({"perturbations": sum(kinds.values()), "kinds": dict(kinds), "steps_between": steps}, failures)


FIGURE = command.Figure("R12", "perturbations", 400, 10_000, tell, {"backend": "reference", "device": ""})

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
