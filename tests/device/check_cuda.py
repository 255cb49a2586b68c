"""Compare the Triton kernels with the reference on a CUDA device, byte for byte, and write what was found as JSON.

    python -m tests.device.check_cuda --out check.json [--quick]

Pools are filled with 0xFF first and compared whole. Inputs are new in every run; the seed is in the record.
"""

import argparse
import json
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import ml_dtypes
import numpy as np

from kvcore import environment
from kvcore.plan import plan_cache
from kvcore.spec import FORMATS, KV, CacheSpec, Entries, IndexKeys, LayerSpec, Window
from kvcore.step import StepRequest, build_index
from tests.support.expected import as_bf16, decoded, encoded, images, random_values

CLASSIC = ("bf16", "fp16", "fp32", "int8_row", "fp8_row", "nf4_b64", "mxfp4")
OF_ONE_TOKEN = [name for name, format in sorted(FORMATS.items()) if format.tokens == 1]
GLOBAL_SCALE = 0.37


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shard", help="k/n: only every n-th format, from k on; rest: all but the formats")
    arguments = parser.parse_args()
    seed = secrets.randbits(63)
    sizes = [1, 2, 3, 17, 64, 255, 1000] + ([] if arguments.quick else [8192, 65536])
    part = arguments.shard or "0/1"
    shard, shards = (0, 1) if part == "rest" else map(int, part.split("/"))
    names = [] if part == "rest" else OF_ONE_TOKEN[shard::shards]
    tasks = [(name, count, dtype, seed) for name, count, dtype in product(names, sizes, ("fp32", "bf16"))]
    began = time.time()
    results, failures = [], []
    # Workers are forked before CUDA starts; they compute the reference's bytes, this process the kernels'.
    with ProcessPoolExecutor(max_workers=max(1, 14 // shards)) as workers:
        futures = [workers.submit(reference_rows, *task) for task in tasks]
        from tests.device import checks_on_device as device
        from tests.device import rest_on_device

        for task, future in zip(tasks, futures, strict=True):
            name, count, dtype, _ = task
            for what, problem in device.check_format(*task[:3], *future.result(), arguments.device):
                results.append({"format": name, "count": count, "input": dtype, "what": what, "ok": not problem})
                if problem:
                    failures.append(f"{name} {count} {dtype} {what}: {problem}")
    print(f"formats: {len(results)} checks, {time.time() - began:.1f} s", flush=True)
    for what, problem in rest_on_device.check_rest(seed, arguments.device) if arguments.shard in (None, "rest") else ():
        results.append({"what": what, "ok": not problem})
        print(what, problem or "ok", flush=True)
        if problem:
            failures.append(f"{what}: {problem}")
    import torch

    record = {
        **environment.of_script(torch.cuda.get_device_name() if torch.cuda.is_available() else ""),
        "seed": seed,
        "checks": len(results),
        "failures": failures,
        "results": results,
    }
    with open(arguments.out, "w") as file:
        json.dump(record, file, indent=1)
    print(f"{len(results)} checks, {len(failures)} failures, {time.time() - began:.1f} s")
    print("\n".join(failures[:40]))
    sys.exit(bool(failures))


def case_of(name: str, layout: str, count: int):
    """(plan, index, units and rows of the tokens in window and blocks) for ``count`` tokens or entries of a format."""
    format = FORMATS[name]
    dim = format.dim or 128
    requests = max(1, min(count, 500) if count < 4000 else count // 128)
    each, extra = divmod(count, requests)
    news = [each + (n < extra) for n in range(requests)]
    ring = max(news) + 3
    scale = {"global_scale": GLOBAL_SCALE} if format.global_scaled else {}
    keys = IndexKeys(dim=dim, ratio=1, heads=1, topk=1, format=name, **scale)
    layer = {"index_keys": keys, "entries": Entries(dim=dim, ratio=1, format="bf16" if format.global_scaled else name)}
    if not format.global_scaled:
        layer["window"] = Window(dim=dim, window=ring, format=name)
    if name in CLASSIC:
        layer = {"kv": KV(key_heads=3, key_dim=dim, key_format=name, storage="paged")}
    spec = CacheSpec(layers=[LayerSpec(**layer)], block_tokens=64)
    blocks = [-(-(new + 5) // 64) for new in news]
    plan = plan_cache(spec, max_requests=requests + 2, max_tokens=64 * (sum(blocks) + 3), layout=layout)
    order = np.random.default_rng(count).permutation(plan.blocks)
    firsts = np.concatenate([[0], np.cumsum(blocks)])
    rows = [
        StepRequest(slot=requests + 1 - n, start=5, new=new, blocks=order[firsts[n] : firsts[n + 1]].tolist(), stored=0)
        for n, new in enumerate(news)
    ]
    index = build_index(rows, max_blocks=max(blocks), pad_tokens=count + 2, pad_requests=requests + 1)
    return plan, index


def reference_rows(name: str, count: int, dtype: str, seed: int):
    """(values fp32, canonical rows, decoded rows as raw bits) of one case; heads of classic layers are rows."""
    format = FORMATS[name].for_dim(FORMATS[name].dim or 128)
    rng = np.random.default_rng([seed, count, sorted(FORMATS).index(name), dtype == "bf16"])
    rows = count * (3 if name in CLASSIC else 1)
    values = random_values(rng, rows, format.dim or 0)
    if dtype == "bf16":
        values = as_bf16(values)
    scale = GLOBAL_SCALE if format.global_scaled else 1.0
    stored = encoded(format, values, scale)
    back = decoded(format, stored, scale)
    return values, stored, back.view(np.uint16 if back.dtype == ml_dtypes.bfloat16 else np.uint32)


def images_of(plan, region, index, rows):
    """What the region's pools must hold after the case's tokens were stored."""
    request = index.request_index[index.request_index >= 0]
    position = index.positions[index.request_index >= 0]
    paged = region.growth == "block"
    unit = index.block_table[request, position // region.rows] if paged else index.slots[request]
    row = position % region.rows
    head = np.arange(region.heads)
    unit, row = np.repeat(unit, region.heads), (row[:, None] * region.heads + head).reshape(-1)
    return images(region, plan.units(region), unit, row, rows)


if __name__ == "__main__":
    main()
