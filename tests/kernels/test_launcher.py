"""A kernel's launcher: what it keeps of a compiled kernel, what it asks Triton again, and that all names are known."""

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
import triton
import triton.language as tl

from kvcore.backends.torch_triton import run_triton
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton.launches.launching import Kernel

STREAM = 77


def copy_kernel(out_ptr, in_ptr, count, size, scale, ROWS: tl.constexpr, WIDE: tl.constexpr):
    pass


class Compiler:
    """Stands in for what ``triton.jit`` makes: remembers what was dispatched, and what its compiled form was given."""

    do_not_specialize = ("count",)
    fn = staticmethod(copy_kernel)
    __name__ = "copy_kernel"

    def __init__(self):
        self.pre_run_hooks, self.dispatched, self.launched = [], [], []

    def __getitem__(self, grid):
        def dispatch(*given, **options):
            self.dispatched.append((grid, given, options))
            number = len(self.dispatched)
            return SimpleNamespace(function=number, packed_metadata=number, run=lambda *a: self.launched.append(a))

        return dispatch


@pytest.fixture(autouse=True)
def device(monkeypatch):
    found = SimpleNamespace(number=0)
    active = SimpleNamespace(get_current_device=lambda: found.number, get_current_stream=lambda number: STREAM + number)
    monkeypatch.setattr(run_triton, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(run_triton, "INTERPRETED", False)
    return found


@pytest.fixture
def kernel():
    return Compiler()


@pytest.fixture
def launch(kernel):
    return Launcher(Kernel(kernel, {"WIDE": True, "ROWS": 8}, 2))


def array(dtype=torch.float32, shift=0):
    return torch.zeros(64, dtype=dtype)[shift:]


def test_constants_are_told_by_the_kernels_names():
    for wrong in ({"ROWS": 8}, {"ROWS": 8, "WIDE": True, "OTHER": 1}):
        with pytest.raises(TypeError, match="ROWS"):
            Kernel(Compiler(), wrong, 2)


def test_the_first_call_is_dispatched_and_the_next_is_the_compiled_kernels(kernel, launch):
    out, given = array(), array()
    launch((3,), (out, given), (5, 7, 0.5))
    assert kernel.dispatched == [((3,), (out, given, 5, 7, 0.5, 8, True), {"num_warps": 2, "enable_fp_fusion": False})]
    assert not kernel.launched
    launch((4, 2), (out, given), (6, 7, 0.25))
    assert len(kernel.dispatched) == 1
    addresses = out.data_ptr(), given.data_ptr()
    assert kernel.launched == [(4, 2, 1, STREAM, 1, 1, None, None, None, *addresses, 6, 7, 0.25, 8, True)]


@pytest.mark.parametrize(
    ("arrays", "numbers"),
    [
        ((array(), array(torch.bfloat16)), (5, 7, 0.5)),
        ((array(), array(shift=1)), (5, 7, 0.5)),
        ((array(shift=1), array()), (5, 7, 0.5)),
        ((array(), array()), (5, 1, 0.5)),
        ((array(), array()), (5, 16, 0.5)),
    ],
    ids=["another dtype", "an address off 16 bytes", "another address off them", "a size of 1", "a multiple of 16"],
)
def test_what_triton_specialises_is_compiled_anew_once(kernel, launch, arrays, numbers):
    launch((3,), (array(), array()), (5, 7, 0.5))
    for dispatched in (2, 2):
        launch((3,), arrays, numbers)
        assert len(kernel.dispatched) == dispatched
    # The first kind's kernel is still known.
    launch((3,), (array(), array()), (1, 9, 0.5))
    assert len(kernel.dispatched) == 2
    assert [launched[4] for launched in kernel.launched] == [2, 1]


def test_another_device_has_a_kernel_and_a_stream_of_its_own(kernel, launch, device):
    launch((3,), (array(), array()), (5, 7, 0.5))
    device.number = 1
    for _ in range(2):
        launch((3,), (array(), array()), (5, 7, 0.5))
    assert len(kernel.dispatched) == 2
    assert [launched[3:5] for launched in kernel.launched] == [(STREAM + 1, 2)]


def test_integers_of_64_bits_go_to_triton(kernel, launch):
    for number in (5, 1 << 31, 1 << 31, 5):
        launch((3,), (array(), array()), (number, 7, 0.5))
    assert [given[2] for _, given, _ in kernel.dispatched] == [5, 1 << 31, 1 << 31]


def test_a_profiler_sees_every_launch(kernel, launch, monkeypatch):
    launch((3,), (array(), array()), (5, 7, 0.5))
    told = [print]
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=told), raising=False)
    launch((3,), (array(), array()), (5, 7, 0.5))
    told.clear()
    launch((3,), (array(), array()), (5, 7, 0.5))
    assert (len(kernel.dispatched), len(kernel.launched)) == (2, 1)


def test_triton_has_what_a_launcher_calls():
    """The parts of Triton that a launcher uses, by name: another release that lacks one is seen here first."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    assert list(inspect.signature(JITFunction.run).parameters)[:4] == ["self", "args", "grid", "warmup"]
    source = inspect.getsource(JITFunction.run)
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata" in source
    )
    assert isinstance(CompiledKernel.run, property)


def run_of(**others):
    """What Triton 3.6 makes of a compiled kernel: a launcher with a function in C."""
    sizes = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": True}
    run = SimpleNamespace(launch="the function", **(sizes | others))
    return SimpleNamespace(run=run, function="handle", packed_metadata="metadata")


def test_the_function_behind_a_launcher_is_called_of_the_release_that_is_known(monkeypatch):
    monkeypatch.setattr(run_triton, "RELEASE", "3.6")
    found = run_triton.called(run_of())
    assert found == ("the function", ("handle", False, True, None, None, "metadata", None, None, None))
    for other in ({"global_scratch_size": 64}, {"profile_scratch_size": 8}, {"profile_scratch_size": None}):
        compiled = run_of(**other)
        assert run_triton.called(compiled) == (compiled.run, ("handle", "metadata", None, None, None))
    monkeypatch.setattr(run_triton, "RELEASE", "3.9")
    compiled = run_of()
    assert run_triton.called(compiled) == (compiled.run, ("handle", "metadata", None, None, None))
