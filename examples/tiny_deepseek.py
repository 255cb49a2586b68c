"""DeepSeek-V4 with a tiny random configuration, all kinds of layers, on a kvcore cache and on its own.

Two forwards run side by side: prefill, chunks, then single steps. Logits are compared at every position. Where the
lightning indexer picks other entries (scores tie at exactly 0, and a tie may fall either way) the values after that
cannot agree; such positions are counted and reported apart, up to the end of their row.
"""

from typing import Any, NamedTuple

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kvcore.interop.transformers import KVCache

BATCH = 2
CUTS = (37, 20, 9, *[1] * 34)
LIMIT = 1e-5


class Outcome(NamedTuple):
    """What the comparison found."""

    largest: float  # difference of logits where selections agree
    scale: float  # standard deviation of the logits
    positions: int
    apart: int  # positions at or after a differing selection of their row
    kinds: dict[str, int]  # layers by kind
    entries: dict[str, int]  # compressed entries a row by kind


def build() -> Any:
    """Two sliding, two CSA (ratio 4) and two HCA (ratio 8) layers, window 8; weights are random but not trivial."""
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2
    config = DeepseekV4Config(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        hc_mult=2,
        layer_types=kinds,
        mlp_layer_types=["moe"] * len(kinds),
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
    )
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("position_bias", "sinks")):
            weight.data.normal_(0, 0.5)
        elif "proj" in name:
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    return model


def compare(say: Any) -> Outcome:
    """Run both caches over the same random tokens."""
    model = build()
    ids = torch.randint(model.config.vocab_size, (BATCH, sum(CUTS)))
    kinds = {kind: model.config.layer_types.count(kind) for kind in dict.fromkeys(model.config.layer_types)}
    say(f"{BATCH} rows × {sum(CUTS)} tokens: prefill {CUTS[0]}, chunks of {CUTS[1]} and {CUTS[2]}, then single steps")
    own, picked = _run(model, ids, DynamicCache(config=model.config))
    with KVCache(model, batch=BATCH, max_length=sum(CUTS)) as cache:
        ours, picked_ours = _run(model, ids, cache)
    # [B, S]: a selection differed at this position or before it
    apart = (picked != picked_ours).any(-1).cumsum(dim=1) > 0
    difference = (own - ours).abs().amax(-1)
    agreeing = difference[~apart]
    return Outcome(
        largest=agreeing.max().item() if len(agreeing) else float("nan"),
        scale=own.std().item(),
        positions=apart.numel(),
        apart=int(apart.sum()),
        kinds=kinds,
        entries={kind: sum(CUTS) // rate for kind, rate in model.config.compress_rates.items()},
    )


def _run(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [B, S, vocabulary], selections [B, S, indexers · entries] as 0 / 1)."""
    entries = ids.shape[1] // model.config.compress_rates["compressed_sparse_attention"]
    picks: list[torch.Tensor] = []

    def note(_module: Any, _args: Any, indices: torch.Tensor) -> None:
        seen = torch.zeros(*indices.shape[:2], entries + 1, dtype=torch.int8)
        # -1, no entry, goes into a last column that is dropped
        picks.append(seen.scatter(-1, indices.where(indices >= 0, entries), 1)[..., :entries])

    indexers = [module for name, module in model.named_modules() if name.endswith("indexer")]
    hooks = [indexer.register_forward_hook(note) for indexer in indexers]
    logits, selections, start = [], [], 0
    with torch.no_grad():
        for new in CUTS:
            picks.clear()
            logits.append(model(ids[:, start : start + new], cache=cache).logits)
            selections.append(torch.cat(picks, dim=-1))
            start += new
    for hook in hooks:
        hook.remove()
    return torch.cat(logits, dim=1), torch.cat(selections, dim=1)
