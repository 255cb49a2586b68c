"""One request told in three pieces, each on a backend of its own, and the bytes that it must travel as.

The sessions of torch and of JAX never share a process. What ties them together is written down here: the hash of the
blob after every piece, the same wherever it was told, so that a hand-over from torch to JAX to the reference is proved
leg by leg. Where both are installed, the whole route is taken too.
"""

import hashlib
from collections.abc import Sequence

import scene
import stories

from kvcore.spec import CacheSpec

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
    "stored": ("8946b3ae75d2c29d", "fd25eb9ae43a3b23", "d3afd14ab9652f8c"),
    "classic rows": ("763d60158252ab2e", "5ca91ceb2e639b2a", "2ad30885cb3e7769"),
}
"""Spec -> start of the sha256 of the request's blob after each piece."""


def route(spec: CacheSpec, backends: Sequence[str], **padding: int) -> tuple[str, ...]:
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
        hashes.append(hashlib.sha256(blob).hexdigest()[:16])
    return tuple(hashes)
