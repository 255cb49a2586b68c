"""Several groups of caches under vLLM's own managers of blocks: windows whose blocks go, blocks of unlike lengths."""

import numpy as np
import pytest
import torch

from kvcore.errors import SpecError
from kvcore.interop.vllm_groups import Groups
from kvcore.store import BlockStore, DiskTier, HostTier
from tests.engines.vllm_requests import Requests
from tests.engines.wheels import own_modules

interface, pools, managers, base = own_modules(
    "vllm",
    "v1.kv_cache_interface",
    "v1.core.block_pool",
    "v1.core.single_type_kv_cache_manager",
    "distributed.kv_transfer.kv_connector.v1.base",
)

BLOCKS, WINDOW, STEP = 96, 20, 16
LATENT = 584
FULL = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
SLIDING = interface.SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=WINDOW
)
ROWS = interface.SlidingWindowMLASpec(
    block_size=8,
    num_kv_heads=1,
    head_size=512,
    dtype=torch.uint8,
    sliding_window=12,
    state_content_bytes=LATENT,
)
STATES = interface.SlidingWindowMLASpec(
    block_size=4, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=8
)
NAMES = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.1.swa", "model.layers.1.compressor"]
KINDS = [FULL, SLIDING, ROWS, STATES]
LAYOUT = {"kv": "NL_X_NB_NH_BS_CS", "window": "NL_X_NB_BSV_BSS", "tail": "NL_X_NB_BS_HS"}


def config(kinds=KINDS, names=NAMES):
    groups = [interface.KVCacheGroupSpec([name], kind) for name, kind in zip(names, kinds, strict=True)]
    return interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Engine(Requests):
    """A scheduler and a worker with vLLM's managers, a connector on both sides, and a model with a window."""

    def __init__(self, store):
        pool = pools.BlockPool(num_gpu_blocks=BLOCKS, enable_caching=False, hash_block_size=4)
        kinds = [managers.FullAttentionManager, *[managers.SlidingWindowManager] * 3]
        own = [
            make(
                kv_cache_spec=spec,
                block_pool=pool,
                enable_caching=False,
                kv_cache_group_id=number,
                scheduler_block_size=STEP,
            )
            for number, (make, spec) in enumerate(zip(kinds, KINDS, strict=True))
        ]
        self.tensors = {
            NAMES[0]: torch.full((BLOCKS, 2, 16, 16), -1.0),
            NAMES[1]: torch.full((BLOCKS, 1, 16, 16), -1.0),
            NAMES[2]: torch.full((BLOCKS, 8, LATENT), 255, dtype=torch.uint8),
            NAMES[3]: torch.full((BLOCKS, 4, 32), -1.0),
        }
        super().__init__(base, own, {"store": store, "layout": LAYOUT}, config())
        self.worker.register_kv_caches(self.tensors)

    def rows(self, tokens, position, group):
        """What a model writes for a token: it depends on all before it."""
        width = (32, 16, 583, 32)[group]
        return np.random.default_rng([group, position, *tokens[: position + 1]]).integers(0, 200, width)

    def write(self, tokens, start, end, tables):
        for position in range(start, end):
            self.write_row(tokens, position, tables)

    def write_row(self, tokens, position, tables):
        for group, (name, spec) in enumerate(zip(NAMES, KINDS, strict=True)):
            block, row = tables[group][position // spec.block_size], position % spec.block_size
            assert block, "a row of a block that is gone"
            given = torch.from_numpy(self.rows(tokens, position, group))
            for place in self.places(name, block, row):
                place[...] = given[: place.numel()].to(place.dtype).view(place.shape)
                given = given[place.numel() :]

    def places(self, name, block, row):
        """Where a row lies; of latent rows their values, then their scales, behind the values of all rows of a page."""
        tensor = self.tensors[name]
        if tensor.dtype == torch.uint8:
            page = tensor[block].view(-1)
            return page[row * 576 :][:576], page[8 * 576 + row * 8 :][:7]
        return (tensor[block, :, row],) if tensor.ndim == 4 else (tensor[block, row],)

    def check(self, tokens, tables, length):
        """All rows that the next token looks at are those of the model."""
        for group, (name, spec) in enumerate(zip(NAMES, KINDS, strict=True)):
            first = 0 if group == 0 else max(0, length + 1 - spec.sliding_window)
            for position in range(first, length):
                places = self.places(name, tables[group][position // spec.block_size], position % spec.block_size)
                wanted = self.rows(tokens, position, group)
                found = torch.cat([place.reshape(-1) for place in places])
                assert found.tolist() == wanted.tolist(), (name, position)


TOKENS = [(5 * number) % 97 for number in range(118)]


def test_all_groups_come_back_and_only_what_a_hit_needs():
    tier = HostTier(1 << 24)
    first = Engine(BlockStore([tier]))
    assert first.run("a", TOKENS) == 0
    # 118 tokens are 7 blocks of 16; a step's tokens are never all of a prompt.
    for step in (24, 7, 100):
        again = Engine(BlockStore([tier]))
        assert again.run("b", TOKENS, step) == 112
        assert again.computed == 6
    # Another prompt shares 40 tokens: 32 are a hit, with the windows that end there.
    other = [*TOKENS[:40], *range(60)]
    third = Engine(BlockStore([tier]))
    assert third.run("c", other) == 32
    assert Engine(BlockStore([tier])).run("d", other) == 96
    groups = Groups(config(), {"index": None, "formats": None})
    assert (groups.step, groups.alone, [part.role for part in groups.parts]) == (
        16,
        False,
        ["kv", "kv", "window", "tail"],
    )
    assert [groups.columns(number, 0, 112) for number in range(4)] == [list(range(7)), [5, 6], [12, 13], [26, 27]]
    # States of four tokens are kept where a hit can end, others are not.
    assert [column for column in range(28) if not groups.kept(3, column)] == [n for n in range(28) if n % 4 < 2]


@pytest.mark.parametrize("part", range(4))
def test_a_request_whose_block_is_damaged_is_computed(part):
    tier = HostTier(1 << 24)
    assert Engine(BlockStore([tier])).run("a", TOKENS) == 0
    engine = Engine(BlockStore([tier]))
    groups = engine.scheduler.groups
    key = groups.parts[part].keys(TOKENS, None)[groups.columns(part, 0, 112)[-1]]
    bad = bytearray(tier.get(key))
    bad[-5] ^= 4
    tier.put(key, bytes(bad))
    # What is left is a shorter hit, or none; no row of the damaged block is looked at.
    found = engine.run("b", TOKENS)
    assert engine.failed == 1
    assert found == 96
    assert engine.computed == 118 - 96
    # And it is whole again for the next.
    assert Engine(BlockStore([tier])).run("c", TOKENS) == 112


def test_a_window_that_is_gone_makes_a_shorter_hit():
    tier = HostTier(1 << 24)
    Engine(BlockStore([tier])).run("a", TOKENS)
    engine = Engine(BlockStore([tier]))
    groups = engine.scheduler.groups
    for column in (12, 13):
        tier.remove(groups.parts[2].keys(TOKENS, None)[column])
    assert engine.run("b", TOKENS) == 96


def test_groups_of_alike_layers_have_pages_of_their_own():
    names = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
    groups = Groups(config([FULL, SLIDING, SLIDING], names), {})
    one, two, three = groups.keys(TOKENS, "tenant")
    assert not {*one} & {*two} | {*two} & {*three}
    assert groups.keys(TOKENS, "tenant") == [one, two, three]
    assert groups.keys(TOKENS, None)[0] != one


def test_what_blocks_do_not_hold_is_refused_by_name_and_reason():
    state = interface.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    chunk = interface.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=32
    )
    for kind, reason in ((state, "mamba-cache-mode"), (chunk, "not a window's")):
        with pytest.raises(SpecError, match=rf"model\.layers\.1\.attn, a {type(kind).__name__}.*{reason}"):
            Groups(config([FULL, kind], NAMES[:2]), {})


def test_pages_of_all_groups_lie_on_a_disk(tmp_path):
    tiers = [HostTier(1), DiskTier(tmp_path, 1 << 24)]
    Engine(BlockStore(tiers)).run("a", TOKENS)
    assert Engine(BlockStore([HostTier(1), DiskTier(tmp_path, 1 << 24)])).run("b", TOKENS) == 112
