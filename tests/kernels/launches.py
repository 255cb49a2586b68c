"""Kernels that one decode step of each kind of V4 layer launches through a handle, printed as JSON; in a process of its
own under TRITON_INTERPRET=1, see ``test_launches_of_a_step``.
"""

import json
from collections import Counter
from typing import Any

import torch
from triton.runtime import interpreter

import kvcore
from kvcore.spec import Rope, presets

launched: Counter[str] = Counter()
ROPE = torch.tensor(Rope(dim=64, theta=160000.0).inverse_frequencies)
KINDS = {"window": 0, "CSA": 1, "HCA": 2}


def watch() -> None:
    """Count the kernels that the interpreter runs."""
    run = interpreter.GridExecutor.__call__

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        launched[self.fn.__name__] += 1
        return run(self, *given, **options)

    interpreter.GridExecutor.__call__ = counted


def decode(layer: Any, spec: Any, tokens: int) -> None:
    """All that a layer does with its cache in a step."""
    rows = {"window": torch.randn(tokens, spec.window.dim, dtype=torch.bfloat16)}
    for role in ("tail", "index_tail"):
        if tail := getattr(spec, role):
            rows[role] = torch.randn(tokens, tail.width), torch.randn(tokens, tail.width)
    layer.append(**rows)
    if spec.tail is not None:
        layer.flush(norm_weight=torch.ones(512), index_norm_weight=torch.ones(128), rope=ROPE)
    selected = None
    if keys := spec.index_keys:
        queries = torch.randn(tokens, keys.heads, keys.dim, dtype=torch.bfloat16)
        selected = layer.index_select(queries, torch.randn(tokens, keys.heads))
    layer.attend(torch.randn(tokens, 2, 512, dtype=torch.bfloat16), selected, sink=torch.zeros(2), rope=ROPE)


def main() -> None:
    """A history, then steps of one token: one that completes entries, one that does not."""
    spec = presets.deepseek_v4_flash_tiny(draft=False)
    cache = kvcore.create_cache(
        spec, backend="torch_triton", device="cpu", layout="packed", max_requests=1, max_tokens=64, max_draft_tokens=1
    )
    assert "interpreter" in cache.ops.how
    request = cache.admit()
    with cache.step({request: 15}) as step:
        for number, layer in enumerate(spec.layers):
            decode(step.layer(number), layer, 15)
    watch()
    found: dict[str, dict[str, dict[str, int]]] = {}
    for closes in (True, False):
        with cache.step({request: 1}) as step:
            for kind, number in KINDS.items():
                launched.clear()
                decode(step.layer(number), spec.layers[number], 1)
                found.setdefault(kind, {})["closes" if closes else "closes nothing"] = dict(launched)
            for number in set(range(len(spec.layers))) - set(KINDS.values()):
                decode(step.layer(number), spec.layers[number], 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
