"""The cache's own attention in a model's forward gives what the model's gives, or a reason why the model attends."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, Gemma2Config, Gemma2ForCausalLM

from kvcore.cache.layer import LayerHandle
from kvcore.errors import SpecError, StepError
from kvcore.interop.transformers import KVCache, attention
from kvcore.interop.transformers.deferred import Deferred
from kvcore.interop.transformers.seam import SEAM
from tests.support import tiny_models as models

CLASSIC = (
    models.llama,
    models.multi_query,
    models.multi_head,
    models.sliding,
    models.qwen2,
    models.qwen3,
    models.gemma3,
    models.gpt_oss,
    models.llama4,
)
CUTS = (17, 1, 1, 7, 1)
ROWS, TOKENS = 2, sum(CUTS)


def logits(model, cache, mask=None, cuts=CUTS, **options):
    ids, pieces, start = models.token_ids(ROWS, TOKENS), [], 0
    with torch.no_grad():
        for new in cuts:
            seen = None if mask is None else mask[:, : start + new]
            step = ids[:, start : start + new]
            pieces.append(model(step, attention_mask=seen, cache=cache, **options).logits)
            start += new
    return torch.cat(pieces, dim=1)


def own_logits(model, mask=None, cuts=CUTS, **options):
    return logits(model, DynamicCache(config=model.config), mask, cuts, **options)


def of(model, asked, **options):
    return KVCache(model, batch=ROWS, max_length=40, attention=asked, **options)


def padded(left):
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :left] = 0
    return mask


def refuse(monkeypatch, *verbs):
    """Whoever asks a layer for rows by these verbs, as copies or views, fails."""

    def refused(*_, **__):
        raise AssertionError("rows were handed out")

    for verb in verbs:
        monkeypatch.setattr(LayerHandle, verb, refused)
    return refused


def expansions(model):
    """Modules that make keys and values of latents, and may be told otherwise."""
    return [module for module in model.modules() if hasattr(type(module), SEAM)]


def fallbacks(cache):
    return {choice.reason for choice in cache.explain() if choice.verb == "attend(last forward)"}


@pytest.fixture
def nothing_gathered(monkeypatch):
    refuse(monkeypatch, "gather_kv", "kv_view", "append_kv_view")


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("make", [make for make in CLASSIC if make is not models.llama4])
@pytest.mark.usefixtures("nothing_gathered")
def test_attention_from_the_cache_gives_the_models_logits(make, left):
    model, mask = make(), padded(left)
    implementation = model.config._attn_implementation
    own = own_logits(model, mask)
    cache = of(model, "cache")
    ours = logits(model, cache, mask)
    assert torch.allclose(own[mask.bool()], ours[mask.bool()], atol=3e-5)
    assert not fallbacks(cache)
    assert model.config._attn_implementation == implementation
    assert cache.length == TOKENS


@pytest.mark.parametrize("make", CLASSIC)
def test_the_faster_attention_gives_the_models_logits(make):
    model = make()
    own = own_logits(model)
    assert torch.allclose(own, logits(model, of(model, "auto")), atol=3e-5)


def test_query_heads_of_a_group_are_rows_of_one_product(monkeypatch):
    """On the CPU a decode step reads a shared key head once; the model's attention is left to prompts."""
    model, sizes = models.llama(), []
    plain = torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, *args, **options):
        sizes.append((tuple(query.shape), options.get("enable_gqa", False)))
        return plain(query, key, *args, **options)

    fused = attention.FUSED

    def seen_fused(query, *args, **options):
        sizes.append((tuple(query.shape), False))
        return fused(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    monkeypatch.setattr(attention, "FUSED", seen_fused)
    logits(model, of(model, "auto"), cuts=(17, 1))
    assert sizes[:3] == [((ROWS, 4, 17, 8), True)] * 3
    assert sizes[3:] == [((ROWS, 2, 2, 8), False)] * 3


@pytest.mark.parametrize("formats", ["int8_row", {"value": "int8_row"}], ids=["keys and values", "values"])
def test_coded_rows_are_attended_to_as_stored(formats):
    model = models.qwen3()
    ours, theirs = (logits(model, of(model, asked, formats=formats)) for asked in ("cache", "model"))
    assert torch.allclose(ours, theirs, atol=3e-5)


def test_drafts_have_no_part_in_scales_by_which_tokens_before_them_are_attended_to():
    """Of 32 tokens that are coded together drafts close a group: what they are, and whether, says nothing to others."""
    model, ids = models.multi_head(), models.token_ids(2, 70)

    def after(prompt, new):
        cache = KVCache(model, batch=2, max_length=80, max_draft_tokens=8, formats={"key": "int4_ch32"})
        with torch.no_grad():
            model(ids[:, :prompt], cache=cache)
            return cache, model(ids[:, prompt : prompt + new], cache=cache).logits

    again, alone = after(29, 1)
    cache, drafted = after(29, 6)
    assert torch.allclose(drafted[:, :1], alone, atol=1e-5)
    # Prompts are the model's, of more tokens than are coded together.
    assert [cache.layers[0].attends(new) for new in (1, 32, 33)] == [True, True, False]
    cache.crop(-5)
    with torch.no_grad():
        both = [model(ids[:, 40:43], cache=one).logits for one in (cache, again)]
    assert torch.allclose(*both, atol=1e-5)


@pytest.mark.parametrize("storage", ["paged", "slot"])
def test_every_storage(storage):
    model = models.sliding()
    own = own_logits(model)
    assert torch.allclose(own, logits(model, of(model, "cache", storage=storage)), atol=3e-5)


def test_a_backend_without_torch():
    model = models.llama()
    own = own_logits(model)
    assert torch.allclose(own, logits(model, of(model, "cache", backend="reference")), atol=3e-5)


@pytest.mark.parametrize("make", [models.llama, models.gemma3, models.gpt_oss])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": True}],
    ids=["greedy", "beams", "look-up", "assisted"],
)
def test_generate(make, options):
    model, ids = make(), models.token_ids(2, 14)
    if len(options) and "num_beams" not in options:
        ids = ids[:1]  # drafts are of one row
    if options.get("assistant_model"):
        options = {"assistant_model": make()}
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    beams = options.get("num_beams", 1)
    cache = KVCache(model, batch=2, max_length=40, beams=beams, max_draft_tokens=16, attention="cache")
    assert torch.equal(model.generate(ids, **options), model.generate(ids, cache=cache, **options))


@pytest.mark.parametrize("make", [models.gemma3, models.deepseek_v3])
def test_a_chat_goes_on_from_a_copy(make):
    model = make()
    own = own_logits(model)
    cache = of(model, "cache")
    first = logits(model, cache, cuts=(17,))
    ids = models.token_ids(ROWS, TOKENS)[:, 17:]
    for each in (copy.deepcopy(cache), cache):
        with torch.no_grad():
            rest = model(ids, cache=each).logits
        assert torch.allclose(own, torch.cat([first, rest], dim=1), atol=3e-5)
        assert not fallbacks(each)


def test_caches_of_all_kinds_take_turns_on_one_model():
    model = models.llama()
    own = own_logits(model)
    caches = [of(model, "cache"), DynamicCache(config=model.config), of(model, "auto"), of(model, "model")]
    ids, start, found = models.token_ids(ROWS, TOKENS), 0, [[] for _ in caches]
    with torch.no_grad():
        for new in CUTS:
            for cache, pieces in zip(caches, found, strict=True):
                pieces.append(model(ids[:, start : start + new], cache=cache).logits)
            start += new
    for pieces in found:
        assert torch.allclose(own, torch.cat(pieces, dim=1), atol=3e-5)
    assert torch.equal(own, torch.cat(found[-1], dim=1))


@pytest.mark.parametrize("make", [models.gemma3, models.deepseek_v3])
def test_threads_share_a_model(make):
    """One waits within its forward while others run theirs and end them, with caches of ours and of transformers."""
    model = make()
    own = own_logits(model)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is first and not inside.is_set():
            inside.set()
            assert go_on.wait(30)

    results = {}
    first = threading.Thread(target=lambda: results.update(first=logits(model, of(model, "cache"))))
    hook = model.model.layers[1].register_forward_pre_hook(wait)
    first.start()
    assert inside.wait(30)
    assert model.config._attn_implementation == "kvcore"
    results["theirs"] = own_logits(model)
    results["ours"] = logits(model, of(model, "cache"))
    assert model.config._attn_implementation == "kvcore"
    assert all(SEAM in vars(module) for module in expansions(model))
    go_on.set()
    first.join(30)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(own, results["theirs"])
    assert all(torch.allclose(own, results[name], atol=3e-5) for name in ("first", "ours"))


@pytest.mark.parametrize("make", [models.llama, models.deepseek_v3])
def test_an_error_in_the_model_leaves_it_as_it_was(make):
    model = make()
    cache = of(model, "cache")

    def fail(*_):
        raise RuntimeError("in between")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in between"):
        logits(model, cache)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(StepError, match="layers \\[0, 1, 2\\]"):
        logits(model, cache)
    assert model.config._attn_implementation == "sdpa"
    cache.abort()
    own = own_logits(model)
    assert torch.allclose(own, logits(model, cache), atol=3e-5)
    assert torch.equal(own, own_logits(model))


def test_nothing_is_left_at_a_model_without_caches():
    model = models.llama()
    decoder = model.model
    caches = [of(model, "cache"), of(model, "auto")]
    caches.append(copy.deepcopy(caches[0]))
    assert (len(decoder._forward_pre_hooks), len(decoder._forward_hooks)) == (1, 1)
    caches.clear()
    gc.collect()
    own_logits(model, cuts=(3,))
    assert (len(decoder._forward_pre_hooks), len(decoder._forward_hooks)) == (0, 0)
    of(model, "model")
    assert not decoder._forward_pre_hooks


def test_hooks_stay_until_the_next_forward():
    """A cache may be collected while code is compiled that has seen them, and the model with it."""
    model = models.deepseek_v3()
    decoder, cache = model.model, of(model, "cache")
    del cache
    gc.collect()
    assert len(decoder._forward_pre_hooks) == 1
    cache = of(model, "auto")
    assert cache.defers(1)
    assert (len(decoder._forward_pre_hooks), len(decoder._forward_hooks)) == (1, 1)
    held = [weakref.ref(module) for module in decoder.modules()]
    del cache, decoder, model
    gc.collect()
    assert not any(module() for module in held)


def test_a_copied_model_attends_from_its_own_cache():
    model = models.llama()
    cache = of(model, "cache")
    copied = copy.deepcopy(model)
    own = own_logits(model)
    assert torch.allclose(own, logits(copied, of(copied, "cache")), atol=3e-5)
    assert torch.allclose(own, logits(model, cache), atol=3e-5)
    assert (model.config._attn_implementation, copied.config._attn_implementation) == ("sdpa", "sdpa")


@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.deepseek_v4])
def test_the_registered_name_may_be_chosen_for_a_model(make):
    """What it does otherwise is what it can do: not every model has ``sdpa``."""
    model = make()
    own = own_logits(model)
    model.set_attn_implementation("kvcore")
    assert torch.equal(own, own_logits(model))
    assert torch.allclose(own, logits(model, of(model, "cache")), atol=3e-5)
    assert model.config._attn_implementation == "kvcore"


def gemma2():
    config = Gemma2Config(**models.CLASSIC, head_dim=8, sliding_window=8, attn_implementation="eager")
    return models.varied(Gemma2ForCausalLM(config), torch.float32)


def holes():
    mask = padded(0)
    mask[0, 3:5] = 0
    return mask


FALLBACKS = {
    "soft caps": (gemma2, None, {}, "softcap"),
    "holes": (models.llama, holes(), {}, "padding that is not at the left alone"),
    "chunks": (models.llama4, None, {}, "chunks"),
    "weights": (models.gpt_oss, None, {"output_attentions": True}, "output_attentions"),
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_what_the_cache_cannot_attend_to_is_the_models_with_a_reason(kind):
    make, mask, options, reason = FALLBACKS[kind]
    model = make()
    own = own_logits(model, mask, **options)
    cache = of(model, "cache")
    ours = logits(model, cache, mask, **options)
    seen = slice(None) if mask is None else mask.bool()
    assert torch.allclose(own[seen], ours[seen], atol=3e-5)
    assert any(reason in found for found in fallbacks(cache))
    assert cache.length == TOKENS


def test_a_mask_of_the_callers_own():
    model, ids = models.llama(), models.token_ids(ROWS, 6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].repeat(ROWS, 1, 1, 1)
    seen[:, :, 4, 1] = False
    cache = of(model, "cache")
    with torch.no_grad():
        own = model(ids, attention_mask=seen, cache=DynamicCache(config=model.config)).logits
        ours = model(ids, attention_mask=seen, cache=cache).logits
    assert torch.equal(own, ours)
    assert fallbacks(cache) == {"a mask that is not known to be causal with padding at the left"}


def test_explain_says_who_attends():
    model = models.llama()
    assert {choice.implementation for choice in of(model, "cache").explain()} == {"cache"}
    assert {choice.reason for choice in of(model, "model").explain()} == {"asked for: attention='model'"}
    found = {choice.verb: choice.implementation for choice in of(model, "auto").explain()}
    assert found == {"attend(one token)": "views", "attend(several)": "model"}
    with pytest.raises(SpecError, match="auto, cache, model"):
        of(model, "fast")


def test_who_looks_at_what_was_handed_out_gets_the_rows():
    """A module that does not ask the registry, as some do in files of their own."""
    model, kept = models.llama(), []
    cache = of(model, "cache")

    def own(module, query, key, value, mask, **options):
        if isinstance(key, Deferred):
            assert (tuple(key.shape), key.dtype, key.device, key.is_cuda) == ((ROWS, 2, 17, 8), *kept_like)
            kept.append(key)
        return attention.model_attention(module, "sdpa")(module, query, key, value, mask, **options)

    kept_like = torch.float32, torch.device("cpu"), False
    reference = own_logits(model, cuts=(17,))
    AttentionInterface.register("kvcore", own)
    try:
        assert torch.equal(reference, logits(model, cache, cuts=(17,)))
    finally:
        AttentionInterface.register("kvcore", attention.attend)
    assert len(kept) == 3
    assert kept[0].shape == (ROWS, 2, 17, 8)
    assert (kept[0] + 0).isfinite().all()
    assert cache.length == 17


def test_rows_that_nobody_looked_at_end_with_the_forward():
    model, kept = models.llama(), []
    cache = of(model, "cache")

    def keep(module, query, key, *args, **options):
        kept.append(key)
        return attention.attend(module, query, key, *args, **options)

    AttentionInterface.register("kvcore", keep)
    try:
        logits(model, cache)
    finally:
        AttentionInterface.register("kvcore", attention.attend)
    with pytest.raises(StepError, match="a forward that has ended"):
        kept[0] + 0


@pytest.mark.parametrize("asked", ["cache", "auto", "model"])
def test_a_cache_that_nobody_holds_gives_its_memory_back_at_once(asked):
    model = models.gemma3()
    gc.collect()
    gc.disable()
    try:
        cache = of(model, asked)
        logits(model, cache)
        pools = [weakref.ref(pool) for pool in cache.kv.pools.values()]
        del cache
        assert all(pool() is None for pool in pools)
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [models.gemma3, models.deepseek_v3], ids=["full and sliding", "latent"])
def test_a_compiled_model_is_for_every_length(make):
    """Compiled without ``generate``: masks and positions are made in compiled code, from a length it does not know."""
    model, ids = make(), models.token_ids(ROWS, 16)
    cache = KVCache(model, batch=ROWS, max_length=24, static=True)
    graphs = []
    compiled = models.traced(model, graphs)
    with torch.no_grad():
        own = model(ids).logits
        pieces = [model(ids[:, :6], cache=cache).logits]
        pieces += [compiled(ids[:, place : place + 1], cache=cache).logits for place in range(6, 16)]
    torch.compiler.reset()
    assert torch.allclose(own, torch.cat(pieces, dim=1), atol=1e-4)
    assert len(graphs) == 1
