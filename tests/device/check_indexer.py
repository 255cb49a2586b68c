"""Index scores and top-k with kernels: against fp64, and against a sort."""

from collections.abc import Iterator
from functools import partial

import torch

from kvcore.backends.torch_triton import indexer, run_triton
from kvcore.kernels.triton.launches import indexer as launches
from kvcore.spec import Entries, IndexKeys, LayerSpec
from tests.device.reading_scene import off, scene, scores

Problem = tuple[str, str]
E4M3 = torch.float8_e4m3fn


def keys_layer(format: str, *, ratio: int = 4, dim: int = 128, topk: int = 512) -> LayerSpec:
    """A layer of index keys; its entries are as small as they can be."""
    keys = IndexKeys(dim=dim, ratio=ratio, heads=64, topk=topk, format=format)
    return LayerSpec(entries=Entries(dim=16, ratio=ratio, format="bf16"), index_keys=keys)


def check(
    what: str,
    layer: LayerSpec,
    lengths,
    news,
    device,
    *,
    heads=64,
    dtype=torch.bfloat16,
    weights="any",
    runs=3,
    **options,
) -> Iterator[Problem]:
    """Scores against fp64, then picks of those scores, of all and in ``runs`` runs that keep their best.

    ``weights``: any, negative, or queries that are zero, or large: their sums are close to what fp32 holds.
    """
    found = scene(layer, lengths, news, device, **options)
    tokens, keys = len(found.host.positions), layer.index_keys
    q = torch.randn(tokens, heads, keys.dim, device=device).to(dtype)
    w = torch.randn(tokens, heads, device=device)
    if weights == "negative":
        w = -w.abs()
    if weights == "zero queries":
        q[::2] = 0
    if weights == "large queries":
        q[::2] *= 2.0**110
    columns = max(length // keys.ratio for length in lengths)
    got = found.ops.index_scores(found.pools, 0, found.index, q, w, columns=columns)
    yield f"scores {what}", off(got, scores(found, q, w, columns), f"scores{' of e4m3' * (dtype == E4M3)}")
    again = found.ops.index_scores(found.pools, 0, found.index, q, w, columns=columns)
    yield f"scores {what}, repeated", "" if torch.equal(got, again) else "a repeat differs"
    k = min(keys.topk, max(4, columns // 3))
    picks = found.ops.select(got, k)
    yield f"picks {what}", different(picks, indexer.select(got, k))
    run = max(16, -(-columns // runs))
    fused = found.ops.index_select(found.pools, 0, found.index, q, w, k, columns=columns, run=run)
    yield f"picks {what}, in one go", alike(fused, picks, got) if dtype == E4M3 else different(fused, picks)
    again = found.ops.index_select(found.pools, 0, found.index, q, w, k, columns=columns, run=run)
    yield f"picks {what}, in one go, repeated", different(again, fused)


def of_wide_tables(what: str, layer: LayerSpec, lengths, device, *, heads=64, **options) -> Iterator[Problem]:
    """A token of many requests picks the same in tables wider than what it sees, with room for all scores and few."""
    found = scene(layer, lengths, [1] * len(lengths), device, **options)
    tokens, columns = len(found.host.positions), max(lengths) // layer.index_keys.ratio
    q = torch.randn(tokens, heads, layer.index_keys.dim, device=device).to(torch.bfloat16)
    w = torch.randn(tokens, heads, device=device)
    given = found.pools, 0, found.index, q, w
    k = min(layer.index_keys.topk, max(4, columns // 3))
    picks = found.ops.select(found.ops.index_scores(*given, columns=columns), k)
    choose = partial(found.ops.index_select, *given, k)
    fewer = found.ops.select(found.ops.index_scores(*given, columns=columns - 3), k)
    far = columns + launches.NARROW
    yield f"{what}, of a wide table", different(choose(columns=far), picks)
    held = launches.NARROW, launches.MOST_SCORES
    launches.NARROW, launches.MOST_SCORES = columns // 2, 0
    try:
        # Of another width: calls like one before launch what that did.
        yield f"{what}, of a wide table with little room", different(choose(columns=far + 1), picks)
        yield f"{what}, of the first columns", different(choose(columns=columns - 3), fewer)
    finally:
        launches.NARROW, launches.MOST_SCORES = held


def different(picks: torch.Tensor, want: torch.Tensor) -> str:
    """How many picks differ in which rows."""
    wrong = picks != want
    return f"{int(wrong.sum())} picks differ in {int(wrong.any(dim=1).sum())} rows" if bool(wrong.any()) else ""


def alike(picks: torch.Tensor, want: torch.Tensor, scores: torch.Tensor) -> str:
    """What is wrong with picks of scores that tensor cores sum in another way: those picked are as good, and once."""
    ordered = picks.sort(dim=1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        return "an entry is picked twice"
    given, wanted = (scores.gather(1, each.clamp(min=0).long()).where(each >= 0, -torch.inf) for each in (picks, want))
    return off(given, wanted.double(), "scores of e4m3")


def given_scores(device: str, n: int, rows: int = 6) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows that make a top-k stumble."""
    normal = torch.randn(rows, n, device=device)
    yield "random", normal
    yield "ties", (normal * 2).round()
    yield "one value", torch.full_like(normal, -0.5)
    yield "zeros of both signs", torch.where(normal > 0, 0.0, -0.0)
    yield "ascending", torch.arange(n, device=device).float().expand(rows, n).contiguous()
    yield "nothing", torch.full_like(normal, -torch.inf)
    holes = normal.clone()
    holes[:, ::3] = -torch.inf
    holes[:, 1::5] = torch.nan
    holes[0, 2:] = -torch.inf
    yield "holes and NaN", holes
    yield "few columns", torch.where(torch.arange(n, device=device) < n // 16, normal, -torch.inf)
    crowded = normal * 1e-3
    crowded[:, n // 2 : n // 2 + n // 8] += 1
    yield "the best side by side", crowded
    yield "few hands hold the best", few_hands(device, n, rows)


def few_hands(device: str, n: int, rows: int) -> torch.Tensor:
    """All columns of 64 of 1,024 hands are high: many more than are asked for reach the bound that the hands give."""
    return torch.randn(rows, n, device=device) + 100.0 * (torch.arange(n, device=device) % 1024 < 64)


def check_select(device: str, sizes: list[tuple[int, int]], ops, *, rows: int = 6) -> Iterator[Problem]:
    """``select`` against a stable sort."""
    for n, k in sizes:
        for what, given in given_scores(device, n, rows):
            yield f"top {k} of {rows} × {n:,}: {what}", different(ops.select(given, k), indexer.select(given, k))


def long_runs(device: str) -> Iterator[Problem]:
    """More keys in a run than its list has room for."""
    layer, held = keys_layer("index_fp8_132", ratio=1, topk=40), launches.ROUND
    launches.ROUND = 128
    try:
        for what, weights in (("any", "any"), ("equal", "zero queries")):
            yield from check(f"of a long run, {what}", layer, [500], [1], device, heads=2, weights=weights, runs=1)
    finally:
        launches.ROUND = held


def of_long_queries(device: str) -> Iterator[Problem]:
    """A program a query, for those that see more than 33 entries."""
    layer, k, columns, least = keys_layer("index_fp4_68_h", topk=40), 40, 170, 33
    found = scene(layer, [4 * columns, 4 * least + 3, 4 * least + 4], [1, 1, 1], device, block_tokens=16)
    tokens = len(found.host.positions)
    q, w = torch.randn(tokens, 5, 128, device=device).to(torch.bfloat16), torch.randn(tokens, 5, device=device)
    picks = indexer.select(found.ops.index_scores(found.pools, 0, found.index, q, w, columns=columns), k)
    (part,) = found.ops.records[0, "index_keys"]
    pools, room = [found.pools[name] for name in part.names], launches._list_room(k)
    given = launches.BOUND[part.number].given(pools)
    pairs = torch.zeros(tokens, room, dtype=torch.int64, device=device)
    held, rotated = (torch.full(shape, torch.nan, device=device) for shape in ((tokens, launches.ROUND), q.shape))
    at = found.index.positions, found.index.request_index, found.index.block_table
    asked = launches._rotated(run_triton, q, rotated.to(q.dtype), part.number)
    for first in (least, columns):
        out = torch.full((tokens, k), -7, dtype=torch.int32, device=device)
        kernel = launches._long_scores(part.number, 5, (run_triton.native(q), False, 0), 4, room, launches.kept(k))
        numbers = 5, columns, at[2].shape[1], first, k, k + k // 4
        run_triton.run(kernel, (tokens,), (out, pairs, held, asked, w, *given, *at), numbers)
        seen = ((at[0] + 1) // 4).where(at[1] >= 0, 0)
        want = torch.where((seen > first)[:, None], picks, -7)
        yield f"queries that see more than {first}", different(out, want)


def many_rows(device: str, n: int, k: int, ops, *, rows: int = 70) -> Iterator[Problem]:
    """Equal scores by the dozen, and rows with fewer than are asked for."""
    given = (torch.randn(rows, n, device=device) * 20).round()
    given[::3, 2:] = -torch.inf
    yield f"top {k} of {n:,}: many rows", different(ops.select(given, k), indexer.select(given, k))


def of_codes(device: str) -> Iterator[Problem]:
    """One query in e4m3 a request: FP8 keys, and FP4 keys as calls of many scores take them."""
    held, launches.FEWEST_NIBBLES = launches.FEWEST_NIBBLES, 0
    try:
        for heads, lengths in ((64, [16411, 5, 1, 1030]), (5, [259, 3, 1])):
            given = {"heads": heads, "dtype": E4M3}
            for format in ("index_fp8_132", "index_fp4_68"):
                what, layer = f"one of e4m3, {format}", keys_layer(format)
                yield from check(what, layer, lengths, [1] * len(lengths), device, **given)
            yield from check(
                "uneven keys", keys_layer("index_fp4_68"), lengths[:2], [1, 1], device, uneven=12.0, **given
            )
    finally:
        launches.FEWEST_NIBBLES = held


def small(device: str) -> Iterator[Problem]:
    """Cases for the interpreter and the sanitizer."""
    for format in ("index_fp8_132", "index_fp4_68_h", "index_fp8_132_fp32scale", "index_nvfp4", "bf16"):
        layer = keys_layer(format, topk=16)
        yield from check(format, layer, [151, 3, 1], [2, 1, 1], device, heads=5, block_tokens=16)
    yield from check("fp32 queries", keys_layer("index_fp4_68"), [90], [3], device, heads=3, dtype=torch.float32)
    yield from check("e4m3 queries", keys_layer("index_fp8_132"), [90], [3], device, heads=3, dtype=E4M3)
    yield from check("many queries", keys_layer("index_fp4_68"), [90, 20], [5, 2], device, heads=3)
    for weights in ("negative", "zero queries", "large queries"):
        yield from check(weights, keys_layer("index_fp8_132"), [90, 20], [1, 1], device, heads=3, weights=weights)
    yield from long_runs(device)
    yield from of_long_queries(device)
    yield from check("of many runs", keys_layer("bf16", ratio=1, topk=520), [640], [1], device, heads=1, runs=40)
    found = scene(keys_layer("bf16"), [8], [1], device)
    yield from check_select(device, [(300, 7), (5, 9), (1, 1), (2100, 64)], found.ops)
    yield from many_rows(device, 300, 37, found.ops, rows=2)
    if torch.device(device).type == "cuda":  # a program each fills a GPU, not the interpreter's one
        yield from of_codes(device)
        layer = keys_layer("index_fp4_68_h", topk=16)
        yield from check("a token of many requests", layer, [151] * 70, [1] * 70, device, heads=5, block_tokens=16)
    given = few_hands(device, 61_440, 1)
    yield (
        "top 64 of 61,440: no room for all pairs",
        different(found.ops.select(given, 64), indexer.select(given, 64)),
    )
