"""The reference backend: the verbs bound to a plan, on the CPU, in place."""

from typing import Any

import numpy as np

from kvcore.backends.reference import attention, encoding, entries, indexer, kv, lifecycle, recurrent, tail, window
from kvcore.errors import BackendError
from kvcore.ops import Ops, StepIndex
from kvcore.ops.choices import Decided, Decision
from kvcore.ops.facade import copy_in_place, of_streams, poison_in_place, reset_in_place, verb
from kvcore.plan import CachePlan, Region
from kvcore.pools import Pools, allocate
from kvcore.spec.codes import check_known


class ReferenceOps(Decided, Ops):
    """Every verb of ``kvcore.ops.Ops`` on NumPy arrays.

    Attributes:
        layers: of the plan, by number: what the functions behind the verbs are given.
    """

    in_place = True
    plain_class = np.ndarray

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self.layers = plan.layers
        self.device = "cpu"

    @property
    def how(self) -> str:
        """NumPy on the CPU."""
        return "cpu"

    def state_view(self, pools: Pools, layer: int, slot: int, count: int, row: int) -> Any:
        """States of requests that follow each other as the pool's own memory, [count, ...]; None: only as a copy."""
        return recurrent.state_view(self.layers[layer], pools, slot, count, row)

    def decide(self, layer: int | None, verb: str) -> Decision:
        """NumPy, whatever it is."""
        del layer, verb
        return Decision("numpy", "the reference is NumPy alone")

    encode = verb(encoding.encode)
    decode = verb(encoding.decode)
    pack_page = verb(encoding.pack_page)
    unpack_page = verb(encoding.unpack_page)
    join = verb(tail.join)
    append_window = verb(window.append_window)
    rotated_rows = verb(window.rotated_rows)
    append_rotated_window = verb(window.append_rotated_window)
    append_tail = verb(tail.append_tail, role="tail")
    append_index_tail = verb(tail.append_tail, "append_index_tail", role="index_tail")
    gather_window = verb(window.gather_window)
    compress = verb(tail.compress)
    flush = of_streams(verb(tail.flush))
    store_entries = verb(entries.store_entries)
    closed = verb(entries.closed)
    gather_entries = verb(entries.gather_entries)
    gather_all_entries = verb(entries.gather_all_entries)
    index_scores = verb(indexer.index_scores)
    select = verb(indexer.select)
    attend = verb(attention.attend)
    append_kv = verb(kv.append_kv)
    gather_kv = verb(kv.gather_kv)
    mask = verb(kv.mask)
    visible_rows = verb(kv.visible_rows)
    from_batch = verb(kv.from_batch)
    to_batch = verb(kv.to_batch)
    attend_kv = verb(kv.attend_kv)
    append_state = verb(recurrent.append_state)
    write_state = verb(recurrent.write_state)
    select_state = verb(recurrent.select_state)
    read_state = verb(recurrent.read_state)
    append_conv = verb(recurrent.append_conv)
    gather_conv = verb(recurrent.gather_conv)
    reset_slots = reset_in_place(lifecycle.reset_slots)
    poison = poison_in_place(lifecycle.poison)
    copy_slots = copy_in_place(lifecycle.copy_units, "slot")
    copy_blocks = copy_in_place(lifecycle.copy_units, "block")
    gather_rows = verb(lifecycle.gather_rows)
    store_rows = verb(lifecycle.store_rows)
    read_ring = verb(lifecycle.read_ring)
    restore_ring = verb(lifecycle.restore_ring)
    digest_rows = verb(lifecycle.digest_rows)

    def allocate(self) -> Pools:
        """Fresh pools for the plan."""

        def make(units: int, size: int, fresh: bytes | None, region: Region, buffer: str) -> np.ndarray:
            pool = np.zeros((units, size), np.uint8)
            if fresh is not None:
                pool[:] = np.frombuffer(fresh, np.uint8)
            return pool

        return allocate(self.plan, make)

    def asarray(self, array: Any) -> np.ndarray:
        """A NumPy array as it is."""
        return np.asarray(array)

    def index(self, host: StepIndex) -> StepIndex:
        """The step index as it is."""
        return host


class ReferenceBackend:
    """Creates ``ReferenceOps``."""

    name = "reference"

    def create(self, plan: CachePlan, *, device: str | None = None) -> ReferenceOps:
        """Bind the verbs to a plan."""
        if device not in (None, "cpu"):
            raise BackendError(got=device, where="device", allowed="None or 'cpu' for backend='reference'")
        check_known((region.format for region in plan.regions), encoding.KNOWN, self.name)
        return ReferenceOps(plan)

    def default_layout(self, device: str | None) -> str:
        """Packed, like the engines."""
        del device
        return "packed"
