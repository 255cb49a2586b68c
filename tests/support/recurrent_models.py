"""Small random models with recurrent layers, by model type: sizes that a test can follow."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny_models import VOCABULARY, varied

LINEAR, FULL = "linear_attention", "full_attention"
MIX = [LINEAR, FULL, LINEAR]
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
ATTENTION = COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
DELTA = ATTENTION | {
    "head_dim": 8, "layer_types": MIX, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "layer_types": MIX,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip

FIELDS: dict[str, dict[str, Any]] = {
    "bamba": ATTENTION | MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": ATTENTION | MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": ATTENTION
    | MAMBA2
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 16},
    "jamba": ATTENTION
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2},
    "kimi_linear": ATTENTION | MLA | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": ATTENTION | {"layer_types": ["conv", FULL, "conv"]},
    "mamba": COMMON | {"state_size": 4, "time_step_rank": 4},
    "mamba2": COMMON | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8},
    "nemotron_h": ATTENTION
    | {
        "head_dim": 8, "layers_block_type": [LINEAR, "mlp", FULL, LINEAR], "num_hidden_layers": 4,
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
    },
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS,
    "zamba2": ATTENTION
    | {
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4, "num_key_value_heads": 4,
        "n_mamba_heads": 4, "mamba_d_state": 8,
    },
}  # fmt: skip


def make(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of that type."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**FIELDS[kind])
    return varied(AutoModelForCausalLM.from_config(config), dtype)
