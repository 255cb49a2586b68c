"""Life cycle with Triton kernels: reset, poison, copies, digests. Nothing asks the device for a value."""

import torch

from kvcore.backends.torch_triton import strips
from kvcore.backends.torch_triton.backend import TorchOps
from kvcore.backends.torch_triton.kernels.launch import calls
from kvcore.backends.torch_triton.kernels.strips import move_strips
from kvcore.pools import fresh_unit


class LifeOps(TorchOps):
    """``TorchOps`` with launches in place of the verbs on whole slots and blocks."""

    def __init__(self, plan, device="cpu"):
        super().__init__(plan, device)
        self._fresh = {}

    @torch.no_grad()
    def reset_slots(self, pools, slots):
        """Make slots [n] as if never used; -1 is ignored."""
        slots = self._units(slots)
        for region, buffer, name in self._buffers("slot"):
            calls().fill_units(pools[name], slots, self._fresh_unit(region, buffer, name), 0)
        return pools

    @torch.no_grad()
    def poison(self, pools, slots, blocks):
        """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
        for growth, units in (("slot", self._units(slots)), ("block", self._units(blocks))):
            for _, _, name in self._buffers(growth):
                calls().fill_units(pools[name], units, None, 0xFF)
        return pools

    @torch.no_grad()
    def copy_slots(self, pools, sources, targets):
        """Copy whole slots; all sources are read before any target is written; pairs with a -1 are ignored."""
        return self._copy(pools, sources, targets, "slot")

    @torch.no_grad()
    def copy_blocks(self, pools, sources, targets):
        """Copy whole blocks; all sources are read before any target is written; pairs with a -1 are ignored."""
        return self._copy(pools, sources, targets, "block")

    @torch.no_grad()
    def digest_rows(self, raw, salt):
        """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
        return calls().digest_lanes(raw.rows.contiguous(), raw.positions.int().contiguous(), salt)

    @torch.no_grad()
    def digest_strips(self, pages, table, first_page):
        """Two lanes for every page -> [pages, 2] int64, all strips at once: what ``kvcore.handoff`` asks for.

        Args:
            pages: [pages, bytes] uint8 on the device, without gaps.
            table: [strips, 7] int32; see ``kernels.checksum.ENTRY``.
            first_page: number of the first of these pages among all, from which positions are counted.
        """
        return calls().digest_strips(pages, table, first_page)

    @torch.no_grad()
    def move_strips(self, pools, pages, placed, units, *, store=False):
        """Copy canonical rows of many components from the pools into pages, or with ``store`` back, in few launches.

        Args:
            pages: [pages, bytes] uint8 on the device, without gaps.
            placed: the strips of every component; see ``kvcore.handoff.layout``.
            units: block of every page, or the slot, [pages] int32; rows of a unit -1 are zeros, or not stored.

        Returns:
            False, and nothing is done, where a layout stores the bytes of an element apart.
        """
        tables = strips.tables(self.plan, pools, placed, pages.shape[1])
        if tables is None:
            return False
        units = self._units(units)
        for width, table in tables:
            move_strips(pages, units, self.asarray(table), width, store)
        return True

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
