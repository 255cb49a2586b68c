"""The compressor: pooling and norm as latents, and a whole flush as stored rows."""

from collections.abc import Callable

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.rings import tail_inputs
from kvcore.conformance.outputs import Output, close
from kvcore.conformance.shapes import FP32
from kvcore.spec import TAIL_OF, Rope

EPS = 1e-5
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
    case = bench.case
    streams: list[object] = []
    weights: list[object] = []
    for role, tail in TAIL_OF.items():
        streams += tail_inputs(bench, tail) if case.has(tail) else (None, None)
        weights.append(bench.put(_weight(bench, role)) if case.has(tail) else None)
    pools = bench.ops.flush(
        bench.pools(start=tuple(tail for tail in TAIL_OF.values() if case.has(tail))),
        bench.layer,
        bench.index,
        *streams,
        closed=case.closed("entries"),
        norm_weight=weights[0],
        eps=EPS,
        rope=Rope(dim=rotated(case.component("entries").dim), theta=THETA),
        index_norm_weight=weights[1],
    )
    return bench.stored(pools, computed=dict.fromkeys(TAIL_OF, "rope"))


def rotated(dim: int) -> int:
    """Channels to rotate of a row of ``dim``: an eighth, in pairs."""
    return max(2, dim // 16 * 2)


def _weight(bench: Bench, role: str) -> np.ndarray:
    """A norm weight around 1."""
    return 1 + bench.case.floats(f"{role} weight", bench.case.component(role).dim, dtype=FP32) / 4
