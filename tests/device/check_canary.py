"""Check words that launches write and look at, beside the host's."""

from collections.abc import Iterator

import numpy as np
import torch

from kvcore.backends.torch_triton import TorchOps
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.check_words import table_hash
from kvcore.kernels.triton.canary import ROWS
from kvcore.kernels.triton.launches import canary as launches
from kvcore.ops import canary
from kvcore.ops.canary import Asked
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, LayerSpec, Window
from kvcore.step import StepRequest, build_index
from tests.device.check_attention import Problem
from tests.support import scene, stories


def check_words(device: str) -> Iterator[Problem]:
    """Check words that a launch writes are those of the host, and what it finds is what the host finds."""
    random = np.random.default_rng(9)
    sharded = scene.classic("ring", window=5, key_format="fp16", value_dim=3)
    whole = LayerSpec(window=Window(dim=512, window=9, format="v4_584"), entries=Entries(dim=512, ratio=4))
    specs = {
        "latent": (stories.LATENT, "packed"),
        "planes": (stories.LATENT, "planar"),
        "copies": (CacheSpec(layers=[sharded, scene.classic()], block_tokens=8), "by_head"),
        "whole words": (CacheSpec(layers=[whole], block_tokens=16), "packed"),
    }
    for name, (spec, layout) in specs.items():
        plan = plan_cache(spec, max_requests=3, max_tokens=128, layout=layout, canary=2)
        ops, host = TritonOps(plan, device), TorchOps(plan, "cpu")
        pools = ops.allocate()
        for pool in pools.values():
            pool[:] = torch.from_numpy(random.integers(0, 256, pool.shape, np.uint8))
        rows = [StepRequest(2, 20, 1, [0, 1, 2, 6]), StepRequest(0, 9, 1, [4, 3, 5, 7])]
        index, there = (
            each.index(build_index(rows, max_blocks=plan.max_blocks, pad_requests=3)) for each in (ops, host)
        )
        spans = []
        for kind in range(1 + max(watched.kind for watched in plan.watched)):
            held = next(watched.regions[0].rows for watched in plan.watched if watched.kind == kind)
            spans += [[0, 0], [0, 0], [4, 3], [4 + min(4, held), 3 + min(4, held)]]
        hashes = [table_hash(row.blocks) for row in rows]
        numbers = np.array([[2, 0], [20, 9], [21, 10], hashes, *spans], np.int64).astype(np.uint32).view(np.int32)
        near = {key: pool.cpu().clone() for key, pool in pools.items()}

        def both(ops=ops, plan=plan, pools=pools, near=near, index=index, there=there, numbers=numbers):
            _, found = ops.watch(pools, index, Asked(numbers, 4))
            _, known = canary.watch(plan, near, there, Asked(numbers, 4))
            return found.read(), sorted(known.read())

        sealed = both()
        same = all(torch.equal(pools[key].cpu(), near[key]) for key in near)
        yield f"{name}, sealed", "" if same and sealed == ([], []) else f"{sealed}, or other words"
        # What was sealed is looked at.
        numbers[4::4], numbers[5::4] = numbers[6::4], numbers[7::4]
        numbers[6::4] = numbers[7::4] = 0
        seen = both()
        yield f"{name}, looked at", "" if seen == ([], []) else f"{seen}"
        for region in plan.regions:
            for key, _ in region.buffers.values():
                pools[key][:, ::7] ^= 64
                near[key].copy_(pools[key])
        found, known = both()
        yield f"{name}, perturbed", "" if found == known and len(found) > len(plan.watched) else f"{found}, not {known}"
        numbers[3, 1] += 1
        numbers[1, 0] -= 1
        found, known = both()
        # The host looks no further where an index is wrong.
        index_alone = [fault for fault in found if fault[0] < 0]
        yield f"{name}, index", "" if index_alone == known == [(-4, 1, 0), (-2, 0, 0)] else f"{found}, not {known}"


def in_turns(device: str) -> Iterator[Problem]:
    """Rows of a long request are looked at in turns: few at a time, all in the end."""
    plan = plan_cache(CacheSpec(layers=[scene.classic()], block_tokens=8), max_requests=1, max_tokens=32, canary=1)
    ops, held = TritonOps(plan, device), launches.PROGRAMS
    pools = ops.allocate()
    row = StepRequest(0, 21, 1, [2, 0, 1])
    index = ops.index(build_index([row], max_blocks=plan.max_blocks))
    numbers = np.array([[0], [21], [22], [table_hash(row.blocks)], [0], [21], [0], [0]], np.int64)
    asked = Asked(numbers.astype(np.uint32).view(np.int32), 21)
    # Nothing has a word yet: all is wrong.
    for programs in (1, 4):
        launches.PROGRAMS = programs
        turns = [ops.watch(pools, index, asked._replace(turn=turn))[1].read() for turn in range(7, 13)]
        most, rows = max(map(len, turns)), {fault[2] for turn in turns for fault in turn}
        wrong = most != programs * ROWS or rows != {*range(21)}
        yield f"turns of {programs} programs", f"{most} at once, {sorted(rows)}" if wrong else ""
    # Of several roles and requests some have their turn, the others the next; what is sealed is never put off.
    requests = [StepRequest(0, 21, 1, [2, 0, 1]), StepRequest(1, 18, 1, [3, 5, 4]), StepRequest(2, 19, 1, [8, 7, 6])]
    plan = plan_cache(CacheSpec(layers=[scene.classic()] * 5, block_tokens=8), max_requests=3, max_tokens=80, canary=1)
    several = TritonOps(plan, device)
    pools_of = several.allocate()
    step = several.index(build_index(requests, max_blocks=plan.max_blocks))
    starts = [row.start for row in requests]
    numbers = np.array(
        [[0, 1, 2], starts, [row.length for row in requests], [table_hash(row.blocks) for row in requests], [0] * 3,
         starts, [0] * 3, [0] * 3], np.int64,
    )  # fmt: skip
    looked = Asked(numbers.astype(np.uint32).view(np.int32), 21)
    launches.PROGRAMS = 4
    seen = []
    for seals in (False, True):
        # 15 pairs in four parts, six rounds each.
        turns = [several.watch(pools_of, step, looked._replace(turn=turn, seals=seals))[1].read() for turn in range(24)]
        seen.append([{fault[:2] for fault in turn} for turn in turns])
        rows = {fault for turn in turns for fault in turn}
        every = {(role, request, row) for role in range(5) for request in range(3) for row in range(starts[request])}
        wrong = rows != every or max(map(len, turns)) > 4 * ROWS
        yield f"pairs in turns, seals {seals}", f"{len(rows)} rows, {sorted(map(len, turns))}" if wrong else ""
    yield "the same with seals", "" if seen[0] == seen[1] else f"{seen}"
    numbers[6:8] = [0] * 3, starts
    sealing = Asked(numbers.astype(np.uint32).view(np.int32), 21, turn=5)
    several.watch(pools_of, step, sealing)[1].read()
    found = several.watch(pools_of, step, looked)[1].read()
    yield "sealed at once", "" if found == [] else f"{found}"
    found = ops.watch(pools, index, asked)[1].read()
    yield "all at once", "" if {fault[2] for fault in found} == {*range(21)} else f"{found}"
    launches.PROGRAMS = held
