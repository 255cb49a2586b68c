"""What processes ask each other about blocks, and what they are told: msgpack, whatever the channel."""

from typing import Literal

import msgspec

FORM, VERSION = "kvcore.blocks", 1

MOST_KEYS = 1 << 16
"""Keys of a question."""

MOST_BYTES = 1 << 28
"""Of pages that are laid out at a time."""

NO_ROOM = "no_room"
"""Why an exporter lays out nothing: all of its places are taken, or there is no memory."""


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What another process wants to know of some keys: which are ``held``, or an ``export`` of those that are.

    ``number`` is whatever the answer is to repeat.
    """

    number: int
    verb: Literal["held", "export"]
    keys: list[bytes]


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it is told.

    Attributes:
        number: the question's.
        held: 1 for every key that is here, else 0.
        handle: of an export of the first keys that are here, as many as are laid out at a time; empty: none is.
        reason: why there is none of both; empty otherwise.
    """

    number: int
    held: bytes = b""
    handle: bytes = b""
    reason: str = ""


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A block of an export: its key, and the bytes of its page with the head."""

    key: bytes
    nbytes: int


class Listing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of an export of blocks.

    Attributes:
        form, version: of this.
        export: (exporter, number, generation).
        blocks: in order; each begins with a page of the export, and has as many as it takes.
    """

    form: Literal["kvcore.blocks"]
    version: Literal[1]
    export: tuple[str, int, int]
    blocks: list[Listed]
