"""The block allocator: reference counts, generations, sealed blocks, and eviction of the least recently used.

A block is free, held by one or more requests, or idle: sealed (its content is published under a key) with nobody
holding it, so that it can be found again or evicted. Free, held and idle always add up to the capacity.

One key may have several blocks, of requests that computed the same tokens at the same time. One of them is found; the
others are its twins, all of them held: when it is dropped or evicted, a twin takes its place.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcore.errors import OutOfBlocks, RequestError


@dataclass(kw_only=True)
class BlockStatistics:
    """What happened since the allocator was made: blocks taken, dropped, evicted; key look-ups that hit and missed."""

    taken: int = 0
    dropped: int = 0
    evicted: int = 0
    hits: int = 0
    misses: int = 0


class BlockAllocator:
    """Who holds which of ``count`` blocks.

    Attributes:
        statistics: counts since the start.
        shares: another number whenever a block may no longer be one holder's alone.
        on_evict: called with the key of every block that is evicted, so that what depends on it can go too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.statistics = BlockStatistics()
        self.shares = 0
        self.on_evict: Callable[[bytes], None] | None = None
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._generations = [0] * count
        self._keys: list[bytes | None] = [None] * count
        # Key -> the block that look-ups give; key -> further blocks of it, where there are any.
        self._found: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}
        # Block -> its key, those that became idle first in front.
        self._idle: OrderedDict[int, bytes] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that ``take`` can still give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def free(self) -> int:
        """Blocks that nobody holds and no key finds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Sealed blocks that nobody holds."""
        return len(self._idle)

    def generation(self, block: int) -> int:
        """How often the block has been taken."""
        return self._generations[block]

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def key(self, block: int) -> bytes | None:
        """The key that a block is sealed under, or None."""
        return self._keys[block]

    def take(self, count: int) -> list[int]:
        """``count`` blocks of one holder each, free ones first, then the idle ones that were used longest ago.

        Raises:
            OutOfBlocks: fewer are available; nothing was taken.
        """
        free = self._free
        if count > len(free):
            self._evict(count - len(free))
        split = len(free) - count
        taken = free[split:]
        del free[split:]
        taken.reverse()
        holders, generations = self._holders, self._generations
        for block in taken:
            holders[block] = 1
            generations[block] += 1
        self.statistics.taken += count
        return taken

    def hold(self, block: int) -> None:
        """One more holder of a held or idle block."""
        if self._holders[block] == 0 and self._keys[block] is None:
            raise RequestError(got=f"free block {block}", where="hold", allowed="a held or sealed block")
        self.shares += 1
        self._idle.pop(block, None)
        self._holders[block] += 1

    def hold_and_take(self, blocks: Sequence[int], count: int) -> list[int]:
        """One more holder of each of the different ``blocks``, and ``count`` blocks besides them, which are returned.

        Raises:
            OutOfBlocks: fewer are available besides them; nothing was taken, and look-ups find what they found before.
        """
        room = self.available - self.idle_among(blocks)
        if count > room:
            raise self._too_few(count, room)
        for block in blocks:
            self.hold(block)
        return self.take(count)

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """One holder less for each block; returns those that became free.

        The last block of its key becomes idle instead.

        Raises:
            RequestError: a block is not held as often as it is dropped; nothing was dropped.
        """
        holders = self._holders
        unheld: list[int] = []
        for done, block in enumerate(blocks):
            left = holders[block] - 1
            if left < 0:
                for dropped in blocks[:done]:
                    holders[dropped] += 1
                raise RequestError(got=f"block {block}, dropped twice", where="drop", allowed="blocks that are held")
            holders[block] = left
            if left == 0:
                unheld.append(block)
        self.statistics.dropped += len(blocks)
        if self._found:
            unheld = [block for block in unheld if not self._is_kept(block)]
        self._free += unheld
        return unheld

    def mend(self, held: Iterable[int]) -> None:
        """Count anew after a verb that did not get to its end: ``held`` are all blocks of all holders, repeated."""
        holders = [0] * self.count
        for block in held:
            holders[block] += 1
        self._holders = holders
        self.shares += 1
        keys = self._keys
        found = {key: block for key, block in self._found.items() if keys[block] == key}
        for block, key in enumerate(keys):
            if key is not None:
                found.setdefault(key, block)
        twins: dict[bytes, list[int]] = {}
        for block, key in enumerate(keys):
            if key is None or found[key] == block:
                continue
            if holders[block]:
                twins.setdefault(key, []).append(block)
            else:
                keys[block] = None
        self._found, self._twins = found, twins
        idle = [block for block in self._idle if keys[block] is not None and not holders[block]]
        idle += [block for block, key in enumerate(keys) if key is not None and not holders[block]]
        self._idle = OrderedDict((block, key) for block in idle if (key := keys[block]))
        free = [block for block in self._free if keys[block] is None and not holders[block]]
        known = set(free)
        free += [
            block for block in range(self.count) if keys[block] is None and not holders[block] and block not in known
        ]
        self._free = list(dict.fromkeys(free))

    def is_shared(self, block: int, leaving: int = 0) -> bool:
        """True if writing to the block would change what somebody else, or a look-up by key, reads.

        Args:
            leaving: how many of its holders are about to take a copy instead.
        """
        return self._holders[block] - leaving > 1 or self._keys[block] is not None

    def is_alone(self, block: int) -> bool:
        """True if one holds the block and no key finds it: whatever is written to it, nobody else reads."""
        return self._holders[block] == 1 and self._keys[block] is None

    def seal(self, block: int, key: bytes) -> None:
        """Publish a full, held block under a key; the first block of a key stays the one that is found."""
        if self._keys[block] is None:
            self.shares += 1
            self._keys[block] = key
            if self._found.setdefault(key, block) != block:
                self._twins.setdefault(key, []).append(block)

    def find(self, key: bytes) -> int | None:
        """The sealed block of a key, or None; does not hold it."""
        block = self._found.get(key)
        if block is None:
            self.statistics.misses += 1
        else:
            self.statistics.hits += 1
        return block

    def find_quietly(self, key: bytes) -> int | None:
        """The same for the library itself: no look-up is counted."""
        return self._found.get(key)

    def forget(self) -> list[int]:
        """Take back every key. Returns the blocks that became free, which nobody held."""
        freed = list(self._idle)
        self._keys = [None] * self.count
        self._found, self._twins = {}, {}
        self._idle = OrderedDict()
        self._free += freed
        return freed

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of the blocks are idle."""
        return sum(block in self._idle for block in blocks)

    def _is_kept(self, block: int) -> bool:
        """Whether a block that nobody holds any more stays to be found; if not, it has no key any more."""
        key = self._keys[block]
        if key is None:
            return False
        twins = self._twins.get(key)
        if self._found[key] != block:
            self._remove_twin(key, block)
            if self._found[key] in self._idle:
                # Its content was used until now.
                self._idle.move_to_end(self._found[key])
        elif not twins or not self._hand_over(key, twins):
            self._idle[block] = key
            return True
        self._keys[block] = None
        return False

    def _hand_over(self, key: bytes, twins: list[int]) -> bool:
        """Let a held twin be found in the place of a block that goes; False where there is none."""
        heir = next((twin for twin in twins if self._holders[twin]), None)
        if heir is None:
            return False
        self._remove_twin(key, heir)
        self._found[key] = heir
        return True

    def _remove_twin(self, key: bytes, block: int) -> None:
        self._twins[key].remove(block)
        if not self._twins[key]:
            del self._twins[key]

    def _evict(self, count: int) -> None:
        """Make ``count`` idle blocks free, those that became idle first."""
        if count > len(self._idle):
            raise self._too_few(count + len(self._free), self.available)
        keys, found, oldest, free, told = self._keys, self._found, self._idle.popitem, self._free, self.on_evict
        for _ in range(count):
            block, key = oldest(last=False)
            keys[block] = None
            free.append(block)
            if (twins := self._twins.get(key)) and self._hand_over(key, twins):
                continue
            del found[key]
            if told is not None:
                told(key)
        self.statistics.evicted += count

    def _too_few(self, count: int, room: int) -> OutOfBlocks:
        return OutOfBlocks(
            got=f"{count} more blocks",
            where="step",
            allowed=f"{room} free blocks of {self.count}",
            hint="Release or truncate requests, or bring fewer tokens in this step.",
        )
