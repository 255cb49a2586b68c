"""Attention from DeepSeek-V4's windows and entries: from the pools, of the entries that the model's masks show."""

import gc
import weakref
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from kvcore.cache.layer import LayerHandle
from kvcore.interop.transformers import KVCache
from kvcore.interop.transformers.compressed import WindowAndEntries
from kvcore.interop.transformers.deferred import Deferred, deferred, outline
from tests.interop.test_attention import (
    CUTS,
    ROWS,
    TOKENS,
    fallbacks,
    holes,
    logits,
    of,
    own_logits,
    padded,
    refuse,
)
from tests.support import tiny_models as models

NEW = 12


@pytest.fixture
def nothing_gathered(monkeypatch):
    """Whoever asks for entries or windows as copies fails."""
    refused = refuse(monkeypatch, "gather_all_entries", "gather_entries", "gather_window")
    monkeypatch.setattr(WindowAndEntries, "_made_rows", refused)


@pytest.mark.parametrize("cuts", [CUTS, (TOKENS,), (3, 1, 1, 22), (1,) * TOKENS], ids=str)
@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.usefixtures("nothing_gathered")
def test_attention_from_the_pools_gives_the_models_logits(left, cuts):
    """Padding at the left included: the model compresses it as it does tokens."""
    model, mask = models.deepseek_v4(), padded(left)
    own = own_logits(model, mask, cuts)
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache, mask, cuts), atol=3e-5)
    assert not fallbacks(cache)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("left", [0, 5])
def test_a_token_s_index_scores_come_from_the_keys_where_they_lie(left, monkeypatch):
    model, mask = models.deepseek_v4(), padded(left)
    own = own_logits(model, mask, (19, *(1,) * (TOKENS - 19)))
    cache, asked = of(model, "auto"), []
    gather, score = LayerHandle.gather_all_index_keys, LayerHandle.index_scores
    monkeypatch.setattr(LayerHandle, "gather_all_index_keys", lambda each: asked.append("keys") or gather(each))
    monkeypatch.setattr(LayerHandle, "index_scores", lambda *given: asked.append("scores") or score(*given))
    found = logits(model, cache, mask, (19, *(1,) * (TOKENS - 19)))
    assert torch.allclose(own, found, atol=3e-5)
    indexers = sum(layer.index_keys is not None for layer in cache.kv.spec.layers)
    assert indexers
    assert asked == ["keys"] * indexers + ["scores"] * indexers * (TOKENS - 19)
    assert sum("forward" in vars(module) for module in model.modules()) == indexers


def test_a_scorer_that_somebody_replaced_is_handed_keys(monkeypatch):
    model, cuts = models.deepseek_v4(), (19, *(1,) * (TOKENS - 19))
    own = own_logits(model, None, cuts)
    shapes = []

    def replaced(module, q, compressed_kv, hidden_states):
        shapes.append((compressed_kv + 0).shape)
        return type(module).forward(module, q, compressed_kv, hidden_states)

    for module in model.modules():
        if hasattr(module, "weights_scaling"):
            monkeypatch.setattr(module, "forward", partial(replaced, module))
    assert torch.allclose(own, logits(model, of(model, "auto"), None, cuts), atol=3e-5)
    assert shapes


@pytest.mark.parametrize("asked", ["auto", "cache"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"prefill_chunk_size": 5}],
    ids=["greedy", "beams", "sampling", "chunked prompt"],
)
def test_generate(asked, options):
    """A padded batch; ``generate`` counts positions behind the padding, from which an indexer and masks go."""
    model, ids = models.deepseek_v4(), models.token_ids(3, 33)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :2] = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    cache = KVCache(model, batch=3, max_length=48, beams=options.get("num_beams", 1), attention=asked)
    torch.manual_seed(7)
    own = model.generate(ids, **options)
    torch.manual_seed(7)
    assert torch.equal(own, model.generate(ids, cache=cache, **options))
    assert not fallbacks(cache)


def test_tokens_that_were_rolled_back_leave_no_trace():
    model, ids = models.deepseek_v4(), models.token_ids(ROWS, TOKENS)
    own = own_logits(model, cuts=(TOKENS,))
    cache = of(model, "cache", max_draft_tokens=4)
    with torch.no_grad():
        model(ids[:, :19], cache=cache)
        model(ids[:, :3], cache=cache)
        cache.crop(-3)
        found = [model(ids[:, 19:23], cache=cache).logits, model(ids[:, 23:24], cache=cache).logits]
    assert torch.allclose(own[:, 19:24], torch.cat(found, dim=1), atol=3e-5)
    assert not fallbacks(cache)


@pytest.mark.parametrize("formats", ["int8_row", {"window": "fp8_row", "entries": "nf4_b64"}], ids=str)
@pytest.mark.parametrize("asked", ["auto", "cache"])
def test_coded_rows_are_attended_to_as_stored(asked, formats):
    model = models.deepseek_v4()
    ours, theirs = (logits(model, of(model, each, formats=formats)) for each in (asked, "model"))
    apart = (ours - theirs).abs().amax(dim=2)
    assert (apart < 3e-5).float().mean() > 0.5
    # What lies near the middle of two codes may become the other on another processor, and moves what comes after it;
    # far less than coding does.
    assert apart.max() < (theirs - logits(model, of(model, "model"))).abs().max() / 10


def test_bf16():
    """As far from fp32 as the model's own attention is."""
    exact = logits(models.deepseek_v4(), DynamicCache(config=models.deepseek_v4().config))
    model = models.deepseek_v4(torch.bfloat16)
    own, ours = (logits(model, cache).float() for cache in (DynamicCache(config=model.config), of(model, "cache")))
    assert (ours - exact).abs().mean() <= 1.1 * (own - exact).abs().mean()


def test_a_backend_without_torch():
    model = models.deepseek_v4()
    own = own_logits(model, padded(3))
    assert torch.allclose(own, logits(model, of(model, "cache", backend="reference"), padded(3)), atol=3e-5)


def test_the_model_gets_what_it_always_got_where_it_attends(monkeypatch):
    """The same numbers, and the same bytes in the pools."""
    model = models.deepseek_v4()
    theirs = of(model, "model")
    wanted = logits(model, theirs)
    monkeypatch.setattr(WindowAndEntries, "attend", lambda *_, **__: None)
    ours = of(model, "cache")
    assert torch.equal(wanted, logits(model, ours))
    assert ours.kv.digest(ours.requests) == theirs.kv.digest(theirs.requests)
    assert ours.nbytes == theirs.nbytes


@pytest.mark.parametrize(
    ("mask", "options", "reason"),
    [
        pytest.param(holes(), {}, "padding that is not at the left alone", id="holes"),
        pytest.param(None, {"output_attentions": True}, "output_attentions", id="weights"),
    ],
)
def test_what_the_cache_cannot_attend_to_is_the_models_with_a_reason(mask, options, reason):
    model = models.deepseek_v4()
    own = own_logits(model, mask, **options)
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache, mask, **options), atol=3e-5)
    assert any(reason in found for found in fallbacks(cache))


def test_positions_that_run_ahead_of_the_cache_are_the_models():
    """Its masks then show entries of tokens that are still to come."""
    model, ids = models.deepseek_v4(), models.token_ids(ROWS, TOKENS)
    ahead = torch.arange(100, 100 + TOKENS)[None]
    cache = of(model, "cache")
    with torch.no_grad():
        own = model(ids, position_ids=ahead, cache=DynamicCache(config=model.config)).logits
        ours = model(ids, position_ids=ahead, cache=cache).logits
    assert torch.allclose(own, ours, atol=3e-5)
    assert any("still to come" in reason for reason in fallbacks(cache))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda kv, bias: (kv, bias - 1), "weighs them", id="a mask that weighs"),
        pytest.param(lambda kv, bias: (2 * kv, bias), "something else behind it", id="other entries"),
    ],
)
def test_a_compressor_with_hooks_of_the_users(change, reason):
    model = models.deepseek_v4()
    compressor = model.model.layers[1].self_attn.compressor
    compressor.register_forward_hook(lambda _module, _given, found: change(*found))
    own = own_logits(model)
    cache = of(model, "cache")
    assert torch.allclose(own, logits(model, cache), atol=3e-5)
    assert any(reason in found for found in fallbacks(cache))


def test_explain_says_who_attends():
    model = models.deepseek_v4()
    assert {choice.implementation for choice in of(model, "cache").explain()} == {"cache"}
    found = {choice.verb: choice.implementation for choice in of(model, "auto").explain()}
    assert found == {"attend(one token)": "cache", "attend(several)": "model"}
    found = of(model, "auto", backend="reference").explain()
    assert {choice.implementation for choice in found} == {"model"}


def test_a_forward_does_not_keep_its_cache():
    model = models.deepseek_v4()
    cache = of(model, "cache")
    logits(model, cache)
    kept = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert kept() is None
    finally:
        gc.enable()


def test_what_is_put_behind_an_outline_is_made_when_somebody_looks():
    first, more = torch.arange(6.0).view(1, 2, 3), torch.ones(1, 2, 2)
    made = []

    def make():
        made.append(True)
        return first

    def lazy():
        return deferred(outline((1, 2, 3), torch.float32), torch.device("cpu"), make, None, joins=True)

    found = {
        "behind": (torch.cat([lazy(), more], dim=-1), torch.cat([first, more], dim=-1)),
        "zeros": (torch.nn.functional.pad(lazy(), (0, 2), value=0.0), torch.nn.functional.pad(first, (0, 2))),
        "a dimension": (lazy().unsqueeze(1), first.unsqueeze(1)),
    }
    assert not made
    for ours, wanted in found.values():
        assert isinstance(ours, Deferred)
        assert ours.shape == wanted.shape
        assert torch.equal(ours + 0, wanted)
    for ours, wanted in (
        (torch.cat([more, lazy()], dim=-1), torch.cat([more, first], dim=-1)),
        (torch.cat([lazy(), more], -1, out=torch.empty(0)), torch.cat([first, more], -1)),
        (torch.cat([lazy(), lazy(), more], dim=2), torch.cat([first, first, more], dim=2)),
        (torch.nn.functional.pad(lazy(), (1, 2)), torch.nn.functional.pad(first, (1, 2))),
        (torch.nn.functional.pad(lazy(), (0, 2), value=1.0), torch.nn.functional.pad(first, (0, 2), value=1.0)),
    ):
        assert type(ours) is torch.Tensor
        assert torch.equal(ours, wanted)
    made.clear()
    assert lazy().new_full((2,), 3.0).tolist() == [3.0, 3.0]
    assert not made
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([lazy(), torch.ones(1, 3, 2)], dim=-1)
