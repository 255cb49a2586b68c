"""A model on a kvcore cache gives what it gives on its own."""

import pytest
import torch
from transformers import DynamicCache

import kvcore
from kvcore import to_numpy
from kvcore.errors import OutOfBlocks, RequestError, RollbackError, SpecError, StepError
from kvcore.interop.transformers import KVCache, cache_spec
from tests.support import tiny_models as models

BACKENDS = ["torch_triton", "reference"]
CUTS = [
    pytest.param([45], id="one prefill"),
    pytest.param([20, *[1] * 25], id="prefill, then single steps"),
    pytest.param([13, 32], id="two chunks"),
    pytest.param([7, 1, 1, 9, 27], id="chunks and steps mixed"),
    pytest.param([1, 44], id="one token, then the rest"),
    pytest.param([1] * 45, id="single steps only"),
]
CLASSIC = [pytest.param(models.llama, id="full"), pytest.param(models.mistral, id="sliding")]
EVERY = [*CLASSIC, pytest.param(models.deepseek_v4, id="deepseek_v4")]


def logits(model, ids, cuts, cache, mask=None):
    """Logits [B, S, vocabulary] of a prompt that is fed in pieces."""
    pieces, start = [], 0
    with torch.no_grad():
        for new in cuts:
            seen = None if mask is None else mask[:, : start + new]
            pieces.append(model(ids[:, start : start + new], attention_mask=seen, cache=cache).logits)
            start += new
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("make", CLASSIC)
def test_classic_logits_are_the_models_own(make, cuts, backend):
    model, ids = make(), models.token_ids(2, sum(cuts))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # left padding
    own = logits(model, ids, cuts, DynamicCache(config=model.config), mask)
    ours = logits(model, ids, cuts, KVCache(model, batch=2, max_length=45, backend=backend), mask)
    assert torch.equal(own[mask.bool()], ours[mask.bool()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", CUTS)
def test_deepseek_v4_logits_are_the_models_own(cuts, backend):
    model, ids = models.deepseek_v4(), models.token_ids(2, sum(cuts))
    own, ours = DynamicCache(config=model.config), KVCache(model, batch=2, max_length=45, backend=backend)
    difference = logits(model, ids, cuts, own) - logits(model, ids, cuts, ours)
    assert difference.abs().max() <= 1e-5
    assert ours.get_seq_length() == own.get_seq_length() == sum(cuts)


@pytest.mark.parametrize("make", EVERY)
def test_bf16_model_is_exact_on_a_bf16_cache(make):
    model, ids, cuts = make(torch.bfloat16), models.token_ids(2, 30), [17, 1, 1, 11]
    # The cache's own attention to windows and entries rounds elsewhere.
    ours = KVCache(model, batch=2, max_length=30, attention="model" if make is models.deepseek_v4 else "auto")
    assert torch.equal(logits(model, ids, cuts, DynamicCache(config=model.config)), logits(model, ids, cuts, ours))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["compressor", "indexer"])
def test_entries_that_kvcore_compresses_are_the_models(name, backend):
    """The model's raw projections through ``append_tail`` and ``flush`` give the entries that the model computes."""
    model, ids = models.deepseek_v4(), models.token_ids(2, 45)
    compressor = model.model.layers[1].self_attn.compressor
    recorded = {}
    for part in (compressor, compressor.indexer):
        for projection in (part.kv_proj, part.gate_proj):
            projection.register_forward_hook(lambda module, _, out: recorded.__setitem__(module, out))
    own = DynamicCache(config=model.config)
    logits(model, ids, [45], own)

    cache = kvcore.create_cache(cache_spec(model.config, "fp32"), backend=backend, max_requests=2, max_tokens=1024)

    def given(tensor):
        return cache.asarray(to_numpy(tensor))

    def streams(part):
        bias = part.position_bias[torch.arange(45) % part.compress_rate]
        kv, score = recorded[part.kv_proj], recorded[part.gate_proj] + bias
        return given(kv.flatten(0, 1)), given(score.flatten(0, 1))

    # Only layer 1 gets rows, so the step is read before its end and then dropped.
    step = cache.step({cache.admit(): 45, cache.admit(): 45})
    layer = step.layer(1)
    layer.append_tail(*streams(compressor))
    layer.append_index_tail(*streams(compressor.indexer))
    layer.flush(
        given(compressor.kv_norm.weight),
        compressor.kv_norm.variance_epsilon,
        given(compressor.rotary_emb.compress_inv_freq),
        given(compressor.indexer.kv_norm.weight),
    )
    gathered = layer.gather_all_entries() if name == "compressor" else layer.gather_all_index_keys()
    values, expected = to_numpy(gathered.values), to_numpy(own.layers[1].compressed_kv[name])
    assert values.shape == expected.shape
    assert abs(values - expected).max() <= 1e-5
    step.abort()


@pytest.mark.parametrize("make", EVERY)
def test_generate_gives_the_same_tokens(make):
    model, ids = make(), models.token_ids(2, 20)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    ours = KVCache(model, batch=2, max_length=32)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, cache=ours, **options))
    assert ours.length == 31  # the last token was chosen, not fed


@pytest.mark.parametrize("make", EVERY)
def test_beam_search_gives_the_same_tokens(make):
    model, ids = make(), models.token_ids(2, 20)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    ours = KVCache(model, batch=2, beams=3, max_length=32)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, cache=ours, **options))


def test_drafts_are_rolled_back_in_assisted_generation():
    model = models.llama()
    ids = models.token_ids(1, 6).repeat(1, 4)  # repetitive, so that prompt lookup has drafts to offer
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    ours = KVCache(model, batch=1, max_length=64)
    drafted = model.generate(ids, cache=ours, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(model.generate(ids, **options), drafted)


@pytest.mark.parametrize("make", EVERY)
def test_crop_leaves_no_trace_of_drafts(make):
    model, ids = make(), models.token_ids(2, 30)
    plain = KVCache(model, batch=2, max_length=40, max_draft_tokens=4)
    drafted = KVCache(model, batch=2, max_length=40, max_draft_tokens=4)
    expected = logits(model, ids, [25, 5], plain)
    logits(model, ids, [25], drafted)
    logits(model, ids.flip(1), [4], drafted)
    drafted.crop(-4)
    assert drafted.get_seq_length() == 25
    assert torch.equal(expected[:, 25:], logits(model, ids[:, 25:], [5], drafted))
    assert plain.kv.digest(plain.requests) == drafted.kv.digest(drafted.requests)


def test_crop_beyond_the_spare_rows_is_refused_and_changes_nothing():
    model, ids = models.mistral(), models.token_ids(2, 30)
    ours = KVCache(model, batch=2, max_length=40, max_draft_tokens=2)
    logits(model, ids, [30], ours)
    before = ours.kv.digest()
    with pytest.raises(RollbackError):
        ours.crop(-9)
    assert (ours.get_seq_length(), ours.kv.digest()) == (30, before)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("fault", ["in the model", "in the first forward"])
def test_failed_forward_leaves_no_trace(make, fault):
    model, ids = make(), models.token_ids(2, 30)
    plain, ours = (KVCache(model, batch=2, max_length=40) for _ in range(2))
    start = 0 if fault == "in the first forward" else 11
    if start:
        logits(model, ids, [start], plain)
        logits(model, ids, [start], ours)

    def fail(*_):
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        logits(model, ids[:1] if not start else ids, [7], ours)
    hook.remove()
    # Only layers that the forward came through count its tokens, until it is undone.
    assert (ours.get_seq_length(0), ours.get_seq_length(len(ours.layers) - 1)) == (start + 7, start)
    with pytest.raises(StepError, match=r"abort\(\)"):
        logits(model, ids, [3], ours)
    ours.abort()
    assert ours.get_seq_length() == start
    cuts = [13, 1, 1]
    expected = logits(model, ids[:, start:], cuts, plain)
    assert torch.equal(expected, logits(model, ids[:, start:], cuts, ours))
    assert plain.kv.digest(plain.requests) == ours.kv.digest(ours.requests)


def test_too_many_tokens_are_refused_and_change_nothing():
    model, ids = models.llama(), models.token_ids(2, 30)
    ours = KVCache(model, batch=2, max_length=10)
    logits(model, ids, [10], ours)
    before = ours.kv.digest()
    with pytest.raises(OutOfBlocks, match=r"got 11 tokens in a row; allowed: 10 \(max_length\)"):
        logits(model, ids, [1], ours)
    assert (ours.get_seq_length(), ours.kv.digest()) == (10, before)


@pytest.mark.parametrize("rows", [pytest.param(1, id="fewer rows"), pytest.param(3, id="more rows than planned")])
def test_another_batch_size_is_refused_until_reset(rows):
    model = models.llama()
    ours = KVCache(model, batch=2, max_length=40)
    logits(model, models.token_ids(2, 9), [9], ours)
    with pytest.raises(RequestError):
        logits(model, models.token_ids(rows, 3), [3], ours)
    assert ours.get_seq_length() == 9
    ours.reset()
    assert ours.get_seq_length() == 0
    assert ours.kv.free_slots == 2
    logits(model, models.token_ids(1, 3), [3], ours)


@pytest.mark.parametrize("formats", ["int8_row", "fp8_row", {"key": "int8_row", "value": "bf16"}])
def test_quantised_keys_stay_near_and_do_not_depend_on_chunks(formats):
    model, ids = models.llama(), models.token_ids(2, 30)
    caches = [KVCache(model, batch=2, max_length=40, formats=formats) for _ in range(2)]
    whole, pieces = (logits(model, ids, cuts, cache) for cuts, cache in zip(([30], [4, 1, 25]), caches, strict=True))
    own = logits(model, ids, [30], DynamicCache(config=model.config))
    assert 0 < (whole - own).abs().max() <= 0.05 * own.abs().max()
    assert (whole - pieces).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        pytest.param({"windw": "bf16"}, "windw", id="unknown role"),
        pytest.param({"key": "bf16"}, "key", id="role of another kind of model"),
        pytest.param("fp7", "fp7", id="unknown format"),
        pytest.param({"index_keys": "index_fp4_68_h"}, "index_fp4_68_h", id="rotated index keys"),
        pytest.param({"window": "v4_584"}, "v4_584", id="format of another dim"),
    ],
)
def test_bad_formats_are_refused(formats, message):
    with pytest.raises(SpecError, match=message):
        cache_spec(models.deepseek_v4().config, formats)


@pytest.mark.parametrize("model", [None, 3, object(), torch.nn.Linear(2, 2)], ids=lambda model: type(model).__name__)
def test_what_is_no_model_is_refused_as_what_it_is(model):
    with pytest.raises(SpecError, match=f"model: got {type(model).__name__} without config, dtype, device; allowed: a"):
        KVCache(model, batch=1, max_length=8)


def test_chunked_attention_is_kept_as_a_window():
    """transformers shifts chunks by each row's left padding, which the cache does not see."""
    config = models.llama().config
    config.layer_types = ["chunked_attention", "full_attention", "chunked_attention"]
    config.attention_chunk_size = 8
    kinds = [(layer.kv.storage, layer.kv.window, layer.kv.chunk) for layer in cache_spec(config).layers]
    assert kinds == [("ring", 8, None), ("paged", None, None), ("ring", 8, None)]


def test_rows_are_portable_between_backends():
    model, ids = models.deepseek_v4(), models.token_ids(2, 30)
    ours = {name: KVCache(model, batch=2, max_length=40, backend=name, attention="model") for name in BACKENDS}
    for cache in ours.values():
        logits(model, ids, [17, 1, 12], cache)
    first, second = ours.values()
    assert first.kv.digest(first.requests) == second.kv.digest(second.requests)


def test_repr_shows_rows_and_tokens():
    model = models.llama()
    ours = KVCache(model, batch=2, max_length=40)
    logits(model, models.token_ids(2, 9), [9], ours)
    assert repr(ours).startswith("KVCache(2 of 2 rows, 9 tokens each, ")


@pytest.mark.parametrize(
    ("options", "lent"),
    [
        pytest.param({}, True, id="as it is"),
        pytest.param({"zero_copy": False}, False, id="copies"),
        pytest.param({"storage": "paged", "block_tokens": 4}, False, id="blocks"),
        pytest.param({"formats": "int8_row"}, False, id="a format that is decoded"),
    ],
)
def test_what_is_handed_out_is_lent_or_a_copy(options, lent):
    """Changing a copy does not change the cache; what is lent is the cache, and two rows lie a slot apart."""
    model, ids = models.llama(), models.token_ids(2, 9)
    ours = KVCache(model, batch=2, max_length=40, **options)
    logits(model, ids, [9], ours)
    before = ours.kv.digest()
    keys, values = ours.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
    assert keys.shape == (2, 2, 10, 8)
    keys.zero_()
    values.zero_()
    ours.abort()
    assert (ours.kv.digest() == before) == (not lent)
    pools = {pool.untyped_storage().data_ptr() for pool in ours.kv.pools.values()}
    assert (keys.untyped_storage().data_ptr() in pools) == lent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sliding_layer_is_lent_what_another_gets_copied(dtype):
    """In prompts that are longer than the window, in drafts and single tokens, wherever the ring has wrapped."""
    model = models.sliding(dtype)
    window = model.config.sliding_window
    options = {"batch": 2, "max_length": 128, "max_draft_tokens": 2}
    ours, copies = KVCache(model, **options), KVCache(model, **options, zero_copy=False)
    pools = {pool.untyped_storage().data_ptr() for pool in ours.kv.pools.values()}
    generator, lent = torch.Generator().manual_seed(0), []
    for new in (2 * window + 3, *[1] * (2 * window), 3, 2, window, 1, 1):
        for layer in range(model.config.num_hidden_layers):
            shape = 2, model.config.num_key_value_heads, new, model.config.head_dim
            k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            found, wanted = ours.update(k, v, layer), copies.update(k, v, layer)
            for got, want in zip(found, wanted, strict=True):
                assert torch.equal(got, want)
            lent.append((new, found[0].untyped_storage().data_ptr() in pools))
    assert {new for new, is_lent in lent if is_lent} == {1, 2, 3}
    assert {new for new, is_lent in lent if not is_lent} == {2 * window + 3, window}


def test_what_was_lent_stays_as_it_was():
    """Later steps write behind what earlier ones were lent."""
    model, ids = models.llama(), models.token_ids(2, 9)
    ours = KVCache(model, batch=2, max_length=40)
    logits(model, ids, [9], ours)
    keys, _ = ours.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
    kept = keys.clone()
    ours.abort()
    logits(model, ids, [9], ours)
    assert torch.equal(keys[:, :, :9], kept[:, :, :9])
