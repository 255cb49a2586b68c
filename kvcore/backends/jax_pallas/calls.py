"""How the TPU's kernels are called: compiled, or in the interpreter that looks for their faults."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu

INTERPRETER = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan", detect_races=True)
"""Finds reads before a DMA has arrived, memory that nobody wrote, and rows outside of a pool."""

TILED = ("tpu", "interpret")
"""Kernels of pools that are whole tiles: compiled for a TPU, and interpreted."""

ROWS_A_CALL = 1 << 15
"""Rows that one kernel call moves: their addresses lie in scalar memory, which holds a megabyte."""


def interpreted(pools: Any) -> Any:
    """``pallas_call``'s ``interpret`` for a layer's pools."""
    return INTERPRETER if pools.kernels == "interpret" else False
