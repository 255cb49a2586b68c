"""Attention of a model of transformers over keys and values as caches of many kinds would give them back.

A query sees what a cache of its length would hold: in formats over tokens the open group raw, in KIVI the residual.
Keys and values are bf16 before they are coded. While a model generates, a row is coded once, when its group is whole;
only a method that takes a measure of all rows codes them anew.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

import kvcore
from benchmarks.codes_of_others import Coder, by_range, kvarn, nuq, nvfp4, rotated, turbo
from kvcore.spec import FORMATS, KV, CacheSpec, LayerSpec

BASELINE = "bf16"
RESIDUAL = 128  # tokens that KIVI keeps raw
NAME = "kvcore_codes"


class Side(NamedTuple):
    """How keys, or values, are kept.

    Attributes:
        code: None keeps them in bf16.
        bits: of an element, scales included.
        tokens: that are coded together; the last ones wait raw until as many are there.
        recent: newest tokens that stay raw, whatever is coded.
        all_heads: coded as one row of all heads of a token.
        before_rope: coded before the rotary turn, and turned when read.
        over_all: what a row is read back as hangs on all rows.
    """

    code: Coder | None
    bits: float
    tokens: int = 1
    recent: int = 0
    all_heads: bool = False
    before_rope: bool = False
    over_all: bool = False

    @property
    def waits(self) -> bool:
        """Whether any token is raw for a while."""
        return self.tokens > 1 or self.recent > 0

    def raw(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys each query sees raw."""
        return (key >= (query + 1) // self.tokens * self.tokens) & (self.tokens > 1) | (key > query - self.recent)

    def raw_tokens(self, window: int) -> float:
        """Raw tokens that a cache holds, on average over the lengths of a window."""
        lengths = np.arange(1, window + 1)
        return float(np.maximum(np.minimum(lengths, self.recent), lengths % self.tokens).mean())


class Shape(NamedTuple):
    """Heads of keys and values, and the channels of each."""

    heads: int
    dim: int


@cache
def of_format(name: str, dim: int) -> Side:
    """A format of the library, by its encoders."""
    format = FORMATS[name]
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=1, key_dim=dim))], block_tokens=64)
    ops = kvcore.create_cache(spec, backend="torch_triton", device="cpu", max_requests=1, max_tokens=64).ops

    def code(rows: np.ndarray) -> np.ndarray:
        *lead, tokens, dim = rows.shape
        whole = tokens // format.tokens * format.tokens
        if not whole:
            return rows
        groups = rows[..., :whole, :].reshape(*lead, -1, format.tokens, dim)
        laid = groups.swapaxes(-1, -2).reshape(-1, dim * format.tokens)
        read = np.asarray(ops.decode(name, ops.encode(name, laid), laid.shape[1]).float())
        read = read.reshape(*lead, -1, dim, format.tokens).swapaxes(-1, -2).reshape(*lead, whole, dim)
        return np.concatenate([read, rows[..., whole:, :]], axis=-2)

    return Side(None if name == BASELINE else code, 8 * format.for_dim(dim).row / dim, format.tokens)


def both(side: Side) -> tuple[Side, Side]:
    """Keys and values kept in the same way."""
    return side, side


def turned_before(side: Side) -> Side:
    """Coded after a Hadamard turn."""
    return side if side.code is None else side._replace(code=rotated(side.code))


def kivi(bits: int, residual: int) -> tuple[Side, Side]:
    """Keys by channel, values by token, in groups of 32; ``residual`` tokens raw."""
    stored = bits + 1.0
    keys = Side(by_range(bits, 32, over_tokens=True), stored, tokens=residual)
    return keys, Side(by_range(bits, 32), stored, recent=residual)


def kvquant(shape: Shape) -> tuple[Side, Side]:
    """Four bits; of a key's channel, or of a token's values, 1 % as they are with their places, 32 bits each."""
    width = shape.heads * shape.dim
    aside = max(1, round(0.01 * width))
    return (
        Side(nuq(4, over_tokens=True), 4 + 0.01 * 32, before_rope=True, over_all=True),
        Side(nuq(4, over_tokens=False), 4 + 32 / width + aside * 32 / width, all_heads=True, over_all=True),
    )


def kvarn_side(bits: int, dim: int) -> Side:
    """Scales of a tile's tokens and channels, and each token's smallest number and step."""
    return Side(kvarn(bits), bits + 16 / dim + 16 / 128 + 32 / dim, tokens=128)


METHODS: dict[str, Callable[[Shape], tuple[Side, Side]]] = {
    BASELINE: lambda shape: both(of_format("bf16", shape.dim)),
    "int8_row": lambda shape: both(of_format("int8_row", shape.dim)),
    "fp8_row": lambda shape: both(of_format("fp8_row", shape.dim)),
    "nf4_b64": lambda shape: both(of_format("nf4_b64", shape.dim)),
    "mxfp4": lambda shape: both(of_format("mxfp4", shape.dim)),
    "int4_g32": lambda shape: both(of_format("int4_g32", shape.dim)),
    "int4_ch64 keys, int4_g64 values": lambda shape: (
        of_format("int4_ch64", shape.dim),
        of_format("int4_g64", shape.dim)._replace(tokens=64),
    ),
    "int4_ch32 keys, int4_g32 values": lambda shape: (
        of_format("int4_ch32", shape.dim),
        of_format("int4_g32", shape.dim)._replace(tokens=32),
    ),
    "the same, values rotated": lambda shape: (
        of_format("int4_ch32", shape.dim),
        turned_before(of_format("int4_g32", shape.dim))._replace(tokens=32),
    ),
    "KIVI, 4 bits, residual 128": lambda _: kivi(4, RESIDUAL),
    "KIVI, 4 bits, residual 32": lambda _: kivi(4, 32),
    "KIVI, 2 bits, residual 128": lambda _: kivi(2, RESIDUAL),
    "KVQuant, 4 bits, 1 % aside": kvquant,
    "TurboQuant, 4 bits": lambda shape: both(Side(turbo(4), 4 + 16 / shape.dim)),
    "TurboQuant, 3 bits": lambda shape: both(Side(turbo(3), 3 + 16 / shape.dim)),
    "KVarN, 4-bit keys, 2-bit values": lambda shape: (kvarn_side(4, shape.dim), kvarn_side(2, shape.dim)),
    "NF4, 64 a group, rotated": lambda shape: both(turned_before(of_format("nf4_b64", shape.dim))),
    "NVFP4": lambda _: both(Side(nvfp4, 4.5, over_all=True)),
    "NVFP4, rotated": lambda _: both(Side(rotated(nvfp4), 4.5, over_all=True)),
}
"""Method -> keys and values of heads of a shape; the library's formats first."""

OWN_METHODS = 8
"""How many of them are the library's own."""


class Coded:
    """Attention over coded keys and values, of all layers of a model.

    Attributes:
        shape: of the model's keys and values.
    """

    def __init__(self, model: Any) -> None:
        """Make it the model's attention."""
        config = model.config
        self.shape = Shape(config.num_key_value_heads, config.head_dim)
        self._layers = getattr(config, "layer_types", None)
        self._rope = config.rope_parameters
        self._sides: tuple[Side, Side] = both(Side(None, 16))
        self._coded: dict[tuple[int, int], torch.Tensor] = {}
        AttentionInterface.register(NAME, self)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    def use(self, method: str) -> None:
        """Code by one of ``METHODS`` from here on."""
        self._sides = METHODS[method](self.shape)
        self._coded.clear()

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float = 1.0,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from query [B, H, T, d] to key and value [B, G, n, d] of positions from 0 on: out [B, T, H, d]."""
        shared, (total, new) = query.shape[1] // key.shape[1], (key.shape[2], query.shape[2])
        of = torch.arange(total, device=key.device)[None]
        at = of[0, total - new :, None]
        raw = [rows.bfloat16().float() for rows in (key, value)]
        coded = [self._read(module.layer_idx, which, rows, new) for which, rows in enumerate(raw)]
        raw_keys, raw_values, keys, values = (rows.repeat_interleave(shared, 1) for rows in (*raw, *coded))
        key_side, value_side = self._sides
        scores = query @ keys.transpose(2, 3)
        if key_side.waits:
            scores = torch.where(key_side.raw(at, of), query @ raw_keys.transpose(2, 3), scores)
        hidden = of > at
        if sliding_window is not None:
            hidden |= of <= at - sliding_window
        weights = scores.mul_(scaling).masked_fill_(hidden, -torch.inf).softmax(-1)
        if value_side.waits:
            is_raw = value_side.raw(at, of)
            out = (weights * ~is_raw) @ values + (weights * is_raw) @ raw_values
        else:
            out = weights @ values
        return out.transpose(1, 2).contiguous(), None

    def _read(self, layer: int, which: int, rows: torch.Tensor, new: int) -> torch.Tensor:
        """Keys or values of a layer as they are read back, the open group raw."""
        side, total = self._sides[which], rows.shape[2]
        if side.code is None:
            return rows
        kept = self._coded.get((layer, which)) if new < total and not side.over_all else None
        done, whole = 0 if kept is None else kept.shape[2], total // side.tokens * side.tokens
        if done < whole:
            more = coded_rows(side, rows[:, :, done:whole], self._theta(layer))
            kept = more if kept is None else torch.cat([kept, more], dim=2)
            self._coded[layer, which] = kept
        return rows if kept is None else torch.cat([kept, rows[:, :, whole:]], dim=2)

    def _theta(self, layer: int) -> float:
        """Base of the layer's rotary turn."""
        rope = self._rope if "rope_theta" in self._rope else self._rope[self._layers[layer]]
        return float(rope["rope_theta"])


def coded_rows(side: Side, rows: torch.Tensor, theta: float) -> torch.Tensor:
    """Rows [B, G, n, d] as they are read back; of positions from 0 on, if they are coded before their turn."""
    assert side.code is not None
    heads = (turned(rows, theta, back=True) if side.before_rope else rows).cpu().numpy()
    if side.all_heads:
        batch, count, tokens, dim = heads.shape
        coded = side.code(heads.swapaxes(1, 2).reshape(batch, tokens, count * dim))
        coded = coded.reshape(batch, tokens, count, dim).swapaxes(1, 2)
    else:
        coded = side.code(heads)
    read = torch.from_numpy(np.ascontiguousarray(coded, np.float32)).to(rows.device)
    return turned(read, theta) if side.before_rope else read


def turned(rows: torch.Tensor, theta: float, *, back: bool = False) -> torch.Tensor:
    """Rows [..., n, d] turned by the angles of their positions, halves against halves as Llama does it."""
    count, dim = rows.shape[-2:]
    angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().to(rows.device), (angles.sin() * (-1 if back else 1)).to(rows.device)
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
