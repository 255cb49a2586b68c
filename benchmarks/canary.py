"""What a canary costs a captured decode step: the same steps of two caches in turn, one of which looks after its rows.

43 layers of DeepSeek-V4-Flash, or 32 of a classic model with 8 key heads of 128 channels in bf16; one new token a
request. A step is opened, its graph replayed, and committed; nothing waits for the device until a round is over, as in
a serving loop. ``look`` is the time on the device of what the canary launches a step, ``cost`` what a step takes more.

    python -m benchmarks.canary --scenes flash:64x4096,flash:8x4096,classic:32x4096 --out canary.json

With ``--device cpu`` it runs tiny models without graphs, to see that it runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvcore
from benchmarks.host import AT_ONCE, Clock, Scene
from benchmarks.written import write
from kvcore import environment
from kvcore.spec import presets

ROUNDS, STEPS = 7, 32
"""Rounds of a scene, and steps of one: every 16th stores rows that are sampled."""


class Classic:
    """A cache of keys and values with a history; the interface is that of ``host.Scene``."""

    def __init__(self, device: str, requests: int, history: int, canary: int) -> None:
        tiny = device == "cpu"
        self.device, self.requests = device, requests
        self.spec = presets.classic(layers=2 if tiny else 32, key_heads=8, key_dim=16 if tiny else 128)
        self.cache = kvcore.create_cache(
            self.spec, backend="torch_triton", device=device, max_requests=requests,
            max_tokens=requests * (history + 512), max_request_tokens=history + 512, canary=canary or False,
        )  # fmt: skip
        self.held = [self.cache.admit() for _ in range(requests)]
        for request in self.held:
            for start in range(0, history, AT_ONCE):
                new = min(AT_ONCE, history - start)
                with self.cache.step({request: new}, pad_tokens=new):
                    self.cache.pools = self.cache.pools
        dim = self.spec.layers[0].kv.key_dim
        self._row, self._q = (torch.randn(requests, heads, dim, device=device).to(torch.bfloat16) for heads in (8, 32))

    def inputs(self, _: int) -> Any:
        """Of every layer alike."""
        return self._row, self._q

    def by_verbs(self, _: Clock, index: Any, inputs: Any) -> None:
        """All layers."""
        ops, pools, (row, q) = self.cache.ops, self.cache.pools, inputs
        for number in range(len(self.spec.layers)):
            pools = ops.append_kv(pools, number, index, row, row)
            ops.attend_kv(pools, number, index, q)
        self.cache.pools = pools


def steps_of(scene: Any) -> Callable[[], None]:
    """A step, captured at its first call."""
    inputs, graphs = scene.inputs(scene.requests), []
    padding = {"pad_tokens": scene.requests, "pad_requests": scene.requests}

    def run() -> None:
        step = scene.cache.step(dict.fromkeys(scene.held, 1), **padding)
        if graphs:
            graphs[0].replay()
        else:
            index = step.index
            scene.by_verbs(Clock(), index, inputs)
            if scene.device != "cpu":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    scene.by_verbs(Clock(), index, inputs)
                graphs.append(graph)
        scene.cache.pools = scene.cache.pools
        step.commit()

    return run


def looks_of(cache: kvcore.Cache, device: str) -> list[tuple[Any, Any]]:
    """Pairs of events around all that the canary launches from now on."""
    canary, pairs = cache._state.canary, []
    watch = canary._watch

    def timed(*given: Any) -> Any:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        found = watch(*given)
        pair[1].record()
        pairs.append(pair)
        return found

    if device != "cpu":
        canary._watch = timed
    return pairs


def measured(name: str, device: str, sample: int) -> dict[str, Any]:
    """One scene: medians in microseconds."""
    kind, _, sizes = name.partition(":")
    requests, history = map(int, sizes.split("x"))
    make = {"flash": lambda canary: Scene(device, requests, history, canary=canary)}.get(
        kind, lambda canary: Classic(device, requests, history, canary)
    )
    scenes = {"plain": make(0), "watched": make(sample)}
    runs = {way: steps_of(scene) for way, scene in scenes.items()}
    walls: dict[str, list[float]] = {way: [] for way in scenes}
    hosts: dict[str, list[float]] = {way: [] for way in scenes}
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(ROUNDS):
        for way, run in runs.items():
            scenes[way].cache.faults() if way == "watched" else None
            _wait(device)
            start = time.perf_counter()
            for _ in range(STEPS):
                run()
            hosts[way].append((time.perf_counter() - start) / STEPS * 1e6)
            _wait(device)
            walls[way].append((time.perf_counter() - start) / STEPS * 1e6)
    pairs = looks_of(scenes["watched"].cache, device)
    for _ in range(STEPS):
        runs["watched"]()
    _wait(device)
    looks = [one.elapsed_time(other) * 1e3 for one, other in pairs]
    found = {way: statistics.median(times) for way, times in walls.items()}
    plans = [scene.cache.plan.nbytes for scene in scenes.values()]
    if scenes["watched"].cache.faults():
        raise SystemExit(f"{name}: {scenes['watched'].cache.faults()}")
    return {
        "scene": name,
        "sample": sample,
        "plain_us": round(found["plain"], 1),
        "watched_us": round(found["watched"], 1),
        "cost": round(found["watched"] / found["plain"] - 1, 4),
        "look_us": round(statistics.median(looks), 1) if looks else None,
        "host_us": {way: round(statistics.median(times), 1) for way, times in hosts.items()},
        "words": round(plans[1] / plans[0] - 1, 6),
    }


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print as JSON by line, and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scenes", default="flash:64x4096,flash:8x4096,classic:32x4096,classic:8x1024")
    parser.add_argument("--sample", type=int, default=16)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.scenes.split(","):
        rows.append(measured(name, given.device, given.sample))
        print(json.dumps(rows[-1]), flush=True)
        if given.device != "cpu":
            torch.cuda.empty_cache()
    device = "" if given.device == "cpu" else torch.cuda.get_device_name()
    report = {"figure": "what a canary costs a captured decode step", "environment": environment.of_script(device)}
    write({**report, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
