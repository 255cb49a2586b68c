"""A decode step beside the caches of transformers, in one process: cache update and attention of a stack of layers.

``python -m benchmarks.beside_transformers [--out FOLDER]``. One row of a batch, one new token a step, Llama-like
layers; projections and everything else that a model does are left out. There are sixteen layers, as in a small model: a
step of kvcore is opened and committed once for all, which would weigh more in a lower stack. Every cache gets the same
keys, values and queries, and its result is compared with DynamicCache's. Steps of all caches alternate; what counts is
the median of the processor time of the one thread that is used. The cache is cropped back after each step, outside of
the time. At 16,384 tokens of fp32 the caches of a round take 7 GB together. QuantizedCache, of 4 bits, is beside the
full layers where ``optimum-quanto`` is installed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.written import markdown, versions_of, write
from kvcore import environment
from kvcore.interop.transformers import KVCache

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 64, 16
WINDOWS = (1024, 4096)
CONTEXTS = (1024, 4096, 16384)
CHUNK = 1024  # tokens of a prefill step
FORMATS = ("int8_row", "nf4_b64", "int4_g32")
OVER_TOKENS = "int4_ch32"  # no window keeps it
MOST_DECODED = 4096
"""Tokens of contexts whose coded rows are decoded for the model, too, which takes seconds of longer ones."""

HELD = ("keys", "values", "_quantized_keys", "_quantized_values")
"""Tensors of a layer of transformers; the last two where it quantises."""


class Contender(NamedTuple):
    """One cache: store a layer's k and v [1, heads, tokens, dim]; a step of all layers; go back; bytes held."""

    name: str
    fill: Callable[[int, torch.Tensor, torch.Tensor], Any]
    step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    back: Callable[[int], None]
    nbytes: Callable[[], int]
    exact: bool


def config(window: int | None) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": LAYERS,
    }
    return MistralConfig(**sizes, sliding_window=window) if window else LlamaConfig(**sizes)


def mean(found: list[torch.Tensor]) -> torch.Tensor:
    """Of what the layers gave: code that is compiled leaves out a layer that nobody asks."""
    return sum(found[1:], found[0]) / len(found)


class Stack(PreTrainedModel):
    """The decoder of a model, of which only the layers' attention is left; it looks that up as models do."""

    config_class = PreTrainedConfig
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)
        self.layer = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, config=self.config)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any = None, most: int | None = None
    ) -> torch.Tensor:
        """``most``: rows that the cache hands out, if there are some that don't count: a mask leaves them out."""
        found: list[torch.Tensor] = []
        mask = None if most is None else (torch.arange(most) <= cache.get_seq_length())[None, None, None]
        for layer in range(LAYERS):
            keys, values = cache.update(k, v, layer)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
            found.append(attend(self.layer, q, keys, values, mask, scaling=DIM**-0.5)[0])
        return mean(found)


def of_model(name: str, cache: Any, model: Any, *, exact: bool = True, most: int | None = None) -> Contender:
    """What ``generate`` does: whoever the cache says attends."""

    def fill(layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        return cache.update(k, v, layer)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return model(q, k, v, cache=cache, most=most)

    return Contender(name, fill, step, cache.crop, partial(bytes_held, cache), exact)


def of_transformers(name: str, cache: Any, model: Stack, **options: Any) -> Contender:
    """The same, of a cache that goes back because it was told to keep what it needs for that."""
    cache.activate_past_recording()
    return of_model(name, cache, model, **options)


def bytes_held(cache: Any) -> int:
    """Of any cache."""
    return cache.nbytes if isinstance(cache, KVCache) else bytes_of_layers(cache)


def bytes_of_layers(cache: Any) -> int:
    """Of a cache of transformers, whether it quantises or not."""
    return sum(bytes_of(getattr(layer, name, None)) for layer in cache.layers for name in HELD)


def bytes_of(tensor: Any) -> int:
    """Of a tensor; of those that one is made of, or that a tuple or dict holds; none of anything else."""
    if isinstance(tensor, (tuple, dict)):
        return sum(bytes_of(each) for each in (tensor.values() if isinstance(tensor, dict) else tensor))
    if not isinstance(tensor, torch.Tensor):
        return 0
    parts = getattr(tensor, "__tensor_flatten__", None)
    return tensor.nbytes if parts is None else sum(bytes_of(getattr(tensor, name)) for name in parts()[0])


def by_kvcore(name: str, cache: KVCache, *, exact: bool = True) -> Contender:
    """The cache attends itself."""

    def fill(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        with cache.forward(layer, k) as handle:
            handle.append_kv(k[0].transpose(0, 1), v[0].transpose(0, 1))
            cache.finish(layer)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for layer in range(LAYERS):
            with cache.forward(layer, k) as handle:
                handle.append_kv(k[0].transpose(0, 1), v[0].transpose(0, 1))
                found.append(handle.attend(q[0].transpose(0, 1)).out[None])
                cache.finish(layer)
        return mean(found)

    return Contender(name, fill, step, cache.crop, lambda: cache.nbytes, exact)


def compiled_contenders(context: int, dtype: torch.dtype, window: int | None) -> list[Contender]:
    """Caches of fixed shapes in compiled code, one graph each, beside DynamicCache as it is."""
    model, most = Stack(config(window), dtype), context + 64
    torch.compiler.reset()
    dynamic = of_transformers("DynamicCache", DynamicCache(config=model.config), model)
    static = StaticCache(config=model.config, max_cache_len=most)
    static.activate_past_recording()
    caches: dict[str, Any] = {"StaticCache, compiled": static} if window is None else {}
    for form in (None, "int8_row"):
        for asked in ("auto", "model"):
            caches[f"kvcore{'' if form is None else ' ' + form}, attention={asked}, compiled"] = KVCache(
                model, batch=1, max_length=most, max_draft_tokens=4, static=True, formats=form, attention=asked
            )
    run = torch.compile(model, fullgraph=True, dynamic=False)
    return [
        dynamic,
        *(of_model(name, cache, run, exact="int8" not in name, most=most) for name, cache in caches.items()),
    ]


def contenders(context: int, dtype: torch.dtype, window: int | None) -> list[Contender]:
    model = Stack(config(window), dtype)
    options: dict[str, Any] = {"batch": 1, "max_length": context + 64, "max_draft_tokens": 4}

    def kv(**more: Any) -> KVCache:
        return KVCache(model, **options, **more)

    found = [of_transformers("DynamicCache", DynamicCache(config=model.config), model)]
    if window is None:
        # Its sliding layers cannot go back; and it runs without torch.compile here, which it was made for.
        static = StaticCache(config=model.config, max_cache_len=context + 64)
        found.append(of_transformers("StaticCache", static, model, most=context + 64))
        if find_spec("optimum"):
            found.append(of_transformers("QuantizedCache", QuantizedCache("quanto", model.config), model, exact=False))
    formats = FORMATS if window else (*FORMATS, OVER_TOKENS)
    found += [
        of_model("kvcore", kv(), model),
        of_model("kvcore, attention=model", kv(attention="model"), model),
        of_model(
            "kvcore, paged" if window is None else "kvcore, slot", kv(storage="slot" if window else "paged"), model
        ),
        by_kvcore("kvcore, attend", kv(attention="model")),
        *(of_model(f"kvcore {form}", kv(formats=form), model, exact=False) for form in formats),
        by_kvcore("kvcore int8_row, attend", kv(formats="int8_row", attention="model"), exact=False),
    ]
    if context <= MOST_DECODED:
        by_model = kv(formats="int8_row", attention="model")
        found.append(of_model("kvcore int8_row, attention=model", by_model, model, exact=False))
    return found


def states(tokens: int, dtype: torch.dtype, random: torch.Generator) -> list[torch.Tensor]:
    """q, k, v [1, heads, tokens, dim]."""
    return [torch.randn(1, heads, tokens, DIM, generator=random).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def measure(found: list[Contender], context: int, dtype: torch.dtype, steps: int, layers: str) -> list[dict[str, Any]]:
    """One row of the table for each cache."""
    random = torch.Generator().manual_seed(0)
    for start in range(0, context, CHUNK):
        _, k, v = states(min(CHUNK, context - start), dtype, random)
        for each in found:
            for layer in range(LAYERS):
                each.fill(layer, k, v)
            each.back(0)
    q, k, v = states(1, dtype, random)
    wanted = None
    times: dict[str, list[float]] = {each.name: [] for each in found}
    for _ in range(steps):
        for each in found:
            start = time.process_time()
            out = each.step(q, k, v)
            times[each.name].append(time.process_time() - start)
            each.back(-1)
            wanted = out if wanted is None else wanted
            close = (2e-2 if dtype == torch.bfloat16 else 1e-4) if each.exact else 0.2
            torch.testing.assert_close(out.float(), wanted.float(), rtol=close, atol=close)
    dynamic = statistics.median(times["DynamicCache"])
    return [
        {
            "context": context,
            "layers": layers,
            "dtype": str(dtype).removeprefix("torch."),
            "cache": each.name,
            "step_ms": round(1e3 * statistics.median(times[each.name]), 3),
            "of_dynamic": round(statistics.median(times[each.name]) / dynamic, 3),
            "nbytes": each.nbytes(),
        }
        for each in found
    ]


def as_table(record: dict[str, Any]) -> str:
    rows = (
        f"{row['layers']} | {row['dtype']} | {row['context']:,} | {row['cache']} | {row['step_ms']:.2f} ms "
        f"| {row['of_dynamic']:.2f} | {row['nbytes']:,}"
        for row in record["rows"]
    )
    columns = "layers | numbers | context: | cache | step: | of DynamicCache: | bytes held:"
    return markdown(f"{record['stack']}; one thread; {versions_of(record)}.", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--compiled", action="store_true", help="caches of fixed shapes, in compiled code, and no others"
    )
    parser.add_argument("--windows", type=int, nargs="*", default=list(WINDOWS), help="of sliding layers")
    parser.add_argument("--out", type=Path, help="folder for beside_transformers.json and .md, or ..._compiled")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    make = compiled_contenders if chosen.compiled else contenders
    record: dict[str, Any] = {
        "stack": f"{LAYERS} layers, {HEADS} query and {KV_HEADS} key-value heads of {DIM}",
        **environment.of_script(),
        "steps": chosen.steps,
        "quantised_cache": "quanto, 4 bits" if find_spec("optimum") else "left out: no optimum-quanto",
        "rows": [],
    }
    for window in (None, *chosen.windows):
        for name in chosen.dtypes:
            for context in chosen.contexts:
                if window is not None and context < window:
                    continue
                dtype, layers = getattr(torch, name), f"sliding, {window:,}" if window else "full"
                with torch.no_grad():
                    rows = measure(make(context, dtype, window), context, dtype, chosen.steps, layers)
                record["rows"] += rows
                for row in rows:
                    print(
                        row["layers"],
                        name,
                        context,
                        f"{row['cache']}: {row['step_ms']} ms, {row['of_dynamic']}",
                        flush=True,
                    )
    if chosen.out is not None:
        name = f"beside_transformers{'_compiled' if chosen.compiled else ''}.json"
        write(record, chosen.out / name, md=as_table(record))


if __name__ == "__main__":
    main()
