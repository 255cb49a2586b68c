"""Decode steps of a tiny model that attends from the cache with interpreted kernels, beside the model's own attention.

Prints, for each case, the largest difference of logits and how many layers took the way of those before them; in a
process of its own under TRITON_INTERPRET=1, see ``test_decode_steps``.
"""

import json
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcore.interop.transformers import KVCache, handed, settings

LAYERS, STEPS, HISTORY = 2, 3, 124
"""From 124 tokens on the launches of three steps are of one kind."""

took = 0


def count() -> None:
    """Count the layers that go the short way."""
    attend = handed.Handed._attend_steadily

    def counted(self: Any, *given: Any) -> Any:
        global took
        found = attend(self, *given)
        took += found is not None
        return found

    handed.Handed._attend_steadily = counted


def caches(model: Any, batch: int) -> list[KVCache]:
    """One that attends and one whose rows the model attends to, with the same history, laid out as on a GPU."""
    create = settings.create_cache
    settings.create_cache = lambda *given, **options: create(*given, **options | {"layout": "auto"})
    try:
        both = [KVCache(model, batch=batch, max_length=160, attention=by) for by in ("cache", "model")]
    finally:
        settings.create_cache = create
    for layer in range(LAYERS):
        rows = torch.randn(2, batch, 2, HISTORY, 16).to(model.dtype)
        for cache in both:
            cache.update(*rows, layer)
    return both


def steps(model: Any, padded: bool, looks: bool) -> tuple[float, int]:
    """The largest difference, and layers that went the short way; ``looks``: somebody looks at one layer's keys."""
    global took
    took, worst = 0, 0.0
    cache, other = caches(model, 2)
    # As on a GPU: a step's numbers lie where those of the one before lay.
    cache._keeps = True
    mask = torch.ones(2, HISTORY + 1, dtype=torch.int64)
    mask[1, :7] = 0
    tokens = torch.tensor([[3], [5]])
    for step in range(STEPS):
        options = {"attention_mask": mask} if padded else {}
        hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(look(cache)) if looks and step else None
        one = model(tokens, cache=cache, **options).logits
        two = model(tokens, cache=other, **options).logits
        if hook is not None:
            hook.remove()
        worst = max(worst, (one - two).abs().max().item())
        tokens, mask = two[:, -1:].argmax(-1), torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    assert cache.length == other.length == HISTORY + STEPS
    stored = [pair for layer in range(LAYERS) for pair in ((cache.layers[layer].keys, other.layers[layer].keys),)]
    worst = max([worst, *((one - two).abs().max().item() for one, two in stored)])
    return worst, took


def look(cache: Any) -> Any:
    """A hook that reads what a layer has stored in the forward under way."""

    def hook(*_: Any) -> None:
        assert cache.layers[1].keys is not None

    return hook


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=16, num_hidden_layers=LAYERS, vocab_size=32)).eval()
    count()
    with torch.inference_mode():
        found = {f"{padded} {looks}": steps(model, padded, looks) for padded, looks in CASES}
    print(json.dumps(found))


CASES = ((False, True), (True, False))


if __name__ == "__main__":
    main()
