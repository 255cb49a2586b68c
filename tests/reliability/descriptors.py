"""R15: a wrong descriptor of an engine's memory is refused, or shows as soon as rows are compared.

Every named mistake in every layout of keys and values, then descriptors of which up to three numbers or names are
exchanged for others that are there, or near; rows in chunks and bytes that lie apart among them. What a trial looks at
is what ``docs/adopt.md`` says to do once with a new layout: adopt, admit a request whose rows differ,
``cache.compare``. The right descriptor shows nothing, nor do other words for the same places.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

import kvcore
from kvcore import adoption
from kvcore.adoption import Descriptor
from kvcore.adoption.descriptor import check, region_plan
from kvcore.adoption.memory import tensors_of
from kvcore.errors import ShapeError, SpecError
from kvcore.spec import CacheSpec
from tests.adoption import test_chunks as chunks
from tests.adoption.test_descriptors import OURS, WRONG
from tests.reliability import command
from tests.support import stories
from tests.support.engine import PAGED, SPEC, Engine

FIELDS = ("layer", "part", "tensor", "offset", "block", "token", "head")
CHUNKED = (*FIELDS, "chunk_rows", "chunk", "piece_bytes", "piece")
"""Fields of lines that are exchanged; names of numbers are those behind ``tensor``."""


class Scene(NamedTuple):
    """An engine's memory with a request of so many tokens in it, the right descriptor, and how the engine reads."""

    name: str
    spec: CacheSpec
    tensors: Any
    right: Descriptor
    length: int
    read: Callable[[int, str, int, int], Any]
    fields: tuple[str, ...] = FIELDS

    def adopted(self, descriptor: Descriptor) -> Any:
        """A cache over it."""
        return kvcore.adopt(self.spec, self.tensors, layout=descriptor)

    def compare(self, descriptor: Descriptor) -> None:
        """Adopt, and look at rows."""
        cache = self.adopted(descriptor)
        cache.compare(cache.admit(blocks=OURS, length=self.length), self.read)

    def places(self, descriptor: Descriptor) -> dict[Any, Any]:
        """Where a descriptor that can be right has all bytes of a block, and the next block.

        Raises:
            SpecError: it cannot be.
        """
        sizes = {name: tensor.nbytes for name, tensor in tensors_of(self.tensors).items()}
        found: dict[Any, Any] = {}
        for key, one in check(region_plan(self.spec, descriptor.blocks, 1), descriptor, sizes).items():
            steps, byte = one.steps, np.arange(one.nbytes)
            rows = steps.start(np.arange(one.rows))[:, None, None]
            heads = np.arange(one.region.heads)[:, None] * steps.head
            inside = rows + heads + byte // steps.piece_bytes * steps.piece + byte % steps.piece_bytes
            found[key] = one.lines.tensor, one.lines.block, (one.lines.offset + inside).tobytes()
        return found


def scenes() -> list[Scene]:
    """All of them."""
    found: list[Scene] = []
    for layout in PAGED:
        engine = Engine(layout)
        engine.write(OURS, 0, 40)
        right = adoption.describe(SPEC, engine.tensors, layout)
        found.append(Scene(layout, SPEC, engine.tensors, right, 40, engine.read))
    tensors = chunks.memory("numpy")
    one = Scene(
        "rows in chunks", chunks.SPEC, tensors, chunks.RIGHT, 22, lambda *at: chunks.read(tensors, *at), CHUNKED
    )
    cache = one.adopted(one.right)
    stories.tell(cache, {cache.admit(blocks=OURS): chunks.TOKENS[: one.length]})
    found.append(one)
    return found


def changed(scene: Scene, choice: random.Random) -> tuple[str, Descriptor]:
    """(what was done, another descriptor): one to three places of one or all fields are others'."""
    right, fields = scene.right, scene.fields
    told: list[str] = []
    lines = list(right.lines)
    while lines == right.lines or choice.random() < 0.3:
        name, some = choice.choice(fields), [choice.randrange(len(lines))]
        if choice.random() < 0.3:
            some = list(range(len(lines)))
        how = choice.choice(("another's", "twice", "half", "a step more", "a step less"))
        for at in some:
            one, other = lines[at], choice.choice(lines)
            value = getattr(other, name if isinstance(getattr(one, name), str) else choice.choice(fields[3:]))
            if how != "another's" and not isinstance(getattr(one, name), str):
                step = choice.choice((4, one.head, one.token, one.block)) if name != "layer" else 1
                before = getattr(one, name)
                value = {"twice": 2 * before, "half": before // 2, "a step more": before + step}.get(how, before - step)
            lines[at] = msgspec.structs.replace(one, **{name: value})
        told.append(f"{how}: {name} of {len(some)}")
        if len(told) == 3 and lines != right.lines:
            break
    return ", ".join(told), msgspec.structs.replace(right, lines=lines)


def wrong(count: int, seed: int) -> Iterator[tuple[str, Scene, Descriptor]]:
    """(what is wrong, scene, descriptor) of all named ones, and of so many more."""
    every = scenes()
    for scene in every:
        scene.compare(scene.right)
        for name, change in WRONG.items() if scene.spec is SPEC else ():
            yield name, scene, msgspec.structs.replace(scene.right, lines=change(scene.right.lines))
    choice = random.Random(seed)
    for _ in range(count):
        # As many in chunks as in all other layouts together.
        scene = every[-1] if choice.random() < 0.5 else choice.choice(every[:-1])
        name, descriptor = changed(scene, choice)
        yield name, scene, descriptor


def run(*, count: int, seed: int) -> dict[str, Any]:
    """Adopt by every one of them."""
    found: Counter[str] = Counter()
    failures: list[str] = []
    for name, scene, descriptor in wrong(count, seed):
        if Counter(descriptor.lines) == Counter(scene.right.lines):
            # Lines in another order, each with all that it said.
            found["right after all"] += 1
            continue
        try:
            scene.adopted(descriptor)
        except (SpecError, ShapeError):
            found["refused"] += 1
            continue
        if scene.places(descriptor) == scene.places(scene.right):
            found["right after all"] += 1
            continue
        try:
            scene.compare(descriptor)
        except ShapeError:
            found["shown by rows"] += 1
            continue
        failures.append(f"{scene.name}: {name}")
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
