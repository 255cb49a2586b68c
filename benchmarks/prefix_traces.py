"""Policies of prefix reuse on generated traces: tokens that need not be computed, bytes kept, tokens replayed.

``python -m benchmarks.prefix_traces [--out FOLDER]`` prints a table and writes it with a picture. Nothing is stored:
the prefix cache's own look-ups and evictions run over blocks and lengths, and a checkpoint counts as its bytes.

Traces: *agents* share a long system prompt and tools, and each of many sessions grows turn by turn with tool results;
some sessions branch. *chats* share a short system prompt, have short turns, and come back after long pauses. Bytes are
those of DeepSeek-V4-Flash; a token that is replayed runs through the model again, but writes no block.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kvcore
from benchmarks.written import write
from kvcore import environment
from kvcore.cache.reuse import PrefixCache
from kvcore.plan import plan_cache
from kvcore.portable.rows import HostRows, owned
from kvcore.requests.manager import Manager, TakenOver
from kvcore.requests.prefix import Policy
from kvcore.spec import CacheSpec, presets
from kvcore.spec.sizes import bytes_per_token, row_bytes

POLICIES: dict[str, Policy] = {
    "full": "full",
    "periodic 2,048": kvcore.Periodic(2048),
    "periodic 8,192": kvcore.Periodic(8192),
    "points": kvcore.Periodic(1 << 40),
    "zero": "zero",
}
CHUNK = 2048
"""Tokens that a prefill brings in one step; steps end at multiples of it."""


class Turn(NamedTuple):
    """One request: its prompt, and the tokens that are generated after it."""

    prompt: list[int]
    answer: list[int]


def agents(choice: random.Random, turns: int) -> Iterator[Turn]:
    """Long shared instructions, sessions that grow by tool results, now and then a branch."""
    system = list(range(12_000))
    sessions: list[list[int]] = []
    fresh = 1_000_000
    for _ in range(turns):
        if not sessions or choice.random() < 0.08:
            sessions.append(list(system))
        session = choice.choice(sessions[-24:])
        if choice.random() < 0.1 and len(session) > 16_000:
            # A branch: back to an earlier turn, and on from there.
            session = session[: choice.randrange(12_000, len(session))]
            sessions.append(session)
        grown = choice.randrange(200, 4000)
        session += range(fresh, fresh + grown)
        answer = choice.randrange(50, 600)
        said = list(range(fresh + grown, fresh + grown + answer))
        yield Turn(list(session), said)
        session += said
        fresh += grown + answer


def chats(choice: random.Random, turns: int) -> Iterator[Turn]:
    """A short shared beginning, many sessions, short turns."""
    system = list(range(700))
    sessions: list[list[int]] = []
    fresh = 1_000_000
    for _ in range(turns):
        if not sessions or choice.random() < 0.3:
            sessions.append(list(system))
        session = sessions[-1 - min(int(choice.expovariate(1 / 15)), len(sessions) - 1)]
        grown, answer = choice.randrange(20, 900), choice.randrange(100, 900)
        session += range(fresh, fresh + grown)
        said = list(range(fresh + grown, fresh + grown + answer))
        yield Turn(list(session), said)
        session += said
        fresh += grown + answer


TRACES = {"agents": agents, "chats": chats}


class Weight:
    """A checkpoint that is only weighed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def checkpoint_bytes(spec: CacheSpec, length: int) -> int:
    """Bytes of a request's state at a length: rings, tails, and paged rows beyond the last full block."""
    total = 0
    for _, _, component in owned(spec):
        rows = len(component.live(length))
        if not component.in_checkpoint:
            rows -= length // spec.block_tokens * spec.block_tokens // component.tokens_per_row
        total += rows * row_bytes(component)
    return total


def simulate(spec: CacheSpec, policy: Policy, trace: Iterator[Turn], blocks: int) -> dict[str, Any]:
    """Run a trace, one request at a time, through the blocks and keys of one cache."""
    plan = plan_cache(spec, max_requests=1, max_tokens=blocks * spec.block_tokens)
    manager = Manager(plan)
    prefix = PrefixCache(spec, policy, manager)
    prompt_tokens = reused = replayed = hits = turns = peak = 0
    # The row of this name stands for all rows of a checkpoint.
    key = next((layer, role) for layer, role, _ in owned(spec))
    for turn in trace:
        turns += 1
        request, place = manager.reserve()
        hit = prefix.find(turn.prompt, limit=len(turn.prompt) - 1)
        if hit.length:
            taken = TakenOver(hit.length, 0, turn.prompt[: hit.length], hit.stored, hit.blocks)
            manager.take_over(request, place, taken)
            prefix.extend(place)
            hits += 1
            reused += hit.length
            replayed += max(0, hit.stored - hit.length)
        manager.adopt(request, place)
        prefix.publish(place)
        prompt_tokens += len(turn.prompt)
        tokens = turn.prompt + turn.answer
        first = (place.length // CHUNK + 1) * CHUNK
        ends = [*range(first, len(turn.prompt), CHUNK), len(turn.prompt), len(tokens)]
        for end in ends:
            start, done = place.length, len(place.keys)
            opening = manager.read({request: tokens[start:end]})
            grown = manager.grow(opening)
            place = manager.after(opening)[request]
            keys = prefix.keys_after(place, tokens[start:end])
            manager.learn({request: place}, opening, {request: keys})
            manager.adopt(request, place)
            manager.release_replaced(grown)
            prefix.publish(place, done)
            lengths = set(prefix.boundaries(start, end))
            # Periodic policies keep semantic points beside: the ends of the prompt and of the answer.
            if policy not in ("zero", "full") and end >= len(turn.prompt):
                lengths.add(end)
            for length in sorted(lengths):
                weight: Any = Weight(checkpoint_bytes(spec, length))
                prefix.keep(place, length, {key: HostRows(weight, [])})
        peak = max(peak, prefix.kept_bytes)
        manager.release(request)
    return {
        "turns": turns,
        "hit_rate": hits / turns,
        "prompt_tokens": prompt_tokens,
        "reused": reused / prompt_tokens,
        "replayed_a_turn": replayed / turns,
        "checkpoint_bytes": peak,
        "block_bytes": int(blocks * spec.block_tokens * bytes_per_token(spec)),
        "evicted": manager.blocks.statistics.evicted,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| trace | policy | turns that hit | prompt tokens reused | replayed a turn | checkpoints kept |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['trace']} | {row['policy']} | {row['hit_rate']:.1%} | {row['reused']:.1%} "
        f"| {row['replayed_a_turn']:,.0f} | {row['checkpoint_bytes'] / 2**30:.2f} GiB |"
        for row in rows
    ]
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]]) -> str:
    """Bars as SVG: for each trace and policy the share of prompt tokens reused, and beside it the bytes kept."""
    width, bar, left = 860, 22, 190
    largest = max(row["checkpoint_bytes"] for row in rows) or 1
    parts, y, last = [], 30, ""
    for row in rows:
        if row["trace"] != last:
            y += 16
            parts.append(f'<text x="12" y="{y + 4}" font-weight="bold">{row["trace"]}</text>')
            parts.append(f'<text x="{left}" y="{y + 4}">prompt tokens reused</text>')
            parts.append(f'<text x="{left + 360}" y="{y + 4}">checkpoints kept</text>')
            y += 14
            last = row["trace"]
        kept = row["checkpoint_bytes"]
        parts += [
            f'<text x="12" y="{y + 15}">{row["policy"]}</text>',
            f'<rect x="{left}" y="{y}" width="{240 * row["reused"]:.1f}" height="{bar - 6}" fill="#2f6f9f"/>',
            f'<text x="{left + 246 * row["reused"] + 6:.1f}" y="{y + 13}">{row["reused"]:.1%}</text>',
            f'<rect x="{left + 360}" y="{y}" width="{200 * kept / largest:.1f}" height="{bar - 6}" fill="#b5651d"/>',
            f'<text x="{left + 366 + 200 * kept / largest:.1f}" y="{y + 13}">{kept / 2**30:.2f} GiB</text>',
        ]
        y += bar
    size = f'width="{width}" height="{y + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    title = '<text x="12" y="22" font-size="15">Prefix reuse by policy, DeepSeek-V4-Flash</text>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', title, *parts, "</svg>", ""])


def run(turns: int, blocks: int, seed: int) -> list[dict[str, Any]]:
    """All policies on all traces."""
    spec = presets.deepseek_v4_flash(draft=False)
    return [
        {"trace": trace, "policy": name, **simulate(spec, policy, make(random.Random(seed), turns), blocks)}
        for trace, make in TRACES.items()
        for name, policy in POLICIES.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=8192, help="blocks of 256 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for prefix_traces.json, .md and .svg")
    options = parser.parse_args(arguments)
    rows = run(options.turns, options.blocks, options.seed)
    print(table(rows))
    if options.out:
        sizes = {"turns": options.turns, "blocks": options.blocks, "seed": options.seed}
        record = {**environment.of_script(), **sizes, "rows": rows}
        write(record, options.out / "prefix_traces.json", md=table(rows) + "\n", svg=picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
