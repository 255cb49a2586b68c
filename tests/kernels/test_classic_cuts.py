"""How a classic step is shared out: whole tokens of one request where steps are alike, enough programs for the GPU."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")


from kvcore.kernels.triton import attend_kv
from kvcore.kernels.triton.attend_kv import Work, work_for
from kvcore.kernels.triton.device import LARGE, DeviceProps


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param((64, 64, 32, 8, 8), Work(groups=8, heads=4, each=1, programs=512), id="decode, four to a group"),
        pytest.param((192, 64, 32, 8, 8), Work(groups=8, heads=4, each=3, programs=512), id="three tokens each"),
        pytest.param((1000, 1, 32, 8, 8), Work(groups=8, heads=4, each=8, programs=1000), id="a prompt"),
        pytest.param((2, 2, 128, 1, 1), Work(groups=1, heads=64, each=1, programs=4), id="MQA, two blocks of heads"),
        pytest.param((8, 2, 32, 1, 1), Work(groups=1, heads=32, each=1, programs=8), id="no room for more tokens"),
        pytest.param((5, 4, 12, 3, 2), Work(groups=6, heads=2, each=2, programs=18), id="heads of K and V differ"),
        pytest.param((3, 0, 4, 4, 4), Work(groups=4, heads=1, each=3, programs=4), id="no requests"),
    ],
)
def test_a_step_is_cut(step, expected):
    assert work_for(*step) == expected


@pytest.mark.parametrize(
    ("programs", "keys", "least", "most"),
    [(8, 32768, 30, 64), (8, 64, 1, 1), (512, 32768, 1, 4), (264, 32768, 1, 1), (300, 32768, 4, 16), (1, 100, 2, 2)],
    ids=["one request", "one tile", "many requests", "a full GPU", "a GPU and a little", "few keys"],
)
def test_keys_are_shared_out_so_that_the_work_ends_soonest(programs, keys, least, most):
    splits = attend_kv.splits_for(DeviceProps(90, 132, LARGE), programs, keys, attend_kv.TileConfig(64, 4, 3, 2))
    assert least <= splits <= most
