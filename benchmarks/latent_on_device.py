"""Decode attention to rows of MLA (576 channels, one row a token for all heads), format by format.

One run on one GPU takes all figures, each in a CUDA graph of calls on buffers that rotate:

    python -m benchmarks.latent_on_device --out records/latent_h200.json

Queries are DeepSeek-V3's after its up-projection was absorbed: of 128 heads, and of 16, the share of one GPU of eight.
"""

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.written import write
from kvcore import environment
from kvcore.bench.timing import graph
from kvcore.bench.workloads import BLOCK, Setting
from kvcore.spec import FORMATS, Entries, LayerSpec
from kvcore.step import StepRequest, build_index

DIM = 576
FORMATS_TIMED = ("bf16", "v32_656", "v32_nvfp4_432")
SHAPES = ((64, 4096), (16, 32768), (1, 32768))
"""(requests, tokens of each)."""
HEADS = (16, 128)
APPENDED = 64


def setting_of(format: str, requests: int, tokens: int, device: str) -> Setting:
    """Two layers of requests whose last token is the step's; all of their rows are stored."""
    per = -(-tokens // BLOCK)
    rows = [
        StepRequest(slot=n, start=tokens - 1, new=1, blocks=list(range(n * per, (n + 1) * per)), stored=0)
        for n in range(requests)
    ]
    layer = LayerSpec(entries=Entries(dim=DIM, ratio=1, format=format))
    setting = Setting(layer, rows, requests * per, 2, device)
    prompts = [row._replace(start=0, new=tokens) for row in rows]
    index = setting.ops.index(build_index(prompts, max_blocks=per))
    for number, values in enumerate(setting.random(requests * tokens, DIM)):
        setting.ops.store_entries(setting.pools, number, index, values)
    return setting


def attention(format: str, requests: int, tokens: int, device: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each number of heads."""
    setting, rows = setting_of(format, requests, tokens, device), []
    for heads in HEADS:
        q = setting.random(requests, heads, DIM)
        calls = [
            lambda n=n, q=q: setting.ops.attend(setting.pools, n, setting.index, q[n]) for n in range(setting.layers)
        ]
        calls[0]()
        us = graph(calls, per_graph=4, repeats=repeats)
        nbytes = requests * tokens * (FORMATS[format].for_dim(DIM).row or 0) + 4 * requests * heads * DIM
        name = f"attend {format}, {requests} × {tokens:,}, {heads} heads"
        rows.append({"name": name, "format": format, "nbytes": nbytes, "us": round(us, 2)})
        print(f"{name:56s} {us:9.1f} us {nbytes / us / 1e6:5.2f} TB/s", flush=True)
    return rows


def appends(format: str, device: str) -> dict[str, Any]:
    """A token of each of many requests stored."""
    setting = setting_of(format, APPENDED, BLOCK, device)
    values = setting.random(APPENDED, DIM)
    calls = [
        lambda n=n: setting.ops.store_entries(setting.pools, n, setting.index, values[n]) for n in range(setting.layers)
    ]
    calls[0]()
    us, nbytes = graph(calls), APPENDED * (2 * DIM + FORMATS[format].for_dim(DIM).row)
    name = f"store {format}, T = {APPENDED}"
    print(f"{name:56s} {us:9.2f} us", flush=True)
    return {"name": name, "format": format, "nbytes": nbytes, "us": round(us, 2)}


def measured(device: str, repeats: int) -> Iterator[list[dict[str, Any]]]:
    """Rows as they are taken."""
    for shape in SHAPES:
        for format in FORMATS_TIMED:
            yield attention(format, *shape, device, repeats)
            gc.collect()
            torch.cuda.empty_cache()
    for format in FORMATS_TIMED:
        yield [appends(format, device)]


def written(rows: list[dict[str, Any]], out: Path | None) -> None:
    """The record of what there is, each row with the part of bf16's time that it takes."""
    plain = {row["name"]: row["us"] for row in rows}
    for row in rows:
        row["part_of_bf16"] = round(row["us"] / plain[row["name"].replace(row["format"], "bf16")], 3)
    record = {
        "figure": "decode attention to rows of MLA and their appends, format by format, one run",
        **environment.of_script(torch.cuda.get_device_name()),
        "rows": rows,
    }
    write(record, out)


def main() -> None:
    """Print all rows, and write them where asked, as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for some in measured("cuda", args.repeats):
            rows += some
            written(rows, args.out)


if __name__ == "__main__":
    main()
