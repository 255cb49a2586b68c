"""The verbs that read, on a CUDA device, against fp64: writes what was found as JSON.

    python -m tests.device.reading_on_device --out reading.json [--workers 14]

The commit is taken from KVCORE_COMMIT.
"""

import argparse
import json
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from kvcore import environment
from kvcore.backends.torch_triton import flash
from kvcore.spec import FORMATS
from tests.device import check_attention, check_classic, check_groups, check_indexer
from tests.device.check_attention import layer_of
from tests.device.check_indexer import keys_layer
from tests.device.reading_scene import scene

Case = Iterator[tuple[str, str]]
MILLION = 1 << 20
BOTH = (
    "v4_584", "v41_528", "v41_fp4_288", "v32_656", "row_580", "mxfp4_368", "v4_nvfp4_384", "v32_nvfp4_432", "bf16",
    "fp32",
)  # fmt: skip


def attention_cases(device: str) -> Iterator[Case]:
    """Formats, heads, drafts, empty selections, and one request of a token beside one of a million."""
    for name in BOTH:
        layer = layer_of(name, name, dim=FORMATS[name].dim or 512)
        yield check_attention.check(f"{name}, 64 heads", layer, [5003, 129, 1], [1, 1, 1], device, count=512)
        yield check_attention.check(
            f"{name}, fp32 queries", layer, [777, 130], [1, 2], device, heads=7, count=33, dtype=torch.float32
        )
    v4 = layer_of("v4_584", "v4_584")
    for drafts in (2, 3, 4):
        yield check_attention.check(f"{drafts} tokens each", v4, [4001, 77, 9000], [drafts] * 3, device, count=512)
    yield check_attention.check("128 heads", v4, [4001, 77], [1, 2], device, heads=128, count=512)
    yield check_attention.check("many requests", v4, [300 + 17 * n for n in range(150)], [1] * 150, device, count=512)
    yield check_attention.check("nothing selected", v4, [4001, 1], [1, 1], device, count=0)
    yield check_attention.check("nothing at all", layer_of(None, "v4_584"), [4001, 1], [1, 1], device, count=0)
    yield check_attention.check(
        "V4.1", layer_of("v41_528", "v41_fp4_288", ratio=1), [900, 4], [2, 1], device, count=512
    )
    yield check_attention.check("window alone", layer_of("v4_584", None), [900, 4], [2, 1], device)
    hca = layer_of("v4_584", "v4_584", ratio=128)
    yield check_attention.check("HCA, all entries", hca, [131072, 127, 5001], [1, 1, 4], device)
    yield check_attention.check("HCA, a token beside a million", hca, [MILLION + 77, 1], [1, 1], device)
    yield check_attention.check("CSA, a token beside a million", v4, [MILLION + 3, 1], [1, 1], device, count=1024)
    for what, requests in (("split", [5003, 129, 1]), ("whole", [300 + 17 * n for n in range(150)])):
        given = {"count": 512, "rope": check_attention.V4_ROPE}
        yield check_attention.check(f"CSA, {what}, turned back", v4, requests, [1] * len(requests), device, **given)
    given = {"rope": check_attention.V4_ROPE}
    yield check_attention.check("HCA, turned back", hca, [131072, 127, MILLION + 77], [1, 1, 4], device, **given)
    yield check_attention.turned_alone(device)
    if torch.device(device).type == "cuda":
        yield check_attention.captured(device)
    yield check_attention.flash_rows(device)
    if not flash.unusable():
        given = {"count": 512, "flash_mla": True, "rope": check_attention.V4_ROPE}
        yield check_attention.check("through FlashMLA", v4, [5003, 129, 1], [1, 1, 1], device, **given)
        yield check_attention.check("through FlashMLA, 128 heads", v4, [4001, 77], [2, 2], device, heads=128, **given)
        yield check_attention.check("through FlashMLA, few picks", v4, [4001] * 70, [1] * 70, device, **given)
    for dtype in (torch.bfloat16, torch.float32):
        yield check_attention.own_rows(
            f"v4_584, {dtype}", v4, [900, 301], [700, 301], device, heads=64, count=128, dtype=dtype
        )
    yield check_attention.own_rows("HCA", hca, [900, 301], [700, 301], device, heads=64, count=None)


def mla_cases(device: str) -> Iterator[Case]:
    """Rows of 576 channels, one a token: few and many requests, every row and picks; e2m1 codes of other rows, too."""
    for name in ("bf16", "v32_656", "v32_nvfp4_432"):
        mla = layer_of(None, name, dim=576, ratio=1)
        for heads in (16, 128):
            for news in (1, 3):
                yield check_attention.check(
                    f"MLA, {name}, {heads} heads, {news} tokens each", mla, [5003, 129, 4], [news] * 3, device,
                    heads=heads, sink=False,
                )  # fmt: skip
        many = [300 + 17 * n for n in range(150)]
        for heads in (16, 64):
            given = {"heads": heads, "sink": False}
            yield check_attention.check(f"MLA, {name}, {heads} heads, many", mla, many, [1] * 150, device, **given)
            yield check_attention.check(
                f"MLA, {name}, {heads} heads, many, picks", mla, many, [1] * 150, device, count=200, **given
            )
        yield check_attention.check(
            f"MLA, {name}, fp32 queries", mla, [777, 130], [1, 2], device, heads=7, dtype=torch.float32
        )
    yield check_attention.rows_in_words(device)
    for name in ("v41_fp4_288", "mxfp4_368", "v4_nvfp4_384", "v32_nvfp4_432"):
        layer = layer_of(name, name, dim=FORMATS[name].dim or 512)
        yield check_attention.check(
            f"{name}, planar", layer, [5003, 129, 1], [1, 1, 1], device, count=512, layout="planar"
        )


def indexer_cases(device: str) -> Iterator[Case]:
    """Formats, weights, contexts up to a million tokens; top-k of awkward rows."""
    for name in (
        "index_fp8_132",
        "index_fp8_132_h",
        "index_fp4_68",
        "index_fp4_68_h",
        "index_fp8_132_fp32scale",
        "index_nvfp4",
        "bf16",
    ):
        for dtype in (torch.bfloat16, torch.float32, check_indexer.E4M3):
            what = f"{name}, {dtype}"
            yield check_indexer.check(what, keys_layer(name), [20011, 5, 1, 1030], [3, 1, 1, 2], device, dtype=dtype)
    for news in (4, 25):
        what = f"{news} queries of a long context"
        yield check_indexer.check(
            what, keys_layer("index_fp8_132"), [MILLION * 7 // 10], [news], device, dtype=check_indexer.E4M3
        )
    fp4 = keys_layer("index_fp4_68")
    for weights in ("negative", "zero queries", "large queries"):
        yield check_indexer.check(weights, fp4, [9000, 77], [1, 1], device, weights=weights)
    for name in ("index_fp4_68", "index_fp8_132", "index_fp8_132_h"):
        for block in (256, 32):
            what, lengths = f"{name}, many queries of some requests, blocks of {block}", [4000, 300, 77, 5]
            yield check_indexer.check(what, keys_layer(name), lengths, [9, 1, 6, 4], device, block_tokens=block)
    yield check_indexer.check("scales far apart", fp4, [9000, 77], [1, 1], device, spread=20.0)
    yield check_indexer.check(
        "32 heads, ratio 1", keys_layer("index_fp4_68", ratio=1), [3001, 9], [1, 2], device, heads=32
    )
    yield check_indexer.check(
        "a token beside a million", keys_layer("index_fp4_68_h"), [MILLION + 77, 1], [1, 1], device
    )
    for name in ("index_fp4_68", "index_fp8_132", "index_fp4_68_h"):
        for heads, count in ((64, 70), (32, 9)):
            what, lengths = f"{name}, a token of {4 * count} requests", [20011, 5, 1, 1030] * count
            yield check_indexer.of_wide_tables(what, keys_layer(name), lengths, device, heads=heads)
    yield check_indexer.long_runs(device)
    found = scene(keys_layer("bf16"), [8], [1], device)
    sizes = [(16384, 512), (262144, 512), (262144, 1024), (1000, 512), (70001, 64), (5, 512)]
    yield check_indexer.check_select(device, sizes, found.ops)
    for rows, n in ((1, 262144), (4, 65536), (2, 40001)):
        yield check_indexer.check_select(device, [(n, 512)], found.ops, rows=rows)
    for n, k in ((16384, 512), (262144, 512), (70001, 1000)):
        yield check_indexer.many_rows(device, n, k, found.ops)


def run(shard: int, shards: int, names: list[str], device: str, seed: int) -> list[dict[str, object]]:
    """Every ``shards``-th case of the groups; what a case raises is a finding."""
    torch.manual_seed(seed + shard)
    found = []
    cases = [case for name in names for case in GROUPS[name](device)]
    for number in range(shard, len(cases), shards):
        try:
            answers = list(cases[number])
        except Exception as error:  # noqa: BLE001
            answers = [(f"case {number}", "".join(traceback.format_exception(error))[-1500:])]
        for what, problem in answers:
            found.append({"what": what, "ok": not problem, **({"problem": problem} if problem else {})})
            if problem:
                print(what, problem, flush=True)
    return found


GROUPS = {
    "attention": attention_cases,
    "classic": check_classic.large,
    "groups": check_groups.large,
    "indexer": indexer_cases,
    "mla": mla_cases,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", choices=list(GROUPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes, since most of the time goes to compilation")
    arguments = parser.parse_args()
    names = arguments.only or list(GROUPS)
    began, seed = time.time(), secrets.randbits(40)
    if arguments.workers == 1:
        results = run(0, 1, names, arguments.device, seed)
    else:
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as workers:
            shards = arguments.workers * 3
            tasks = [workers.submit(run, n, shards, names, arguments.device, seed) for n in range(shards)]
            results = [found for task in tasks for found in task.result()]
    failures = [found["what"] for found in results if not found["ok"]]

    cuda = torch.device(arguments.device).type == "cuda"
    record = {
        "kind": "reading",
        **environment.of_script(torch.cuda.get_device_name() if cuda else ""),
        "seed": seed,
        "checks": len(results),
        "failures": failures,
        "results": results,
    }
    with open(arguments.out, "w") as file:
        json.dump(record, file, indent=1)
    print(f"{len(results)} checks, {len(failures)} failures, {time.time() - began:.1f} s", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
