"""The verbs on memory-mapped pools.

Encoding, addressing and attention are the reference's, for the pools are NumPy arrays all the same; what differs is
where they live, and that whole slots are reset one by one, so that never more than one is in memory.
"""

import os
import tempfile

import numpy as np

from kvcore.backends.reference import ReferenceOps
from kvcore.errors import BackendError
from kvcore.pools import allocate, fresh_unit


class MmapOps(ReferenceOps):
    """Every verb of ``kvcore.ops.Ops`` on files."""

    def __init__(self, plan, folder):
        super().__init__(plan)
        self.folder = folder

    def allocate(self):
        """Fresh pools for the plan, one anonymous file a pool; the files go when the arrays do."""

        def make(units, size, fresh, region, buffer):
            if not units * size:
                return np.zeros((units, size), np.uint8)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.truncate(units * size)  # sparse: zeros take no room until they are written over
                pool = np.memmap(file, np.uint8, "r+", shape=(units, size))
            if fresh is not None:
                unit = np.frombuffer(fresh, np.uint8)
                for row in pool:
                    row[:] = unit
            return pool

        return allocate(self.plan, make)

    def reset_slots(self, pools, slots):
        """Make slots [n] as if never used, one at a time; -1 is ignored."""
        for region in self.plan.regions:
            if region.growth != "slot":
                continue
            for buffer, (name, size) in region.buffers.items():
                unit = np.frombuffer(fresh_unit(region, buffer) or bytes(size), np.uint8)
                for slot in slots[slots >= 0]:
                    pools[name][slot] = unit
        return pools


class MmapBackend:
    """Creates ``MmapOps``; the files lie in KVCORE_MMAP_DIR, or where temporary files do."""

    name = "mmap"

    def create(self, plan, *, device=None):
        """Bind the verbs to a plan."""
        if device not in (None, "cpu"):
            raise BackendError(got=device, where="device", allowed="None or 'cpu' for backend='mmap'")
        if plan.layout == "tpu_tile":
            raise BackendError(got=plan.layout, where="layout", allowed="packed or planar for backend='mmap'")
        return MmapOps(plan, os.environ.get("KVCORE_MMAP_DIR"))

    def default_layout(self, device):
        """Packed: one page a unit, so that a row is near its scales on disk."""
        return "packed"
