"""Which rows of a batch a call keeps, as numbers that a cache can follow."""

from typing import Any

import torch

from kvcore.errors import RequestError


def in_order(beam_idx: Any, count: int) -> list[int]:
    """What ``reorder_cache`` takes, numbers of ``count`` rows, checked.

    Raises:
        RequestError: they are not one number a row that is to be, each of a row that there is.
    """
    try:
        rows = torch.as_tensor(beam_idx)
    except (TypeError, ValueError, RuntimeError):
        raise _refused(beam_idx, "reorder_cache", count) from None
    whole = not rows.is_floating_point() and not rows.is_complex() and rows.dtype != torch.bool
    # A list without numbers is a float tensor.
    found = rows.tolist() if rows.ndim == 1 and (whole or not len(rows)) else None
    if found is None or not all(0 <= row < count for row in found):
        raise _refused(beam_idx, "reorder_cache", count)
    return found


def indexed(indices: Any, count: int) -> list[int]:
    """The rows that ``tensor[indices, ...]`` gives of a tensor with ``count`` rows: numbers, also negative, or a mask.

    Raises:
        RequestError: torch refuses them, or they are not one list of rows.
    """
    numbers = torch.arange(count, device=indices.device if isinstance(indices, torch.Tensor) else None)
    try:
        found = numbers[indices, ...]
    except (TypeError, ValueError, IndexError, RuntimeError):
        raise _refused(indices, "batch_select_indices", count) from None
    if found.ndim != 1:
        raise _refused(indices, "batch_select_indices", count)
    return found.tolist()


def repeated(repeats: Any, count: int) -> list[int]:
    """Every one of ``count`` rows, ``repeats`` times in a row; a tensor says how often for each.

    Raises:
        RequestError: torch refuses it.
    """
    try:
        return torch.arange(count).repeat_interleave(repeats).tolist()
    except (TypeError, ValueError, IndexError, RuntimeError):
        raise RequestError(
            got=repeats,
            where="batch_repeat_interleave",
            allowed=f"how often, 0 or more, once or for each of {count} rows",
        ) from None


def _refused(given: Any, verb: str, count: int) -> RequestError:
    negative = ", negative ones from the end, or a mask of them" if verb == "batch_select_indices" else ""
    return RequestError(got=given, where=verb, allowed=f"numbers of {count} rows, 0 to {count - 1}{negative}")
