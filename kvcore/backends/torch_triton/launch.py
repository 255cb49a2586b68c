"""Every launch as a function of torch tensors, and as a custom operator under the same name.

A launch takes the pools' buffers it writes as one list, ``buffers``, and says so to torch; the record number tells
which of them holds codes, scales and plain channels. Grids depend on shapes alone. Called directly a launch costs one
kernel call; while ``torch.compile`` traces, callers go through ``torch.ops.kvcore``, where the same functions are
registered.
"""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvcore.backends.torch_triton import run_triton
from kvcore.backends.torch_triton.run_triton import is_native as is_native
from kvcore.backends.torch_triton.run_triton import props_of as props_of
from kvcore.kernels.triton.device import INTERPRETED as INTERPRETED
from kvcore.kernels.triton.launches import LAUNCHES
from kvcore.kernels.triton.launches.launching import BOUND as BOUND
from kvcore.kernels.triton.launches.launching import GROUPS as GROUPS
from kvcore.kernels.triton.launches.launching import TAILS as TAILS
from kvcore.kernels.triton.launches.launching import Array, Launch
from kvcore.kernels.triton.launches.launching import Bound as Bound
from kvcore.kernels.triton.launches.launching import bind as bind

TENSORS = {
    Array: Tensor, Array | None: Tensor | None, list[Array]: list[Tensor],
    tuple[Array, Array]: tuple[Tensor, Tensor], tuple[Array, Array, Array]: tuple[Tensor, Tensor, Tensor],
}  # fmt: skip
"""Types of a launch's parameters, and of what it gives, as torch's schemas know them."""


def operator(launch: Launch) -> Any:
    """A launch of tensors; registers it as ``torch.ops.kvcore.<name>``, too."""
    function = partial(launch.function, run_triton)

    def run(*given: Any) -> Any:
        return function(*given)

    def fake(*given: Any) -> Any:
        return launch.fresh(run_triton, *given)  # type: ignore[arg-type]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=TENSORS.get(of, of)) for name, of in launch.parameters.items()],
        return_annotation=TENSORS.get(launch.returns, launch.returns),
    )
    made = torch.library.custom_op(f"kvcore::{launch.name}", run, mutates_args=launch.writes)
    made.register_fake(fake)
    return function


EAGER = SimpleNamespace(**{name: operator(launch) for name, launch in LAUNCHES.items()})


def calls() -> Any:
    """The launches: directly in eager mode, as registered operators while ``torch.compile`` traces."""
    return torch.ops.kvcore if torch.compiler.is_compiling() else EAGER
