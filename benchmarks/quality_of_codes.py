"""Formats of a cache beside what others publish, in one run: perplexity and its interval, greedy agreement, needles.

``python benchmarks/quality_of_codes.py [--out FOLDER] [--resume]``; ``--windows``, ``--tokens``, ``--needles``,
``--prompts``, ``--new`` and ``--methods`` make it shorter. All methods do a window, a prompt or a needle before the
next one, and what each found is noted: a run that was broken off goes on, and its record is of what all have done.

Every method codes the keys and values of a model's own forward pass: kvcore's formats by the library's encoders,
others' by NumPy as they are published (``codes_of_others``). A query sees what a cache of its length would hold: in
formats over tokens the open group raw, in KIVI the residual. Weights and arithmetic are fp32; keys and values are
bf16 before they are coded.

The interval is 1.96 standard errors of the mean over pieces of ``PIECE`` tokens, paired with bf16's. Bits are those of
codes, scales and offsets; ``bits at a window`` counts what is still raw, on average over the tokens of a window. A
needle is found if every token of its number is the one that the model names, given those before it.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

import kvcore
from kvcore import environment
from kvcore.spec import FORMATS, KV, CacheSpec, LayerSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import language_model

from benchmarks.codes_of_others import Coder, by_range, kvarn, nuq, nvfp4, rotated, turbo
from benchmarks.pictures import OTHERS, OWN, Dot, scatter
from benchmarks.quality import TEXT

WINDOW, PIECE = 1024, 64  # tokens
BASELINE = "bf16"
RESIDUAL = 128  # tokens that KIVI keeps raw
NAME = "kvcore_codes"
NEEDLE = 2048  # tokens, the model's own length
NAMES = ("Adah", "Naamah", "Tubal", "Irad", "Mehujael", "Zillah", "Jabal", "Lamech")


class Side(NamedTuple):
    """How keys, or values, are kept.

    Attributes:
        code: None keeps them in bf16.
        bits: of an element, scales included.
        tokens: that are coded together; the last ones wait raw until as many are there.
        recent: newest tokens that stay raw, whatever is coded.
        all_heads: coded as one row of all heads of a token.
        before_rope: coded before the rotary turn, and turned when read.
    """

    code: Coder | None
    bits: float
    tokens: int = 1
    recent: int = 0
    all_heads: bool = False
    before_rope: bool = False

    @property
    def waits(self) -> bool:
        """Whether any token is raw for a while."""
        return self.tokens > 1 or self.recent > 0

    def raw(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys each query sees raw."""
        return (key >= (query + 1) // self.tokens * self.tokens) & (self.tokens > 1) | (key > query - self.recent)

    def raw_tokens(self, window: int) -> float:
        """Raw tokens that a cache holds, on average over the lengths of a window."""
        lengths = np.arange(1, window + 1)
        return float(np.maximum(np.minimum(lengths, self.recent), lengths % self.tokens).mean())


def of_format(name: str) -> Side:
    """A format of the library, by its encoders."""
    format = FORMATS[name]
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=1, key_dim=64))], block_tokens=64)
    ops = kvcore.create_cache(spec, backend="torch_triton", max_requests=1, max_tokens=64).ops

    def code(rows: np.ndarray) -> np.ndarray:
        tokens, dim = rows.shape
        whole = tokens // format.tokens * format.tokens
        laid = rows[:whole].reshape(-1, format.tokens, dim).transpose(0, 2, 1).reshape(-1, format.tokens * dim)
        if not whole:
            return rows
        read = np.asarray(ops.decode(name, ops.encode(name, laid), laid.shape[1]).float())
        read = read.reshape(-1, dim, format.tokens).transpose(0, 2, 1).reshape(whole, dim)
        return np.concatenate([read, rows[whole:]])

    return Side(None if name == BASELINE else code, 8 * format.for_dim(64).row / 64, format.tokens)


def kivi(bits: int, residual: int) -> tuple[Side, Side]:
    """Keys by channel, values by token, in groups of 32; ``residual`` tokens raw."""
    stored = bits + 1.0
    keys = Side(by_range(bits, 32, over_tokens=True), stored, tokens=residual)
    return keys, Side(by_range(bits, 32), stored, recent=residual)


METHODS: dict[str, Callable[[], tuple[Side, Side]]] = {
    BASELINE: lambda: (of_format("bf16"),) * 2,
    "int8_row": lambda: (of_format("int8_row"),) * 2,
    "fp8_row": lambda: (of_format("fp8_row"),) * 2,
    "nf4_b64": lambda: (of_format("nf4_b64"),) * 2,
    "mxfp4": lambda: (of_format("mxfp4"),) * 2,
    "int4_g32": lambda: (of_format("int4_g32"),) * 2,
    "int4_ch64 keys, int4_g64 values": lambda: (of_format("int4_ch64"), of_format("int4_g64")._replace(tokens=64)),
    "int4_ch32 keys, int4_g32 values": lambda: (of_format("int4_ch32"), of_format("int4_g32")._replace(tokens=32)),
    "the same, values rotated": lambda: (
        of_format("int4_ch32"),
        of_format("int4_g32")._replace(tokens=32, code=rotated(of_format("int4_g32").code or nvfp4)),
    ),
    "KIVI, 4 bits, residual 128": lambda: kivi(4, RESIDUAL),
    "KIVI, 2 bits, residual 128": lambda: kivi(2, RESIDUAL),
    "KVQuant, 4 bits, 1 % aside": lambda: (
        Side(nuq(4, over_tokens=True), 4 + 0.01 * 32, before_rope=True),
        Side(nuq(4, over_tokens=False), 4 + 32 / 192 + 2 * 32 / 192, all_heads=True),
    ),
    "TurboQuant, 4 bits": lambda: (Side(turbo(4), 4.25),) * 2,
    "TurboQuant, 3 bits": lambda: (Side(turbo(3), 3.25),) * 2,
    "KVarN, 4-bit keys, 2-bit values": lambda: (
        Side(kvarn(4), 4 + 16 / 64 + 16 / 128 + 32 / 64, tokens=128),
        Side(kvarn(2), 2 + 16 / 64 + 16 / 128 + 32 / 64, tokens=128),
    ),
    "NF4, 64 a group, rotated": lambda: (Side(rotated(of_format("nf4_b64").code or nvfp4), 4.5),) * 2,
    "NVFP4": lambda: (Side(nvfp4, 4.5),) * 2,
    "NVFP4, rotated": lambda: (Side(rotated(nvfp4), 4.5),) * 2,
}
"""Method -> its keys and values, the library's formats first."""

OWN_METHODS = 8
"""How many of them are the library's own."""


class Coded:
    """Attention of a model of transformers over coded keys and values.

    Attributes:
        sides: of keys and values.
        theta: base of the model's rotary turn.
    """

    sides: tuple[Side, Side]
    theta: float

    def install(self, model: Any) -> None:
        """Make it the model's attention."""
        AttentionInterface.register(NAME, self)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        self.theta = float(model.config.rope_parameters["rope_theta"])

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float = 1.0,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from query [1, H, T, d] to key and value [1, G, n, d]: out [1, T, H, d]."""
        shared, (total, new) = query.shape[1] // key.shape[1], (key.shape[2], query.shape[2])
        at, of = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
        raw = [rows.bfloat16().float() for rows in (key, value)]
        coded = [held(side, rows, self.theta) for side, rows in zip(self.sides, raw, strict=True)]
        raw_keys, raw_values, keys, values = (rows.repeat_interleave(shared, 1) for rows in (*raw, *coded))
        scores = query @ keys.transpose(2, 3)
        if self.sides[0].waits:
            scores = torch.where(self.sides[0].raw(at, of), query @ raw_keys.transpose(2, 3), scores)
        weights = scores.mul_(scaling).masked_fill_(of > at, -torch.inf).softmax(-1)
        if self.sides[1].waits:
            is_raw = self.sides[1].raw(at, of)
            out = (weights * ~is_raw) @ values + (weights * is_raw) @ raw_values
        else:
            out = weights @ values
        return out.transpose(1, 2).contiguous(), None


def held(side: Side, rows: torch.Tensor, theta: float) -> torch.Tensor:
    """Rows [1, G, n, d] of positions from 0 on as they are read back, each head by itself."""
    if side.code is None:
        return rows
    heads = (turned(rows, theta, back=True) if side.before_rope else rows)[0].numpy()
    if side.all_heads:
        count, tokens, dim = heads.shape
        coded = side.code(heads.transpose(1, 0, 2).reshape(tokens, count * dim))
        coded = coded.reshape(tokens, count, dim).transpose(1, 0, 2)
    else:
        coded = np.stack([side.code(head) for head in heads])
    read = torch.from_numpy(np.ascontiguousarray(coded, np.float32))[None]
    return turned(read, theta) if side.before_rope else read


def turned(rows: torch.Tensor, theta: float, *, back: bool = False) -> torch.Tensor:
    """Rows [1, G, n, d] turned by the angles of their positions, halves against halves as Llama does it."""
    count, dim = rows.shape[2:]
    angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin() * (-1 if back else 1)
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Task(NamedTuple):
    """What every method is asked before the next one is: a window of the text, a needle, or a prompt to go on from.

    Attributes:
        kind: ``window``, ``needle`` or ``prompt``.
        number: which.
        ids: [1, n].
        asked: how many of the last ids the model should have named; of a prompt, how many it names.
    """

    kind: str
    number: int
    ids: torch.Tensor
    asked: int


def tasks(tokenizer: Any, windows: int, tokens: int, needles: int, prompts: int, new: int) -> list[Task]:
    """All of them, so ordered that however many are done are spread over the text."""
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    count = min(windows, len(text) // tokens)
    starts = [number * (len(text) - tokens) // max(count - 1, 1) for number in range(count)]
    step = next(step for step in range(max(1, round(count * 0.618)), count + 2) if math.gcd(step, count) == 1)
    order = [starts[at * step % count] for at in range(count)]
    read = [
        Task("window", number, text[None, at : at + tokens], tokens - tokens // 4 - 1)
        for number, at in enumerate(order)
    ]
    hidden = [needle(tokenizer, text, number, needles) for number in range(needles)]
    asked = [
        Task("prompt", number, language_model.asked(tokenizer, [prompt]).input_ids, new)
        for number, prompt in enumerate(language_model.PROMPTS[:prompts])
    ]
    # A prompt after every window, which takes longer; a needle, which takes longer still, after four.
    late = {"window": (1, 0), "prompt": (1, 0.5), "needle": (4, 1.5)}
    return sorted([*read, *asked, *hidden], key=lambda task: task.number * late[task.kind][0] + late[task.kind][1])


def needle(tokenizer: Any, text: torch.Tensor, number: int, count: int) -> Task:
    """A sentence with a number of five digits, hidden in ``NEEDLE`` tokens of the text, and asked for at their end."""
    draw = np.random.default_rng(number)
    digits, name = str(draw.integers(10_000, 100_000)), NAMES[number % len(NAMES)]
    hidden, asked, answer = (
        tokenizer(part, return_tensors="pt", add_special_tokens=False).input_ids[0]
        for part in (
            f" The secret number of {name} is {digits}. Remember it.",
            f" What is the secret number of {name}? The secret number of {name} is",
            f" {digits}",
        )
    )
    around = NEEDLE - len(hidden) - len(asked) - len(answer)
    start = int(draw.integers(0, len(text) - around))
    place = round(around * (number + 0.5) / count)
    hay = text[start : start + around]
    return Task("needle", number, torch.cat([hay[:place], hidden, hay[place:], asked, answer])[None], len(answer))


class Found(NamedTuple):
    """What a method made of a task.

    Attributes:
        losses: of the tokens that it should have named, means over pieces of ``PIECE``; of prompts none.
        best: the tokens that it names.
    """

    losses: list[float]
    best: list[int]


def measure(model: Any, task: Task) -> Found:
    """One task with the attention that is installed."""
    if task.kind == "prompt":
        made = model.generate(
            task.ids,
            attention_mask=torch.ones_like(task.ids),
            min_new_tokens=task.asked,
            max_new_tokens=task.asked,
            do_sample=False,
        )
        return Found([], made[0, task.ids.shape[1] :].tolist())
    logits = model(task.ids, use_cache=False, logits_to_keep=task.asked + 1).logits[0, :-1]
    wanted = task.ids[0, -task.asked :]
    losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    size = min(PIECE, len(losses))
    means = losses[: len(losses) // size * size].reshape(-1, size).mean(dim=1)
    return Found([round(float(loss), 6) for loss in means], logits.argmax(-1).tolist())


class Progress:
    """What was found so far, one line of JSON each in a file that a later run goes on from."""

    def __init__(self, settings: dict[str, Any], path: Path | None = None, *, resume: bool = False) -> None:
        """Raises ``ValueError``: the file is of other settings."""
        self.found: dict[tuple[str, int, str], Found] = {}
        self._path = path
        if path is not None and resume and path.exists():
            text = path.read_text(encoding="utf-8")
            if not text.endswith("\n"):  # a line that was broken off gets no other one behind it
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")
            first, *lines = text.splitlines()
            if json.loads(first) != settings:
                raise ValueError(f"{path} is of {first}, not of {json.dumps(settings)}")
            for line in lines:
                try:
                    kind, number, method, losses, best = json.loads(line)
                except ValueError:
                    continue  # the end of a run that was killed
                self.found[kind, number, method] = Found(losses, best)
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def add(self, task: Task, method: str, found: Found) -> None:
        """Note one."""
        self.found[task.kind, task.number, method] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([task.kind, task.number, method, *found]) + "\n")

    def done(self, kind: str, methods: Sequence[str]) -> list[int]:
        """Numbers of the tasks that all methods have done."""
        numbers = sorted({number for of, number, _ in self.found if of == kind})
        return [number for number in numbers if all((kind, number, method) in self.found for method in methods)]


def row(method: str, methods: Sequence[str], progress: Progress, wanted: dict[int, list[int]]) -> dict[str, Any]:
    """One line of the table; ``wanted``: the answers to needles."""

    def of(kind: str, name: str) -> list[Found]:
        return [progress.found[kind, number, name] for number in progress.done(kind, methods)]

    mine, base = (np.array([found.losses for found in of("window", name)]) for name in (method, BASELINE))
    change = (mine - base).reshape(-1)
    error = 1.96 * change.std(ddof=1) / math.sqrt(len(change)) if len(change) > 1 else math.inf
    sides = METHODS[method]()
    raw = [side.raw_tokens(WINDOW) / WINDOW for side in sides]
    at_window = [part * 16 + (1 - part) * side.bits for part, side in zip(raw, sides, strict=True)]
    named, theirs = (np.array([found.best for found in of("window", name)]) for name in (method, BASELINE))
    greedy = [
        np.array(found.best) == np.array(other.best)
        for found, other in zip(of("prompt", method), of("prompt", BASELINE), strict=True)
    ]
    needles = progress.done("needle", methods)
    return {
        "method": method,
        "bits_per_element": round(sum(side.bits for side in sides) / 2, 3),
        "bits_at_a_window": round(sum(at_window) / 2, 3),
        "perplexity": round(float(np.exp(mine.mean())), 4),
        "change": round(math.expm1(change.mean()), 5),
        "interval": [round(math.expm1(change.mean() + sign * error), 5) for sign in (-1, 1)],
        "losses_of_windows": [round(float(loss), 5) for loss in mine.mean(axis=1)],
        "best_token_agreement": round(float((named == theirs).mean()), 4),
        "greedy_tokens_same": round(float(np.mean(greedy)), 4) if greedy else None,
        "greedy_tokens_before_first_difference": round(float(np.mean(np.cumprod(greedy, axis=1))), 4)
        if greedy
        else None,
        "needles_found": sum(progress.found["needle", one, method].best == wanted[one] for one in needles)
        if needles
        else None,
    }


def as_record(
    progress: Progress, methods: Sequence[str], settings: dict[str, Any], given: Sequence[Task]
) -> dict[str, Any] | None:
    """The record of all tasks that every method has done; None before the first window."""
    windows = progress.done("window", methods)
    if not windows:
        return None
    wanted = {task.number: task.ids[0, -task.asked :].tolist() for task in given if task.kind == "needle"}
    scored = next(task.asked for task in given if task.kind == "window")
    return {
        "model": "SmolLM2-135M-Instruct, fp32 arithmetic",
        "text": f"{TEXT.name}: {len(windows)} windows of {settings['tokens']} tokens, of which the last {scored} count",
        "greedy": f"{len(progress.done('prompt', methods))} prompts × {settings['new']} tokens",
        "needles": f"{len(progress.done('needle', methods))} in {NEEDLE} tokens each",
        "baseline": BASELINE,
        "stopped_early": any(
            (task.kind, task.number, method) not in progress.found for task in given for method in methods
        ),
        **environment.of_script(),
        "rows": [row(method, methods, progress, wanted) for method in methods],
    }


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The record, growing by one task at a time."""
    model, tokenizer = language_model.load()
    model, attention = model.float(), Coded()
    settings = {name: getattr(chosen, name) for name in ("windows", "tokens", "needles", "prompts", "new")}
    given = tasks(tokenizer, *settings.values())
    methods = sorted({BASELINE, *chosen.methods}, key=list(METHODS).index)
    path = None if chosen.out is None else chosen.out / "quality_of_codes.lines"
    progress = Progress(settings, path, resume=chosen.resume)
    for task in given:
        for method in methods:
            if (task.kind, task.number, method) not in progress.found:
                attention.sides = METHODS[method]()
                attention.install(model)
                with torch.no_grad():
                    progress.add(task, method, measure(model, task))
        print(f"{task.kind} {task.number} done", flush=True)
        record = as_record(progress, methods, settings, given)
        if record is not None:
            yield record


def as_table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{record['model']}; {record['text']}; greedy: {record['greedy']}; needles: {record['needles']}; "
        f"against {record['baseline']}.",
        "",
        "| keys and values | bits | with what is raw | perplexity | change | 95 % interval | same best token "
        "| same greedy | needles |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each['method']} | {each['bits_per_element']:.2f} | {each['bits_at_a_window']:.2f} "
        f"| {each['perplexity']:.3f} | {each['change']:+.2%} "
        f"| {each['interval'][0]:+.1%} to {each['interval'][1]:+.1%} "
        f"| {each['best_token_agreement']:.1%} "
        f"| {'–' if each['greedy_tokens_same'] is None else format(each['greedy_tokens_same'], '.0%')} "
        f"| {'–' if each['needles_found'] is None else each['needles_found']} |"
        for each in record["rows"]
    ]
    return "\n".join(lines) + "\n"


def as_svg(record: dict[str, Any], most: float = 0.3) -> str:
    """Change of perplexity against bits of an element, what is raw included; a bar is the interval. Lower left wins."""
    rows = [each for each in record["rows"] if each["method"] != BASELINE]
    bits = [each["bits_at_a_window"] for each in rows]
    low, high = math.floor(min(bits)), math.ceil(max(bits))
    own = list(METHODS)[:OWN_METHODS]
    dots = [
        Dot(
            each["bits_at_a_window"],
            each["change"],
            each["method"] + (f" ({each['change']:+.0%})" if each["change"] > most else ""),
            OWN if each["method"] in own else OTHERS,
            (each["interval"][0], each["interval"][1]),
        )
        for each in rows
    ]
    return scatter(
        "Change of perplexity against bits of a key or value element",
        f"bits, with what is still raw in {WINDOW} tokens",
        dots,
        marks=(range(low, high + 1), (0, most / 3, 2 * most / 3, most)),
        ends=((low, high), (-0.02, most)),
        written=lambda at: f"{at:+.0%}",
    )


def write(record: dict[str, Any], folder: Path) -> None:
    """The record as JSON, table and picture."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (folder / "quality_of_codes.json").write_text(text, encoding="utf-8")
    (folder / "quality_of_codes.md").write_text(as_table(record), encoding="utf-8")
    (folder / "quality_of_codes.svg").write_text(as_svg(record), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=WINDOW, help="of a window")
    parser.add_argument("--needles", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=len(language_model.PROMPTS))
    parser.add_argument("--new", type=int, default=64, help="tokens generated a prompt")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="folder for quality_of_codes.json, .md, .svg and .lines")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's quality_of_codes.lines")
    chosen = parser.parse_args(arguments)
    if chosen.resume and chosen.out is None:
        parser.error("--resume needs --out, the folder of the run")
    for record in run(chosen):
        if chosen.out is not None:
            write(record, chosen.out)


if __name__ == "__main__":
    main()
