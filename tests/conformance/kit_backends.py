"""A pytest plugin of the tests' own: puts the backend named in KIT_BACKEND into the registry as ``broken``."""

import os

import numpy as np

from kvcore import plugins
from kvcore.plugins import KnownGap
from kvcore.requests.manager import Manager
from tests.conformance import broken


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


class WritesLate(broken.ReferenceOps):
    """Keys and values are taken from the caller's arrays when somebody looks for them."""

    late: tuple = ()

    def append_kv(self, pools, layer, index, k, v):
        self.settle()
        self.late = pools, layer, index, k, v
        return pools

    def settle(self):
        late, self.late = self.late, ()
        if late:
            super().append_kv(*late)

    def gather_rows(self, *given, **options):
        self.settle()
        return super().gather_rows(*given, **options)


class DeviceIgnored(broken.Backend):
    """Runs wherever it likes."""

    def create(self, plan, *, device=None, check=False):
        del device, check
        return self.ops(plan)


class RowsOfNobody(broken.ReferenceOps):
    """Columns beyond a request's rows hold whatever the slot holds there."""

    def gather_window(self, pools, layer, index, rows=None):
        found = super().gather_window(pools, layer, index, rows)
        return found._replace(values=np.where(found.positions[:, :, None] < 0, np.float32(1), found.values))


def forgetful(verb, answer):
    """The reference, in a library whose table of requests does nothing in that verb."""
    setattr(Manager, verb, lambda *_: answer)
    return broken.info()


KINDS = {kind.__name__: kind for kind in (NothingRestored, BlocksNotCopied, SlotsNotCopied, RowsOfNobody, WritesLate)}
RECORDS = {
    "DeviceIgnored": lambda: broken.info(load=lambda: DeviceIgnored(broken.ReferenceOps)),
    "blocks kept by an abort": lambda: forgetful("shrink", None),
    "blocks kept by a copy": lambda: forgetful("release_replaced", []),
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
