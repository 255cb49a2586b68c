"""Plans of hybrid models beside vLLM's page arithmetic, by its own classes: equal per state and per input, and what is
not equal is explained to the byte.

vLLM keeps a layer's states and inputs in one page a request, and one page more for each draft, inputs in all of them. A
page is then padded to an attention page, whose block is made long enough first. kvcore has a ring of 1 + D states and
one of width - 1 + max(D, 1) inputs in every slot; blocks are as long as they are planned.
"""

import contextlib
import importlib
import math
import operator
from types import SimpleNamespace

import pytest
import torch

from kvcore.plan import plan_cache
from kvcore.spec import from_hf_config
from tests.engines.wheels import own_modules

interface, mamba, platforms = own_modules(
    "vllm",
    "v1.kv_cache_interface",
    "model_executor.layers.mamba.mamba_utils",
    "platforms.interface",
)
SHAPES = mamba.MambaStateShapeCalculator
mamba.divide = operator.floordiv  # of vllm.distributed, which needs a GPU's libraries

QWEN = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-M*", "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
}  # fmt: skip
FALCON = {
    "model_type": "falcon_h1", "num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_d_ssm": 8192,
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8,
    "attn_layer_offset": 4,
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 4096, "num_heads": 128, "head_dim": 64,
    "n_groups": 8, "state_size": 128, "conv_kernel": 4,
}  # fmt: skip
LFM2 = {
    "model_type": "lfm2", "num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 8, "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention"],
}  # fmt: skip
KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 4, "hidden_size": 2304, "num_attention_heads": 32,
    "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip

MODELS = {
    # configuration, shapes by vLLM for a number of drafts, (block tokens it takes, percent that a page is padded by)
    "Qwen3-Next": (QWEN, lambda n: SHAPES.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4, n), (1056, 0.76)),
    "Nemotron-H": (NEMOTRON, lambda n: SHAPES.mamba2_state_shape(1, 8192, 8, 128, 64, 128, 4, n), (1040, 0.1)),
    "Falcon-H1": (FALCON, lambda n: SHAPES.mamba2_state_shape(1, 8192, 1, 128, 64, 256, 4, n), (2064, 0.16)),
    "Jamba": (JAMBA, lambda _: SHAPES.mamba1_state_shape(1, 8192, 16, 4), (144, 2.86)),
    "Kimi-Linear": (KIMI, lambda n: SHAPES.kda_state_shape(1, 32, 128, num_spec=n), (1920, 1.89)),
    "Mamba-2": (MAMBA2, lambda n: SHAPES.mamba2_state_shape(1, 8192, 8, 128, 64, 128, 4, n), None),
    "LFM2": (LFM2, lambda n: SHAPES.short_conv_state_shape(1, 2048, 3, n), (16, 300.0)),
}
ROWS = 16
"""Tokens of a block that vLLM begins with."""


def recurrent(spec):
    """The first layer that carries something on."""
    return next(number for number, layer in enumerate(spec.layers) if layer.conv is not None)


def page(shapes, drafts=0):
    """vLLM's page of a layer, with its dtypes: the inputs' first, then the state's."""
    dtypes = (torch.bfloat16, torch.float32)[: len(shapes)]
    return interface.MambaSpec(block_size=ROWS, shapes=shapes, dtypes=dtypes, num_speculative_blocks=drafts)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_slot_and_a_page(name, drafts):
    config, shapes, _ = MODELS[name]
    if name == "Jamba" and drafts:
        return  # vLLM has no drafts with Mamba-1
    spec = from_hf_config(config)
    number = recurrent(spec)
    plan = plan_cache(spec, max_requests=1, max_tokens=256, max_draft_tokens=drafts)
    layer = spec.layers[number]
    (inputs,) = plan.region(number, "conv")
    row = inputs.format.row * inputs.heads
    conv, *states = shapes(drafts)
    assert sorted(conv) == sorted((layer.conv.channels, layer.conv.width - 1 + drafts))
    assert row == 2 * layer.conv.channels
    state = 0
    if layer.state is not None:
        assert math.prod(states[0]) == math.prod(layer.state.shape)
        state = 4 * math.prod(layer.state.shape)
        assert plan.region(number, "state")[0].unit.nbytes == (1 + drafts) * state
    theirs = page(shapes(drafts), drafts)
    span = layer.conv.span
    assert theirs.page_size_bytes == (span + drafts) * row + state
    slot = inputs.unit.nbytes + (1 + drafts) * state
    # A ring has a spare row without drafts, so that a step can be undone; vLLM repeats the inputs with every draft.
    needed = theirs.max_memory_usage_bytes(SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none")))
    assert slot == needed + (row if not drafts else -drafts * (span + drafts) * row)


class Attention:
    """What vLLM's platform asks of an attention backend: that of its FlashAttention, which takes blocks of 16."""

    sizes = (16,)

    @classmethod
    def get_supported_kernel_block_sizes(cls):
        return list(cls.sizes)

    @staticmethod
    def customize_spec(spec):
        return spec


class FlashMLA(Attention):
    sizes = (64,)


def aligned(of, shapes):
    """What vLLM's own platform code makes of the block size and of a state's page: (tokens, bytes)."""
    latent = isinstance(of, interface.MLAAttentionSpec)
    backend = FlashMLA if latent else Attention

    class Platform(platforms.Platform):
        @classmethod
        def _find_non_ssm_backends(cls, _):
            return [backend]

    class Model:
        get_mamba_state_shape_from_config = staticmethod(lambda _: shapes)
        get_mamba_state_dtype_from_config = staticmethod(lambda _: (torch.bfloat16, torch.float32)[: len(shapes)])

    # What a config and a registry of the whole engine would be asked.
    importlib.import_module("vllm.model_executor.models").ModelRegistry = SimpleNamespace(
        resolve_model_cls=lambda *_, **__: (Model, "")
    )
    importlib.import_module("vllm.config.vllm").set_current_vllm_config = contextlib.nullcontext
    cache = SimpleNamespace(
        cache_dtype="auto", block_size=ROWS, mamba_cache_mode="none", mamba_page_size_padded=None,
        kv_cache_dtype_skip_layers=(),
    )  # fmt: skip
    model = SimpleNamespace(
        dtype=torch.bfloat16, use_mla=latent, architecture="", get_num_kv_heads=lambda _: of.num_kv_heads,
        get_head_size=lambda: of.head_size,
    )  # fmt: skip
    config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)
    Platform._align_hybrid_block_size(config, backend)
    return cache.block_size, cache.mamba_page_size_padded


@pytest.mark.parametrize("name", [name for name, (*_, padded) in MODELS.items() if padded])
def test_what_padding_to_an_attention_page_costs(name):
    """vLLM makes attention's blocks so long that a state fits, then pads states: kvcore does neither."""
    config, shapes, (tokens, percent) = MODELS[name]
    spec = from_hf_config(config)
    attends = next(layer for layer in spec.layers if layer.kv is not None or layer.entries is not None)
    if attends.kv is not None:
        of = interface.FullAttentionSpec(
            block_size=1, num_kv_heads=attends.kv.key_heads, head_size=attends.kv.key_dim, dtype=torch.bfloat16
        )
    else:
        of = interface.MLAAttentionSpec(
            block_size=1, num_kv_heads=1, head_size=attends.entries.dim, dtype=torch.bfloat16
        )
    plan = plan_cache(spec, max_requests=1, max_tokens=2048)
    number, role = spec.layers.index(attends), "kv" if attends.kv is not None else "entries"
    ours = sum(region.unit.nbytes / region.rows for region in plan.region(number, role))
    assert ours == of.page_size_bytes
    state = page(shapes(0)).page_size_bytes
    block, whole = aligned(of, shapes(0))
    assert (block, whole) == (tokens, tokens * of.page_size_bytes)
    padded = interface.MambaSpec(
        block_size=ROWS, shapes=shapes(0), dtypes=(torch.bfloat16, torch.float32)[: len(shapes(0))],
        page_size_padded=whole,
    )  # fmt: skip
    assert round(100 * (padded.page_size_bytes - state) / state, 2) == percent
