"""A whole decode step of DeepSeek-V4-Flash in one CUDA graph, and verbs under ``torch.compile``."""

import torch

import kvcore
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.spec import CacheSpec, LayerSpec, Rope, Window, presets

LIVE, PADDED, ROPE = 6, 8, Rope(dim=64, theta=160000.0)


def inputs_for(spec, tokens, device):
    """Random rows for every layer: (window, kv, score, index kv, index score, picks)."""
    made = []
    for layer in spec.all_layers:
        widths = [512] + [t.width for t in (layer.tail, layer.index_tail) if t is not None for _ in range(2)]
        made.append([torch.randn(tokens, width, device=device) for width in widths])
    return made


def decode(ops, pools, index, inputs, weights, picks):
    """One step through all layers; returns what was gathered."""
    seen = []
    for number, layer in enumerate(ops.plan.spec.all_layers):
        window, *streams = inputs[number]
        ops.append_rotated_window(pools, number, index, window, rope=ROPE)
        if layer.tail is not None:
            options = {"norm_weight": weights[0], "index_norm_weight": weights[1] if layer.index_tail else None}
            ops.append_flush(pools, number, index, *streams, newest=1, rope=ROPE, **options)
            seen.append(ops.gather_entries(pools, number, index, picks).values)
        seen.append(ops.gather_window(pools, number, index).values)
    return seen


def check_captured(device):
    """Yield (what, problem): a captured step, replayed with new lengths and blocks, against an eager twin."""
    torch.manual_seed(7)
    spec = presets.deepseek_v4_flash()
    caches = [
        kvcore.create_cache(spec, backend="torch_triton", device=device, max_requests=PADDED, max_tokens=PADDED * 2048)
        for _ in range(2)
    ]
    assert all(isinstance(cache.ops, TritonOps) for cache in caches)
    weights = torch.rand(512, device=device) + 0.5, torch.rand(128, device=device) + 0.5
    picks = torch.randint(-1, 80, (PADDED, 64), dtype=torch.int32, device=device)
    requests = [[cache.admit() for _ in range(LIVE)] for cache in caches]
    lengths = [122 + 3 * n for n in range(LIVE)]
    prompt = inputs_for(spec, sum(lengths), device)
    for cache, mine in zip(caches, requests, strict=True):
        with cache.step(dict(zip(mine, lengths, strict=True))) as step:
            for number, layer in enumerate(spec.all_layers):
                window, *streams = prompt[number]
                cache.ops.append_window(cache.pools, number, step.index, window)
                if layer.tail is not None:
                    cache.ops.append_flush(cache.pools, number, step.index, *streams, newest=max(lengths), rope=ROPE)
            cache.pools = cache.pools
    static = inputs_for(spec, PADDED, device)
    graph, seen = None, None
    eager, captured = caches
    for turn in range(150):
        fresh = inputs_for(spec, PADDED, device) if turn % 10 == 0 or turn > 140 else static
        for old, new in zip(static, fresh, strict=True):
            for target, source in zip(old, new, strict=True):
                target.copy_(source)
        # The first and last request sit some steps out, so that lengths part ways.
        going = [n for n in range(LIVE) if (turn + n) % 5 or turn < 3]
        with eager.step({requests[0][n]: 1 for n in going}, pad_tokens=PADDED, pad_requests=PADDED) as step:
            want = decode(eager.ops, eager.pools, step.index, static, weights, picks)
            eager.pools = eager.pools
        torch.cuda.synchronize()
        if turn > 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with captured.step({requests[1][n]: 1 for n in going}, pad_tokens=PADDED, pad_requests=PADDED) as step:
                if turn < 2:
                    decode(captured.ops, captured.pools, step.index, static, weights, picks)
                elif turn == 2:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        seen = decode(captured.ops, captured.pools, step.index, static, weights, picks)
                if graph is not None:
                    graph.replay()
                captured.pools = captured.pools
        finally:
            torch.cuda.set_sync_debug_mode("default")
    different = [name for name in eager.pools if not torch.equal(eager.pools[name], captured.pools[name])]
    yield "captured 43-layer decode: pools", f"{len(different)} pools differ: {different[:3]}" if different else ""
    wrong = sum(not torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(want, seen, strict=True))
    yield "captured 43-layer decode: gathers", f"{wrong} of {len(want)} differ" if wrong else ""
    yield (
        "captured 43-layer decode: requests differ in length",
        "" if len({r.length for r in requests[0]}) > 1 else "all equal",
    )
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    print(
        "43-layer decode step of 8 requests in a graph:",
        sorted(a.elapsed_time(b) for a, b in times)[10],
        "ms",
        flush=True,
    )


def check_compiled(device, backend="inductor"):
    """Yield (what, problem): verbs inside ``torch.compile(fullgraph=True)`` leave the same bytes."""
    from kvcore.plan import plan_cache
    from kvcore.step import Row, build_index

    spec = CacheSpec(layers=[LayerSpec(window=Window(dim=512, window=128))])
    ops = TritonOps(plan_cache(spec, max_requests=4), device)
    host = build_index(
        [Row(slot=n, start=5, new=3, blocks=[], stored=0) for n in range(4)], max_blocks=1, pad_tokens=16
    )
    index, rows = ops.index(host), torch.randn(16, 512, device=device)

    def step(pools, index, rows):
        pools = ops.append_window(pools, 0, index, rows * 2)
        return ops.gather_window(pools, 0, index).values + 1

    pools = [ops.allocate() for _ in range(2)]
    want = step(pools[0], index, rows)
    try:
        got = torch.compile(step, fullgraph=True, backend=backend)(pools[1], index, rows)
    except Exception as error:  # noqa: BLE001
        yield "torch.compile(fullgraph=True)", f"{type(error).__name__}: {str(error)[:600]}"
        return
    same = all(torch.equal(pools[0][name], pools[1][name]) for name in pools[0])
    yield "torch.compile(fullgraph=True)", "" if same and torch.equal(want, got) else "results differ"
