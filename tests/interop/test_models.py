"""Every kind of model generates, on a kvcore cache, the tokens that it generates on its own."""

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from kvcore.errors import SpecError
from kvcore.interop.transformers import KVCache
from tests.support import tiny_models as models

MODELS = [
    pytest.param(models.llama, id="Llama: full, grouped heads"),
    pytest.param(models.multi_query, id="Llama: one key-value head"),
    pytest.param(models.multi_head, id="Llama: a key-value head each"),
    pytest.param(models.sliding, id="Mistral: sliding"),
    pytest.param(models.qwen2, id="Qwen2: full, then sliding"),
    pytest.param(models.qwen3, id="Qwen3: full, wide heads"),
    pytest.param(models.gemma3, id="Gemma-3: sliding and full mixed"),
    pytest.param(models.gpt_oss, id="gpt-oss: sinks"),
    pytest.param(models.llama4, id="Llama-4: chunked and full mixed"),
    pytest.param(models.deepseek_v3, id="DeepSeek-V3: latent"),
    pytest.param(models.deepseek_v32, id="DeepSeek-V3.2: latent, indexed"),
    pytest.param(models.deepseek_v4, id="DeepSeek-V4: compressed"),
]
COMPILED = [
    pytest.param(models.llama, 1, id="full"),
    pytest.param(models.sliding, 1, id="sliding"),
    pytest.param(models.gemma3, 1, id="mixed"),
    pytest.param(models.qwen2, 1, id="full, then sliding"),
    pytest.param(models.gpt_oss, 1, id="sinks"),
    pytest.param(models.deepseek_v3, 1, id="latent"),
    pytest.param(models.llama4, 0, id="chunked: transformers runs it as it is"),
]
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam search": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 4},
}
# transformers itself refuses drafts with DeepSeek-V4; what they need, crop, has a test of its own.
WAYS_OF_MODELS = [
    pytest.param(*case.values, way, id=f"{case.id}; {way}")
    for case in MODELS
    for way in WAYS
    if (case.id, way) != ("DeepSeek-V4: compressed", "assisted")
]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
NEW = 14
"""Tokens that are generated: enough to wrap every window of 8 again."""


def generated(model, prompt, mask, cache=None, **way):
    torch.manual_seed(7)
    options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": NEW, "max_new_tokens": NEW, **way}
    return model.generate(prompt, attention_mask=mask, cache=cache, **options)[:, prompt.shape[1] :]


def prompts(way):
    """(ids, mask) of three rows, two padded on the left; for drafts one row, repetitive so that there are some."""
    if way == "assisted":
        ids = models.token_ids(1, 6).repeat(1, 4)
        return ids, torch.ones_like(ids)
    ids = models.token_ids(3, 21)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, :1] = 0
    return ids, mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("make", "way"), WAYS_OF_MODELS)
def test_generated_tokens_are_the_models_own(make, dtype, way):
    model = make(dtype)
    ids, mask = prompts(way)
    # The cache's own attention to latents rounds elsewhere than the model's.
    rounded = dtype == torch.bfloat16 and make in (models.deepseek_v3, models.deepseek_v32, models.deepseek_v4)
    cache = KVCache(
        model,
        batch=len(ids),
        beams=WAYS[way].get("num_beams", 1),
        max_length=ids.shape[1] + NEW + WAYS[way].get("prompt_lookup_num_tokens", 0),
        max_draft_tokens=8 if way == "assisted" else 0,
        block_tokens=16,
        attention="model" if rounded else "auto",
    )
    own = generated(model, ids, mask, **WAYS[way])
    assert torch.equal(own, generated(model, ids, mask, cache, **WAYS[way]))
    assert way == "assisted" or len(own.unique()) > 3  # a model that repeats itself would show nothing


@pytest.mark.parametrize(("make", "compiled_graphs"), COMPILED)
def test_static_shapes_are_compiled_once(make, compiled_graphs):
    """In one graph, for all decode steps."""
    torch.compiler.reset()
    model, graphs = make(), []
    ids, mask = prompts("greedy")
    compiled = CompileConfig(fullgraph=True, mode=None, backend=models.keeping(graphs))
    compiled._compile_all_devices = True  # generate compiles by itself on accelerators only
    cache = KVCache(model, batch=len(ids), max_length=40, static=True, block_tokens=16)
    own = generated(model, ids, mask)
    assert torch.equal(own, generated(model, ids, mask, cache, compile_config=compiled))
    assert len(graphs) == compiled_graphs


@pytest.mark.parametrize("make", [models.llama, models.sliding, models.gemma3], ids=["full", "sliding", "mixed"])
def test_drafts_of_another_model(make):
    """A smaller model drafts, some of its tokens are refused, and those leave no trace."""
    model, assistant = make(), models.multi_query()
    ids, mask = prompts("assisted")
    cache = KVCache(model, batch=1, max_length=ids.shape[1] + NEW + 8, max_draft_tokens=24)
    own = generated(model, ids, mask)
    assert torch.equal(own, generated(model, ids, mask, cache, assistant_model=assistant))


@pytest.mark.parametrize("storage", ["slot", "paged"])
@pytest.mark.parametrize(
    "make",
    [models.llama, models.gemma3, models.gpt_oss, models.llama4],
    ids=["full", "mixed", "sinks", "chunked and full"],
)
def test_padding_on_the_right_and_in_between(make, storage):
    """Rows of a prompt that the mask leaves out, and more of it after them: logits as with the model's own cache."""
    model, ids = make(), models.token_ids(3, 33)
    mask = torch.ones_like(ids)
    mask[0, 11:17] = 0  # the first prompt is shorter, padded on the right
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for cache in (DynamicCache(config=model.config), KVCache(model, batch=3, max_length=33, storage=storage)):
        pieces = []
        with torch.no_grad():
            for start, end in ((0, 17), (17, 30), (30, 31), (31, 33)):
                seen = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
                pieces.append(model(ids[:, start:end], cache=cache, **seen).logits)
        found.append(torch.cat(pieces, dim=1)[mask.bool()])
    assert torch.equal(*found)


def test_static_shapes_are_not_for_compressed_layers():
    with pytest.raises(SpecError, match="static"):
        KVCache(models.deepseek_v4(), batch=1, max_length=40, static=True)
