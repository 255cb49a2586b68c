"""A whole decode step of DeepSeek-V4-Flash's cache in one CUDA graph, and what each verb takes of it.

All 43 layers: append the window's row, compress what closes, score and select entries, attend. Projections are left
out, their results are random. Needs a CUDA device. Run it:  python examples/decode_43_layers.py [requests] [history]
"""

import statistics
import sys

import torch

import kvcore
from kvcore.spec import Rope, presets

ROPE = Rope(dim=64, theta=160000.0)
HEADS = 64


def inputs_for(layer, tokens):
    """Random results of a layer's projections for one token of each request."""

    def made(*shape, dtype=torch.float32):
        return torch.randn(tokens, *shape, device="cuda").to(dtype)

    found = {
        "row": made(layer.window.dim, dtype=torch.bfloat16),
        "q": made(HEADS, layer.window.dim, dtype=torch.bfloat16),
    }
    found["sink"] = torch.randn(HEADS, device="cuda")
    if layer.tail is not None:
        found["tail"] = made(layer.tail.width), made(layer.tail.width)
    if layer.index_tail is not None:
        found["tail"] += made(layer.index_tail.width), made(layer.index_tail.width)
        found["index_q"] = made(layer.index_keys.heads, layer.index_keys.dim, dtype=torch.bfloat16)
        found["index_weights"] = made(layer.index_keys.heads)
    return found


def step(ops, pools, index, inputs, weights, verbs):
    """Every layer's verbs, those of them that ``verbs`` names; returns the last layer's output."""
    out = None
    for number, layer in enumerate(ops.plan.spec.layers):
        given = inputs[number]
        if "append" in verbs:
            ops.append_rotated_window(pools, number, index, given["row"], rope=ROPE)
        if layer.tail is not None and "flush" in verbs:
            options = {"norm_weight": weights[0], "index_norm_weight": weights[1] if layer.index_tail else None}
            ops.append_flush(pools, number, index, *given["tail"], closed=1, newest=1, rope=ROPE, **options)
        selected = given.get("selected")
        if layer.index_keys is not None and "select" in verbs:
            q, w = given["index_q"], given["index_weights"]
            selected = ops.index_select(pools, number, index, q, w, layer.index_keys.topk)
            given["selected"] = selected
        if "attend" in verbs:
            out = ops.attend(pools, number, index, given["q"], selected, sink=given["sink"], rope=ROPE).out
    return out


def captured(run):
    """A graph of ``run``, warmed up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph, repeats=20):
    """Median time of a replay."""
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times[2:])


def main(requests=8, history=16384):
    """Fill a cache with random history, capture a step, print milliseconds by verb."""
    torch.manual_seed(0)
    spec = presets.deepseek_v4_flash(draft=False)
    cache = kvcore.create_cache(
        spec, backend="torch_triton", device="cuda", max_requests=requests, max_tokens=requests * (history + 256)
    )
    for pool in cache.pools.values():
        # Bytes that decode to finite numbers stand in for a history.
        for some in pool.split(1024):
            some.copy_(torch.randint(96, 120, some.shape, dtype=torch.uint8, device="cuda"))
    from kvcore.step import StepRequest, build_index

    per = history // 256 + 1
    rows = [
        StepRequest(slot=n, start=history + 3, new=1, blocks=tuple(range(n * per, n * per + per)))
        for n in range(requests)
    ]
    index = cache.ops.padded_index(build_index(rows, max_blocks=per))
    weights = torch.rand(512, device="cuda") + 0.5, torch.rand(128, device="cuda") + 0.5
    inputs = [inputs_for(layer, requests) for layer in spec.layers]
    every = ("append", "flush", "select", "attend")
    total = milliseconds(captured(lambda: step(cache.ops, cache.pools, index, inputs, weights, every)))
    layers = len(spec.layers)
    print(f"{torch.cuda.get_device_name()}: {requests} requests of {history:,} tokens, {layers} layers in one graph")
    print(f"{'whole step':12} {total:8.3f} ms  {1e3 * total / layers:7.1f} µs a layer")
    for verb in every:
        alone = milliseconds(captured(lambda verb=verb: step(cache.ops, cache.pools, index, inputs, weights, (verb,))))
        count = {"append": layers, "attend": layers}.get(
            verb, sum(getattr(layer, "tail" if verb == "flush" else "index_keys") is not None for layer in spec.layers)
        )
        print(f"{verb:12} {alone:8.3f} ms  {1e3 * alone / count:7.1f} µs in each of {count} layers")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
