"""Rows of tails wait for the flush that reads them, and nobody can tell but by the number of calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.spec import CacheSpec, Rope
from tests.support import faulty, scene

SPEC = CacheSpec(layers=[scene.compressed(4), scene.compressed(8, overlap=False, indexer=False)], block_tokens=8)
ROPE = Rope(dim=4, theta=1e4)
ROLES = ("tail", "index_tail")
WRITERS = ("append_tail", "append_index_tail", "flush", "append_flush")


class Watched:
    """A backend's verbs, which writes to tails and entries are told of."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.calls: list[tuple[str, int]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._ops, name)
        if name not in WRITERS:
            return verb

        def call(pools: Any, layer: int, *given: Any, **options: Any) -> Any:
            self.calls.append((name, layer))
            found = verb(pools, layer, *given, **options)
            if name == self.fails:
                raise MemoryError(name)
            return found

        return call


class World:
    """A cache whose one request has a history; both layers' rows of a step come from its tokens' numbers."""

    def __init__(self, backend: str, tokens: int = 13, drafts: int = 0) -> None:
        self.cache = scene.create(SPEC, backend, max_requests=2, max_tokens=256, max_draft_tokens=drafts)
        self.ops = Watched(self.cache._state.ops)
        faulty.plant(self.cache, self.ops)
        self.request = self.cache.admit()
        with self.cache.step({self.request: tokens}) as step:
            self.give(step, 0, tokens)
        self.ops.calls.clear()

    def rows(self, layer: int, role: str, start: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        width = getattr(SPEC.layers[layer], role).width
        kv = np.sin(np.arange(start, start + tokens, dtype=np.float32)[:, None] + np.arange(width) + 10 * layer)
        return kv.astype(np.float32), np.cos(3 * kv).astype(np.float32)

    def tails(self, step: Any, layer: int, start: int, tokens: int, roles: Sequence[str] = ROLES) -> None:
        for role in roles[: 2 - layer]:
            getattr(step.layer(layer), f"append_{role}")(*self.rows(layer, role, start, tokens))

    def give(self, step: Any, start: int, tokens: int, *, flush: bool = True, roles: Sequence[str] = ROLES) -> None:
        for layer in (0, 1):
            step.layer(layer).append_window(np.ones((tokens, scene.DIM), np.float32))
            self.tails(step, layer, start, tokens, roles)
            if flush:
                step.layer(layer).flush(rope=ROPE)

    def seen(self, step: Any = None) -> list[Any]:
        """Canonical rows of everything, and the digest."""
        if step is None:
            with self.cache.step({self.request: 0}) as step:
                return [*self.seen(step), *(step.layer(layer).digest() for layer in (0, 1))]
        return [
            tuple(kvcore.to_numpy(array).tolist() for array in step.layer(layer).gather_rows(role))
            for layer in (0, 1)
            for role, _ in SPEC.layers[layer].components()
        ]


def test_append_and_flush_are_one_call(backend: str) -> None:
    world = World(backend)
    with world.cache.step({world.request: 1}) as step:
        world.give(step, 13, 1)
    assert world.ops.calls == [("append_flush", 0), ("append_flush", 1)]


def test_rows_that_overwrite_what_their_entries_need_are_written_at_the_end(backend: str) -> None:
    world = World(backend)
    with world.cache.step({world.request: 30}) as step:
        world.give(step, 13, 30)
        assert world.ops.calls == [("flush", 0), ("flush", 1)]
    assert [call for call in world.ops.calls if call[0] != "flush"] == [
        *(("append_tail", 0), ("append_index_tail", 0), ("append_tail", 1))
    ]


@pytest.mark.parametrize("look", ["rows", "digest", "pools", "index", "next layer"])
def test_whoever_looks_sees_them(backend: str, look: str) -> None:
    """The rows are there before the flush, once; a flush that comes after it finds them."""
    plain, world = World(backend, drafts=4), World(backend, drafts=4)
    with plain.cache.step({plain.request: 3}) as step:
        plain.give(step, 13, 3)
    with world.cache.step({world.request: 3}) as step:
        world.tails(step, 0, 13, 3)
        assert not world.ops.calls
        if look == "rows":
            found = kvcore.to_numpy(step.layer(0).gather_rows("tail").rows)[0, -3:].reshape(3, -1).view(np.float32)
            assert np.array_equal(found, np.concatenate(world.rows(0, "tail", 13, 3), axis=1))
        elif look == "digest":
            step.layer(0).digest()
        elif look == "pools":
            assert world.cache.pools is not None
        elif look == "index":
            assert step.index is not None
        step.layer(int(look == "next layer")).append_window(np.ones((3, scene.DIM), np.float32))
        assert world.ops.calls == [("append_tail", 0), ("append_index_tail", 0)]
        step.layer(int(look != "next layer")).append_window(np.ones((3, scene.DIM), np.float32))
        world.tails(step, 1, 13, 3)
        step.layer(1).flush(rope=ROPE)
        step.layer(0).flush(rope=ROPE)
    assert world.seen() == plain.seen()


def test_a_commit_writes_what_no_flush_wrote(backend: str) -> None:
    """The entry is lost, the tails' rows are not."""
    plain, world = World(backend, drafts=4), World(backend, drafts=4)
    with plain.cache.step({plain.request: 3}) as step:
        plain.give(step, 13, 3)
    with world.cache.step({world.request: 3}) as step:
        for layer in (1, 0):
            step.layer(layer).append_window(np.ones((3, scene.DIM), np.float32))
            world.tails(step, layer, 13, 3)
    roles = [role for layer in SPEC.layers for role, _ in layer.components()]
    tails = [number for number, role in enumerate(roles) if role in ROLES]
    assert len(tails) == 3
    assert [world.seen()[number] for number in tails] == [plain.seen()[number] for number in tails]


def test_a_callers_buffer_is_its_own_again(backend: str) -> None:
    plain, world = World(backend), World(backend)
    with plain.cache.step({plain.request: 2}) as step:
        plain.give(step, 13, 2)
    buffers = [np.empty((2, 16), np.float32) for _ in range(2)]
    with world.cache.step({world.request: 2}) as step:
        for layer in (0, 1):
            step.layer(layer).append_window(np.ones((2, scene.DIM), np.float32))
            for role in ROLES[: 2 - layer]:
                given = world.rows(layer, role, 13, 2)
                kept = [buffer[:, : rows.shape[1]] for buffer, rows in zip(buffers, given, strict=True)]
                for buffer, rows in zip(kept, given, strict=True):
                    buffer[:] = rows
                getattr(step.layer(layer), f"append_{role}")(*map(np.ascontiguousarray, kept))
                for buffer in buffers:
                    buffer[:] = -7
            step.layer(layer).flush(rope=ROPE)
    assert world.seen() == plain.seen()


@pytest.mark.parametrize("when", ["before the flush", "after it", "settled", "failed", "failed and again"])
def test_an_abort_leaves_no_trace(backend: str, when: str) -> None:
    """The ring is full, and has room for two drafts: a step takes the place of rows that are live without it."""
    world = World(backend, tokens=32, drafts=2)
    before = world.seen()
    step = world.cache.step({world.request: 2})
    for layer in (0, 1):
        step.layer(layer).append_window(np.ones((2, scene.DIM), np.float32))
        world.tails(step, layer, 32, 2)
        if when == "settled":
            step.layer(layer).gather_rows("tail")
        elif when.startswith("failed"):
            world.ops.fails = "append_flush"
            with pytest.raises(MemoryError):
                step.layer(layer).flush(rope=ROPE)
            world.ops.fails = ""
        if when in ("after it", "failed and again"):
            step.layer(layer).flush(rope=ROPE)
    step.abort()
    assert world.seen() == before
    # What it overwrote is live at a shorter length alone.
    plain = World(backend, tokens=32, drafts=2)
    for each in (plain, world):
        each.cache.truncate(each.request, 30)
    assert world.seen() == plain.seen()
    for each in (plain, world):
        with each.cache.step({each.request: 2}) as step:
            each.give(step, 30, 2)
    assert world.seen() == plain.seen()


def test_a_commit_still_refuses_what_is_missing(backend: str) -> None:
    world = World(backend)
    before = world.seen()
    with pytest.raises(kvcore.StepError, match="no rows for tail"), world.cache.step({world.request: 1}) as step:
        world.give(step, 13, 1, flush=False, roles=())
    assert not world.ops.calls[2:]
    assert world.seen() == before
