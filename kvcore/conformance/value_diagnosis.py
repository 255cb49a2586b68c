"""Likely causes of a disagreement between what verbs return: values, indices, masks. The twin of ``diagnosis``."""

from collections.abc import Callable

import numpy as np

Array = np.ndarray
SHIFTS = (1, -1, 2, -2)


def cause_of_values(want: Array, got: Array) -> str:
    """Why arrays differ; ``""`` if the pattern is not a known one."""
    return next(filter(None, (describe(want, got) for describe in _patterns(want.dtype))), "")


def _patterns(dtype: np.dtype) -> tuple[Callable[[Array, Array], str], ...]:
    """From the most to the least specific, for floats (bf16's kind is V), booleans and integers."""
    if dtype.kind == "b":
        return (_mask_edge, _shifted)
    return (
        (_shifted, _offset) if dtype.kind in "ui" else (_invalid_read, _visibility, _swapped_pairs, _shifted, _factor)
    )


def _invalid_read(want: Array, got: Array) -> str:
    """Invalid rows read as exact zeros; NaN is what poison decodes to."""
    one, other = want.astype(np.float32), got.astype(np.float32)
    wrong = (one != other) & ~(np.isnan(one) & np.isnan(other))
    if np.isnan(other[wrong]).all():
        masked = (one[wrong] == 0).all()
        return (
            "NaN where nothing is valid: masked by multiplying" if masked else "NaN: a row that holds nothing was read"
        )
    if (other[wrong] == 0).all():
        return "valid values read as zero"
    rows = wrong.any(axis=-1)
    if want.ndim > 2 and (one == 0).all(axis=-1)[rows].all():
        return "a row that is not valid was read: -1 wrapped, or a limit is off by one"
    return ""


def _visibility(want: Array, got: Array) -> str:
    one, other = np.isneginf(want.astype(np.float32)), np.isneginf(got.astype(np.float32))
    if (one & ~other).any() and not (other & ~one).any():
        return "more is visible than may be"
    return "less is visible than should be" if (other & ~one).any() and not (one & ~other).any() else ""


def _swapped_pairs(want: Array, got: Array) -> str:
    if want.ndim == 0 or want.shape[-1] % 2:
        return ""
    swapped = want.reshape(*want.shape[:-1], -1, 2)[..., ::-1].reshape(want.shape)
    return "neighbouring channels swapped (nibbles swapped)" if _alike(swapped, got) else ""


def _shifted(want: Array, got: Array) -> str:
    for axis in range(want.ndim):
        for shift in SHIFTS:
            if want.shape[axis] > 2 * abs(shift):
                kept = slice(shift, None) if shift > 0 else slice(None, shift)
                place = (slice(None),) * axis + (kept,)
                if _alike(np.roll(want, shift, axis=axis)[place], got[place]):
                    return f"shifted by {shift:+d} along axis {axis}"
    return ""


def _factor(want: Array, got: Array) -> str:
    one, other = want.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(other)
    used = finite & (np.abs(one) > 1e-3 * np.abs(one[finite]).max(initial=0))
    if used.sum() < 2:
        return ""
    ratios = other[used] / one[used]
    typical = float(np.median(ratios))
    if abs(typical - 1) < 1e-2 or np.abs(ratios - typical).max() > 1e-2 * abs(typical):
        return ""
    return "sign flipped" if abs(typical + 1) < 1e-2 else f"off by a factor of {typical:.4g}"


def _offset(want: Array, got: Array) -> str:
    steps = np.unique((got.astype(np.int64) - want)[want != got])
    return f"off by {int(steps[0]):+d}" if len(steps) == 1 else ""


def _mask_edge(want: Array, got: Array) -> str:
    if not (want & ~got).any():
        return "more is visible than may be"
    return "less is visible than should be" if not (got & ~want).any() else ""


def _alike(one: Array, other: Array) -> bool:
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= 1e-5 * np.abs(a))
    # Something must be there to recognise: zeros are alike however they are shifted.
    return bool(same.all() and np.unique(b[np.isfinite(b)]).size > 2)
