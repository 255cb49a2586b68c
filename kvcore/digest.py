"""The content digest: what two caches hold, as numbers that every backend can compute.

Bytes are read as little-endian 32-bit words. Each word is mixed with the place it holds (region, position, word of the
row), and the mixed words are summed modulo 2^32, in two lanes with different seeds. Sums do not depend on order, so
any backend can compute them in parallel; neither 64-bit integers nor unsigned shifts are needed. It detects damage
and mix-ups; it is not cryptographic. The mixer is murmur3's 32-bit finaliser.
"""

import hashlib
import zlib
from collections.abc import Sequence

LANE_SEEDS = (0x2545F491, 0x9E6C63D0)
MIX_SHIFTS = (16, 13, 16)
MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
WORD_FACTOR = 0x9E3779B1
POSITION_FACTOR = 0x7FEB352D
MASK = 0xFFFFFFFF


def region_salt(layer: int, role: str) -> int:
    """32 bits that tell a layer's role from all others."""
    return zlib.crc32(f"{layer}.{role}".encode())


def combine(requests: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> int:
    """One 64-bit number for requests in order, each (length, lanes of its regions in canonical order)."""
    text = ";".join(f"{length}:" + ",".join(f"{a:08x}{b:08x}" for a, b in lanes) for length, lanes in requests)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
