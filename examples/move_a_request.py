"""A request moves in mid-generation from one framework to another, and goes on as if nothing had happened.

Run it:  python examples/move_a_request.py                  from torch to the reference
         python examples/move_a_request.py jax_pallas       from torch to JAX, where both are installed
"""

import sys

import numpy as np

import kvcore
from kvcore.spec import presets

target = sys.argv[1] if len(sys.argv) > 1 else "reference"
spec = presets.deepseek_v4_flash_tiny(draft=False)


def rows(position: int, width: int) -> np.ndarray:
    """What a model would project for this position; here a function of it alone."""
    return np.random.default_rng(position * 10_000 + width).standard_normal(width, dtype=np.float32)


def generate(cache: kvcore.Cache, request: kvcore.Request, tokens: int) -> None:
    """Bring new tokens of one request through every layer."""
    with cache.step({request: tokens}) as step:
        positions = [int(position) for position in kvcore.to_numpy(step.positions)]
        for number, layer_spec in enumerate(spec.layers):
            layer = step.layer(number)

            def stack(width: int) -> np.ndarray:
                return np.stack([rows(position, width) for position in positions])

            layer.append_window(stack(layer_spec.window.dim))
            if layer_spec.tail:
                layer.append_tail(stack(layer_spec.tail.width), stack(layer_spec.tail.width))
            if layer_spec.index_tail:
                layer.append_index_tail(stack(layer_spec.index_tail.width), stack(layer_spec.index_tail.width))
            if layer_spec.tail:
                # The rotation is left to the caller here, so that both backends store bit-equal entries.
                entries = layer.compress()
                keys = np.zeros((len(entries), 128), np.float32) if layer_spec.index_keys else None
                layer.store_entries(np.round(kvcore.to_numpy(entries).astype(np.float32), 2), keys)


old = kvcore.create_cache(spec, backend="torch_triton", max_requests=1, max_tokens=128)
request = old.admit()
generate(old, request, 21)

blob = old.export_request(request)
new = kvcore.create_cache(spec, backend=target, max_requests=1, max_tokens=128, layout="planar")
moved = new.import_request(blob)
print(f"moved {moved.length} tokens in {len(blob)} bytes to {target}; digests equal: {old.digest() == new.digest()}")

generate(old, request, 7)
generate(new, moved, 7)
print(f"both went on to {moved.length} tokens; digests equal: {old.digest() == new.digest()}")
