"""The verbs that a backend must implement, as one typed Protocol; ``kvcore.ops.fused`` has the others.

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

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer, UInt8

    from kvcore.ops.results import (
        AllEntries,
        Array,
        Attention,
        Closed,
        RawRows,
        SelectedEntries,
        StepIndex,
        WindowRows,
    )
    from kvcore.plan import CachePlan
    from kvcore.pools import Pools
    from kvcore.spec import Format, Rope


class RequiredOps(Protocol):
    """What one backend must have, bound to one plan and device.

    Attributes:
        plan: what is addressed.
        device: where the pools lie, in the backend's words.
        in_place: writers change the arrays they are given; else they return new ones.
    """

    plan: CachePlan
    device: str
    in_place: bool

    @abstractmethod
    def allocate(self) -> Pools:
        """Fresh pools for the plan."""
        ...

    @abstractmethod
    def asarray(self, array: Any) -> Array:
        """A NumPy array (bf16 as ml_dtypes) as an array of the framework on the device; its own arrays pass through."""
        ...

    @abstractmethod
    def index(self, host: StepIndex) -> StepIndex:
        """The step index on the device, from NumPy int32 arrays."""
        ...

    @abstractmethod
    def encode(
        self, format: str | Format, values: Float[Array, "rows dim"], global_scale: float = 1.0
    ) -> UInt8[Array, "rows row_bytes"]:
        """Values [rows, dim] fp32 or bf16 -> canonical rows [rows, row_bytes] uint8."""
        ...

    @abstractmethod
    def decode(
        self,
        format: str | Format,
        rows: UInt8[Array, "rows row_bytes"],
        dim: int | None = None,
        global_scale: float = 1.0,
    ) -> Float[Array, "rows values"]:
        """Canonical rows [rows, row_bytes] -> values [rows, dim], bf16 where that is exact, else fp32."""
        ...

    @abstractmethod
    def pack_page(self, format: str | Format, rows: UInt8[Array, "rows row_bytes"]) -> UInt8[Array, " page_bytes"]:
        """Canonical rows [P, row_bytes] -> the packed page of those P rows, [page bytes] uint8, padding zero."""
        ...

    @abstractmethod
    def unpack_page(
        self, format: str | Format, page: UInt8[Array, " page_bytes"], rows: int
    ) -> UInt8[Array, "rows row_bytes"]:
        """A packed page of ``rows`` rows -> canonical rows [rows, row_bytes]."""
        ...

    @abstractmethod
    def append_window(self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens dim"]) -> Pools:
        """Encode rows [T, d] and store them at slot·C + p mod C; only each ring's last C positions are written."""
        ...

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def gather_window(
        self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens dim"] | None = None
    ) -> WindowRows:
        """The last min(length, W) positions of every request at the end of the step, ascending from row 0."""
        ...

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def closed(self, layer: int, index: StepIndex, count: int | None = None, role: str = "entries") -> Closed:
        """The first ``count`` entries that the step completes, in storing order; -1 where there are fewer."""
        ...

    @abstractmethod
    def gather_entries(
        self, pools: Pools, layer: int, index: StepIndex, indices: Int[Array, "tokens k"]
    ) -> SelectedEntries:
        """Entries by logical index, indices [T, k]; valid iff 0 <= i < the request's entries at the end of the step."""
        ...

    @abstractmethod
    def gather_all_entries(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None, role: str = "entries"
    ) -> AllEntries:
        """Every entry (``role`` entries or index_keys) of every request, as [Q, columns, d]."""
        ...

    @abstractmethod
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
        """``sum_h weights[t,h] · relu(q[t,h] · key[s])`` -> [T, columns] fp32; -inf unless s < (t + 1) div m.

        Queries are fp32, bf16, or e4m3 without their scales, which are part of the weights then: FP8 tensor cores
        multiply those with e4m3 keys as they are stored.
        """
        ...

    @abstractmethod
    def select(self, scores: Float[Array, "tokens columns"], k: int) -> Int[Array, "tokens k"]:
        """Top k of scores [T, n] -> [T, k] int32: highest first, ties to the lowest index, -1 where score is -inf."""
        ...

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def mask(self, layer: int, index: StepIndex, *, columns: int | None = None) -> Bool[Array, "tokens columns"]:
        """[T, columns] bool over ``gather_kv``'s rows: what each query may see.

        That is: its own position and earlier ones, back to the window's or the chunk's first, the window counting the
        query itself, without left padding. A query that is padding sees nothing.
        """
        ...

    @abstractmethod
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

    @abstractmethod
    def append_state(
        self, pools: Pools, layer: int, index: StepIndex, states: Float[Array, "tokens heads *dims"]
    ) -> Pools:
        """Store the state after every token of the step, [T, heads, key_dim, value_dim], at slot·C + p mod C.

        Only each ring's last C are written. Heads and dims are those of the component, two axes or three.
        """
        ...

    @abstractmethod
    def write_state(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        states: Float[Array, "requests heads *dims"],
        *,
        newest: int | None = None,
    ) -> Pools:
        """Store the state after each request's last token, [Q, heads, key_dim, value_dim], and NaN for its others.

        Args:
            newest: most new tokens of a request in the step, where the caller knows it: 1 in plain decode.
        """
        ...

    @abstractmethod
    def read_state(self, pools: Pools, layer: int, index: StepIndex) -> Float[Array, "requests heads *dims"]:
        """The states that the step's tokens go on from, [Q, heads, key_dim, value_dim]: those of ``index.starts``.

        Zeros for a request that has no token yet.
        """
        ...

    @abstractmethod
    def append_conv(self, pools: Pools, layer: int, index: StepIndex, rows: Float[Array, "tokens channels"]) -> Pools:
        """Encode and store the step's inputs of a convolution, [T, channels], at slot·C + p mod C."""
        ...

    @abstractmethod
    def gather_conv(self, pools: Pools, layer: int, index: StepIndex) -> Float[Array, "requests inputs channels"]:
        """The ``width - 1`` inputs right before the step's, oldest first, [Q, width - 1, channels].

        They end at ``index.starts``; zeros before the first token.
        """
        ...

    @abstractmethod
    def reset_slots(self, pools: Pools, slots: Int[Array, " slots"]) -> Pools:
        """Make slots [n] as if never used; -1 is ignored."""
        ...

    @abstractmethod
    def poison(self, pools: Pools, slots: Int[Array, " slots"], blocks: Int[Array, " blocks"]) -> Pools:
        """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
        ...

    @abstractmethod
    def copy_slots(self, pools: Pools, sources: Int[Array, " slots"], targets: Int[Array, " slots"]) -> Pools:
        """Copy whole slots; all sources are read before any target is written."""
        ...

    @abstractmethod
    def copy_blocks(self, pools: Pools, sources: Int[Array, " blocks"], targets: Int[Array, " blocks"]) -> Pools:
        """Copy whole blocks; all sources are read before any target is written."""
        ...

    @abstractmethod
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

    @abstractmethod
    def read_ring(self, pools: Pools, layer: int, role: str, index: StepIndex) -> Any:
        """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``."""
        ...

    @abstractmethod
    def restore_ring(self, pools: Pools, layer: int, role: str, index: StepIndex, saved: Any) -> Pools:
        """Put back what ``read_ring`` saved."""
        ...

    @abstractmethod
    def store_rows(self, pools: Pools, layer: int, role: str, index: StepIndex, raw: RawRows) -> Pools:
        """Write canonical rows at their positions: the inverse of ``gather_rows``; position -1 is ignored."""
        ...

    @abstractmethod
    def digest_rows(self, raw: RawRows, salt: int) -> Integer[Array, "requests 2"]:
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
        ...


class Backend(Protocol):
    """What a plug-in's ``load`` returns."""

    name: str

    def create(self, plan: CachePlan, *, device: str | None = None) -> RequiredOps:
        """Bind the verbs to a plan and a device.

        Raises:
            BackendError: the device or the plan's layout is not supported.
        """
        ...

    def default_layout(self, device: str | None) -> str:
        """The layout that ``layout="auto"`` means."""
        ...
