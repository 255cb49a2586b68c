"""Decoders that attend to an encoder: their own keys and values in a kvcore cache, the encoder's in one of torch's."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from kvcore.errors import SpecError, StepError
from kvcore.interop.transformers import KVCache
from kvcore.spec import KV, CacheSpec, LayerSpec

ROWS, NEW = 3, 12


def bart():
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        init_std=0.3,
    )
    torch.manual_seed(0)
    return BartForConditionalGeneration(config).eval()


def t5():
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    model, random = T5ForConditionalGeneration(config).eval(), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:  # as they are made it would repeat itself
            weight.data.normal_(0, 0.4, generator=random)
    return model


def whisper():
    sizes = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = WhisperConfig(
        **sizes,
        vocab_size=64,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        init_std=0.3,
    )
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config).eval()


def spec_of(make):
    """T5's is not derived."""
    if make is not t5:
        return None
    return CacheSpec(
        layers=[LayerSpec(kv=KV(key_heads=4, key_dim=8, key_format="fp32", value_format="fp32", storage="slot"))] * 2
    )


def generated(model, cache=None, beams=1):
    ids = torch.randint(3, 64, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    return model.generate(input_ids=ids, attention_mask=mask, cache=cache, **options)


def beside(model, make, **options):
    cache = KVCache(model, batch=ROWS, max_length=NEW + 2, spec=spec_of(make), **options)
    return cache, EncoderDecoderCache(cache, DynamicCache(config=model.config))


@pytest.mark.parametrize("asked", ["auto", "cache", "model"])
@pytest.mark.parametrize("make", [bart, t5])
def test_tokens_are_those_of_the_models_own_cache(make, asked):
    model = make()
    own = generated(model)
    cache, both = beside(model, make, attention=asked)
    assert torch.equal(own, generated(model, both))
    assert len(own.unique()) > 3
    assert cache.length == NEW
    assert model.config._attn_implementation == "sdpa"
    chosen = {choice.implementation for choice in cache.explain() if "one" in choice.verb}
    assert chosen == {"auto": {"views"}, "cache": {"cache"}, "model": {"model"}}[asked]
    last = {choice.reason for choice in cache.explain() if "last forward" in choice.verb}
    biased = {"an attention function with position_bias"} if make is t5 and asked == "cache" else set()
    assert last == biased


@pytest.mark.parametrize(("asked", "beams"), [("auto", 3), ("cache", 1), ("model", 1)])
def test_whisper_writes_down_what_it_writes_with_its_own_cache(asked, beams):
    model = whisper()
    sound = torch.randn(ROWS, 8, 40, generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    own = model.generate(input_features=sound, **options)
    cache, both = beside(model, whisper, attention=asked, beams=beams)
    assert torch.equal(own, model.generate(input_features=sound, cache=both, **options))
    assert len(own.unique()) > 3
    assert cache.length == NEW


def test_beams():
    model = bart()
    cache, both = beside(model, bart, beams=3)
    assert torch.equal(generated(model, beams=3), generated(model, both, beams=3))
    assert cache.length == NEW


def test_coded_rows_and_only_those_of_the_decoder():
    model = bart()
    cache, both = beside(model, bart, formats="int8_row")
    assert len(cache.kv.spec.layers) == model.config.decoder_layers
    assert generated(model, both).shape == generated(model).shape
    assert both.cross_attention_cache.get_seq_length() == 9


def test_alone_it_is_no_cache_of_both():
    model = bart()
    with pytest.raises(StepError, match="layer 0"):
        generated(model, KVCache(model, batch=ROWS, max_length=NEW + 2))


def test_a_decoder_whose_spec_is_not_known_is_told_how_to_give_one():
    with pytest.raises(SpecError, match="spec="):
        KVCache(t5(), batch=1, max_length=8)
