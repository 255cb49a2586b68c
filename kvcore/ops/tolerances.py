"""How far arithmetic may differ from the reference: one table, printed in every report.

Storage has no tolerance: encoding the same values, moving and decoding give the same bytes. What is summed in another
order may differ in its last bits, and where such a result is then stored, a last bit may tip a code over to its
neighbour, rarely. So a computed result has a bound by the precision that it is returned in, and a stored one a bound by
the code that it is stored in, together with the share of values that may use it.
"""

from itertools import pairwise
from typing import NamedTuple

import msgspec

from kvcore.spec.codes import CODES, E2M1_LEVELS, NF4_LEVELS
from kvcore.spec.formats import Format


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Got agrees with want where ``|got - want| <= relative·|want| + absolute·largest``.

    Attributes:
        relative: part of the wanted value.
        absolute: part of the largest finite wanted magnitude in the same output.
        share: part of the values that may differ by more than fp32 arithmetic does (a code tipped over), 1 for all.
    """

    relative: float
    absolute: float
    share: float = 1.0


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One printed row of the table: what it bounds, in which format or precision, and the tolerance."""

    operation: str
    format: str
    relative: float
    absolute: float
    share: float


class Operation(NamedTuple):
    """How exact an operation is.

    Attributes:
        error: of its fp32 arithmetic, as a part of the value and of the largest magnitude.
        roundings: to bf16 on the way to a bf16 result, each of which may tip to the neighbour.
        mixes: it adds channels of like magnitude, so that what tipped before is large beside what is left.
        weights: what rounding its weights to bf16 may add to a bf16 result, as a part of the largest magnitude.
    """

    error: float
    roundings: int
    mixes: bool = False
    weights: float = 0.0


OPERATIONS: dict[str, Operation] = {
    "pooling": Operation(4e-6, 1),  # softmax over at most a few hundred rows, weighted sum
    "norm": Operation(4e-6, 2),  # pooling, then one mean over the channels
    "rope": Operation(8e-6, 3, mixes=True),  # pooling and norm, then a sine and a cosine
    "scores": Operation(1e-5, 1),  # dot products over the index dim, summed over heads
    # The same by tensor cores that multiply e4m3 by e4m3 and keep about 14 bits of the sums of 32 or 64 products.
    "scores of e4m3": Operation(2.0**-12, 1),
    # Dot products, softmax over the visible rows, weighted sum. Attention in bf16 rounds the weights of that sum to
    # bf16, as DeepSeek's own kernel does (its ``sparse_attn``): tensor cores multiply bf16 by bf16.
    "attention": Operation(1e-5, 1, weights=2.0**-8),
    "inverse rope": Operation(2e-5, 2, mixes=True, weights=2.0**-8),  # of an attention's rounded output
}

TIPPED = 1 / 64
"""Share of rounded values that may tip over: fp32 noise moves about one value in 10^4 across a bf16 boundary."""

ROUNDED = {
    "fp32": 0.0,
    "bf16": 2.0**-7,  # one step of an 8-bit significand, relative to the value at the bottom of its binade
    "fp16": 2.0**-10,
}
"""One step of a floating-point code, as a part of the value."""

_STEP = {
    # code: (step as a part of the value, largest step as a part of the largest value; doubled as a scale may tip too)
    "e4m3": (2.0**-3, 2 * 2.0**-9 / CODES["e4m3"].largest),
    "e2m1": (1 / 2, 2 * E2M1_LEVELS[1] / CODES["e2m1"].largest),
    "int8": (0.0, 2 / CODES["int8"].largest),
    "uint4": (0.0, 3 / CODES["uint4"].largest),  # of a range that is twice the largest magnitude at most
    "nf4": (0.0, max(high - low for low, high in pairwise(NF4_LEVELS))),
}


def computed(operation: str, precision: str) -> Tolerance:
    """Of a result that a verb returns rounded to ``precision``, fp32 or bf16."""
    return _rounded(operation, ROUNDED[precision])


def stored(operation: str, format: Format) -> list[tuple[int, int, Tolerance]]:
    """Of a result that was encoded in a format: (first channel, one past the last, tolerance) of every value field."""
    bounds: list[tuple[int, int, Tolerance]] = []
    channel = 0
    for field in format.fields:
        if not field.is_value:
            continue
        dims = field.dims or 0
        if field.code in ROUNDED:
            # Only fp32 rows are stored unrounded; all others passed through bf16 first.
            step = 0.0 if field.code == "fp32" else max(ROUNDED[field.code], ROUNDED["bf16"])
            bound = _rounded(operation, step)
        else:
            bound = _rounded(operation, ROUNDED["bf16"])
            relative, absolute = _STEP[field.code]
            bound = Tolerance(relative=bound.relative + relative, absolute=bound.absolute + absolute, share=bound.share)
        bounds.append((channel, channel + dims, bound))
        channel += dims
    return bounds


def noise(operation: str) -> float:
    """What every value may be off by, as a part of it and of the largest: fp32 arithmetic in another order."""
    return OPERATIONS[operation].error


def _rounded(operation: str, step: float) -> Tolerance:
    exactness = OPERATIONS[operation]
    return Tolerance(
        relative=exactness.error + step * exactness.roundings,
        absolute=exactness.error + (2 * step if exactness.mixes else 0.0) + (exactness.weights if step else 0.0),
        share=TIPPED if step and not exactness.weights else 1.0,
    )


def table(formats: list[Format]) -> tuple[Bound, ...]:
    """Every bound that applies to results in these formats, in a fixed order."""
    rows = [
        _bound(operation, precision, computed(operation, precision))
        for operation in OPERATIONS
        for precision in ("fp32", "bf16")
    ]
    for format in sorted(formats, key=lambda format: format.name):
        fields = [field.name for field in format.fields if field.is_value]
        for name, (_, _, tolerance) in zip(fields, stored("rope", format), strict=True):
            row = _bound("stored", f"{format.name}.{name}", tolerance)
            if row not in rows:
                rows.append(row)
    return tuple(rows)


def _bound(operation: str, format: str, tolerance: Tolerance) -> Bound:
    return Bound(operation=operation, format=format, **msgspec.structs.asdict(tolerance))
