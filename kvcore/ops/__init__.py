"""The verbs of a backend: the contract (``protocol``, ``fused``), and what every cache puts before it.

What is named here is what a backend is written against.
"""

from kvcore.ops.fused import Ops
from kvcore.ops.protocol import Backend, RequiredOps
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
    "RequiredOps",
    "RingView",
    "SelectedEntries",
    "StepIndex",
    "Strip",
    "VisibleRows",
    "WindowRows",
]
