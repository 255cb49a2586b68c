"""The reference backend: the verbs bound to a plan, on the CPU, in place."""

import numpy as np

from kvcore.backends.reference import attention, encoding, entries, indexer, kv, lifecycle, tail, window
from kvcore.errors import BackendError
from kvcore.ops.choices import Decision
from kvcore.ops.composed import ComposedVerbs
from kvcore.plan import CachePlan
from kvcore.pools import allocate
from kvcore.spec import TAIL_OF
from kvcore.spec.codes import check_known


class ReferenceOps(ComposedVerbs):
    """Every verb of ``kvcore.ops.Ops`` on NumPy arrays."""

    in_place = True

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self.device = "cpu"

    @property
    def how(self):
        """NumPy on the CPU."""
        return "cpu"

    def decide(self, layer, verb):
        """NumPy, whatever it is."""
        return Decision("numpy", "the reference is NumPy alone")

    encode = encoding.encode
    decode = encoding.decode
    pack_page = encoding.pack_page
    unpack_page = encoding.unpack_page
    append_window = window.append_window
    append_rotated_window = window.append_rotated_window
    append_tail = tail.append_tail
    append_index_tail = tail.append_index_tail
    gather_window = window.gather_window
    compress = tail.compress
    flush = tail.flush
    store_entries = entries.store_entries
    store_role = entries.store_role
    closed = entries.closed
    gather_entries = entries.gather_entries
    gather_all_entries = entries.gather_all_entries
    index_scores = indexer.index_scores
    select = indexer.select
    attend = attention.attend
    append_kv = kv.append_kv
    gather_kv = kv.gather_kv
    mask = kv.mask
    visible_rows = kv.visible_rows
    from_batch = kv.from_batch
    to_batch = kv.to_batch
    attend_kv = kv.attend_kv
    reset_slots = lifecycle.reset_slots
    poison = lifecycle.poison
    copy_slots = lifecycle.copy_slots
    copy_blocks = lifecycle.copy_blocks
    gather_rows = lifecycle.gather_rows
    store_rows = lifecycle.store_rows
    read_ring = lifecycle.read_ring
    restore_ring = lifecycle.restore_ring
    digest_rows = lifecycle.digest_rows

    def allocate(self):
        """Fresh pools for the plan."""

        def make(units, size, fresh, region, buffer):
            pool = np.zeros((units, size), np.uint8)
            if fresh is not None:
                pool[:] = np.frombuffer(fresh, np.uint8)
            return pool

        return allocate(self.plan, make)

    def asarray(self, array):
        """A NumPy array as it is."""
        return np.asarray(array)

    def join(self, kv, score):
        """Kv and score [T, width] side by side."""
        return np.concatenate([kv, score], axis=1)

    def index(self, host):
        """The step index as it is."""
        return host

    def component(self, layer, role):
        """The layer's component of that role, or None."""
        return self.plan.layers[layer].component(role)

    def tail_of(self, role):
        """The role whose rows are compressed into ``role``."""
        return TAIL_OF[role]

    def global_scale(self, layer, role):
        """The component's global scale, 1 where it has none."""
        return self.plan.layers[layer].global_scale(role)

    def encode_rows(self, region, values, global_scale=1.0):
        """Values [n, d] or [n, heads, d] -> canonical rows [n, heads, row_bytes] of a region."""
        flat = values.reshape(len(values) * region.heads, region.format.dim)
        return self.encode(region.format, flat, global_scale).reshape(len(values), region.heads, region.format.row)


class ReferenceBackend:
    """Creates ``ReferenceOps``."""

    name = "reference"

    def create(self, plan, *, device=None, check=False):
        """Bind the verbs to a plan."""
        if device not in (None, "cpu"):
            raise BackendError(got=device, where="device", allowed="None or 'cpu' for backend='reference'")
        check_known((region.format for region in plan.regions), encoding.KNOWN, self.name)
        return ReferenceOps(plan)

    def default_layout(self, device):
        """Packed, like the engines."""
        return "packed"
