"""Keys and values over tokens on a device, beside the reference: bytes that appends store, attention in fp64."""

from collections.abc import Iterator

import numpy as np
import torch

from kvcore.backends.reference.backend import ReferenceOps
from kvcore.backends.reference.groups import Held
from kvcore.backends.torch_triton import checked_device
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec
from kvcore.step import StepRequest, build_index
from tests.device.check_attention import Problem
from tests.device.reading_scene import Scene, off, scene, write

BLOCK = 128
PAIRS = (("int4_ch32", "int4_g32"), ("int4_ch64", "int4_g64"), ("int4_ch32", "int4_g64"), ("int4_ch64", "int4_g32"))
"""Keys and values that attention takes from their codes."""
OTHERS = (("int4_ch32", "bf16"), ("bf16", "int4_ch32"), ("int4_ch64", "int4_ch64"))
"""Those that it decodes first."""
HOSTILE = ("zeros", "outlier", "nan", "infinite", "ties", "tiny", "huge")


def layer_of(keys: str, values: str, *, heads: int = 2, dim: int = 128, **options) -> LayerSpec:
    """A classic layer."""
    return LayerSpec(kv=KV(key_heads=heads, key_dim=dim, key_format=keys, value_format=values, **options))


def answer(found: Scene, q: torch.Tensor, sink: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64, of rows that the reference reads."""
    ops = ReferenceOps(found.plain.plan)
    layer, index = ops.layers[0], ops.index(found.host)
    pools = ops.allocate()
    for name, pool in found.pools.items():
        pools[name][...] = pool.cpu().numpy().reshape(pools[name].shape)
    kv = found.plain.plan.spec.all_layers[0].kv
    heads, shared = q.shape[1], np.arange(q.shape[1])
    out = np.zeros((len(q), heads, kv.given[1].format.dim))
    lse = np.full((len(q), heads), -np.inf)
    queries = q.cpu().double().numpy()
    held: dict[int, list[Held]] = {}
    for token, (request, position) in enumerate(zip(found.host.request_index, found.host.positions, strict=True)):
        if request < 0:
            continue
        if request not in held:
            held[request] = [Held(layer, pools, index, int(request), part, None) for part in (0, 1)]
        left = 0 if found.host.left_padding is None else int(found.host.left_padding[request])
        first = kv.first_visible(int(position), left)
        k, v = (
            one.at(int(position) + 1)[first:].astype(np.float64)[:, shared * part.heads // heads]
            for one, part in zip(held[request], kv.given, strict=True)
        )
        if not len(k):
            continue
        logits = np.einsum("hd,nhd->hn", queries[token], k) * scale
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        lse[token] = logits.max(axis=1) + np.log(weights.sum(axis=1))
        out[token] = np.einsum("hn,nhe->he", weights / weights.sum(axis=1, keepdims=True), v)
        if sink is not None:
            out[token] /= 1 + np.exp(sink.cpu().double().numpy() - lse[token])[:, None]
    return torch.from_numpy(out).to(q.device), torch.from_numpy(lse).to(q.device)


def check(
    what: str, layer, lengths, news, device, *, heads=8, dtype=torch.bfloat16, sink=True, reused=False, **options
) -> Iterator[Problem]:  # fmt: skip
    """Attention of one step, called twice; ``reused``: other, longer requests had the slots and the blocks before."""
    found = scene(layer, lengths, news, device, drafts=max(news), **{"block_tokens": BLOCK} | options)
    if reused:
        refill(found, layer)
    q = torch.randn(len(found.host.positions), heads, layer.kv.key_dim, device=device).to(dtype)
    sinks = torch.randn(heads, device=device) * 3 if sink else None
    scale = 2 * layer.kv.key_dim**-0.5

    def attended():
        return found.ops.attend_kv(found.pools, 0, found.index, q, sink=sinks, scale=scale, columns=max(lengths))

    got, again = attended(), attended()
    want = answer(found, q, sinks, scale)
    problem = off(got.out, want[0], "attention") or off(got.lse, want[1], "attention")
    if not (torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)):
        problem += "; a repeat differs"
    yield f"attention over tokens, {what}", problem


def refill(found: Scene, layer: LayerSpec) -> None:
    """Fill every request's blocks to their ends, then write the request again."""
    host = found.host
    for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True)):
        blocks = [int(block) for block in host.block_table[request] if block >= 0]
        for end in (len(blocks) * found.plain.plan.spec.block_tokens, int(length)) if blocks else ():
            row = StepRequest(int(host.slots[request]), int(start), end - int(start), tuple(blocks))
            write(found.ops, found.pools, layer, row, len(host.block_table[request]), 1.0)


def hostile(kind: str, tokens: int, heads: int, dim: int, seed: int) -> np.ndarray:
    """Values [tokens, heads, dim], fp32 numbers that are bf16 ones, with something unusual in some channels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    if kind == "zeros":
        x[:, :, ::3] = 0
    elif kind == "outlier":
        x[:, :, 1::7] *= 3e4
    elif kind == "nan":
        x[tokens // 2, 0, 5] = np.nan
    elif kind == "infinite":
        x[tokens // 3, -1, 9] = -np.inf
    elif kind == "ties":
        # Multiples of half a step, where a step is a fifteenth of the way from the smallest to the largest.
        x = rng.integers(0, 31, x.shape).astype(np.float32) * np.float32(2.0 ** rng.integers(-3, 4)) - 3
        x[:1], x[-1:] = -3, 27
    elif kind == "tiny":
        x *= np.float32(2.0**-101)
    elif kind == "huge":
        with np.errstate(over="ignore"):
            x *= np.float32(2.0**126)
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)


def stored(
    what: str, layer, steps, device, *, kind="", dtype=torch.bfloat16, drafts=0, layout="packed"
) -> Iterator[Problem]:  # fmt: skip
    """Pools after steps [(start, new) of each request], byte for byte beside the reference's."""
    requests = len(steps[0])
    longest = max(start + new for step in steps for start, new in step)
    columns = -(-longest // BLOCK)
    plan = plan_cache(
        CacheSpec(layers=[layer], block_tokens=BLOCK), max_requests=requests, max_tokens=requests * columns * BLOCK,
        max_draft_tokens=drafts, layout=layout,
    )  # fmt: skip
    ops, plain = TritonOps(plan, checked_device(device)), ReferenceOps(plan)
    pools, want = ops.allocate(), plain.allocate()
    for each in pools.values():
        each.fill_(0xFF)
    for each in want.values():
        each.fill(0xFF)
    order = np.random.default_rng(0).permutation(requests * columns).reshape(requests, columns)
    for number, step in enumerate(steps):
        rows = [
            StepRequest(requests - 1 - n, start, new, tuple(map(int, order[n])), stored=0)
            for n, (start, new) in enumerate(step)
        ]
        host = build_index(rows, max_blocks=columns)
        given = [
            hostile(kind, len(host.positions), part.heads, part.format.dim, 2 * number + n)
            for n, part in enumerate(layer.kv.given)
        ]
        ops.append_kv(pools, 0, ops.index(host), *(torch.from_numpy(each).to(device, dtype) for each in given))
        plain.append_kv(want, 0, plain.index(host), *given)
    problem = ""
    for name, pool in pools.items():
        got, expected = pool.cpu().numpy().reshape(-1), want[name].reshape(-1)
        if bad := int((got != expected).sum()):
            first = int((got != expected).argmax())
            problem += f"{name}: {bad} bytes differ, the first at {first}: {got[first]}, not {expected[first]}; "
    yield f"append over tokens, {what}", problem


def one_by_one(requests: int, first: int, tokens: int) -> list[list[tuple[int, int]]]:
    """Steps: a prompt of unlike lengths, then ``tokens`` steps of a token each."""
    prompt = [(0, first + n) for n in range(requests)]
    return [prompt, *([(first + n + t, 1) for n in range(requests)] for t in range(tokens))]


def small(device: str) -> Iterator[Problem]:
    """Cases for the interpreter and the sanitizer."""
    for keys, values in (PAIRS[0], OTHERS[0]):
        layer = layer_of(keys, values, dim=64)
        yield from stored(f"{keys} and {values}, closing", layer, one_by_one(2, 30, 3), device, kind="ties")
        yield from check(f"{keys} and {values}", layer, [70, 33], [1, 1], device, heads=4)
    long_then_short = [[(0, 50), (0, 40)], [(50, 15), (40, 1)]]
    yield from stored("a prompt's groups, then one", layer_of(*PAIRS[0], dim=32), long_then_short, device, kind="ties")


def large(device: str) -> Iterator[Iterator[Problem]]:
    """Cases for a device: one iterator of problems each."""
    for keys, values in PAIRS:
        named = f"{keys} and {values}"
        llama = layer_of(keys, values, heads=8)
        yield check(f"{named}, 32 heads over 8", llama, [2003, 129, 1, 1024, 63], [1] * 5, device, heads=32)
        yield check(f"{named}, slots used again", llama, [777, 96, 33], [1] * 3, device, heads=32, reused=True)
        yield check(f"{named}, fp32 queries", llama, [777, 130], [1, 2], device, heads=32, dtype=torch.float32)
        yield check(f"{named}, 4 tokens each", llama, [1501, 66, 900], [4] * 3, device, heads=32)
        yield check(f"{named}, prompt", llama, [300, 77], [300, 40], device, heads=32)
        mha = layer_of(keys, values, heads=3, dim=64)
        yield check(f"{named}, dim 64, MHA", mha, [901, 40], [1, 1], device, heads=3)
        yield check(f"{named}, 20 heads over 1", layer_of(keys, values, heads=1), [901, 31], [1, 1], device, heads=20)
        for span in ({"window": 45}, {"window": 700}, {"chunk": 100}):
            layer = layer_of(keys, values, **span)
            yield check(f"{named}, {span}", layer, [963, 1100, 2], [3, 1, 1], device, reused=True)
            yield check(f"{named}, {span}, left padding", layer, [545, 320], [1, 2], device, padding=[117, 319])
    for keys, values in OTHERS:
        layer = layer_of(keys, values)
        yield check(f"{keys} and {values}", layer, [901, 64, 31], [1, 1, 1], device)
    one = layer_of(*PAIRS[0], heads=2, value_heads=1, value_dim=256)
    yield check("more channels of values", one, [901, 64, 31], [1, 1, 1], device)
    yield check("planar", layer_of(*PAIRS[1]), [901, 64, 31], [1, 1, 1], device, layout="planar")
    yield check("many requests", layer_of(*PAIRS[0]), [100 + 7 * n for n in range(90)], [1] * 90, device)
    yield check("long", layer_of(*PAIRS[1]), [40003], [1], device)
    for keys, values in (*PAIRS, *OTHERS):
        named, layer = f"{keys} and {values}", layer_of(keys, values)
        for kind in ("", *HOSTILE):
            yield stored(f"{named}, {kind or 'normal'}", layer, one_by_one(5, 60, 6), device, kind=kind)
        yield stored(f"{named}, fp32", layer, one_by_one(3, 62, 3), device, dtype=torch.float32, kind="ties")
        steps = [[(0, 50), (0, 3)], [(50, 20), (3, 5)], [(70, 1), (8, 40)], [(71, 150), (48, 16)]]
        yield stored(f"{named}, unlike steps", layer, steps, device, kind="ties", drafts=3)
    yield stored("64 requests", layer_of(*PAIRS[0], heads=8), one_by_one(64, 1, 35), device, kind="ties")
    yield stored("planar", layer_of(*PAIRS[0], heads=8), one_by_one(7, 60, 5), device, layout="planar")
