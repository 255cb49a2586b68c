"""Blocks of an engine by number, in a store and back."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import SpecError
from kvcore.spec import presets
from kvcore.store import BlockStore, HostTier, keys_of
from kvcore.store.blocks import Blocks
from tests.support.engine import SPEC, Engine

LAYOUT = "NL_X_TWO_NB_NH_BS_HS"
TOKENS = list(range(48))


def blocks_of(store):
    engine = Engine(LAYOUT)
    return engine, Blocks(kvcore.adopt(SPEC, engine.tensors, layout=LAYOUT), store)


def test_blocks_are_filled_up_to_the_first_that_does_not_verify():
    store, keys = BlockStore([HostTier(1 << 20)]), keys_of(SPEC, TOKENS)
    engine, blocks = blocks_of(store)
    engine.write([4, 0, 9], 0, 48)
    blocks.save([4, 0, 9], keys)
    other, into = blocks_of(store)
    assert into.load([1, 2, 3], keys) == []
    for ours, theirs in zip(engine.tensors, other.tensors, strict=True):
        assert np.array_equal(ours[:, [4, 0, 9]], theirs[:, [1, 2, 3]])
    store.put(keys[1], bytes(into.page_bytes - 1))
    before = [tensor.copy() for tensor in other.tensors]
    assert into.load([6, 7, 8], keys) == [7, 8]
    for old, now in zip(before, other.tensors, strict=True):
        assert np.array_equal(np.delete(old, 6, axis=1), np.delete(now, 6, axis=1))
    # What is there is not written again.
    engine.tensors[0][:] = 0
    blocks.save([4], keys[:1])
    assert into.load([5], keys[:1]) == []
    assert np.array_equal(other.tensors[0][:, 5], other.tensors[0][:, 6])
    assert into.load([], []) == []


def test_windows_belong_to_requests():
    cache = kvcore.create_cache(
        presets.deepseek_v4_flash_tiny(draft=False), backend="reference", max_requests=1, max_tokens=64
    )
    with pytest.raises(SpecError, match="components in blocks"):
        Blocks(cache, BlockStore([HostTier(1)]))
