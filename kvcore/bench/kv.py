"""What is timed of classic attention: decode steps of Llama 3 8B's heads, and torch's own attention beside them."""

from collections.abc import Callable, Iterator

import torch
from torch.nn.attention.flex_attention import flex_attention

from kvcore.bench.reading import decode_rows
from kvcore.bench.workloads import BLOCK, Setting, Workload, rotating
from kvcore.spec import KV, LayerSpec
from kvcore.step import StepRequest, build_index

HEADS, KEY_HEADS, DIM = 32, 8, 128
SHAPES = ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 4096), (64, 32768))
"""(requests, tokens of each)."""
FORMATS = ("bf16", "fp8_row", "int8_row", "nf4_b64", "mxfp4")
EVERY_FORMAT = ((16, 32768), (64, 4096))
"""Shapes that are timed in all formats and beside both peers; the others in two formats, beside the first."""
PEERS: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention,
    "flex_attention": lambda: torch.compile(flex_attention, dynamic=False),
}
"""Torch's attentions. The second is made for compiling, and is so slow without it that it would be no peer."""


def kv_workloads(device: str) -> Iterator[Callable[[], Workload]]:
    """Makers of all rows."""
    for count, tokens in SHAPES:
        for format in FORMATS if (count, tokens) in EVERY_FORMAT else FORMATS[:2]:
            yield lambda a=(format, count, tokens): attend(device, *a)
        for name in PEERS if (count, tokens) in EVERY_FORMAT else ("SDPA",):
            yield lambda a=(name, count, tokens): dense_copy(device, *a)
    yield lambda: attend(device, "bf16", 16, 32768, drafts=4)
    yield lambda: attend(device, "fp8_row", 16, 32768, drafts=4)
    yield lambda: attend(device, "bf16", 64, 32768, window=4096)


def attend(
    device: str,
    format: str,
    count: int,
    tokens: int,
    *,
    values: str | None = None,
    drafts: int = 1,
    window: int | None = None,
) -> Workload:
    """``drafts`` tokens of each of ``count`` requests over all they see of ``tokens`` tokens.

    ``values``: their format, if it is not the keys'.
    """
    kv = KV(key_heads=KEY_HEADS, key_dim=DIM, key_format=format, value_format=values, window=window)
    seen = min(tokens, window + drafts - 1 if window else tokens)
    queries = count * drafts * HEADS * DIM
    nbytes = count * seen * sum(part.heads * part.format.row for part in kv.parts) // kv.tokens_per_row + 4 * queries
    rows = decode_rows(count, tokens, drafts)
    setting = Setting(LayerSpec(kv=kv), rows, count * tokens // BLOCK, rotating(nbytes), device)
    fill(setting)
    q = setting.random(count * drafts, HEADS, DIM)
    calls = [
        lambda n=n: setting.ops.attend_kv(setting.pools, n, setting.index, q[n], columns=tokens)
        for n in range(setting.layers)
    ]
    extra = (f", {drafts} tokens each" if drafts > 1 else "") + (f", window {window:,}" if window else "")
    named = f"{format} and {values}" if values else format
    return Workload(f"classic attend {named}, {count} × {tokens // 1024} K{extra}", nbytes, calls, None, None)


def append(device: str, format: str, count: int, start: int, *, values: str | None = None, spread: int = 1) -> Workload:
    """One token of each of ``count`` requests, at position ``start``, or at ``spread`` of them from there on.

    A token is read and written; one that closes a group is read with those that wait for it, and codes are written.
    """
    kv = KV(key_heads=KEY_HEADS, key_dim=DIM, key_format=format, value_format=values)
    rows = [StepRequest(slot=n, start=start + n % spread, new=1, blocks=[n], stored=0) for n in range(count)]
    token, group = 2 * 2 * KEY_HEADS * DIM, kv.tokens_per_row
    closing = sum((row.start + 1) % group == 0 for row in rows) if group > 1 else 0
    codes = sum(part.heads * part.format.row for part in kv.parts)
    nbytes = 2 * token * (count - closing) + closing * (group * token + codes)
    setting = Setting(LayerSpec(kv=kv), rows, count, rotating(nbytes), device)
    fill(setting)
    k, v = setting.random(count, KEY_HEADS, DIM), setting.random(count, KEY_HEADS, DIM)
    calls = [
        lambda n=n: setting.ops.append_kv(setting.pools, n, setting.index, k[n], v[n]) for n in range(setting.layers)
    ]
    named = f"{format} and {values}" if values else format
    at = f"position {start}" if spread == 1 else f"positions {start} to {start + spread - 1}"
    return Workload(f"append {named}, {count} tokens at {at}", nbytes, calls, None, None)


def dense_copy(device: str, name: str, count: int, tokens: int) -> Workload:
    """One of torch's own attentions over keys and values that were gathered before, bf16."""
    nbytes = 4 * count * (tokens * KEY_HEADS * DIM + HEADS * DIM)
    given = [
        [
            torch.randn(count, heads, length, DIM, device=device, dtype=torch.bfloat16)
            for heads, length in ((HEADS, 1), (KEY_HEADS, tokens), (KEY_HEADS, tokens))
        ]
        for _ in range(rotating(nbytes))
    ]
    attention = PEERS[name]()
    calls = [lambda a=a: attention(*a, enable_gqa=True) for a in given]
    return Workload(f"torch {name} on a dense bf16 copy, {count} × {tokens // 1024} K", nbytes, calls, None, None)


def fill(setting: Setting) -> None:
    """Random rows in one block of every layer, copied to all others."""
    row = StepRequest(slot=0, start=0, new=BLOCK, blocks=(0,))
    index = setting.ops.index(build_index([row], max_blocks=1))
    for layer in range(setting.layers):
        k, v = (torch.randn(BLOCK, KEY_HEADS, DIM, device=setting.ops.device) for _ in range(2))
        setting.ops.append_kv(setting.pools, layer, index, k, v)
    for pool in setting.pools.values():
        pool[1:] = pool[0]
