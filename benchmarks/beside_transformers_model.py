"""A whole model's decode step and prompt beside the caches of transformers, in one process, on a GPU.

``python -m benchmarks.beside_transformers_model --out FOLDER [--seconds N]``. A random Llama-like model in bf16; every
cache gets the same keys and values, as a prompt would leave them, and the model then runs step after step. Eager steps
of all caches that fit the GPU together alternate, for a host's time changes from second to second. What counts is the
median time of a step that nothing waits for but the next, the host's part of it (until the last launch), bytes that the
cache holds, and the most that were in use beyond the weights. A prompt is timed alone, from an empty cache. Contenders
that a time budget leaves no room for are named as left out. ``--add`` puts the rows into the folder's record, in the
place of those of the same name. ``--device cpu`` runs a tiny model, to see that it runs.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from benchmarks.beside_transformers import bytes_held
from benchmarks.written import markdown, versions_of, write
from kvcore import environment
from kvcore.interop.transformers import KVCache

SCENES = ((1, 2048), (16, 2048), (1, 16384), (16, 16384), (1, 65536), (16, 65536))
"""(rows of the batch, tokens of context)"""

PROMPTS = ((1, 2048), (16, 2048), (1, 16384))
COMPILED = ((1, 2048), (16, 16384))
FORMATS = ("bf16", "fp8_row", "int8_row", "nf4_b64")
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 17,
}
TINY = LARGE | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
ROOM = 256
"""Tokens of a cache beyond its context."""

IN_ROW = 4
"""Steps in a row."""

MOST_HELD = 72 << 30
"""Bytes of keys and values, uncoded, of caches whose steps alternate."""

FILLED_AT_ONCE = 1 << 29
"""Bytes of keys that a context is filled with at a time."""


class Contender(NamedTuple):
    """A cache by name; ``make(batch, length)`` makes it, ``compiled`` says that the model is."""

    name: str
    make: Callable[[int, int], Any]
    compiled: bool = False


class Run:
    """A contender's cache, and seconds of its steps: until the last launch, alone, in a row."""

    def __init__(self, contender: Contender, cache: Any, call: Any, token: torch.Tensor) -> None:
        self.contender, self.cache, self.call, self.token = contender, cache, call, token
        self.host: list[float] = []
        self.alone: list[float] = []
        self.row: list[float] = []
        self.peak_bytes: int | None = None

    def step(self) -> None:
        logits = self.call(self.token, cache=self.cache, use_cache=True).logits
        self.token.copy_(logits[:, -1:].argmax(-1))


class Bench:
    """A model, and what was measured with it so far."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.config = LlamaConfig(**(LARGE if self.cuda else TINY))
        self.until = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        torch.manual_seed(0)
        with self.device:
            torch.set_default_dtype(torch.bfloat16)
            self.model = LlamaForCausalLM(self.config).eval()
            torch.set_default_dtype(torch.float32)
        self.weights = sum(each.nbytes for each in self.model.parameters())
        self.random = torch.Generator(self.device).manual_seed(1)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated() - self.weights if self.cuda else None

    def bytes_of(self, batch: int, context: int) -> int:
        """Of keys and values, uncoded."""
        config = self.config
        return 4 * batch * context * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def fill(self, cache: Any, batch: int, context: int) -> None:
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        step = max(1, min(context, FILLED_AT_ONCE // (batch * heads * dim * 2)))
        for start in range(0, context, step):
            shape = 2, batch, heads, min(step, context - start), dim
            keys, values = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=self.random)
            for layer in range(self.config.num_hidden_layers):
                cache.update(keys, values, layer)

    def tokens(self, batch: int, count: int) -> torch.Tensor:
        return torch.randint(0, self.config.vocab_size, (batch, count), device=self.device, generator=self.random)

    def opened(self, contender: Contender, batch: int, context: int) -> "Run":
        """A cache with its context, after its first steps."""
        self.clear()
        before = self.allocated()
        cache = contender.make(batch, context + ROOM)
        self.fill(cache, batch, context)
        call: Any = self.model
        if contender.compiled:
            torch.compiler.reset()
            mode = "reduce-overhead" if self.cuda else None
            call = torch.compile(self.model.forward, mode=mode, dynamic=False, fullgraph=True)
        run = Run(contender, cache, call, self.tokens(batch, 1))
        for _ in range(3):
            run.step()
        if self.cuda:
            self.clear()
            run.step()
            run.peak_bytes = torch.cuda.max_memory_allocated() - before
        return run

    @torch.inference_mode()
    def decode(self, contenders: Sequence[Contender], batch: int, context: int, steps: int, rounds: int) -> None:
        """Time of a step, alone and ``rounds`` times in a row, of contenders in turn."""
        runs: list[Run] = []
        for contender in contenders:
            run = self.guarded(self.opened, contender, "decode", batch, context)
            runs += [] if run is None else [run]
        gc.collect()
        gc.disable()
        try:
            for _ in range(steps):
                for run in runs:
                    self.sync()
                    start = time.perf_counter()
                    run.step()
                    run.host.append(time.perf_counter() - start)
                    self.sync()
                    run.alone.append(time.perf_counter() - start)
            for _ in range(rounds):
                for run in runs:
                    self.sync()
                    start = time.perf_counter()
                    for _ in range(IN_ROW):
                        run.step()
                    self.sync()
                    run.row.append((time.perf_counter() - start) / IN_ROW)
        finally:
            gc.enable()
        for run in runs:
            self.note(
                run.contender,
                "decode",
                batch,
                context,
                step_ms=1e3 * statistics.median(run.row),
                alone_ms=1e3 * statistics.median(run.alone),
                host_ms=1e3 * statistics.median(run.host),
                nbytes=bytes_held(run.cache),
                peak_bytes=run.peak_bytes,
            )

    @torch.inference_mode()
    def prompt(self, contender: Contender, batch: int, context: int, steps: int) -> None:
        """Time of a prompt in an empty cache."""
        self.clear()
        ids, found = self.tokens(batch, context), []
        for _ in range(min(steps, 3) + 1):
            cache = contender.make(batch, context + 64)
            self.sync()
            start = time.perf_counter()
            self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            self.sync()
            found.append(time.perf_counter() - start)
        step = 1e3 * statistics.median(found[1:])
        self.note(contender, "prompt", batch, context, step_ms=step, nbytes=bytes_held(cache), peak_bytes=self.peak())

    def note(self, contender: Contender, what: str, batch: int, context: int, **found: Any) -> None:
        figures = {name: round(each, 3) if isinstance(each, float) else each for name, each in found.items()}
        self.rows.append({"what": what, "batch": batch, "context": context, "cache": contender.name, **figures})
        print(json.dumps(self.rows[-1]), flush=True)

    def guarded(self, measure: Any, contender: Contender, what: str, *sizes: int) -> Any:
        """What a measurement gives; None, and the reason noted, where there is no time for it, or it fails."""
        if time.monotonic() > self.until - (12 if contender.compiled else 0):
            self.note(contender, what, *sizes[:2], left_out="out of time")
            return None
        try:
            return measure(contender, *sizes)
        except (RuntimeError, ValueError, ImportError) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self.note(contender, what, *sizes[:2], left_out=text[:300])
            return None

    def profile(self, contender: Contender, batch: int, context: int) -> str:
        """Where the host's time of ten steps goes."""
        with torch.inference_mode():
            self.clear()
            cache = contender.make(batch, context + 64)
            self.fill(cache, batch, context)
            token, profile = self.tokens(batch, 1), cProfile.Profile()
            for _ in range(3):
                self.model(token, cache=cache, use_cache=True)
            self.sync()
            profile.enable()
            for _ in range(10):
                self.model(token, cache=cache, use_cache=True)
            profile.disable()
            self.sync()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(45)
        return text.getvalue()


def contenders(bench: Bench, formats: Sequence[str], only: Sequence[str]) -> Iterator[Contender]:
    """All that decode eagerly."""
    config = bench.config
    found = [
        Contender("DynamicCache", lambda *_: DynamicCache(config=config)),
        Contender("StaticCache", lambda *sizes: StaticCache(config=config, max_cache_len=sizes[1])),
    ]
    if find_spec("optimum"):
        found.append(Contender("QuantizedCache, quanto", lambda *_: QuantizedCache("quanto", config)))
    if find_spec("hqq"):
        found.append(Contender("QuantizedCache, HQQ", lambda *_: QuantizedCache("hqq", config)))
    found.append(Contender("QuantizedCache, fp8", lambda *_: QuantizedCache("fp8", config)))
    found += [
        Contender(f"kvcore {form}, {attention}", kvcore_of(bench, form, attention=attention))
        for form in formats
        for attention in ("model", "auto")
    ]
    yield from (each for each in found if is_chosen(each, only))


def is_chosen(contender: Contender, only: Sequence[str]) -> bool:
    """Whether its name has one of these parts; all are chosen where none are named."""
    return not only or any(part in contender.name for part in only)


def kvcore_of(bench: Bench, form: str, **options: Any) -> Callable[[int, int], KVCache]:
    formats = None if form == "bf16" else form
    return lambda batch, length: KVCache(bench.model, batch=batch, max_length=length, formats=formats, **options)


def compiled(bench: Bench) -> Iterator[Contender]:
    config = bench.config
    static = partial(StaticCache, config=config)
    yield Contender("StaticCache, compiled", lambda *sizes: static(max_cache_len=sizes[1]), compiled=True)
    for attention in ("cache", "model"):
        make = kvcore_of(bench, "bf16", static=True, attention=attention)
        yield Contender(f"kvcore bf16, {attention}, compiled", make, compiled=True)


def scenes_of(given: Sequence[str] | None, otherwise: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(rows, tokens) of each scene, as arguments name them."""
    if given is None:
        return list(otherwise)
    return [(int(rows), int(tokens)) for rows, tokens in (scene.split("x") for scene in given)]


def added(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """A record with the rows of another one, each with its commit; what was not measured takes no row's place."""
    rows = [{"commit": record["commit"], **row} for row in record["rows"]]
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        kept = {name_of(row): {"commit": before["commit"], **row} for row in before["rows"]}
        kept |= {name_of(row): row for row in rows if "left_out" not in row or name_of(row) not in kept}
        rows = sorted(kept.values(), key=lambda row: (row["what"], row["batch"] * row["context"]))
    return {**record, "rows": rows}


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about."""
    return row["what"], row["batch"], row["context"], row["cache"]


def as_table(record: dict[str, Any]) -> str:
    lines = []
    for row in record["rows"]:
        start = f"{row['what']} | {row['batch']} × {row['context']:,} | {row['cache']} |"
        if "left_out" in row:
            lines.append(f"{start} left out: {row['left_out']} | | | |")
            continue
        host = f"{row['host_ms']:.1f}" if "host_ms" in row else ""
        commit = (row.get("commit") or record["commit"] or "")[:7]
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        lines.append(f"{start} {row['step_ms']:.2f} | {host} | {row['nbytes'] / 2**30:.2f} | {peak} | {commit}")
    said = f"{record['model']}, bf16; {record['device']}; {versions_of(record)}. Milliseconds of a decode step, or of "
    said += "a whole prompt; the host's part of a step; bytes beyond the weights."
    columns = "| batch × context: | cache | ms: | host ms: | GiB held: | GiB at peak: | commit"
    return markdown(said, columns, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scenes", nargs="*", help="rows x tokens, as in 16x2048")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose names contain one of these")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5, help="of steps in a row")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--prompts", nargs="*", help="likewise; none where nothing follows")
    parser.add_argument("--compiled", nargs="*", help="likewise")
    parser.add_argument("--add", action="store_true", help="to the record that the folder holds")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes, and nothing else")
    parser.add_argument("--out", type=Path, help="folder for beside_transformers_cuda.json and .md")
    chosen = parser.parse_args(arguments)
    bench = Bench(chosen.device, chosen.seconds)
    if bench.cuda:
        # cuDNN makes a plan for every new length, which takes longer than the step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    scenes = scenes_of(chosen.scenes, SCENES)
    if chosen.profile:
        for form, attention in (("bf16", "auto"), ("bf16", "model")):
            contender = Contender(f"kvcore {form}, {attention}", kvcore_of(bench, form, attention=attention))
            print(contender.name, bench.profile(contender, *scenes[0]), flush=True)
        return
    measures: list[Callable[[], Any]] = []
    for batch, context in scenes:
        every = list(contenders(bench, chosen.formats, chosen.only))
        together = max(1, MOST_HELD // bench.bytes_of(batch, context))
        groups = [every[first : first + together] for first in range(0, len(every), together)]
        measures += [partial(bench.decode, some, batch, context, chosen.steps, chosen.rounds) for some in groups]
    for batch, context in scenes_of(chosen.prompts, PROMPTS):
        sizes = "prompt", batch, context, chosen.steps
        some = contenders(bench, chosen.formats, chosen.only)
        measures += [partial(bench.guarded, bench.prompt, contender, *sizes) for contender in some]
    for contender in compiled(bench):
        if is_chosen(contender, chosen.only):
            every = scenes_of(chosen.compiled, COMPILED)
            measures += [partial(bench.decode, [contender], *scene, chosen.steps, chosen.rounds) for scene in every]
    for measure in measures:
        measure()
        if chosen.out is not None:
            keep(bench, chosen)


def keep(bench: Bench, chosen: argparse.Namespace) -> None:
    """Write the record so far."""
    config = bench.config
    record = {
        "model": f"Llama-like, {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} query and {config.num_key_value_heads} key-value heads of {config.head_dim}",
        **environment.of_script(),
        "device": torch.cuda.get_device_name() if bench.cuda else "cpu",
        "weights": bench.weights,
        "steps": chosen.steps,
        "rounds": chosen.rounds,
        "rows": bench.rows,
    }
    path = chosen.out / "beside_transformers_cuda.json"
    if chosen.add:
        record = added(path, record)
    write(record, path, md=as_table(record))


if __name__ == "__main__":
    main()
