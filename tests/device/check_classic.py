"""Classic attention with kernels against fp64: formats, placements, heads, drafts, steps of mixed lengths, NaN."""

from collections.abc import Iterator

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.spec import KV, LayerSpec
from tests.device.check_attention import Problem
from tests.device.reading_scene import Scene, off, scene

FORMATS = ("bf16", "fp16", "fp32", "fp8_row", "int8_row", "nf4_b64", "mxfp4")


def layer_of(keys: str = "bf16", values: str | None = None, *, heads: int = 2, dim: int = 64, **options) -> LayerSpec:
    """A classic layer."""
    return LayerSpec(kv=KV(key_heads=heads, key_dim=dim, key_format=keys, value_format=values, **options))


def answer(found: Scene, q: torch.Tensor, sink: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64."""
    kv = found.plain.plan.spec.all_layers[0].kv
    regions = found.plain.plan.region(0, "kv")
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, regions[1].format.dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    shared = torch.arange(heads, device=q.device)
    for token, (request, position) in enumerate(zip(found.host.request_index, found.host.positions, strict=True)):
        if request < 0:
            continue
        left = 0 if found.host.left_padding is None else int(found.host.left_padding[request])
        first, last = kv.first_visible(int(position), left), int(position)
        numbers = torch.arange(min(first, last + 1), last + 1, device=q.device)
        asked = torch.full_like(numbers, int(request))
        k, v = (
            found.plain.decode_rows(region, place.read(found.pools, region, found.index, asked, numbers)).double()[
                :, shared * region.heads // heads
            ]
            for region in regions
        )
        logits = torch.einsum("hd,nhd->hn", q[token].double(), k) * scale
        lse[token] = logits.logsumexp(1)
        out[token] = torch.einsum("hn,nhe->he", logits.softmax(1), v)
        if sink is not None:
            out[token] *= torch.sigmoid(lse[token] - sink.double())[:, None]
    return out, lse


def check(
    what: str, layer, lengths, news, device, *, heads=4, dtype=torch.bfloat16, sink=True, **options
) -> Iterator[Problem]:
    """One case, on a GPU called twice."""
    found = scene(layer, lengths, news, device, drafts=max(news), **options)
    q = torch.randn(len(found.host.positions), heads, layer.kv.key_dim, device=device).to(dtype)
    sinks = torch.randn(heads, device=device) * 3 if sink else None
    scale = 2 * layer.kv.key_dim**-0.5

    def attended():
        return found.ops.attend_kv(found.pools, 0, found.index, q, sink=sinks, scale=scale, columns=max(lengths))

    got = attended()
    again = got if device == "cpu" else attended()
    want = answer(found, q, sinks, scale)
    problem = off(got.out, want[0], "attention") or off(got.lse, want[1], "attention")
    if not (torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)):
        problem += "; a repeat differs"
    yield f"classic attend {what}", problem


def own_rows(what: str, layer, lengths, news, device, *, heads=4, dtype=torch.bfloat16) -> Iterator[Problem]:
    """A step whose rows the pools do not hold yet, against the plain verb."""
    found = scene(layer, lengths, news, device, drafts=max(news))
    tokens = len(found.host.positions)
    q = torch.randn(tokens, heads, layer.kv.key_dim, device=device).to(dtype)
    own = [
        torch.randn(tokens, part.heads, part.format.dim, device=device).to(torch.bfloat16) for part in layer.kv.parts
    ]
    got = found.ops.attend_kv(found.pools, 0, found.index, q, *own, columns=max(lengths))
    want = found.plain.attend_kv(found.pools, 0, found.index, q.float(), *own, columns=max(lengths))
    problem = off(got.out, want.out.double(), "attention") or off(got.lse, want.lse.double(), "attention")
    yield f"classic attend, step not yet stored: {what}", problem


def unseen(what: str, layer, lengths, news, device, *, heads=4) -> Iterator[Problem]:
    """Each request's last token stores NaN, which reaches that token alone."""
    found = scene(layer, lengths, news, device, drafts=max(news))
    host, kv = found.host, layer.kv
    ends = host.lengths[host.request_index] - 1
    last = torch.from_numpy(((host.request_index >= 0) & (host.positions == ends)).nonzero()[0])
    index = found.index._replace(**{
        name: getattr(found.index, name)[last.to(device)] for name in ("positions", "request_index")
    })  # fmt: skip
    q = torch.randn(len(host.positions), heads, kv.key_dim, device=device).bfloat16()
    bad = [torch.full((len(last), part.heads, part.format.dim), torch.nan, device=device) for part in kv.parts]
    found.ops.append_kv(found.pools, 0, index, *bad)
    got = found.ops.attend_kv(found.pools, 0, found.index, q, columns=max(lengths))
    want = answer(found, q, None, kv.key_dim**-0.5)
    hit = torch.zeros(len(q), dtype=torch.bool, device=device)
    hit[last.to(device)] = True
    problem = off(got.out[~hit], want[0][~hit], "attention") or off(got.lse[~hit], want[1][~hit], "attention")
    if not (bool(got.out[hit].isnan().all()) and bool(got.lse[hit].isnan().all())):
        problem += "; the token that sees NaN does not say so"
    yield f"classic attend, NaN ahead of a token: {what}", problem


def captured(what: str, layer, lengths, device, *, heads=4) -> Iterator[Problem]:
    """A decode step captured in a CUDA graph, replayed for other requests, against the eager verb."""
    first, then = (scene(layer, some, [1] * len(some), device) for some in (lengths, lengths[::-1]))
    q = torch.randn(len(first.host.positions), heads, layer.kv.key_dim, device=device).bfloat16()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        first.ops.attend_kv(first.pools, 0, first.index, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = first.ops.attend_kv(first.pools, 0, first.index, q)
    problems = []
    for found in (first, then):
        for target, source in zip(first.index, found.index, strict=True):
            if target is not None:
                target.copy_(source)
        for name, pool in first.pools.items():
            pool.copy_(found.pools[name])
        graph.replay()
        want = answer(found, q, None, layer.kv.key_dim**-0.5)
        problems += [off(got.out, want[0], "attention"), off(got.lse, want[1], "attention")]
    yield f"classic attend, captured: {what}", "; ".join(filter(None, problems))


def small(device: str) -> Iterator[Problem]:
    """Cases for the interpreter and the sanitizer."""
    for number, name in enumerate(FORMATS):
        other = FORMATS[(number + 3) % len(FORMATS)]
        yield from check(
            f"{name} keys, {other} values", layer_of(name, other), [70, 3], [1, 1], device, block_tokens=16
        )
        yield from check(
            f"{name}, fp32 queries", layer_of(name), [40, 9], [2, 1], device, dtype=torch.float32, block_tokens=64
        )
    yield from check(
        "dims and heads differ", layer_of("int8_row", "bf16", value_heads=1, dim=96, value_dim=40), [50], [1], device
    )
    yield from check("three key heads to two of values", layer_of(heads=3, value_heads=2), [50], [2], device, heads=12)
    yield from check("MQA, 70 heads", layer_of("fp8_row", heads=1), [50, 1], [2, 1], device, heads=70)
    yield from check("MHA, no sink", layer_of("nf4_b64", heads=3), [50, 1], [1, 1], device, heads=3, sink=False)
    for storage in ("paged", "slot", "ring"):
        for span in ({"window": 7}, {"chunk": 5}, {}):
            if storage == "ring" and not span:
                continue
            what = f"{storage}, {span or 'full'}"
            layer = layer_of("mxfp4", "fp8_row", storage=storage, **span)
            yield from check(what, layer, [63, 41, 2], [3, 2, 1], device, block_tokens=8)
            if storage != "slot":
                yield from own_rows(what, layer, [43, 31, 2], [3, 12, 2], device)
    for span in ({"window": 11}, {"chunk": 6}, {}):
        layer = layer_of("fp8_row", "bf16", **span)
        yield from check(
            f"left padding, {span or 'full'}", layer, [45, 20], [1, 2], device, block_tokens=8, padding=[17, 4]
        )
    yield from unseen("8 tokens", layer_of("int8_row", "bf16"), [70, 33], [8, 8], device)
    yield from unseen("unlike steps", layer_of("bf16", "fp8_row"), [70, 33, 9], [1, 5, 2], device)


def large(device: str) -> Iterator[Iterator[Problem]]:
    """Cases for a device: one iterator of problems each."""
    for name in FORMATS:
        llama = layer_of(name, heads=8, dim=128)
        yield check(f"{name}, 32 heads over 8", llama, [5003, 129, 1, 4096], [1] * 4, device, heads=32)
        yield check(f"{name}, fp32 queries", llama, [1777, 130], [1, 2], device, heads=32, dtype=torch.float32)
        yield check(f"{name}, 4 tokens each", llama, [3001, 77, 900], [4] * 3, device, heads=32)
        yield own_rows(f"{name}, prompt", llama, [300, 77], [300, 40], device, heads=32)
    for name in ("nf4_b64", "mxfp4", "int8_row"):
        yield check(f"{name}, dim 64", layer_of(name), [1003, 129], [1, 1], device, heads=8)
    for drafts in (2, 3, 8):
        yield check(f"{drafts} tokens each", layer_of("fp8_row", heads=2, dim=128), [2001, 99], [drafts] * 2, device)
    many = [300 + 17 * n for n in range(150)]
    yield check("many requests", layer_of("int8_row", "nf4_b64", dim=128), many, [1] * 150, device, heads=16)
    yield check("blocks of 16", layer_of(dim=128), [3003, 50], [1, 2], device, heads=16, block_tokens=16)
    yield check("a token beside a million", layer_of("fp8_row", dim=128), [(1 << 20) + 77, 1], [1, 1], device)
    yield check("MQA, 128 heads", layer_of("bf16", heads=1, dim=128), [4001, 77], [1, 2], device, heads=128)
    yield check("MHA, no sink", layer_of("mxfp4", heads=32, dim=128), [901], [1], device, heads=32, sink=False)
    yield check("dims 192 and 128", layer_of("bf16", heads=4, dim=192, value_dim=128), [2001], [1], device, heads=16)
    yield check("dim 256", layer_of("bf16", "fp8_row", heads=4, dim=256), [2001], [1], device, heads=8)
    yield check("latent rows", layer_of("bf16", heads=1, dim=576, value_dim=512), [901, 33], [1, 1], device, heads=16)
    for storage in ("paged", "slot", "ring"):
        for span in ({"window": 1000}, {"chunk": 700}):
            layer = layer_of("fp8_row", "bf16", dim=128, storage=storage, **span)
            yield check(f"{storage}, {span}", layer, [2963, 4100, 2], [3, 2, 1], device, heads=8)
            yield own_rows(f"{storage}, {span}", layer, [2963, 1500, 2], [300, 120, 1], device, heads=8)
    for name in FORMATS:
        yield unseen(name, layer_of(name, dim=128), [700, 333], [8, 5], device)
    for span in ({"window": 100}, {"chunk": 60}, {}):
        layer = layer_of("int8_row", dim=128, **span)
        yield check(f"left padding, {span}", layer, [945, 320], [1, 4], device, padding=[117, 319])
    yield captured("fp8_row", layer_of("fp8_row", heads=8, dim=128), [3000, 17, 1200], device, heads=32)
