"""By layer: contiguous stages of a model, cut only where no layer reads a pool of the other side."""

from itertools import pairwise

import msgspec

from kvcore.errors import SpecError
from kvcore.spec import CacheSpec


class Layers(msgspec.Struct, frozen=True):
    """``starts``: first layer of every stage, and at the end the number of layers."""

    starts: tuple[int, ...]

    @property
    def shards(self) -> int:
        """Stages."""
        return len(self.starts) - 1

    def on(self, shard: int) -> range:
        """The layers of a stage."""
        return range(self.starts[shard], self.starts[shard + 1])

    def owner(self, layer: int) -> int:
        """The stage that holds a layer."""
        return next(shard for shard in range(self.shards) if layer in self.on(shard))

    def local(self, layer: int) -> int:
        """A layer's number within its stage."""
        return layer - self.starts[self.owner(layer)]

    def canonical(self, shard: int, local: int) -> int:
        """The layer that is number ``local`` of a stage."""
        return self.on(shard)[local]


def stages(spec: CacheSpec, shards: int) -> Layers:
    """Cut a model into ``shards`` stages of nearly equal length; draft layers stay in the last one.

    Raises:
        SpecError: it has fewer groups of layers that share pools than that.
    """
    count = len(spec.layers) or len(spec.all_layers)
    splits = [layer for layer in range(1, count) if _can_split(spec, layer)]
    if len(splits) + 1 < shards:
        raise SpecError(
            got=shards,
            where="layers",
            allowed=f"1 to {len(splits) + 1}: layers that share a pool stay together",
        )
    starts = [0]
    for shard in range(1, shards):
        left = splits[: len(splits) - (shards - 1 - shard)]
        starts.append(min((at for at in left if at > starts[-1]), key=lambda at: abs(at * shards - count * shard)))
    starts.append(len(spec.all_layers))
    assert all(before < after for before, after in pairwise(starts))
    return Layers(tuple(starts))


def _can_split(spec: CacheSpec, layer: int) -> bool:
    """True if no layer from ``layer`` on reads a pool of an earlier one."""
    sources = [c.shared_from for number, _, c in spec.components() if number >= layer]
    return all(source is None or source >= layer for source in sources)
