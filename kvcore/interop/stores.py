"""The store that a connector keeps its blocks in, as an engine's configuration says it."""

from collections.abc import Mapping
from typing import Any

from kvcore.store import BlockStore, DiskTier, HostTier, Tier

GIB = 1 << 30


def store_of(extra: Mapping[str, Any], prefix: str = "", *, host_bytes: int = GIB) -> BlockStore:
    """The store of a connector's extra configuration.

    Args:
        extra: ``host_bytes``, ``folder``, ``bytes``, ``secret`` (hex); or a ``store`` that there is already.
        prefix: of these names.
        host_bytes: where the configuration says none.
    """
    given: BlockStore | None = extra.get(f"{prefix}store")
    if given is not None:
        return given
    tiers: list[Tier] = [HostTier(extra.get(f"{prefix}host_bytes", host_bytes))]
    if f"{prefix}folder" in extra:
        tiers.append(DiskTier(extra[f"{prefix}folder"], extra.get(f"{prefix}bytes", 64 * GIB)))
    secret = extra.get(f"{prefix}secret")
    return BlockStore(tiers, secret=None if secret is None else bytes.fromhex(secret))
