"""What rows cost by a spec alone: bytes of what is alive. Blocks, rings and drafts, which add to it, are a plan's."""

from fractions import Fraction
from functools import lru_cache

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.spec.component import Component
from kvcore.spec.model import CacheSpec


def logical_bytes(spec: CacheSpec, tokens: int) -> dict[str, int]:
    """Bytes of the live rows of one request of ``tokens`` tokens, by role, no padding; a shared role adds nothing.

    Example:
        >>> from kvcore.plan import logical_bytes
        >>> from kvcore.spec import presets
        >>> logical_bytes(presets.llama_3_8b(), tokens=1000)
        {'kv': 131072000}
    """
    tokens = check_count(SpecError, "tokens", tokens, 0)
    totals: dict[str, int] = {}
    for _, role, component in spec.components():
        rows = 0 if component.shared_from is not None else len(component.live(tokens))
        totals[role] = totals.get(role, 0) + rows * row_bytes(component)
    return totals


def bytes_per_token(spec: CacheSpec) -> Fraction:
    """Logical bytes that every further token of history costs, exactly; what is bounded by a window costs nothing.

    Example:
        >>> from kvcore.plan import bytes_per_token
        >>> from kvcore.spec import presets
        >>> float(bytes_per_token(presets.deepseek_v4_flash(draft=False)))
        3514.25
    """
    slope = Fraction(0)
    for _, _, component in spec.components():
        if component.shared_from is None and component.span is None:
            slope += Fraction(row_bytes(component), component.tokens_per_row)
    return slope


def point_bytes(spec: CacheSpec) -> int:
    """Bytes of one checkpoint of a long request, on the host: what prefix reuse keeps wherever a prompt may begin.

    Rings and states are as large as they get. Rows of a block that is not full come on top, up to a block's.
    """
    total = 0
    for _, _, component in spec.components():
        if component.shared_from is None and component.in_checkpoint and component.span is not None:
            total += component.span * row_bytes(component)
    return total


@lru_cache(maxsize=1024)
def row_bytes(component: Component) -> int:
    """Bytes of one row over all parts and heads, pads of the format included."""
    return sum(part.heads * part.format.row for part in component.parts)
