"""A decode step of DeepSeek-V4's layers beside transformers' own cache of them, in one process.

``python -m benchmarks.beside_transformers_v4 [--device cuda] [--out FOLDER]``. A random model of six layers (a window
of 128, CSA of ratio 4 with an indexer, HCA of ratio 128) with heads of 512 and narrow everything else, so that a step
is mostly attention and what belongs to it. Every cache runs the same prompt in chunks and then the same tokens, one a
step; steps of all caches alternate, and their logits are compared. What counts is the median time of a step: of the
processor's on a CPU, and until the device has finished on a GPU.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from benchmarks.written import markdown, versions_of, write
from kvcore import environment
from kvcore.interop.transformers import KVCache

KINDS = ("sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse", "heavily_compressed")
CPU, CUDA = ("1x1024", "1x4096"), ("1x4096", "1x16384", "8x16384")
"""rows x tokens of context"""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the logits' range: how far two caches' may lie apart. Sums are taken in another order, and what is rounded is."""


def model_of(dtype: torch.dtype, device: str, *, tiny: bool) -> DeepseekV4ForCausalLM:
    head, hidden, heads = (64, 128, 4) if tiny else (512, 1024, 32)
    config = DeepseekV4Config(
        vocab_size=1024,
        hidden_size=hidden,
        moe_intermediate_size=64,
        num_hidden_layers=1 + len(KINDS),
        num_attention_heads=heads,
        head_dim=head,
        qk_rope_head_dim=head // 8,
        q_lora_rank=256,
        o_groups=2,
        o_lora_rank=128,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=["sliding_attention", *(f"{kind}_attention" for kind in KINDS)],
        mlp_layer_types=["moe"] * (1 + len(KINDS)),
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        sliding_window=128,
        index_n_heads=heads // 2,
        index_head_dim=head // 4,
        index_topk=64 if tiny else 512,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = DeepseekV4ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    random = torch.Generator(device).manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith(("position_bias", "sinks")):
            weight.data.normal_(0, 0.5, generator=random)
    return model


def nbytes(held: Any) -> int:
    """Of all tensors that a cache of transformers holds."""
    if isinstance(held, torch.Tensor):
        return held.nbytes
    if isinstance(held, dict):
        return sum(map(nbytes, held.values()))
    return sum(map(nbytes, held)) if isinstance(held, (list, tuple)) else 0


def held(cache: Any) -> int:
    return cache.nbytes if isinstance(cache, KVCache) else sum(nbytes(vars(layer)) for layer in cache.layers)


@torch.inference_mode()
def measure(model: Any, batch: int, context: int, steps: int, chunk: int) -> list[dict[str, Any]]:
    """One row for each cache."""
    device, config = model.device, model.config
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    random = torch.Generator(device).manual_seed(2)
    ids = torch.randint(1, config.vocab_size, (batch, context + steps + 4), device=device, generator=random)
    options: dict[str, Any] = {"batch": batch, "max_length": ids.shape[1]}
    made: dict[str, Callable[[], Any]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "kvcore": lambda: KVCache(model, **options),
        "kvcore, attention=model": lambda: KVCache(model, attention="model", **options),
    }
    caches = {name: make() for name, make in made.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for cache in caches.values():
        for start in range(0, context, chunk):
            model(ids[:, start : min(start + chunk, context)], cache=cache, use_cache=True, logits_to_keep=1)
    apart = dict.fromkeys(caches, 0.0)
    gc.collect()
    gc.disable()
    for step in range(steps + 4):
        token, wanted = ids[:, context + step : context + step + 1], None
        for name, cache in caches.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            logits = model(token, cache=cache, use_cache=True).logits
            if device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 4:  # the first ones compile kernels
                times[name].append(clock() - start)
            wanted = logits.float() if wanted is None else wanted
            apart[name] = max(apart[name], float((logits.float() - wanted).abs().max() / wanted.abs().max()))
    gc.enable()
    worst = max(apart.values())
    if worst > CLOSE[model.dtype]:
        raise AssertionError(f"logits {worst} of their range apart: {apart}")
    dynamic = statistics.median(times["DynamicCache"])
    return [
        {
            "batch": batch,
            "context": context,
            "dtype": str(model.dtype).removeprefix("torch."),
            "cache": name,
            "step_ms": round(1e3 * statistics.median(times[name]), 3),
            "of_dynamic": round(statistics.median(times[name]) / dynamic, 3),
            "nbytes": held(cache),
            "logits_apart": round(apart[name], 6),
        }
        for name, cache in caches.items()
    ]


def as_table(record: dict[str, Any]) -> str:
    rows = (
        f"{row['dtype']} | {row['batch']} × {row['context']:,} | {row['cache']} | {row['step_ms']:.2f} ms "
        f"| {row['of_dynamic']:.2f} | {row['nbytes']:,} | {row['logits_apart']:.1e}"
        for row in record["rows"]
    )
    columns = "numbers | batch × context: | cache | step: | of DynamicCache: | bytes held: | logits apart:"
    return markdown(f"{record['model']}; {record['device']}; {versions_of(record)}.", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", nargs="+", help="rows x tokens, as in 1x4096")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt's forward")
    parser.add_argument("--seconds", type=float, default=600, help="scenes that begin later are left out")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs")
    parser.add_argument("--out", type=Path, help="folder for beside_transformers_v4_DEVICE.json and .md")
    chosen, began = parser.parse_args(arguments), time.monotonic()
    torch.set_num_threads(1)
    cuda = chosen.device.startswith("cuda")
    record: dict[str, Any] = {
        "model": "six layers of DeepSeek-V4's kinds, heads of " + ("64" if chosen.tiny else "512, 32 of them"),
        **environment.of_script(torch.cuda.get_device_name() if cuda else ""),
        "steps": chosen.steps,
        "left_out": [],
        "rows": [],
    }
    for name in chosen.dtypes or (("bfloat16",) if cuda else ("float32", "bfloat16")):
        model = model_of(getattr(torch, name), chosen.device, tiny=chosen.tiny)
        for scene in chosen.scenes or (CUDA if cuda else CPU):
            if time.monotonic() - began > chosen.seconds:
                record["left_out"].append(f"{name}, {scene}")
                continue
            rows = measure(model, *map(int, scene.split("x")), chosen.steps, chosen.chunk)
            record["rows"] += rows
            for row in rows:
                print(json.dumps(row), flush=True)
            if chosen.out is not None:
                path = chosen.out / f"beside_transformers_v4_{'cuda' if cuda else 'cpu'}.json"
                write(record, path, md=as_table(record))


if __name__ == "__main__":
    main()
