"""What a check looks at: named host arrays, each with the rule by which it is compared."""

from typing import Literal, NamedTuple

import numpy as np

from kvcore.spec import Format


class Output(NamedTuple):
    """One thing that a verb left behind or returned.

    Attributes:
        name: what it is, for example ``1.window`` (rows of a pool) or ``scores``.
        array: on the host.
        rule: ``exact``: equal bits. ``close``: within the tolerance of ``operation``. ``selection``: entry numbers,
            which may differ where the scores that chose them agree.
        axes: names of the array's axes.
        format: of canonical rows, whose last axis is bytes; None for other arrays.
        global_scale: of those rows.
        precision: that computed values were rounded to, ``fp32`` or ``bf16``, whatever dtype they come in.
        operation: row of the tolerance table, under ``close`` and ``selection``.
        scores: [T, n] that a selection was made from.
    """

    name: str
    array: np.ndarray
    rule: Literal["exact", "close", "selection"]
    axes: tuple[str, ...]
    format: Format | None = None
    global_scale: float = 1.0
    precision: str = ""
    operation: str = ""
    scores: np.ndarray | None = None


ROW_AXES = ("unit", "row", "head", "byte")


def exact(name: str, array: np.ndarray, *axes: str) -> Output:
    """Indices, masks, decoded rows: equal to the last bit."""
    return Output(name, array, "exact", axes)


def rows(name: str, array: np.ndarray, format: Format, *axes: str) -> Output:
    """Canonical rows: equal bytes."""
    return Output(name, array, "exact", axes or ROW_AXES, format)


def close(name: str, array: np.ndarray, operation: str, *axes: str, precision: str = "") -> Output:
    """Computed values, within the tolerance of their precision: that of their dtype unless given."""
    rounded = precision or ("fp32" if array.dtype == np.float32 else "bf16")
    return Output(name, array, "close", axes, precision=rounded, operation=operation)


def computed_rows(
    name: str,
    array: np.ndarray,
    format: Format,
    operation: str,
    *,
    global_scale: float = 1.0,
    axes: tuple[str, ...] = (),
) -> Output:
    """Canonical rows of computed values: decoded, within the tolerance of the format."""
    return Output(name, array, "close", axes or ROW_AXES, format, global_scale, operation=operation)


def selection(name: str, indices: np.ndarray, scores: np.ndarray) -> Output:
    """Entries [T, k] chosen by scores [T, n] that were themselves computed."""
    return Output(name, indices, "selection", ("token", "pick"), operation="scores", scores=scores)
