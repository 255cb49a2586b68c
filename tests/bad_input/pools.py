"""Misuse of pools, blobs and formats between steps."""

# ruff: noqa: ARG005 - the entries of a table share one signature

import numpy as np

from kvcore.errors import RequestError, ShapeError, SnapshotError, SpecError
from tests.bad_input.world import FP4, RING, Case, World, ones


def _pools() -> list[Case]:
    name = f"{RING}.window.page"

    def replace(change):
        def call(w: World) -> None:
            w.cache.pools = change({**w.cache.pools}, w)

        return call

    wrong = {
        "a name missing": lambda pools, w: {n: array for n, array in pools.items() if n != name},
        "an unknown name": lambda pools, w: {**pools, f"{FP4}.window.page": pools[name]},
        "another shape": lambda pools, w: {**pools, name: pools[name][:1]},
        "another dtype": lambda pools, w: {**pools, name: w.cache.asarray(np.zeros(pools[name].shape, np.int32))},
        "an array of another framework": lambda pools, w: {**pools, name: foreign_array(w, tuple(pools[name].shape))},
        "a list instead of an array": lambda pools, w: {**pools, name: [0]},
        "none of it": lambda pools, w: {},
        "nothing": lambda pools, w: None,
        "a list": lambda pools, w: list(pools.values()),
    }
    return [Case(f"pools replaced: {kind}", ShapeError, replace(change)) for kind, change in wrong.items()]


def foreign_array(w: World, shape: tuple[int, ...]) -> object:
    """A uint8 array of a framework that is not the backend's."""
    if w.backend == "reference":
        import torch

        return torch.zeros(shape, dtype=torch.uint8)
    return np.zeros(shape, np.uint8)


def _damaged(blob: bytes) -> bytes:
    """One bit of the last byte flipped."""
    return bytes(blob[:-1]) + bytes([blob[-1] ^ 1])


CASES = [
    *_pools(),
    Case("import nothing", SnapshotError, lambda w: w.cache.import_request(b"")),
    Case("import noise", SnapshotError, lambda w: w.cache.import_request(bytes(range(256)) * 4)),
    Case(
        "import half a blob", SnapshotError, lambda w: w.cache.import_request(bytes(w.cache.export_request(w.a))[:200])
    ),
    Case(
        "import a damaged blob", SnapshotError, lambda w: w.cache.import_request(_damaged(w.cache.export_request(w.a)))
    ),
    Case(
        "import from another spec", SnapshotError, lambda w: w.cache.import_request(w.other.export_request(w.foreign))
    ),
    Case(
        "import into a request with tokens",
        RequestError,
        lambda w: w.cache.import_request(w.cache.export_request(w.a), w.b),
    ),
    Case("checkpoint without prefix reuse", SpecError, lambda w: w.cache.checkpoint(w.a)),
    Case(
        "encode to an unknown format", SpecError, lambda w: w.cache.ops.encode("nothing", w.cache.asarray(ones(1, 8)))
    ),
    Case("encode rows of another size", SpecError, lambda w: w.cache.ops.encode("v4_584", w.cache.asarray(ones(1, 8)))),
]
