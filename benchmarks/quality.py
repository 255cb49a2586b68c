"""What a cache format costs a real model: perplexity and greedy agreement of SmolLM2-135M-Instruct, against bytes.

``python -m benchmarks.quality [--out FOLDER]`` takes about two hours of one core; ``--tokens``, ``--prompts``,
``--new`` and ``--formats`` make it shorter. It prints a table and writes it with a picture after every format. With
``--add`` the folder's record keeps its other rows; the baseline, which every row is compared with, is read again.

Weights and arithmetic are fp32, so that only the cache rounds. The text is read in chunks, and a chunk's queries attend
to what the cache gives back, of the chunk itself too: every key and value that counts was stored in the format.
Windows of ``CONTEXT`` tokens are ``STRIDE`` apart, and a token is scored once, in the window where it has most context.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcore import environment
from kvcore.interop.transformers import KVCache
from kvcore.plan import bytes_per_token

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import language_model

from benchmarks.pictures import Dot, scatter
from benchmarks.written import markdown, write

TEXT = Path(__file__).parent / "data" / "genesis_1_25.txt"
CONTEXT, STRIDE, CHUNK = 1024, 768, 128  # tokens
ROWS = 4  # windows that are read side by side
BLOCK = 64  # tokens
BASELINE = "bf16"
FORMATS: dict[str, str | dict[str, str]] = {
    "bf16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "fp8_row": "fp8_row",
    "int8_row": "int8_row",
    "nf4_b64": "nf4_b64",
    "mxfp4": "mxfp4",
    "int4_g32": "int4_g32",
    "int4_ch64 keys, int4_g64 values": {"key": "int4_ch64", "value": "int4_g64"},
    "int4_ch32 keys, int4_g32 values": {"key": "int4_ch32", "value": "int4_g32"},
    "int8_row keys, nf4_b64 values": {"key": "int8_row", "value": "nf4_b64"},
    "fp8_row keys, mxfp4 values": {"key": "fp8_row", "value": "mxfp4"},
}
SAME = ("model", "text", "greedy", "baseline")
"""Fields in which two records must agree for their rows to stand in one table."""
PROMPTS = (
    *language_model.PROMPTS,
    "Name the planets of the solar system in order.",
    "Why is the sky blue?",
    "Write a haiku about autumn leaves.",
    "How do I boil an egg?",
    "Translate 'good morning' into French, Spanish and German.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a lost dog.",
    "Who wrote Romeo and Juliet, and when?",
    "Give me three tips for better sleep.",
    "What happens to water when it freezes?",
    "Summarise the story of Cinderella in two sentences.",
    "What is photosynthesis?",
    "Write a polite e-mail that asks for a day off.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron?",
    "Explain supply and demand to a child.",
)


class Measured(NamedTuple):
    """One format: perplexity, best next tokens on the text [scored], generated ids [prompts, new], and its bytes."""

    perplexity: float
    best: torch.Tensor
    tokens: torch.Tensor
    bytes_per_token: float
    bits: float
    seconds: float


def windows(tokens: int) -> list[tuple[int, int]]:
    """(first token of a window, first token that it scores) until every token but the first is scored once."""
    length = min(CONTEXT, tokens)
    found = [(0, 1)]
    while (end := found[-1][0] + length) < tokens:
        found.append((min(found[-1][0] + STRIDE, tokens - length), end))
    return found


def score(model: Any, text: torch.Tensor, formats: str | dict[str, str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(logits [n, vocabulary], the tokens [n] that they should have named), window by window."""
    length = min(CONTEXT, len(text))
    found = windows(len(text))
    for some in range(0, len(found), ROWS):
        group = found[some : some + ROWS]
        ids = torch.stack([text[first : first + length] for first, _ in group])
        with KVCache(model, batch=len(group), max_length=length, formats=formats, block_tokens=BLOCK) as cache:
            pieces = [model(piece, cache=cache).logits for piece in ids.split(CHUNK, dim=1)]
        for row, (first, scored) in enumerate(group):
            logits = torch.cat([piece[row] for piece in pieces])  # not of all rows: a window's take 200 MB
            yield logits[scored - 1 - first : -1], text[scored : first + length]


def measure(model: Any, text: torch.Tensor, prompts: Any, new: int, formats: str | dict[str, str]) -> Measured:
    """One format on the text and the prompts."""
    start = time.perf_counter()
    loss, best = 0.0, []
    for logits, wanted in score(model, text, formats):
        loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        best.append(logits.argmax(-1))
    rows, length = prompts.input_ids.shape
    cache = KVCache(model, batch=rows, max_length=length + new, formats=formats, block_tokens=BLOCK)
    options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    tokens = model.generate(**prompts, cache=cache, **options)[:, length:]
    size = float(bytes_per_token(cache.kv.spec))
    # What is raw for a while, in rings, costs no bytes a token.
    kept = [component for _, _, component in cache.kv.spec.components() if component.span is None]
    elements = sum(part.heads * (part.format.dim or 0) / one.tokens_per_row for one in kept for part in one.parts)
    return Measured(
        perplexity=float(torch.tensor(loss / (len(text) - 1)).exp()),
        best=torch.cat(best),
        tokens=tokens,
        bytes_per_token=size,
        bits=8 * size / elements,
        seconds=time.perf_counter() - start,
    )


def row(name: str, found: Measured, baseline: Measured) -> dict[str, Any]:
    """One line of the table; agreement is with the baseline's cache."""
    same = found.tokens == baseline.tokens
    return {
        "format": name,
        "bits_per_element": round(found.bits, 3),
        "bytes_per_token": found.bytes_per_token,
        "perplexity": round(found.perplexity, 4),
        "perplexity_against_baseline": round(found.perplexity / baseline.perplexity - 1, 5),
        "best_token_agreement": round((found.best == baseline.best).float().mean().item(), 4),
        "greedy_tokens_same": int(same.sum()),
        "greedy_tokens_before_first_difference": int(same.cumprod(dim=1).sum()),
        "greedy_prompts_same": int(same.all(dim=1).sum()),
        "seconds": round(found.seconds, 1),
    }


def run(names: Sequence[str], tokens: int | None, prompts: int, new: int, say: Any = print) -> Iterator[dict[str, Any]]:
    """The record, growing by one format a time; the baseline comes first."""
    model, tokenizer = language_model.load()
    model = model.float()
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0][:tokens]
    batch = language_model.asked(tokenizer, PROMPTS[:prompts])
    record: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, fp32 arithmetic",
        "text": f"{TEXT.name}: {len(text)} tokens, windows of {CONTEXT}, {STRIDE} apart, chunks of {CHUNK}",
        "greedy": f"{len(batch.input_ids)} prompts × {new} tokens",
        "baseline": BASELINE,
        **environment.of_script(),
        "rows": [],
    }
    baseline: Measured | None = None
    for name in (BASELINE, *(name for name in names if name != BASELINE)):
        with torch.no_grad():
            found = measure(model, text, batch, new, FORMATS[name])
        baseline = found if baseline is None else baseline
        record["rows"].append(row(name, found, baseline))
        say(f"{name}: done in {found.seconds:.0f} s")
        yield record


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old record with the new one's rows, a row of the same format replaced; ``added`` says how those were run.

    Raises:
        ValueError: the records are of another model, text, prompts or baseline, or the baselines' figures differ.
    """
    for field in SAME:
        if old[field] != new[field]:
            raise ValueError(f"{field}: {old[field]!r} in the record, {new[field]!r} now")
    rows = {each["format"]: each for each in old["rows"]}
    fresh = {each["format"]: each for each in new["rows"] if each["format"] != BASELINE}
    before, now = rows[BASELINE]["perplexity"], new["rows"][0]["perplexity"]
    if abs(now / before - 1) > 1e-4:
        raise ValueError(f"perplexity of {BASELINE}: {before} in the record, {now} now")
    how = {key: value for key, value in new.items() if key not in (*SAME, "rows")}
    kept = [each for each in old.get("added", []) if not set(each["formats"]) <= set(fresh)]
    added = [*kept, {"formats": list(fresh), **how}] if fresh else kept
    order = list(FORMATS)
    together = sorted({**rows, **fresh}.values(), key=lambda each: order.index(each["format"]))
    return {**old, "added": added, "rows": together}


def as_table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    total = int(record["greedy"].split()[0]) * int(record["greedy"].split()[3])
    rows = (
        f"{each['format']} | {each['bits_per_element']:.2f} | {each['bytes_per_token']:,.0f} "
        f"| {each['perplexity']:.3f} "
        f"| {each['perplexity_against_baseline']:+.2%} | {each['best_token_agreement']:.2%} "
        f"| {each['greedy_tokens_same'] / total:.1%} | {each['greedy_prompts_same']}"
        for each in record["rows"]
    )
    said = f"{record['model']}; {record['text']}; greedy: {record['greedy']}; against {record['baseline']}."
    columns = "format | bits per element: | bytes per token: | perplexity: | change: | same best token: "
    return markdown(said, f"{columns}| same greedy tokens: | same prompts:", rows)


def as_svg(record: dict[str, Any]) -> str:
    """Perplexity against bits of an element; lower left is better."""
    rows = record["rows"]
    largest = max(max(each["bits_per_element"] for each in rows), 1.0)
    low, high = min(each["perplexity"] for each in rows), max(each["perplexity"] for each in rows)
    high = max(high, low + 1e-6)
    return scatter(
        f"Perplexity against bits per key and value element, {record['model']}",
        "bits per element, scales included",
        [Dot(each["bits_per_element"], each["perplexity"], each["format"]) for each in rows],
        marks=((4, 8, 16, 32), (low, (low + high) / 2, high)),
        ends=((0, largest), (low, high)),
        written=lambda at: f"{at:.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, help="of the text; all of it unless given")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--new", type=int, default=128, help="tokens generated a prompt")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--out", type=Path, help="folder for quality_smollm2.json, .md and .svg")
    parser.add_argument("--add", action="store_true", help="keep the other rows of the folder's record")
    chosen = parser.parse_args(arguments)
    if chosen.add and chosen.out is None:
        parser.error("--add needs --out, the folder of the record")
    kept = json.loads((chosen.out / "quality_smollm2.json").read_text(encoding="utf-8")) if chosen.add else None
    record: dict[str, Any] = {"rows": []}
    for found in run(
        chosen.formats, chosen.tokens, chosen.prompts, chosen.new, say=lambda line: print(line, flush=True)
    ):
        record = found if kept is None else merged(kept, found)
        if chosen.out is not None:
            write(record, chosen.out / "quality_smollm2.json", md=as_table(record), svg=as_svg(record))
    print(as_table(record))


if __name__ == "__main__":
    main()
