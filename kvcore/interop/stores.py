"""The store that a connector keeps its blocks in, as an engine's configuration says it."""

from collections.abc import Mapping
from typing import Any

from kvcore.errors import ShapeError
from kvcore.store import BlockStore, DiskTier, HostTier, Tier
from kvcore.store.seal import Seal

GIB = 1 << 30


def store_of(extra: Mapping[str, Any], prefix: str = "", *, host_bytes: int = GIB) -> BlockStore:
    """The store of a connector's extra configuration.

    Args:
        extra: ``host_bytes``, ``folder``, ``bytes``, ``secret`` (hex); or a ``store`` that there is already.
        prefix: of these names.
        host_bytes: where the configuration says none.

    Raises:
        ShapeError: a number that is none, or a secret that is not hex or of another length; no folder is made then.
    """
    given: BlockStore | None = extra.get(f"{prefix}store")
    if given is not None:
        return given
    secret = _secret(extra.get(f"{prefix}secret"), f"{prefix}secret")
    tiers: list[Tier] = [HostTier(extra.get(f"{prefix}host_bytes", host_bytes))]
    if f"{prefix}folder" in extra:
        tiers.append(DiskTier(extra[f"{prefix}folder"], extra.get(f"{prefix}bytes", 64 * GIB)))
    return BlockStore(tiers, secret=secret)


def _secret(given: Any, where: str) -> bytes | None:
    try:
        secret = None if given is None else bytes.fromhex(given)
    except (TypeError, ValueError):
        # It is not shown to whoever reads messages.
        raise ShapeError(got="what is no hex", where=where, allowed="16 to 64 bytes, as hex digits") from None
    Seal(secret)
    return secret
