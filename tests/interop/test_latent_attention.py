"""Latent attention from the cache: projections go to queries and outputs, and nothing is expanded or left behind."""

import gc
import threading
from functools import partial

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DynamicCache,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

from kvcore.interop.transformers import KVCache, absorbed, projection
from kvcore.interop.transformers.seam import SEAM
from tests.interop.test_attention import (
    CUTS,
    ROWS,
    TOKENS,
    expansions,
    fallbacks,
    holes,
    logits,
    of,
    own_logits,
    padded,
    refuse,
)
from tests.support import tiny_models as models

SIZES = {**models.CLASSIC, **models.MLA}


def deepseek_v2(dtype=torch.float32):
    config = DeepseekV2Config(**SIZES, first_k_dense_replace=1, head_dim=4)
    return models.varied(DeepseekV2ForCausalLM(config), dtype)


def glm4_moe_lite(dtype=torch.float32):
    config = Glm4MoeLiteConfig(**SIZES, mlp_layer_types=["dense", "sparse", "sparse"])
    return models.varied(Glm4MoeLiteForCausalLM(config), dtype)


LATENT = (deepseek_v2, models.deepseek_v3, glm4_moe_lite, models.deepseek_v32)


@pytest.fixture
def nothing_expanded(monkeypatch):
    """Whoever asks for latents as copies, or for keys and values made of them, fails."""
    refused = refuse(monkeypatch, "gather_all_entries")
    monkeypatch.setattr(projection, "_probe", lambda *_: True)
    for make in LATENT:
        monkeypatch.setattr(type(expansions(make())[0]), SEAM, refused)


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("make", LATENT)
def test_attention_from_latents_gives_the_models_logits(make, left, request):
    model, mask = make(), padded(left)
    own = own_logits(model, mask)
    request.getfixturevalue("nothing_expanded")
    cache = of(model, "cache")
    ours = logits(model, cache, mask)
    assert torch.allclose(own[mask.bool()], ours[mask.bool()], atol=3e-5)
    assert not fallbacks(cache)
    assert cache.length == TOKENS
    assert model.config._attn_implementation == "sdpa"
    assert all(SEAM in vars(module) for module in expansions(model))
    del cache
    gc.collect()
    of(models.llama(), "cache")  # what nobody holds any more the next cache takes away
    assert not any(SEAM in vars(module) for module in model.modules())


def test_a_scale_that_is_none_is_that_of_the_models_queries():
    model, mask = models.deepseek_v3(), padded(0)
    for module in expansions(model):
        module.scaling = None
    own = own_logits(model, mask)
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache, mask), atol=3e-5)
    assert not fallbacks(cache)


@pytest.mark.parametrize("make", LATENT)
@pytest.mark.parametrize("form", ["fp8_row", "int8_row", "nf4_b64"])
def test_coded_latents_are_attended_to_as_stored(make, form):
    model = make()
    ours, theirs = (logits(model, of(model, asked, formats={"entries": form})) for asked in ("cache", "model"))
    assert torch.allclose(ours, theirs, atol=3e-5)


@pytest.mark.parametrize("form", ["v32_656", "bf16"])
def test_the_formats_of_engines(form):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 1}
    model = models.varied(type(models.deepseek_v3())(type(models.deepseek_v3().config)(**SIZES | sizes)), torch.float32)
    ours, theirs = (logits(model, of(model, asked, formats={"entries": form})) for asked in ("cache", "model"))
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("make", [models.deepseek_v3, models.deepseek_v32])
def test_bf16(make):
    model = make(torch.bfloat16)
    own, ours = (logits(model, cache) for cache in (DynamicCache(config=model.config), of(model, "cache")))
    exact = logits(model.float(), DynamicCache(config=model.config))
    assert (ours - exact).abs().mean() < 1.2 * (own - exact).abs().mean()


def test_a_backend_without_torch():
    model = models.deepseek_v32()
    own = own_logits(model, padded(3))[padded(3).bool()]
    cache = of(model, "cache", backend="reference")
    assert torch.allclose(own, logits(model, cache, padded(3))[padded(3).bool()], atol=3e-5)
    assert not fallbacks(cache)
    assert {choice.implementation for choice in of(model, "auto", backend="reference").explain()} == {"model"}


@pytest.mark.parametrize("asked", ["auto", "cache"])
@pytest.mark.parametrize("make", [models.deepseek_v3, models.deepseek_v32])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate(make, options, asked):
    model, ids = make(), models.token_ids(2, 14)
    if "prompt_lookup_num_tokens" in options:
        ids = models.token_ids(1, 6).repeat(1, 4)  # one row, repetitive
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    cache = KVCache(model, batch=2, max_length=48, beams=options.get("num_beams", 1), attention=asked)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, cache=cache, **options))
    assert not fallbacks(cache)


def test_long_prompts_are_the_models(monkeypatch):
    """Expanding takes rank · dims once a row, attending to latents more for every query: 12 tokens of this model."""
    model, new = models.deepseek_v3(), []
    attended = absorbed.Latents.attend

    def seen(self, module, query, *rest):
        new.append(query.shape[2])
        return attended(self, module, query, *rest)

    monkeypatch.setattr(absorbed.Latents, "attend", seen)
    cache = of(model, "auto")
    logits(model, cache, cuts=(13, 12, 1, 1))
    assert new == [12] * 3 + [1] * 6
    (said,) = {choice.reason for choice in cache.explain() if choice.verb == "attend(several)"}
    assert said.startswith("up to 12 tokens a row, more are the model's")
    assert SEAM in said


def test_padding_that_is_not_at_the_left_alone():
    model, mask = models.deepseek_v3(), holes()
    own = own_logits(model, mask)
    cache = of(model, "cache")
    assert torch.allclose(own[mask.bool()], logits(model, cache, mask)[mask.bool()], atol=3e-5)
    assert fallbacks(cache) == {"padding that is not at the left alone"}


class Doubled(torch.nn.Linear):
    def forward(self, rows):
        return 2 * super().forward(rows)


def doubled(module):
    other = Doubled(module.kv_b_proj.in_features, module.kv_b_proj.out_features, bias=False)
    other.weight = module.kv_b_proj.weight
    module.kv_b_proj = other


def with_bias(module):
    module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(module.kv_b_proj.out_features))


def wrapped(module):
    plain = module.kv_b_proj.forward
    module.kv_b_proj.forward = lambda rows: 2 * plain(rows)


def hooked(module):
    module.kv_b_proj.register_forward_hook(lambda _, __, out: 2 * out)


@pytest.mark.parametrize("change", [doubled, with_bias, wrapped, hooked])
def test_projections_of_other_kinds_are_the_models(change):
    model = models.deepseek_v3()
    for module in expansions(model):
        change(module)
    own = own_logits(model)
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache), atol=3e-5)
    assert fallbacks(cache) == {"a key and value projection that is no plain linear layer, or has hooks"}


def test_a_module_that_expands_otherwise_is_the_models(monkeypatch):
    model = models.deepseek_v3()
    kind = type(expansions(model)[0])
    plain = kind.expand_kv

    def swapped(self, latents, rotary):
        keys, values = plain(self, latents, rotary)
        return keys.flip(1), values

    monkeypatch.setattr(kind, SEAM, swapped)
    own = own_logits(model)
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache), atol=3e-5)
    assert fallbacks(cache) == {"DeepseekV3Attention.expand_kv gives other keys and values than its projection's"}


def test_a_method_that_somebody_replaced_stays():
    model, calls = models.deepseek_v3(), []
    module = expansions(model)[0]

    def mine(latents, rotary):
        calls.append(tuple(latents.shape))
        return type(module).expand_kv(module, latents, rotary)

    module.expand_kv = mine
    own = own_logits(model)
    calls.clear()
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache), atol=3e-5)
    assert len(calls) == len(CUTS)
    assert module.expand_kv is mine


def test_code_that_is_compiled_meanwhile_stays_right():
    """One thread compiles and runs the model with another cache while one waits within a forward of ours, and after."""
    model, graphs, found = models.deepseek_v3(), [], []
    ids = models.token_ids(ROWS, TOKENS)[:, :3]
    own = own_logits(model, cuts=(3,))
    caches = [of(model, "cache") for _ in range(2)]
    update = type(caches[0].layers[1]).update
    run = models.traced(model, graphs)

    def compiled():
        with torch.no_grad():
            found.append(run(ids, cache=DynamicCache(config=model.config)).logits)

    def meanwhile(*states, **options):
        thread = threading.Thread(target=compiled)
        thread.start()
        thread.join(60)
        return update(*states, **options)

    for cache in caches:
        layer = cache.layers[1]
        layer.update = partial(meanwhile, layer)
        found.append(logits(model, cache, cuts=(3,)))
        compiled()
    assert len(found) == 6
    assert all(torch.allclose(own, each, atol=3e-5) for each in found)
    assert len(graphs) == 2  # whose configuration names our attention, and whose does not


def test_who_looks_at_latents_gets_them():
    model, seen = models.deepseek_v3(), []
    module = expansions(model)[0]
    own = own_logits(model, cuts=(17,))
    cache = of(model, "cache")
    update = cache.layers[0].update

    def look(*states, **options):
        latents, rotary = update(*states, **options)
        seen.append((latents + 0, rotary + 0, states))
        return latents, rotary

    cache.layers[0].update = look
    assert torch.allclose(own, logits(model, cache, cuts=(17,)), atol=3e-5)
    ((latents, rotary, states),) = seen
    assert torch.equal(latents, states[0])
    assert torch.equal(rotary, states[1])
    assert module.expand_kv.args == (module,)


def test_what_an_indexer_picks_is_masked_under_the_registered_name():
    """A model that is given the name itself, with a cache of transformers."""
    model = models.deepseek_v32()
    own = own_logits(model, padded(5))
    model.set_attn_implementation("kvcore")
    assert torch.equal(own, own_logits(model, padded(5)))
