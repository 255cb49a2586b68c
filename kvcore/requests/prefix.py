"""Prefix reuse: which tokens a block's content follows from, and which lengths of a prompt can be taken over.

A block is published under a key that chains the keys before it, so that equal keys mean equal tokens from the start.
The chain is ``sha256`` over canonical CBOR of ``[parent, [tokens], extra]``, the scheme that vLLM calls
``sha256_cbor``: it starts from a seed that holds the spec digest, and a request's salt is the ``extra`` of its first
block. A length can be taken over only where every
component is restorable there: blocks by their keys, rings and tails by a checkpoint of exactly that length or by
replaying tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.spec import CacheSpec

MOST_NUMBERS = 1 << 16
"""Ids of tokens whose encoding is kept."""


class Periodic(msgspec.Struct, frozen=True):
    """Keep a checkpoint wherever a step ends at a multiple of ``tokens``, and at semantic points.

    Example:
        >>> import kvcore
        >>> spec = kvcore.spec.presets.deepseek_v4_flash_tiny()
        >>> options = {"max_requests": 1, "max_tokens": 512, "prefix": kvcore.Periodic(128)}
        >>> cache = kvcore.create_cache(spec, backend="reference", **options)
    """

    tokens: int

    def __post_init__(self) -> None:
        """A period is a count."""
        msgspec.structs.force_setattr(self, "tokens", check_count(SpecError, "Periodic.tokens", self.tokens, 1))


Policy = Literal["off", "full", "zero", "approximate"] | Periodic


class Restorable(NamedTuple):
    """How much of a prompt can be taken over.

    Of a request that came from elsewhere: what its export or snapshot brought. Checkpoints go with it unless they are
    left out; where there are rings, only a checkpoint made here (``cache.checkpoint``) or what it computes from then on
    can be resumed without them.

    Attributes:
        length: tokens whose state is at hand.
        replay: how many of the last of them must be run through the model again for that.
        exact: True if the state then equals an uninterrupted run's; under ``approximate`` windows do not.
    """

    length: int
    replay: int
    exact: bool


def check_policy(policy: object) -> Policy:
    """The policy, or a SpecError that lists them."""
    if isinstance(policy, Periodic):
        return policy
    if policy not in ("off", "full", "zero", "approximate"):
        allowed = "'off', 'full', 'zero', 'approximate' or kvcore.Periodic(tokens)"
        raise SpecError(got=policy, where="prefix", allowed=allowed)
    return policy  # type: ignore[return-value]


def chain(parent: bytes, tokens: Sequence[int], block_tokens: int, salt: str | None = None) -> Iterator[bytes]:
    """Keys of the full blocks of ``tokens``, in order; ``salt`` enters the first of them, and the others through it."""
    sha256, coded = hashlib.sha256, list(map(_NUMBERS.__getitem__, tokens))
    # [parent, [tokens], extra], but for the parent's bytes and the tokens' own.
    head, inner, extra = _head(4, 3) + _head(2, len(parent)), _head(4, block_tokens), cbor([salt] if salt else None)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(coded[start : start + block_tokens])
        parent = sha256(b"%b%b%b%b%b" % (head, parent, inner, block, extra)).digest()
        if not start:
            head, extra = _head(4, 3) + _head(2, len(parent)), cbor(None)
        yield parent


def point_key(parent: bytes, rest: Sequence[int], salt: str | None = None) -> bytes:
    """Key of a checkpoint at any length: from the key of its last full block, the tokens beyond it, and the salt."""
    return hashlib.sha256(cbor([parent, list(rest), ["point", *([salt] if salt else [])]])).digest()


def seed_of(spec: CacheSpec, resets: int = 0) -> bytes:
    """Start of every chain: caches of other specs never find each other's blocks, nor what came before a reset."""
    return hashlib.sha256(cbor(["kvcore", spec.digest, *([resets] if resets else [])])).digest()


def replay_tokens(spec: CacheSpec) -> int | None:
    """Tokens that rebuild every ring from nothing: each layer needs its span of the layer below (W·L for V4).

    None where a component needs the whole history, as a recurrent state does: nothing short of it can be replayed.
    """
    total = 0
    for layer in spec.layers:
        if any(component.recurrent for _, component in layer.components()):
            return None
        spans = [component.span for _, component in layer.components() if component.in_checkpoint]
        if None in spans:
            return None
        total += max((span for span in spans if span is not None), default=0)
    return total


REPLAYED = ("window", "tail", "entries", "index_tail", "index_keys")
"""Components of latent layers: what ``approximate`` can tell how to replay."""


def window_tokens(spec: CacheSpec) -> int:
    """Tokens that every ring is filled by, whatever the layers below it hold: the longest one's.

    Replaying them alone is what DeepSeek-V4.1 is served with: the first of them see less than they did, so that what
    they leave in the rings of higher layers is near to what an uninterrupted run has there, and no more.

    Raises:
        SpecError: the spec has layers for which that is not told: classic or recurrent ones.
    """
    spans = [0]
    for number, layer in enumerate(spec.all_layers):
        for role, component in layer.components():
            if role not in REPLAYED:
                raise SpecError(
                    got=f"'approximate' with {spec.path(number)}.{role}",
                    where="prefix",
                    allowed="windows, tails and compressed entries",
                    hint="'full' or kvcore.Periodic(tokens) keep the state of all others.",
                )
            spans.append(component.span or 0 if component.in_checkpoint else 0)
    return max(spans)


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949 section 4.2.1) of None, unsigned integers, bytes, text and lists."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        encoded = value.encode()
        return _head(3, len(encoded)) + encoded
    return _head(4, len(value)) + b"".join(map(cbor, value))


def _head(major: int, value: int) -> bytes:
    """Major type and argument in the fewest bytes."""
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise SpecError(got=value, where="token id", allowed="an integer below 2^64")


class _Numbers(dict[int, bytes]):
    """Numbers in CBOR: those that come again and again are looked up, and there are not more of them than that."""

    def __missing__(self, number: int) -> bytes:
        found = cbor(number)
        if len(self) < MOST_NUMBERS:
            self[number] = found
        return found


_NUMBERS = _Numbers()
