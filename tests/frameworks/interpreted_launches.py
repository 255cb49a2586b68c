"""Checks of the kit on the JAX backend with its Triton launches interpreted; in a process of its own, see the test.

What ``run_triton.launch`` asks of jax-triton is done here by Triton's interpreter: arrays go out of the jitted program
to torch tensors and come back. Everything else is as on CUDA: what verbs give to which kernel, cut how, written where.
"""

import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import jax
import numpy as np
import torch

from kvcore.backends.jax_pallas import choice, run_triton
from kvcore.backends.jax_pallas.run_triton import As
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.kernels.triton.device import INTERPRETER
from kvcore.parity.run import Subject, check_backends
from kvcore.plugins import registry

# XLA's threads take subnormal numbers for zero, and so would a thread that one of them starts.
THREAD = ThreadPoolExecutor(1)
THREAD.submit(int).result()
LAUNCHED: set[str] = set()


def launch(kernel, grid, arguments, *, written=(), zeroed=(), **options):
    """``run_triton.launch`` by the interpreter; fresh outputs hold 0xFF where the kernel writes nothing."""
    del options  # of the compiler
    names = list(inspect.signature(kernel.fn).parameters)
    assert set(names) == set(arguments), set(names) ^ set(arguments)
    LAUNCHED.add(kernel.fn.__name__)
    values = {name: value.array if isinstance(value, As) else value for name, value in arguments.items()}
    inputs = {id(value): value for value in values.values() if isinstance(value, jax.Array)}
    fresh: dict[int, tuple[str, Any]] = {}
    for name in names:
        if is_fresh(values[name]):  # in the kernel's order, by the first parameter of each
            fresh.setdefault(id(values[name]), (name, values[name]))

    def run(*given):
        tensors = dict(zip(inputs, map(tensor, given), strict=True))
        outs = {key: tensor(blank(spec, 0 if name in zeroed else 0xFF)) for key, (name, spec) in fresh.items()}
        passed = []
        for name in names:
            value: Any = {**outs, **tensors}.get(id(values[name]), values[name])
            if isinstance(arguments[name], As):
                value = value.view(getattr(torch, arguments[name].element))
            passed.append(float(value) if isinstance(value, np.float32) else value)
        kernel[grid](*passed)
        changed = [array(tensors[id(one)], one) for one in written]
        return changed + [array(outs[key], spec) for key, (_, spec) in fresh.items()]

    specs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in written] + [spec for _, spec in fresh.values()]
    found = jax.pure_callback(lambda *given: THREAD.submit(run, *given).result(), specs, *inputs.values())
    return found[: len(written)], found[len(written) :]


def is_fresh(value):
    return isinstance(value, jax.ShapeDtypeStruct)


def blank(spec, byte):
    return np.full(spec.size * spec.dtype.itemsize, byte, np.uint8).view(spec.dtype).reshape(spec.shape)


def tensor(given):
    given = np.array(given)
    if given.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(given.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(given)


def array(held, like):
    held = held.view(torch.int16) if held.dtype == torch.bfloat16 else held
    return held.numpy().view(like.dtype).reshape(like.shape)


def main(wanted):
    run_triton.launch = launch
    run_triton.capability = lambda: 80
    run_triton.props = lambda _: INTERPRETER
    choice.chosen = lambda _: "triton"
    checks = {check.id: check for check in checks_of(conformance_spec())}
    subject = Subject(registry().backends["jax_pallas"])
    failed = 0
    for name in wanted:
        LAUNCHED.clear()
        if not subject.how:
            subject.introduce(checks[name].plan)
        for record in check_backends(checks[name], [subject]):
            failed += record.status != "agree"
            print(name, record.status, *sorted(LAUNCHED), record.detail or record.first_mismatch or "", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
