"""Which kernels run under JAX: by device, by what is installed, and by KVCORE_JAX_KERNELS."""

from importlib.machinery import ModuleSpec

import pytest

from kvcore.backends.jax_pallas import JaxBackend, choice
from kvcore.errors import BackendError

BOTH, NEITHER = ("jax_triton", "triton"), ()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def these(*installed: str, wanted: str | None) -> None:
        monkeypatch.setattr(choice, "find_spec", lambda name: ModuleSpec(name, None) if name in installed else None)
        monkeypatch.delenv(choice.VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(choice.VARIABLE, wanted)

    return these


@pytest.mark.parametrize(
    ("installed", "wanted", "device", "runs"),
    [
        pytest.param(BOTH, None, "cuda", "triton", id="kernels where they are installed"),
        pytest.param(BOTH, "auto", "cuda", "triton", id="auto is the same"),
        pytest.param(NEITHER, None, "cuda", "portable", id="neither is installed"),
        pytest.param(("triton",), None, "cuda", "portable", id="Triton alone does not do"),
        pytest.param(("jax_triton",), None, "cuda", "portable", id="nor jax-triton alone"),
        pytest.param(BOTH, "portable", "cuda", "portable", id="forced to be portable"),
        pytest.param(BOTH, "triton", "cuda", "triton", id="forced to be Triton"),
        pytest.param(BOTH, "triton", "cpu", "portable", id="not on a CPU"),
        pytest.param(BOTH, None, "tpu", "portable", id="not on a TPU"),
    ],
)
def test_the_choice(install, installed, wanted, device, runs):
    install(*installed, wanted=wanted)
    assert choice.chosen(device) == runs
    layout = {"triton": "packed", "portable": "planar"}[runs]
    if device != "tpu":
        assert JaxBackend().default_layout(device) == layout


@pytest.mark.parametrize(
    ("installed", "wanted", "says"),
    [
        pytest.param(BOTH, "pallas", "auto, triton, portable", id="an unknown word"),
        pytest.param(("triton",), "triton", "jax_triton is not installed", id="forced and not installed"),
    ],
)
def test_a_choice_that_cannot_be_met(install, installed, wanted, says):
    install(*installed, wanted=wanted)
    with pytest.raises(BackendError, match=says):
        choice.chosen("cuda")


def test_only_triton_loads_launches():
    assert choice.verbs("portable") is None
    assert choice.verbs("tpu") is None
