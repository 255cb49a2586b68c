"""Serving beside transformers' own ways, in one process and on the same prompts: ``examples/serve`` on kvcore caches.

``python -m benchmarks.serve [--model smollm2|random-135m|random-1b|tiny] [--device cpu|cuda] [--out FOLDER]``.
Three loads, greedy, every answer of the same length: ``shared``, prompts that begin alike, all there at once; ``own``,
prompts with nothing in common, all there at once; ``arrivals``, those of ``shared`` one after the other, as a Poisson
process. Every way serves every load ``--rounds`` times, in turn; what counts is the median of the seconds.

The ways: the engine, on a CPU with prepared products (``PackedModel``); the same with drafts by prompt look-up;
``generate`` in one batch (of whoever is there when it is free); ``generate`` one by one, of the first eight, whose
answers the others' are held against; transformers' continuous batching, which ``generate_batch`` runs, in pages of 256
tokens, its default, and of 32, as long as the engine's blocks.
Loading, allocation, compilation and the capture of graphs are outside of the time. In bf16 answers may differ by
rounding.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.written import markdown, versions_of, write
from examples.serve import Ask, Engine
from kvcore import environment
from kvcore.interop.transformers import PackedModel

SHARED, OWN, NEW, BLOCK = 192, 40, 32, 32  # tokens
FEW = 8  # requests that are also served one by one
BUDGETS = {"cpu": 512, "cuda": 4096}
"""Tokens of a step, for the engine and for continuous batching."""
RATES = {"cpu": 0.5, "cuda": 100.0}
"""Arrivals a second."""
DRAFTS = 8
SIZES = {
    "random-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "random-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
}  # fmt: skip
LOADS = ("shared", "arrivals", "own")
GENERATE, ALONE = "generate, one batch", "generate, one by one"
PAGES = {256: "generate_batch", BLOCK: f"generate_batch, pages of {BLOCK}"}


class Answer(NamedTuple):
    """One request's tokens, and when each was there."""

    ids: list[int]
    times: list[float]


Serve = Callable[[Sequence[list[int]], Sequence[float]], list[Answer]]
"""(prompts, when each arrives, by ``time.perf_counter``) -> answers, in order."""


def model_of(name: str, device: str) -> Any:
    if name == "smollm2":
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        import language_model

        return language_model.load()[0].float().to(device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(**SIZES[name], max_position_embeddings=4096, dtype=dtype, tie_word_embeddings=True)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def prompts_of(vocabulary: int, count: int, shared: int, own: int, seed: int = 1) -> list[list[int]]:
    """Random ids, of which the first ``shared`` are the same in all."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, vocabulary, (count, shared + own), generator=random)
    ids[:, :shared] = ids[0, :shared]
    return ids.tolist()


@cache
def engine_for(model: Any, count: int, longest: int, budget: int, drafts: int) -> Engine:
    """Made once, and with it the graphs that it captures."""
    captured = [size for size in (8, 16, 32, 64, 128, 256) if size < 2 * count * (1 + drafts)]
    return Engine(
        PackedModel(model, captured=[count + 8, *captured], prepared=model.device.type == "cpu"),
        budget=budget,
        drafts=drafts,
        block_tokens=BLOCK,
        max_requests=count,
        max_tokens=count * -(-longest // BLOCK) * BLOCK,
        max_request_tokens=longest,
    )


@contextmanager
def by_engine(model: Any, count: int, longest: int, budget: int, drafts: int) -> Iterator[Serve]:
    engine = engine_for(model, count, longest, budget, drafts)

    def serve(prompts: Sequence[list[int]], due: Sequence[float]) -> list[Answer]:
        asks = [Ask(prompt, new=NEW) for prompt in prompts]
        coming = list(zip(due, asks, strict=True))
        while coming or engine.busy:
            while coming and coming[0][0] <= time.perf_counter():
                engine.submit(coming.pop(0)[1])
            if engine.busy:
                engine.step()
            elif coming:
                time.sleep(max(0.0, coming[0][0] - time.perf_counter()))
        return [Answer(ask.answer, ask.times) for ask in asks]

    for lane in engine.lanes.values():
        lane.cache.reset_prefix_cache()
    yield serve


class Clock(StoppingCriteria):
    """Stops nothing, and notes when each token of a batch was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def by_generate(model: Any, most: int) -> Iterator[Serve]:
    """Batches of those who are there, ``most`` at a time."""

    def serve(prompts: Sequence[list[int]], due: Sequence[float]) -> list[Answer]:
        answers, done = list[Answer](), 0
        while done < len(prompts):
            time.sleep(max(0.0, due[done] - time.perf_counter()))
            there = sum(moment <= time.perf_counter() for moment in due)
            some = prompts[done : min(there, done + most)]
            clock, ids = Clock(), torch.tensor(some, device=model.device)
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=greedy(),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
            answers += [Answer(row, clock.times) for row in tokens[:, ids.shape[1] :].tolist()]
            done += len(some)
        return answers

    yield serve


def greedy() -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=-1, pad_token_id=0)


@contextmanager
def by_batching(model: Any, count: int, longest: int, page: int) -> Iterator[Serve]:
    """What ``generate_batch`` runs, told as much of what is to come."""
    manager = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=count * -(-longest // page) + 8, max_batch_tokens=BUDGETS[model.device.type]
        ),
        workload_hints=WorkloadHints(max_prompt_length=longest - NEW, max_generated_length=NEW, num_requests=count),
        block=True,
        timeout=5,
    )

    def serve(prompts: Sequence[list[int]], due: Sequence[float]) -> list[Answer]:
        found: dict[str, Any] = {}
        for number, (prompt, moment) in enumerate(zip(prompts, due, strict=True)):
            time.sleep(max(0.0, moment - time.perf_counter()))
            running.add_request(prompt, str(number), max_new_tokens=NEW, record_timestamps=True)
        while len(found) < len(prompts):
            result = running.get_result(timeout=1)
            if result is None and not running.is_running():
                raise RuntimeError("continuous batching has ended")
            if result is not None and result.is_finished():
                found[result.request_id] = result
        results = [found[str(number)] for number in range(len(prompts))]
        return [Answer(result.generated_tokens, result.timestamps) for result in results]

    with manager as running:
        yield serve


def measured(
    open_way: Callable[[], AbstractContextManager[Serve]],
    prompts: Sequence[list[int]],
    apart: Sequence[float],
    warm: Sequence[list[int]] = (),
) -> tuple[dict[str, float], list[list[int]]]:
    """Seconds of one way and one load, and the answers.

    ``apart``: seconds from the start at which each arrives; ``warm``: what is served before the time begins.
    """
    with open_way() as serve, torch.no_grad():
        if warm:
            serve(warm, [time.perf_counter()] * len(warm))
        start, busy = time.perf_counter(), time.process_time()
        due = [start + moment for moment in apart]
        answers = serve(prompts, due)
        cpu = time.process_time() - busy
    waits = [answer.times[0] - moment for answer, moment in zip(answers, due, strict=True)]
    whole = [answer.times[-1] - moment for answer, moment in zip(answers, due, strict=True)]
    gaps = [late - early for answer in answers for early, late in pairwise(answer.times)]
    seconds = max(answer.times[-1] for answer in answers) - start
    found = {"seconds": seconds, "cpu_seconds": cpu}
    for name, values in {"first": waits, "between": gaps, "answer": whole}.items():
        for percent in (50, 99):
            found[f"{name}_p{percent}_ms"] = 1e3 * percentile(values, percent)
    return found, [answer.ids for answer in answers]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of the values that ``percent`` percent of them do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def compared(
    model: Any, count: int, rounds: int, rate: float, budget: int, wanted: Sequence[str] = LOADS
) -> Iterator[dict[str, Any]]:
    """A row for every load and way."""
    vocabulary, longest = model.config.vocab_size, SHARED + OWN + NEW
    together = [0.0] * count
    spread = torch.empty(count).exponential_(rate, generator=torch.Generator().manual_seed(2)).cumsum(0).tolist()
    shared, own = (prompts_of(vocabulary, count, size, SHARED + OWN - size) for size in (SHARED, 0))
    loads = {"shared": (shared, together), "arrivals": (shared, spread), "own": (own, together)}
    # What is compiled or captured at first use is outside of the time.
    warm = prompts_of(vocabulary, count, SHARED, OWN, seed=3) if model.device.type == "cuda" else []
    ways: dict[str, Callable[[], AbstractContextManager[Serve]]] = {
        "engine": partial(by_engine, model, count, longest, budget, 0),
        "engine, drafts": partial(by_engine, model, count, longest, budget, DRAFTS),
        GENERATE: partial(by_generate, model, count),
        ALONE: partial(by_generate, model, 1),
        **{name: partial(by_batching, model, count, longest, page) for page, name in PAGES.items()},
    }
    alone = list[list[int]]()
    for load, (prompts, apart) in ((load, loads[load]) for load in LOADS if load in wanted):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        answers: dict[str, list[list[int]]] = {}
        for number in range(rounds):
            for name, open_way in ways.items():
                # One by one there is nothing to arrive for, and once is enough to compare with.
                if name == ALONE and (number or load == "arrivals"):
                    continue
                some = FEW if name == ALONE else count
                before = [] if number or load != wanted[0] else warm[:some]
                one, answers[name] = measured(open_way, prompts[:some], apart[:some], before)
                found[name].append(one)
        # The prompts of ``arrivals`` are those of ``shared``, before it.
        alone = answers.get(ALONE, alone)
        for name, several in found.items():
            if several:
                yield row_of(load, name, several, answers[name], alone)


def row_of(
    load: str, way: str, several: list[dict[str, float]], answers: list[list[int]], alone: list[list[int]]
) -> dict[str, Any]:
    medians = {key: statistics.median(one[key] for one in several) for key in several[0]}
    tokens = sum(map(len, answers))
    return {
        "load": load,
        "way": way,
        "tokens_per_second": round(tokens / medians.pop("seconds"), 2),
        "tokens_per_cpu_second": round(tokens / medians.pop("cpu_seconds"), 2),
        **{key: round(value, 2) for key, value in medians.items()},
        "same_as_alone": f"{sum(one == two for one, two in zip(answers, alone, strict=False))} of {len(alone)}",
    }


def ratios(rows: Sequence[dict[str, Any]], measure: str) -> dict[str, dict[str, float]]:
    """How many times as fast the engine is as each of the others, by load."""
    speed = {(row["load"], row["way"]): row[measure] for row in rows}
    return {
        f"{load}: {way}": {
            other: round(speed[load, way] / of, 2) for (at, other), of in speed.items() if at == load and other != way
        }
        for load, way in speed
        if way.startswith("engine")
    }


def in_fp32(name: str, device: str) -> str:
    """How many answers are those of one by one, by the model in fp32, where rounding decides little."""
    model = model_of(name, device).float()
    prompts, at_once = prompts_of(model.config.vocab_size, FEW, SHARED, OWN), [0.0] * FEW
    way = partial(by_engine, model, FEW, SHARED + OWN + NEW, BUDGETS[device], DRAFTS)
    _, served = measured(way, prompts, at_once)
    _, alone = measured(partial(by_generate, model, 1), prompts, at_once)
    return f"{sum(one == two for one, two in zip(served, alone, strict=True))} of {FEW}"


def as_table(record: dict[str, Any]) -> str:
    lines = []
    for row in record["rows"]:
        times = " | ".join(
            f"{row[f'{name}_p50_ms']:,.0f} / {row[f'{name}_p99_ms']:,.0f} ms" for name in ("first", "between", "answer")
        )
        lines.append(
            f"{row['load']} | {row['way']} | {row['tokens_per_second']:,.1f} | {row['tokens_per_cpu_second']:,.1f} "
            f"| {times} | {row['same_as_alone']}"
        )
    said = f"{record['model']}, {record['concurrent']} requests of {SHARED} + {OWN} tokens, {NEW} new each; "
    said += f"{record['device']}, {record['threads']} threads; {versions_of(record)}."
    columns = "load | way | tokens / s: | tokens / CPU s: | first token, p50 / p99: | between tokens, p50 / p99: "
    return markdown(said, f"{columns}| answer, p50 / p99: | as one by one:", lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("smollm2", *SIZES), default="smollm2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--concurrent", type=int, default=8, help="requests of a load")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS, help="arrivals goes with shared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, help="arrivals a second")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--json", action="store_true", help="print the record instead of the table")
    parser.add_argument("--out", type=Path, help="folder for serve_DEVICE.json and .md")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = model_of(chosen.model, chosen.device)
    rate = chosen.rate or RATES[chosen.device]
    record: dict[str, Any] = {
        "model": f"{chosen.model}, {str(model.dtype).removeprefix('torch.')}",
        **environment.of_script(torch.cuda.get_device_name() if chosen.device == "cuda" else ""),
        "threads": chosen.threads,
        "concurrent": chosen.concurrent,
        "rounds": chosen.rounds,
        "arrivals_per_second": rate,
    }
    record["rows"] = rows = list[dict[str, Any]]()

    def keep() -> None:
        """What there is so far, into the files."""
        for measure in ("tokens_per_second", "tokens_per_cpu_second"):
            record[f"times_the_{measure}"] = ratios(rows, measure)
        path = None if chosen.out is None else chosen.out / f"serve_{chosen.device}.json"
        write(record, path, md=as_table(record))

    for row in compared(model, chosen.concurrent, chosen.rounds, rate, BUDGETS[chosen.device], chosen.loads):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        keep()
    if model.dtype != torch.float32:
        del model
        engine_for.cache_clear()
        record["same_as_alone_in_fp32"] = in_fp32(chosen.model, chosen.device)
    keep()
    print(json.dumps(record, indent=1, ensure_ascii=False) if chosen.json else as_table(record))


if __name__ == "__main__":
    main()
