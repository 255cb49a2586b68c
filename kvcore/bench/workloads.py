"""What is timed: DeepSeek-V4 shapes, one layer each, on buffers that rotate so that no call meets them in the L2."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window
from kvcore.step import StepRequest, build_index

DIM, INDEX_DIM, BLOCK = 512, 128, 256
RANDOM = np.random.default_rng()
ENTRY_BYTES = 584


class Workload(NamedTuple):
    """One row of the table.

    Attributes:
        name: verb and shape.
        nbytes: bytes that must be read and written once.
        calls: the same work on different buffers.
        goal: graph time to reach in µs on a GPU that copies 4,122 GB/s, or None; ``peer`` the best peer's there.
        flops: of a call's matrix products, where they decide more than bytes do.
        kept: bytes that a call writes beside its output.
    """

    name: str
    nbytes: int
    calls: Sequence[Callable[[], object]]
    goal: float | None
    peer: float | None
    flops: int = 0
    kept: int = 0


class Setting:
    """Layers with equal specs, an index and inputs; every call takes the next layer's pools."""

    def __init__(
        self,
        layer: LayerSpec,
        rows: Sequence[StepRequest],
        blocks: int,
        layers: int,
        device: str,
        *,
        layout: str = "packed",
        drafts: int = 0,
    ) -> None:
        spec = CacheSpec(layers=(layer,) * layers, block_tokens=BLOCK)
        slots = max((row.slot for row in rows), default=0) + 1
        self.plan = plan_cache(
            spec, max_requests=slots, max_tokens=max(1, blocks) * BLOCK, max_draft_tokens=drafts, layout=layout
        )
        self.ops: Any = TritonOps(self.plan, device)
        self.pools = self.ops.allocate()
        self.layers = layers
        self.index = self.ops.index(
            build_index(rows, max_blocks=max((len(row.blocks) for row in rows), default=1) or 1)
        )

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        """One input a layer."""
        return [torch.randn(shape, dtype=torch.float32, device=self.ops.device).to(dtype) for _ in range(self.layers)]


def rotating(nbytes: int) -> int:
    """Copies of a call's data that together exceed the L2 a few times."""
    return int(min(20, max(2, -(-(256 << 20) // max(nbytes, 1)))))


def all_workloads(device: str) -> Iterator[Callable[[], Workload]]:
    """Makers of all rows, so that one row's memory is freed before the next is made."""
    append = {1: (1.1, 1.1), 64: (1.7, 1.7), 256: (1.8, 1.8), 8192: (5.0, 11.4), 65536: (28.0, 80.6)}
    for count, (goal, peer) in append.items():
        yield lambda count=count, goal=goal, peer=peer: append_window(device, count, goal, peer)
    for count, goal, peer in ((64, 2.5, 2.6), (8192, 5.5, 8.3), (65536, 30.0, 44.1)):
        yield lambda count=count, goal=goal, peer=peer: append_rotated(device, count, goal, peer)
    for count, share, goal, peer in ((64, 1, 3.0, 5.1), (256, 1, 5.0, 7.0), (64, 4, 2.5, 4.7), (256, 4, 3.5, 5.7)):
        for indexed in (False, True):
            yield lambda a=(count, share, indexed, goal, peer): csa_decode(device, *a)
    yield lambda: csa_decode(device, 256, 1, True, None, None, layout="planar")
    for given in (torch.bfloat16, torch.float32):
        for count, goal, peer in ((8192, 10.0, 23.0), (65536, 75.0, 151.7)):
            yield lambda a=(count, given, goal, peer): prefill(device, 4, True, *a)
            yield lambda a=(count, given, None, None): prefill(device, 4, True, *a, append=True)
    for count, goal, peer in ((64, 11.0, 13.2), (256, 37.0, 37.7)):
        yield lambda a=(count, goal, peer): hca_decode(device, *a)
    for given in (torch.bfloat16, torch.float32):
        for count, goal, peer in ((8192, 6.0, 10.1), (65536, 36.0, 51.0)):
            yield lambda a=(count, given, goal, peer): prefill(device, 128, False, *a)
            yield lambda a=(count, given, None, None): prefill(device, 128, False, *a, append=True)
    for count, goal, peer in ((64, 14.5, 18.6), (256, 57.0, 66.8)):
        yield lambda a=(count, goal, peer): gather_selected(device, *a)
    yield lambda: gather_all(device, 32768, 14.5, 17.7)
    yield lambda: gather_ring(device, 256)
    for format, goals in (
        ("index_fp8_132", ((64, 1.7, 1.7), (8192, 2.0, 4.2), (65536, 7.5, 21.4))),
        ("index_fp4_68", ((64, 1.7, 2.8), (8192, 2.0, 21.3), (65536, 6.5, 145.6))),
        ("index_fp4_68_h", ((64, None, None), (8192, None, None), (65536, None, None))),
    ):
        for count, goal, peer in goals:
            yield lambda a=(format, count, goal, peer): store_keys(device, *a)


def append_window(device: str, count: int, goal: float, peer: float) -> Workload:
    """Quantise and scatter bf16 rows."""
    nbytes = count * (2 * DIM + ENTRY_BYTES)
    setting = window_setting(device, count, rotating(nbytes))
    rows = setting.random(count, DIM)
    calls = [
        lambda n=n: setting.ops.append_window(setting.pools, n, setting.index, rows[n]) for n in range(setting.layers)
    ]
    return Workload(f"append bf16 -> v4_584, T = {count:,}", nbytes, calls, goal, peer)


def append_rotated(device: str, count: int, goal: float, peer: float) -> Workload:
    """The same with the rotation of the last 64 channels in front."""
    nbytes = count * (2 * DIM + ENTRY_BYTES)
    setting = window_setting(device, count, rotating(nbytes))
    rows, rope = setting.random(count, DIM), Rope(dim=64, theta=10000.0)
    calls = [
        lambda n=n: setting.ops.append_rotated_window(setting.pools, n, setting.index, rows[n], rope=rope)
        for n in range(setting.layers)
    ]
    return Workload(f"RoPE + append, T = {count:,}", nbytes, calls, goal, peer)


def window_setting(device: str, count: int, layers: int) -> Setting:
    """Up to 256 tokens: a request each; more: 128 tokens of each request."""
    each = 1 if count <= 256 else 128
    rows = [StepRequest(slot=n, start=300 + n % 7, new=each, blocks=[], stored=0) for n in range(count // each)]
    return Setting(LayerSpec(window=Window(dim=DIM, window=128)), rows, 0, layers, device)


def csa_decode(
    device: str,
    count: int,
    share: int,
    indexed: bool,
    goal: float | None,
    peer: float | None,
    *,
    layout: str = "packed",
) -> Workload:
    """One token a request, one in ``share`` closes a window; the tails are written in the same launch.

    The goals are for one stream, which is what was measured of the peers; for both streams there is none.
    """
    closing = count // share
    widths = [DIM] + [INDEX_DIM] * indexed
    rows_bytes = [count * 4 * width * 4 * 2 + closing * 7 * width * 4 * 2 for width in widths]
    nbytes = sum(rows_bytes) + closing * (ENTRY_BYTES + 68 * indexed)
    rows = [
        StepRequest(slot=n, start=4 * (3 + n % 50) + (3 if n % share == 0 else n % 3), new=1, blocks=[n], stored=0)
        for n in range(count)
    ]
    setting = Setting(compressor(4, True, indexed), rows, count, rotating(nbytes), device, layout=layout)
    kind = f"CSA{' + index keys' if indexed else ''} decode"
    return Workload(
        f"{kind}, n = {count}{', a quarter closes' * (share > 1)}{f', {layout}' * (layout != 'packed')}",
        nbytes,
        flush_calls(setting, count, True, indexed, torch.float32, newest=1),
        None if indexed else goal,
        None if indexed else peer,
    )


def hca_decode(device: str, count: int, goal: float, peer: float) -> Workload:
    """One token a request, every one closes a window of 128."""
    nbytes = count * (2 * DIM * 4 * 2 + 127 * 2 * DIM * 4 + ENTRY_BYTES)
    rows = [StepRequest(slot=n, start=127 + 128 * (n % 2), new=1, blocks=[n], stored=0) for n in range(count)]
    setting = Setting(compressor(128, False, False), rows, count, rotating(nbytes), device)
    calls = flush_calls(setting, count, False, False, torch.float32, newest=1)
    return Workload(f"HCA close, n = {count}", nbytes, calls, goal, peer)


def prefill(
    device: str,
    ratio: int,
    overlap: bool,
    count: int,
    given: torch.dtype,
    goal: float | None,
    peer: float | None,
    *,
    append: bool = False,
) -> Workload:
    """One request from its first token; the tail's few rows only where ``append``."""
    width = DIM * (2 if overlap else 1)
    nbytes = count * 2 * width * given.itemsize + count // ratio * ENTRY_BYTES
    rows = [StepRequest(slot=0, start=0, new=count, blocks=list(range(count // BLOCK)), stored=0)]
    setting = Setting(compressor(ratio, overlap, False), rows, count // BLOCK, min(8, rotating(nbytes)), device)
    calls = flush_calls(setting, count, overlap, False, given, newest=count if append else None)
    kind, narrow = "CSA" if overlap else "HCA", given == torch.bfloat16
    name = f"{kind} prefill{' and tail' * append}, {'bf16' if narrow else 'fp32'}, {count:,} tokens"
    return Workload(name, nbytes, calls, goal if narrow else None, peer if narrow else None)


def compressor(ratio: int, overlap: bool, indexed: bool) -> LayerSpec:
    """A V4 compressor's layer."""
    index: dict[str, Any] = {}
    if indexed:
        index = {
            "index_tail": Tail(dim=INDEX_DIM, ratio=ratio, overlap=overlap),
            "index_keys": IndexKeys(dim=INDEX_DIM, ratio=ratio, heads=64, topk=512),
        }
    return LayerSpec(
        tail=Tail(dim=DIM, ratio=ratio, overlap=overlap, rows=None if overlap else 128),
        entries=Entries(dim=DIM, ratio=ratio),
        **index,
    )


def flush_calls(
    setting: Setting, count: int, overlap: bool, indexed: bool, given: torch.dtype, *, newest: int | None
) -> list[Callable[[], object]]:
    """Flushes with norm and rotation, on random tails; of ``newest`` tokens a request with their appends."""
    ops, pools = setting.ops, setting.pools
    for name, pool in pools.items():
        if "tail" in name:
            pool.view(torch.float32).normal_()
    factor = 2 if overlap else 1
    widths = [DIM * factor] * 2 + [INDEX_DIM * factor] * 2 * indexed
    inputs = [setting.random(count, width, dtype=given) for width in widths]
    weight, index_weight = (torch.rand(size, device=ops.device) + 0.5 for size in (DIM, INDEX_DIM))
    options = {"closed": count, "norm_weight": weight, "rope": Rope(dim=64, theta=160000.0)}
    if indexed:
        options["index_norm_weight"] = index_weight
    verb = ops.flush
    if newest is not None:
        verb, options["newest"] = ops.append_flush, newest
    return [
        lambda n=n: verb(pools, n, setting.index, *(array[n] for array in inputs), **options)
        for n in range(setting.layers)
    ]


def gather_selected(device: str, count: int, goal: float, peer: float) -> Workload:
    """512 picks of each of ``count`` queries, scattered over their requests' histories."""
    nbytes = count * 512 * (ENTRY_BYTES + 2 * DIM)
    per = 16
    rows = [
        StepRequest(slot=n, start=per * BLOCK - 1, new=1, blocks=list(range(n * per, n * per + per)), stored=0)
        for n in range(count)
    ]
    setting = Setting(LayerSpec(entries=Entries(dim=DIM, ratio=4)), rows, count * per, 3, device)
    fill(setting)
    entries = per * BLOCK // 4
    selected = [
        torch.from_numpy(np.stack([RANDOM.permutation(entries)[:512] for _ in range(count)]).astype(np.int32)).to(
            device
        )
        for _ in range(setting.layers)
    ]
    calls = [
        lambda n=n: setting.ops.gather_entries(setting.pools, n, setting.index, selected[n])
        for n in range(setting.layers)
    ]
    return Workload(f"gather {count} × 512 picks", nbytes, calls, goal, peer)


def gather_all(device: str, count: int, goal: float, peer: float) -> Workload:
    """Every entry of one request."""
    nbytes = count * (ENTRY_BYTES + 2 * DIM)
    blocks = count * 4 // BLOCK
    order = RANDOM.permutation(blocks).tolist()
    rows = [StepRequest(slot=0, start=count * 4 - 1, new=1, blocks=order, stored=0)]
    setting = Setting(LayerSpec(entries=Entries(dim=DIM, ratio=4)), rows, blocks, 5, device)
    fill(setting)
    calls = [
        lambda n=n: setting.ops.gather_all_entries(setting.pools, n, setting.index, columns=count, role="entries")
        for n in range(setting.layers)
    ]
    return Workload(f"gather {count:,} rows of one request", nbytes, calls, goal, peer)


def gather_ring(device: str, count: int) -> Workload:
    """The whole window of ``count`` requests."""
    nbytes = count * 128 * (ENTRY_BYTES + 2 * DIM)
    setting = window_setting(device, count, 5)
    fill(setting)
    calls = [lambda n=n: setting.ops.gather_window(setting.pools, n, setting.index) for n in range(setting.layers)]
    return Workload(f"gather window of {count} requests", nbytes, calls, None, None)


def store_keys(device: str, format: str, count: int, goal: float | None, peer: float | None) -> Workload:
    """Index keys that the caller compressed, bf16."""
    requests = 64 if count <= 256 else 8
    each = count // requests
    keys = IndexKeys(dim=INDEX_DIM, ratio=4, heads=64, topk=512, format=format)
    per = -(-each * 4 // BLOCK)
    rows = [
        StepRequest(slot=n, start=0, new=each * 4, blocks=list(range(n * per, n * per + per)), stored=0)
        for n in range(requests)
    ]
    layer = LayerSpec(entries=Entries(dim=8, ratio=4, format="bf16"), index_keys=keys)
    nbytes = count * (2 * INDEX_DIM + keys.parts[0].format.row)
    setting = Setting(layer, rows, per * requests, rotating(nbytes), device)
    values = setting.random(count, INDEX_DIM)
    calls = [
        lambda n=n: setting.ops.store_role(setting.pools, n, "index_keys", setting.index, values[n])
        for n in range(setting.layers)
    ]
    return Workload(f"store {format}, T = {count:,}", nbytes, calls, goal, peer)


def fill(setting: Setting) -> None:
    """Random bytes that decode to finite numbers: exponents of scales near one, no NaN codes."""
    for pool in setting.pools.values():
        for some in pool.split(1024):
            some.copy_(torch.randint(96, 120, some.shape, dtype=torch.uint8, device=some.device))
