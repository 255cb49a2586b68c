"""Lives of adopted requests, drawn at random, beside the same requests in a cache of kvcore's own.

After everything that happens both have the same rows, the owner's memory has all of them for whoever is told the
places alone, and nothing else was written to.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.adoption import describe
from kvcore.errors import OutOfBlocks, RequestError
from tests.support import samples, stories
from tests.support.owners import KINDS, ROLES, SLOTS, WINDOW, Owner


@dataclass
class One:
    """A request, its twin in the other cache, and what the owner has given it."""

    request: Any
    twin: Any
    blocks: list[int]
    slot: int
    pages: list[int]
    ids: list[int]


class Lives:
    def __init__(self, kind: str, rng: np.random.Generator) -> None:
        self.rng, self.drafts = rng, int(rng.integers(1, 4))
        self.owner = Owner(KINDS[kind], self.drafts, rng)
        self.spec, self.tabled = self.owner.kind.spec, "table" in self.owner.kind.where
        said, layout = self.owner.kind.maps, self.owner.kind.layout
        self.descriptor = describe(self.spec, self.owner.tensors, layout, maps=said)
        self.cache = self.adopted()
        options = {"max_requests": SLOTS, "max_tokens": 2048, "max_draft_tokens": self.drafts}
        self.own = kvcore.create_cache(self.spec, backend="reference", **options)
        self.live: list[One] = []

    def adopted(self):
        options = {"layout": self.descriptor, "maps": self.owner.tables, "max_requests": SLOTS}
        return kvcore.adopt(self.spec, self.owner.tensors, max_draft_tokens=self.drafts, **options)

    def place(self, one: One) -> dict[str, Any]:
        return {"blocks": one.blocks, "slot": one.slot, "pages": self.table(one.pages)}

    def table(self, pages: list[int]) -> dict[str, list[int]] | None:
        return dict.fromkeys(ROLES, pages) if self.tabled else None

    def check(self) -> None:
        for one in self.live:
            assert one.request.length == one.twin.length == len(one.ids)
        wanted = self.own.digest([one.twin for one in self.live])
        assert self.cache.digest([one.request for one in self.live]) == wanted
        told = self.adopted()
        again = [told.admit(length=len(one.ids), **self.place(one)) for one in self.live]
        assert told.digest(again) == wanted, "the owner's memory lacks rows"
        pages = {page for one in self.live for page in one.pages}
        self.owner.check_the_rest(pages, {one.slot for one in self.live})

    def any(self) -> One:
        return self.live[int(self.rng.integers(len(self.live)))]

    def some(self) -> list[One]:
        order = self.rng.permutation(len(self.live))[: int(self.rng.integers(1, len(self.live) + 1))]
        return [self.live[number] for number in order]

    def allotted(self, tokens: int) -> tuple[list[int], int, list[int]] | None:
        """Blocks, a slot and pages for so many; None without room."""
        blocks, pages = -(-tokens // self.spec.block_tokens), -(-tokens // 4) if self.tabled else 0
        if not self.owner.free["slot"] or self.owner.room() < blocks or len(self.owner.free["table"]) < pages:
            return None
        kinds = [*["number"] * blocks, "slot", *["table"] * pages]
        found = [self.owner.allot(kind) for kind in kinds]
        return found[:blocks], found[blocks], found[blocks + 1 :]

    def room_for(self, one: One, more: int) -> bool:
        """Whether the owner has given it blocks and pages of its own for so many tokens."""
        length, size = len(one.ids), self.spec.block_tokens
        blocks = -(-(length + more) // size) - len(one.blocks)
        pages = -(-(length + more) // 4) - len(one.pages) if self.tabled else 0
        shared = [number for number in one.blocks[length // size :] if self.owner.holders[number] > 1] if more else []
        if self.owner.room() < max(blocks, 0) + len(shared) or len(self.owner.free["table"]) < pages:
            return False
        added = [self.owner.allot("number") for _ in range(blocks)], [self.owner.allot("table") for _ in range(pages)]
        one.blocks, one.pages = one.blocks + added[0], one.pages + added[1]
        if shared:
            copies = {number: self.owner.copied(number) for number in shared}
            one.blocks = [copies.get(number, number) for number in one.blocks]
            self.readmit(one)
        else:
            self.cache.give(one.request, added[0], self.table(added[1]))
        return True

    def readmit(self, *some: One) -> None:
        for one in some:
            self.cache.release(one.request)
        for one in reversed(some):
            one.request = self.cache.admit(length=len(one.ids), **self.place(one))

    def arrive(self) -> None:
        if (found := self.allotted(0)) is not None:
            self.live.append(One(None, self.own.admit(), *found, []))
            self.live[-1].request = self.cache.admit(**self.place(self.live[-1]))

    def step(self) -> None:
        drawn = [(one, int(self.rng.choice([0, 1, 1, 2, 5, 9, 17, 17]))) for one in self.some()]
        new = {
            id(one): (one, self.rng.integers(251, size=more).tolist())
            for one, more in drawn
            if self.room_for(one, more)
        }
        act = stories.tell if self.rng.random() < 0.7 else stories.fail
        if new:
            act(self.cache, {one.request: ids for one, ids in new.values()})
            act(self.own, {one.twin: ids for one, ids in new.values()})
            for one, ids in new.values() if act is stories.tell else ():
                one.ids += ids

    def step_without_room(self) -> None:
        one, before = self.any(), [tensor.tobytes() for tensor in self.owner.tensors]
        new = {other.request: [1] for other in self.some() if other is not one}
        new[one.request] = [2] * (len(one.blocks) * self.spec.block_tokens - len(one.ids) + 1)
        with pytest.raises((OutOfBlocks, RequestError)):
            stories.tell(self.cache, new)
        assert [tensor.tobytes() for tensor in self.owner.tensors] == before

    def go_back(self) -> None:
        one = self.any()
        length = max(0, len(one.ids) - int(self.rng.choice([1, self.drafts, self.drafts])))
        caches = (self.cache, one.request), (self.own, one.twin)
        # What was admitted with rows that were there goes back no further than they do.
        if all(self.goes_back(*each, length) for each in caches):
            for cache, request in caches:
                cache.truncate(request, length)
            one.ids = one.ids[:length]

    def goes_back(self, cache: Any, request: Any, length: int) -> bool:
        manager = cache._state.manager
        kept = (0, request.length, *manager.place(request).states) if manager.states else (length,)
        return length in kept and length >= manager.deepest_truncation(request)

    def leave(self) -> None:
        one = self.any()
        self.live.remove(one)
        self.cache.release(one.request)
        self.own.release(one.twin)
        for number in one.blocks:
            self.owner.give_up(number)
        for page in one.pages:
            self.owner.give_up_page(page)
        self.owner.give_up_slot(one.slot)

    def come_back(self) -> None:
        self.readmit(*self.some())

    def move(self) -> None:
        one = self.any()
        if "slots" in self.owner.tables:
            self.owner.move("place", one.slot)
        for number in one.blocks[:1]:
            self.owner.move("block", number)
            if "windows" in self.owner.tables:
                self.owner.move("window", number)

    def forget_windows(self) -> None:
        one, size = self.any(), self.spec.block_tokens
        behind = (len(one.ids) - WINDOW - self.drafts) // size - 1
        for number in one.blocks[: max(behind, 0)] if "windows" in self.owner.tables else ():
            if self.owner.holders[number] == 1:
                self.owner.forget_window(number)

    def bring(self) -> None:
        source = self.any()
        if (found := self.allotted(len(source.ids))) is not None:
            blob = self.cache.export_request(source.request)
            one = One(None, self.own.import_request(blob), *found, list(source.ids))
            one.request = self.cache.import_request(blob, into=self.cache.admit(**self.place(one)))
            self.live.append(one)

    def fork(self) -> None:
        source = self.any()
        if self.owner.free["slot"] and len(self.owner.free["table"]) >= len(source.pages):
            blocks = source.blocks[: self.cache.plan.blocks_for(len(source.ids))]
            for number in blocks:
                self.owner.holders[number] += 1
            pages = [self.owner.allot("table") for _ in source.pages]
            one = One(None, self.own.fork(source.twin), blocks, self.owner.allot("slot"), pages, list(source.ids))
            one.request = self.cache.fork(source.request, slot=one.slot)
            if self.tabled:
                for before, after in zip(source.pages, pages, strict=True):
                    self.owner.copy("table", before, after)
                self.cache.give(one.request, pages=self.table(pages))
            self.live.append(one)


OFTEN = ("arrive",) * 2 + ("step",) * 8 + ("go_back",) * 3 + ("fork",) * 2
ONCE = ("step_without_room", "leave", "come_back", "move", "forget_windows", "bring")


@pytest.mark.parametrize("kind", KINDS)
def test_adopted_requests_live_as_others_do(kind, rng):
    for _ in range(samples.examples(2, 60)):
        lives = Lives(kind, rng)
        for name in ("arrive", *rng.choice([*OFTEN, *ONCE], size=40)):
            if name == "arrive" or lives.live:
                getattr(lives, name)()
                lives.check()
