"""Keys and values in formats over tokens: groups are coded as their last token comes, an open one stays raw.

A query at position p sees what a request of p + 1 tokens holds: the groups that are whole by then, coded, and the rows
of the open one as they are. So what it sees depends on its position alone, not on how a prompt was cut into steps, and
no scale tells it anything of later tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.backends.reference import rows as place
from kvcore.backends.reference.encoding import DTYPES
from kvcore.ops import StepIndex
from kvcore.plan import LayerPlan, Region
from kvcore.pools import Pools


def append(layer: LayerPlan, pools: Pools, index: StepIndex, k: np.ndarray, v: np.ndarray) -> Pools:
    """Code every group that the step completes, then store the step's rows raw at slot·R + p mod R."""
    ratio = layer.component("kv").ratio
    own: list[Any] = own_rows(layer, k, v)
    for request, (start, length) in enumerate(zip(index.starts, index.lengths, strict=True)):
        for group in range(start // ratio, length // ratio):
            if (group + 1) * ratio <= index.stored[request]:
                continue
            for part, region in enumerate(layer.regions["kv"]):
                stored = closing(layer, pools, index, request, group, part, own[part])
                place.store(pools, region, *place.locate(region, index, request, group), stored)
    for region, rows in zip(layer.regions["kv_tail"], own, strict=True):
        place.append(pools, region, index, rows)
    return pools


def own_rows(layer: LayerPlan, k: np.ndarray | None, v: np.ndarray | None) -> list[np.ndarray | None]:
    """The step's own keys and values as raw canonical rows [T, heads, row_bytes]; None where they are not given."""
    given = zip(layer.regions["kv_tail"], (k, v), strict=True)
    return [None if values is None else place.encode_rows(region, values) for region, values in given]


def closing(
    layer: LayerPlan, pools: Pools, index: StepIndex, request: int, group: int, part: int, own: np.ndarray | None
) -> np.ndarray:
    """Canonical rows [heads, row_bytes] of a group, coded from its tokens' raw rows."""
    ratio, region = layer.component("kv").ratio, layer.regions["kv"][part]
    values = raw(layer, pools, index, request, range(group * ratio, group * ratio + ratio), part, own)
    # [tokens, heads, dim] -> a row for every head: channel by channel over tokens, or token by token.
    by_head = values.transpose(1, 2, 0) if region.format.tokens > 1 else values.transpose(1, 0, 2)
    return place.encode_rows(region, by_head.reshape(1, region.heads, -1))[0]


def raw(
    layer: LayerPlan, pools: Pools, index: StepIndex, request: int, positions: range, part: int, own: np.ndarray | None
) -> np.ndarray:
    """Values [n, heads, dim] of positions that the ring holds, or that are the step's own."""
    region = layer.regions["kv_tail"][part]
    rows = np.zeros((len(positions), region.heads, region.format.row), np.uint8)
    for row, position in enumerate(positions):
        rows[row] = place.read(pools, region, index, request, position, own)
    return place.decode_rows(region, rows)


def tokens_of(region: Region, stored: np.ndarray) -> np.ndarray:
    """Canonical rows [n, heads, row_bytes] of groups -> their tokens' values [n · ratio, heads, dim]."""
    values = place.decode_rows(region, stored)
    groups, heads, channels = values.shape
    ratio = region.tokens
    if region.format.tokens > 1:
        values = values.reshape(groups, heads, channels // ratio, ratio).transpose(0, 3, 1, 2)
    else:
        values = values.reshape(groups, heads, ratio, channels // ratio).transpose(0, 2, 1, 3)
    return values.reshape(groups * ratio, heads, channels // ratio)


class Held:
    """The keys, or the values, that the queries of one request may see in a step.

    Attributes:
        coded: of all positions whose group is whole at the end of the step, [n, heads, dim].
        raw: from the first position that some query sees raw to the end, [m, heads, dim].
        first: that position.
    """

    def __init__(
        self, layer: LayerPlan, pools: Pools, index: StepIndex, request: int, part: int, own: np.ndarray | None
    ) -> None:
        region, self.ratio = layer.regions["kv"][part], layer.component("kv").ratio
        start, length = int(index.starts[request]), int(index.lengths[request])
        stored = np.zeros((length // self.ratio, region.heads, region.format.row), np.uint8)
        for group in range(len(stored)):
            if own is not None and group >= start // self.ratio:
                stored[group] = closing(layer, pools, index, request, group, part, own)
            else:
                stored[group] = place.load(pools, region, *place.locate(region, index, request, group))
        self.coded = tokens_of(region, stored)
        self.first = min(start + 1, length) // self.ratio * self.ratio
        rest = range(self.first, length)
        self.raw = raw(layer, pools, index, request, rest, part, own).astype(self.coded.dtype)

    def at(self, length: int) -> np.ndarray:
        """What a request of ``length`` tokens holds, [length, heads, dim]."""
        closed = length // self.ratio * self.ratio
        return np.concatenate([self.coded[:closed], self.raw[closed - self.first : length - self.first]])


def gather(
    layer: LayerPlan, pools: Pools, index: StepIndex, positions: np.ndarray, part: int, values: np.ndarray | None
) -> np.ndarray:
    """Keys (part 0) or values (1) as the step leaves them, at positions [Q, columns]: [Q, columns, heads, dim]."""
    given, region = layer.component("kv").given[part], layer.regions["kv_tail"][part]
    own = None if values is None else place.encode_rows(region, values)
    code = DTYPES[layer.regions["kv"][part].format.value_code]
    dense = np.zeros((*positions.shape, given.heads, given.format.dim or 0), code)
    for request, at in enumerate(positions):
        held = Held(layer, pools, index, request, part, own).at(int(index.lengths[request]))
        dense[request, at >= 0] = held[at[at >= 0]]
    return dense


def rows_of_queries(
    layer: LayerPlan, pools: Pools, index: StepIndex, k: np.ndarray | None, v: np.ndarray | None, *, columns: int
) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Token of the step -> keys and values [columns, heads, dim] as its query sees them; zeros after its own."""
    own = own_rows(layer, k, v)
    held = [
        [Held(layer, pools, index, request, part, own[part]) for part in (0, 1)] for request in range(len(index.slots))
    ]

    def rows_of(token: int) -> tuple[np.ndarray, ...]:
        length = int(index.positions[token]) + 1
        found = (part.at(length) for part in held[index.request_index[token]])
        return tuple(
            np.concatenate([rows, np.zeros((columns, *rows.shape[1:]), rows.dtype)])[:columns] for rows in found
        )

    return rows_of
