"""vLLM's groups of caches as blocks in a store: what each keeps of a request, and which of its blocks a hit needs.

Every group has a block table and blocks of its own length. One that keeps a window takes blocks back that lie before
it: a hit at N tokens needs those of the window's tokens alone. One of recurrent layers has what is carried on behind a
block's last token, where a step ends with that: of those a hit needs the last. Where all groups have what they need
decides how many tokens are a hit, a multiple of all blocks' lengths.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import lcm, prod
from typing import Any, NamedTuple

import msgspec

from kvcore.errors import SpecError
from kvcore.interop.vllm_config import CODES, component_of, names_from, spec_from
from kvcore.requests.prefix import chain, seed_of
from kvcore.spec import KV, CacheSpec, Component, Entries, LayerSpec
from kvcore.spec.sizes import row_bytes

WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of caches that keep all blocks of a request."""

WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")
"""Those that keep the blocks of a window: ``sliding_window`` tokens, the next one's own among them."""

STATES = "MambaSpec"
"""The kind of recurrent layers: a page has their states one after the other, as ``shapes`` and ``dtypes`` say."""

KEPT = "align"
"""The mode in which a block has the state behind its last token."""

LAST = 2
"""A state is like a window of these: of the token before the next one, nothing older is looked at."""

REASONS = {
    "ChunkedLocalAttentionSpec": "which of its blocks a hit needs is not a window's",
    "CircularBufferSpec": "its block is overwritten while a request goes on: the rows at a block's end are gone",
    STATES: f"the newest state alone is kept; those at ends of blocks are with --mamba-cache-mode {KEPT}",
    "CrossAttentionSpec": "its rows are those of an encoder's input, which a prompt's tokens do not say",
}
"""Kinds that are refused, and why."""


class Piece(NamedTuple):
    """One of the states in the page of a layer.

    Attributes:
        first: byte of the page.
        nbytes: of the state.
        dtype: torch's.
    """

    first: int
    nbytes: int
    dtype: Any

    def of(self, pages: Any) -> Any:
        """Of a tensor of pages [blocks, 1, 1, bytes], as rows [blocks, 1, elements] where they lie."""
        return pages[:, 0, :, self.first : self.first + self.nbytes].view(self.dtype)


class Part(NamedTuple):
    """Caches of one group and one role, whose blocks are saved and loaded together.

    Attributes:
        group: its number, which is that of its block table.
        role: in kvcore's words, which a layout is looked up by; ``state`` of recurrent layers.
        spec: of rows in blocks, a layer for every cache; of states one row is a block.
        names: of the caches, of states as often as a layer has some.
        window: tokens; None where all blocks are kept.
        alone: the only group there is, whose layers are a model's.
        pieces: of recurrent layers, where in its page each state is.
    """

    group: int
    role: str
    spec: CacheSpec
    names: tuple[str, ...]
    window: int | None
    alone: bool
    pieces: tuple[Piece, ...] = ()

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.spec.block_tokens

    def keys(self, tokens: Sequence[int], salt: str | None) -> list[bytes]:
        """Of all full blocks of a prompt; those of other caches are others."""
        if not self.alone:
            about = hashlib.sha256("\n".join((self.role, *self.names)).encode()).hexdigest()
            salt = f"{about}/{salt or ''}"
        return list(chain(seed_of(self.spec), tokens, self.block, salt))

    def full(self, column: int, end: int) -> bool:
        """Whether a step that ends at ``end`` leaves a block as it is to be kept, once its tokens are there."""
        return not self.pieces or (column + 1) * self.block == end

    def tensors(self, caches: Mapping[str, Any]) -> list[Any]:
        """What the spec's layers are read from, of an engine's tensors by name."""
        if not self.pieces:
            return [caches[name] for name in self.names]
        return [piece.of(caches[name]) for name, piece in zip(self.names, self.pieces, strict=True)]

    def first(self, tokens: int) -> int:
        """The first column of the block table that a hit of so many tokens needs."""
        return 0 if self.window is None else max(0, tokens + 1 - self.window) // self.block


class Groups:
    """All parts of a configuration.

    Attributes:
        parts: of all groups.
        step: tokens that a hit is a multiple of.
        alone: one group that keeps all blocks: a block that cannot be loaded can be named to vLLM.
    """

    def __init__(self, config: Any, given: Mapping[str, Any]) -> None:
        """``given``: ``index`` and ``formats``, as for ``spec_from``.

        Raises:
            SpecError: a cache that blocks by number do not hold, by its name and with the reason.
        """
        self.parts = tuple(_parts(config, given))
        self.step = lcm(*(part.block for part in self.parts))
        self.alone = self.parts[0].alone

    def keys(self, tokens: Sequence[int], salt: str | None) -> list[list[bytes]]:
        """Of every part."""
        return [part.keys(tokens, salt) for part in self.parts]

    def hit(self, keys: Sequence[Sequence[bytes]], most: int, has: Callable[[bytes], bool]) -> int:
        """Tokens, up to ``most``, of which every part has what a hit needs."""
        whole = [number for number, part in enumerate(self.parts) if part.window is None]
        for number in whole:
            size = self.parts[number].block
            there = next((at for at, key in enumerate(keys[number][: most // size]) if not has(key)), most // size)
            most = min(most, there * size)
        tokens = most // self.step * self.step
        others = [(part, keys[number]) for number, part in enumerate(self.parts) if number not in whole]
        while tokens and not all(
            has(key) for part, of in others for key in of[part.first(tokens) : tokens // part.block]
        ):
            tokens -= self.step
        return tokens

    def columns(self, number: int, start: int, end: int) -> list[int]:
        """Columns of a part's table that are loaded for tokens from ``start`` to a hit of ``end``."""
        part = self.parts[number]
        return list(range(max(start // part.block, part.first(end)), end // part.block))

    def kept(self, number: int, column: int) -> bool:
        """Whether a block is needed by the next hit that can be behind it."""
        part = self.parts[number]
        end = (column + 1) * part.block
        return column >= part.first(-(-end // self.step) * self.step)


class _Member(NamedTuple):
    name: str
    component: KV | Entries
    piece: Piece | None = None


def _parts(config: Any, given: Mapping[str, Any]) -> list[Part]:
    groups = list(config.kv_cache_groups)
    found: dict[tuple[int, str, Any, int], list[_Member]] = {}
    for number, group in enumerate(groups):
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            kind = group.kv_cache_spec if each is None else each[name]
            window = _window(name, kind)
            if type(kind).__name__ == STATES:
                role, members = "state", _states(name, kind)
            else:
                role, component = component_of(name, kind, **given)
                members = [_Member(name, in_blocks(component, kind))]
            found.setdefault((number, role, window, kind.block_size), []).extend(members)
    if len(groups) == 1 and not any(window for _, _, window, _ in found):
        return [Part(0, "", spec_from(config, **given), tuple(names_from(config, **given)), None, alone=True)]
    return [
        Part(
            number,
            role,
            _spec(role, block, members),
            tuple(member.name for member in members),
            window,
            alone=False,
            pieces=tuple(member.piece for member in members if member.piece is not None),
        )
        for (number, role, window, block), members in found.items()
    ]


def _states(name: str, kind: Any) -> list[_Member]:
    """The states of a recurrent layer, each as one row a block.

    Raises:
        SpecError: of a dtype that kvcore has no format for.
    """
    found: list[_Member] = []
    first = 0
    for shape, dtype in zip(kind.shapes, kind.dtypes, strict=True):
        code = CODES.get(str(dtype).rpartition(".")[2])
        if code is None:
            raise SpecError(got=f"{name}, states of {dtype}", where="KvcoreConnector", allowed=", ".join(CODES))
        row = Entries(dim=prod(shape), ratio=kind.block_size, format=code)
        piece = Piece(first, row_bytes(row), dtype)
        found.append(_Member(name, row, piece))
        first += piece.nbytes
    return found


def _spec(role: str, block: int, members: Sequence[_Member]) -> CacheSpec:
    rows = [member.component for member in members]
    layers = [LayerSpec(kv=one) if isinstance(one, KV) else LayerSpec(entries=one) for one in rows]
    return CacheSpec(layers=tuple(layers), block_tokens=block, name=role)


def _window(name: str, kind: Any) -> int | None:
    named = type(kind).__name__
    if named in WINDOWED:
        # Drafts of several modules look back farther.
        return int(kind.sliding_window) + int(getattr(kind, "extra_retained_tokens", 0))
    if named in WHOLE:
        return None
    if named == STATES and kind.mamba_cache_mode == KEPT:
        return LAST
    raise SpecError(
        got=f"{name}, a {named}",
        where="KvcoreConnector",
        allowed=f"{', '.join((*WHOLE, *WINDOWED))}, {STATES} in mode {KEPT}",
        hint=f"Refused, for {REASONS[named]}." if named in REASONS else "",
    )


def in_blocks(component: Component, kind: Any) -> KV | Entries:
    """A component's rows as those of a history in blocks, whoever of them is needed later."""
    if isinstance(component, KV):
        return msgspec.structs.replace(component, window=None, chunk=None, storage="paged")
    if isinstance(component, Entries):
        return Entries(dim=component.dim, ratio=component.ratio, format=component.format)
    format = getattr(component, "format", None)
    # Windows have a row for every token; so have tails, whose values and scores lie side by side.
    return Entries(dim=kind.head_size, ratio=1, format="fp32" if format is None else format)
