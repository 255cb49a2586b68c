"""The block allocator against a model of three sets: nothing lost, nothing doubled, nobody evicted who is held."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.errors import OutOfBlocks, RequestError
from kvcore.requests.blocks import BlockAllocator
from kvcore.requests.request import RequestState

BLOCKS = 9


class AllocatorMachine(RuleBasedStateMachine):
    """The model: holders by block, keys by block, which block of a key is found, and the order of idle blocks."""

    def __init__(self):
        super().__init__()
        self.real = BlockAllocator(BLOCKS)
        self.holders = dict.fromkeys(range(BLOCKS), 0)
        self.taken = dict.fromkeys(range(BLOCKS), 0)
        self.keys = {}
        self.found = {}
        self.idle = []
        self.evicted = []
        self.real.on_evict = self.evicted.append

    @property
    def free(self):
        return [block for block, count in self.holders.items() if count == 0 and block not in self.keys]

    @property
    def held(self):
        return [block for block, count in self.holders.items() if count > 0]

    @rule(count=st.integers(0, BLOCKS + 2))
    def take(self, count):
        if count > len(self.free) + len(self.idle):
            with pytest.raises(OutOfBlocks):
                self.real.take(count)
            return
        free, gone = set(self.free), self.idle[: max(0, count - len(self.free))]
        self.evicted.clear()
        got = self.real.take(count)
        assert len(set(got)) == len(got) == count
        assert set(got) <= free | set(gone)
        told = []
        for block in gone:
            self.idle.remove(block)
            name = self.keys.pop(block)
            # Nothing is lost while somebody holds the same content.
            heirs = [twin for twin in self.twins(name) if self.holders[twin]]
            if heirs:
                self.found[name] = heirs[0]
            else:
                del self.found[name]
                told.append(name)
        assert self.evicted == told
        for block in got:
            assert self.holders[block] == 0
            self.holders[block] = 1
            self.taken[block] += 1

    @rule(block=st.integers(0, BLOCKS - 1))
    def hold(self, block):
        if block in self.free:
            with pytest.raises(RequestError):
                self.real.hold(block)
            return
        self.real.hold(block)
        self.holders[block] += 1
        if block in self.idle:
            self.idle.remove(block)

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=6))
    def drop(self, blocks):
        if any(blocks.count(block) > self.holders[block] for block in blocks):
            with pytest.raises(RequestError):
                self.real.drop(blocks)
            return
        for block in blocks:
            self.holders[block] -= 1
        last = [block for place, block in enumerate(blocks) if block not in blocks[place + 1 :]]
        freed = [block for block in last if self.holders[block] == 0 and not self.stays(block)]
        assert sorted(self.real.drop(blocks)) == sorted(freed)

    def stays(self, block):
        """A block that nobody holds any more: idle if no other has its key, free if one does."""
        if block not in self.keys:
            return False
        name = self.keys[block]
        heirs = [twin for twin in self.twins(name) if self.holders[twin]]
        if self.found[name] == block and not heirs:
            self.idle.append(block)
            return True
        del self.keys[block]
        if self.found[name] == block:
            self.found[name] = heirs[0]
        elif self.found[name] in self.idle:
            self.idle.remove(self.found[name])
            self.idle.append(self.found[name])
        return False

    def twins(self, name):
        return [block for block, key in self.keys.items() if key == name and block != self.found[name]]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 5))
    def seal(self, data, key):
        block = data.draw(st.sampled_from(self.held))
        name = bytes([key])
        self.real.seal(block, name)
        if block not in self.keys:
            self.keys[block] = name
            self.found.setdefault(name, block)

    @rule(key=st.integers(0, 5))
    def find(self, key):
        assert self.real.find(bytes([key])) == self.found.get(bytes([key]))

    @invariant()
    def nothing_is_lost(self):
        assert self.real.free == len(self.free)
        assert self.real.idle == len(self.idle)
        assert self.real.free + self.real.idle + len(self.held) == BLOCKS
        assert self.real.available == self.real.free + self.real.idle
        # Whatever is held under a key is found under it, by that block or by one of the same content.
        assert set(self.found) == set(self.keys.values())
        for block in range(BLOCKS):
            assert self.real.holders(block) == self.holders[block]
            assert self.real.generation(block) == self.taken[block]
            assert self.real.key(block) == self.keys.get(block)
            assert self.real.is_shared(block) == (self.holders[block] > 1 or block in self.keys)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=60)


def test_a_block_dropped_twice_in_one_call_changes_nothing():
    allocator = BlockAllocator(4)
    a, b, c = allocator.take(3)
    allocator.seal(c, b"c")
    allocator.drop([c])
    with pytest.raises(RequestError):
        allocator.drop([a, b, a])
    with pytest.raises(RequestError):
        allocator.drop([a, c])
    assert (allocator.free, allocator.idle, allocator.holders(a), allocator.holders(b)) == (1, 1, 1, 1)
    assert allocator.statistics.dropped == 1
    assert allocator.drop([a, b]) == [a, b]


def test_the_least_recently_used_goes_first_and_a_find_does_not_hold():
    allocator = BlockAllocator(3)
    blocks = allocator.take(3)
    for block in blocks:
        allocator.seal(block, bytes([block]))
    allocator.drop(blocks)
    assert allocator.find(bytes([blocks[0]])) == blocks[0]
    # Used again, so it goes last.
    allocator.hold(blocks[0])
    allocator.drop([blocks[0]])
    assert allocator.take(1) == [blocks[1]]
    assert allocator.take(1) == [blocks[2]]
    assert allocator.take(1) == [blocks[0]]
    assert [allocator.find(bytes([block])) for block in blocks] == [None] * 3
    statistics = allocator.statistics
    assert (statistics.taken, statistics.dropped, statistics.evicted) == (6, 4, 3)
    assert (statistics.hits, statistics.misses) == (1, 3)


def test_the_first_block_of_a_key_stays_the_one_that_is_found():
    allocator = BlockAllocator(2)
    first, second = allocator.take(2)
    allocator.seal(first, b"key")
    allocator.seal(second, b"key")
    assert allocator.find(b"key") == first
    assert allocator.drop([first, second]) == [second]
    assert (allocator.free, allocator.idle) == (1, 1)


def test_a_twin_takes_the_place_of_what_is_dropped_or_evicted():
    allocator = BlockAllocator(3)
    allocator.on_evict = lambda key: pytest.fail(f"{key} is still held")
    first, second, third = allocator.take(3)
    allocator.seal(first, b"key")
    allocator.seal(second, b"key")
    # One copy is enough: the block that is let go is free, and the one that is held is found.
    assert allocator.drop([first]) == [first]
    assert (allocator.find(b"key"), allocator.free, allocator.idle) == (second, 1, 0)
    # An idle block of the key, and the same tokens computed once more.
    allocator.drop([second])
    allocator.seal(third, b"key")
    assert (allocator.find(b"key"), allocator.free, allocator.idle) == (second, 1, 1)
    assert sorted(allocator.take(2)) == [first, second]
    assert (allocator.find(b"key"), allocator.key(second)) == (third, None)


def test_a_copied_place_is_the_same_in_everything_and_changes_alone():
    values = {name: object() for name in RequestState.__struct_fields__}
    place: Any = RequestState(**values)
    copied: Any = place.copy()
    assert {name: getattr(copied, name) for name in values} == values
    copied.length = 3
    assert place.length is values["length"]


def test_a_hit_that_finds_no_room_leaves_what_is_found():
    blocks = BlockAllocator(3)
    (first,) = blocks.take(1)
    blocks.seal(first, b"key")
    blocks.drop([first])
    twin, _ = blocks.take(2)
    blocks.seal(twin, b"key")
    with pytest.raises(OutOfBlocks, match=r"1 more blocks.*0 free blocks of 3"):
        blocks.hold_and_take([first], 1)
    assert (blocks.find(b"key"), blocks.idle, blocks.free) == (first, 1, 0)
    assert blocks.hold_and_take([first], 0) == []
    assert blocks.holders(first) == 1
