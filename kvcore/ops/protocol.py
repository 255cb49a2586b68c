"""The verbs that a backend implements, as one typed Protocol.

Writers take pools and return pools (torch and NumPy work in place and return the same object, JAX returns new arrays);
readers return outputs only. Every verb takes the layer number and a ``StepIndex``. Arguments were checked at the door
(``cache.layer``, or ``ops.functional`` for ``cache.ops``), so verbs trust them.

Sizes that a caller leaves out (``closed``, ``columns``) are bounded by ``kvcore.ops.bounds``: rows beyond what there is
are invalid ones.

Letters: T tokens of the step, Q its requests in mapping order, d row channels, C ring rows, n columns of an output.
Rows older than the step are read from the pools; where a verb takes the step's own rows (``rows``, ``kv``, ``k`` …)
positions from the step are read from those instead, since the ring may not hold them yet. Rows that are invalid
(padding, beyond a length, unwritten, index -1) read as exact zeros with position -1; they are selected away, never
multiplied.

Shapes stand in the signatures as jaxtyping writes them: names are sizes that agree within a call. jaxtyping need not be
installed, for annotations are never evaluated but by tests, on every backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int, Integer, UInt8

    from kvcore.ops.results import (
        AllEntries,
        Array,
        Attention,
        Choice,
        Closed,
        RawRows,
        SelectedEntries,
        StepIndex,
        Strip,
        VisibleRows,
        WindowRows,
    )
    from kvcore.plan import CachePlan
    from kvcore.pools import Pools
    from kvcore.spec import Format, Rope


class Ops(Protocol):
    """All verbs of one backend, bound to one plan and device.

    Attributes:
        plan: what is addressed.
        device: where the pools lie, in the backend's words.
        in_place: writers change the arrays they are given; else they return new ones.
    """

    plan: CachePlan
    device: str
    in_place: bool

    @property
    def how(self) -> str:
        """How the verbs run, as reports say it: ``cpu``, ``cuda (NVIDIA H100)``, ``cpu, Triton interpreter``."""
        ...

    def explain(self) -> list[Choice]:
        """Which code runs each verb of each layer, and why; known when the verbs are bound, without pools.

        Example:
            >>> import kvcore
            >>> spec = kvcore.spec.presets.deepseek_v4_flash_tiny()
            >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=64)
            >>> cache.ops.explain()[0]
            Choice(layer=0, verb='append_window', implementation='numpy', reason='the reference is NumPy alone')
        """
        ...

    def allocate(self) -> Pools:
        """Fresh pools for the plan."""
        ...

    def asarray(self, array: Any) -> Array:
        """A NumPy array (bf16 as ml_dtypes) as an array of the framework on the device; its own arrays pass through."""
        ...

    def join(self, kv: Float[Array, "tokens width"], score: Float[Array, "tokens width"]) -> Float[Array, "tokens row"]:
        """Kv and score [T, width] side by side: [T, 2·width], the channels of a tail row."""
        ...

    def index(self, host: StepIndex) -> StepIndex:
        """The step index on the device, from NumPy int32 arrays."""
        ...

    def padded_index(self, host: StepIndex) -> StepIndex:
        """The index of a padded step, which may be kept in one place: good until the next of the same shape.

        A graph that was captured on one step then finds the next step's numbers where it looks for them.
        """
        ...

    def encode(
        self, format: str | Format, values: Float[Array, "rows dim"], global_scale: float = 1.0
    ) -> UInt8[Array, "rows row_bytes"]:
        """Values [rows, dim] fp32 or bf16 -> canonical rows [rows, row_bytes] uint8."""
        ...

    def decode(
        self,
        format: str | Format,
        rows: UInt8[Array, "rows row_bytes"],
        dim: int | None = None,
        global_scale: float = 1.0,
    ) -> Float[Array, "rows values"]:
        """Canonical rows [rows, row_bytes] -> values [rows, dim], bf16 where that is exact, else fp32."""
        ...

    def pack_page(self, format: str | Format, rows: UInt8[Array, "rows row_bytes"]) -> UInt8[Array, " page_bytes"]:
        """Canonical rows [P, row_bytes] -> the packed page of those P rows, [page bytes] uint8, padding zero."""
        ...

    def unpack_page(
        self, format: str | Format, page: UInt8[Array, " page_bytes"], rows: int
    ) -> UInt8[Array, "rows row_bytes"]:
        """A packed page of ``rows`` rows -> canonical rows [rows, row_bytes]."""
        ...

    def append_window(self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens dim"]) -> Pools:
        """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
        ...

    def append_rotated_window(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        rows: Float[Array, "tokens dim"],
        *,
        rope: Rope | Float[Array, " pairs"],
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
    ) -> Pools:
        """Norm (if a weight is given) and rotate rows [T, d] at their positions, then ``append_window``.

        Rounded to bf16 after the norm and after the rotation, as ``flush`` does; not at all where rows are fp32.
        """
        ...

    def append_tail(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
    ) -> Pools:
        """Store raw compressor rows kv and score, [T, width] each, fp32 (bf16 is widened), at slot·R + p mod R."""
        ...

    def append_index_tail(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
    ) -> Pools:
        """The same for the indexer's compressor."""
        ...

    def gather_window(
        self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens dim"] | None = None
    ) -> WindowRows:
        """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
        ...

    def compress(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        *,
        closed: int | None = None,
        role: str = "entries",
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
    ) -> Float[Array, "closed dim"]:
        """Pool, for each of the first ``closed`` entries that the step completes, its window; norm; -> [closed, d].

        Softmax over the window's rows separately for every channel, weighted sum, RMS norm if a weight is given. With
        overlap the rows are the previous window's carry halves, then this window's cur halves. Bf16 rounding as in the
        published inference code (after pooling and after the norm), none where entries are stored as fp32.
        """
        ...

    def flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        index_kv: Float[Array, "tokens index_width"] | None = None,
        index_score: Float[Array, "tokens index_width"] | None = None,
        *,
        closed: int | None = None,
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
        rope: Rope | Float[Array, " pairs"] | None = None,
        index_norm_weight: Float[Array, " index_dim"] | None = None,
    ) -> Pools:
        """Compress, rotate at position m·i, encode and store every entry that the step completes; then index keys."""
        ...

    def append_flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        index_kv: Float[Array, "tokens index_width"] | None = None,
        index_score: Float[Array, "tokens index_width"] | None = None,
        *,
        newest: int | None = None,
        closed: int | None = None,
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
        rope: Rope | Float[Array, " frequencies"] | None = None,
        index_norm_weight: Float[Array, " index_dim"] | None = None,
    ) -> Pools:
        """``flush`` and the append of the same rows to the tails: all that a decode step does with them.

        Args:
            newest: most new tokens of a request in the step, where the caller knows it: 1 in plain decode. It decides
                only whether one launch may do both.
        """
        ...

    def store_entries(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        entries: Float[Array, "closed dim"] | None,
        index_keys: Float[Array, "closed index_dim"] | None = None,
    ) -> Pools:
        """Encode and store entries [closed, d] that the caller compressed, request by request; index keys likewise.

        Either may be None: that role is left alone.
        """
        ...

    def closed(self, layer: int, index: StepIndex, count: int | None = None, role: str = "entries") -> Closed:
        """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
        ...

    def gather_entries(
        self, pools: Pools, layer: int, index: StepIndex, indices: Int[Array, "tokens k"]
    ) -> SelectedEntries:
        """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
        ...

    def gather_all_entries(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None, role: str = "entries"
    ) -> AllEntries:
        """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
        ...

    def index_scores(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads dim"],
        weights: Float[Array, "tokens heads"],
        *,
        columns: int | None = None,
    ) -> Float[Array, "tokens columns"]:
        """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m."""
        ...

    def select(self, scores: Float[Array, "tokens columns"], k: int) -> Int[Array, "tokens k"]:
        """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
        ...

    def index_select(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads dim"],
        weights: Float[Array, "tokens heads"],
        k: int,
        *,
        columns: int | None = None,
    ) -> Int[Array, "tokens k"]:
        """``select(index_scores(...), k)`` -> [T, k] int32, where a backend can do without all scores at once."""
        ...

    def attend(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads dim"],
        selected: Int[Array, "tokens k"] | None = None,
        *,
        rows: Float[Array, "tokens dim"] | None = None,
        sink: Float[Array, " heads"] | None = None,
        scale: float | None = None,
        rope: Rope | Float[Array, " frequencies"] | None = None,
    ) -> Attention:
        """Attend from q [T, H, d] to the window and the selected (None: all visible) entries, where K = V.

        ``sink`` [H] adds exp(sink) to the denominator once. Scale is d^-0.5 unless given. No key: out 0, lse -inf.

        ``rope`` turns the last channels of every output back by the query's position, which takes the position out of
        values that are rotated keys; lse is the same. It does so after the output is rounded to the query's dtype, in
        fp32, and rounds the result to that dtype again, as DeepSeek-V4's published inference code: its kernel returns
        bf16, and conjugate frequencies turn that (``inference/model.py``, after the sparse attention).
        """
        ...

    def append_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        k: Float[Array, "tokens key_heads key_dim"],
        v: Float[Array, "tokens value_heads value_dim"],
    ) -> Pools:
        """Encode and store k [T, key_heads, key_dim] and v [T, value_heads, value_dim]."""
        ...

    def gather_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        k: Float[Array, "tokens key_heads key_dim"] | None = None,
        v: Float[Array, "tokens value_heads value_dim"] | None = None,
        *,
        columns: int | None = None,
    ) -> tuple[
        Float[Array, "requests columns key_heads key_dim"],
        Float[Array, "requests columns value_heads value_dim"],
        Int[Array, "requests columns"],
    ]:
        """Every row that a query of the step may see: k, v [Q, columns, heads, dim], positions [Q, columns]."""
        ...

    def kv_view(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None
    ) -> tuple[Array, Array] | None:
        """What ``gather_kv`` gives of rows that are in the pool, as the pool's own memory; None where it must copy."""
        ...

    def append_kv_view(
        self, pools: Pools, layer: int, index: StepIndex, k: Array, v: Array, *, columns: int | None = None
    ) -> tuple[Pools, tuple[Array, Array] | None]:
        """``append_kv``, then ``kv_view``: all that a decode step does whose attention is the caller's."""
        ...

    def mask(self, layer: int, index: StepIndex, *, columns: int | None = None) -> Bool[Array, "tokens columns"]:
        """[T, columns] bool over ``gather_kv``'s rows: what each query may see.

        That is: its own position and earlier ones, back to the window's or the chunk's first, the window counting the
        query itself, without left padding. A query that is padding sees nothing.
        """
        ...

    def visible_rows(self, layer: int, index: StepIndex, *, columns: int | None = None) -> VisibleRows:
        """The same with the position of every row, [Q, columns] int32, for kernels that mask by themselves."""
        ...

    def from_batch(self, index: StepIndex, batch: Array) -> Array:
        """A batch [Q, S, ...] padded on the right, a request's new tokens first -> rows [T, ...] in step order."""
        ...

    def to_batch(self, index: StepIndex, rows: Array, width: int) -> Array:
        """The inverse: rows [T, ...] -> [Q, width, ...], zeros where a request has fewer new tokens."""
        ...

    def attend_kv(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads key_dim"],
        k: Float[Array, "tokens key_heads key_dim"] | None = None,
        v: Float[Array, "tokens value_heads value_dim"] | None = None,
        *,
        columns: int | None = None,
        sink: Float[Array, " heads"] | None = None,
        scale: float | None = None,
    ) -> Attention:
        """Attend from q [T, H, key_dim] to the layer's K-V; H is a multiple of key_heads; out [T, H, value_dim]."""
        ...

    def reset_slots(self, pools: Pools, slots: Int[Array, " slots"]) -> Pools:
        """Make slots [n] as if never used; -1 is ignored."""
        ...

    def poison(self, pools: Pools, slots: Int[Array, " slots"], blocks: Int[Array, " blocks"]) -> Pools:
        """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
        ...

    def copy_slots(self, pools: Pools, sources: Int[Array, " slots"], targets: Int[Array, " slots"]) -> Pools:
        """Copy whole slots; all sources are read before any target is written."""
        ...

    def copy_blocks(self, pools: Pools, sources: Int[Array, " blocks"], targets: Int[Array, " blocks"]) -> Pools:
        """Copy whole blocks; all sources are read before any target is written."""
        ...

    def gather_rows(
        self,
        pools: Pools,
        layer: int,
        role: str,
        index: StepIndex,
        rows: tuple[Float[Array, "tokens ..."], ...] | None = None,
        *,
        columns: int | None = None,
    ) -> RawRows:
        """The role's live rows in position order as canonical bytes; ``rows`` are the step's own, one per part."""
        ...

    def read_ring(self, pools: Pools, layer: int, role: str, index: StepIndex) -> Any:
        """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
        ...

    def restore_ring(self, pools: Pools, layer: int, role: str, index: StepIndex, saved: Any) -> Pools:
        """Put back what ``read_ring`` saved."""
        ...

    def store_rows(self, pools: Pools, layer: int, role: str, index: StepIndex, raw: RawRows) -> Pools:
        """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
        ...

    def digest_rows(self, raw: RawRows, salt: int) -> Integer[Array, "requests 2"]:
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
        ...

    def move_strips(
        self, pools: Pools, pages: Array, strips: Sequence[Strip], units: Array, *, store: bool = False
    ) -> bool:
        """Copy a request's canonical rows from the pools into pages, or with ``store`` back, all strips at once.

        Row r of a strip's page b is its row ``numbers[b · rows + r]``, which lies in unit ``units[b]``. Bytes of pages
        that are no strip's, and rows of the pools that are in no page, are left alone.

        Args:
            pages: [pages, bytes] uint8 on the device, without gaps, written in place.
            strips: of blocks, or of slots, whose pages are one and which have room for them; numbers are ranges.
            units: block of every page, or the slot, [pages] int32; of a unit -1 rows read as zeros and are not stored.

        Returns:
            True where it was done, all of it in place. False, and nothing was done, where this backend moves a request
            by ``gather_rows`` and ``store_rows`` only: always, or out of a layout that it cannot copy from.
        """
        ...

    def digest_strips(self, pages: Array, strips: Sequence[Strip], first_page: int) -> Array | None:
        """Two lanes for every page, the sums of ``digest_rows`` over its strips -> [pages, 2] int64, all at once.

        Args:
            pages: [pages, bytes] uint8 on the device, without gaps: some of a request's.
            strips: as for ``move_strips``; each is salted with its ``kvcore.digest.region_salt``.
            first_page: number of the first of these pages in the request: its rows begin at ``first_page · rows``.

        Returns:
            None where this backend digests pages by ``digest_rows`` only: always, or of such strips.
        """
        ...


class Backend(Protocol):
    """What a plug-in's ``load`` returns."""

    name: str

    def create(self, plan: CachePlan, *, device: str | None = None, check: bool = False) -> Ops:
        """Bind the verbs to a plan and a device.

        Raises:
            BackendError: the device or the plan's layout is not supported.
        """
        ...

    def default_layout(self, device: str | None) -> str:
        """The layout that ``layout="auto"`` means."""
        ...
