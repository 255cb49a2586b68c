"""The compressor: pooling and norm as latents, and a whole flush as stored rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.rings import tail_inputs
from kvcore.conformance.outputs import Output, close
from kvcore.conformance.shapes import FP32
from kvcore.spec import TAIL_OF, Rope

EPS = 0.03
"""Large, so that it shows in bf16."""

THETA = 160000.0


def compress(role: str) -> Callable[[Bench], list[Output]]:
    """Latents of the windows that close: pooled alone, then with the norm."""

    def drive(bench: Bench) -> list[Output]:
        pools = bench.pools(start=(TAIL_OF[role],))
        kv, score = tail_inputs(bench, TAIL_OF[role])
        weight = bench.put(_weight(bench, role))
        found: list[Output] = []
        for operation, norm in (("pooling", None), ("norm", weight)):
            latents = bench.ops.compress(
                pools,
                bench.layer,
                bench.index,
                kv,
                score,
                closed=bench.case.closed(role),
                role=role,
                norm_weight=norm,
                eps=EPS,
            )
            # The dtype is fp32, but only latents that will be stored as fp32 are not rounded to bf16.
            kept = bench.case.component(role).parts[0].format.fields[0].code == "fp32"
            precision = "fp32" if kept else "bf16"
            found.append(close(operation, to_numpy(latents), operation, "entry", "channel", precision=precision))
        return found

    return drive


def flush(bench: Bench) -> list[Output]:
    """Pool, norm, rotate, encode, store: entries and, where the layer has them, index keys."""
    return bench.stored(
        bench.ops.flush(*_flushed(bench, FP32), closed=bench.case.closed("entries"), **_options(bench)),
        computed=dict.fromkeys(TAIL_OF, "rope"),
    )


def append_flush(bench: Bench) -> list[Output]:
    """The same with the tails written too, in the shape class's dtype: told how many tokens are new, and not told."""
    newest = max((row.new for row in bench.case.rows), default=0)
    return [
        output._replace(name=f"{output.name}{how}")
        for how, known in (("", {"newest": newest}), (", not told", {}))
        for output in bench.stored(
            bench.ops.append_flush(*_flushed(bench, bench.case.shape.dtype), **known, **_options(bench)),
            computed=dict.fromkeys(TAIL_OF, "rope"),
        )
    ]


def append_rotated_window(bench: Bench) -> list[Output]:
    """Window rows normed and rotated on the way; and rotated only."""
    case = bench.case
    dim = case.component("window").dim
    rows = case.token_floats("rows", dim)
    weight = 1 + case.floats("weight", dim, dtype=FP32) / 4
    rope = Rope(dim=rotated(dim), theta=THETA)
    precision = "fp32" if case.component("window").parts[0].format.is_fp32 else "bf16"
    found: list[Output] = []
    for how, norm in ((", normed", {"norm_weight": bench.put(weight), "eps": EPS}), ("", {})):
        at = bench.layer, bench.index, bench.put(rows)
        stored = bench.ops.append_rotated_window(bench.pools(), *at, rope=rope, **norm)
        found += [
            output._replace(name=f"{output.name}{how}") for output in bench.stored(stored, computed={"window": "rope"})
        ]
        # Rows of padding may be anything.
        turned = to_numpy(bench.ops.rotated_rows(*at, rope=rope, **norm))[case.index.positions >= 0]
        found.append(close(f"rotated{how}", turned.astype(np.float32), "rope", "token", "channel", precision=precision))
    return found


def _flushed(bench: Bench, dtype: np.dtype) -> tuple[Any, ...]:
    """Pools, layer, index and the streams of a flush."""
    tails = tuple(tail for tail in TAIL_OF.values() if bench.case.has(tail))
    streams = [
        array
        for tail in TAIL_OF.values()
        for array in (tail_inputs(bench, tail, dtype=dtype) if tail in tails else (None, None))
    ]
    return bench.pools(start=tails), bench.layer, bench.index, *streams


def _options(bench: Bench) -> dict[str, Any]:
    """Norm weights and rotation."""
    case = bench.case
    weights = [
        bench.put(_weight(bench, role)) if case.has(tail) and case.has(role) else None for role, tail in TAIL_OF.items()
    ]
    rope = Rope(dim=rotated(case.component("entries").dim), theta=THETA)
    return {"norm_weight": weights[0], "index_norm_weight": weights[1], "eps": EPS, "rope": rope}


def rotated(dim: int) -> int:
    """Channels to rotate of a row of ``dim``: an eighth, in pairs."""
    return max(2, dim // 16 * 2)


def _weight(bench: Bench, role: str) -> np.ndarray:
    """A norm weight around 1."""
    return 1 + bench.case.floats(f"{role} weight", bench.case.component(role).dim, dtype=FP32) / 4
