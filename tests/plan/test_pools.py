"""Pools are a mapping that nobody changes by accident, and that copies as one."""

import copy
import pickle

import numpy as np
import pytest

from kvcore.pools import Pools


@pytest.fixture
def pools():
    return Pools({"0.kv.rows": np.zeros((1, 2), np.uint8)})


CHANGES = {
    "an item": lambda pools: pools.__setitem__("0.kv.rows", 1),
    "an item deleted": lambda pools: pools.__delitem__("0.kv.rows"),
    "update": lambda pools: pools.update({}),
    "or in place": lambda pools: pools.__ior__({}),
    "setdefault": lambda pools: pools.setdefault("1.kv.rows", 1),
    "pop": lambda pools: pools.pop("0.kv.rows"),
    "popitem": lambda pools: pools.popitem(),
    "clear": lambda pools: pools.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_exchanged_in_place(pools, change):
    with pytest.raises(TypeError, match=r"pools\.replace"):
        CHANGES[change](pools)
    assert list(pools) == ["0.kv.rows"]


def test_replace_is_a_copy(pools):
    other = np.ones((1, 2), np.uint8)
    replaced = pools.replace({"0.kv.rows": other})
    assert type(replaced) is Pools
    assert replaced["0.kv.rows"] is other
    assert not pools["0.kv.rows"].any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pools: pickle.loads(pickle.dumps(pools))])
def test_copies_have_arrays_of_their_own(pools, copied):
    found = copied(pools)
    assert type(found) is Pools
    found["0.kv.rows"][:] = 1
    assert not pools["0.kv.rows"].any()
