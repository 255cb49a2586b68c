"""KeyboardInterrupt at any line: what a verb was asked for has happened, or has not, and the next verbs find it so."""

import itertools

import pytest

from kvcore.cache.reuse import PrefixCache
from kvcore.requests.manager import Manager
from tests.reliability import interrupt
from tests.reliability.interrupt import Check, Verb, points
from tests.support import stories
from tests.support.backends_under_test import seed_of

# Every point of what changes counts alone; of the others, every line of kvcore once.
ALL_POINTS = ("release", "truncate", "fork", "admit", "finish", "expire")


def chosen(backend: str, folder: str) -> list[tuple[Verb, int]]:
    """(verb, n) of the points that this session tries."""
    seen: set[tuple[str, int]] = set()
    found = []
    for verb in interrupt.VERBS:
        for n, line in points(verb, backend, folder):
            place = line.file, line.number
            if place not in seen or verb.name in ALL_POINTS:
                found.append((verb, n))
            seen.add(place)
    return found


def test_lines_of_kvcore(backend: str, tmp_path) -> None:
    # Every line's turn comes in the figure; here some that the check's name chooses, fewer where verbs take longer.
    check_lines(backend, str(tmp_path), 4 if backend == "reference" else 16)


def test_lines_of_a_shard(tmp_path) -> None:
    check_lines(f"torch_triton{interrupt.SHARD}", str(tmp_path), 24)


def check_lines(backend: str, folder: str, every: int) -> None:
    broken, tried = [], 0
    tries = itertools.islice(chosen(backend, folder), seed_of(f"lines of {backend}") % every, None, every)
    for verb, group in itertools.groupby(tries, lambda found: found[0]):
        check = Check(verb, backend, folder)
        for _, n in group:
            tried += 1
            broken += [(verb.name, n, error) for error in check.point(n) or ()]
    assert broken == []
    assert tried > 100


@pytest.mark.parametrize("name", ["a long step", "release", "fork", "admit a known prompt"])
def test_an_interruption_of_what_mends(backend: str, name: str, tmp_path) -> None:
    """The verb after the interrupted one is interrupted too; the one after that finishes."""
    verb = next(verb for verb in interrupt.VERBS if verb.name == name)
    check = Check(verb, backend, str(tmp_path))
    found = points(verb, backend, str(tmp_path))
    choice = seed_of(f"{name} {backend}") % 23
    for n, _ in found[choice :: max(1, len(found) // 3)]:
        for m in range(1, 60, 12):
            world = interrupt.make_world(backend, str(tmp_path))
            if interrupt.watched(verb.make(world), interrupt.Lines(n)):
                interrupt.watched(world.cache.digest, interrupt.Lines(m))
                assert check.look(world) == [], (n, m)


def test_ids_that_no_key_can_hold_are_refused_before_anything_happens(backend: str) -> None:
    cache = stories.create(stories.PAGED, backend, prefix="full")
    a, b = cache.admit(), cache.admit()
    with pytest.raises(ValueError, match="token ids"):
        cache.step({a: [3, 2**64], b: [7, 8]})
    assert (a.length, b.length, cache.free_blocks) == (0, 0, cache.plan.blocks)
    step = cache.step({a: [3, 2**64 - 1], b: [7, 8]})
    stories.feed(step, [3, 4, 7, 8])
    step.commit()
    assert (a.length, b.length) == (2, 2)


def test_what_is_published_before_its_request_has_the_rows_is_noticed(tmp_path, monkeypatch) -> None:
    learn, reuse = Manager.learn, list[PrefixCache]()
    begin = PrefixCache.__init__

    def noted(self, *given, **options):
        begin(self, *given, **options)
        reuse.append(self)

    def publish_first(self, places, opening, keys):
        learn(self, places, opening, keys)
        for place in places.values():
            reuse[-1].publish(place, 0)

    monkeypatch.setattr(PrefixCache, "__init__", noted)
    monkeypatch.setattr(Manager, "learn", publish_first)
    verb = next(verb for verb in interrupt.VERBS if verb.name == "a long step")
    check = Check(verb, "reference", str(tmp_path))
    late = [n for n, line in points(verb, "reference", str(tmp_path)) if line.file.endswith("cache/step.py")]
    assert any("keys are found" in error for n in late for error in check.point(n) or ())
