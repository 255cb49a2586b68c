"""SmolLM2-135M-Instruct, read from disk, on kvcore caches. The demo runs the same on more tokens and formats."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from benchmarks import quality
from kvcore.interop.transformers import KVCache

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def smollm2(example):
    model, tokenizer = example.load()
    example.multiply_in_fp32(model)
    return model, tokenizer


@pytest.fixture(scope="module")
def prompts(example, smollm2):
    _, tokenizer = smollm2
    return tokenizer(list(example.PROMPTS), return_tensors="pt", padding=True)  # of different lengths, padded left


def greedy(model, prompts, cache):
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(**prompts, cache=cache, **options)[:, -NEW_TOKENS:]


@pytest.fixture(scope="module")
def opening(example, smollm2):
    """Tokens of the bundled text's opening."""
    _, tokenizer = smollm2
    return tokenizer(example.TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :256]


def loss(model, text, cache):
    with torch.no_grad():
        logits = torch.cat([model(piece, cache=cache).logits[0].float() for piece in text.split(100, dim=1)])
    return torch.nn.functional.cross_entropy(logits[:-1], text[0, 1:])


@pytest.fixture(scope="module")
def own_loss(smollm2, opening):
    model, _ = smollm2
    return loss(model, opening, DynamicCache(config=model.config))


def test_bf16_cache_gives_the_models_own_tokens(smollm2, prompts):
    model, _ = smollm2
    length = prompts.input_ids.shape[1] + NEW_TOKENS
    own = greedy(model, prompts, DynamicCache(config=model.config))
    ours = greedy(model, prompts, KVCache(model, batch=len(own), max_length=length))
    assert torch.equal(own, ours)


@pytest.mark.parametrize(("form", "factor"), [("fp8_row", 1.05), ("int8_row", 1.05), ("nf4_b64", 1.25)])
def test_quantised_caches_keep_the_text_likely(smollm2, opening, own_loss, form, factor):
    """Perplexity on the opening of the bundled text rises by little; a wrong scale would multiply it."""
    model, _ = smollm2
    ours = loss(model, opening, KVCache(model, batch=1, max_length=256, formats=form))
    assert (ours - own_loss).exp() <= factor


def test_quality_of_formats(monkeypatch, smollm2):
    """300 tokens and 2 prompts tell a format of 4 bits from the baseline, and fp32 from neither."""
    monkeypatch.setattr(quality.language_model, "load", lambda: smollm2)
    record = list(quality.run(["bf16", "fp32", "nf4_b64"], tokens=300, prompts=2, new=4, say=str))[-1]
    baseline, exact, small = record["rows"]
    assert [row["bits_per_element"] for row in record["rows"]] == [16, 32, 4.5]
    assert baseline["greedy_tokens_same"] == 8
    assert abs(exact["perplexity_against_baseline"]) < 0.01
    assert 0.01 < small["perplexity_against_baseline"] < 1
    assert quality.as_table(record).count("\n") == 7
    assert quality.as_svg(record).count("<circle") == 3
