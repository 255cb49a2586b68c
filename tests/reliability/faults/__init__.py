"""The tables of planted faults: by file, what is replaced, by what, and what goes wrong then."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.reliability.faults import core, hopper, jax_cpu, kernels, moving, torch_cpu, torch_cpu_attention

Rows = Sequence[tuple[str, str, str] | tuple[str, str, str, str]]
"""(old text, new text, what goes wrong), and for a change that nothing can notice the reason."""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        file: relative to the tree.
        old: text that occurs once in it.
        new: what stands there instead.
        why: what goes wrong.
        equivalent: why nothing can notice it; empty for a real fault.
    """

    file: str
    old: str
    new: str
    why: str
    equivalent: str = ""


def _faults(folder: str, table: Mapping[str, Rows]) -> list[Fault]:
    return [Fault(f"{folder}/{name}", *row) for name, rows in table.items() for row in rows]


FAULTS: list[Fault] = [
    *_faults("kvcore", core.TABLE),
    *_faults("kvcore", moving.TABLE),
    *_faults("kvcore/backends/torch_triton", torch_cpu.TABLE),
    *_faults("kvcore/backends/torch_triton", torch_cpu_attention.TABLE),
    *_faults("kvcore/backends/torch_triton", kernels.REPLAY),
    *_faults("kvcore/kernels/triton", kernels.TRITON),
    *_faults("kvcore/kernels/triton/launches", kernels.LAUNCHES),
    *_faults("kvcore/backends/jax_pallas", jax_cpu.TABLE),
    *_faults("kvcore/kernels/pallas", kernels.PALLAS),
]

ON_HOPPER: list[Fault] = _faults("kvcore/kernels/triton", hopper.TABLE)
"""Faults that only a GPU of compute capability 9.0 can notice."""
