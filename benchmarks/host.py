"""What a decode step of DeepSeek-V4-Flash's cache costs the host: per verb, per layer, per step, in microseconds.

43 layers, one new token a request; nothing waits for the device, so what is timed is Python, checks and launches. Ways
to run a step: through a layer's handle (verb by verb, and a layer in one call), through the functional verbs, and as a
captured graph (with a spare row of padding, and with a batch that is exactly full). ``a step alone`` opens and commits
one without rows, ``launches`` times single verbs in a loop, without a step around them.

    python -m benchmarks.host --scenes 1x4096,8x4096,64x4096,256x4096,8x4096@64 --out host.json --picture host.svg

A scene is requests x tokens of history, and with @ how many times the blocks that it needs its pool has; with a ``w``
behind it one request may have all of them, and block tables are as wide. With ``--device cpu`` it runs a tiny model, to
see that it runs; with ``--device stub`` the verbs of a GPU that is not there, whose launches do nothing: Python's part
of the host's time, for a profile. ``--classic`` times decode steps of a classic model of 16 layers on the CPU, through
handles under torch and as one jitted function under JAX, where that is installed.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import kvcore
from benchmarks.written import write
from kvcore import environment
from kvcore.spec import Rope, presets

ROOM = 512
"""Tokens of a request beyond its history."""

AT_ONCE = 1 << 14
"""Tokens of a step that stands in for a history."""


class Launched:
    """Stands in for what Triton compiles: counts what would have been launched."""

    function = packed_metadata = 0

    def __init__(self) -> None:
        self.count = 0

    def run(self, *_: Any) -> None:
        """A launch that does nothing."""
        self.count += 1


LAUNCHED = Launched()


def bind_to_nothing() -> None:
    """Verbs of the CPU are those of an H200, with launches that do nothing."""
    from triton.runtime.jit import KernelInterface

    from kvcore.backends import torch_triton
    from kvcore.backends.torch_triton import run_triton, triton_ops
    from kvcore.kernels.triton.device import DeviceProps

    props = DeviceProps(90, 132, 227 << 10)
    stream = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    KernelInterface.__getitem__ = launching_nothing
    run_triton.driver = SimpleNamespace(active=stream)
    run_triton.props_of = lambda _: props
    run_triton.is_native = lambda _: True
    torch_triton.ops_for = lambda *_: partial(triton_ops.TritonOps, props=props)


def launching_nothing(*_: Any) -> Any:
    """What a kernel with its grid is then: whatever it is given, it is compiled for that."""
    return lambda *_, **__: LAUNCHED


class Clock:
    """Host time of calls by name, in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, call: Any, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = call(*args, **options)
        self.times[name].append((time.perf_counter() - start) * 1e6)
        return found

    def report(self, steps: int) -> dict[str, Any]:
        """By name: median of a call, calls of a step, sum of a step."""
        return {
            name: {
                "us": round(statistics.median(times), 1),
                "calls": len(times) // steps,
                "us_of_a_step": round(sum(times) / steps),
            }
            for name, times in self.times.items()
        }


def unwatched(_: str, call: Any, *args: Any, **options: Any) -> Any:
    """A clock that does not look."""
    return call(*args, **options)


class Scene:
    """A cache with a history, and what a model's projections would give for one token of every request."""

    def __init__(
        self, device: str, requests: int, history: int, pool: int = 1, canary: int = 0, *, wide: bool = False
    ) -> None:
        tiny, stub = device == "cpu", device == "stub"
        device = "cpu" if stub else device
        make = presets.deepseek_v4_flash_tiny if tiny else presets.deepseek_v4_flash
        self.device, self.requests = device, requests
        self.spec = make(draft=False)
        self.cache = kvcore.create_cache(
            self.spec,
            backend="torch_triton",
            device=device,
            max_requests=requests,
            max_tokens=requests * (history + ROOM) * pool,
            max_request_tokens=None if wide else history + ROOM,
            canary=canary or False,
        )
        self.held = [self.cache.admit() for _ in range(requests)]
        for request in self.held:
            for start in range(0, history, AT_ONCE):
                new = min(AT_ONCE, history - start)
                with self.cache.step({request: new}, pad_tokens=new) as step:
                    self._store_keys(step.index, start, new)
        heads = 4 if tiny else 64
        self.given = [self._given(layer, heads, requests + 1) for layer in self.spec.layers]
        indexed = next(layer for layer in self.spec.layers if layer.index_keys)
        self.weights = self._made(indexed.entries.dim), self._made(indexed.index_keys.dim)
        rope = Rope(dim=64, theta=160000.0).inverse_frequencies
        self.rope = torch.tensor(rope, dtype=torch.float32, device=device)

    def _store_keys(self, index: Any, start: int, new: int) -> None:
        """Random index keys for what ``new`` tokens close, so that no two scores are equal; the rest stays zeros."""
        pools = self.cache.pools
        for number, layer in enumerate(self.spec.layers):
            keys = layer.index_keys
            if keys:
                closed = (start + new) // keys.ratio - start // keys.ratio
                made = self._made(closed, keys.dim, dtype=torch.bfloat16)
                pools = self.cache.ops.store_entries(pools, number, index, None, made)
        self.cache.pools = pools

    def _made(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def _given(self, layer: Any, heads: int, tokens: int) -> dict[str, Any]:
        bf16 = torch.bfloat16
        found: dict[str, Any] = {
            "row": self._made(tokens, layer.window.dim, dtype=bf16),
            "q": self._made(tokens, heads, layer.window.dim, dtype=bf16),
            "sink": self._made(heads),
            "tail": (),
            "index_tail": (),
        }
        if layer.tail:
            found["tail"] = tuple(self._made(tokens, layer.tail.width) for _ in range(2))
        if layer.index_tail:
            found["index_tail"] = tuple(self._made(tokens, layer.index_tail.width) for _ in range(2))
            found["index_q"] = self._made(tokens, layer.index_keys.heads, layer.index_keys.dim, dtype=bf16)
            found["index_weights"] = self._made(tokens, layer.index_keys.heads)
        return found

    def inputs(self, tokens: int) -> list[dict[str, Any]]:
        """What every layer is given for that many tokens."""

        def first(value: Any) -> Any:
            return tuple(first(each) for each in value) if isinstance(value, tuple) else value[:tokens]

        return [
            {name: value if name == "sink" else first(value) for name, value in given.items()} for given in self.given
        ]

    def step(self, clock: Any, **padding: int) -> Any:
        """A step of one token for every request."""
        return clock("cache.step", self.cache.step, dict.fromkeys(self.held, 1), **padding)

    def by_handles(self, clock: Any, step: Any, inputs: list[dict[str, Any]]) -> None:
        """Every layer's verbs, through its handle."""
        for number, (layer, given) in enumerate(zip(self.spec.layers, inputs, strict=True)):
            handle = clock("step.layer", step.layer, number)
            clock("append_window", handle.append_window, given["row"])
            if given["tail"]:
                clock("append_tail", handle.append_tail, *given["tail"])
            if given["index_tail"]:
                clock("append_index_tail", handle.append_index_tail, *given["index_tail"])
            if given["tail"]:
                index_weight = self.weights[1] if given["index_tail"] else None
                options = {"rope": self.rope, "norm_weight": self.weights[0], "index_norm_weight": index_weight}
                clock("flush", handle.flush, **options)
            selected = None
            if layer.index_keys:
                scores = clock("index_scores", handle.index_scores, given["index_q"], given["index_weights"])
                selected = clock("select", handle.select, scores, layer.index_keys.topk)
            clock("attend", handle.attend, given["q"], selected, sink=given["sink"], rope=self.rope)

    def by_layers(self, clock: Any, step: Any, inputs: list[dict[str, Any]]) -> None:
        """Every layer's step in one call."""
        for number, (layer, given) in enumerate(zip(self.spec.layers, inputs, strict=True)):
            handle = clock("step.layer", step.layer, number)
            clock(
                "decode",
                handle.decode,
                given["q"],
                given["row"],
                tail=given["tail"] or None,
                index_tail=given["index_tail"] or None,
                index=(given["index_q"], given["index_weights"]) if layer.index_keys else None,
                rope=self.rope,
                rotate=True,
                norm_weight=self.weights[0] if given["tail"] else None,
                index_norm_weight=self.weights[1] if given["index_tail"] else None,
                sink=given["sink"],
            )

    def by_verbs(self, clock: Any, index: Any, inputs: list[dict[str, Any]]) -> None:
        """Every layer's verbs, the functional ones that fuse what they can."""
        ops, pools = self.cache.ops, self.cache.pools
        for number, (layer, given) in enumerate(zip(self.spec.layers, inputs, strict=True)):
            at = pools, number, index
            clock("append_rotated_window", ops.append_rotated_window, *at, given["row"], rope=self.rope)
            if given["tail"]:
                index_weight = self.weights[1] if given["index_tail"] else None
                options = {"norm_weight": self.weights[0], "index_norm_weight": index_weight, "rope": self.rope}
                streams = *given["tail"], *given["index_tail"]
                clock("append_flush", ops.append_flush, *at, *streams, closed=1, newest=1, **options)
            selected = None
            if layer.index_keys:
                asked = given["index_q"], given["index_weights"], layer.index_keys.topk
                selected = clock("index_select", ops.index_select, *at, *asked)
            clock("attend", ops.attend, *at, given["q"], selected, sink=given["sink"], rope=self.rope)
        self.cache.pools = pools

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def timed(scene: Scene, run: Any, steps: int, warm: int = 4) -> dict[str, Any]:
    """Steps run by ``run(clock)``: medians of host time and of time until the device is done, and times by verb.

    The steps whose verbs are timed are others: a look at the clock takes as long as a launch on some machines.
    """
    hosts, walls, clock = [], [], Clock()
    for number in range(warm + steps):
        scene.synchronize()
        start = time.perf_counter()
        run(unwatched)
        end = time.perf_counter()
        scene.synchronize()
        if number >= warm:
            hosts.append((end - start) * 1e6)
            walls.append((time.perf_counter() - start) * 1e6)
    for _ in range(steps):
        run(clock)
        scene.synchronize()
    return {
        "host_us": round(statistics.median(hosts)),
        "least_us": round(min(hosts)),
        "wall_us": round(statistics.median(walls)),
        "host_us_a_layer": round(statistics.median(hosts) / len(scene.spec.layers), 1),
        "verbs": clock.report(steps),
    }


def handles(scene: Scene, steps: int) -> dict[str, Any]:
    """Eager steps through handles."""
    return _by_step(scene, steps, scene.by_handles)


def layers(scene: Scene, steps: int) -> dict[str, Any]:
    """Eager steps through handles, a layer in one call."""
    return _by_step(scene, steps, scene.by_layers)


def _by_step(scene: Scene, steps: int, verbs: Callable[..., None]) -> dict[str, Any]:
    inputs = scene.inputs(scene.requests)

    def run(clock: Any) -> None:
        step = scene.step(clock)
        verbs(clock, step, inputs)
        clock("commit", step.commit)

    return timed(scene, run, steps)


def verbs(scene: Scene, steps: int) -> dict[str, Any]:
    """Eager steps through functional verbs."""
    inputs = scene.inputs(scene.requests)

    def run(clock: Any) -> None:
        step = scene.step(clock)
        index = clock("step.index", lambda: step.index)
        scene.by_verbs(clock, index, inputs)
        clock("commit", step.commit)

    return timed(scene, run, steps)


def captured(scene: Scene, steps: int, spare: int) -> dict[str, Any]:
    """Replays of a captured step, with so many spare rows of padding."""
    tokens = scene.requests + spare
    inputs, graphs = scene.inputs(tokens), []

    def run(clock: Any) -> None:
        step = scene.step(clock, pad_tokens=tokens, pad_requests=tokens)
        index = clock("step.index", lambda: step.index)
        if graphs:
            clock("replay", graphs[0].replay)
            scene.cache.pools = scene.cache.pools
        else:
            scene.by_verbs(unwatched, index, inputs)
            scene.synchronize()
            if scene.device != "cpu":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    scene.by_verbs(unwatched, index, inputs)
                graphs.append(graph)
        clock("commit", step.commit)

    found = timed(scene, run, steps)
    return found if not graphs else found | {"gpu_us": gpu_time(graphs[0])}


def gpu_time(graph: Any, repeats: int = 7) -> int:
    """Median of a graph's time on the GPU, in microseconds, on the index of the step before."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in events) * 1e3)


def launches(scene: Scene, repeats: int) -> dict[str, Any]:
    """Single verbs of the first layer that has them, again and again on one index."""
    inputs, ops, pools = scene.inputs(scene.requests), scene.cache.ops, scene.cache.pools
    found = {}
    with scene.cache.step(dict.fromkeys(scene.held, 1)) as step:
        index = step.index
        number = next(n for n, layer in enumerate(scene.spec.layers) if layer.index_keys)
        layer, given, at = scene.spec.layers[number], inputs[number], (pools, number, index)
        scores = ops.index_scores(*at, given["index_q"], given["index_weights"])
        selected = ops.select(scores, layer.index_keys.topk)
        streams = *given["tail"], *given["index_tail"]
        norms = {"norm_weight": scene.weights[0], "index_norm_weight": scene.weights[1]}
        calls = {
            "append_window": lambda: ops.append_window(*at, given["row"]),
            "append_rotated_window": lambda: ops.append_rotated_window(*at, given["row"], rope=scene.rope),
            "append_tail": lambda: ops.append_tail(*at, *given["tail"]),
            "flush": lambda: ops.flush(*at, *streams, closed=1, rope=scene.rope, **norms),
            "append_flush": lambda: ops.append_flush(*at, *streams, closed=1, newest=1, rope=scene.rope, **norms),
            "index_scores": lambda: ops.index_scores(*at, given["index_q"], given["index_weights"]),
            "select": lambda: ops.select(scores, layer.index_keys.topk),
            "attend": lambda: ops.attend(*at, given["q"], selected, sink=given["sink"], rope=scene.rope),
            "gather_window": lambda: ops.gather_window(*at),
        }
        for name, call in calls.items():
            for _ in range(5):
                call()
            scene.synchronize()
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
            scene.synchronize()
            found[name] = round(statistics.median(times), 1)
        scene.cache.pools = pools
    return found


def alone(scene: Scene, steps: int) -> dict[str, Any]:
    """Steps without rows: opened and committed."""

    def run(clock: Any) -> None:
        step = scene.step(clock)
        scene.cache.pools = scene.cache.pools
        clock("commit", step.commit)

    return timed(scene, run, 5 * steps)


LAYERS, KEY_HEADS, HEAD_DIM = 16, 2, 32
"""Of the classic model: small, so that what is timed is not arithmetic."""


def classic(backend: str, requests: int, history: int, steps: int) -> dict[str, Any]:
    """Decode steps of a classic model on the CPU: medians of opening, all layers' verbs, and commit."""
    spec = presets.classic(layers=LAYERS, key_heads=KEY_HEADS, key_dim=HEAD_DIM, block_tokens=16)
    tokens = requests * (history + 64)
    cache = kvcore.create_cache(spec, backend=backend, device="cpu", max_requests=requests, max_tokens=tokens)
    held = [cache.admit() for _ in range(requests)]
    with cache.step(dict.fromkeys(held, history)):
        cache.pools = cache.pools
    row = cache.asarray(np.ones((requests, KEY_HEADS, HEAD_DIM), np.float32))
    run = jitted(cache) if backend == "jax_pallas" else by_append
    clock = Clock()
    for number in range(3 + steps):
        if number == 3:
            clock = Clock()
        step = clock("cache.step", cache.step, dict.fromkeys(held, 1))
        clock("append_kv of all layers", run, cache, step, row)
        clock("commit", step.commit)
    return {"verbs": clock.report(steps)}


def by_append(cache: Any, step: Any, row: Any) -> None:
    """Through handles."""
    for number in range(len(cache.spec.layers)):
        step.layer(number).append_kv(row, row)


def jitted(cache: Any) -> Any:
    """All layers in one compiled function, whose dispatch is timed: nothing waits for it."""
    import jax  # a torch-only machine times torch alone

    def layers(pools: Any, index: Any, row: Any) -> Any:
        for number in range(len(cache.spec.layers)):
            pools = cache.ops.append_kv(pools, number, index, row, row)
        return pools

    compiled = jax.jit(layers, donate_argnums=0)

    def run(cache: Any, step: Any, row: Any) -> None:
        cache.pools = compiled(cache.pools, step.index, row)

    return run


SHADES = "#4878a8", "#a8b8c8", "#c87848", "#78a848", "#a84878", "#887848"


def as_svg(report: dict[str, Any]) -> str:
    """Bars of host time a step, one for every way and scene, on a logarithmic scale."""
    rows = [row for row in report["rows"] if "host_us" in row]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    left, width, line, top = 330, 900, 16, 50
    height = top + line * len(rows) + 30
    most = math.log10(max(row["host_us"] for row in rows) / 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<text x="8" y="18" font-size="14">Host time of a decode step, {report["environment"]["device"]}</text>',
        '<text x="8" y="36">requests x history @ pool, way, microseconds (logarithmic)</text>',
    ]
    for number, row in enumerate(rows):
        y, long = top + number * line, max(1.0, math.log10(max(row["host_us"], 10) / 10) / most * (width - left - 90))
        label = f"{row['requests']} x {row['history']:,} @ {row.get('pool', 1)}, {row['way']}"
        shade = SHADES[ways.index(row["way"]) % len(SHADES)]
        parts.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{line - 4}" fill="{shade}"/>')
        parts.append(f'<text x="{left + long + 6:.1f}" y="{y + 11}">{row["host_us"]:,}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def scenes_of(text: str) -> list[tuple[int, int, int, bool]]:
    """``8x4096@64w`` and so on: (requests, tokens of history, pools, whether a request may have all of the pool)."""
    found = []
    for each in text.split(","):
        sizes, _, pool = each.partition("@")
        requests, history = map(int, sizes.split("x"))
        found.append((requests, history, int(pool.rstrip("w") or 1), pool.endswith("w")))
    return found


def main() -> None:
    """Measure, print as JSON by line, and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scenes", default="1x4096,8x4096,64x4096,256x4096,8x4096@64,1x1048576")
    parser.add_argument("--ways", default="", help="only these, separated by semicolons")
    parser.add_argument("--classic", action="store_true", help="classic models on the CPU, and nothing else")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=90, help="begin nothing new after so long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    torch.set_grad_enabled(False)  # as models run
    if given.device == "stub":
        bind_to_nothing()
    ways = {
        "a step alone": lambda scene: alone(scene, given.steps),
        "launches": lambda scene: launches(scene, 100 if given.device != "cpu" else 5),
        "handles": lambda scene: handles(scene, given.steps),
        "layers": lambda scene: layers(scene, given.steps),
        "verbs": lambda scene: verbs(scene, given.steps),
        "captured, a spare row": lambda scene: captured(scene, given.steps, 1),
        "captured, exactly full": lambda scene: captured(scene, given.steps, 0),
    }
    report: dict[str, Any] = {
        "environment": environment.of_script("" if given.device in ("cpu", "stub") else torch.cuda.get_device_name()),
        "rows": [],
    }

    def note(row: dict[str, Any]) -> None:
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        write(report, given.out)
        if given.picture and not given.classic:
            given.picture.write_text(as_svg(report), encoding="utf-8")

    wanted = [name for name in given.ways.split(";") if name] or [*ways]
    for requests, history, pool, wide in scenes_of(given.scenes):
        if time.monotonic() > end:
            break
        about: dict[str, Any] = {"requests": requests, "history": history, "pool": pool}
        about |= {"wide": True} if wide else {}
        if given.classic:
            for backend in ("torch_triton", *(["jax_pallas"] if find_spec("jax") else [])):
                note({"way": f"classic, {backend}", **about, **classic(backend, requests, history, 5 * given.steps)})
            continue
        scene = Scene(given.device, requests, history, pool, wide=wide)
        for name in wanted:
            if time.monotonic() < end:
                note({"way": name, **about, **ways[name](scene)})
        del scene
        gc.collect()
        if given.device not in ("cpu", "stub"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
