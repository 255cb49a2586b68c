"""Formats of a cache beside what others publish, in one run: perplexity, its interval, and greedy agreement, by bits.

``python benchmarks/quality_of_codes.py [--out FOLDER]``; ``--windows``, ``--tokens``, ``--prompts``, ``--new`` and
``--methods`` make it shorter. Every method codes the keys and values of a model's own forward pass: kvcore's formats by
the library's encoders, others' by NumPy as they are published. A query sees what a cache of its length would hold: in
formats over tokens the open group raw, in KIVI the residual. Weights and arithmetic are fp32; keys and values are
bf16 before they are coded.

The interval is 1.96 standard errors of the mean over pieces of ``PIECE`` tokens, paired with bf16's. Bits are those of
codes, scales and offsets; ``bits at a window`` counts what is still raw, on average over the tokens of a window.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

import kvcore
from kvcore import environment
from kvcore.spec import FORMATS, KV, CacheSpec, LayerSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import language_model

TEXT = Path(__file__).parent / "data" / "genesis_1_25.txt"
WINDOW, ROWS, PIECE = 1024, 2, 64  # tokens, windows side by side, tokens
BASELINE = "bf16"
RESIDUAL = 128  # tokens that KIVI keeps raw
NAME = "kvcore_codes"

Coder = Callable[[np.ndarray], np.ndarray]
"""Keys or values [n, dim] of one head -> the same as they are read back."""


class Side(NamedTuple):
    """How keys, or values, are kept.

    Attributes:
        code: None keeps them in bf16.
        bits: of an element, scales included.
        tokens: that are coded together; the last ones wait raw until as many are there.
        recent: newest tokens that stay raw, whatever is coded.
    """

    code: Coder | None
    bits: float
    tokens: int = 1
    recent: int = 0

    def raw(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys each query sees raw."""
        return (key >= (query + 1) // self.tokens * self.tokens) & (self.tokens > 1) | (key > query - self.recent)

    def raw_tokens(self, window: int) -> float:
        """Raw tokens that a cache holds, on average over the lengths of a window."""
        lengths = np.arange(1, window + 1)
        return float(np.maximum(np.minimum(lengths, self.recent), lengths % self.tokens).mean())


def of_format(name: str) -> Side:
    """A format of the library, by its encoders."""
    format = FORMATS[name]
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=1, key_dim=64))], block_tokens=64)
    ops = kvcore.create_cache(spec, backend="torch_triton", max_requests=1, max_tokens=64).ops

    def code(rows: np.ndarray) -> np.ndarray:
        tokens, dim = rows.shape
        whole = tokens // format.tokens * format.tokens
        laid = rows[:whole].reshape(-1, format.tokens, dim).transpose(0, 2, 1).reshape(-1, format.tokens * dim)
        if not whole:
            return rows
        read = np.asarray(ops.decode(name, ops.encode(name, laid), laid.shape[1]).float())
        read = read.reshape(-1, dim, format.tokens).transpose(0, 2, 1).reshape(whole, dim)
        return np.concatenate([read, rows[whole:]])

    return Side(None if name == BASELINE else code, 8 * format.for_dim(64).row / 64, format.tokens)


def by_range(bits: int, group: int, *, over_tokens: bool = False) -> Coder:
    """KIVI (arXiv 2402.02750): integers between the smallest and the largest of a group, both kept in fp16."""

    def code(rows: np.ndarray) -> np.ndarray:
        whole = len(rows) // group * group if over_tokens else len(rows)
        groups = rows[:whole].T.reshape(-1, group) if over_tokens else rows.reshape(-1, group)
        low = groups.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
        step = (groups.max(axis=1, keepdims=True) - low) / (2**bits - 1)
        step = np.maximum(step.astype(np.float16).astype(np.float32), 2.0**-24)
        read = low + step * np.clip(np.rint((groups - low) / step), 0, 2**bits - 1)
        read = read.reshape(rows.shape[1], whole).T if over_tokens else read.reshape(rows.shape)
        return np.concatenate([read, rows[whole:]])

    return code


def rotated(code: Coder) -> Coder:
    """Rows turned by the orthonormal Hadamard matrix before they are coded, and back (QuaRot, arXiv 2404.00456)."""

    def turned(rows: np.ndarray) -> np.ndarray:
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < rows.shape[1]:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        matrix = matrix / np.float32(math.sqrt(len(matrix)))
        return code(rows @ matrix) @ matrix

    return turned


def nvfp4(rows: np.ndarray) -> np.ndarray:
    """NVFP4: e2m1 with an e4m3 scale for every 16 channels, relative to one fp32 number for the tensor."""
    import ml_dtypes

    whole = np.float32(max(np.abs(rows).max() / (6 * 448), 2.0**-100))
    groups = rows.reshape(-1, 16)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 6 / whole
    scale = np.clip(scale, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
    codes = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * scale).reshape(rows.shape)


def kivi(bits: int, residual: int) -> tuple[Side, Side]:
    """Keys by channel, values by token, in groups of 32; ``residual`` tokens raw."""
    stored = bits + 1.0
    keys = Side(by_range(bits, 32, over_tokens=True), stored, tokens=residual)
    return keys, Side(by_range(bits, 32), stored, recent=residual)


METHODS: dict[str, Callable[[], tuple[Side, Side]]] = {
    BASELINE: lambda: (of_format("bf16"),) * 2,
    "int8_row": lambda: (of_format("int8_row"),) * 2,
    "fp8_row": lambda: (of_format("fp8_row"),) * 2,
    "nf4_b64": lambda: (of_format("nf4_b64"),) * 2,
    "mxfp4": lambda: (of_format("mxfp4"),) * 2,
    "int4_g32": lambda: (of_format("int4_g32"),) * 2,
    "int4_ch64 keys, int4_g64 values": lambda: (of_format("int4_ch64"), of_format("int4_g64")._replace(tokens=64)),
    "int4_ch32 keys, int4_g32 values": lambda: (of_format("int4_ch32"), of_format("int4_g32")._replace(tokens=32)),
    "the same, values rotated": lambda: (
        of_format("int4_ch32"),
        of_format("int4_g32")._replace(tokens=32, code=rotated(of_format("int4_g32").code or nvfp4)),
    ),
    "KIVI, 4 bits, residual 128": lambda: kivi(4, RESIDUAL),
    "KIVI, 2 bits, residual 128": lambda: kivi(2, RESIDUAL),
    "NF4, 64 a group, rotated": lambda: (Side(rotated(of_format("nf4_b64").code or nvfp4), 4.5),) * 2,
    "NVFP4": lambda: (Side(nvfp4, 4.5),) * 2,
}
"""Method -> its keys and values, the library's formats first."""

OWN = 8
"""How many of them are the library's own."""


class Coded:
    """Attention of a model of transformers over coded keys and values.

    Attributes:
        sides: of keys and values.
    """

    sides: tuple[Side, Side]

    def install(self, model: Any) -> None:
        """Make it the model's attention."""
        AttentionInterface.register(NAME, self)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float = 1.0,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from query [B, H, T, d] to key and value [B, G, n, d]: out [B, T, H, d]."""
        shared, (total, new) = query.shape[1] // key.shape[1], (key.shape[2], query.shape[2])
        at, of = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
        raw = [rows.bfloat16().float() for rows in (key, value)]
        coded = [held(side, rows) for side, rows in zip(self.sides, raw, strict=True)]
        raw_keys, raw_values, keys, values = (rows.repeat_interleave(shared, 1) for rows in (*raw, *coded))
        scores = torch.where(
            self.sides[0].raw(at, of), query @ raw_keys.transpose(2, 3), query @ keys.transpose(2, 3)
        ).mul_(scaling)
        seen = (of <= at) if mask is None else mask
        weights = (
            scores.masked_fill(~seen, -torch.inf).softmax(-1)
            if seen.dtype == torch.bool
            else (scores + seen).softmax(-1)
        )
        weights = weights.nan_to_num(nan=0.0)  # a query of padding sees nothing
        is_raw = self.sides[1].raw(at, of)
        out = (weights * ~is_raw) @ values + (weights * is_raw) @ raw_values
        return out.transpose(1, 2).contiguous(), None


def held(side: Side, rows: torch.Tensor) -> torch.Tensor:
    """Rows [B, G, n, d] as they are read back, each head by itself."""
    if side.code is None:
        return rows
    flat = rows.flatten(0, 1).numpy()
    return torch.from_numpy(np.stack([side.code(head) for head in flat]).astype(np.float32)).reshape(rows.shape)


class Measured(NamedTuple):
    """One method: losses and best next tokens on the text [windows, scored], generated ids, seconds."""

    losses: np.ndarray
    best: np.ndarray
    tokens: torch.Tensor
    seconds: float


def measure(model: Any, windows: torch.Tensor, prompts: Any, new: int) -> Measured:
    """What the model says with the attention that is installed; the first quarter of a window is context alone."""
    start, losses, best = time.perf_counter(), [], []
    skip = windows.shape[1] // 4
    for ids in windows.split(ROWS):
        logits = model(ids, use_cache=False).logits[:, skip:-1]
        wanted = ids[:, skip + 1 :]
        losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
        best.append(logits.argmax(-1))
    length = prompts.input_ids.shape[1]
    tokens = model.generate(**prompts, min_new_tokens=new, max_new_tokens=new, do_sample=False)[:, length:]
    return Measured(torch.cat(losses).numpy(), torch.cat(best).numpy(), tokens, time.perf_counter() - start)


def row(name: str, sides: tuple[Side, Side], found: Measured, baseline: Measured) -> dict[str, Any]:
    """One line of the table."""
    change = (found.losses - baseline.losses).reshape(-1)
    change = change[: len(change) // PIECE * PIECE].reshape(-1, PIECE).mean(axis=1)
    error = 1.96 * change.std(ddof=1) / math.sqrt(len(change)) if len(change) > 1 else math.inf
    same = found.tokens == baseline.tokens
    raw = [side.raw_tokens(WINDOW) / WINDOW for side in sides]
    at_window = [part * 16 + (1 - part) * side.bits for part, side in zip(raw, sides, strict=True)]
    return {
        "method": name,
        "bits_per_element": sum(side.bits for side in sides) / 2,
        "bits_at_a_window": round(sum(at_window) / 2, 3),
        "perplexity": round(float(np.exp(found.losses.mean())), 4),
        "change": round(math.expm1(change.mean()), 5),
        "interval": [round(math.expm1(change.mean() + sign * error), 5) for sign in (-1, 1)],
        "best_token_agreement": round(float((found.best == baseline.best).mean()), 4),
        "greedy_tokens_same": round(float(same.float().mean()), 4),
        "greedy_tokens_before_first_difference": round(float(same.cumprod(dim=1).float().mean()), 4),
        "seconds": round(found.seconds, 1),
    }


def run(names: Sequence[str], windows: int, tokens: int, prompts: int, new: int) -> Iterator[dict[str, Any]]:
    """The record, growing by one method a time; the baseline comes first."""
    model, tokenizer = language_model.load()
    model, attention = model.float(), Coded()
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    count = min(windows, len(text) // tokens)
    starts = [number * (len(text) - tokens) // max(count - 1, 1) for number in range(count)]
    ids = torch.stack([text[start : start + tokens] for start in starts])
    batch = language_model.asked(tokenizer, language_model.PROMPTS[:prompts])
    record: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, fp32 arithmetic",
        "text": f"{TEXT.name}: {count} windows of {tokens} tokens, of which the last {tokens - tokens // 4 - 1} count",
        "greedy": f"{prompts} prompts × {new} tokens",
        "baseline": BASELINE,
        **environment.of_script(),
        "rows": [],
    }
    baseline: Measured | None = None
    for name in (BASELINE, *(name for name in names if name != BASELINE)):
        attention.sides = METHODS[name]()
        attention.install(model)
        with torch.no_grad():
            found = measure(model, ids, batch, new)
        baseline = found if baseline is None else baseline
        record["rows"].append(row(name, attention.sides, found, baseline))
        record["rows"].sort(key=lambda each: list(METHODS).index(each["method"]))
        print(f"{name}: done in {found.seconds:.0f} s", flush=True)
        yield record


def as_table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{record['model']}; {record['text']}; greedy: {record['greedy']}; against {record['baseline']}.",
        "",
        "| keys and values | bits | with what is raw | perplexity | change | 95 % interval | same best token "
        "| same greedy |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each['method']} | {each['bits_per_element']:.2f} | {each['bits_at_a_window']:.2f} "
        f"| {each['perplexity']:.3f} | {each['change']:+.2%} "
        f"| {each['interval'][0]:+.1%} to {each['interval'][1]:+.1%} "
        f"| {each['best_token_agreement']:.1%} | {each['greedy_tokens_same']:.0%} |"
        for each in record["rows"]
    ]
    return "\n".join(lines) + "\n"


def as_svg(record: dict[str, Any], most: float = 0.3) -> str:
    """Change of perplexity against bits of an element, what is raw included; a bar is the interval. Lower left wins."""
    width, height, left, top, right, bottom = 760, 400, 70, 40, 30, 50
    own, rows = list(METHODS)[:OWN], [each for each in record["rows"] if each["method"] != BASELINE]
    bits = [each["bits_at_a_window"] for each in rows]
    low, high = math.floor(min(bits)), math.ceil(max(bits))

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - right)

    def y(change: float) -> float:
        return height - bottom - (min(max(change, -0.02), most) + 0.02) / (most + 0.02) * (height - bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<text x="8" y="18" font-size="14">Change of perplexity against bits of a key or value element</text>',
        f'<path d="M{left} {top}V{height - bottom}H{width - right}" fill="none" stroke="#888"/>',
        f'<path d="M{left} {y(0):.1f}H{width - right}" stroke="#ccc"/>',
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">'
        f"bits, with what is still raw in {WINDOW} tokens</text>",
        *(
            f'<text x="{x(at):.1f}" y="{height - bottom + 18}" text-anchor="middle">{at}</text>'
            for at in range(low, high + 1)
        ),
        *(
            f'<text x="{left - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at:+.0%}</text>'
            for at in (0, most / 3, 2 * most / 3, most)
        ),
    ]
    taken: list[tuple[float, float]] = []
    for each in sorted(rows, key=lambda each: each["change"]):
        place_x, place_y = x(each["bits_at_a_window"]), y(each["change"])
        label_y = place_y
        while any(abs(label_y - other_y) < 14 and abs(place_x - other_x) < 210 for other_x, other_y in taken):
            label_y -= 14
        taken.append((place_x, label_y))
        colour = "#4878a8" if each["method"] in own else "#c06030"
        parts.append(
            f'<path d="M{place_x:.1f} {y(each["interval"][0]):.1f}V{y(each["interval"][1]):.1f}" stroke="{colour}"/>'
        )
        parts.append(f'<circle cx="{place_x:.1f}" cy="{place_y:.1f}" r="4" fill="{colour}"/>')
        beyond = f" ({each['change']:+.0%})" if each["change"] > most else ""
        parts.append(f'<text x="{place_x + 8:.1f}" y="{label_y + 4:.1f}">{each["method"]}{beyond}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=WINDOW, help="of a window")
    parser.add_argument("--prompts", type=int, default=len(language_model.PROMPTS))
    parser.add_argument("--new", type=int, default=64, help="tokens generated a prompt")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="folder for quality_of_codes.json, .md and .svg")
    chosen = parser.parse_args(arguments)
    for record in run(chosen.methods, chosen.windows, chosen.tokens, chosen.prompts, chosen.new):
        if chosen.out is not None and len(record["rows"]) > 1:
            chosen.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
            (chosen.out / "quality_of_codes.json").write_text(text, encoding="utf-8")
            (chosen.out / "quality_of_codes.md").write_text(as_table(record), encoding="utf-8")
            (chosen.out / "quality_of_codes.svg").write_text(as_svg(record), encoding="utf-8")


if __name__ == "__main__":
    main()
