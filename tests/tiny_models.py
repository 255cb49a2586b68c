"""Small random models: every kind of layer, sizes that a test can follow."""

import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

VOCABULARY = 128

CLASSIC = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Full attention, grouped heads."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CLASSIC)).eval().to(dtype)


def mistral(dtype: torch.dtype = torch.float32) -> MistralForCausalLM:
    """Sliding attention, window 8."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**CLASSIC, sliding_window=8)).eval().to(dtype)


def deepseek_v4(dtype: torch.dtype = torch.float32) -> DeepseekV4ForCausalLM:
    """Window-only, CSA and HCA layers; ratios 4 and 8, window 8, the indexer picks 4 entries."""
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(config).eval()
    # The defaults are all zeros and ones, which would hide a forgotten bias, norm weight or sink.
    random = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith(("position_bias", "sinks")):
            weight.data.normal_(0, 0.5, generator=random)
        elif name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5, generator=random)
        elif "proj" in name:
            weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=random)
    return model.to(dtype)


def token_ids(rows: int, tokens: int) -> torch.Tensor:
    """Random token ids [rows, tokens], the same for every test; 0 is left out, it is the padding."""
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(2))
