"""Models with recurrent layers on a ``KVCache``: the tokens of their own cache, whatever happens in between."""

import copy
import sys

import pytest
import torch
from transformers import DynamicCache

from kvcore import Periodic
from kvcore.errors import RequestError, RollbackError, ShapeError, SpecError, StepError
from kvcore.interop.transformers import KVCache, cache_spec
from kvcore.spec import CacheSpec, LayerSpec
from tests.support import recurrent_models
from tests.support import tiny_models as models

KINDS = list(recurrent_models.FIELDS)
FEW = ["qwen3_next", "nemotron_h", "mamba2", "kimi_linear", "falcon_h1", "lfm2"]
"""A state that is handed over, two that are written in place, inputs that are, both in one layer, and none."""

NEW = 7


@pytest.fixture(scope="module")
def made():
    """Models by type, made once."""
    found = {}

    def make(kind):
        if kind not in found:
            found[kind] = recurrent_models.make(kind)
        return found[kind]

    return make


def batch():
    """Two prompts, the first padded on the left."""
    ids = models.token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def generated(model, ids, mask, cache=None, new=NEW, **options):
    options |= {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, cache=cache, **options)


@torch.no_grad()
def forward(model, cache, ids, start=0):
    """Logits of a forward of single rows without padding."""
    positions = torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
    options = {} if model.config.model_type.startswith("mamba") else {"position_ids": positions}
    return model(ids, cache=cache, use_cache=True, **options).logits[:, -1]


@pytest.mark.parametrize("backend", ["torch_triton", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_padded_batch(made, kind, backend):
    if backend == "reference" and kind not in FEW:
        return
    model, (ids, mask) = made(kind), batch()
    cache = KVCache(model, batch=2, max_length=32, backend=backend)
    assert torch.equal(generated(model, ids, mask, cache), generated(model, ids, mask))
    assert cache.length == ids.shape[1] + NEW - 1
    cache.reset()
    assert torch.equal(generated(model, ids[1:], mask[1:], cache), generated(model, ids[1:], mask[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_has_the_shapes_of_the_models_own_cache(made, kind):
    model, ids = made(kind), models.token_ids(1, 9)
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=own, use_cache=True)
    spec = cache_spec(model.config)
    assert len(own.layers) == len(spec.layers)
    for theirs, ours in zip(own.layers, spec.layers, strict=True):
        states = getattr(theirs, "recurrent_states", {0: None})[0]
        assert (None if ours.state is None else ours.state.shape) == (None if states is None else states.shape[1:])
        inputs = getattr(theirs, "conv_states", {0: None})[0]
        assert (ours.conv and (ours.conv.channels, ours.conv.width)) == (inputs if inputs is None else inputs.shape[1:])
        keys = getattr(theirs, "keys", None)
        if ours.kv is not None:
            assert (ours.kv.key_heads, ours.kv.key_dim) == (keys.shape[1], keys.shape[3])
        elif ours.entries is not None:
            assert ours.entries.dim == keys.shape[3] + theirs.values.shape[3]
        else:
            assert keys is None


@pytest.mark.parametrize("kind", FEW)
def test_copied_saved_and_rolled_back_in_mid_generation(made, kind, tmp_path):
    """Forwards of single tokens: each can be taken back, up to ``max_draft_tokens`` of them."""
    model, ids = made(kind), models.token_ids(1, 9)
    cache = KVCache(model, batch=1, max_length=32, max_draft_tokens=3)
    steps = [ids[:, :6], *ids[:, 6:].split(1, dim=1)]
    start, logits = 0, []
    for some in steps:
        logits.append(forward(model, cache, some, start))
        start += some.shape[1]
    fork = copy.deepcopy(cache)
    cache.save(tmp_path / "rows.kv")
    other = KVCache(model, batch=1, max_length=32, max_draft_tokens=3, backend="reference")
    other.load(tmp_path / "rows.kv")
    wrong = torch.tensor([[5], [7]])
    following = forward(model, cache, wrong[:1], 9)
    for each in (fork, other):
        torch.testing.assert_close(forward(model, each, wrong[:1], 9), following)
    for each in (cache, fork):
        each.crop(-3)
        assert each.length == 7
        for place in (7, 8):
            torch.testing.assert_close(forward(model, each, ids[:, place : place + 1], place), logits[place - 5])


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "kimi_linear"])
def test_a_forward_of_several_tokens_is_taken_back_whole(made, kind):
    model, ids = made(kind), models.token_ids(1, 9)
    cache = KVCache(model, batch=1, max_length=32, max_draft_tokens=3)
    forward(model, cache, ids[:, :6])
    before = cache.kv.digest()
    expected = forward(model, cache, ids[:, 6:], 6)
    with pytest.raises(RollbackError, match="6, 9: lengths whose recurrent state is kept"):
        cache.crop(-1)
    cache.crop(-3)
    assert cache.kv.digest() == before
    torch.testing.assert_close(forward(model, cache, ids[:, 6:], 6), expected)


def test_drafts_of_a_model_without_states(made):
    """LFM2 has convolutions alone, whose inputs of all tokens are kept; other models refuse drafts by themselves."""
    model, (ids, mask) = made("lfm2"), batch()
    ids, mask = ids[1:], mask[1:]
    cache = KVCache(model, batch=1, max_length=40, max_draft_tokens=4)
    found = generated(model, ids, mask, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(found, generated(model, ids, mask))
    recurrent = made("qwen3_next")
    with pytest.raises(ValueError, match="stateful"):
        generated(recurrent, ids, mask, KVCache(recurrent, batch=1, max_length=40, max_draft_tokens=4),
                  prompt_lookup_num_tokens=3)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_beams(made, kind):
    model, (ids, mask) = made(kind), batch()
    cache = KVCache(model, batch=2, beams=3, max_length=32)
    assert torch.equal(generated(model, ids, mask, cache, num_beams=3), generated(model, ids, mask, num_beams=3))


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "falcon_h1"])
def test_half_precision(kind):
    model, (ids, mask) = recurrent_models.make(kind, torch.bfloat16), batch()
    cache = KVCache(model, batch=2, max_length=32)
    assert torch.equal(generated(model, ids, mask, cache), generated(model, ids, mask))
    states = [layer.state.format for layer in cache.kv.spec.layers if layer.state is not None]
    assert set(states) == {"fp32"}


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_a_state_that_the_model_did_not_write_is_not_stored(made, kind, monkeypatch):
    """A forward of one token that ends in the last layer: the state that was handed out is still the old one."""
    model, ids = made(kind), models.token_ids(1, 9)
    cache = KVCache(model, batch=1, max_length=32)
    forward(model, cache, ids)
    before = cache.kv.digest()
    module, name = sys.modules[type(model).__module__], "mamba2_selective_state_update"
    update, calls = getattr(module, name), []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == model.config.num_hidden_layers:
            raise KeyboardInterrupt
        return update(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, failing)
        with pytest.raises(KeyboardInterrupt):
            forward(model, cache, ids[:, :1], 9)
    with pytest.raises(StepError, match="have not stored its 1 tokens"):
        forward(model, cache, ids[:, :1], 9)
    cache.abort()
    assert cache.length == 9
    assert cache.kv.digest() == before
    fresh = KVCache(model, batch=1, max_length=32)
    forward(model, fresh, ids)
    torch.testing.assert_close(forward(model, cache, ids[:, :1], 9), forward(model, fresh, ids[:, :1], 9))


def test_what_is_refused(made):
    model = made("qwen3_next")
    with pytest.raises(SpecError, match="static=True"):
        KVCache(model, batch=1, max_length=16, static=True)
    spec = cache_spec(model.config)
    layers = [LayerSpec(kv=spec.layers[1].kv), *spec.layers[1:]]
    with pytest.raises(SpecError, match="what a layer of kind linear_attention of the model keeps"):
        KVCache(model, batch=1, max_length=16, spec=CacheSpec(layers=layers))
    cache = KVCache(model, batch=1, max_length=16, spec=spec)
    assert cache.layers[0].recurrent_states == {0: None}
    for verb in (cache.layers[0].reset, lambda: cache.layers[0].crop(-1)):
        with pytest.raises(StepError, match="of the whole cache"):
            verb()
    with pytest.raises(StepError, match="a state without inputs"):
        cache.update_recurrent_state(torch.zeros(1, 4, 6, 5), 0)


def test_formats_of_states(made):
    model, (ids, mask) = made("qwen3_next"), batch()
    cache = KVCache(model, batch=2, max_length=32, formats={"state": "bf16", "conv": "bf16"})
    assert cache.kv.spec.layers[0].state.format == "bf16"
    generated(model, ids, mask, cache)
    whole = KVCache(model, batch=2, max_length=32)
    assert cache.nbytes < whole.nbytes


@pytest.mark.parametrize("backend", ["torch_triton", "reference"])
@pytest.mark.parametrize("kind", FEW)
def test_a_prompt_is_found_by_later_ones(made, kind, backend):
    """Where its forwards ended: cut by blocks, and whole. What is taken over is what the tokens make of nothing."""
    if backend == "reference" and kind not in FEW[:2]:
        return
    model = made(kind)
    ids, other = models.token_ids(1, 15), models.token_ids(1, 15)
    other[:, 9:] = other[:, 9:].flip(1)
    cache = KVCache(model, batch=1, max_length=32, block_tokens=4, backend=backend, prefix="full", prefix_tokens=64)
    assert cache.admit(ids) == 0
    options = {"prefill_chunk_size": 4}
    assert torch.equal(generated(model, ids, None, cache, **options), generated(model, ids, None))
    cache.reset()
    # The same again from the last block's end; a longer one from the whole of it; another from where they part.
    longer = torch.cat([ids, models.token_ids(1, 3)], 1)
    for prompt, taken in ((ids, 12), (longer, 15), (other, 8)):
        assert cache.admit(prompt) == taken
        # generate takes ids off that the cache has, but not where all layers are recurrent: it is handed the rest.
        rest = prompt[:, taken:] if kind == "mamba2" else prompt
        found = generated(model, rest, None, cache)[:, -NEW:]
        assert torch.equal(found, generated(model, prompt, None)[:, -NEW:])
        cache.reset()
    assert cache.admit(ids, salt="another image") == 0


def test_rows_of_a_batch_begin_equally_long(made):
    """The longest length that every row can take over; those that are padded alike."""
    model, (ids, mask) = made("qwen3_next"), batch()
    cache = KVCache(model, batch=2, max_length=32, block_tokens=4, prefix="full", prefix_tokens=64)
    assert cache.admit(ids[1:]) == 0
    generated(model, ids[1:], None, cache, prefill_chunk_size=4)
    cache.reset()
    assert cache.admit(ids[1:]) == 8
    cache.reset()
    assert cache.admit(ids[[1, 1]], mask[[0, 1]]) == 0
    cache.reset()
    for taken in (0, 8):
        assert cache.admit(ids, mask) == taken
        assert torch.equal(generated(model, ids, mask, cache, prefill_chunk_size=4), generated(model, ids, mask))
        cache.reset()
    ids[0, 5] += 1
    assert cache.admit(ids, mask) == 4
    assert torch.equal(generated(model, ids, mask, cache), generated(model, ids, mask))


def test_what_a_prompt_must_be(made):
    model, (ids, mask) = made("mamba2"), batch()
    with pytest.raises(SpecError, match="prefix='full'"):
        KVCache(model, batch=2, max_length=32).admit(ids)
    for options, match in (({"prefix": "zero"}, "'zero'"), ({"prefix": "full", "static": True}, "blocks|static")):
        with pytest.raises(SpecError, match=match):
            KVCache(model, batch=2, max_length=32, **options)
    cache = KVCache(model, batch=2, max_length=32, prefix=Periodic(4))
    for given, match in (
        ((ids[0],), "ids"), ((ids.float(),), "ids"), ((ids[:, :0],), "ids"), ((ids, mask.flip(1)), "at the left"),
        ((ids, mask[:, 1:]), "at the left"),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=match):
            cache.admit(*given)
    with pytest.raises(RequestError, match="at most 2"):
        cache.admit(ids[[0, 1, 1]])
    with pytest.raises(ShapeError, match="salt"):
        cache.admit(ids, salt=3)
    assert cache.length == 0
    assert cache.admit(ids, mask) == 0
    generated(model, ids, mask, cache)
    with pytest.raises(RequestError, match="an empty cache"):
        cache.admit(ids, mask)
