"""vLLM's own classes, out of its wheel: pages, block tables, events and the connector's base, with an engine around."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

import kvcore
from kvcore import store as stores
from kvcore.errors import SpecError
from kvcore.interop import vllm, vllm_connector, vllm_layouts
from kvcore.spec import presets
from kvcore.store import BlockStore, HostTier
from tests.engines.wheels import own_modules

interface, layouts, events, pools, base = own_modules(
    "vllm",
    "v1.kv_cache_interface",
    "v1.kv_cache_layout",
    "distributed.kv_events",
    "v1.core.block_pool",
    "distributed.kv_transfer.kv_connector.v1.base",
)

LAYERS, HEADS, DIM, ROWS, BLOCKS = 2, 2, 8, 16, 24
SPEC = presets.classic(layers=LAYERS, key_heads=HEADS, key_dim=DIM, block_tokens=ROWS, key_format="fp32")
LAYOUT = "NL_X_NB_NH_BS_CS"
FLASH = presets.deepseek_v4_flash(formats={"index_keys": "index_fp8_132_h"}, draft=False)
V41 = presets.deepseek_v4_1_flash(draft=False)


def config_of(spec):
    groups = [
        interface.KVCacheGroupSpec([record.name], record.build(interface))
        for record in vllm.kv_cache_specs(spec)
        if record.shared_from is None
    ]
    return interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def one_group():
    """As vLLM groups equal layers."""
    full = interface.FullAttentionSpec(block_size=ROWS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    group = interface.KVCacheGroupSpec(names, full)
    return interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])


@pytest.mark.parametrize("spec", [FLASH, V41], ids=["v4", "v4.1"])
def test_specs_go_both_ways(spec):
    for record in vllm.kv_cache_specs(spec):
        assert record.build(interface).page_size_bytes == record.page_bytes
    index = next(layer.index_keys for layer in spec.layers if layer.index_keys is not None)
    shares = {layer: part.shared_from for layer, _, part in spec.components() if part.shared_from is not None}
    found = vllm.spec_from(
        config_of(spec),
        index={"heads": index.heads, "topk": index.topk},
        formats={"index_keys": index.format},
        shares=shares,
    )
    assert [dict(layer.components()) for layer in found.layers] == [dict(one.components()) for one in spec.layers]


def test_a_group_of_layers_and_its_modes():
    found = vllm.spec_from(one_group())
    assert [layer.kv for layer in found.layers] == [layer.kv for layer in SPEC.layers]
    assert {mode.name for mode in interface.KVQuantMode} >= {"NONE", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"}


def test_its_block_layouts_are_those_of_the_table():
    orders = {layout.name: layout.stride_order for layout in layouts.KVCacheLayout}
    assert set(orders) == set(vllm_layouts.BLOCK_LAYOUTS)
    counts = (LAYERS, BLOCKS, HEADS, ROWS, 2 * DIM)
    for name, order in orders.items():
        memory = torch.zeros([counts[axis] for axis in order])
        inverse = [order.index(axis) for axis in range(5)]
        logical = memory.permute(inverse)
        said = vllm_layouts.descriptor(SPEC, name, blocks=BLOCKS)
        assert {line.block for line in said.lines} == {4 * logical.stride(1)}
        assert {line.head for line in said.lines} == {4 * logical.stride(2)}
        assert {line.token for line in said.lines} == {4 * logical.stride(3)}


def test_events_are_read_by_its_own_classes():
    told = []
    store = BlockStore([HostTier(300)], events=told.extend)
    for number in range(2):
        store.put(bytes([number]) * 32, bytes(200), stores.store.About(None, [1, 2], 2))
    batch = msgspec.msgpack.decode(stores.events.encode(told), type=events.KVEventBatch)
    assert [type(event).__name__ for event in batch.events] == ["BlockStored", "BlockStored", "BlockRemoved"]
    assert batch.events[0].block_hashes == [bytes(32)]


class Engine:
    """A scheduler and a worker with vLLM's block pool, block by block, and a connector on both sides."""

    def __init__(self, store):
        self.pool = pools.BlockPool(num_gpu_blocks=BLOCKS, enable_caching=False, hash_block_size=ROWS)
        self.tensors = {
            f"model.layers.{layer}.self_attn.attn": torch.zeros(BLOCKS, HEADS, ROWS, 2 * DIM) for layer in range(LAYERS)
        }
        extra = {"store": store, "layout": LAYOUT}
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        sides = base.KVConnectorRole
        kind = vllm_connector.KvcoreConnector
        self.scheduler = kind(config, sides.SCHEDULER, one_group())
        self.worker = kind(config, sides.WORKER, one_group())
        self.worker.register_kv_caches(self.tensors)
        self.computed = 0

    def rows(self, tokens, position, layer):
        """What a model writes for a token: it depends on all before it."""
        seed = [layer, position, *tokens[: position + 1]]
        return torch.from_numpy(np.random.default_rng(seed).standard_normal((HEADS, 2 * DIM)).astype(np.float32))

    def run(self, name, tokens):
        """Prefill a prompt, in two steps; its blocks."""
        request = SimpleNamespace(request_id=name, prompt_token_ids=tokens, num_computed_tokens=0)
        matched, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not later
        blocks = [block.block_id for block in self.pool.get_new_blocks(-(-len(tokens) // ROWS))]
        given = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, given, matched)
        middle = max(matched, len(tokens) // 2)
        new = SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=matched)
        none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        start, failed = matched, set()
        for end in (middle, len(tokens)):
            again = SimpleNamespace(
                req_ids=[name], new_block_ids=[None], num_computed_tokens=[start], resumed_req_ids=set()
            )
            output = SimpleNamespace(
                scheduled_new_reqs=[new] if end == middle else [],
                scheduled_cached_reqs=none if end == middle else again,
                num_scheduled_tokens={name: end - start},
            )
            self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
            self.worker.start_load_kv(None)
            bad = self.worker._bad.copy()
            # vLLM throws away what a step computes behind a block that was not loaded, and goes on from there.
            stop = min([end, *(blocks.index(block) * ROWS for block in bad)])
            for position in range(start, stop):
                for layer, tensor in enumerate(self.tensors.values()):
                    self.worker.wait_for_layer_load("")
                    tensor[blocks[position // ROWS], :, position % ROWS] = self.rows(tokens, position, layer)
                self.computed += 1
            self.worker.wait_for_save()
            assert self.worker.get_block_ids_with_load_errors() == bad
            assert self.worker.get_block_ids_with_load_errors() == set()
            self.worker.clear_connector_metadata()
            start, failed = stop, failed | bad
        self.scheduler.request_finished(request, blocks)
        return blocks, failed

    def check(self, tokens, blocks):
        """All rows are those of the model."""
        for layer, tensor in enumerate(self.tensors.values()):
            for position in range(len(tokens)):
                found = tensor[blocks[position // ROWS], :, position % ROWS]
                assert torch.equal(found, self.rows(tokens, position, layer)), position


def test_a_connector_saves_and_loads_blocks_and_uses_none_that_is_damaged():
    tier = HostTier(1 << 24)
    tokens = [(5 * number) % 97 for number in range(70)]
    first = Engine(BlockStore([tier]))
    blocks, _ = first.run("a", tokens)
    first.check(tokens, blocks)
    assert first.computed == 70
    # Another engine computes only what is behind the last full block, and what differs.
    second = Engine(BlockStore([tier]))
    blocks, _ = second.run("b", tokens)
    second.check(tokens, blocks)
    assert second.computed == 6
    other = [*tokens[:40], *range(30)]
    blocks, _ = second.run("c", other)
    second.check(other, blocks)
    assert second.computed == 6 + 70 - 32
    # Damage in the second block: it and those behind it are reported, computed, and whole in the store again.
    key = stores.keys_of(SPEC, tokens)[1]
    damaged = bytearray(tier.get(key))
    damaged[300] ^= 1
    tier.put(key, bytes(damaged))
    third = Engine(BlockStore([tier]))
    blocks, failed = third.run("d", tokens)
    third.check(tokens, blocks)
    assert (third.computed, failed) == (70 - 16, set(blocks[1:4]))
    fourth = Engine(BlockStore([tier]))
    fourth.check(tokens, fourth.run("e", tokens)[0])
    assert fourth.computed == 6
    cache = kvcore.adopt(SPEC, list(third.tensors.values()), layout=LAYOUT)
    own = kvcore.create_cache(SPEC, backend="reference", max_requests=1, max_tokens=128)
    request = cache.admit(blocks=blocks, length=70)
    assert own.digest([own.import_request(cache.export_request(request))]) == cache.digest([request])


def test_tensors_are_found_by_name_whatever_their_order():
    engine = Engine(BlockStore([HostTier(1 << 24)]))
    turned = dict(reversed(engine.tensors.items()))
    engine.worker.register_kv_caches(turned)
    engine.tensors["model.layers.1.self_attn.attn"][3] = 7
    cache = engine.worker._workers[0].cache
    request = cache.admit(blocks=[3], length=ROWS)
    found = cache.exclusive("look", lambda state: state.digest_lanes([request]))
    assert found[0][1][0] != found[0][1][1]
    del turned["model.layers.1.self_attn.attn"]
    with pytest.raises(SpecError, match=r"model\.layers\.1\.self_attn\.attn"):
        engine.worker.register_kv_caches(turned)
