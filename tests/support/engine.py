"""An engine's paged cache, written and read by its own page arithmetic: blocks, rows of a block, heads, channels."""

from typing import Any

import numpy as np

from kvcore.adoption import LAYOUTS
from kvcore.spec import presets

BLOCKS, ROWS, HEADS, DIM, LAYERS = 10, 16, 2, 8, 3
SPEC = presets.classic(layers=LAYERS, key_heads=HEADS, key_dim=DIM, block_tokens=ROWS, key_format="fp32")
PAGED = [name for name, axes in LAYOUTS.items() if "NH" in axes and name != "NL_X_NB_BS_NH_HS"]
"""Layouts of keys and values."""
COUNTS = {"TWO": 2, "NB": BLOCKS, "BS": ROWS, "NH": HEADS, "HS": DIM, "CS": 2 * DIM, "NL": LAYERS, "ONE": 1}
COUNTS["NBBS"] = BLOCKS * ROWS


def rows_of(layer: int, part: int, position: int) -> np.ndarray:
    """What a model gives for a token: [heads, dim] fp32."""
    return np.random.default_rng([layer, part, position]).standard_normal((HEADS, DIM)).astype(np.float32)


class Engine:
    """Tensors of one layout.

    Attributes:
        tensors: as the layout's name says.
        layout: its name.
    """

    def __init__(self, layout: str, kind: str = "numpy", counts: dict[str, int] | None = None) -> None:
        self.layout = layout
        self._axes = LAYOUTS[layout]
        shape = tuple({**COUNTS, **(counts or {})}[axis] for axis in self._axes)

        def fresh() -> Any:
            if kind == "numpy":
                return np.zeros(shape, np.float32)
            import torch

            return torch.zeros(shape)

        if layout.startswith("TWO_X_NL_X"):
            self.tensors: Any = [[fresh() for _ in range(LAYERS)] for _ in range(2)]
        elif layout.startswith("NL_X_TWO_X"):
            self.tensors = [[fresh(), fresh()] for _ in range(LAYERS)]
        elif layout.startswith("NL_X"):
            self.tensors = [fresh() for _ in range(LAYERS)]
        else:
            self.tensors = [fresh()]

    def at(self, layer: int, part: int, block: int, row: int) -> np.ndarray:
        """A row's view [heads, dim]; ``part`` is 0 for keys, 1 for values."""
        if self.layout.startswith("TWO_X_NL_X"):
            tensor = self.tensors[part][layer]
        elif self.layout.startswith("NL_X_TWO_X"):
            tensor = self.tensors[layer][part]
        else:
            tensor = self.tensors[layer if self.layout.startswith("NL_X") else 0]
        channels = slice(part * DIM, part * DIM + DIM)
        named = {"TWO": part, "NB": block, "BS": row, "NL": layer, "ONE": 0, "NBBS": block * ROWS + row, "CS": channels}
        return np.asarray(tensor)[tuple(named.get(axis, slice(None)) for axis in self._axes)]

    def write(self, blocks: list[int], start: int, end: int) -> None:
        """A request's rows from ``start`` on, where its slot mapping says."""
        for position in range(start, end):
            for layer in range(LAYERS):
                for part in (0, 1):
                    place = self.at(layer, part, blocks[position // ROWS], position % ROWS)
                    place[...] = rows_of(layer, part, position)

    def read(self, layer: int, part: str, block: int, row: int) -> np.ndarray:
        """For ``AdoptedCache.compare``."""
        return self.at(layer, int(part == "value"), block, row)
