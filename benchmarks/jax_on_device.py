"""The JAX backend on the device that JAX finds: parity with the reference, and verbs timed inside jit beside torch.

    python -m benchmarks.jax_on_device --out records [--seconds 240] [--bench-seconds 240] [--small]

Writes ``parity_jax_DEVICE.json`` (a parity report: the kit's checks, each verb compiled with its pools donated) and
``bench_jax_DEVICE.json``: µs a call of verbs inside one jit with donation, and of the torch backend where it is there.
Files are written as soon as there is something to say, so that a run that is cut off leaves what it had.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

# torch's backend shares the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.written import write
from kvcore import environment, parity
from kvcore.backends.jax_pallas import JaxBackend, JaxOps
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.parity.run import Subject, check_backends, report_of
from kvcore.plan import plan_cache
from kvcore.plugins import registry
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window
from kvcore.step import StepRequest, build_index

DIM, INDEX_DIM, BLOCK_TOKENS, HEADS, TOPK = 512, 128, 256, 64, 512
LAYERS, REPEATS = 8, 20

CSA = LayerSpec(
    window=Window(dim=DIM, window=128),
    tail=Tail(dim=DIM, ratio=4, overlap=True),
    entries=Entries(dim=DIM, ratio=4),
    index_tail=Tail(dim=INDEX_DIM, ratio=4, overlap=True),
    index_keys=IndexKeys(dim=INDEX_DIM, ratio=4, heads=HEADS, topk=TOPK),
)


class Verb(NamedTuple):
    """What is timed: a verb of one layer on any backend, its inputs, and whether it writes the pools."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    writes: bool


def verbs(requests: int, tokens: int, rng: np.random.Generator) -> Iterator[Verb]:
    """One decode step of ``requests`` requests of ``tokens`` tokens; every one closes an entry."""

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal((requests, *shape)).astype(np.float32)

    rope, weight = Rope(dim=64, theta=160000.0), np.ones(DIM, np.float32)
    yield Verb("append_window", lambda o, p, n, i, x: o.append_window(p, n, i, x), (floats(DIM),), True)
    tail = floats(2 * DIM), floats(2 * DIM)
    yield Verb("append_tail", lambda o, p, n, i, *x: o.append_tail(p, n, i, *x), tail, True)

    def flush(o: Any, p: Any, n: int, i: Any, kv: Any, score: Any, norm: Any) -> Any:
        return o.flush(p, n, i, kv, score, closed=requests, norm_weight=norm, rope=rope)

    yield Verb("flush", flush, (*tail, weight), True)

    def append_flush(o: Any, p: Any, n: int, i: Any, *streams: Any) -> Any:
        *four, norm = streams
        return o.append_flush(p, n, i, *four, newest=1, closed=requests, norm_weight=norm, rope=rope)

    streams = *tail, floats(2 * INDEX_DIM), floats(2 * INDEX_DIM), weight
    yield Verb("append_flush", append_flush, streams, True)
    picks = rng.integers(0, tokens // 4, (requests, TOPK)).astype(np.int32)
    yield Verb("gather_entries", lambda o, p, n, i, x: o.gather_entries(p, n, i, x), (picks,), False)
    scored = floats(HEADS, INDEX_DIM), floats(HEADS)
    columns = tokens // 4
    yield Verb("index_scores", lambda o, p, n, i, *x: o.index_scores(p, n, i, *x, columns=columns), scored, False)
    yield Verb("select", lambda o, _p, _n, _i, x: o.select(x, TOPK), (floats(columns),), False)
    attended = floats(HEADS, DIM), picks
    yield Verb("attend", lambda o, p, n, i, *x: o.attend(p, n, i, *x), attended, False)


def index_of(requests: int, tokens: int) -> Any:
    """Every request's last token of a window of four is new."""
    blocks = -(-tokens // BLOCK_TOKENS)
    rows = [StepRequest(n, tokens - 1, 1, tuple(range(n * blocks, (n + 1) * blocks))) for n in range(requests)]
    return build_index(rows, max_blocks=blocks)


def plan_of(requests: int, tokens: int) -> Any:
    """Layers alike, so that calls on one after another don't find their pools in a cache."""
    spec = CacheSpec(layers=(CSA,) * LAYERS, block_tokens=BLOCK_TOKENS)
    return plan_cache(spec, max_requests=requests, max_tokens=requests * tokens)


def time_jax(plan: Any, host: Any, verb: Verb, device: str, *, kernels: str | None = None, loops: int = 1) -> float:
    """Median µs a layer of the verb over all layers in one jit, pools donated; checks that they stay where they are.

    Args:
        kernels: ``portable`` where others would run.
        loops: times that the layers are gone through in the jit, as a decode loop on the device does.
    """
    ops = JaxBackend().create(plan, device=device)
    ops = ops if kernels is None else JaxOps(plan, ops.device, jax.devices(device)[0], kernels)
    pools, index = ops.allocate(), ops.index(host)
    inputs = jax.device_put(verb.inputs)

    def once(pools: Any, index: Any, inputs: Any) -> Any:
        outs = []
        for number in range(LAYERS):
            found = verb.call(ops, pools, number, index, *inputs)
            pools, outs = (found, outs) if verb.writes else (pools, [*outs, found])
        return pools, outs

    def step(pools: Any, index: Any, inputs: Any) -> Any:
        if loops == 1:
            return once(pools, index, inputs)
        shapes = jax.eval_shape(once, pools, index, inputs)[1]

        def again(_: Any, state: Any) -> Any:
            # Tied to what the last round found, so that nothing is taken out of the loop.
            tied_index, tied_inputs, _ = lax.optimization_barrier((index, inputs, state[1]))
            return once(state[0], tied_index, tied_inputs)

        first = pools, jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return lax.fori_loop(0, loops, again, first)

    compiled = jax.jit(step, donate_argnums=0).lower(pools, index, inputs).compile()
    pools, outs = compiled(pools, index, inputs)
    places = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pools)]
    times = []
    for _ in range(REPEATS if loops == 1 else 3):
        started = time.perf_counter()
        pools, outs = compiled(pools, index, inputs)
        jax.block_until_ready((pools, outs))
        times.append(1e6 * (time.perf_counter() - started) / LAYERS / loops)
    assert places == [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pools)], "the pools have moved"
    return float(np.median(times))


def time_torch(plan: Any, host: Any, verb: Verb, device: str, *, graph: bool = False) -> float | None:
    """The same through the torch backend, eagerly or as a CUDA graph; None where torch has no such device."""
    try:
        import torch
    except ImportError:
        return None
    if device == "cuda" and not torch.cuda.is_available():
        return None
    if graph and device != "cuda":
        return None
    ops = registry().load("torch_triton").create(plan, device=device)
    pools, index = ops.allocate(), ops.index(host)
    inputs = [ops.asarray(array) for array in verb.inputs]
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def once() -> None:
        for number in range(LAYERS):
            verb.call(ops, pools, number, index, *inputs)

    once()
    wait()
    run = once
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            once()
        run = captured.replay
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        wait()
        times.append(1e6 * (time.perf_counter() - started) / LAYERS)
    return float(np.median(times[1:]))


MEASURES: dict[str, tuple[Callable[..., float | None], dict[str, Any]]] = {
    "jax_us": (time_jax, {}),
    "jax_loop_us": (time_jax, {"loops": REPEATS}),
    "portable_loop_us": (time_jax, {"loops": REPEATS, "kernels": "portable"}),
    "torch_us": (time_torch, {}),
    "torch_graph_us": (time_torch, {"graph": True}),
}
"""One call of a jit; a loop of steps inside one jit, also by jax.numpy alone; torch eager, and as a CUDA graph."""


def bench(ops: JaxOps, sizes: Sequence[tuple[int, int]], out: Path, seconds: float) -> None:
    """Time every verb at every size and write the record after each; nothing is begun after so many seconds."""
    started = time.perf_counter()
    record: dict[str, Any] = {
        "kind": "bench_jax",
        "how": f"{ops.how}; inside one jit with donated pools; loop: {REPEATS} steps in one jit; µs a layer, medians",
        "kernels": ops.kernels,
        "layers": LAYERS,
        **environment.of_script(jax.devices()[0].device_kind),
        "rows": [],
    }
    for requests, tokens in sizes:
        plan, host = plan_of(requests, tokens), index_of(requests, tokens)
        for verb in verbs(requests, tokens, np.random.default_rng(0)):
            if time.perf_counter() - started > seconds:
                print("the time for the bench is up", flush=True)
                return
            row: dict[str, Any] = {"verb": verb.name, "requests": requests, "tokens": tokens}
            for name, (measure, how) in MEASURES.items():
                try:
                    found = measure(plan, host, verb, ops.device, **how)
                    row[name] = None if found is None else round(found, 2)
                except Exception as error:  # noqa: BLE001 - what fails is reported beside what does not
                    row[name], row[f"{name}_error"] = None, str(error).splitlines()[0]
            record["rows"].append(row)
            write(record, out)
            print(row, flush=True)


def check(seconds: float, out: Path) -> bool:
    """Run checks of the kit until they are through or the time is up; True if all agree."""
    spec = conformance_spec()
    ids = {one.id: one.id.split("/") for one in checks_of(spec)}
    layout = JaxBackend().default_layout(None)
    chosen = [one for one in checks_of(spec) if ids[one.id][2] in (layout, "any")]
    # Shape by shape, and in no order within one, so that a run that is cut off has met every verb and format.
    chosen.sort(key=lambda one: (ids[one.id][3] != "ragged", ids[one.id][3], sha256(one.id.encode()).digest()))
    subjects = [Subject(registry().backends["jax_pallas"])]
    subjects[0].introduce(chosen[0].plan)
    records: list[Any] = []
    started = time.perf_counter()
    for one in chosen:
        if time.perf_counter() - started > seconds:
            break
        records += check_backends(one, subjects)
        if len(records) % 20 == 0:
            out.write_bytes(parity.write(report_of(spec, subjects, records, command="benchmarks.jax_on_device")))
    report = report_of(spec, subjects, records, command="python -m benchmarks.jax_on_device")
    out.write_bytes(parity.write(report))
    print(f"parity: {len(records)} of {len(chosen)} checks, {len(report.failures)} fail", flush=True)
    for failure in report.failures[:5]:
        print(f"  {failure.check}: {failure.detail or failure.first_mismatch}", flush=True)
    return report.agrees


def main() -> int:
    """Time, then check; 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("records"))
    parser.add_argument("--seconds", type=float, default=240, help="for the checks; 0: none")
    parser.add_argument("--bench-seconds", type=float, default=240, help="for the bench; 0: none")
    parser.add_argument("--small", action="store_true", help="small sizes, for a look at the script itself")
    options = parser.parse_args()
    device = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    ops = JaxBackend().create(plan_of(1, BLOCK_TOKENS), device=device)
    print(f"jax {jax.__version__}, {ops.how}, kernels: {ops.kernels}", flush=True)
    sizes = [(2, 512)] if options.small else [(64, 8192), (256, 8192)]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.bench_seconds:
        bench(ops, sizes, options.out / f"bench_jax_{device}.json", options.bench_seconds)
    if not options.seconds:
        return 0
    return 0 if check(options.seconds, options.out / f"parity_jax_{device}.json") else 1


if __name__ == "__main__":
    raise SystemExit(main())
