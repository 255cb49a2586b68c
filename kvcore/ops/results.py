"""What verbs are given and give back: a step's index, rows with their positions, views, explanations.

Letters are those of ``kvcore.ops.protocol``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from kvcore.plan import CachePlan
    from kvcore.spec import BlockLayout, Format

Array: TypeAlias = Any
"""An array of the backend's framework."""


class Given(Protocol):
    """What verbs of a layer take for an array: one of the backend's framework, or of NumPy; no list, and no number."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class Paging:
    """What makes a step's index one of a cache's: how its plan numbers slots and blocks. Data of a pytree, no arrays.

    Attributes:
        slots: of the plan.
        blocks: likewise.
        block_tokens: tokens of a block.
        max_blocks: columns that a block table has at most.
    """

    slots: int
    blocks: int
    block_tokens: int
    max_blocks: int

    @classmethod
    def of(cls, plan: CachePlan) -> Paging:
        """A plan's."""
        return cls(plan.slots, plan.blocks, plan.block_tokens, plan.max_blocks)

    def __str__(self) -> str:
        return f"{self.slots} slots, {self.blocks} blocks of {self.block_tokens} tokens, {self.max_blocks} a request"


class StepIndex(NamedTuple):
    """Where one step's tokens lie: int32 arrays on the backend's device, a pytree, the same for every layer.

    Its arrays are not written to; ``_replace`` makes another index. A backend may remember what an index says.

    Attributes:
        positions: [T] absolute position of each token, -1 for padding; tokens come request by request.
        request_index: [T] row of each token's request in the arrays below, -1 for padding.
        slots: [Q] slot of each request, -1 for padding.
        starts: [Q] length of each request before the step.
        lengths: [Q] length after it; a request's new tokens have positions starts .. lengths - 1.
        block_table: [Q, columns] block numbers in order of history, -1 beyond the request's blocks; as wide as the
            step's longest request needs, rounded up to a few widths; in padded steps, and under JAX, as any could need.
        stored: [Q] tokens whose paged rows were taken over at admission and are not written again, 0 without a hit.
        left_padding: [Q] positions at the start of each request that no query of a classic layer, or of a window, sees:
            they are no tokens, or a window's rows of them are gone. Chunks are counted behind them. None: there are
            none.
        paging: whose index it is, so that another cache's verbs refuse it; None of one that was put together by hand.
    """

    positions: Array
    request_index: Array
    slots: Array
    starts: Array
    lengths: Array
    block_table: Array
    stored: Array
    left_padding: Array | None = None
    paging: Paging | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The fields that are arrays, in order."""
        return tuple(array for array in self[:-1] if array is not None)


class WindowRows(NamedTuple):
    """Decoded ring rows in position order: values [Q, C, d], positions [Q, C] int32 (-1 = no row)."""

    values: Array
    positions: Array


class SelectedEntries(NamedTuple):
    """Decoded entries by index: values [T, k, d], valid [T, k] bool."""

    values: Array
    valid: Array


class AllEntries(NamedTuple):
    """Decoded entries of every request: values [Q, n, d], counts [Q] int32, positions [Q, n] int32 (m·i, or -1)."""

    values: Array
    counts: Array
    positions: Array


class RawRows(NamedTuple):
    """Canonical rows: rows [Q, n, row_bytes] uint8, positions [Q, n] int32 (-1 and zero bytes where there is none)."""

    rows: Array
    positions: Array


class Closed(NamedTuple):
    """Entries that the step completes, request by request: request_index [n], entry_index [n], both int32."""

    request_index: Array
    entry_index: Array


class VisibleRows(NamedTuple):
    """A mask by rows: positions [Q, n] int32 of ``gather_kv``'s rows (-1 = no row), valid [T, n] bool of each query."""

    positions: Array
    valid: Array


class Attention(NamedTuple):
    """Attention output: out [T, H, d] in the query's dtype, lse [T, H] fp32 (natural log, sink excluded)."""

    out: Array
    lse: Array


class RingView(NamedTuple):
    """A ring's raw buffers, zero-copy: ``buffers`` maps a buffer's name to [slots, bytes of a slot] uint8."""

    format: Format
    layout: BlockLayout
    buffers: dict[str, Array]
    slots: Array
    slot_rows: int
    lengths: Array


class PagedView(NamedTuple):
    """A paged pool's raw buffers, zero-copy: ``buffers`` maps a buffer's name to [blocks, bytes of a block] uint8."""

    format: Format
    layout: BlockLayout
    buffers: dict[str, Array]
    block_table: Array
    block_rows: int
    counts: Array


class Strip(NamedTuple):
    """One component's canonical rows of one request, page after page; where pages are one record, it is one page.

    Attributes:
        layer: whose pool they are of.
        role: likewise.
        start: first byte in every page.
        rows: rows a page; the last page that has any may have fewer.
        row_bytes: of a canonical row.
        numbers: of all its rows in the request's history, ascending; a range where they are neighbours.
        tokens_per_row: positions from one row to the next; row ``i`` is at position ``i · tokens_per_row``.
    """

    layer: int
    role: str
    start: int
    rows: int
    row_bytes: int
    numbers: range | tuple[int, ...]
    tokens_per_row: int

    @property
    def nbytes(self) -> int:
        """Bytes of a page's rows."""
        return self.rows * self.row_bytes

    @property
    def stop(self) -> int:
        """First byte after them."""
        return self.start + self.nbytes


class Choice(NamedTuple):
    """Which code runs a verb of a layer.

    Attributes:
        layer: its number; None for verbs on whole slots, blocks and pages.
        verb: its name, with the role where that is an argument: ``gather_all_entries(index_keys)``.
        implementation: ``numpy``; ``torch``, ``jax.numpy``: plain operations; ``triton``, ``pallas``, ``flash_mla``,
            ``flashinfer``: kernels, ``interpreted`` where an interpreter runs them.
        reason: why, and for which arguments of a call other code runs.
    """

    layer: int | None
    verb: str
    implementation: str
    reason: str
