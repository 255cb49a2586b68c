"""The components that a layer's cache is composed of, and what each declares about itself.

Every question that reset, planning, fork, save, transfer and rollback ask (how does it grow, which rows are live at a
length, what is a row, how is it restored, how is it sharded) is answered here, as data, by the component. Nothing else
keeps a list of components.

Notation: p is a token's absolute position, L a request's length in tokens, m a ratio (tokens per entry), D the largest
number of draft tokens that a rollback may undo.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvcore.counts import as_count, check_count
from kvcore.errors import SpecError
from kvcore.spec.codes import CODES
from kvcore.spec.formats import FORMATS, Format, tail_format

Growth = Literal["slot", "block"]

Maximum = Callable[[Any, Any], Any]
"""The larger of two numbers, or of an array and what it is compared with, element by element."""


class Part(msgspec.Struct, frozen=True):
    """One stream of rows of a component: ``heads`` rows of ``format`` a position (or entry)."""

    name: str
    heads: int
    format: Format


class Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all components declare. Subclasses override what differs; the defaults are those of a ring in a slot."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The component's streams of rows; a single one is called ``""``."""
        raise NotImplementedError

    @property
    def growth(self) -> Growth:
        """``slot``: grows with requests. ``block``: grows with history."""
        return "slot"

    @property
    def tokens_per_row(self) -> int:
        """Positions from one row to the next: 1, or the ratio for compressed entries."""
        return 1

    @property
    def span(self) -> int | None:
        """Most rows that can be live at once in a ring; None if nothing is ever overwritten."""
        return None

    @property
    def reach(self) -> int | None:
        """Most rows older than a new token that its step reads in a ring; None where ``span`` is None."""
        return None if self.span is None else self.span - 1

    @property
    def written_by_step(self) -> bool:
        """True if its rows are the step's own tokens, one for each; False if rows are made of several as they close."""
        return True

    @property
    def recurrent(self) -> bool:
        """True if a row says everything before it: a step may write its last token's alone.

        Then the rows of its other tokens are NaN, and lengths that have none cannot be gone back to.
        """
        return False

    @property
    def given(self) -> tuple[Part, ...]:
        """What a step's tokens give, one row each: the parts, unless rows are made of several tokens as they close."""
        return self.parts

    @property
    def streams(self) -> tuple[str, ...]:
        """What a caller gives for a row, by name: one array for each part, unless a part holds several side by side."""
        return tuple(part.name for part in self.parts)

    @property
    def headed(self) -> bool:
        """True if rows are keys and values of heads, each for a group of query heads; else one row is for all."""
        return False

    @property
    def split_by_heads(self) -> bool:
        """True if shards hold some of the heads each; else every shard holds all of them."""
        return self.headed

    @property
    def sight(self) -> int | None:
        """Most positions that a query sees; None if it may see the whole history."""
        return None

    def label(self, role: str) -> str:
        """What it is in a few words without spaces, as ids of checks say it: formats, and what else tells it apart."""
        return f"{role}." + "-".join(dict.fromkeys(part.format.name for part in self.parts))

    def summary(self, role: str) -> str:
        """The same for people: ``window 128``, ``entries m=4``, ``kv 8x128 ring 512``."""
        bound = "" if self.span is None else f" {self.span}"
        return f"{role} m={self.tokens_per_row}" if self.tokens_per_row > 1 else f"{role}{bound}"

    def with_heads(self, heads: tuple[int, ...]) -> "Component":
        """The same with other numbers of heads, one for each part; only where it is ``split_by_heads``."""
        raise SpecError(got=f"{heads} heads", where=type(self).__name__, allowed="a component of keys and values")

    @property
    def shared_from(self) -> int | None:
        """Layer whose pool this component reads; None if it owns its pool."""
        return None

    @property
    def restore(self) -> Literal["retain", "checkpoint", "replay"]:
        """How it comes back on a prefix hit: kept in shared blocks, copied from a checkpoint, or replayed."""
        return "checkpoint"

    @property
    def in_checkpoint(self) -> bool:
        """True if a checkpoint of a request's state contains this component."""
        return self.restore == "checkpoint"

    @property
    def sharding(self) -> Literal["by_request", "by_block", "replicated"]:
        """How its rows spread over devices under context parallelism."""
        return "replicated" if self.growth == "slot" else "by_block"

    # Liveness and visibility are written once, with //, *, + and - and the maximum that is given, so that they hold for
    # arrays of lengths (NumPy's, torch's, JAX's) as for one. Backends ask these rules and have none of their own.

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        """(first, end) of the rows that later tokens can need when a request is ``length`` tokens long.

        Rows are positions, or numbers of entries where ``tokens_per_row`` is not 1.

        Args:
            length: an int, or an array of lengths; the bounds have its type and shape.
            maximum: of an array's framework, its first argument an array: ``np.maximum``, ``jnp.maximum`` …
        """
        raise NotImplementedError

    def live(self, length: int) -> range:
        """Rows (positions, or entry numbers) that later tokens can need when a request is ``length`` tokens long."""
        return range(*self.live_bounds(length))

    def first_visible(self, position: Any, padding: Any = 0, maximum: Maximum = max) -> Any:
        """First position that the query at ``position`` may see; an int or an array, as for ``live_bounds``.

        The first ``padding`` positions are no tokens: none is seen, and chunks begin with the first token.
        """
        del maximum
        return 0 * position + padding

    def visible_bounds(self, start: Any, length: Any, padding: Any = 0, maximum: Maximum = max) -> tuple[Any, Any]:
        """(first, end) of the positions that the queries of a step from ``start`` to ``length`` may see.

        Of a step without tokens, those that its last query saw. ``padding`` as for ``first_visible``.
        """
        query = start - maximum(start + 1 - length, 0)  # the smaller of start and length - 1
        return maximum(self.first_visible(maximum(query, padding), padding, maximum), 0), length

    def visible(self, start: int, length: int, padding: int = 0) -> range:
        """``visible_bounds`` as a range."""
        return range(*self.visible_bounds(start, length, padding))

    def ring_rows(self, drafts: int, longest: int | None = None) -> int | None:
        """Rows of a ring that survives a rollback of ``drafts`` tokens; None if the component is not a ring.

        ``longest``: most tokens that a request can hold, so that no more rows can be live; None: any number.
        """
        span = self.span_within(longest)
        return None if span is None else self.declared_rows or span + drafts

    def span_within(self, longest: int | None) -> int | None:
        """Most rows of a ring that can be live at once in a request of at most ``longest`` tokens."""
        return self.span if self.span is None or longest is None else min(self.span, longest)

    @property
    def declared_rows(self) -> int | None:
        """Rows that the spec fixes for a ring, or None for the default."""
        return None

    def largest_drafts(self) -> int | None:
        """Largest D that the declared rows allow; None if the spec does not fix them."""
        return None if self.span is None or self.declared_rows is None else self.declared_rows - self.span


class Window(Component, frozen=True, kw_only=True):
    """Sliding window of latent rows: one ring a slot, row of position p at ``slot * C + p mod C``.

    A query sees the last ``window`` positions, its own included. ``C = window + D`` unless ``rows`` says otherwise.
    Source: DeepSeek-V4 paper section 2.3.3 and the published inference code, ring slot = t mod window.
    """

    dim: int
    window: int
    format: str = "v4_584"
    rows: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "dim", "window")
        _check_rows(self)
        row_format(self.format, self.dim)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", 1, FORMATS[self.format].for_dim(self.dim)),)

    @property
    def span(self) -> int:
        return self.window

    @property
    def sight(self) -> int:
        return self.window

    def label(self, role: str) -> str:
        del role
        return self.format

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        return maximum(length - self.window, 0), length

    def first_visible(self, position: Any, padding: Any = 0, maximum: Maximum = max) -> Any:
        return maximum(position + 1 - self.window, padding)

    @property
    def declared_rows(self) -> int | None:
        return self.rows


class Tail(Component, frozen=True, kw_only=True):
    """Tokens awaiting compression: one ring a slot of raw fp32 rows, kv then score, at ``slot * R + p mod R``.

    With ``overlap`` (CSA) a row holds two streams of ``dim`` channels: ``carry``, what the token adds to the next
    window's entry, then ``cur``, what it adds to its own. The score already holds its positional bias.
    ``R = 2m - 1 + max(D, 1)`` with overlap and ``m - 1 + max(D, 1)`` without, unless ``rows`` says otherwise.
    Source: DeepSeek-V4 paper sections 2.3.1 and 2.3.2.
    """

    dim: int
    ratio: int
    overlap: bool
    rows: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "dim", "ratio")
        if not _is_flag(self.overlap):
            raise SpecError(got=self.overlap, where="overlap", allowed="true or false")
        _check_rows(self)

    @property
    def width(self) -> int:
        """Channels of kv, and of score, in one row."""
        return 2 * self.dim if self.overlap else self.dim

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", 1, tail_format(self.width)),)

    @property
    def streams(self) -> tuple[str, ...]:
        return ("kv", "score")

    @property
    def span(self) -> int:
        return 2 * self.ratio - 1 if self.overlap else self.ratio - 1

    @property
    def reach(self) -> int:
        # A token that closes a window is pooled with all the others of it.
        return self.span

    def label(self, role: str) -> str:
        return f"{role}.m{self.ratio}" + (".overlap" if self.overlap else "")

    def summary(self, role: str) -> str:
        return f"{role} m={self.ratio}" + (" overlap" if self.overlap else "")

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        first = length // self.ratio - (1 if self.overlap else 0)
        return maximum(first * self.ratio, 0), length

    @property
    def declared_rows(self) -> int | None:
        return self.rows

    def ring_rows(self, drafts: int, longest: int | None = None) -> int | None:
        return Component.ring_rows(self, max(drafts, 1), longest)


class Entries(Component, frozen=True, kw_only=True):
    """Compressed latent entries in paged blocks: entry i at ``table[i div E] * E + i mod E``, i = p div ratio.

    There are ``L div ratio`` of them; entry i is visible to the query at p iff ``i < (p + 1) div ratio``.
    """

    dim: int
    ratio: int
    format: str = "v4_584"
    share: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "dim", "ratio")
        _check_share(self)
        row_format(self.format, self.dim)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", 1, FORMATS[self.format].for_dim(self.dim)),)

    @property
    def growth(self) -> Growth:
        return "block"

    @property
    def tokens_per_row(self) -> int:
        return self.ratio

    @property
    def written_by_step(self) -> bool:
        return False

    def label(self, role: str) -> str:
        del role
        return f"{self.format}.m{self.ratio}" + ("" if self.share is None else ".shared")

    def summary(self, role: str) -> str:
        return f"{role} m={self.ratio}" if self.share is None else f"{role} of layer {self.share}"

    @property
    def shared_from(self) -> int | None:
        return self.share

    @property
    def restore(self) -> Literal["retain", "checkpoint", "replay"]:
        return "retain"

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        del maximum
        return 0 * length, length // self.ratio


class IndexKeys(Entries, frozen=True, kw_only=True):
    """The lightning indexer's keys, one for every compressed entry and addressed like it.

    ``heads`` and ``topk`` describe the queries: scores are ``sum_h weight_h * relu(q_h . key)``, and the ``topk`` best
    entries are attended to. Source: DeepSeek-V4 paper section 2.3.1.
    """

    heads: int
    topk: int
    format: str = "index_fp4_68_h"
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        Entries.__post_init__(self)
        check_positive(self, "heads", "topk")
        if not _is_scale(self.global_scale):
            raise SpecError(got=self.global_scale, where="global_scale", allowed="a number above 0, normal in fp32")
        msgspec.structs.force_setattr(self, "global_scale", float(self.global_scale))


class KV(Component, frozen=True, kw_only=True):
    """Keys and values of a classic attention layer.

    Neither ``window`` nor ``chunk``: every earlier position is visible. ``window``: the last ``window`` positions, the
    query's own included. ``chunk``: the positions of the query's own chunk.

    Storage: ``paged`` (blocks, ratio 1), ``slot`` (contiguous, row p of a slot), or ``ring`` (row p mod C of a slot,
    C = window or chunk, plus D).

    Formats over tokens (``Format.tokens``): a row is ``ratio`` tokens, coded together as the last of them comes, and
    those of the open group wait raw in the layer's ``kv_tail``. Such keys and values are ``paged``; values may then be
    in a format over channels, of whose groups none holds channels of two tokens.
    """

    key_heads: int
    key_dim: int
    value_heads: int | None = None
    value_dim: int | None = None
    storage: Literal["paged", "slot", "ring"] = "paged"
    window: int | None = None
    chunk: int | None = None
    key_format: str = "bf16"
    value_format: str | None = None

    def __post_init__(self) -> None:
        check_positive(self, "key_heads", "key_dim")
        for name in ("value_heads", "value_dim", "window", "chunk"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if self.storage not in ("paged", "slot", "ring"):
            raise SpecError(got=self.storage, where="storage", allowed="paged, slot, ring")
        if self.window is not None and self.chunk is not None:
            raise SpecError(got=(self.window, self.chunk), where="chunk", allowed="window or chunk, not both")
        if self.storage == "ring" and self.window is None and self.chunk is None:
            raise SpecError(got=self.storage, where="storage", allowed="ring only with a window or a chunk")
        value_at = (
            "key_format" if self.value_format is None else "value_format",
            "key_dim" if self.value_dim is None else "value_dim",
        )
        parts = list(zip(self._named_parts(), (("key_format", "key_dim"), value_at), strict=True))
        for (_, _, name, dim), at in parts:
            plain_row_format(name, dim, *at, over_tokens=True)
        for (_, _, name, dim), at in parts:
            self._check_over_tokens(FORMATS[name], dim, *at)

    def _check_over_tokens(self, format: Format, dim: int, format_at: str, dim_at: str) -> None:
        if self.ratio == 1:
            return
        over = f"{self.ratio} tokens are coded together"
        if self.storage != "paged":
            raise SpecError(got=self.storage, where="storage", allowed=f"paged: {over}")
        if format.tokens not in (1, self.ratio):
            allowed = f"a format over {self.ratio} tokens, as the other part's, or over channels"
            raise SpecError(got=format.name, where=format_at, allowed=allowed)
        groups = [field.group for field in format.fields if field.group is not None and format.tokens == 1]
        if not all(group and dim % group == 0 for group in groups):
            allowed = f"a multiple of {format.name}'s groups, which are smaller than a row: {over}"
            raise SpecError(got=dim, where=dim_at, allowed=allowed)

    @property
    def ratio(self) -> int:
        """Tokens that are coded together: 1 in formats over channels."""
        return max(FORMATS[name].tokens for _, _, name, _ in self._named_parts())

    @property
    def tail(self) -> "KVTail | None":
        """Where tokens wait until their group closes; None where each is a row of its own."""
        if self.ratio == 1:
            return None
        keys, values = self._named_parts()
        return KVTail(key_heads=keys[1], key_dim=keys[3], value_heads=values[1], value_dim=values[3], ratio=self.ratio)

    def _named_parts(self) -> tuple[tuple[str, int, str, int], ...]:
        """(part, heads, format's name, dim) of keys and of values, the values' defaults filled in."""
        value_format = self.key_format if self.value_format is None else self.value_format
        value_heads, value_dim = self.value_heads or self.key_heads, self.value_dim or self.key_dim
        return (
            ("key", self.key_heads, self.key_format, self.key_dim),
            ("value", value_heads, value_format, value_dim),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        ratio = self.ratio
        return tuple(
            Part(part, heads, FORMATS[name].for_dim(ratio * dim)) for part, heads, name, dim in self._named_parts()
        )

    @property
    def given(self) -> tuple[Part, ...]:
        tail = self.tail
        return self.parts if tail is None else tail.parts

    @property
    def growth(self) -> Growth:
        return "block" if self.storage == "paged" else "slot"

    @property
    def tokens_per_row(self) -> int:
        return self.ratio

    @property
    def written_by_step(self) -> bool:
        return self.ratio == 1

    @property
    def span(self) -> int | None:
        return self.sight if self.storage == "ring" else None

    @property
    def headed(self) -> bool:
        return True

    @property
    def sight(self) -> int | None:
        return self.window or self.chunk

    def label(self, role: str) -> str:
        del role
        seen = "window" if self.window else "chunk" if self.chunk else "full"
        value = self.value_format or self.key_format
        formats = self.key_format if value == self.key_format else f"{self.key_format}-{value}"
        return f"{formats}.{seen}.{self.storage}"

    def summary(self, role: str) -> str:
        (_, keys, _, key_dim), (_, values, _, value_dim) = self._named_parts()
        other = "" if (values, value_dim) == (keys, key_dim) else f"/{values}x{value_dim}"
        return f"{role} {keys}x{key_dim}{other} {self.storage}" + (f" {self.span}" if self.span else "")

    def with_heads(self, heads: tuple[int, ...]) -> "KV":
        keys, values = heads
        return msgspec.structs.replace(self, key_heads=keys, value_heads=values)

    @property
    def restore(self) -> Literal["retain", "checkpoint", "replay"]:
        return "retain" if self.storage == "paged" else "checkpoint"

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        if self.storage != "ring":
            return 0 * length, length // self.ratio
        return maximum(self.first_visible(length - 1, 0, maximum), 0), length

    def first_visible(self, position: Any, padding: Any = 0, maximum: Maximum = max) -> Any:
        if self.window is not None:
            return maximum(position + 1 - self.window, padding)
        if self.chunk is None:
            return 0 * position + padding
        return maximum(padding + (position - padding) // self.chunk * self.chunk, padding)

    def visible_bounds(self, start: Any, length: Any, padding: Any = 0, maximum: Maximum = max) -> tuple[Any, Any]:
        if self.storage != "ring":
            return 0 * length, length
        return Component.visible_bounds(self, start, length, padding, maximum)


class KVTail(Component, frozen=True, kw_only=True):
    """Keys and values of the group that is open, raw, in a ring a slot at ``slot * R + p mod R``: see ``KV.ratio``.

    A group of m tokens closes with position p where ``p mod m`` is m - 1, so what is raw depends on the length alone.
    ``R = m - 1 + max(D, 1)``. No spec says it: it follows from the formats of its layer's ``kv``.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    ratio: int

    @property
    def parts(self) -> tuple[Part, ...]:
        raw = FORMATS["bf16"]
        return (
            Part("key", self.key_heads, raw.for_dim(self.key_dim)),
            Part("value", self.value_heads, raw.for_dim(self.value_dim)),
        )

    @property
    def span(self) -> int:
        return self.ratio - 1

    @property
    def reach(self) -> int:
        # A token that closes a group is coded with all the others of it.
        return self.span

    @property
    def headed(self) -> bool:
        return True

    def label(self, role: str) -> str:
        return f"{role}.m{self.ratio}"

    def summary(self, role: str) -> str:
        return f"{role} m={self.ratio}"

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        del maximum
        return length // self.ratio * self.ratio, length

    def ring_rows(self, drafts: int, longest: int | None = None) -> int | None:
        return Component.ring_rows(self, max(drafts, 1), longest)


def _is_scale(value: object) -> bool:
    """True for a positive normal number of fp32, so that a product with it loses no bits to subnormals."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 2.0**-126 <= value <= CODES["fp32"].largest


def check_positive(component: Component, *names: str, least: int = 1) -> None:
    """Refuse fields that are no integers of at least ``least``."""
    for name in names:
        count = check_count(SpecError, name, getattr(component, name), least)
        # JSON and equal digests need plain integers.
        msgspec.structs.force_setattr(component, name, count)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def row_format(
    name: str, dim: int, format_at: str = "format", dim_at: str = "dim", *, over_tokens: bool = False
) -> Format:
    """The format sized for ``dim``; an error names the component's field that is at fault.

    ``over_tokens``: rows may be of several tokens.
    """
    try:
        format = FORMATS[name]
    except SpecError as error:
        raise SpecError(got=name, where=format_at, allowed=error.allowed, hint=error.hint) from None
    if format.tokens > 1 and not over_tokens:
        raise SpecError(got=name, where=format_at, allowed="a format over channels: each row is of one token")
    try:
        return format.for_dim(dim)
    except SpecError as error:
        allowed = f"{error.allowed}, for format {name}"
        raise SpecError(got=dim, where=dim_at, allowed=allowed, hint=error.hint) from None


def plain_row_format(
    name: str, dim: int, format_at: str = "format", dim_at: str = "dim", *, over_tokens: bool = False
) -> Format:
    """The same for rows that are read as they were given: neither rotated nor of a scale that the component says."""
    format = row_format(name, dim, format_at, dim_at, over_tokens=over_tokens)
    if format.hadamard or format.global_scaled:
        raise SpecError(got=name, where=format_at, allowed="a format for K-V rows")
    return format


def _check_share(component: Entries) -> None:
    if component.share is None:
        return
    share = as_count(component.share)
    if share is None:
        raise SpecError(got=component.share, where="share", allowed="a layer number, 0 or more, or null")
    msgspec.structs.force_setattr(component, "share", share)


def _check_rows(component: Window | Tail) -> None:
    """Fewer rows than the live span plus the new token's own would overwrite rows that are still needed."""
    if component.rows is None:
        return
    check_positive(component, "rows")
    least = (component.reach or 0) + 1
    if component.rows < least:
        raise SpecError(
            got=component.rows, where="rows", allowed=f"{least} or more", hint=f"{least} rows allow max_draft_tokens=0."
        )
