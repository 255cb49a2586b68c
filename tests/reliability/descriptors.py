"""R15: a wrong descriptor of an engine's memory is refused, or shows as soon as rows are compared.

Every named mistake in every layout of keys and values, then descriptors of which up to three numbers or names are
exchanged for others that are there, or near. What a trial looks at is what ``docs/adopt.md`` says to do once with a new
layout: adopt, admit a request whose rows differ, ``cache.compare``. The right descriptor shows nothing.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

import kvcore
from kvcore import adoption
from kvcore.adoption import Descriptor
from kvcore.errors import ShapeError, SpecError
from tests.adoption.test_descriptors import OURS, WRONG, compare
from tests.reliability import command
from tests.support.engine import PAGED, SPEC, Engine

FIELDS = ("layer", "part", "tensor", "offset", "block", "token", "head")


def changed(right: Descriptor, choice: random.Random) -> tuple[str, Descriptor]:
    """(what was done, another descriptor): one to three places of one or all fields are others'."""
    told: list[str] = []
    lines = list(right.lines)
    while lines == right.lines or choice.random() < 0.3:
        name, some = choice.choice(FIELDS), [choice.randrange(len(lines))]
        if choice.random() < 0.3:
            some = list(range(len(lines)))
        how = choice.choice(("another's", "twice", "half", "a step more", "a step less"))
        for at in some:
            one, other = lines[at], choice.choice(lines)
            value = getattr(other, name if isinstance(getattr(one, name), str) else choice.choice(FIELDS[3:]))
            if how != "another's" and not isinstance(getattr(one, name), str):
                step = choice.choice((4, one.head, one.token, one.block)) if name != "layer" else 1
                before = getattr(one, name)
                value = {"twice": 2 * before, "half": before // 2, "a step more": before + step}.get(how, before - step)
            lines[at] = msgspec.structs.replace(one, **{name: value})
        told.append(f"{how}: {name} of {len(some)}")
        if len(told) == 3 and lines != right.lines:
            break
    return ", ".join(told), msgspec.structs.replace(right, lines=lines)


def wrong(count: int, seed: int) -> Iterator[tuple[str, str, Engine, Descriptor]]:
    """(what is wrong, layout, engine, descriptor) of all named ones, and of so many more."""
    engines = {layout: Engine(layout) for layout in PAGED}
    rights: dict[str, Descriptor] = {}
    for layout, engine in engines.items():
        engine.write(OURS, 0, 40)
        rights[layout] = adoption.describe(SPEC, engine.tensors, layout)
        compare(engine, rights[layout])
        for name, change in WRONG.items():
            yield name, layout, engine, msgspec.structs.replace(rights[layout], lines=change(rights[layout].lines))
    choice = random.Random(seed)
    for _ in range(count):
        layout = choice.choice(PAGED)
        name, descriptor = changed(rights[layout], choice)
        yield name, layout, engines[layout], descriptor


def run(*, count: int, seed: int) -> dict[str, Any]:
    """Adopt by every one of them."""
    found: Counter[str] = Counter()
    failures: list[str] = []
    for name, layout, engine, descriptor in wrong(count, seed):
        if Counter(descriptor.lines) == Counter(adoption.describe(SPEC, engine.tensors, layout).lines):
            # Lines in another order, each with all that it said.
            found["right after all"] += 1
            continue
        try:
            cache = kvcore.adopt(SPEC, engine.tensors, layout=descriptor)
        except (SpecError, ShapeError):
            found["refused"] += 1
            continue
        try:
            cache.compare(cache.admit(blocks=OURS, length=40), engine.read)
        except ShapeError:
            found["shown by rows"] += 1
            continue
        failures.append(f"{layout}: {name}")
    return {
        "figure": "R15",
        "seed": seed,
        "descriptors": sum(found.values()) + len(failures),
        "named": len(WRONG) * len(PAGED),
        **found,
        "divergences": len(failures),
        "failures": failures[:20],
    }


if __name__ == "__main__":
    command.main(__doc__, lambda full, seed: run(count=10_000 if full else 100, seed=seed))
