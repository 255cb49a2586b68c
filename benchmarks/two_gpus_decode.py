"""Context-parallel decode in two processes with a GPU each, beside one: parts of ``benchmarks/two_gpus.py``.

Every part takes its ``Rank`` and answers a piece of the record; both ranks run the same part at the same time.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import kvcore
from kvcore.interop import torch_distributed
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, presets
from kvcore.spec.presets import V4_FORMATS, v4_layer

FORMS: dict[str, dict[str, Any]] = {
    # NCCL, a GPU each.
    "full": {
        "lengths": (262_144, 1_048_576),
        "batches": (4, 32, 64),
        "move": 1_048_576,
        "repeats": 15,
        "link": 1 << 30,
    },
    # gloo, both on one GPU: that everything but NCCL runs there.
    "one": {"lengths": (65_536,), "batches": (4,), "move": 65_536, "repeats": 5, "link": 1 << 26},
    # gloo on the CPU.
    "tiny": {"lengths": (2048,), "batches": (2,), "move": 1024, "repeats": 2, "link": 1 << 20},
}
STEP_TOKENS = 131_072
"""New tokens of one step of a prefill, over all requests: 256 MiB of rows a layer in fp32."""

BUDGET = 60 << 30


class Rank:
    """One of the two processes: ``form`` is a key of ``FORMS``."""

    def __init__(self, rank: int, form: str) -> None:
        self.rank = rank
        self.form = form
        self.sizes = FORMS[form]
        self.device = {"tiny": "cpu", "one": "cuda:0", "full": f"cuda:{rank}"}[form]
        self.on_gpu = form != "tiny"
        # Where tensors have to be that torch.distributed moves.
        self.wire = self.device if form == "full" else "cpu"

    def say(self, text: str) -> None:
        """Where this process is, for whoever watches."""
        print(f"  rank {self.rank}, {time.strftime('%H:%M:%S')}: {text}", flush=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, together: bool = True) -> float:
        """Wall time of a call, the device's work included; begun by both processes at once."""
        self.synchronize()
        if together:
            dist.barrier()
            self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def random(self, seed: int, *shape: int) -> torch.Tensor:
        """Normal values, the same in both processes."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device)


def two_layers() -> CacheSpec:
    """A CSA layer and an HCA layer of V4-Flash."""
    layers = [v4_layer(4, overlap=True, formats=V4_FORMATS), v4_layer(128, overlap=False, formats=V4_FORMATS)]
    return CacheSpec(layers=layers, block_tokens=256, name="V4-Flash, CSA and HCA")


def fill(me: Rank, cache: kvcore.Cache, requests: list[kvcore.Request], length: int) -> None:
    """Bring requests to ``length`` tokens with random rows; entries are stored as a prefill that compresses would."""
    chunk, number = min(length, max(1024, STEP_TOKENS // len(requests))), 0
    for start in range(0, length, chunk):
        new = min(chunk, length - start)
        with cache.step(dict.fromkeys(requests, new)) as step:
            for layer, spec in enumerate(cache.spec.layers):
                number += 1
                handle = step.layer(layer)
                handle.append_window(me.random(number, new * len(requests), spec.window.dim))
                if spec.entries is not None:
                    closed = new // spec.entries.ratio * len(requests)
                    keys = me.random(number + 10**6, closed, spec.index_keys.dim) if spec.index_keys else None
                    handle.store_entries(me.random(number + 2 * 10**6, closed, spec.entries.dim), keys)


def append_one(me: Rank, step: Any, count: int) -> None:
    """What a decode step writes before it reads."""
    for layer, spec in enumerate(step.cache.spec.layers):
        handle = step.layer(layer)
        handle.append_window(me.random(10 + layer, count, 512))
        handle.append_tail(*(me.random(20 + layer + part, count, spec.tail.width) for part in (0, 50)))
        if spec.index_tail is not None:
            handle.append_index_tail(*(me.random(30 + part, count, spec.index_tail.width) for part in (0, 50)))
        handle.flush()


def decode(
    me: Rank, cache: kvcore.Cache, requests: list[kvcore.Request], *, together: bool, graph: bool
) -> dict[str, Any]:
    """Median µs of the readers of one decode step, eager or from a CUDA graph, and what they answered."""
    count = len(requests)
    q, iq = me.random(1, count, 64, 512).bfloat16(), me.random(2, count, 64, 128).bfloat16()
    weights, sink = me.random(3, count, 64), me.random(4, 64)
    with cache.step(dict.fromkeys(requests, 1)) as step:
        append_one(me, step, count)
        columns = max(row.length for row in step._state.context.rows) // 4
        found: dict[str, Any] = {}
        calls: dict[str, Callable[[], Any]] = {
            "scores and selection": lambda: cache.ops.index_select(
                cache.pools, 0, step._device_index, iq, weights, 512, columns=columns
            ),
            "CSA attention": lambda: step.layer(0).attend(q, found["scores and selection"], sink=sink),
            "HCA attention": lambda: step.layer(1).attend(q, sink=sink),
        }

        def both_layers() -> None:
            for name, call in calls.items():
                found[name] = call()

        def part(name: str) -> Callable[[], None]:
            return lambda: found.__setitem__(name, calls[name]())

        for _ in range(3):
            both_layers()
        timed: dict[str, Callable[[], None]] = {**{name: part(name) for name in calls}, "both layers": both_layers}
        # gloo can't be captured.
        if graph and (me.form == "full" or (me.on_gpu and not together)):
            timed = {name: captured(call).replay for name, call in timed.items()}
        times: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(me.sizes["repeats"]):
            for name, call in timed.items():
                times[name].append(me.seconds(call, together=together) * 1e6)
        median = {name: round(statistics.median(values), 1) for name, values in times.items()}
        answers = [found["CSA attention"].out.cpu(), found["HCA attention"].out.cpu()]
        picks = found["scores and selection"].cpu()
        step.abort()
    return {"us": median, "answers": answers, "picks": picks}


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, the exchanges between GPUs within it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Another thread looks after NCCL's own work, and may ask the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def compare_decode(me: Rank, mesh: Any, length: int, count: int, *, graph: bool) -> dict[str, Any]:
    """One context length and batch: one GPU, then both."""
    spec = two_layers()
    sizes = {"max_requests": count, "max_tokens": count * (length + 512), "device": me.device}
    record: dict[str, Any] = {"tokens": length, "requests": count}
    one = None
    if me.rank == 0:
        cache = kvcore.create_cache(spec, backend="torch_triton", **sizes)
        requests = [cache.admit() for _ in range(count)]
        fill(me, cache, requests, length)
        me.say("one GPU is filled")
        one = decode(me, cache, requests, together=False, graph=graph)
        record["one GPU"] = {**one["us"], "pool_bytes": cache.nbytes}
        record["digest"] = f"{cache.digest(requests[:1]):016x}"
        me.say(f"one GPU: {record['one GPU']}")
        del cache, requests
        if me.on_gpu:
            torch.cuda.empty_cache()
    dist.barrier()
    cache = torch_distributed.create_cache(spec, mesh=mesh, **sizes)
    requests = [cache.admit() for _ in range(count)]
    fill(me, cache, requests, length)
    me.say("both are filled")
    both = decode(me, cache, requests, together=True, graph=graph)
    digest = f"{cache.digest(requests[:1]):016x}"
    record["two GPUs"] = {**both["us"], "pool_bytes": cache.nbytes}
    if one is not None:
        same = (one["picks"] == both["picks"]).all(dim=1)
        record["digests_equal"] = digest == record["digest"]
        record["selections_equal"] = f"{int(same.sum())} of {len(same)}"
        pairs = zip(one["answers"], both["answers"], strict=True)
        differences = [float((a.float() - b.float())[same].abs().max()) if bool(same.any()) else None for a, b in pairs]
        record["largest_difference"] = dict(zip(("CSA", "HCA"), differences, strict=True))
        record["speed_up"] = {name: round(record["one GPU"][name] / us, 2) for name, us in both["us"].items()}
    return record


def capacity() -> dict[str, Any]:
    """Tokens of full V4-Flash within 60 GiB a GPU: figures of the plan."""
    spec = presets.deepseek_v4_flash()
    plans = [plan_cache(spec, max_requests=8, budget_bytes=BUDGET, context=context) for context in (1, 2)]
    tokens = [plan.max_tokens for plan in plans]
    return {"budget_bytes_a_gpu": BUDGET, "tokens": tokens, "ratio": round(tokens[1] / tokens[0], 3)}
