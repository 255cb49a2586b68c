"""States of recurrent layers under vLLM's own managers, in its mode that keeps them at ends of blocks."""

import numpy as np
import pytest
import torch

from kvcore.errors import SpecError
from kvcore.interop.vllm_groups import Groups
from kvcore.store import BlockStore, HostTier
from tests.engines.vllm_requests import Requests
from tests.engines.wheels import own_modules

interface, pools, managers, base, abstract = own_modules(
    "vllm",
    "v1.kv_cache_interface",
    "v1.core.block_pool",
    "v1.core.single_type_kv_cache_manager",
    "distributed.kv_transfer.kv_connector.v1.base",
    "model_executor.layers.mamba.abstract",
)

BLOCKS, BLOCK, PADDED = 64, 16, 256
SHAPES, DTYPES = ((6, 4), (2, 4, 4)), (torch.bfloat16, torch.float32)
FULL = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
NAMES = ["model.layers.0.mixer", "model.layers.1.mixer", "model.layers.2.attn"]
RECURRENT = NAMES[:2]
TOKENS = [(5 * number) % 97 for number in range(118)]


def states(**options):
    values = {"mamba_cache_mode": "align", "page_size_padded": PADDED, **options}
    return interface.MambaSpec(block_size=BLOCK, shapes=SHAPES, dtypes=DTYPES, **values)


def config(kind):
    groups = [interface.KVCacheGroupSpec(RECURRENT, kind), interface.KVCacheGroupSpec(NAMES[2:], FULL)]
    return interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Layer(abstract.MambaBase):
    """A layer of vLLM's, which takes its page apart itself."""

    mamba_type = None

    def get_state_shape(self):
        return SHAPES

    def get_state_dtype(self):
        return DTYPES

    def get_attn_backend(self):
        raise NotImplementedError


class Engine(Requests):
    """A scheduler and a worker with vLLM's managers, a connector on both sides, and a model that carries states on."""

    def __init__(self, store, drafts=0):
        kind = states(num_speculative_blocks=drafts)
        pool = pools.BlockPool(num_gpu_blocks=BLOCKS, enable_caching=False, hash_block_size=BLOCK)
        own = [
            make(
                kv_cache_spec=spec, block_pool=pool, enable_caching=False, kv_cache_group_id=number,
                scheduler_block_size=BLOCK,
            )
            for number, (make, spec) in enumerate(
                ((managers.MambaManager, kind), (managers.FullAttentionManager, FULL))
            )
        ]  # fmt: skip
        pages = {name: torch.full((BLOCKS, 1, 1, PADDED), -1, dtype=torch.int8) for name in RECURRENT}
        self.layers = {name: Layer() for name in RECURRENT}
        for name, layer in self.layers.items():
            layer.bind_kv_cache(pages[name])
        extra = {"store": store, "layout": {"kv": "NL_X_NB_NH_BS_CS"}}
        super().__init__(base, own, extra, config(kind))
        self.worker.register_kv_caches({**pages, NAMES[2]: torch.full((BLOCKS, 2, BLOCK, 16), -1.0)})

    def state(self, tokens, layer):
        """What a layer has carried on behind tokens."""
        rng = np.random.default_rng([layer, *tokens])
        return [
            torch.from_numpy(rng.integers(-100, 100, shape)).to(dtype)
            for shape, dtype in zip(SHAPES, DTYPES, strict=True)
        ]

    def check(self, tokens, tables, length):
        """The state behind some tokens is where vLLM looks for it."""
        block = tables[0][(length - 1) // BLOCK]
        assert block, "the state's block is not there"
        for number, layer in enumerate(self.layers.values()):
            for held, want in zip(layer.kv_cache, self.state(tokens[:length], number), strict=True):
                assert torch.equal(held[block], want)

    def write(self, tokens, _, end, tables):
        block = tables[0][(end - 1) // BLOCK]
        for number, layer in enumerate(self.layers.values()):
            for held, want in zip(layer.kv_cache, self.state(tokens[:end], number), strict=True):
                held[block] = want


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_state_behind_a_hit_comes_back(drafts):
    tier = HostTier(1 << 24)
    assert Engine(BlockStore([tier]), drafts).run("a", TOKENS, BLOCK) == 0
    assert Engine(BlockStore([tier]), drafts).run("b", TOKENS, 2 * BLOCK) == 112
    other = [*TOKENS[:40], *range(60)]
    assert Engine(BlockStore([tier]), drafts).run("c", other, BLOCK) == 32
    assert Engine(BlockStore([tier]), drafts).run("d", other, BLOCK) == 96


def test_states_are_those_at_which_steps_ended():
    tier = HostTier(1 << 24)
    # 24, 48, 72, 96, 118: two of them are ends of blocks.
    assert Engine(BlockStore([tier])).run("a", TOKENS, 24) == 0
    assert Engine(BlockStore([tier])).run("b", TOKENS[:96], BLOCK) == 48
    assert Engine(BlockStore([tier])).run("c", TOKENS, BLOCK) == 96


def test_a_hit_needs_the_last_state_alone():
    groups = Groups(config(states()), {})
    assert [(part.role, part.names) for part in groups.parts] == [
        ("state", (RECURRENT[0], RECURRENT[0], RECURRENT[1], RECURRENT[1])),
        ("kv", (NAMES[2],)),
    ]
    assert groups.columns(0, 0, 112) == [6]
    assert groups.columns(1, 0, 112) == list(range(7))


def test_a_damaged_state_is_not_used():
    tier = HostTier(1 << 24)
    Engine(BlockStore([tier])).run("a", TOKENS, BLOCK)
    engine = Engine(BlockStore([tier]))
    key = engine.scheduler.groups.parts[0].keys(TOKENS, None)[6]
    bad = bytearray(tier.get(key))
    bad[-5] ^= 4
    tier.put(key, bytes(bad))
    assert engine.run("b", TOKENS, BLOCK) == 96
    assert engine.failed == 1


def test_what_is_not_kept_at_ends_of_blocks_is_refused():
    with pytest.raises(SpecError, match=r"mixer, a MambaSpec.*mamba-cache-mode align"):
        Groups(config(states(mamba_cache_mode="none")), {})
    kind = interface.MambaSpec(
        block_size=BLOCK, shapes=SHAPES[:1], dtypes=(torch.float8_e4m3fn,), mamba_cache_mode="align"
    )
    with pytest.raises(SpecError, match=r"mixer, states of torch.float8_e4m3fn.*bf16, fp16, fp32|bfloat16"):
        Groups(config(kind), {})
