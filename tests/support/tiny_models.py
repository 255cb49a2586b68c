"""Small random models: every kind of layer, sizes that a test can follow."""

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}


def multi_query(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Full attention, one key-value head for all query heads."""
    return varied(LlamaForCausalLM(LlamaConfig(**{**CLASSIC, "num_key_value_heads": 1})), dtype)


def multi_head(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Full attention, a key-value head for every query head."""
    return varied(LlamaForCausalLM(LlamaConfig(**{**CLASSIC, "num_key_value_heads": 4})), dtype)


def sliding(dtype: torch.dtype = torch.float32) -> MistralForCausalLM:
    """Sliding attention, window 8."""
    return varied(MistralForCausalLM(MistralConfig(**CLASSIC, sliding_window=8)), dtype)


def qwen2(dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """Full attention in the first layer, sliding above it."""
    config = Qwen2Config(**CLASSIC, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    return varied(Qwen2ForCausalLM(config), dtype)


def qwen3(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Full attention, heads wider than the hidden size divided by their number."""
    return varied(Qwen3ForCausalLM(Qwen3Config(**CLASSIC, head_dim=16)), dtype)


def gemma3(dtype: torch.dtype = torch.float32) -> Gemma3ForCausalLM:
    """Sliding and full attention mixed."""
    config = Gemma3TextConfig(
        **CLASSIC, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, layer_types=MIXED, bos_token_id=1
    )
    return varied(Gemma3ForCausalLM(config), dtype)


def gpt_oss(dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    """Sliding and full attention mixed, with sinks."""
    config = GptOssConfig(
        **CLASSIC,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=None,
    )
    return varied(GptOssForCausalLM(config), dtype)


def llama4(dtype: torch.dtype = torch.float32) -> Llama4ForCausalLM:
    """Chunked attention, chunks of 8, and full attention mixed."""
    config = Llama4TextConfig(
        **CLASSIC,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
    )
    return varied(Llama4ForCausalLM(config), dtype)


def deepseek_v3(dtype: torch.dtype = torch.float32) -> DeepseekV3ForCausalLM:
    """Latent attention: the cache holds a latent and a rotary key a token."""
    return varied(DeepseekV3ForCausalLM(DeepseekV3Config(**{**CLASSIC, **MLA}, first_k_dense_replace=1)), dtype)


def deepseek_v32(dtype: torch.dtype = torch.float32) -> DeepseekV32ForCausalLM:
    """Latent attention to the 8 tokens that an indexer picks."""
    config = DeepseekV32Config(**{**CLASSIC, **MLA}, index_n_heads=2, index_head_dim=16, index_topk=8)
    return varied(DeepseekV32ForCausalLM(config), dtype)


def varied(model, dtype):
    """Weights wide enough that generated tokens differ from one another, and biases, norms and sinks that show."""
    random = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=random)
        elif name.endswith(("sinks", "bias")):
            weight.data.normal_(0, 0.5, generator=random)
        else:
            weight.data.uniform_(0.5, 1.5, generator=random)
    return model.eval().to(dtype)


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


def keeping(graphs):
    """A backend of ``torch.compile`` that adds graphs to a list, and does not optimise them, which takes a minute."""

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    return keep


def traced(model, graphs):
    """The forward of a model, compiled by that backend for one shape."""
    torch.compiler.reset()
    return torch.compile(model.forward, fullgraph=True, backend=keeping(graphs), dynamic=False)


def token_ids(rows: int, tokens: int) -> torch.Tensor:
    """Random token ids [rows, tokens], the same for every test; 0 is left out, it is the padding."""
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(2))
