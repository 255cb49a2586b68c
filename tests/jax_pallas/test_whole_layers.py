"""A handle's verbs for all of a layer, and tails that wait for their flush, under JAX: arrays are given away there."""

import pytest

from tests.cache import test_rotated_windows as windows
from tests.cache import test_unflushed_tails as tails
from tests.cache import test_whole_layers as layers

BACKEND = "jax_pallas"


def test_append_and_flush_are_one_call():
    tails.test_append_and_flush_are_one_call(BACKEND)


@pytest.mark.parametrize("look", ["rows", "pools"])
def test_whoever_looks_sees_the_rows(look):
    tails.test_whoever_looks_sees_them(BACKEND, look)


@pytest.mark.parametrize("when", ["after it", "settled"])
def test_an_abort_leaves_no_trace(when):
    tails.test_an_abort_leaves_no_trace(BACKEND, when)


def test_all_roles_at_once_are_the_verbs_one_by_one():
    layers.test_all_roles_at_once_are_the_verbs_one_by_one(BACKEND)


def test_score_and_select_in_one_go():
    layers.test_score_and_select_in_one_go(BACKEND, 3)


def test_windows_that_are_rotated_on_the_way_do_not_depend_on_splits():
    found = [
        windows.told(BACKEND, splits, windows.NORMS["normed"], by_hand=False) for splits in ((17, 1), (1, 8, 9), (9, 9))
    ]
    assert found[0][2:] == found[1][2:] == found[2][2:]
