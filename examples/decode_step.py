"""Prefill and decode through a tiny DeepSeek-V4 cache on torch: every verb a model calls, in the order it calls them.

The projections are random here; in a model they come from the hidden states. Run it:  python examples/decode_step.py
"""

import torch

import kvcore
from kvcore.spec import Rope, presets

torch.manual_seed(0)
spec = presets.deepseek_v4_flash_tiny(draft=False)
rope = Rope(dim=64, theta=160000.0)
cache = kvcore.create_cache(spec, backend="torch_triton", max_requests=2, max_tokens=256)


def run_layer(layer, layer_spec, tokens: int) -> torch.Tensor:
    """One layer's attention over its cache: [tokens, 4, 512]."""
    rows = {"window": torch.randn(tokens, layer_spec.window.dim, dtype=torch.bfloat16)}
    for role in ("tail", "index_tail"):
        if tail := getattr(layer_spec, role):
            rows[role] = torch.randn(tokens, tail.width), torch.randn(tokens, tail.width)
    layer.append(**rows)
    if layer_spec.tail:
        layer.flush(norm_weight=torch.ones(512), index_norm_weight=torch.ones(128), rope=rope)
    selected = None
    if keys := layer_spec.index_keys:
        selected = layer.index_select(torch.randn(tokens, keys.heads, keys.dim), torch.randn(tokens, keys.heads))
    return layer.attend(torch.randn(tokens, 4, 512), selected, sink=torch.zeros(4)).out


first, second = cache.admit(), cache.admit()
for batch in ({first: 37, second: 5}, {first: 1, second: 1}, {first: 1, second: 9}):
    with cache.step(batch) as step:
        tokens = len(step.positions)
        for number, layer_spec in enumerate(spec.layers):
            out = run_layer(step.layer(number), layer_spec, tokens)
    print(f"{sum(batch.values())} new tokens; lengths {first.length} and {second.length}; output {tuple(out.shape)}")

cache.truncate(first, first.length)
print(f"digest {cache.digest():016x}, {cache.free_blocks} of {cache.plan.blocks} blocks free")
