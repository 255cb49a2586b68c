"""Layer views over a mesh are donated: no pool is copied, and nothing of a pool's size goes from device to device."""

from importlib.util import find_spec

import pytest

from kvcore.interop.jax import absent_mesh
from tests.jax_pallas.processes import finished, start

KINDS = ("full", "sliding", "compressed", "stack")


def test_steps_over_four_devices_update_every_pool_in_place() -> None:
    stack, *lines, spread = finished(start("mesh_in_place", "cpu")).splitlines()
    assert stack == "3 arrays of a stack are those of one device"
    assert lines == [f"{kind}, cpu: in place, 0 moves, 0 exchanges" for kind in KINDS]
    assert int(spread.split(", ")[-1].split()[0]) > 0, "a step that brings whole pools to every device is not seen"


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_steps_compile_for_four_tpus_that_are_not_here() -> None:
    assert finished(start("mesh_in_place", "v6e")) == "full, TPU v6 lite: in place, 0 moves, 0 exchanges\n"


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_a_mesh_has_no_more_devices_than_the_topology() -> None:
    with pytest.raises(ValueError, match="allowed 4 of v6e"):
        absent_mesh("v6e", data=8)
