"""A spec that the user gives, formats by layer, rings no longer than a row: taken, or refused by the field at fault."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, MistralConfig

from kvcore.errors import OutOfBlocks, RollbackError, ShapeError, SpecError
from kvcore.interop.transformers import KVCache, cache_spec
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Tail, Window
from tests.support import tiny_models as models
from tests.support.rows_by_hand import update


def falcon():
    """A model of a type that ``from_hf_config`` does not know."""
    config = FalconConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=32,
        ffn_hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        multi_query=False,
    )
    model = models.varied(AutoModelForCausalLM.from_config(config), torch.float32)
    model.config.model_type = "falcon_of_ours"
    return model


def of(count=3, **fields):
    fields = {"key_heads": 2, "key_dim": 8, "key_format": "fp32", **fields}
    return CacheSpec(layers=[LayerSpec(kv=KV(**fields))] * count)


@pytest.mark.parametrize("storage", ["slot", "paged"])
@pytest.mark.parametrize("static", [False, True])
def test_a_model_type_that_is_not_known_runs_on_a_spec(storage, static, backend):
    model, ids = falcon(), models.token_ids(2, 9)
    with pytest.raises(SpecError, match=r"falcon.*KVCache\(model, \.\.\., spec=") as caught:
        KVCache(model, batch=2, max_length=16)
    assert "llama" in caught.value.allowed
    spec = of(2, key_heads=4, storage=storage)
    cache = KVCache(model, batch=2, max_length=16, spec=spec, static=static, backend=backend)
    assert cache.kv.spec == spec
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 7, "max_new_tokens": 7, "pad_token_id": 1}
    assert torch.equal(model.generate(ids, cache=cache, **options), model.generate(ids, **options))


@pytest.mark.parametrize(
    "make",
    [models.llama, models.gemma3, models.llama4, models.deepseek_v3, models.deepseek_v32, models.deepseek_v4],
    ids=["full", "mixed", "chunked", "latent", "indexed", "compressed"],
)
def test_the_derived_spec_given_back_is_the_same_cache(make):
    model = make()
    derived = KVCache(model, batch=1, max_length=16)
    given = KVCache(model, batch=1, max_length=16, spec=derived.kv.spec)
    assert given.kv.plan == derived.kv.plan
    assert [type(layer) for layer in given.layers] == [type(layer) for layer in derived.layers]


def test_a_sliding_model_may_keep_everything():
    model, ids = models.gemma3(), models.token_ids(1, 20)
    cache = KVCache(model, batch=1, max_length=32, spec=of(storage="slot"))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, cache=cache, **options), model.generate(ids, **options))


RING = {"storage": "ring", "window": 8}
REFUSED = {
    "no spec": (models.llama, {"layers": []}, "a CacheSpec"),
    "fewer layers": (models.llama, of(2), r"2 layers; allowed: 3"),
    "more layers": (models.llama, of(4), r"4 layers; allowed: 3"),
    "draft layers": (models.llama, msgspec.structs.replace(of(), draft_layers=of(1).layers), "draft_layers"),
    "a window where the model has none": (models.llama, of(**RING), r"layers\[0\]: window: got 8"),
    "a window too small": (models.sliding, of(storage="ring", window=7), "8 or more"),
    "windows that differ": (
        models.sliding,
        CacheSpec(layers=[*of(2, **RING).layers, *of(1, storage="ring", window=9).layers]),
        "keep 8, 9 positions",
    ),
    "chunks": (models.llama4, of(storage="ring", chunk=8), "window=8"),
    "latent rows that are compressed": (
        models.deepseek_v3,
        CacheSpec(layers=[LayerSpec(entries=Entries(dim=20, ratio=4, format="fp32"))] * 3),
        r"entries\.ratio",
    ),
    "components that no model fills": (
        models.llama,
        CacheSpec(layers=[LayerSpec(index_tail=Tail(dim=8, ratio=4, overlap=False))] * 3),
        "got index_tail; allowed: kv; kv_tail, kv; entries;",
    ),
    "compression that the model does not do": (
        models.sliding,
        CacheSpec(
            layers=[
                LayerSpec(
                    window=Window(dim=8, window=8, format="fp32"),
                    tail=Tail(dim=8, ratio=4, overlap=False),
                    entries=Entries(dim=8, ratio=4, format="fp32"),
                )
            ]
            * 3
        ),
        "no compressor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_spec_that_the_model_cannot_run_on_is_refused(case):
    make, spec, said = REFUSED[case]
    with pytest.raises(SpecError, match=said):
        KVCache(make(), batch=1, max_length=16, spec=spec)


@pytest.mark.parametrize("option", [{"formats": "bf16"}, {"block_tokens": 16}, {"storage": "slot"}])
def test_what_the_spec_says_is_not_said_twice(option):
    with pytest.raises(SpecError, match=f"{next(iter(option))}: got .* beside spec"):
        KVCache(models.llama(), batch=1, max_length=16, spec=of(), **option)


@pytest.mark.parametrize("fields", [{"key_heads": 4}, {"key_dim": 16}, {"value_dim": 4}, {"value_heads": 1}])
def test_heads_and_dims_are_held_against_the_first_keys(fields, backend):
    cache = KVCache(models.llama(), batch=1, max_length=16, spec=of(**fields), backend=backend)
    with pytest.raises(ShapeError, match="append_kv"):
        update(cache, 1, 3)
    assert (cache.length, cache.batch_size) == (0, -1)


def formats_of(formats, make=models.llama):
    found = cache_spec(make().config, formats, default="fp32").layers
    return [(layer.kv.key_format, layer.kv.value_format) for layer in found]


def test_formats_by_layer_go_before_formats_by_role():
    plain = ("fp32", "fp32")
    assert formats_of({"layers[1]": "bf16"}) == [plain, ("bf16", "bf16"), plain]
    assert formats_of({"layers[2]": {"value": "bf16"}}) == [plain, plain, ("fp32", "bf16")]
    mixed = {"layers[0]": {"key": "bf16"}, "key": "int8_row", "value": "fp8_row", "layers[2]": "fp32"}
    assert formats_of(mixed) == [("bf16", "fp8_row"), ("int8_row", "fp8_row"), plain]
    assert formats_of({}) == formats_of(None) == [plain] * 3
    latent = cache_spec(models.deepseek_v4().config, {"window": "bf16", "layers[0]": {"window": "fp32"}}).layers
    assert [layer.window.format for layer in latent] == ["fp32", *["bf16"] * 4]


def test_a_cache_of_several_formats_generates(backend):
    model, ids = models.gemma3(), models.token_ids(2, 12)
    formats = {"layers[0]": "bf16", "layers[1]": {"key": "int8_row", "value": "bf16"}}
    cache = KVCache(model, batch=2, max_length=20, formats=formats, backend=backend)
    model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    keys = [layer.keys for layer in cache.layers]
    assert torch.equal(keys[0], keys[0].bfloat16().float())
    assert not torch.equal(keys[2], keys[2].bfloat16().float())


@pytest.mark.parametrize(
    ("formats", "where", "said"),
    [
        pytest.param(["int8_row"] * 3, "formats", "by role or by layer", id="a list"),
        pytest.param(7, "formats", "by role or by layer", id="a number"),
        pytest.param({"layers[3]": "bf16"}, "formats", r"layers\[0\] to layers\[2\]", id="a layer that there is not"),
        pytest.param({0: "bf16"}, "formats", r"key, value, layers\[0\]", id="a layer by number"),
        pytest.param({"layers[1]": {"kv": "bf16"}}, "formats['layers[1]']", "key, value", id="role in a layer"),
        pytest.param({"layers[1]": ["bf16"]}, "formats['layers[1]']", "a mapping of key, value", id="list in a layer"),
        pytest.param({"key": {"layers[1]": "bf16"}}, "formats['key']", "a format's name", id="the other way round"),
        pytest.param({"key": None}, "formats['key']", "a format's name", id="none"),
        pytest.param({"layers[1]": {"key": "fp7"}}, "formats['layers[1]']['key']", "int8_row", id="unknown format"),
    ],
)
def test_bad_formats_are_refused_where_they_are(formats, where, said):
    with pytest.raises(SpecError, match=said) as caught:
        cache_spec(models.llama().config, formats)
    assert caught.value.where == where


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("static", [False, True])
def test_rings_are_no_longer_than_a_row(static, drafts, backend):
    wide = MistralConfig(**models.CLASSIC, sliding_window=4096)
    model = models.varied(AutoModelForCausalLM.from_config(wide), torch.float32)
    cache = KVCache(model, batch=2, max_length=24, static=static, max_draft_tokens=drafts, backend=backend)
    rows = {region.rows for region in cache.kv.plan.regions}
    assert rows <= set(range(24, 24 + drafts + 1))
    ids = models.token_ids(2, 20)
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    found = model.generate(ids, cache=cache, min_new_tokens=5, max_new_tokens=5, **options)
    assert torch.equal(found, model.generate(ids, min_new_tokens=5, max_new_tokens=5, **options))
    with pytest.raises(OutOfBlocks):
        update(cache, 1, 1, rows=2)
    assert cache.is_croppable
    cache.crop(-24)
    assert cache.length == 0


def test_a_ring_that_overwrites_is_not_croppable_without_drafts():
    cache = KVCache(models.sliding(), batch=1, max_length=12)
    assert not cache.is_croppable
    update(cache, 1, 12)
    with pytest.raises(RollbackError):
        cache.crop(-1)


@pytest.mark.parametrize("option", ["batch", "beams", "max_length"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_sizes_are_checked_by_name(option, value):
    with pytest.raises(SpecError, match=option):
        KVCache(models.llama(), **{"batch": 1, "max_length": 8, option: value})
