"""Attention with kernels against fp64: formats, heads, drafts, empty sets, long contexts."""

from collections.abc import Iterator

import torch
from reading_scene import attention, off, scene

from kvcore.backends.torch_triton import flash
from kvcore.spec import Entries, LayerSpec, Window

Problem = tuple[str, str]


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
    **options,
) -> Iterator[Problem]:  # fmt: skip
    """One case: ``count`` picks a query, None for every visible entry."""
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
    yield f"attend {what}", problem


def flash_rows(device: str) -> Iterator[Problem]:
    """Rows that FlashMLA is given, from the kernel and from torch's operations."""
    for what, layer, count in (
        ("picks", layer_of("v4_584", "v4_584", span=20, rows=24), 70),
        ("window alone", layer_of("v4_584", None, span=70, rows=72), None),
    ):
        found = scene(layer, [90, 11, 1], [2, 1, 1], device)
        tokens = len(found.host.positions)
        picks = None if count is None else picks_for(tokens, count, 22, device)
        given = found.pools, 0, found.index, picks
        (window, entries, *_), (want, wanted, *_) = (flash.rows_of(ops, *given) for ops in (found.ops, found.plain))
        same = torch.equal(window, want) and (wanted is None or torch.equal(entries, wanted))
        yield f"rows for FlashMLA, {what}", "" if same else "rows differ"


SMALL = {"dim": 64, "span": 9, "rows": 12}


def small(device: str) -> Iterator[Problem]:
    """Cases for the interpreter and the sanitizer."""
    yield from flash_rows(device)
    v4, plain = layer_of("v4_584", "v4_584", span=20, rows=24), layer_of("bf16", "bf16", **SMALL)
    yield from check("v4_584, picks", v4, [30, 3], [1, 1], device, heads=5, count=9)
    yield from check("v4_584, all entries, drafts", v4, [45, 20], [2, 1], device, heads=3)
    for dtype in (torch.float32, torch.bfloat16):
        yield from check(f"bf16 rows, {dtype}", plain, [40, 1], [2, 1], device, heads=17, count=5, dtype=dtype)
    yield from check(
        "nothing selected, no window", layer_of(None, "bf16", **SMALL), [30, 2], [1, 1], device, heads=2, count=0
    )
    yield from check(
        "one request of a token, entries alone", layer_of(None, "bf16", **SMALL), [1, 30], [1, 1], device, heads=2
    )
    yield from check("window alone", layer_of("bf16", None, **SMALL), [30, 2], [2, 1], device, heads=2)
    yield from check(
        "formats differ", layer_of("v41_528", "v41_fp4_288", span=9, rows=12), [40], [1], device, heads=2, count=6
    )
    yield from check("mixed cuts", layer_of("v4_584", "bf16", span=9, rows=12), [40], [1], device, heads=2, count=6)
    yield from check("row_580", layer_of("row_580", "row_580", span=9, rows=12), [40], [1], device, heads=2, count=6)
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
    want = full.plain.attend(pools, 0, full.index, q.float(), selected, rows=rows)
    problem = off(got.out, want.out.double(), "attention") or off(got.lse, want.lse.double(), "attention")
    yield f"attend, chunk not yet in the ring: {what}", problem
