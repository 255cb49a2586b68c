"""One group of kernel checks under Triton's interpreter; run in a process of its own, see ``test_interpreter``."""

import sys
from itertools import product

import numpy as np
import torch
from triton.runtime import interpreter

from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.conformance.specs import over_tokens_spec
from kvcore.kernels.triton import shape
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, LayerSpec, Tail, Window
from kvcore.step import StepRequest, build_index
from tests.device import check_attention, check_canary, check_classic, check_groups, check_indexer
from tests.device.check_cuda import OF_ONE_TOKEN, reference_rows
from tests.device.check_flush import flush_problems
from tests.device.check_kit import RINGS, kit
from tests.device.checks_on_device import check_format, check_life, check_merge, check_pages, check_rotated
from tests.support import stories


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
        # What is kept beside the pools from step to step is what was planned; more of it goes with its step.
        rings, plan = cache._state.ops._rings, cache.plan
        room = 0 if rings._lines is None else rings._lines.nbytes
        planned = room == (plan.undo_bytes if known and reads and len(tokens) <= plan.undo_tokens else 0)
        held = {each.untyped_storage().data_ptr() for each in (*rings._held.values(), *rings._again[0][:1])}
        planned &= held <= (set() if rings._lines is None else {rings._lines.data_ptr()})
        yield where, "" if found == want and known and planned else f"{least}, {len(reads)} reads, {room} bytes kept"


GROUPS = {
    "turns of check words": lambda: check_canary.in_turns("cpu"),
    "check words": lambda: check_canary.check_words("cpu"),
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
    "rows of rings in the kit": lambda: kit(*RINGS),
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
