"""One request told in three pieces, each on a backend of its own, and the bytes that it must travel as.

The sessions of torch and of JAX never share a process. What ties them together is written down here: the hash of the
blob after every piece, the same wherever it was told, so that a hand-over from torch to JAX to the reference is proved
leg by leg. Where both are installed, the whole route is taken too.
"""

import hashlib
from collections.abc import Sequence

from kvcore.spec import CacheSpec
from tests.support import scene, stories, version_1

CLASSIC = CacheSpec(
    layers=[
        scene.classic(key_format="int8_row", value_format="fp8_row"),
        scene.classic("ring", window=5, key_format="bf16", value_format="fp16"),
        scene.ring(4, format="bf16"),
    ],
    block_tokens=8,
    name="classic rows",
)
SPECS = {spec.name: spec for spec in (stories.STORED, CLASSIC)}

TOKENS = range(300, 339)
PIECE = 13
LAYOUTS = ("packed", "planar", "tpu_tile")
BLOBS = {
    "stored": (
        ("8946b3ae75d2c29d", "4e71c4033f822478"),
        ("fd25eb9ae43a3b23", "3057951f7ecb5274"),
        ("d3afd14ab9652f8c", "1386ee68895c9778"),
    ),
    "classic rows": (
        ("763d60158252ab2e", "05db830133e3fe3a"),
        ("5ca91ceb2e639b2a", "3a6df78eff9a2231"),
        ("2ad30885cb3e7769", "e57c6d1184f06eac"),
    ),
}
"""Spec -> start of the sha256 of the request's blob after each piece, in version 1 and in version 2 with xxh3_128."""


def route(spec: CacheSpec, backends: Sequence[str], **padding: int) -> tuple[tuple[str, str], ...]:
    """Tell the pieces on these backends in turn, in other layouts and slots; the hash of each export."""
    blob = None
    hashes = []
    for number, backend in enumerate(backends):
        cache = stories.create(spec, backend, layout=LAYOUTS[number])
        for _ in range(number):
            cache.admit()
        request = cache.admit() if blob is None else cache.import_request(blob)
        piece = TOKENS[number * PIECE : (number + 1) * PIECE]
        for part in (piece[:5], piece[5:6], piece[6:]):
            with cache.step({request: list(part)}, **padding) as step:
                stories.feed(step, list(part))
        blob = cache.export_request(request)
        versions = version_1.blob(cache, request), blob
        hashes.append(tuple(hashlib.sha256(each).hexdigest()[:16] for each in versions))
    return tuple(hashes)
