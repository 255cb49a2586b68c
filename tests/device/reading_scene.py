"""Caches for the checks of the verbs that read: live rows written, every other byte 0xFF, and answers in fp64.

The oracle decodes rows with the plain torch operations, which the conformance kit compares with the reference byte for
byte, and does everything else in double precision, one query at a time.
"""

from typing import Any, NamedTuple

import torch

from kvcore.backends.torch_triton import TorchOps, checked_device
from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import hadamard
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.ops import tolerances
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, LayerSpec, Rope
from kvcore.step import StepRequest, build_index

ROWS_AT_ONCE = 1 << 16


class Scene(NamedTuple):
    """Verbs with kernels, the plain ones beside them, pools that both read, and the index of the step that reads."""

    ops: Any
    plain: Any
    pools: Any
    index: Any
    host: Any


def scene(
    layer: LayerSpec,
    lengths: list[int],
    news: list[int],
    device: str,
    *,
    block_tokens: int = 256,
    seed: int = 0,
    pad: int = 1,
    layout: str = "packed",
    spread: float = 1.0,
    uneven: float = 0.0,
    drafts: int = 0,
    padding: list[int] | None = None,
) -> Scene:
    """Requests of ``lengths`` tokens, the last ``news`` of which are the step's, in shuffled blocks and slots.

    Rows' sizes are ``spread`` powers of two apart, those of 32 channels of a row ``uneven``.
    """
    spec = CacheSpec(layers=(layer,), block_tokens=block_tokens)
    blocks = [-(-length // block_tokens) for length in lengths]
    tokens = max(1, sum(blocks) + 1) * block_tokens
    plan = plan_cache(spec, max_requests=len(lengths) + 1, max_tokens=tokens, layout=layout, max_draft_tokens=drafts)
    device = checked_device(device)
    ops, plain = TritonOps(plan, device), TorchOps(plan, device)
    pools = ops.allocate()
    for pool in pools.values():
        pool.fill_(0xFF)
    torch.manual_seed(seed)
    order = torch.randperm(max(plan.blocks, sum(blocks))).tolist()
    rows = []
    for number, (length, new) in enumerate(zip(lengths, news, strict=True)):
        taken = tuple(order.pop() for _ in range(blocks[number]))
        left = None if padding is None else padding[number]
        rows.append(StepRequest(len(lengths) - number, length - new, new, taken, left_padding=left))
        # Interpreted kernels would take longer to write what is read than to read it.
        write(plain if device == "cpu" else ops, pools, layer, rows[-1], max(blocks, default=1) or 1, spread, uneven)
    columns = max(blocks, default=1) or 1
    host = build_index(rows, max_blocks=columns, pad_tokens=sum(news) + pad, pad_requests=len(rows) + (pad > 0))
    return Scene(ops, plain, pools, ops.index(host), host)


def write(
    ops: Any, pools: Any, layer: LayerSpec, row: StepRequest, columns: int, spread: float, uneven: float = 0.0
) -> None:
    """Random rows for everything that is live at the row's length."""

    def values(count: int, dim: int) -> torch.Tensor:
        made = torch.randn(count, dim, device=ops.device)
        if uneven:
            sizes = torch.exp2(uneven * torch.randn(count, -(-dim // 32), device=ops.device))
            made *= sizes.repeat_interleave(32, dim=1)[:, :dim]
        return (made * torch.exp2(spread * torch.randn(count, 1, device=ops.device))).to(torch.bfloat16)

    def index(start: int, length: int) -> Any:
        return ops.index(build_index([row._replace(start=start, new=length - start)], max_blocks=columns))

    if layer.window is not None:
        (region,) = ops.plan.region(0, "window")
        start = max(0, row.length - region.rows)
        ops.append_window(pools, 0, index(start, row.length), values(row.length - start, layer.window.dim))
    if layer.kv is not None:
        for start in range(min(layer.kv.visible(row.start, row.length), default=0), row.length, ROWS_AT_ONCE):
            length = min(row.length, start + ROWS_AT_ONCE)
            parts = [
                values((length - start) * part.heads, part.format.dim).reshape(-1, part.heads, part.format.dim)
                for part in layer.kv.given
            ]
            ops.append_kv(pools, 0, index(start, length), *parts)
    for role in ("entries", "index_keys"):
        component = getattr(layer, role)
        if component is None:
            continue
        step = ROWS_AT_ONCE * component.ratio
        for start in range(0, row.length, step):
            length = min(row.length, start + step)
            closed = length // component.ratio - start // component.ratio
            if closed:
                empty = index(start, length)._replace(positions=torch.empty(0), request_index=torch.empty(0))
                ops.store_role(pools, 0, role, empty, values(closed, component.dim))


def decoded(found: Scene, role: str, request: int, numbers: torch.Tensor) -> torch.Tensor:
    """Rows ``numbers`` [n] of a request in fp64."""
    (region,) = found.plain.plan.region(0, role)
    asked = torch.full_like(numbers, request)
    stored = place.read(found.pools, region, found.index, asked, numbers)
    scale = found.plain.global_scale(0, role)
    return found.plain.decode_rows(region, stored, scale)[:, 0].to(torch.float64)


def attention(
    found: Scene, q: torch.Tensor, selected: Any, sink: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64."""
    layer = found.plain.plan.spec.all_layers[0]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for token, (request, position) in enumerate(zip(found.host.request_index, found.host.positions, strict=True)):
        if request < 0:
            continue
        keys = []
        if layer.window is not None:
            first = max(0, int(position) + 1 - layer.window.window)
            numbers = torch.arange(first, int(position) + 1, device=q.device)
            keys.append(decoded(found, "window", int(request), numbers))
        if layer.entries is not None:
            visible = (int(position) + 1) // layer.entries.ratio
            picks = torch.arange(visible, device=q.device) if selected is None else selected[token].long()
            keys.append(decoded(found, "entries", int(request), picks[(picks >= 0) & (picks < visible)]))
        k = torch.cat(keys)
        if not len(k):
            continue
        logits = q[token].to(torch.float64) @ k.T * scale
        lse[token] = logits.logsumexp(1)
        out[token] = logits.softmax(1) @ k
        if sink is not None:
            out[token] *= torch.sigmoid(lse[token] - sink.to(torch.float64))[:, None]
    return out, lse


def turned_back(out: torch.Tensor, positions: Any, rope: Rope) -> torch.Tensor:
    """Outputs [T, H, d], as rounded as they are given, in fp64 times conj(exp(i · angle)) in the last channels."""
    pairs = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=out.device)
    # The angle is an fp32 product, of which everything else is exact.
    angle = (torch.as_tensor(positions, device=out.device).float()[:, None] * pairs).double()
    first = out.shape[2] - 2 * len(pairs)
    last = torch.view_as_complex(out[:, :, first:].double().unflatten(2, (-1, 2)).contiguous())
    turned = torch.view_as_real(last * torch.polar(torch.ones_like(angle), -angle)[:, None]).flatten(2)
    return torch.cat([out[:, :, :first].double(), turned], dim=2)


def scores(found: Scene, q: torch.Tensor, weights: torch.Tensor, columns: int) -> torch.Tensor:
    """Index scores [T, columns] in fp64."""
    layer = found.plain.plan.spec.all_layers[0]
    q = q.to(torch.float32)
    if layer.index_keys.parts[0].format.hadamard:
        q = hadamard(q.reshape(-1, q.shape[2])).reshape(q.shape)
    got = torch.full((len(q), columns), -torch.inf, dtype=torch.float64, device=q.device)
    for token, (request, position) in enumerate(zip(found.host.request_index, found.host.positions, strict=True)):
        visible = min((int(position) + 1) // layer.index_keys.ratio, columns) if request >= 0 else 0
        for first in range(0, visible, ROWS_AT_ONCE):
            numbers = torch.arange(first, min(visible, first + ROWS_AT_ONCE), device=q.device)
            k = decoded(found, "index_keys", int(request), numbers)
            products = torch.relu(q[token].to(torch.float64) @ k.T)
            got[token, first : first + len(k)] = weights[token].to(torch.float64) @ products
    return got


def off(got: torch.Tensor, want: torch.Tensor, operation: str) -> str:
    """What is wrong with a result, by the tolerance table; empty where it agrees with ``want`` (fp64)."""
    infinite = want.isinf()
    if not torch.equal(got.double()[infinite], want[infinite]):
        return f"{int((got.double()[infinite] != want[infinite]).sum())} infinities differ"
    if not bool(got.isfinite()[~infinite].all()):
        return f"{int((~got.isfinite()[~infinite]).sum())} values are not finite"
    precision = "bf16" if got.dtype == torch.bfloat16 else "fp32"
    bound = tolerances.computed(operation, precision)
    want = want[~infinite]
    if not want.numel():
        return ""
    largest = float(want.abs().max())
    error = (got.double()[~infinite] - want).abs()
    beyond = int((error > bound.relative * want.abs() + bound.absolute * largest).sum())
    if beyond:
        return f"{beyond} of {want.numel()} beyond tolerance; error {float(error.max()):.3e} of {largest:.3e}"
    rounded = want.to(got.dtype).double()
    noise = tolerances.noise(operation)
    tipped = (got.double()[~infinite] - rounded).abs() > noise * (want.abs() + largest)
    share = float(tipped.double().mean())
    return f"{share:.4f} of values tipped over" if share > bound.share else ""
