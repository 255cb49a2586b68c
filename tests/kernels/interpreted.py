"""One group of kernel checks under Triton's interpreter; run in a process of its own, see ``test_interpreter``."""

import sys
from itertools import product

import numpy as np
import torch
from triton.runtime import interpreter

from kvcore import parity
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.check_words import table_hash
from kvcore.conformance.specs import conformance_spec, over_tokens_spec
from kvcore.kernels.triton import shape
from kvcore.kernels.triton.canary import ROWS
from kvcore.kernels.triton.launches import canary as launches
from kvcore.ops import canary
from kvcore.ops.canary import Asked
from kvcore.parity.show import failure_text
from kvcore.plan import plan_cache
from kvcore.plugins import registry
from kvcore.spec import CacheSpec, Entries, LayerSpec, Tail, Window
from kvcore.step import StepRequest, build_index
from tests.device import check_attention, check_classic, check_groups, check_indexer
from tests.device.check_cuda import OF_ONE_TOKEN, reference_rows
from tests.device.check_flush import flush_problems
from tests.device.checks_on_device import check_format, check_life, check_merge, check_pages, check_rotated
from tests.support import scene, stories


def formats(names):
    for number, name in enumerate(names):
        # Both inputs take the same way but for the first load. A program reads up to four rows: some whole, some not.
        count, dtype = ((9, "fp32"), (5, "bf16"))[number % 2]
        yield from check_format(name, count, dtype, *reference_rows(name, count, dtype, 5), "cpu")


# name, ratio, overlap, formats of entries and index keys, steps of new tokens, decode steps after them
FLUSHES = (
    ("CSA", 4, True, "v4_584", "index_fp4_68_h", [13, 1], 3),
    ("CSA in chunks", 4, True, "v4_584", None, [[7], [66]], 1),
    ("HCA", 128, False, "v4_584", None, [130, 5], 1),
    ("HCA in chunks", 128, False, "v4_584", None, [[130, 5], [9, 127]], 1),
    ("CSA, more than the ring spares", 4, True, "v4_584", "index_fp8_132", [[6, 5], [3, 4], [5, 5]], 1),
    ("ratio 3 in chunks", 3, True, "fp32", "bf16", [[70, 2], [68, 3]], 1),
    ("CSA, long", 4, True, "v4_584", "index_fp8_132", [[7, 0], [66, 3], [3, 64]], 0),
    ("ratio 3", 3, True, "fp32", "bf16", [9, 2], 3),
)
TOLD = {
    ("packed", "fp32"): ("CSA", "CSA in chunks", "HCA", "CSA, more than the ring spares", "ratio 3"),
    ("packed", "bf16"): ("CSA", "HCA in chunks", "ratio 3 in chunks", "CSA, long"),
    ("planar", "fp32"): ("CSA", "HCA in chunks", "ratio 3"),
    ("planar", "bf16"): ("CSA", "CSA, more than the ring spares", "CSA, long"),
}
"""By layout and what is given: every way to read old rows of a tail, and every launch that writes its rows."""


def flushes(given, layout):
    """Compression in steps; the tails of a "long" one have a launch of their own."""
    rng = np.random.default_rng(3)
    held = shape.MOST_BESIDE_BOUNDARY
    for name, *case, after in FLUSHES:
        if name in TOLD[layout, given]:
            shape.MOST_BESIDE_BOUNDARY = 64 if name.endswith("long") else held
            yield f"{name} {given} {layout}", flush_problems(rng, "cpu", *case, given, after, layout=layout)
    shape.MOST_BESIDE_BOUNDARY = held


def planar_flushes():
    yield from flushes("fp32", "planar")
    yield from flushes("bf16", "planar")
    case = 4, True, "v4_584", "index_fp4_68_h", [13, 1]
    yield (
        "flush, then tails in planar",
        flush_problems(np.random.default_rng(5), "cpu", *case, "bf16", 3, apart=True, layout="planar"),
    )


def kit(*patterns, spec=conformance_spec):
    """Checks of the conformance kit, by their ids."""
    for pattern in patterns:
        report = parity.run(spec(), [registry().backends["torch_triton"]], device="cpu", only=pattern)
        yield from (
            (record.check, "" if record.status == "agree" else failure_text(record)) for record in report.checks
        )


def views():
    """Weights, sinks and frequencies that are columns of a matrix: what is stored and answered is that of copies."""
    layer = LayerSpec(
        window=Window(dim=16, window=4, format="bf16"),
        tail=Tail(dim=16, ratio=2, overlap=False),
        entries=Entries(dim=16, ratio=2, format="bf16"),
    )
    plan = plan_cache(CacheSpec(layers=[layer], block_tokens=4), max_requests=1, max_tokens=8)
    ops, random = TritonOps(plan), torch.Generator().manual_seed(0)
    index = ops.index(build_index([StepRequest(slot=0, start=0, new=4, blocks=[0, 1])], max_blocks=2))
    rows, kv, score, q = (torch.randn(4, 16, generator=random) for _ in range(4))
    matrix = torch.rand(16, 3, generator=random)
    weight, rope, sink = matrix[:, 0], matrix[:4, 1], matrix[:2, 2]

    def run(weight, rope, sink):
        pools = ops.append_rotated_window(ops.allocate(), 0, index, rows, rope=rope, norm_weight=weight)
        pools = ops.append_flush(pools, 0, index, kv, score, norm_weight=weight, rope=rope)
        out = ops.attend(pools, 0, index, q[:, None].repeat(1, 2, 1), sink=sink, rope=rope)
        return {**pools, "out": out.out, "lse": out.lse}

    want = run(*(array.clone() for array in (weight, rope, sink)))
    for name, got in run(weight, rope, sink).items():
        yield f"{name} from views", "" if torch.equal(got, want[name]) else "differs"


def compiled():
    from tests.device.capture_on_device import check_compiled

    yield from check_compiled("cpu", backend="aot_eager")


def aborted():
    """Steps by handles and by functional verbs that are given up: every length that could be had can be had again."""
    told = [*range(300, 323)], [*range(400, 414)]
    for drafts, new, functional in product((0, 2), (1, 3), (False, True)):
        cache = stories.create(stories.LATENT, "torch_triton", max_draft_tokens=drafts)
        requests = [cache.admit() for _ in told]
        stories.tell(cache, dict(zip(requests, told, strict=True)))
        reads = []
        read = cache._state.ops.read_rings
        cache._state.ops.read_rings = lambda *given, read=read, reads=reads: reads.append(given[1]) or read(*given)
        step = cache.step(dict.fromkeys(requests, new))
        tokens = [7] * new * len(requests)
        if functional:
            dim = cache.spec.layers[0].window.dim
            rows = cache.asarray(np.ones((len(tokens), dim), np.float32))
            cache.pools = cache.ops.append_window(cache.pools, 0, step.index, rows)
        else:
            stories.feed(step, tokens)
        step.abort()
        least = [cache._state.least_length(request) for request in requests]
        for request, length in zip(requests, least, strict=True):
            cache.truncate(request, length)
        found = [cache.digest([request]) for request in requests]
        config = [ids[:length] for ids, length in zip(told, least, strict=True)]
        want = [stories.retell("torch_triton", stories.LATENT, ids) for ids in config]
        where = f"drafts {drafts}, new {new}, {'functional' if functional else 'handles'}"
        # One launch for all layers; none where a handle's rows wait for the commit.
        known = bool(reads) == (functional or new <= 1 + drafts) and len(reads) <= 2
        yield where, "" if found == want and known else f"{least}, {len(reads)} reads"


def check_words():
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
        ops = TritonOps(plan)
        pools = ops.allocate()
        for pool in pools.values():
            pool[:] = torch.from_numpy(random.integers(0, 256, pool.shape, np.uint8))
        rows = [StepRequest(2, 20, 1, [0, 1, 2, 6]), StepRequest(0, 9, 1, [4, 3, 5, 7])]
        index = ops.index(build_index(rows, max_blocks=plan.max_blocks, pad_requests=3))
        spans = []
        for kind in range(1 + max(watched.kind for watched in plan.watched)):
            held = next(watched.regions[0].rows for watched in plan.watched if watched.kind == kind)
            spans += [[0, 0], [0, 0], [4, 3], [4 + min(4, held), 3 + min(4, held)]]
        hashes = [table_hash(row.blocks) for row in rows]
        numbers = np.array([[2, 0], [20, 9], [21, 10], hashes, *spans], np.int64).astype(np.uint32).view(np.int32)
        near = {key: pool.clone() for key, pool in pools.items()}

        def both(ops=ops, plan=plan, pools=pools, near=near, index=index, numbers=numbers):
            _, found = ops.watch(pools, index, Asked(numbers, 4))
            _, known = canary.watch(plan, near, index, Asked(numbers, 4))
            return found.read(), sorted(known.read())

        sealed = both()
        same = all(torch.equal(pools[key], near[key]) for key in near)
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


def in_turns():
    """Rows of a long request are looked at in turns: few at a time, all in the end."""
    plan = plan_cache(CacheSpec(layers=[scene.classic()], block_tokens=8), max_requests=1, max_tokens=32, canary=1)
    ops, held = TritonOps(plan), launches.PROGRAMS
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
    several = TritonOps(plan)
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


GROUPS = {
    "turns of check words": in_turns,
    "check words": check_words,
    "attention": lambda: check_attention.small("cpu"),
    "classic attention": lambda: check_classic.small("cpu"),
    "groups": lambda: check_groups.small("cpu"),
    "indexer": lambda: check_indexer.small("cpu"),
    "flush of fp32": lambda: flushes("fp32", "packed"),
    "flush of bf16": lambda: flushes("bf16", "packed"),
    "flush in planar": planar_flushes,
    "planar flush in the kit": lambda: kit(
        "append_flush/bf16.m4+index_fp8_132.m4/planar/ragged",
        "append_flush/v4_584.m2/planar/longer",
        "flush/bf16.m2+index_nvfp4_h.m2/planar/one_over",
        "flush/v41_fp4_288.m8/planar/padded",
        "append_tail/tail.m*/planar/longer",
        "append_index_tail/*/planar/ragged",
        "append_tail/tail.m4.overlap/tpu_tile/longer",
    ),
    "whole units": lambda: check_life(np.random.default_rng(4), "cpu"),
    "aborted steps": aborted,
    "pages of exports": lambda: check_pages(np.random.default_rng(6), "cpu"),
    "rows of rings in the kit": lambda: kit("restore_ring/*/ragged", "restore_ring/*/padded"),
    "recurrent layers in the kit": lambda: kit(
        *(f"{verb}/*/p*/ragged" for verb in ("append_conv", "gather_conv", "write_state", "read_state")),
        *(f"{verb}/*/packed/{rows}" for verb in ("append_state", "select_state") for rows in ("ragged", "padded")),
    ),
    "strips in the kit": lambda: kit(
        "move_strips/v4_584+*/p*/longer", "move_strips/*.ring/by_head/ragged", "digest_strips/*fp8_132.m4/any/longer"
    ),
    "groups of tokens in the kit": lambda: kit(
        "append_kv/int4_ch32*/packed/ragged",
        "append_kv/int4_ch32-int4_g32*/*/one_over",
        "append_kv/bf16-int4_ch32*/planar/longer",
        "append_kv/*64.full.paged/packed/taken_over",
        "attend_kv/*/packed/ragged",
        "attend_kv/*/planar/padded",
        spec=over_tokens_spec,
    ),
    "merge of shards": lambda: check_merge(np.random.default_rng(7), "cpu"),
    "views": views,
    "rotated append": lambda: check_rotated(np.random.default_rng(2), "cpu"),
    "torch.compile": compiled,
    **{f"formats {n}": lambda n=n: formats(OF_ONE_TOKEN[n::4]) for n in range(4)},
}


def patch_once():
    """Triton's interpreter patches its language at every call of a device function, too, a third of all time here.

    For functions of a module it has done that once in a launch, which undoes it when it ends.
    """
    patch, modules = interpreter._patch_lang, set()

    def patched(fn):
        if fn.__module__ in modules:
            return None  # a call of a device function has no use for it
        modules.add(fn.__module__)
        scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (modules.clear(), restore())
        return scope

    interpreter._patch_lang = patched


if __name__ == "__main__":
    patch_once()
    found = list(GROUPS[sys.argv[1]]())
    print(len(found), "checks")
    for what, problem in found:
        if problem:
            print(what, problem)
    sys.exit(any(problem for _, problem in found) or not found)
