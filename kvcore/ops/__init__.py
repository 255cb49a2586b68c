"""The verbs of a backend: the contract (``protocol``), what every cache puts before it, and defaults in terms of it.

What is named here is what a backend is written against.
"""

from kvcore.ops.protocol import Backend, Ops
from kvcore.ops.results import (
    AllEntries,
    Array,
    Attention,
    Choice,
    Closed,
    Given,
    PagedView,
    Paging,
    RawRows,
    RingView,
    SelectedEntries,
    StepIndex,
    Strip,
    VisibleRows,
    WindowRows,
)

__all__ = [
    "AllEntries",
    "Array",
    "Attention",
    "Backend",
    "Choice",
    "Closed",
    "Given",
    "Ops",
    "PagedView",
    "Paging",
    "RawRows",
    "RingView",
    "SelectedEntries",
    "StepIndex",
    "Strip",
    "VisibleRows",
    "WindowRows",
]
