"""What every component of a layer's cache declares about itself, and what their fields are checked by.

Every question that reset, planning, fork, save, transfer and rollback ask (how does it grow, which rows are live at a
length, what is a row, how is it restored, how is it sharded) is answered here, as data, by the component. Nothing else
keeps a list of components.

Notation: p is a token's absolute position, L a request's length in tokens, m a ratio (tokens per entry), D the largest
number of draft tokens that a rollback may undo.
"""

from collections.abc import Callable
from numbers import Real
from typing import Any, Literal

import msgspec

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.spec.codes import CODES
from kvcore.spec.formats import FORMATS, Format

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
    def period(self) -> int | None:
        """Tokens by which a length grows until ``live_bounds`` are just as many greater, and not less; None: unknown.

        That holds of lengths of ``span`` or more.
        """
        return None

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


def check_positive(component: Component, *names: str, least: int = 1) -> None:
    """Refuse fields that are no integers of at least ``least``."""
    for name in names:
        count = check_count(SpecError, name, getattr(component, name), least)
        # JSON and equal digests need plain integers.
        msgspec.structs.force_setattr(component, name, count)


def is_scale(value: object) -> bool:
    """True for a positive normal number of fp32, so that a product with it loses no bits to subnormals."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return 2.0**-126 <= float(value) <= CODES["fp32"].largest
    except OverflowError:
        return False


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
    name: str,
    dim: int,
    format_at: str = "format",
    dim_at: str = "dim",
    *,
    over_tokens: bool = False,
    scaled: bool = False,
) -> Format:
    """The same for rows that are read as they were given: not rotated, and of a component's scale where it says one."""
    format = row_format(name, dim, format_at, dim_at, over_tokens=over_tokens)
    # Index keys' formats are of a size of their own, and say their scale otherwise.
    if format.hadamard or (format.global_scaled and not (scaled and FORMATS[name].dim is None)):
        raise SpecError(got=name, where=format_at, allowed="a format for K-V rows")
    return format
