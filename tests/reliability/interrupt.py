"""R11: KeyboardInterrupt at every line of every verb; what was asked for has happened, or has not.

A small world is made, a verb is run in it, and the n-th line of kvcore that it comes to raises, for every n. Then the
next verbs have to find a cache whose counts add up, whose other requests are as they were, whose own request is as it
was before the verb or as it is after it, with as many keys to be found by, without a step left open, and which can
be saved and loaded.
"""

import contextlib
import gc
import sys
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import kvcore
from kvcore.cache.loading import take_in
from kvcore.errors import BackendError
from kvcore.handoff import Exporter, FileTransport, publish, pull
from kvcore.portable import snapshot
from kvcore.portable.transport import reference
from kvcore.spec import CacheSpec
from tests.reliability import command
from tests.support import scene, stories

KVCORE = str(Path(kvcore.__file__).parent)

SPEC = CacheSpec(
    layers=[
        scene.ring(5, dim=4),
        scene.ring(5, dim=4),
        scene.compressed(4, window=3, dim=4, overlap=False, indexer=False),
        scene.classic(heads=1, dim=2),
    ],
    block_tokens=4,
    name="interrupted",
)
"""Two rings that a long step fills more than once, a tail that closes, pages."""

SHARD = " shard"
"""After a backend's name: one of two context shards, whose verbs do not wait for the other, which has no rows."""

BIG = list(range(200, 207))
"""Ids of a step that waits for its commit: more than the rings have room for beside what its queries see."""


class World(NamedTuple):
    """A cache with two requests that have tokens and one that has none, a desk, and a folder for files."""

    cache: kvcore.Cache
    touched: kvcore.Request
    other: kvcore.Request
    empty: kvcore.Request
    desk: Exporter
    folder: str


class Verb(NamedTuple):
    """A verb under interruption.

    Attributes:
        name: of it.
        make: world -> what to run.
    """

    name: str
    make: Callable[[World], Callable[[], Any]]


class Planned(Exception):
    """The error of a step that is meant to fail."""


def create(backend: str, prefix: Literal["off", "full"] = "off") -> kvcore.Cache:
    """A cache on a backend, or one shard of it."""
    name, shard, _ = backend.partition(SHARD)
    if not shard:
        return kvcore.create_cache(SPEC, backend=name, max_requests=5, max_tokens=64, prefix=prefix)
    from tests.reliability.ranks import first_of_two

    return first_of_two(SPEC, name, max_requests=5, max_tokens=64, prefix=prefix)


def make_world(backend: str, folder: str) -> World:
    """A world of few tokens, some of them published."""
    cache = create(backend, prefix="full")
    touched, other, empty = (cache.admit() for _ in range(3))
    stories.tell(cache, {touched: list(range(9)), other: list(range(100, 106))})
    return World(cache, touched, other, empty, Exporter(cache), folder)


def _step(new: list[int], *, fails: bool = False, functional: bool = False) -> Callable[[World], Callable[[], Any]]:
    def make(world: World) -> Callable[[], Any]:
        rows = world.cache.asarray(stories.rows("w0", new, scene.np.arange(len(new)), 4))

        def run() -> None:
            with world.cache.step(
                {world.touched: new, world.empty: [1]} if not functional else {world.touched: new}
            ) as step:
                if functional:
                    cache = world.cache
                    cache.pools = cache.ops.append_window(cache.pools, 0, step.index, rows)
                else:
                    stories.feed(step, [*new, 1])
                if fails:
                    raise Planned

        return run

    return make


def _told(world: World, end: str) -> None:
    """A step without a ``with`` block, which whoever was interrupted in it gives up."""
    step = world.cache.step({world.touched: BIG})
    stories.feed(step, BIG)
    getattr(step, end)()


def _handed(use: Callable[[World, Any], Any]) -> Callable[[World], Callable[[], Any]]:
    """Something done with an export that was made before."""

    def make(world: World) -> Callable[[], Any]:
        handle = world.desk.export(world.touched, lease_seconds=1e6, readers=2)
        return lambda: use(world, handle)

    return make


def _pull(world: World, handle: Any) -> Any:
    publish(world.desk, handle, world.folder)
    return pull(world.cache, handle, FileTransport(world.folder))


def _imported(*, into: bool) -> Callable[[World], Callable[[], Any]]:
    def make(world: World) -> Callable[[], Any]:
        blob = world.cache.export_request(world.touched)
        return lambda: world.cache.import_request(blob, into=world.empty if into else None)

    return make


def _of_free_units(*calls: tuple[str, tuple[list[int], ...]]) -> Callable[[World], Callable[[], Any]]:
    """Functional verbs between steps, into slots and blocks that nobody has."""

    def make(world: World) -> Callable[[], Any]:
        def run() -> None:
            for name, units in calls:
                arrays = [world.cache.asarray(scene.np.array(each, scene.np.int32)) for each in units]
                world.cache.pools = getattr(world.cache.ops, name)(world.cache.pools, *arrays)

        return run

    return make


def _load(world: World) -> Any:
    path = Path(world.folder) / "saved"
    world.cache.save(path)
    return kvcore.load(path, backend=world.cache.backend.name)


VERBS = (
    Verb("a long step", _step(BIG)),
    Verb("a decode step", _step([200])),
    Verb("a long step that fails", _step(BIG, fails=True)),
    Verb("a decode step that fails", _step([200], fails=True)),
    Verb("a functional step", _step([200, 201], functional=True)),
    Verb("a functional step that fails", _step([200, 201], functional=True, fails=True)),
    Verb("step and commit", lambda w: lambda: _told(w, "commit")),
    Verb("step and abort", lambda w: lambda: _told(w, "abort")),
    Verb("a step that is dropped", lambda w: lambda: w.cache.step({w.touched: BIG})),
    Verb("release", lambda w: lambda: w.cache.release(w.touched)),
    Verb("truncate", lambda w: lambda: w.cache.truncate(w.touched, 9 - 1 if w.cache.plan.rollback_tokens else 9)),
    Verb("copies", _of_free_units(("copy_slots", ([0, 1], [4, 3])), ("copy_blocks", ([0, 1], [5, 6])))),
    Verb("resets", _of_free_units(("reset_slots", ([4, 3],)), ("poison", ([3], [6])))),
    Verb("truncate to nothing", lambda w: lambda: w.cache.truncate(w.empty, 0)),
    Verb("fork", lambda w: lambda: w.cache.fork(w.touched)),
    Verb("admit", lambda w: w.cache.admit),
    Verb("admit a known prompt", lambda w: lambda: w.cache.admit(list(range(9)))),
    Verb("checkpoint", lambda w: lambda: w.cache.checkpoint(w.touched)),
    Verb("fits", lambda w: lambda: w.cache.fits(list(range(12)))),
    Verb("blocks_needed", lambda w: lambda: w.cache.blocks_needed(list(range(12)))),
    Verb("reset_prefix_cache", lambda w: lambda: w.cache.reset_prefix_cache()),
    Verb("restorable", lambda w: lambda: w.cache.restorable(list(range(9)))),
    Verb("digest", lambda w: lambda: w.cache.digest()),
    Verb("save and load", lambda w: lambda: _load(w)),
    Verb("export_request", lambda w: lambda: w.cache.export_request(w.touched)),
    Verb("import_request", _imported(into=False)),
    Verb("import_request into another", _imported(into=True)),
    Verb("export", lambda w: lambda: w.desk.export(w.touched)),
    Verb("manifest", _handed(lambda w, handle: w.desk.manifest(*reference(handle)))),
    Verb("pages", _handed(lambda w, handle: w.desk.pages(*reference(handle), 0, 1))),
    Verb("finish", _handed(lambda w, handle: w.desk.finish(*reference(handle)))),
    Verb("expire", _handed(lambda w, _: w.desk.expire())),
    Verb("publish and pull", _handed(_pull)),
)


class Line(NamedTuple):
    """A place in kvcore's code, and how often it had been come to before."""

    file: str
    number: int
    time: int


FINALIZE = weakref.finalize.__call__.__code__


class Lines:
    """Watches the lines of kvcore that something comes to; raises at one of them.

    What a finaliser runs is left alone: nobody is told of what is raised there.
    """

    def __init__(self, at: int | None = None) -> None:
        self.seen: list[Line] = []
        self._at = at
        self._count = 0
        self._times: Counter[tuple[str, int]] = Counter()
        self._finalisers = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        if frame.f_code is FINALIZE:
            self._finalisers += 1
            return self._finaliser
        return self._line if frame.f_code.co_filename.startswith(KVCORE) and not self._finalisers else None

    def _finaliser(self, frame: FrameType, event: str, argument: Any) -> Any:
        del frame, argument
        self._finalisers -= event == "return"
        return self._finaliser

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            self._count += 1
            if self._at is None:
                place = frame.f_code.co_filename, frame.f_lineno
                self.seen.append(Line(*place, self._times[place]))
                self._times[place] += 1
            elif self._count == self._at:
                raise KeyboardInterrupt
        return self._line


def watched(act: Callable[[], Any], lines: Lines) -> bool:
    """Run something under a watch; True if it was interrupted."""
    before, torch = sys.gettrace(), sys.modules.get("torch")
    recorded = torch is not None and torch.is_grad_enabled()
    with warnings.catch_warnings():
        # Between the last line of a ``with`` and the end of it, a file is left to be closed as it goes, which warns.
        warnings.simplefilter("ignore", ResourceWarning)
        sys.settrace(lines)
        try:
            act()
        except Planned:
            return False
        except (KeyboardInterrupt, BackendError):
            # An interrupted probe of a plug-in is one that failed.
            return True
        except ValueError as error:
            # JAX says so of what it compared when the interruption came.
            if "KeyboardInterrupt" not in str(error):
                raise
            return True
        finally:
            sys.settrace(before)
            if torch is not None:
                # Between the last line of a ``with torch.no_grad()`` and its end, nobody ends it.
                torch.set_grad_enabled(recorded)
    return False


def points(verb: Verb, backend: str, folder: str) -> list[tuple[int, Line]]:
    """(n, the n-th line) where a verb is interrupted: every line of kvcore that it comes to.

    Of a line that it comes to again and again, the first two times and the last.
    """
    for _ in range(2):
        # What is kept from call to call is there the second time, as it is in the calls that are interrupted.
        world = make_world(backend, folder)
        watched(verb.make(world), lines := Lines())
    last = {(line.file, line.number): line.time for line in lines.seen}
    return [
        (n, line) for n, line in enumerate(lines.seen, 1) if line.time < 2 or line.time == last[line.file, line.number]
    ]


def faults(cache: kvcore.Cache) -> list[str]:
    """What does not add up in a cache's counts."""
    manager, blocks = cache._state.manager, cache._state.manager.blocks
    places = {request: manager.place_of(request) for request in manager.requests}
    holders = Counter(block for place in places.values() for block in place.blocks)
    slots = [place.slot for place in places.values()]
    found = []
    if sorted([*slots, *manager._free_slots]) != list(range(manager._unused_slot)):
        found.append(f"slots {slots} and free ones {manager._free_slots}")
    if any(blocks.holders(block) != holders[block] for block in range(blocks.count)):
        found.append("holders of blocks that are not those of requests")
    unheld = {block for block in range(blocks.count) if not holders[block]}
    if sorted([*blocks._free, *blocks._idle]) != sorted(unheld):
        found.append("free and idle blocks that are not those without holders")
    if any(blocks.key(block) != key or blocks._found.get(key) != block for block, key in blocks._idle.items()):
        found.append("an idle block that its key does not find")
    for request, place in places.items():
        if len(place.blocks) != cache.plan.blocks_for(max(place.length, place.stored)):
            found.append(f"{len(place.blocks)} blocks for {place.length} tokens of {request}")
        if place.tokens is not None and len(place.tokens) != place.length:
            found.append(f"{len(place.tokens)} ids for {place.length} tokens of {request}")
    if cache._state.step is not None:
        found.append("a step that is open")
    if cache._state.under_way:
        found.append(f"{cache._state.under_way} under way")
    return found


def state(world: World) -> tuple[Any, ...]:
    """What can be told of the requests; to ask for it is the next verb, which finishes or undoes what was left."""
    cache = world.cache
    # Lengths and digest lanes.
    lanes = dict(
        zip(live := cache.requests, cache.exclusive("digest", lambda state: state.digest_lanes(live)), strict=True)
    )
    told = {request.id: (repr(lanes[request]), request.tokens) for request in live}
    prefix, blocks = cache._state.prefix, cache._state.manager.blocks
    return told.pop(world.other.id), told, cache.free_slots, cache.free_blocks, {*blocks._found, *prefix._states}


class Check:
    """Checks worlds of one verb after interruptions."""

    def __init__(self, verb: Verb, backend: str, folder: str) -> None:
        self._verb = verb
        self._backend = backend
        self._folder = folder
        world = make_world(backend, folder)
        self._before = state(world)
        with contextlib.suppress(Planned):
            verb.make(world)()
        gc.collect(0)
        self._after = state(world)
        self._seen: list[Any] = []

    def point(self, n: int) -> list[str] | None:
        """Interrupt at the n-th line and look what came of it; None: it did not come to as many."""
        world = make_world(self._backend, self._folder)
        return self.look(world) if watched(self._verb.make(world), Lines(n)) else None

    def look(self, world: World) -> list[str]:
        """What is wrong with a world after an interruption."""
        cache = world.cache
        try:
            now = state(world)
            found = faults(cache)
            if now[0] != self._before[0]:
                found.append("another request has other rows")
            if now[:-1] not in (self._before[:-1], self._after[:-1]):
                found.append(f"{now}, neither {self._before} nor {self._after}")
            elif not self._as_findable(now):
                found.append(
                    f"{len(now[-1])} keys are found, {len(self._before[-1])} before, {len(self._after[-1])} after"
                )
            if not found and now not in self._seen:
                self._seen.append(now)
                found += self._goes_on(world)
        except Exception as error:  # noqa: BLE001 - whatever the next verbs raise is a fault
            return [f"{type(error).__name__}: {error}"]
        return found

    def _as_findable(self, now: tuple[Any, ...]) -> bool:
        """Whether no key is found but for rows that were committed, and none is lost that was found all along.

        A verb publishes once its request has the rows: interrupted on the way to that, it leaves less to be found.
        """
        before, after = self._before, self._after
        committed = set[bytes]().union(*(end[-1] for end in (before, after) if end[:-1] == now[:-1]))
        return before[-1] & after[-1] <= now[-1] <= committed

    def _goes_on(self, world: World) -> list[str]:
        """Whether everybody can be saved, loaded, stepped and released."""
        cache = world.cache
        saved = snapshot.parse(snapshot.to_bytes(cache._state, list(cache.requests)))
        loaded = create(self._backend)
        take_in(loaded, saved, range(len(saved.records)), where="memory")
        if loaded.digest() != cache.digest():
            return ["what was loaded is not what was saved"]
        for each in (cache, loaded):
            stories.tell(each, {request: [7] for request in each.requests[:2]})
            for request in each.requests:
                each.release(request)
            if (each.free_slots, each.free_blocks) != (each.plan.slots, each.plan.blocks):
                return ["a slot or block that nobody has and that is not free"]
        return []


class Tried(NamedTuple):
    """How many of a verb's points were tried."""

    tried: int
    of: int


def interrupted(verb: Verb, backend: str, *, every: int, first: int) -> tuple[Tried, list[dict[str, str]]]:
    """Interrupt a verb at every n-th of its points, until the time is over; what was broken by it."""
    tried, failures = 0, list[dict[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        check, chosen = Check(verb, backend, folder), points(verb, backend, folder)
        for n, line in chosen[first::every]:
            if command.spent():
                break
            tried += 1
            place = f"{Path(line.file).relative_to(Path(KVCORE).parent)}:{line.number}"
            failures += [
                {"backend": backend, "verb": verb.name, "line": place, "error": each} for each in check.point(n) or ()
            ]
    return Tried(tried, len(chosen)), failures


def run(full: bool, seed: int, backends: str, every: str) -> dict[str, Any]:
    """Interrupt every verb on every backend, at every n-th of its points, the first of which the seed says."""
    step = int(every) if every else 1 if full else 50
    told: dict[str, dict[str, Tried]] = {}
    failures: list[dict[str, str]] = []
    for backend in backends.split(","):
        told[backend] = {}
        for verb in VERBS:
            if command.spent():
                break
            start = time.perf_counter()
            told[backend][verb.name], broken = interrupted(verb, backend, every=step, first=seed % step)
            failures += broken
            print(
                f"{backend}: {verb.name}: {told[backend][verb.name].tried} points, "
                f"{time.perf_counter() - start:.1f} s, {len(failures)} broken",
                file=sys.stderr,
                flush=True,
            )
    whole = {
        backend: len(counts) == len(VERBS) and all(one.tried == one.of for one in counts.values())
        for backend, counts in told.items()
    }
    return {
        "figure": "R11",
        "form": "full" if all(whole.values()) else "a part",
        "full": [backend for backend, is_whole in whole.items() if is_whole],
        "seed": seed,
        "every": step,
        "points": {
            backend: Tried(*(sum(one[part] for one in counts.values()) for part in range(2)))._asdict()
            for backend, counts in told.items()
        },
        "verbs": {backend: {name: one._asdict() for name, one in counts.items()} for backend, counts in told.items()},
        "verbs_left_out": {
            backend: left
            for backend, counts in told.items()
            if (left := [verb.name for verb in VERBS if verb.name not in counts])
        },
        "divergences": len(failures),
        "failures": failures[:50],
    }


if __name__ == "__main__":
    command.main(__doc__, run, {"backends": "reference,torch_triton", "every": ""})
