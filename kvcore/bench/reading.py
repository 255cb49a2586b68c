"""What is timed of the verbs that read: index scores, top-k, decode attention, in DeepSeek-V4 shapes."""

from collections.abc import Callable, Iterator

import torch

from kvcore.backends.torch_triton import launch
from kvcore.bench.workloads import BLOCK, DIM, ENTRY_BYTES, INDEX_DIM, RANDOM, Setting, Workload, fill, rotating
from kvcore.kernels.triton.launches.indexer import RUN
from kvcore.spec import FORMATS, Entries, IndexKeys, LayerSpec, Rope, Window
from kvcore.step import StepRequest

HEADS, TOPK = 64, 512
SHAPES = ((1, 16384), (1, 262144), (64, 16384), (64, 262144))
"""(requests, keys of each)."""

SCORES = {
    ("index_fp8_132", "e4m3"): ((3.6, 3.6), (14.2, 13.5), (41.8, 39.8), (591.0, 563.0)),
    ("index_fp8_132", "bf16"): ((5.4, 3.6), (20.3, 13.5), (59.7, 39.8), (845.0, 563.0)),
    ("index_fp4_68", "e4m3"): ((None, None), (None, None), (35.0, None), (500.0, None)),
    ("index_fp4_68", "bf16"): ((4.0, 17.1), (20.0, 217.0), (80.0, 849.0), (1100.0, 13389.0)),
    ("index_fp4_68_h", "bf16"): ((None, None),) * 4,
}
"""Formats of keys and queries: (goal, best peer's time) of each shape. DeepGEMM, FP8's best, takes e4m3 queries."""

TOP = ((7.6, 6.3), (14.0, 11.7), (8.9, 7.4), (57.4, 47.8))
BEST = {
    (1, 262144): (34.0, 228.7),
    (1, 1048576): (None, None),
    (64, 16384): (88.9, 856.4),
    (64, 65536): (None, None),
    (64, 262144): (1157.4, 13436.8),
}
"""(goal, best peers' time) of scores and top-k together: the sums."""
CSA = ((2, 13.0, 13.6), (64, 44.0, 44.1), (128, 60.0, 45.4))
HCA = ((2, 16.0, 15.6), (64, 60.0, 59.5), (128, 95.0, 72.2))


def reading_workloads(device: str) -> Iterator[Callable[[], Workload]]:
    """Makers of all rows."""
    for formats, times in SCORES.items():
        for (count, keys), (goal, peer) in zip(SHAPES, times, strict=True):
            yield lambda a=(*formats, count, keys, goal, peer): index_scores(device, *a)
    for (count, keys), (goal, peer) in zip(SHAPES, TOP, strict=True):
        yield lambda a=(count, keys, goal, peer): select(device, *a)
    for (count, keys), (goal, peer) in BEST.items():
        for whole in (True, False):
            yield lambda a=(count, keys, whole, goal, peer): index_select(device, "index_fp4_68", *a)
    for count, goal, peer in CSA:
        yield lambda a=(count, goal, peer): attend_selected(device, *a)
    for count, goal, peer in HCA:
        yield lambda a=(count, goal, peer): attend_all(device, *a)
    for turned in ("inside", "after"):
        yield lambda turned=turned: attend_selected(device, 64, None, None, turned=turned)
    yield lambda: attend_selected(device, 64, None, None, drafts=4)
    # Two queries a request: FlashMLA's times.
    yield lambda: attend_selected(device, 128, None, 84.7, drafts=2)
    yield lambda: attend_all(device, 128, None, 134.6, drafts=2)
    yield lambda: attend_selected(device, 64, None, None, heads=128)
    for ratio in (4, 128):
        yield lambda ratio=ratio: attend_chunk(device, ratio, 1024, 65536)


def decode_rows(count: int, tokens: int, drafts: int = 1) -> list[StepRequest]:
    """``count`` requests of ``tokens`` tokens, the last ``drafts`` new, in shuffled blocks."""
    per = tokens // BLOCK
    order = RANDOM.permutation(count * per).tolist()
    return [
        StepRequest(slot=n, start=tokens - drafts, new=drafts, blocks=tuple(order[n * per : n * per + per]))
        for n in range(count)
    ]


def keys_setting(device: str, format: str, count: int, keys: int) -> tuple[Setting, int]:
    """(layers of index keys, bytes that scores of one must read and write)."""
    nbytes = count * (keys * ((FORMATS[format].row_bytes or 0) + 4) + HEADS * (INDEX_DIM * 2 + 4))
    layer = LayerSpec(
        entries=Entries(dim=8, ratio=4, format="bf16"),
        index_keys=IndexKeys(dim=INDEX_DIM, ratio=4, heads=HEADS, topk=TOPK, format=format),
    )
    setting = Setting(layer, decode_rows(count, 4 * keys), count * keys * 4 // BLOCK, rotating(nbytes), device)
    fill(setting)
    return setting, nbytes


def index_scores(
    device: str, format: str, queries: str, count: int, keys: int, goal: float | None, peer: float | None
) -> Workload:
    """One query a request over all its keys; ``queries`` bf16 or e4m3."""
    setting, nbytes = keys_setting(device, format, count, keys)
    codes = queries == "e4m3"
    q = setting.random(count, HEADS, INDEX_DIM, dtype=torch.float8_e4m3fn if codes else torch.bfloat16)
    weights = setting.random(count, HEADS, dtype=torch.float32)
    calls = [
        lambda n=n: setting.ops.index_scores(setting.pools, n, setting.index, q[n], weights[n], columns=keys)
        for n in range(setting.layers)
    ]
    name = f"scores {format}{', e4m3 queries' * codes}, {count} × {keys // 1024} K keys"
    return Workload(name, nbytes, calls, goal, peer)


def index_select(
    device: str, format: str, count: int, keys: int, whole: bool, goal: float | None, peer: float | None
) -> Workload:
    """Scores and top-k together: ``whole`` with all scores in memory between, else in one go."""
    setting, nbytes = keys_setting(device, format, count, keys)
    ops, pools = setting.ops, setting.pools
    q = setting.random(count, HEADS, INDEX_DIM)
    weights = setting.random(count, HEADS, dtype=torch.float32)

    def select(n: int) -> torch.Tensor:
        if whole:
            return ops.select(ops.index_scores(pools, n, setting.index, q[n], weights[n], columns=keys), TOPK)
        return ops.index_select(pools, n, setting.index, q[n], weights[n], TOPK, columns=keys, run=RUN)

    select(0)
    kept = sum(buffer.nbytes for buffer in ops.workspaces.buffers()) + whole * count * keys * 4
    calls = [lambda n=n: select(n) for n in range(setting.layers)]
    name = f"scores, top {TOPK} {'after' if whole else 'in one go'}, {format}, {count} × {keys // 1024:,} K keys"
    return Workload(name, nbytes - count * keys * 4, calls, goal, peer, kept=kept)


def select(device: str, count: int, keys: int, goal: float, peer: float) -> Workload:
    """The best 512 of given scores."""
    nbytes = count * (keys + TOPK) * 4
    setting = Setting(LayerSpec(window=Window(dim=8, window=4, format="bf16")), [], 0, 1, device)
    given = [torch.randn(count, keys, device=device) for _ in range(rotating(nbytes))]
    calls = [lambda scores=scores: setting.ops.select(scores, TOPK) for scores in given]
    return Workload(f"top {TOPK}, {count} × {keys // 1024} K", nbytes, calls, goal, peer)


def attend_selected(
    device: str,
    count: int,
    goal: float | None,
    peer: float | None,
    *,
    drafts: int = 1,
    heads: int = HEADS,
    turned: str = "",
) -> Workload:
    """CSA decode: the window and 512 of 4,096 entries.

    Outputs are turned back by their positions (inverse RoPE) if ``turned``: ``inside`` the verb, or ``after`` it by a
    launch of its own.
    """
    entries, tokens = 4096, count * drafts
    nbytes = tokens * ((TOPK + 128) * ENTRY_BYTES + 4 * heads * DIM)
    layer = LayerSpec(window=Window(dim=DIM, window=128, rows=128 + drafts), entries=Entries(dim=DIM, ratio=4))
    rows = decode_rows(count, 4 * entries, drafts)
    setting = Setting(layer, rows, count * 4 * entries // BLOCK, min(6, rotating(nbytes)), device)
    fill(setting)
    q = setting.random(tokens, heads, DIM)
    sink = torch.randn(heads, device=device)
    selected = [
        torch.stack([torch.randperm(entries - 1, device=device)[:TOPK] for _ in range(tokens)]).int()
        for _ in range(setting.layers)
    ]
    rope = torch.tensor(Rope(dim=64, theta=160000.0).inverse_frequencies, dtype=torch.float32, device=device)

    def attend(n: int) -> None:
        inside = rope if turned == "inside" else None
        found = setting.ops.attend(setting.pools, n, setting.index, q[n], selected[n], sink=sink, rope=inside)
        if turned == "after":
            launch.calls().inverse_rope_rows(found.out, setting.index.positions, rope)

    calls = [lambda n=n: attend(n) for n in range(setting.layers)]
    extra = (f", {drafts} tokens each" if drafts > 1 else "") + (f", {heads} heads" if heads != HEADS else "")
    extra += f", turned back {turned}" if turned else ""
    return Workload(f"CSA attend 128 + {TOPK}, B = {count}{extra}", nbytes, calls, goal, peer)


def attend_all(device: str, count: int, goal: float | None, peer: float | None, *, drafts: int = 1) -> Workload:
    """HCA decode: the window and 1,024 entries, two to a block."""
    entries, tokens = 1024, count * drafts
    nbytes = tokens * ((entries + 128) * ENTRY_BYTES + 4 * HEADS * DIM)
    layer = LayerSpec(window=Window(dim=DIM, window=128, rows=128 + drafts), entries=Entries(dim=DIM, ratio=128))
    rows = decode_rows(count, 128 * entries, drafts)
    setting = Setting(layer, rows, count * 128 * entries // BLOCK, min(6, rotating(nbytes)), device)
    fill(setting)
    q = setting.random(tokens, HEADS, DIM)
    sink = torch.randn(HEADS, device=device)
    calls = [
        lambda n=n: setting.ops.attend(setting.pools, n, setting.index, q[n], sink=sink) for n in range(setting.layers)
    ]
    extra = f", {drafts} tokens each" if drafts > 1 else ""
    return Workload(f"HCA attend 128 + {entries:,}, B = {count}{extra}", nbytes, calls, goal, peer)


def attend_chunk(device: str, ratio: int, new: int, tokens: int) -> Workload:
    """Prefill: a chunk of one request's prompt, 64 heads, over the window and 512 picks (ratio 4) or all entries.

    The chunk's own rows are not in the ring yet.
    """
    entries = tokens // ratio
    keys = 128 + (TOPK if ratio == 4 else entries)
    nbytes = new * 4 * HEADS * DIM + (128 + new + entries) * ENTRY_BYTES
    layer = LayerSpec(window=Window(dim=DIM, window=128), entries=Entries(dim=DIM, ratio=ratio))
    setting = Setting(layer, decode_rows(1, tokens, new), tokens // BLOCK, 4, device)
    fill(setting)
    q, rows = setting.random(new, HEADS, DIM), setting.random(new, DIM)
    sink = torch.randn(HEADS, device=device)
    selected = [
        torch.randint(0, entries - new // ratio, (new, TOPK), dtype=torch.int32, device=device) if ratio == 4 else None
        for _ in range(setting.layers)
    ]
    calls = [
        lambda n=n: setting.ops.attend(setting.pools, n, setting.index, q[n], selected[n], rows=rows[n], sink=sink)
        for n in range(setting.layers)
    ]
    name = f"{'CSA' if ratio == 4 else 'HCA'} attend, {new:,} of {tokens:,} tokens"
    return Workload(name, nbytes, calls, None, None, flops=4 * new * HEADS * DIM * keys)
