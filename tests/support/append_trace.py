"""The files of kvcore that one append goes through, in order of first call: what a reader opens to follow it.

    python -m tests.support.append_trace                                   the reference, torch and JAX, where installed
    python -m tests.support.append_trace --backend torch_triton --verb append_kv --device cuda

An append in a second step, to a layer like one that this step has appended to: what is worked out once a step or once a
plan does not count. ``docs/architecture.md`` goes the same way.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import kvcore
from kvcore.spec import KV, CacheSpec, LayerSpec, presets

KVCORE = Path(kvcore.__file__).parent
BACKENDS = {"reference": None, "torch_triton": "cpu", "jax_pallas": "cpu"}
"""Name -> the device that every machine has for it."""

CLASSIC = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=16, key_format="int8_row"))] * 2, name="classic")
SPECS = {"append_window": presets.deepseek_v4_flash_tiny, "append_kv": lambda: CLASSIC}


def files_of(call: Callable[[], Any]) -> Counter[str]:
    """Files of kvcore whose functions a call runs, relative to the package -> how many of them it runs, in order."""
    found: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(KVCORE):
            found[str(path.relative_to(KVCORE))] += 1

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def trace(backend: str, verb: str, device: str | None = None) -> Counter[str]:
    """What ``verb`` runs on the second layer that has it, in a step of two requests."""
    spec = SPECS[verb]()
    role = verb.removeprefix("append_")
    first, layer, *_ = (number for number, each in enumerate(spec.all_layers) if getattr(each, role) is not None)
    cache = kvcore.create_cache(spec, backend=backend, device=device, max_requests=2, max_tokens=2048)
    component = getattr(spec.all_layers[layer], role)
    parts = [(part.heads, part.format.dim) if component.headed else (part.format.dim,) for part in component.parts]
    rows = [cache.asarray(np.zeros((2, *shape), ml_dtypes.bfloat16)) for shape in parts]
    requests = cache.admit(), cache.admit()
    found: Counter[str] = Counter()
    for _ in range(2):
        step = cache.step(dict.fromkeys(requests, 1))
        getattr(step.layer(first), verb)(*rows)
        found = files_of(partial(getattr(step.layer(layer), verb), *rows))
        step.abort()
    return found


def installed(backend: str, device: str | None) -> bool:
    """Whether a backend runs here."""
    try:
        kvcore.plugins.choose_backend(backend, device)
    except kvcore.BackendError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the files of every backend and verb that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--verb", choices=SPECS, action="append")
    parser.add_argument("--device", help="of the backends; the CPU unless given")
    given = parser.parse_args(arguments)
    for backend in given.backend or BACKENDS:
        device = given.device or BACKENDS[backend]
        if not installed(backend, device):
            print(f"{backend}: not installed here")
            continue
        for verb in given.verb or SPECS:
            found = trace(backend, verb, device)
            print(f"{backend}, {verb}: {len(found)} files, {found.total()} calls")
            print("".join(f"    {file:44}{count:5}\n" for file, count in found.items()), end="")


if __name__ == "__main__":
    main()
