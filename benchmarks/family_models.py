"""A tiny random model of every causal type that transformers ships: every kind of layer, in sizes that take seconds.

Fields that many configurations share are one table; what a type calls otherwise, or needs beside them, is its row.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.tiny_models import varied

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCABULARY, LAYERS, WINDOW = 128, 4, 8
MOST_PARAMETERS = 3_000_000
LINEAR, FULL, SLIDING, CONV = "linear_attention", "full_attention", "sliding_attention", "conv"

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "max_window_layers": 2, "query_pre_attn_scalar": 8,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "index_n_heads": 2, "index_head_dim": 16, "index_topk": WINDOW,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "decoder_layers": LAYERS, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "ffn_dim": 48,
    "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 16,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
"""Field -> value, of every configuration that has the field."""

_MLA = {"num_key_value_heads": 4, "head_dim": None}
_DENSE_FIRST = _MLA | {"first_k_dense_replace": 1}
_DECODER = {"is_decoder": True}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
_GEMMA4 = {
    "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "num_global_key_value_heads": 1, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 0,
}  # fmt: skip
_INKLING = {
    "d_rel": 4, "rel_extent": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": WINDOW, "unpadded_vocab_size": VOCABULARY,
}  # fmt: skip
_LLAMA = {"model_type": "llama", **{name: SMALL[name] for name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
)}}  # fmt: skip
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8}  # fmt: skip
_ROTARY = {"rotary_dim": 4}
_CONV = {"layer_types": [CONV, FULL] * 2}
_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (SLIDING, FULL)}

OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "minicpm3", "youtu"), _MLA),
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "sarvam_mla"), _DENSE_FIRST
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _DECODER,
    ),
    **dict.fromkeys(("codegen", "gptj"), _ROTARY),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("inkling_text", "inkling2_text"), _INKLING),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONV),
    "bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 4},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "big_bird": _DECODER | {"attention_type": "original_full"},
    "cohere_compass_text": {"layer_types": [SLIDING] * 3 + [FULL], "rope_parameters": _BY_KIND},
    "cpmant": {"dim_head": 8, "dim_ff": 48},
    "ctrl": {"dff": 48},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "deepseek_v4": {
        "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32,
        "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "hc_sinkhorn_iters": 3, "index_topk": 4,
        "layer_types": [SLIDING, *["compressed_sparse_attention", "heavily_compressed_attention"] * 2],
        "num_hidden_layers": 5, "mlp_layer_types": ["hash_moe", *["moe"] * 4],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "rope_parameters": {
            "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1
        },
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "fuyu": {"text_config": _LLAMA | {"model_type": "persimmon", "num_key_value_heads": 4}, "patch_size": 4},
    "gemma3": {"vision_config": _VISION | {"model_type": "siglip_vision_model"}},
    "got_ocr2": {"text_config": _LLAMA | {"model_type": "qwen2"}},
    "falcon": {"head_dim": None},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "layer_types": [SLIDING, FULL] * 3,
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [48] * 6,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": _MAMBA2 | {"layer_types": [LINEAR, FULL] * 2, "shared_intermediate_size": 16},
    "hrm_text": {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 12},
    "inkling2_loop_text": _INKLING
    | {
        "num_hidden_layers": 4, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1,
        "loop_layer_index_end": 3, "loop_num_passes": 2, "loop_gate_rank": 4,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2
    },
    "kimi_linear": {
        "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "head_dim": None,
        "layer_types": [LINEAR, FULL] * 2,
    },
    "longcat_flash": {
        "num_layers": 2, "num_key_value_heads": 4, "head_dim": 4, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 1,
    },
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 48, "shared_intermediate_size": 16, "rotary_dim": 4, "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mpt": {"expansion_ratio": 2},
    "nemotron_h": {
        "layers_block_type": [LINEAR, "mlp", FULL, LINEAR], "ssm_state_size": 8, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2,
    },
    "prophetnet": {
        "num_hidden_layers": None, "num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS,
        "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    },
    "reformer": _DECODER | {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "rembert": _DECODER | {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": _DECODER
    | {
        "shape_vocab_size": 16, "pronunciation_vocab_size": 16, "shape_embed_dim": 16, "pronunciation_embed_dim": 16,
        "enable_pronunciation": False, "enable_shape": False,
    },
    "xlstm": {"v_head_dim": None, "head_dim": None, "num_heads": 2, "qk_dim_factor": 1.0, "chunk_size": 8},
    "xmod": _DECODER | {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "mamba_dt_rank": 4,
              "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_hidden_layers": 6},
    "zamba2": {"layers_block_type": [LINEAR, "hybrid"] * 2, "num_key_value_heads": 4, "n_mamba_heads": 4,
               "mamba_d_state": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""Model type -> fields that it has beside the table's, or with other values; None leaves one out."""


def configuration(kind: str) -> Any:
    """A small configuration of a model type."""
    return _small(CONFIG_MAPPING[kind], kind)


def make(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model of a type; ValueError: its configuration does not make it small."""
    config = configuration(kind)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in outline.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters, however small its configuration says that it is")
    torch.manual_seed(0)
    return varied(AutoModelForCausalLM.from_config(config), dtype)


def token_ids(rows: int, tokens: int) -> torch.Tensor:
    """Random token ids [rows, tokens], the same for every model; 0 is left out, it is the padding."""
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(2))


def _small(found: Any, kind: str) -> Any:
    own = OWN.get(kind, {})
    if "text_config" not in getattr(found, "sub_configs", {}):
        return found(**_fields(found, kind))
    parts: dict[str, Any] = {}
    for name, part in found.sub_configs.items():
        if name not in own and getattr(part, "model_type", ""):
            parts[name] = _small(part, part.model_type).to_dict()
    return found(**parts | own)


def _fields(found: Any, kind: str) -> dict[str, Any]:
    try:
        default = found()
    except Exception:  # noqa: BLE001 - a class that has no configuration by default
        default = found
    own = OWN.get(kind, {})
    values = {name: value for name, value in SMALL.items() if _has(default, name)} | own
    left_out = {name for name, value in own.items() if value is None and name != "q_lora_rank"}
    return {name: value for name, value in values.items() if name not in left_out}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001 - one that differs from layer to layer may not be asked for
        return True
