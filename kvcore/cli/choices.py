"""``kvcore info --plan``: which code runs each verb of a spec's layers, and why. Verbs are bound; no pool is made."""

import argparse
import json

from kvcore.cli.tables import print_table, say
from kvcore.ops.choices import folded
from kvcore.ops.fused import created
from kvcore.plan import plan_cache
from kvcore.plugins import Needs, choose_backend
from kvcore.spec.named import load_spec


def run(options: argparse.Namespace) -> int:
    """Bind, ask and print.

    Raises:
        SpecError: no such spec.
        BackendError: no such backend, it cannot run here, or KVCORE_STRICT=1 refuses the plan.
    """
    spec = load_spec(options.plan, "--plan")
    backend = choose_backend(options.backend, options.device, Needs.of(spec, options.layout))
    layout = backend.default_layout(options.device) if options.layout == "auto" else options.layout
    # Nothing but the spec and the layout decides: one block is a plan as good as any.
    plan = plan_cache(spec, max_requests=1, max_tokens=spec.block_tokens, layout=layout)
    ops = created(backend, plan, device=options.device)
    choices = ops.explain()
    if options.json:
        found = {
            "backend": backend.name,
            "how": str(getattr(ops, "how", "") or ops.device),
            "layout": layout,
            "choices": [choice._asdict() for choice in choices],
        }
        say(json.dumps(found, indent=1))
        return 0
    say(f"{backend.name}: {getattr(ops, 'how', '') or ops.device}, layout {layout}")
    for layers, own in folded(choices):
        title = "Slots, blocks and pages" if None in layers else f"Layers {_ranges(layers)}"
        rows = [[choice.verb, choice.implementation, choice.reason] for choice in own]
        print_table(title, ["verb", "runs as", "why"], rows, left=3)
    return 0


def _ranges(layers: tuple[int | None, ...]) -> str:
    """Layer numbers, neighbours as first-last."""
    runs: list[list[int]] = []
    for layer in layers:
        if layer is None:
            continue
        if runs and runs[-1][1] + 1 == layer:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
