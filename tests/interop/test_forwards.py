"""What a forward may store: no more than ``max_length``, all of it or nothing, and nothing that gradients need."""

import pytest
import torch
from transformers import DynamicCache

from kvcore.backends.torch_triton import cpu_views
from kvcore.cache.layer import LayerHandle
from kvcore.errors import KvcoreError, OutOfBlocks, StepError
from kvcore.interop.transformers import KVCache
from tests.support import tiny_models as models
from tests.support.rows_by_hand import held, update, update_layer

STATIC = [pytest.param(False, id="growing"), pytest.param(True, id="static")]
KINDS = [
    pytest.param(models.llama, id="full"),
    pytest.param(models.sliding, id="sliding"),
    pytest.param(models.gemma3, id="mixed"),
    pytest.param(models.deepseek_v3, id="latent"),
]
BLOCKS = [pytest.param(None, id="blocks as they are"), pytest.param(4, id="blocks of 4")]


def run(model, ids, cache):
    with torch.no_grad():
        return model(ids, cache=cache).logits


@pytest.mark.parametrize("block_tokens", BLOCKS)
@pytest.mark.parametrize("static", STATIC)
def test_the_limit_is_exactly_max_length(backend, static, block_tokens):
    """Whatever the blocks, in which room for more tokens is planned."""
    cache = KVCache(models.llama(), batch=1, max_length=4, backend=backend, static=static, block_tokens=block_tokens)
    assert cache.get_max_length() == 4
    for token in range(1, 5):
        keys, values = update(cache, token, 1)
    assert held(keys) == [1, 2, 3, 4]
    assert held(values) == [-1, -2, -3, -4]
    before = cache.kv.digest(cache.requests)
    with pytest.raises(OutOfBlocks, match=r"5 tokens in a row; allowed: 4 \(max_length\)"):
        update(cache, 5, 1)
    assert (cache.length, cache.kv.digest(cache.requests)) == (4, before)
    assert held(cache.layers[0].keys) == [1, 2, 3, 4]
    cache.crop(-1)
    assert held(update(cache, 9, 1)[0]) == [1, 2, 3, 9]


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 255, 256, 257, 300])
@pytest.mark.parametrize("static", STATIC)
def test_a_prompt_of_max_length_fits_and_one_more_does_not(static, length):
    cache = KVCache(models.sliding(), batch=2, max_length=length, static=static)
    with pytest.raises(OutOfBlocks):
        update(cache, 1, length + 1, rows=2)
    assert (cache.length, cache.batch_size, cache.kv.free_slots) == (0, -1, 2)
    update(cache, 1, length, rows=2)
    assert cache.length == length


@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize("make", KINDS)
def test_generate_ends_in_an_error_where_the_cache_ends(make, static):
    model, ids = make(), models.token_ids(2, 9)
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    room = KVCache(model, batch=2, max_length=16, static=static)
    # The last token is chosen, not fed.
    options["min_new_tokens"] = options["max_new_tokens"] = 8
    assert torch.equal(model.generate(ids, cache=room, **options), model.generate(ids, **options))
    assert room.length == 16
    options["min_new_tokens"] = options["max_new_tokens"] = 9
    short = KVCache(model, batch=2, max_length=16, static=static)
    with pytest.raises(OutOfBlocks, match="max_length"):
        model.generate(ids, cache=short, **options)
    assert short.length == 16


@pytest.mark.parametrize("max_length", [6, 20])
def test_a_static_window_is_no_wider_than_max_length(max_length):
    cache = KVCache(models.sliding(), batch=1, max_length=max_length, static=True)
    columns = {}
    for start, new in ((0, 3), (3, 1), (4, 1), (5, 1)):
        keys, _ = update(cache, start + 1, new)
        columns[start] = keys.shape[2]
        assert held(keys)[: start + new] == list(range(1, start + new + 1))
    assert columns == ({0: 6, 3: 6, 4: 6, 5: 6} if max_length == 6 else {0: 10, 3: 8, 4: 8, 5: 8})


@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_layer_that_stores_nothing_is_named_at_the_next_forward(missing, static, backend):
    cache = KVCache(models.llama(), batch=1, max_length=8, static=static, backend=backend)
    others = [layer for layer in range(3) if layer != missing]
    update(cache, 1, 1, layers=others)
    for _ in range(2):  # however often
        with pytest.raises(StepError, match=rf"layers \[{missing}\] have not stored") as caught:
            update(cache, 2, 1, layers=others)
        assert "num_hidden_layers" in caught.value.hint
        assert "spec=" in caught.value.hint
    # What the layer misses can still come.
    assert held(update_layer(cache, missing, 1, 1)[0])[:1] == [1]
    assert cache.length == 1


def test_a_model_that_lost_its_last_layer_is_told_at_its_second_forward():
    model, ids = models.llama(), models.token_ids(1, 9)
    model.model.layers = model.model.layers[:2]
    cache = KVCache(model, batch=1, max_length=32)
    with pytest.raises(StepError, match=r"layers \[2\]"):
        model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.config.num_hidden_layers = 2
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, cache=KVCache(model, batch=1, max_length=32), **options)
    assert torch.equal(found, model.generate(ids, **options))


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(lambda cache: cache.crop(-1), id="crop"),
        pytest.param(lambda cache: cache.crop(0), id="crop of nothing"),
        pytest.param(lambda cache: cache.reorder_cache(torch.tensor([0])), id="reorder_cache"),
        pytest.param(lambda cache: cache.batch_select_indices([0]), id="batch_select_indices"),
        pytest.param(lambda cache: cache.batch_repeat_interleave(1), id="batch_repeat_interleave"),
        pytest.param(lambda cache: cache.save("nowhere"), id="save"),
        pytest.param(lambda cache: cache.__deepcopy__({}), id="deepcopy"),
    ],
)
def test_nothing_else_forgets_an_open_forward(verb):
    cache = KVCache(models.llama(), batch=1, max_length=8)
    update(cache, 1, 2)
    update(cache, 3, 1, layers=[0, 1])
    with pytest.raises(StepError, match="while a forward is open"):
        verb(cache)
    update(cache, 3, 1, layers=[2])
    assert held(cache.layers[0].keys) == [1, 2, 3]


def test_a_forward_begun_again_is_refused_until_it_is_given_up(backend):
    cache = KVCache(models.llama(), batch=1, max_length=8, backend=backend)
    update_layer(cache, 0, 1, 2)
    for _ in range(2):
        with pytest.raises(StepError, match=r"layer 0 again while a forward is open: layers \[1, 2\]"):
            update_layer(cache, 0, 3, 1)
    cache.abort()
    assert (cache.length, cache.batch_size) == (0, -1)
    update(cache, 3, 1)
    assert held(cache.layers[0].keys) == [3]


@pytest.mark.parametrize("given_up", ["abort", "reset"])
@pytest.mark.parametrize("make", KINDS)
def test_a_forward_that_failed_runs_again_once_it_is_given_up(make, given_up):
    model, ids = make(), models.token_ids(2, 12)
    cache = KVCache(model, batch=2, max_length=16)
    own = DynamicCache(config=model.config)
    expected = torch.cat([run(model, ids[:, :9], own), run(model, ids[:, 9:], own)], dim=1)
    start = 9 if given_up == "abort" else 0
    run(model, ids[:, :9], cache)

    def fail(*_):
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, ids[:, 9:11], cache)
    hook.remove()
    getattr(cache, given_up)()
    assert cache.length == start
    assert torch.allclose(run(model, ids[:, start:], cache)[:, -3:], expected[:, -3:], atol=1e-5)


GRADIENTS = [*KINDS, pytest.param(models.deepseek_v32, id="indexed"), pytest.param(models.deepseek_v4, id="compressed")]


@pytest.mark.parametrize("make", GRADIENTS)
def test_gradients_are_refused_before_anything_is_stored(make):
    model, ids = make(), models.token_ids(1, 9)
    cache = KVCache(model, batch=1, max_length=16)
    with pytest.raises(StepError, match=r"no gradient flows .* torch\.no_grad"):
        model(ids, cache=cache)
    assert (cache.length, cache.batch_size) == (0, -1)
    run(model, ids, cache)
    with torch.inference_mode():
        model(ids[:, :1], cache=cache)
    model.requires_grad_(False)
    model(ids[:, :1], cache=cache)
    assert cache.length == 11


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("static", STATIC)
def test_gradients_of_either_are_refused(static, part):
    cache = KVCache(models.llama(), batch=1, max_length=16, static=static)
    states = {name: torch.ones(1, 2, 1, 8, requires_grad=name == part) for name in ("keys", "values")}
    with pytest.raises(StepError, match="require gradients"):
        cache.update(states["keys"], states["values"], 0)
    with torch.no_grad():
        cache.update(states["keys"], states["values"], 0)


@pytest.mark.parametrize("make", [models.deepseek_v32, models.deepseek_v4], ids=["indexed", "compressed"])
def test_static_shapes_that_are_not_to_be_had_are_refused_with_the_reason(make):
    with pytest.raises(KvcoreError, match="static=True") as caught:
        KVCache(make(), batch=1, max_length=40, static=True)
    assert caught.value.hint


@pytest.mark.parametrize("attention", ["auto", "cache", "model"])
@pytest.mark.parametrize("make", [models.llama, models.gemma3])
def test_layers_alike_pass_checks_once(make, attention, monkeypatch):
    """Of equal layers the first alone has a handle in a decode step, and in the next one if none overwrites anything.

    What another gets that is unlike is refused.
    """
    model, ids, made = make(), models.token_ids(2, 9), []
    cache = KVCache(model, batch=2, max_length=16, attention=attention)
    run(model, ids[:, :7], cache)
    begin = LayerHandle.__init__

    def counted(self, *given):
        made.append(given[1])
        begin(self, *given)

    monkeypatch.setattr(LayerHandle, "__init__", counted)
    kinds = {layer.component for layer in cache.layers}
    steps = [run(model, ids[:, 7:8], cache)]
    assert len(made) == len(kinds)
    steps.append(run(model, ids[:, 8:], cache))
    assert len(made) == len(kinds) + sum(each.reach is not None for each in kinds)
    own = run(model, ids, DynamicCache(config=model.config))
    assert torch.allclose(torch.cat(steps, dim=1), own[:, 7:], atol=3e-5)
    component = cache.layers[0].component
    keys = torch.ones(2, component.key_heads, 1, component.key_dim)
    before = cache.kv.digest(cache.requests)
    with torch.no_grad():
        cache.update(keys, keys, 0)
        with pytest.raises(StepError, match="layer 0 again"):
            cache.update(keys, keys, 0)
        with pytest.raises(StepError, match=r"\[batch, tokens\] = \[1, 1\]"):
            cache.update(keys[:1], keys[:1], 1)
        assert cache.length == 9
        cache.update(keys, keys, 0)
        with pytest.raises(KvcoreError):
            cache.update(keys[..., :1], keys, 1)
    assert (cache.length, cache.kv.digest(cache.requests)) == (9, before)


@pytest.mark.parametrize("storage", [None, "slot", "paged"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [models.llama, models.sliding, models.gemma3])
@torch.no_grad()
def test_layers_in_turn_store_what_each_would_by_itself(make, rows, storage, monkeypatch):
    """Numbers that are none, and infinite ones, among what they are given."""
    model, random, turns = make(), torch.Generator().manual_seed(3), []
    run = cpu_views.InTurn.__call__
    monkeypatch.setattr(cpu_views.InTurn, "__call__", lambda *given: turns.append(given[1]) or run(*given))
    caches = [KVCache(model, batch=rows, max_length=40, storage=storage, max_draft_tokens=2) for _ in range(2)]
    layers = len(caches[0].layers)
    part = caches[0].layers[0].component.parts[0]
    for new in (21, 1, 1, 2, 1, 1):
        for layer in range(layers):
            keys, values = torch.randn(2, rows, part.heads, new, part.format.dim, generator=random)
            keys[0, 0, 0, 1], values[-1, 0, -1, 2], keys[-1, 0, 0, 3] = torch.nan, torch.inf, -0.0
            found = []
            for cache in caches:
                found.append([each.clone() for each in cache.update(keys, values, layer)])
                if cache is caches[1]:
                    cache.steady.clear()
            torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
        if new == 1 and caches[0].length == 23:
            for cache in caches:
                cache.crop(-1)
    digests = [cache.kv.digest(cache.requests) for cache in caches]
    assert digests[0] == digests[1]
    assert turns or rows > 1 or storage or make is models.gemma3  # which has too few layers of a kind
