"""What a page of a store is verified by: a head of 64 bytes before it, which also says under which key it is kept.

``xxh3_128`` finds damage, and pages under another's key; whoever can write pages can also write their heads. Where that
is not everybody, a secret makes it ``blake2b`` with a key: a head without the secret is none.
"""

import hashlib
import hmac
import struct

import xxhash

from kvcore.errors import ShapeError

MAGIC, VERSION = b"kvcorepg", 1

HEAD = struct.Struct("<8sBBHIQ32s8x")
"""Magic, version, kind, zero, zero, bytes of the page, digest (of key and page) with zeros behind."""

KINDS = {"xxh3_128": 1, "blake2b": 2}

LEAST_SECRET = 16


class Seal:
    """Heads of pages, written and held against the pages.

    Args:
        secret: 16 to 64 bytes that only those know who may write; None: damage is what is looked for.

    Raises:
        ShapeError: a secret of another length.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and not (isinstance(secret, bytes) and LEAST_SECRET <= len(secret) <= 64):
            raise ShapeError(got="another secret", where="Seal: secret", allowed=f"{LEAST_SECRET} to 64 bytes, or None")
        self._secret = secret
        self.kind = "xxh3_128" if secret is None else "blake2b"

    def close(self, key: bytes, page: bytes | memoryview) -> bytes:
        """The page with its head."""
        head = HEAD.pack(MAGIC, VERSION, KINDS[self.kind], 0, 0, len(page), self._digest(key, page))
        return b"".join((head, page))

    def open(self, key: bytes, data: bytes | memoryview) -> memoryview | None:
        """The page, if head, key and every byte are as they were; None otherwise."""
        if len(data) < HEAD.size:
            return None
        page = memoryview(data)[HEAD.size :]
        expected = HEAD.pack(MAGIC, VERSION, KINDS[self.kind], 0, 0, len(page), self._digest(key, page))
        return page if hmac.compare_digest(expected, bytes(data[: HEAD.size])) else None

    def _digest(self, key: bytes, page: bytes | memoryview) -> bytes:
        if self._secret is not None:
            keyed = hashlib.blake2b(key, key=self._secret, digest_size=32)
            keyed.update(page)
            return keyed.digest()
        plain = xxhash.xxh3_128(key)
        plain.update(page)
        return plain.digest()
