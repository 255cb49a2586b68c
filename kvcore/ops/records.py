"""Arguments that travel together below the contract's signatures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.ops.results import Array
from kvcore.spec import Rope


class Streams(NamedTuple):
    """Raw compressor rows of a step's tokens, [T, width] each: the entries' and, where there are any, the index keys'.

    Attributes:
        kv: of the entries.
        score: likewise.
        index_kv: of the index keys, or None.
        index_score: likewise.
    """

    kv: Array
    score: Array
    index_kv: Array | None = None
    index_score: Array | None = None


@dataclass(frozen=True)
class Compression:
    """What a flush does to entries between pooling and storing.

    Attributes:
        norm_weight: [d] of the entries' norm; None: none.
        eps: of the norms.
        rope: turns entries, and index keys, at their positions; None: nothing does.
        index_norm_weight: [d] of the index keys' norm; None: none.
    """

    norm_weight: Array | None = None
    eps: float = 1e-6
    rope: Rope | Array | None = None
    index_norm_weight: Array | None = None

    def each(self, streams: Streams) -> Iterator[tuple[str, Any, Any, Any]]:
        """(role, kv, score, norm weight) of every stream that is given: entries, then index keys."""
        yield "entries", streams.kv, streams.score, self.norm_weight
        if streams.index_kv is not None:
            yield "index_keys", streams.index_kv, streams.index_score, self.index_norm_weight


class WholeLayer(NamedTuple):
    """All that a latent layer is given in a step, checked.

    Attributes:
        q: [T, H, d] of attention.
        rows: role of a ring -> the step's rows, as its append takes them.
        now: role of a ring -> whether it gets the step's rows.
        rotation: ``rope``, and ``norm_weight`` and ``eps`` where there is a norm, of the window's rows; or empty.
        compression: what a flush does with rows of tails.
        closed: entries that the step completes.
        newest: most new tokens of a request.
        indexer: its (q, weights), or None: every entry is attended to.
        k: entries that it picks.
        columns: keys that it looks at.
        sink: [H] of attention, or None.
        scale: of its logits, or None.
        rope: turns its outputs back, or None.
    """

    q: Array
    rows: Mapping[str, tuple[Array, ...]]
    now: Mapping[str, bool]
    rotation: Mapping[str, Any]
    compression: Compression
    closed: int
    newest: int
    indexer: tuple[Array, Array] | None
    k: int
    columns: int
    sink: Array | None
    scale: float | None
    rope: Rope | Array | None

    @property
    def streams(self) -> Streams | None:
        """Rows of the tails, or None: it has none."""
        if "tail" not in self.rows:
            return None
        return Streams(*self.rows["tail"], *self.rows.get("index_tail", ()))
