"""Components of classic attention: keys and values, and the raw tail of those that are coded over groups of tokens.

Notation is that of ``component``.
"""

from typing import Any, Literal, cast

import msgspec

from kvcore.errors import SpecError
from kvcore.spec.component import Component, Growth, Maximum, Part, check_positive, is_scale, plain_row_format
from kvcore.spec.formats import FORMATS, Format


class KV(Component, frozen=True, kw_only=True):
    """Keys and values of a classic attention layer.

    Neither ``window`` nor ``chunk``: every earlier position is visible. ``window``: the last ``window`` positions, the
    query's own included. ``chunk``: the positions of the query's own chunk.

    Storage: ``paged`` (blocks, ratio 1), ``slot`` (contiguous, row p of a slot), or ``ring`` (row p mod C of a slot,
    C = window or chunk, plus D).

    Scales: of keys and of values, in formats that have a global one beside those of a row.

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
    scales: tuple[float, float] | msgspec.UnsetType = msgspec.UNSET

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
            plain_row_format(name, dim, *at, over_tokens=True, scaled=True)
        self._check_scales([FORMATS[name].global_scaled for (_, _, name, _), _ in parts])
        for (_, _, name, dim), at in parts:
            self._check_over_tokens(FORMATS[name], dim, *at)

    def _check_scales(self, scaled: list[bool]) -> None:
        # What came as JSON is checked already; anything may come from elsewhere.
        given: Any = self.scales
        if given is msgspec.UNSET:
            return
        scales = list(cast("list[Any]", given)) if isinstance(given, list | tuple) else []
        if [is_scale(one) for one in scales] != [True, True]:
            raise SpecError(got=self.scales, where="scales", allowed="two numbers above 0, normal in fp32")
        key, value = map(float, scales)
        if any(scale != 1 and not takes for scale, takes in zip((key, value), scaled, strict=True)):
            allowed = "1 for rows of a format without a global scale"
            raise SpecError(got=self.scales, where="scales", allowed=allowed)
        # Without any they are 1: equal specs are equal however they say it.
        msgspec.structs.force_setattr(self, "scales", msgspec.UNSET if (key, value) == (1, 1) else (key, value))

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
        scales = (1.0, 1.0) if isinstance(self.scales, msgspec.UnsetType) else self.scales
        return tuple(
            Part(part, heads, FORMATS[name].for_dim(ratio * dim).scaled(scale))
            for (part, heads, name, dim), scale in zip(self._named_parts(), scales, strict=True)
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

    @property
    def period(self) -> int | None:
        return None if self.storage != "ring" else 1 if self.window is not None else self.chunk

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

    @property
    def period(self) -> int:
        return self.ratio

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        del maximum
        return length // self.ratio * self.ratio, length

    def ring_rows(self, drafts: int, longest: int | None = None) -> int | None:
        return Component.ring_rows(self, max(drafts, 1), longest)
