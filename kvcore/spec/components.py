"""Components of latent attention, where K = V: windows, tails, entries and the indexer's keys.

Notation is that of ``component``.
"""

from typing import Any, Literal

import msgspec

from kvcore.counts import as_count
from kvcore.errors import SpecError
from kvcore.spec.component import Component, Growth, Maximum, Part, check_positive, is_scale, row_format
from kvcore.spec.formats import FORMATS, tail_format


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

    @property
    def period(self) -> int:
        return 1

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
        if type(self.overlap) is not bool:
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

    @property
    def period(self) -> int:
        return self.ratio

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
        if not is_scale(self.global_scale):
            raise SpecError(got=self.global_scale, where="global_scale", allowed="a number above 0, normal in fp32")
        msgspec.structs.force_setattr(self, "global_scale", float(self.global_scale))


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
