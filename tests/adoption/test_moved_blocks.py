"""Blocks that an owner moves between steps: they are where its map says, whenever a verb looks."""

import numpy as np
import pytest

import kvcore
from kvcore import store as stores
from kvcore.adoption import IndexMap, describe, from_json, to_json
from kvcore.errors import OutOfBlocks, RequestError, ShapeError, SpecError
from kvcore.spec import presets
from kvcore.store import BlockStore, HostTier
from kvcore.store.blocks import Blocks
from tests.support import stories

PAGE, PLACES, NUMBERS, NOWHERE = 4, 9, 30, -1
SPEC = presets.classic(layers=2, key_heads=2, key_dim=4, block_tokens=PAGE, key_format="fp32")
SAID = IndexMap(name="moved", of="block", count=NUMBERS, first=1)
LAYOUT = {"kv": "blocks moved NL_X_NB_BS_NH_TWO_HS"}
TOKENS = list(range(40))


class Engine:
    """Tensors of both layers, and a map of more numbers than there are places, which moves blocks with their bytes."""

    def __init__(self, kind="numpy"):
        self.tensors = [np.full((PLACES, PAGE, 2, 2, 4), np.nan, np.float32) for _ in SPEC.layers]
        self.map = np.full(NUMBERS, NOWHERE, np.int64)
        given, table = self.tensors, self.map
        if kind == "torch":
            torch = pytest.importorskip("torch")
            given, table = [torch.from_numpy(one) for one in given], torch.from_numpy(table)
        self.descriptor = describe(SPEC, given, LAYOUT, maps=[SAID])
        self.cache = kvcore.adopt(SPEC, given, layout=self.descriptor, maps={"moved": table})

    def move(self, number, place):
        """A block with its rows to another place, which nobody has; what it leaves behind is nothing's."""
        for tensor in self.tensors:
            tensor[place] = tensor[self.map[number]]
            tensor[self.map[number]] = np.nan
        self.map[number] = place

    def swap(self, one, other):
        """Two blocks change places."""
        at = self.map[[one, other]]
        for tensor in self.tensors:
            tensor[at] = tensor[at[::-1]]
        self.map[[one, other]] = at[::-1]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_request_goes_on_wherever_its_blocks_are(kind):
    engine, own = Engine(kind), kvcore.create_cache(SPEC, backend="reference", max_requests=3, max_tokens=64)
    engine.map[[20, 11, 25, 3, 7]] = [4, 8, 1, 6, 2]
    cache = engine.cache
    one, other = cache.admit(blocks=[20, 11, 25]), cache.admit(blocks=[3, 7])
    first, second = own.admit(), own.admit()
    for where, requests in ((cache, (one, other)), (own, (first, second))):
        stories.tell(where, {requests[0]: TOKENS[:6], requests[1]: TOKENS[10:13]})
    wanted = own.digest([first, second])
    assert cache.digest([one, other]) == wanted
    engine.move(11, 5)
    engine.swap(20, 3)
    assert cache.digest([one, other]) == wanted, "where the map says"
    engine.swap(11, 7)
    for where, requests in ((cache, (one, other)), (own, (first, second))):
        stories.tell(where, {requests[0]: TOKENS[6:11], requests[1]: TOKENS[13:17]})
    assert cache.digest([one, other]) == own.digest([first, second])
    # What leaves and comes back, a fork, a rollback: all by the owner's numbers.
    engine.move(25, 7)
    moved = own.import_request(cache.export_request(one))
    assert own.digest([moved]) == own.digest([first])
    own.release(moved)
    branch = cache.fork(other)
    engine.swap(3, 20)
    assert cache.digest([branch, one]) == own.digest([second, first])
    cache.truncate(other, 6)
    own.truncate(second, 6)
    cache.release(branch)
    engine.map[29] = 3
    cache.give(other, [29])
    engine.swap(29, 11)
    for where, request in ((cache, other), (own, second)):
        stories.tell(where, {request: TOKENS[20:25]})
    assert cache.digest([one, other]) == own.digest([first, second])
    cache.give(one, [28])
    with pytest.raises(OutOfBlocks, match="no place of block 28"):
        stories.tell(cache, {one: TOKENS[:2]})
    engine.map[28] = next(place for place in range(1, PLACES) if place not in engine.map)
    for where, request in ((cache, one), (own, first)):
        stories.tell(where, {request: TOKENS[:2]})
    assert cache.digest([one, other]) == own.digest([first, second])


def test_a_store_reads_and_fills_blocks_where_they_are():
    engine = Engine()
    engine.map[[20, 11, 25, 3]] = [4, 8, 1, 6]
    request = engine.cache.admit(blocks=[20, 11])
    stories.tell(engine.cache, {request: TOKENS[:8]})
    store = BlockStore([HostTier(1 << 20)])
    keys = stores.keys_of(SPEC, TOKENS[:8])
    moved = Blocks(engine.cache, store)
    engine.swap(20, 3)
    moved.save([20, 11], keys)
    assert moved.load([25, 3], keys) == []
    right = [tensor[[6, 8]].copy() for tensor in engine.tensors]
    assert all((tensor[[1, 4]] == rows).all() for tensor, rows in zip(engine.tensors, right, strict=True))


def test_what_a_map_says_is_not_believed():
    engine = Engine()
    engine.map[[20, 11, 3]] = [4, 8, 4]
    cache = engine.cache
    one = cache.admit(blocks=[20, 11])
    stories.tell(cache, {one: TOKENS[:7]})
    before = cache.digest([one])
    with pytest.raises(ShapeError, match="of its own, not that of block 20"):
        cache.admit(blocks=[3])
    with pytest.raises(ShapeError, match=f"numbers below {NUMBERS}"):
        cache.admit(blocks=[NUMBERS])
    with pytest.raises(OutOfBlocks, match="no place of block 9"):
        cache.admit(blocks=[9])
    engine.map[11] = PLACES
    with pytest.raises(ShapeError, match="places 1 to 8"):
        cache.digest([one])
    engine.map[11] = NOWHERE
    with pytest.raises(OutOfBlocks, match="no place of block 11"):
        cache.export_request(one)
    engine.map[11] = 8
    assert cache.digest([one]) == before
    # A block that two have is written by neither, wherever it lies.
    other = cache.admit(blocks=[20, 11], length=7)
    with pytest.raises(RequestError, match="others have too"):
        stories.tell(cache, {other: TOKENS[7:8]})


def test_a_descriptor_says_so():
    engine = Engine()
    assert from_json(to_json(engine.descriptor)) == engine.descriptor
    assert engine.descriptor.blocks == PLACES
    with pytest.raises(SpecError, match="a map of"):
        describe(SPEC, engine.tensors, LAYOUT)
    with pytest.raises(SpecError, match="blocks MAP NAME"):
        describe(SPEC, engine.tensors, {"kv": "pages moved NL_X_NB_BS_NH_TWO_HS"}, maps=[SAID])
