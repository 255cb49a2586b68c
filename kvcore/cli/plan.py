"""``kvcore plan``: what a cache takes, and what it holds, before any of it exists."""

import argparse
import json
from collections.abc import Iterator
from fractions import Fraction

from kvcore.cli.plan_figures import describe
from kvcore.cli.sizes import parse_bytes, parse_count, show_bytes, show_fraction
from kvcore.cli.tables import print_table, say
from kvcore.plan import plan_cache
from kvcore.spec import LAYOUTS
from kvcore.spec.named import load_spec

TOKENS_UNLESS_GIVEN = 131072

EXAMPLES = """\
examples:
  kvcore plan deepseek_v4_flash --max-requests 64 --budget 40GiB     how many tokens fit
  kvcore plan deepseek_v4_flash --max-tokens 1Mi                     how many bytes they take
  kvcore plan my_spec.json --layout tpu_tile --json
  kvcore plan config.json --budget 40GiB                             of a model as it is published
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="what a cache takes and holds",
        description="Plan a cache to the byte: by role, by kind of layer, with all padding; tokens to bytes and back.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", metavar="SPEC", help="a preset, a JSON file of a spec, or a model's config.json")
    parser.add_argument("--max-requests", metavar="N", default="1", help="requests at once (default: %(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--max-tokens", metavar="T", help=f"tokens over all requests, such as 128Ki (default: {TOKENS_UNLESS_GIVEN:,})"
    )
    size.add_argument("--budget", metavar="BYTES", help="bytes for everything, such as 40GiB")
    parser.add_argument("--max-request-tokens", metavar="T", help="most tokens of one request, such as 32Ki")
    parser.add_argument("--max-draft-tokens", metavar="D", type=int, default=0, help="tokens a rollback may undo")
    parser.add_argument("--layout", choices=LAYOUTS, default="packed", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan and print."""
    spec = load_spec(options.spec, "SPEC")
    budget = None if options.budget is None else parse_bytes(options.budget, "--budget")
    tokens = None if options.max_tokens is None else parse_count(options.max_tokens, "--max-tokens")
    if budget is None and tokens is None:
        tokens = TOKENS_UNLESS_GIVEN
    longest = None
    if options.max_request_tokens is not None:
        longest = parse_count(options.max_request_tokens, "--max-request-tokens")
    plan = plan_cache(
        spec,
        max_requests=parse_count(options.max_requests, "--max-requests"),
        max_tokens=tokens,
        budget_bytes=budget,
        max_draft_tokens=options.max_draft_tokens,
        layout=options.layout,
        max_request_tokens=longest,
    )
    described = describe(plan, budget=budget)
    if options.json:
        say(json.dumps(described, indent=1))
    else:
        _print(described)
    return 0


def _print(plan: dict) -> None:
    name = plan["spec"] or "unnamed spec"
    say(f"{name}: {plan['layers']} layers + {plan['draft_layers']} draft, digest {plan['digest'][:16]}")
    longest = (
        "" if plan["max_request_tokens"] is None else f", requests of {plan['max_request_tokens']:,} tokens or less"
    )
    print(f"layout {plan['layout']}, rollback of {plan['max_draft_tokens']} draft tokens{longest}\n")
    print_table(
        "Pools",
        ["role", "format", "unit", "rows", "row B", "unit B", "padding B", "layers", "units", "total"],
        [
            [
                pool["role"] + (f".{pool['part']}" if pool["part"] else ""),
                pool["format"],
                pool["unit"],
                f"{pool['rows']:,}",
                f"{pool['row_bytes']:,}",
                f"{pool['unit_bytes']:,}",
                f"{pool['padding_bytes']:,}",
                pool["layers"],
                f"{pool['units']:,}",
                show_bytes(pool["nbytes"]),
            ]
            for pool in plan["pools"]
        ],
        left=3,
    )
    print_table(
        "Layers",
        ["kind", "layers", "numbers", "slot B", "block B"],
        [
            [
                kind["kind"],
                len(kind["layers"]),
                _ranges(kind["layers"]),
                f"{kind['slot_bytes']:,}",
                f"{kind['block_bytes']:,}",
            ]
            for kind in plan["layer_kinds"]
        ],
    )
    for line in _capacity(plan):
        print(line)


def _capacity(plan: dict) -> Iterator[str]:
    yield f"{plan['slots']:,} slots × {plan['slot_bytes']:,} B (grows with requests)"
    if plan["blocks"]:
        size = f"{plan['block_bytes']:,} B, {plan['block_tokens']} tokens each"
        yield f"{plan['blocks']:,} blocks × {size} (grows with history)"
    logical, padded = (
        show_fraction(Fraction(plan["bytes_per_token"][kind]["exact"])) for kind in ("logical", "padded")
    )
    yield f"a further token of history: {logical} B logical, {padded} B with padding"
    if plan["undo_bytes"]:
        yield f"undo: {plan['undo_bytes']:,} B beside the pools, for the rows that a decode step takes the place of"
    total = f"{plan['total_bytes']:,} B ({show_bytes(plan['total_bytes'])})"
    tokens = "requests of any length" if plan["max_tokens"] is None else f"{plan['max_tokens']:,} tokens"
    if plan["budget_bytes"] is None:
        yield f"tokens to bytes: {tokens} take {total}"
    else:
        budget, left = show_bytes(plan["budget_bytes"]), f"{plan['unused_bytes']:,} B"
        yield f"bytes to tokens: {budget} hold {tokens}, taking {total}; {left} are left"
    if plan["point_bytes"]:
        yield _points(plan)
    if plan["tokens_per_further_gib"]:
        yield f"each further GiB holds {plan['tokens_per_further_gib']:,} tokens"


def _points(plan: dict) -> str:
    """What it costs to let prompts begin elsewhere than at nothing."""
    point = plan["point_bytes"]
    line = f"a checkpoint for prefix reuse: {point:,} B on the host"
    if not plan["blocks"]:
        return line
    each = show_bytes(-(-point * 1000 // plan["block_tokens"]))
    return f"{line}; one at every block, as prefix='full' keeps them, takes {each} for 1,000 tokens"


def _ranges(numbers: list[int]) -> str:
    """Layer numbers with runs of equal step shortened: ``0, 1, 2-42 step 2``."""
    parts: list[str] = []
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        run = 1
        while run < len(numbers) and numbers[run] - numbers[run - 1] == step:
            run += 1
        if run < 3:
            parts.append(str(numbers[0]))
            numbers = numbers[1:]
            continue
        parts.append(f"{numbers[0]}-{numbers[run - 1]}" + ("" if step == 1 else f" step {step}"))
        numbers = numbers[run:]
    return ", ".join(parts)
