"""Life cycle with Triton kernels: reset, poison, copies, digests. Nothing asks the device for a value."""

from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from kvcore.backends.torch_triton import strips as tables
from kvcore.backends.torch_triton.backend import TorchOps, recording_nothing
from kvcore.backends.torch_triton.launch import calls
from kvcore.digest import MASK
from kvcore.pools import fresh_unit

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What pages are copied in, by bytes."""
MOST_POOLS = 3
"""Pools of a region that a launch takes."""


class Ring(NamedTuple):
    """What a launch must know of a region whose units are rings.

    Attributes:
        names: of its pools.
        row: heads, and bytes of a head's row.
        fields: seven numbers a field, see ``ring_rows_kernel``.
        rows: of a ring, which lies ``copies`` times in its unit.
    """

    names: list[str]
    row: tuple[int, int]
    fields: list[int]
    rows: int
    copies: int

    @classmethod
    def of(cls, region):
        """A region's ring."""
        pools, fields = list(region.buffers), []
        for place in region.unit.places:
            steps = (step * place.stride for step in region.steps)
            first, _ = region.format.byte_range(place.field)
            _, unit = region.buffers[place.buffer]
            fields += pools.index(place.buffer), unit, place.base, *steps, place.nbytes, first
        names = [name for name, _ in region.buffers.values()]
        return cls(names, (region.heads, region.format.row), fields, region.rows, region.copies)

    def move(self, pools, index, held, *, back):
        """The rows that the step's tokens take -> ``held`` [tokens, heads, bytes], or ``back``."""
        place = index.positions, index.request_index, index.slots
        buffers = [pools[name] for name in self.names]
        calls().move_ring_rows(buffers, held, *place, self.fields, self.rows, self.copies, back)


class LifeOps(TorchOps):
    """``TorchOps`` with launches in place of the verbs on whole slots and blocks."""

    def __init__(self, plan, device="cpu"):
        super().__init__(plan, device)
        self._fresh = {}
        self._rings = {}

    @recording_nothing
    def reset_slots(self, pools, slots):
        """Make slots [n] as if never used; -1 is ignored."""
        slots = self._units(slots)
        for region, buffer, name in self._buffers("slot"):
            calls().fill_units(pools[name], slots, self._fresh_unit(region, buffer, name), 0)
        return pools

    @recording_nothing
    def poison(self, pools, slots, blocks):
        """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
        for growth, units in (("slot", self._units(slots)), ("block", self._units(blocks))):
            for _, _, name in self._buffers(growth):
                calls().fill_units(pools[name], units, None, 0xFF)
        return pools

    @recording_nothing
    def copy_slots(self, pools, sources, targets):
        """Copy whole slots; all sources are read before any target is written; pairs with a -1 are ignored."""
        return self._copy(pools, sources, targets, "slot")

    @recording_nothing
    def copy_blocks(self, pools, sources, targets):
        """Copy whole blocks; all sources are read before any target is written; pairs with a -1 are ignored."""
        return self._copy(pools, sources, targets, "block")

    @recording_nothing
    def digest_rows(self, raw, salt):
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
        # A row's last word is filled up with zeros.
        words = pad(raw.rows, (0, -raw.rows.shape[2] % 4)).contiguous().view(torch.int32)
        return _unsigned(calls().digest_lanes(words, raw.positions.int().contiguous(), salt))

    @recording_nothing
    def digest_strips(self, pages, strips, first_page):
        """Two lanes for every page -> [pages, 2] int64, in one launch; None where rows are not whole words."""
        if isinstance(pages, np.ndarray):
            return super().digest_strips(pages, strips, first_page)
        table = tables.of_digest(tuple(strips), _grain(pages))
        if table is None:
            return None
        return _unsigned(calls().digest_strips(_words(pages, torch.int32), self.asarray(table), first_page))

    @recording_nothing
    def move_strips(self, pools, pages, strips, units, *, store=False):
        """Copy a request's rows from the pools into pages, or with ``store`` back, in a launch for each width of words.

        False, and nothing is done, where a layout stores the bytes of an element apart.
        """
        if isinstance(pages, np.ndarray):
            return super().move_strips(pools, pages, strips, units, store=store)
        found = tables.of_move(self.plan, pools, strips, _grain(pages), store=store)
        if found is None:
            return False
        units = self._units(units)
        for width, table in found:
            calls().move_strips(_words(pages, WORDS[width]), units, self.asarray(table), store)
        return True

    @recording_nothing
    def read_ring(self, pools, layer, role, index):
        """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``: a launch a part."""
        rings = self._rings_of(layer, role)
        if rings is None:
            return super().read_ring(pools, layer, role, index)
        tokens, saved = len(index.positions), []
        for ring in rings:
            held = torch.empty((tokens, *ring.row), dtype=torch.uint8, device=self.device)
            ring.move(pools, index, held, back=False)
            saved.append(held)
        return saved

    @recording_nothing
    def restore_ring(self, pools, layer, role, index, saved):
        """Put back what ``read_ring`` saved."""
        rings = self._rings_of(layer, role)
        if rings is None:
            return super().restore_ring(pools, layer, role, index, saved)
        for ring, held in zip(rings, saved, strict=True):
            ring.move(pools, index, held, back=True)
        return pools

    def _rings_of(self, layer, role):
        """The rings of a role, one a part; None where its rows lie in blocks."""
        if (layer, role) not in self._rings:
            regions = self.plan.region(layer, role)
            fit = all(region.growth == "slot" and len(region.buffers) <= MOST_POOLS for region in regions)
            self._rings[layer, role] = [Ring.of(region) for region in regions] if fit else None
        return self._rings[layer, role]

    def _copy(self, pools, sources, targets, growth):
        sources, targets = self._units(sources), self._units(targets)
        for _, _, name in self._buffers(growth):
            calls().copy_units(pools[name], sources, targets)
        return pools

    def _units(self, numbers):
        return self.asarray(numbers).int().contiguous()

    def _buffers(self, growth):
        for region in self.plan.regions:
            if region.growth == growth:
                yield from ((region, buffer, name) for buffer, (name, _) in region.buffers.items())

    def _fresh_unit(self, region, buffer, name):
        """What a unit holds before anything is written, on the device; None means zeros."""
        if name not in self._fresh:
            fresh = fresh_unit(region, buffer)
            with torch.inference_mode(False):
                self._fresh[name] = None if fresh is None else self.bytes_of(fresh)
        return self._fresh[name]


def _words(pages, dtype):
    """Pages [n, bytes] as words."""
    # Tensors without elements may have strides that ``view`` refuses.
    return pages.view(dtype) if pages.numel() else pages.new_empty((len(pages), 0), dtype=dtype)


def _unsigned(lanes):
    return lanes.long() & MASK


def _grain(pages):
    """Bytes that the pages' beginnings are multiples of: a record may lie behind pages of fewer."""
    return gcd(pages.shape[1], pages.storage_offset())
