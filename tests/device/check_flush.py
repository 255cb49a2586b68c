"""Compression on a CUDA device against the reference: prefills, chunks and decode steps, tails included."""

from itertools import product

import numpy as np
import torch

from kvcore.backends.reference import ReferenceOps
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.ops.choices import Declined
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail
from kvcore.step import StepRequest, build_index
from tests.device.checks_on_device import differing, poisoned
from tests.support.expected import as_bf16

LAYOUTS = ("packed", "planar")
IN_PLANAR = ("csa", "csa in chunks", "csa, long", "hca", "hca in chunks")
"""Cases for tails whose kv and score lie in two buffers: every kernel that reads or writes them."""


def check_flush(rng, device, layouts=LAYOUTS):
    """Pooling against the reference within a tolerance; tails and untouched bytes exactly."""
    shapes = [
        ("csa", 4, True, "v4_584", "index_fp4_68_h", [13, 8, 1, 4, 3]),
        ("csa prefill", 4, True, "v4_584", "index_fp8_132_h", [600, 131]),
        ("csa fp32", 4, True, "fp32", "fp32", [13, 80, 1]),
        ("hca", 128, False, "v4_584", None, [130, 256, 5, 127]),
        ("csa in chunks", 4, True, "v4_584", "index_fp8_132_h", [[70, 9], [1, 90], [133, 6]]),
        ("hca in chunks", 128, False, "v4_584", None, [[70, 200], [190, 70], [200, 1]]),
        ("csa, long", 4, True, "v4_584", "index_fp8_132_h", [[1, 6], [8300, 3], [8193, 5]]),
        ("ratio 2", 2, False, "v41_fp4_288", None, [9, 2, 1]),
        ("ratio 3", 3, True, "bf16", "bf16", [9, 2, 1, 31]),
    ]
    for layout, given in product(layouts, ("fp32", "bf16")):
        for name, *case in shapes:
            if layout == "packed" or name in IN_PLANAR:
                problems = flush_problems(rng, device, *case, given, layout=layout)
                yield f"flush {name} {given} {layout}", problems
        case = 4, True, "v4_584", "index_fp4_68_h", [13, 8, 1]
        problems = flush_problems(rng, device, *case, given, apart=True, layout=layout)
        yield f"flush, then tails {given} {layout}", problems


def flush_problems(rng, device, ratio, overlap, format, keys, news, given, after=None, *, apart=False, layout="packed"):
    """What went wrong over steps of ``news`` tokens a request, and ``after`` decode steps (default: past a window).

    ``news`` is one step's, or a list of steps; ``apart``: the tails are launches of their own.
    """
    steps = news if isinstance(news[0], list) else [news]
    index = (
        {}
        if keys is None
        else {
            "index_tail": Tail(dim=128, ratio=ratio, overlap=overlap),
            "index_keys": IndexKeys(dim=128, ratio=ratio, heads=1, topk=1, format=keys),
        }
    )
    layer = LayerSpec(
        tail=Tail(dim=512, ratio=ratio, overlap=overlap), entries=Entries(dim=512, ratio=ratio, format=format), **index
    )
    spec = CacheSpec(layers=[layer], block_tokens=4 * ratio)
    requests = len(steps[0])
    most = max(map(sum, zip(*steps, strict=True))) + 3 * ratio
    per = -(-most // (4 * ratio))
    tokens = per * requests * 4 * ratio
    plan = plan_cache(spec, max_requests=requests, max_tokens=tokens, max_draft_tokens=1, layout=layout)
    here, there = ReferenceOps(plan), TritonOps(plan, device)
    theirs, ours = here.allocate(), poisoned(there)
    for array in theirs.values():
        array.fill(0xFF)
    rope = Rope(dim=64, theta=160000.0)
    weight, index_weight = (1 + rng.random(512)).astype(np.float32), (1 + rng.random(128)).astype(np.float32)
    tails = ("tail", "index_tail") if keys else ("tail",)
    problems = [f"{role}: not the kernels'" for role in tails if isinstance(there.records[0, role], Declined)]
    starts = [0] * requests
    for step in steps + [[1] * requests] * (ratio + 1 if after is None else after):
        rows = [
            StepRequest(
                slot=requests - 1 - n, start=starts[n], new=new, blocks=list(range(n * per, n * per + per)), stored=0
            )
            for n, new in enumerate(step)
        ]
        host = build_index(rows, max_blocks=per, pad_tokens=sum(step) + 1, pad_requests=requests + 1)
        closed = sum((row.start + row.new) // ratio - row.start // ratio for row in rows)
        widths = [1024 if overlap else 512] * 2 + ([256 if overlap else 128] * 2 if keys else [])
        inputs = [rng.standard_normal((sum(step) + 1, width), np.float32) * 2 for width in widths]
        if given == "bf16":
            inputs = [as_bf16(array) for array in inputs]
        here.flush(
            theirs, 0, host, *inputs, closed=closed, norm_weight=weight, rope=rope, index_norm_weight=index_weight
        )
        here.append_tail(theirs, 0, host, *inputs[:2])
        if keys:
            here.append_index_tail(theirs, 0, host, *inputs[2:])
        tensors = [
            torch.from_numpy(array).to(device).to(torch.bfloat16 if given == "bf16" else torch.float32)
            for array in inputs
        ]
        where = there.index(host)
        options = {
            "closed": closed,
            "norm_weight": there.asarray(weight),
            "rope": rope,
            "index_norm_weight": there.asarray(index_weight),
        }
        if apart:
            there.flush(ours, 0, where, *tensors, **options)
            there.append_tail(ours, 0, where, *tensors[:2])
            there.append_index_tail(ours, 0, where, *tensors[2:])
        else:
            there.append_flush(ours, 0, where, *tensors, newest=max(step), **options)
        names = [name for role in tails for name, _ in plan.region(0, role)[0].buffers.values()]
        problems.append(differing(ours, {name: theirs[name] for name in names}))
        starts = [start + new for start, new in zip(starts, step, strict=True)]
        columns = max(start // ratio for start in starts)
        for role in ("entries", "index_keys") if keys else ("entries",):
            want = here.gather_all_entries(theirs, 0, host, columns=columns, role=role)
            got = there.gather_all_entries(ours, 0, where, columns=columns, role=role)
            want_values, got_values = want.values.astype(np.float32), got.values.float().cpu().numpy()
            live = want.positions >= 0
            off = np.abs(want_values - got_values)[live]
            # One code step of a group whose largest value is at most a few units.
            bound = {"fp32": 1e-4, "bf16": 0.04}.get(format if role == "entries" else keys, 1.1)
            if not off.size or np.isnan(got_values[live]).any() or off.max() > bound or (off > 0.001).mean() > 0.02:
                problems.append(
                    f"{role}: {off.max() if off.size else 'nothing'} off, {(off > 0.001).mean():.4f} of values"
                )
            untouched = sum(
                int((array == 0xFF).all(axis=1).sum()) for name, array in theirs.items() if f".{role}." in name
            )
            still = sum(int((array == 0xFF).all(dim=1).sum()) for name, array in ours.items() if f".{role}." in name)
            if untouched != still:
                problems.append(f"{role}: {untouched - still} blocks written that should not be")
    return "; ".join(problem for problem in problems if problem)
