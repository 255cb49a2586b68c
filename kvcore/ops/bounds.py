"""Sizes of outputs where a verb is called functionally and the caller gives none.

A handle knows the step's lengths on the host and asks for exactly what is needed. Inside a compiled function only
shapes are known, so the bound must hold for every step of those shapes.
"""

from kvcore.ops.results import StepIndex
from kvcore.plan import CachePlan


def closed(plan: CachePlan, layer: int, role: str, index: StepIndex) -> int:
    """Entries that a step can complete: one for every ratio tokens, and one more for every request."""
    ratio = getattr(plan.spec.all_layers[layer], role).tokens_per_row
    tokens = len(index.positions)
    return min(tokens, tokens // ratio + len(index.slots))


def columns(plan: CachePlan, layer: int, role: str, index: StepIndex) -> int:
    """Rows of one request that a reader can return: a ring's, or those of all blocks in the table."""
    component = getattr(plan.spec.all_layers[layer], role)
    region = plan.region(layer, role)[0]
    if region.growth == "block":
        return index.block_table.shape[1] * region.rows
    if component.span is None:
        return region.rows
    # A classic ring shows the step's own tokens and, of the older ones, what the first of them may see.
    return component.span + len(index.positions) if role == "kv" else region.rows


def positions(plan: CachePlan, layer: int, role: str, index: StepIndex) -> int:
    """The same in positions, where rows are of several: what readers of keys and values count by."""
    component = getattr(plan.spec.all_layers[layer], role)
    return columns(plan, layer, role, index) * component.tokens_per_row
