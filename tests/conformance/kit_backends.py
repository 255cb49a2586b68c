"""A pytest plugin of the tests' own: puts the backend named in KIT_BACKEND into the registry as ``broken``."""

import os

import numpy as np
from parity import broken

from kvcore import plugins
from kvcore.plugins import KnownGap


class NothingRestored(broken.ReferenceOps):
    """A failed step leaves what it overwrote."""

    def restore_ring(self, pools, layer, role, index, saved):
        del layer, role, index, saved
        return pools


class BlocksNotCopied(broken.ReferenceOps):
    """A fork writes into blocks that hold nothing of the source."""

    def copy_blocks(self, pools, sources, targets):
        del sources, targets
        return pools


class SlotsNotCopied(broken.ReferenceOps):
    """A fork begins with an empty window."""

    def copy_slots(self, pools, sources, targets):
        del sources, targets
        return pools


class FirstTableForAll(broken.ReferenceOps):
    """Every request uses the first one's block table."""

    def append_kv(self, pools, layer, index, k, v):
        table = np.broadcast_to(index.block_table[:1], index.block_table.shape)
        return super().append_kv(pools, layer, index._replace(block_table=table), k, v)


class OldestChunkWins(broken.ReferenceOps):
    """Of a step longer than the ring the first rows are kept instead of the last."""

    def append_window(self, pools, layer, index, rows):
        (region,) = self.plan.region(layer, "window")
        start = index.starts[np.maximum(index.request_index, 0)]
        late = index.positions >= start + region.rows
        kept = index._replace(
            positions=np.where(late, -1, index.positions),
            request_index=np.where(late, -1, index.request_index),
            lengths=np.minimum(index.lengths, index.starts + region.rows),
        )
        return super().append_window(pools, layer, kept, rows)


KINDS = {
    kind.__name__: kind
    for kind in (NothingRestored, BlocksNotCopied, SlotsNotCopied, FirstTableForAll, OldestChunkWins)
}
RECORDS = {
    "absent": lambda: broken.info(probe=lambda: "no such chip"),
    "gap": lambda: broken.info(
        broken.RingOffByOne, known_gaps=[KnownGap(check="append_window/*", status="not_yet", reason="being written")]
    ),
    "closed gap": lambda: broken.info(
        known_gaps=[KnownGap(check="append_window/*", status="not_yet", reason="being written")]
    ),
}

name = os.environ["KIT_BACKEND"]
record = RECORDS[name]() if name in RECORDS else broken.info(KINDS.get(name) or getattr(broken, name))
plugins.registry().backends["broken"] = record
