"""An engine's blocks in a store: what a connector does. Its memory, its block tables and its hashes stay its own.

    python examples/store_blocks.py

A first engine computes a prompt and saves its full blocks; a second one finds them on disk, loads what is whole, and
computes the rest. A page that was damaged on the way is named, and not used.
"""

import tempfile
from pathlib import Path

import numpy as np

import kvcore
from kvcore.store import BlockStore, DiskTier, HostTier, keys_of
from kvcore.store.blocks import Blocks

spec = kvcore.spec.presets.classic(layers=2, key_heads=2, key_dim=8, block_tokens=16, key_format="fp32")
prompt = list(range(100, 170))


class Engine:
    """Paged tensors [blocks, keys and values, rows, heads, channels], and what a model writes into them."""

    def __init__(self, folder: Path) -> None:
        self.tensors = [np.zeros((32, 2, 16, 2, 8), np.float32) for _ in spec.layers]
        self.store = BlockStore([HostTier(1 << 20), DiskTier(folder, 1 << 30)])
        cache = kvcore.adopt(spec, self.tensors, layout="NL_X_NB_TWO_BS_NH_HS")
        self.blocks = Blocks(cache, self.store)

    def prefill(self, table: list[int]) -> int:
        """The prompt's rows, loaded or computed; how many were computed."""
        keys = keys_of(spec, prompt)
        there = self.store.longest(keys)
        bad = self.blocks.load(table[:there], keys[:there])
        start = (there - len(bad)) * 16
        for position in range(start, len(prompt)):
            for layer, tensor in enumerate(self.tensors):
                tensor[table[position // 16], :, position % 16] = prompt[position] + layer
        self.blocks.save(table[: len(keys)], keys)
        self.store.flush()
        return len(prompt) - start


with tempfile.TemporaryDirectory() as name:
    first, second, third = (Engine(Path(name)) for _ in range(3))
    print("computed", first.prefill([7, 3, 9, 1, 4]), "tokens, then", second.prefill([0, 2, 5, 8, 6]))
    page = next(Path(name).glob(f"??/{keys_of(spec, prompt)[2].hex()}.page"))
    damaged = bytearray(page.read_bytes())
    damaged[1000] ^= 1
    page.write_bytes(damaged)
    print("with a flipped bit in the third block", third.prefill([4, 1, 9, 3, 7]))
    same = all((a[[7, 3, 9, 1]] == b[[4, 1, 9, 3]]).all() for a, b in zip(first.tensors, third.tensors, strict=True))
    print("rows equal:", same)
