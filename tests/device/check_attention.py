"""Attention with kernels against fp64: formats, heads, drafts, empty sets, long contexts."""

import sys
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl

from kvcore.backends.reference import encoding
from kvcore.backends.torch_triton import flash, launch
from kvcore.kernels.triton import chunks
from kvcore.kernels.triton.attend import Parts
from kvcore.kernels.triton.record import own_record, recorded
from kvcore.plan import plan_cache
from kvcore.spec import FORMATS, CacheSpec, Entries, LayerSpec, Rope, Window, Yarn
from tests.device.reading_scene import attention, off, scene, turned_back

Problem = tuple[str, str]

V4_ROPE = Rope(dim=64, theta=160000.0, yarn=Yarn(factor=16.0, original_length=65536))
"""Of DeepSeek-V4's layers with compressed entries."""

FEW_CHANNELS = Rope(dim=10, theta=10000.0)


def layer_of(
    window: str | None, entries: str | None, *, dim: int = 512, span: int = 128, ratio: int = 4, rows: int = 132
):
    """A layer that reads: formats by role, None for a role that it lacks."""
    return LayerSpec(
        window=None if window is None else Window(dim=dim, window=span, format=window, rows=rows),
        entries=None if entries is None else Entries(dim=dim, ratio=ratio, format=entries),
    )


def picks_for(tokens: int, count: int, entries: int, device: str) -> torch.Tensor:
    """[T, count] distinct entries in any order; some lie beyond the last, some are -1, so is every second row's end."""
    if not count:
        return torch.zeros(tokens, 0, dtype=torch.int32, device=device)
    span = entries + 7
    picks = torch.stack([torch.randperm(max(span, count), device=device)[:count] for _ in range(tokens)]).int()
    picks[picks >= span] = -1
    picks[::2, count // 2 :] = -1
    return picks


def check(
    what: str, layer, lengths, news, device, *, heads=64, count=None, dtype=torch.bfloat16, sink=True, flash_mla=False,
    rope=None, **options,
) -> Iterator[Problem]:  # fmt: skip
    """One case: ``count`` picks a query, None for every visible entry.

    With ``rope`` outputs are also turned back: what is turned are the rounded outputs without it, to the last step.
    """
    found = scene(layer, lengths, news, device, **options)
    found.ops.attention_kernels = "flash_mla" if flash_mla else "triton"
    tokens = len(found.host.positions)
    dim = (layer.window or layer.entries).dim
    q = torch.randn(tokens, heads, dim, device=device).to(dtype)
    selected = None
    if count is not None:
        selected = picks_for(tokens, count, max(lengths) // layer.entries.ratio, device)
    sinks = torch.randn(heads, device=device) * 3 if sink else None
    got = found.ops.attend(found.pools, 0, found.index, q, selected, sink=sinks, scale=0.11)
    again = found.ops.attend(found.pools, 0, found.index, q, selected, sink=sinks, scale=0.11)
    want = attention(found, q, selected, sinks, 0.11)
    problem = off(got.out, want[0], "attention") or off(got.lse, want[1], "attention")
    if not (torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)):
        problem += "; a repeat differs"
    if rope is not None:
        back = found.ops.attend(found.pools, 0, found.index, q, selected, sink=sinks, scale=0.11, rope=rope)
        want = turned_back(got.out, found.host.positions, rope)
        problem += off(back.out, want, "rope") + ("" if torch.equal(back.lse, got.lse) else "; lse differs")
    yield f"attend {what}", problem


def turned_alone(device: str) -> Iterator[Problem]:
    """Outputs of others' kernels turned back in place: a number of heads and of pairs that fill no tile."""
    positions = torch.tensor([0, 5, -1, 1048570], dtype=torch.int32, device=device)
    rope = Rope(dim=12, theta=10000.0)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.randn(4, 19, 40, device=device).to(dtype)
        want = turned_back(out, positions, rope)
        launch.calls().inverse_rope_rows(out, positions, torch.tensor(rope.inverse_frequencies, device=device))
        yield f"outputs turned back in place, {dtype}", off(out, want, "rope")


def turned_after_flash(device: str) -> Iterator[Problem]:
    """What FlashMLA answers is turned back, and its +inf mended, by one launch; plain operations stand in for it."""
    found = scene(layer_of("v4_584", None, span=20, rows=24), [30, 3], [2, 1], device)
    found.ops.attention_kernels = "flash_mla"
    q = torch.randn(len(found.host.positions), 3, 512, device=device).bfloat16()

    plain = found.plain.attend(found.pools, 0, found.index, q)
    stand_in = ModuleType("flash_mla")
    stand_in.flash_mla_with_kvcache = lambda *_, **__: (plain.out[:, None].clone(), plain.lse.abs()[:, :, None].clone())
    given = found.pools, 0, found.index, q
    with (
        patch.dict(sys.modules, flash_mla=stand_in),
        patch.object(flash, "fits", lambda *_: True),
        patch.object(flash, "metadata", lambda *_: None),
    ):
        out, back = (found.ops.attend(*given, rope=rope) for rope in (None, V4_ROPE))
    yield (
        "attend, turned back after FlashMLA",
        off(back.out, turned_back(out.out, found.host.positions, V4_ROPE), "rope"),
    )
    none = plain.lse.isneginf()
    same = all(torch.equal(one.lse, torch.where(none, plain.lse, plain.lse.abs())) for one in (out, back))
    yield "lse after FlashMLA", "" if same and bool(none.any()) else "lse differs"


def captured(device: str) -> Iterator[Problem]:
    """A graph of attention that turns its outputs back, replayed for earlier queries: split, whole, every entry."""
    for what, ratio, count, requests in (
        ("CSA, split", 4, 512, 3), ("CSA, whole", 4, 64, 300), ("HCA, split", 128, None, 3),
    ):  # fmt: skip
        layer = layer_of("v4_584", "v4_584", ratio=ratio)
        lengths = [260 + 7 * n % 700 for n in range(requests)]
        found = scene(layer, lengths, [1] * requests, device)
        found.ops.attention_kernels = "triton"
        q = torch.randn(len(found.host.positions), 64, 512, device=device).bfloat16()
        selected = None if count is None else picks_for(len(q), count, max(lengths) // ratio, device)
        fixed = found.index._replace(positions=found.index.positions.clone())
        given = found.pools, 0, fixed, q, selected
        for _ in range(2):
            found.ops.attend(*given, rope=V4_ROPE)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = found.ops.attend(*given, rope=V4_ROPE)
        # Earlier queries of the same requests, by less than the ring has spare rows: they see and turn by less.
        fixed.positions.copy_(torch.where(fixed.positions >= 3, fixed.positions - 3, fixed.positions))
        graph.replay()
        want = found.ops.attend(*given, rope=V4_ROPE)
        same = torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
        at = turned_back(found.ops.attend(*given).out, fixed.positions, V4_ROPE)
        yield f"outputs turned back in a graph, {what}", ("" if same else "eager differs; ") + off(got.out, at, "rope")


def flash_rows(device: str) -> Iterator[Problem]:
    """Rows that FlashMLA is given, from the kernel and from torch's operations."""
    for what, layer, count in (
        ("picks", layer_of("v4_584", "v4_584", span=20, rows=24), 70),
        ("every entry", layer_of("v4_584", "v4_584", span=20, rows=24), None),
        ("window alone", layer_of("v4_584", None, span=70, rows=72), None),
    ):
        found = scene(layer, [90, 11, 1], [2, 1, 1], device)
        tokens = len(found.host.positions)
        picks = None if count is None else picks_for(tokens, count, 22, device)
        given = flash.served(found.ops, 0), found.index, picks
        (window, entries), (want, wanted) = (flash.rows_of(ops, *given) for ops in (found.ops, found.plain))
        same = torch.equal(window, want) and (wanted is None or torch.equal(entries, wanted))
        yield f"rows for FlashMLA, {what}", "" if same else "rows differ"


@triton.jit
def chunks_kernel(out_ptr, rows_ptr, R: tl.constexpr, S: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr):
    """COUNT canonical rows as the products take them; one of them is not valid."""
    n = tl.arange(0, COUNT)
    valid = n != 3
    at = chunks.row_pointers(tl.zeros_like(n), n, rows_ptr, rows_ptr, rows_ptr, R)
    raw, scales = chunks.load_row(at, valid, R, S)
    count: tl.constexpr = S.chunks
    for c in tl.static_range(count):
        x = chunks.decode_chunk(raw[c], scales, valid, c * S.chunk, R, S, NATIVE)
        channel = c * S.chunk + tl.arange(0, S.chunk)
        tl.store(out_ptr + n[:, None] * S.dim + channel[None, :], x.to(tl.float32))


def rows_in_words(device: str) -> Iterator[Problem]:
    """e2m1 rows taken to bf16 eight codes at a time, by the hardware's pairs and without: the reference's numbers."""
    for name in ("v32_nvfp4_432", "v4_nvfp4_384", "mxfp4_368", "v41_fp4_288"):
        dim = FORMATS[name].dim or 0
        spec = CacheSpec(layers=[LayerSpec(entries=Entries(dim=dim, ratio=1, format=name))])
        (region,) = plan_cache(spec, max_requests=1, max_tokens=256).region(0, "entries")
        record, _ = recorded(region)
        record = own_record(record, region.format)
        values = torch.randn(8, dim) * torch.exp2(torch.randint(-6, 6, (8, 1)).float())
        values[1, 17], values[5, 0] = torch.nan, torch.inf
        stored = encoding.encode(name, values.numpy())
        want = encoding.decode(name, stored, dim).astype(np.float32)
        want[3] = 0
        cut = Parts(dim, 64, dim // 64, (1,) * (dim // 64), full=False, narrow=True)
        for native in (False, True)[: 1 if device == "cpu" else 2]:
            out = torch.zeros(8, dim, device=device)
            chunks_kernel[(1,)](out, torch.from_numpy(stored).to(device), record, cut, 8, native)
            same = np.array_equal(out.cpu().numpy(), want, equal_nan=True)
            yield f"{name} in words, {'native' if native else 'by bits'}", "" if same else "numbers differ"


SMALL = {"dim": 64, "span": 9, "rows": 12}


def small(device: str) -> Iterator[Problem]:
    """Cases for the interpreter and the sanitizer."""
    yield from rows_in_words(device)
    yield from flash_rows(device)
    yield from turned_alone(device)
    yield from turned_after_flash(device)
    v4, plain = layer_of("v4_584", "v4_584", span=20, rows=24), layer_of("bf16", "bf16", **SMALL)
    yield from check("v4_584, picks", v4, [30, 3], [1, 1], device, heads=5, count=9, rope=V4_ROPE)
    yield from check("v4_584, picks shared out", v4, [30], [1], device, heads=5, count=9, rope=V4_ROPE)
    yield from check("v4_584, all entries, drafts", v4, [45, 20], [2, 1], device, heads=3, rope=V4_ROPE)
    for dtype in (torch.float32, torch.bfloat16):
        given = {"count": 5, "dtype": dtype, "rope": FEW_CHANNELS}
        yield from check(f"bf16 rows, {dtype}", plain, [40, 1], [2, 1], device, heads=17, **given)
    yield from check(
        "nothing selected, no window", layer_of(None, "bf16", **SMALL), [30, 2], [1, 1], device, heads=2, count=0,
        rope=FEW_CHANNELS,
    )  # fmt: skip
    yield from check(
        "one request of a token, entries alone", layer_of(None, "bf16", **SMALL), [1, 30], [1, 1], device, heads=2
    )
    alone = layer_of("bf16", None, **SMALL)
    yield from check("window alone", alone, [30, 2], [2, 1], device, heads=2, rope=FEW_CHANNELS)
    yield from check(
        "formats differ", layer_of("v41_528", "v41_fp4_288", span=9, rows=12), [40], [1], device, heads=2, count=6
    )
    yield from check("mixed cuts", layer_of("v4_584", "bf16", span=9, rows=12), [40], [1], device, heads=2, count=6)
    yield from check("row_580", layer_of("row_580", "row_580", span=9, rows=12), [40], [1], device, heads=2, count=6)
    mla = layer_of(None, "v32_nvfp4_432", dim=576, ratio=1)
    yield from check("MLA in four bits", mla, [40, 3], [2, 1], device, heads=2, sink=False)
    yield from own_rows(
        "v4_584", layer_of("v4_584", "v4_584", span=9, rows=12), [40, 11], [25, 11], device, heads=2, count=4
    )
    yield from own_rows("bf16", layer_of("bf16", "bf16", **SMALL), [25, 11], [14, 1], device, heads=2, count=None)
    for what, count in (("picks", 6), ("all entries", None)):
        cut = layer_of("v4_584", "v4_584", span=9, rows=12)
        yield from own_rows(f"decoded {what}", cut, [40, 11], [25, 11], device, heads=2, count=count, fewest=0.0)


def own_rows(
    what: str, layer, lengths, news, device, *, heads, count, dtype=torch.bfloat16, fewest=None
) -> Iterator[Problem]:
    """A chunk whose rows the ring does not hold yet, against the plain verb; ``fewest`` visits of decoded entries."""
    found = scene(
        layer, [length - new for length, new in zip(lengths, news, strict=True)], [0] * len(news), device, pad=0
    )
    full = scene(layer, lengths, news, device)
    pools = {**full.pools}
    # The ring as it was before the step: rows of older positions, everything else 0xFF.
    for name in pools:
        if ".window." in name:
            pools[name] = found.pools[name]
    tokens = len(full.host.positions)
    dim = layer.window.dim
    rows = torch.randn(tokens, dim, device=device).to(dtype)
    q = torch.randn(tokens, heads, dim, device=device).to(dtype)
    selected = None if count is None else picks_for(tokens, count, max(lengths) // layer.entries.ratio, device)
    if fewest is not None:
        full.ops.fewest_visits = fewest
    got = full.ops.attend(pools, 0, full.index, q, selected, rows=rows)
    back = full.ops.attend(pools, 0, full.index, q, selected, rows=rows, rope=FEW_CHANNELS)
    want = full.plain.attend(pools, 0, full.index, q.float(), selected, rows=rows)
    problem = off(got.out, want.out.double(), "attention") or off(got.lse, want.lse.double(), "attention")
    problem += off(back.out, turned_back(got.out, full.host.positions, FEW_CHANNELS), "rope")
    yield f"attend, chunk not yet in the ring: {what}", problem
