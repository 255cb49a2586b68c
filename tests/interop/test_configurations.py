"""A file that says only what differs from its model type's defaults gives the layers of transformers' own object."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcore.errors import SpecError
from kvcore.spec import from_hf_config
from kvcore.spec.families import FAMILIES, said

DERIVED = ("layer_types", "no_rope_layers", "rope_parameters")
"""What the configuration classes work out: published files do not have it."""

SWITCHED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3}
SAID = [
    pytest.param({}, id="defaults"),
    pytest.param({"num_hidden_layers": 7}, id="fewer layers"),
    pytest.param({"num_hidden_layers": 7, **SWITCHED}, id="window switched on"),
    pytest.param({"num_hidden_layers": 7, "sliding_window": 24}, id="another window"),
    pytest.param({"num_hidden_layers": 7, "num_attention_heads": 8, "hidden_size": 128}, id="other heads"),
    pytest.param({"num_hidden_layers": 7, "sliding_window_pattern": 3}, id="another pattern"),
    pytest.param({"num_hidden_layers": 7, "no_rope_layer_interval": 2, "attention_chunk_size": 24}, id="chunks"),
]
NEEDED = {
    "dory": {"n_input_layers": 2, "n_recurrent_layers": 3, "n_output_layers": 2},
    # Heads that do not divide the hidden size; layers that share, in a model of few; a pattern as long as the layers.
    "glm4_moe": {"num_attention_heads": 32},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global"], 7]]},
}
for family, entry in FAMILIES.items():
    if entry.decoder:
        NEEDED[family] = {name: wanted for name, wanted, _ in entry.decoder}
SEQ2SEQ = ("decoder_layers", "decoder_attention_heads", "num_decoder_layers", "num_decoder_attention_heads", "d_model")
"""Fields of a decoder that a file must say, since others say the encoder's."""
REWRITTEN = ("dory", "hrm_text")
"""Model types whose counts of layers are others in a file than in what was given."""
UNSAID = {family for family, entry in FAMILIES.items() if entry.schedule is said}
"""Model types of which a file must say each layer's kind."""


def test_every_family_is_a_model_type_of_transformers():
    assert set(FAMILIES) <= set(CONFIG_MAPPING)


@pytest.mark.parametrize("fields", SAID)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_file_gives_the_spec_of_the_object(family, fields):
    known = vars(CONFIG_MAPPING[family]()).keys() | {"sliding_window_pattern"}
    # GPT-Neo counts its layers by another name, which keeps its default here.
    always = family == "glm4_moe" or FAMILIES[family].decoder
    needed = NEEDED.get(family, {}) if family != "gpt_neo" and (fields or always) else {}
    given = {name: value for name, value in (needed | fields).items() if name in known}
    config = AutoConfig.for_model(family, **given)
    published = {"num_hidden_layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
    published |= {name: value for name, value in config.to_diff_dict().items() if name not in DERIVED}
    published |= {"model_type": family, **given}
    published |= {name: getattr(config, name) for name in SEQ2SEQ if name in known and FAMILIES[family].decoder}
    if family in REWRITTEN:
        published = config.to_dict()
    if family in UNSAID:
        with pytest.raises(SpecError, match="layer_types"):
            from_hf_config(published)
        published["layer_types"] = config.layer_types
    spec = from_hf_config(SimpleNamespace(**published))
    assert spec == from_hf_config(config)
    assert spec == from_hf_config(published)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_models_own_cache(family):
    switched = SWITCHED if family.startswith("qwen") else {}
    seq2seq = FAMILIES[family].decoder and "is_encoder_decoder" in NEEDED[family]
    layers = {} if seq2seq else {"num_hidden_layers": 7}
    config = CONFIG_MAPPING[family](**layers, **switched, **NEEDED.get(family, {}))
    own = DynamicCache(config=config).layers
    windows = [layer.kv and (layer.kv.window or layer.kv.chunk) for layer in from_hf_config(config).layers]
    if seq2seq:  # transformers counts the encoder's layers, and never uses what there is beyond the decoder's
        found = vars(config)
        assert windows == [None] * found.get("decoder_layers", found.get("num_decoder_layers"))
        return
    if family == "dory":  # its model appends a cache for every run but the first
        own = own + own[2:5]
    assert windows == [getattr(layer, "sliding_window", None) for layer in own]
