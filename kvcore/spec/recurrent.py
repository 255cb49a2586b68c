"""What layers without attention to single positions carry on: a recurrent state, and a short convolution's last inputs.

Both are rings like any other. The row of position p of a state is the state after token p, so a request of L tokens has
one live row, that of L - 1, and D older ones to go back to. Unlike a key, it says everything before it: a step may
write the one of its last token alone, and a length for which no state was written cannot be gone back to.
"""

from typing import Any

import msgspec

from kvcore.spec.component import Component, Maximum, Part, check_positive, plain_row_format


class State(Component, frozen=True, kw_only=True):
    """A recurrent state of [heads, key_dim, value_dim], or of [heads, key_dim]: ``1 + D`` of them a slot.

    Gated delta networks and linear attention: key by value dims. Mamba-2: head by state dims. Mamba: a head for every
    channel, of the state's dims. Without tokens the state is zeros.
    """

    heads: int
    key_dim: int
    value_dim: int | None = None
    format: str = "fp32"

    def __post_init__(self) -> None:
        check_positive(self, "heads", "key_dim", *(() if self.value_dim is None else ("value_dim",)))
        plain_row_format(self.format, self.dim, dim_at="key_dim")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one state."""
        return (self.heads, self.key_dim) if self.value_dim is None else (self.heads, self.key_dim, self.value_dim)

    @property
    def dim(self) -> int:
        """Channels of one head."""
        return self.key_dim * (self.value_dim or 1)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", self.heads, plain_row_format(self.format, self.dim)),)

    @property
    def span(self) -> int:
        return 1

    @property
    def recurrent(self) -> bool:
        return True

    @property
    def split_by_heads(self) -> bool:
        return True

    def label(self, role: str) -> str:
        return f"{role}.{self.format}" + ("" if self.value_dim is None else ".matrix")

    def summary(self, role: str) -> str:
        return f"{role} {'x'.join(map(str, self.shape))}"

    def with_heads(self, heads: tuple[int, ...]) -> "State":
        (count,) = heads
        return msgspec.structs.replace(self, heads=count)

    @property
    def period(self) -> int:
        return 1

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        return maximum(length - 1, 0), length


class Conv(Component, frozen=True, kw_only=True):
    """The last ``width - 1`` inputs of a causal convolution over ``width`` positions: heads · dim channels each.

    ``heads`` groups of channels are what shards split; one group is on every shard. Before the first token inputs are
    zeros. A ring of ``width - 1 + max(D, 1)`` rows.
    """

    dim: int
    width: int
    heads: int = 1
    format: str = "bf16"

    def __post_init__(self) -> None:
        check_positive(self, "dim", "heads")
        check_positive(self, "width", least=2)
        plain_row_format(self.format, self.dim)

    @property
    def channels(self) -> int:
        """Of one input."""
        return self.heads * self.dim

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", self.heads, plain_row_format(self.format, self.dim)),)

    @property
    def span(self) -> int:
        return self.width - 1

    @property
    def reach(self) -> int:
        # A token is convolved with all of them: none may be overwritten by it.
        return self.span

    @property
    def split_by_heads(self) -> bool:
        return True

    def label(self, role: str) -> str:
        return f"{role}.{self.format}.w{self.width}"

    def summary(self, role: str) -> str:
        return f"{role} {self.channels} of {self.width}"

    def with_heads(self, heads: tuple[int, ...]) -> "Conv":
        (count,) = heads
        return msgspec.structs.replace(self, heads=count)

    @property
    def period(self) -> int:
        return 1

    def live_bounds(self, length: Any, maximum: Maximum = max) -> tuple[Any, Any]:
        return maximum(length - self.span, 0), length

    def ring_rows(self, drafts: int, longest: int | None = None) -> int | None:
        return Component.ring_rows(self, max(drafts, 1), longest)
