"""A layer of every kind, to be misused: the kit's world (``kvcore.testing.misuse``) of a wider spec."""

from functools import cache as memoise
from typing import Any

import numpy as np

import kvcore
from kvcore.spec import FORMATS, CacheSpec, Entries, IndexKeys, LayerSpec, Window
from kvcore.testing import misuse
from kvcore.testing.misuse import Case, refused, require
from tests.support import scene

# Numbers of the layers below.
CSA, HCA, OWNER, SHARED, PAGED, SLIDING, SLOT, RING, FP16, FP4 = range(10)


def _pool(share: int | None) -> LayerSpec:
    return LayerSpec(
        window=Window(dim=8, window=4, format="bf16"),
        entries=Entries(dim=8, ratio=2, format="fp32", share=share),
        index_keys=IndexKeys(dim=8, ratio=2, heads=2, topk=2, format="fp32", share=share),
    )


SPEC = CacheSpec(
    layers=[
        scene.compressed(4),
        scene.compressed(4, overlap=False, indexer=False),
        _pool(None),
        _pool(OWNER),
        scene.classic(),
        scene.classic("ring", window=4),
        scene.classic("slot"),
        scene.ring(4),
        scene.ring(4, format="fp16"),
        scene.stored(4, format="v41_fp4_288", dim=512),
    ],
    block_tokens=4,
    name="misused",
)


class World(misuse.World):
    """The world of the kit's misuses with a layer of every kind, on poisoned storage."""

    def make(self, requests: int, tokens: int) -> kvcore.Cache:
        # One layout, so that the names of pools are the same on every backend.
        sizes = {"max_requests": requests, "max_tokens": tokens, "max_draft_tokens": 2, "check": self.check}
        return scene.create(SPEC, self.backend, layout="packed", **sizes)

    def elsewhere(self) -> kvcore.Cache:
        return scene.create([scene.ring(2)], self.backend)

    def write(self) -> None:
        scene.write(self.cache, {self.a: range(11), self.b: range(100, 103)})

    @property
    def both(self) -> dict[kvcore.Request, int]:
        """Three tokens; an entry of ratio 4 closes for each request."""
        return {self.a: 2, self.b: 1}

    def fill(self, step: Any) -> None:
        scene.fill(step, [11, 12, 103])

    def undisturbed(self) -> int:
        return _undisturbed(check=self.check)


@memoise
def _undisturbed(*, check: bool) -> int:
    """The same on every backend: the numbers are whole."""
    return World("reference", check=check).proceed()


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of ones."""
    return np.ones(shape, dtype)


def check_building(case: Case) -> None:
    """A misuse that needs no cache; the registry of formats is all there is to change."""
    before = dict(FORMATS)
    refused(case)
    require(dict(FORMATS) == before, "the formats changed")
