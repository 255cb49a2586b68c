"""A whole decode step of DeepSeek-V4-Flash in one CUDA graph, and verbs under ``torch.compile``."""

import msgspec
import torch

import kvcore
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window, presets

LIVE, PADDED, HEADS, ROPE = 6, 8, 64, Rope(dim=64, theta=160000.0)


def inputs_for(spec, tokens, device):
    """Random rows for every layer: window row, query; index query, head weights; kv, score, index kv, index score."""
    made = []
    for layer in spec.all_layers:
        keys = layer.index_keys
        shapes = [(512,), (HEADS, 512), *([] if keys is None else [(keys.heads, keys.dim), (keys.heads,)])]
        shapes += [(t.width,) for t in (layer.tail, layer.index_tail) if t is not None for _ in range(2)]
        made.append([torch.randn(tokens, *shape, device=device) for shape in shapes])
    return made


def decode(ops, pools, index, inputs, weights, picks):
    """One step through all layers, append, flush, select, attend; returns what was gathered, selected and attended."""
    seen = []
    for number, layer in enumerate(ops.plan.spec.all_layers):
        window, q, *streams = inputs[number]
        selected = None
        ops.append_rotated_window(pools, number, index, window, rope=ROPE)
        if layer.index_keys is not None:
            index_q, head_weights, *streams = streams
        if layer.tail is not None:
            options = {"norm_weight": weights[0], "index_norm_weight": weights[1] if layer.index_tail else None}
            ops.append_flush(pools, number, index, *streams, newest=1, rope=ROPE, **options)
            seen.append(ops.gather_entries(pools, number, index, picks).values)
        if layer.index_keys is not None:
            # Every second time in one go, which so short a context would not ask for.
            run = 128 if number % 4 == 0 else None
            asked = index_q.bfloat16(), head_weights, layer.index_keys.topk
            selected = ops.index_select(pools, number, index, *asked, run=run)
            seen.append(selected)
        seen += ops.attend(pools, number, index, q.bfloat16(), selected, sink=q[0, :, 0], rope=ROPE)
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
    assert all(isinstance(cache._state.ops, TritonOps) for cache in caches)
    weights = torch.rand(512, device=device) + 0.5, torch.rand(128, device=device) + 0.5
    picks = torch.randint(-1, 80, (PADDED, 64), dtype=torch.int32, device=device)
    requests = [[cache.admit() for _ in range(LIVE)] for cache in caches]
    lengths = [122 + 3 * n for n in range(LIVE)]
    prompt = inputs_for(spec, sum(lengths), device)
    for cache, mine in zip(caches, requests, strict=True):
        with cache.step(dict(zip(mine, lengths, strict=True))) as step:
            for number, layer in enumerate(spec.all_layers):
                window, _, *streams = prompt[number]
                streams = streams[2:] if layer.index_keys is not None else streams
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
    yield "captured 43-layer decode: outputs", f"{wrong} of {len(want)} differ" if wrong else ""
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


def by_handles(step, spec, inputs, weights):
    """One step through the handles of all layers."""
    for number, layer in enumerate(spec.layers):
        handle, (window, q, *streams) = step.layer(number), inputs[number]
        handle.append_window(window)
        if layer.index_keys is not None:
            index_q, head_weights, *streams = streams
        if layer.tail is not None:
            handle.append_tail(*streams[:2])
            if layer.index_tail is not None:
                handle.append_index_tail(*streams[2:])
            index_weight = weights[1] if layer.index_tail is not None else None
            handle.flush(norm_weight=weights[0], rope=ROPE, index_norm_weight=index_weight)
        selected = None
        if layer.index_keys is not None:
            scores = handle.index_scores(index_q, head_weights)
            selected = handle.select(scores, layer.index_keys.topk)
        handle.attend(q, selected, sink=torch.zeros_like(q[0, :, 0]), rope=ROPE)
        handle.gather_window()


def check_waiting(device):
    """Yield (what, problem): no verb of a decode step, and neither its end, waits for the device."""
    spec = CacheSpec(layers=presets.deepseek_v4_flash().layers[:4])
    cache = kvcore.create_cache(spec, backend="torch_triton", device=device, max_requests=LIVE, max_tokens=LIVE * 512)
    requests = [cache.admit() for _ in range(LIVE)]
    weights = torch.rand(512, device=device) + 0.5, torch.rand(128, device=device) + 0.5
    picks = torch.randint(-1, 8, (LIVE, 4), dtype=torch.int32, device=device)
    inputs = inputs_for(spec, LIVE, device)
    # Past the windows' rings, so that every step keeps what an abort needs.
    with cache.step(dict.fromkeys(requests, 150)):
        cache.pools = cache.pools
    for padding in ({}, {"pad_tokens": LIVE, "pad_requests": LIVE}):
        for way in ("handles", "verbs"):
            for turn in range(14):
                torch.cuda.synchronize()
                if turn > 5:
                    torch.cuda.set_sync_debug_mode("error")
                problem = ""
                try:
                    step = cache.step(dict.fromkeys(requests, 1), **padding)
                    if way == "handles":
                        by_handles(step, spec, inputs, weights)
                    else:
                        decode(cache.ops, cache.pools, step.index, inputs, weights, picks)
                        cache.pools = cache.pools
                    step.abort() if turn % 3 == 1 else step.commit()
                except RuntimeError as error:
                    problem = str(error)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                if problem:
                    break
            yield f"steps do not wait: {way}{', padded' * bool(padding)}", problem


def check_ahead(device):
    """Yield (what, problem): the host runs ahead of the device, on one stream and on two in turn."""
    spec = CacheSpec(layers=presets.deepseek_v4_flash().layers[:4])
    cache = kvcore.create_cache(spec, backend="torch_triton", device=device, max_requests=LIVE, max_tokens=LIVE * 512)
    requests = [cache.admit() for _ in range(LIVE)]
    here, there, busy = torch.cuda.current_stream(), torch.cuda.Stream(), torch.randn(4096, 4096, device=device)
    for padding in ({}, {"pad_tokens": PADDED, "pad_requests": PADDED}):
        for streams in ((here,), (here, there)):
            told = []
            torch.cuda.synchronize()
            for _ in range(60):
                busy @ busy
            for turn in range(30):
                with torch.cuda.stream(streams[turn // 3 % len(streams)]):
                    wanted = [request.length for request in requests]
                    step = cache.step(dict.fromkeys(requests, 1), **padding)
                    told.append((wanted, step._device_index.positions.clone()))
                    cache.pools = cache.pools
                    step.commit()
            torch.cuda.synchronize()
            wrong = sum(positions[:LIVE].tolist() != wanted for wanted, positions in told)
            what = f"steps ahead of the device, {len(streams)} streams{', padded' * bool(padding)}"
            yield what, f"{wrong} steps of other positions" if wrong else ""


def check_compiled(device, backend="inductor"):
    """Yield (what, problem): verbs inside ``torch.compile(fullgraph=True)`` leave the same bytes and outputs."""
    from kvcore.plan import plan_cache
    from kvcore.step import StepRequest, build_index

    for what, spec, layout, step in COMPILED:
        what = f"torch.compile(fullgraph=True), {what}"
        torch.manual_seed(11)
        plan = plan_cache(spec, max_requests=4, max_tokens=4 * spec.block_tokens, layout=layout)
        ops = TritonOps(plan, device)
        rows = [StepRequest(slot=n, start=21 + n, new=1, blocks=[3 - n], stored=0) for n in range(3)]
        index = ops.index(build_index(rows, max_blocks=1, pad_tokens=4, pad_requests=4))
        given = [torch.randn(4, width, device=device) for width in INPUTS]
        # As a tensor: a compiled step would make it anew from a ``Rope`` each time.
        given.append(torch.tensor(ROPE.inverse_frequencies, dtype=torch.float32, device=device))
        pools = [ops.allocate() for _ in range(2)]
        for buffers in pools:
            for name in buffers:
                buffers[name].zero_()  # what was written before; random bytes would be NaN here and there
        want = step(ops, pools[0], index, given)
        try:
            # Traced afresh: the verbs of one case must not be found in the cache of another.
            torch.compiler.reset()
            compiled = torch.compile(step, fullgraph=True, backend=backend)
            got = compiled(ops, pools[1], index, given)
            yield what, unlike(pools, want, got)
            if torch.device(device).type == "cuda":
                yield f"{what}, captured", unlike(pools, want, captured(compiled, ops, pools[1], index, given))
        except Exception as error:  # noqa: BLE001
            yield what, f"{type(error).__name__}: {str(error)[:600]}"


def unlike(pools, want, got):
    """What differs between two pools, and between the outputs of two steps."""
    same = all(torch.equal(pools[0][name], pools[1][name]) for name in pools[0])
    written = any(bool(buffer.view(torch.uint8).any()) for buffer in pools[1].values())
    equal = all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    return "" if same and equal and written else f"pools equal: {same}, outputs equal: {equal}, written: {written}"


def captured(step, ops, pools, index, given):
    """Outputs of a compiled step that is replayed from a CUDA graph, on pools that are zero before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ops, pools, index, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(ops, pools, index, given)
    for buffer in [*pools.values(), *got]:
        buffer.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return got


INPUTS = (512, 1024, 1024, 256, 256, 4 * 128, 4, 16 * 512)
"""Widths of a window row, tail streams, index tail streams, index queries, head weights, queries."""


def window_alone(ops, pools, index, given):
    """Append and read back, with arithmetic before and after."""
    pools = ops.append_window(pools, 0, index, given[0] * 2)
    return [ops.gather_window(pools, 0, index).values + 1]


def decode_layer(ops, pools, index, given):
    """All that a CSA layer does in a decode step."""
    window, kv, score, index_kv, index_score, index_q, head_weights, q, rope = given
    pools = ops.append_rotated_window(pools, 0, index, window, rope=rope)
    streams = kv, score, index_kv, index_score
    pools = ops.append_flush(pools, 0, index, *streams, newest=1, rope=rope)
    index_q = index_q.view(-1, 4, 128)
    scores = ops.index_scores(pools, 0, index, index_q, head_weights)
    selected = ops.select(scores, 4)
    at_once = ops.index_select(pools, 0, index, index_q, head_weights, 4, run=8)
    out = ops.attend(pools, 0, index, q.view(-1, 16, 512).bfloat16(), at_once, rope=rope)
    return [scores, selected, at_once, out.out, out.lse, ops.gather_entries(pools, 0, index, selected).values]


def compressed_layer(ops, pools, index, given):
    """Flush, then tails; both again in one launch; what was stored read back."""
    _, kv, score, index_kv, index_score, *_, rope = given
    pools = ops.flush(pools, 0, index, kv, score, index_kv, index_score, rope=rope)
    pools = ops.append_index_tail(ops.append_tail(pools, 0, index, kv, score), 0, index, index_kv, index_score)
    pools = ops.append_flush(pools, 0, index, kv * 2, score, index_kv * 2, index_score, newest=1, rope=rope)
    return [ops.gather_all_entries(pools, 0, index, columns=6, role=role).values for role in ("entries", "index_keys")]


def classic_layer(ops, pools, index, given):
    """A classic layer's decode step, keys of two heads and queries of four."""
    k, v, q = given[0][:, :128], given[0][:, 128:256], given[0][:, 256:]
    pools = ops.append_kv(pools, 0, index, k.reshape(-1, 2, 64), v.reshape(-1, 2, 64))
    out = ops.attend_kv(pools, 0, index, q.reshape(-1, 4, 64).bfloat16())
    return [out.out * 2, out.lse]


COMPRESSION = LayerSpec(
    tail=Tail(dim=512, ratio=4, overlap=True),
    entries=Entries(dim=512, ratio=4),
    index_tail=Tail(dim=128, ratio=4, overlap=True),
    index_keys=IndexKeys(dim=128, ratio=4, heads=4, topk=4),
)

COMPILED = (
    (
        "a classic layer's decode step",
        CacheSpec(
            layers=[LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format="int8_row", value_format="bf16"))],
            block_tokens=64,
        ),
        "packed",
        classic_layer,
    ),
    ("append and gather", CacheSpec(layers=[LayerSpec(window=Window(dim=512, window=128))]), "packed", window_alone),
    (
        "a CSA layer's decode step",
        CacheSpec(layers=[msgspec.structs.replace(COMPRESSION, window=Window(dim=512, window=16))], block_tokens=64),
        "packed",
        decode_layer,
    ),
    (
        "compression with every field in a buffer of its own",
        CacheSpec(layers=[COMPRESSION], block_tokens=64),
        "planar",
        compressed_layer,
    ),
)
