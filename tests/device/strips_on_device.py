"""A part of ``check_cuda``: rows moved between pools and an export's pages at once, against the reference's verbs."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

import kvcore
from kvcore import portable
from kvcore.backends.reference import ReferenceOps
from kvcore.backends.torch_triton import cuda_units
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.errors import TransferError
from kvcore.handoff import Direct, Exporter, pull
from kvcore.plan import plan_cache
from kvcore.portable.digests import LaneDigests, request_lanes
from kvcore.portable.manifest import stage_one_by_one
from kvcore.portable.pages import content_of, page_layout, passing_pages, under_way
from kvcore.portable.rows import owned, write_rows
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Tail, Window
from kvcore.step import StepRequest

SPEC = CacheSpec(
    layers=[
        LayerSpec(window=Window(dim=512, window=5, format="v4_584")),
        LayerSpec(
            tail=Tail(dim=512, ratio=4, overlap=True),
            entries=Entries(dim=512, ratio=4, format="v4_584"),
            index_keys=IndexKeys(dim=128, ratio=4, heads=2, topk=4, format="index_fp4_68_h"),
            index_tail=Tail(dim=128, ratio=4, overlap=True),
        ),
        LayerSpec(entries=Entries(dim=20, ratio=8, format="fp32")),
        LayerSpec(kv=KV(key_heads=3, key_dim=10, key_format="bf16", value_dim=33, value_format="int8_row")),
        LayerSpec(kv=KV(key_heads=2, key_dim=16, key_format="fp32", window=6)),
    ],
    block_tokens=16,
)
"""Rings and blocks, heads and parts, rows of words of all widths, bytes that ``planar`` does not store."""


def filled(ops, rng, like=None):
    """Pools of random bytes, or with the bytes of others."""
    pools = ops.allocate()
    for name, pool in pools.items():
        if like is None:
            pool[...] = rng.integers(0, 256, pool.shape, np.uint8)
        else:
            pool.copy_(torch.from_numpy(like[name]))
    return pools


def different(ours, theirs) -> str:
    """How many bytes differ; empty if none."""
    wrong = int((ours.cpu().numpy() != theirs).sum())
    return f"{wrong} of {theirs.size} bytes differ" if wrong else ""


def check_strips(rng, device):
    """Out of pools of random bytes into pages, and out of pages into pools whose rings may be shorter."""
    for layout in ("packed", "planar", "by_head"):
        wide, narrow = (
            plan_cache(SPEC, max_requests=3, max_tokens=256, max_draft_tokens=drafts, layout=layout)
            for drafts in (2, 0)
        )
        here, there = (ReferenceOps(wide), TritonOps(wide, device)), (ReferenceOps(narrow), TritonOps(narrow, device))
        for floor, length in ((0, 0), (0, 3), (14, 16), (75, 77), (158, 160)):
            pages = page_layout(SPEC, floor, length)
            theirs = filled(here[0], rng)
            ours = filled(here[1], rng, theirs)
            blocks = rng.permutation(wide.blocks)[: pages.blocks].tolist()
            row = StepRequest(slot=1, start=length, new=0, blocks=blocks)
            want = np.zeros((pages.pages, pages.page_bytes), np.uint8)
            state = SimpleNamespace(spec=SPEC, plan=wide, ops=here[0], pools=theirs)
            stage_one_by_one(state, row, floor, pages, want)
            got = torch.full(want.shape, 0xEE, dtype=torch.uint8, device=device)
            case = f"rows of {length} tokens, {layout}"
            with chunks(3, pages.page_bytes):
                lanes = request_lanes(here[0], theirs, row), request_lanes(here[1], ours, row)
            wrong = [role for role, want, got in zip(owned(SPEC), *lanes, strict=True) if got not in (want, None)]
            yield f"{case}: digested in the pools", f"{wrong}" if wrong else ""
            # Values of 33 bytes are no words; nor are, where they lie apart, scales of seven.
            few = lanes[1].count(None) == (3 if layout == "planar" else 1)
            yield f"{case}: digested component by component", "" if few else f"{lanes[1]}"
            yield f"{case}: out of the pools", moved(here[1], ours, row, pages, got)[0]
            yield f"{case}: out of the pools", different(got, want)
            theirs = filled(there[0], rng)
            ours = filled(there[1], rng, theirs)
            write_rows(there[0], theirs, row, content_of(pages, want))
            given = torch.from_numpy(want).to(device)
            yield f"{case}: into the pools", moved(there[1], ours, row, pages, given, store=True)[0]
            for name, pool in ours.items():
                yield f"{case}: into {name}", different(pool, theirs[name])
            if length in (3, 77):
                yield from check_chunks(rng, (here, there), pages, row, want, case)
    yield from check_hand_off(rng, device)


def moved(ops, pools, row, layout, pages, **options):
    """What is wrong with how rows went, nothing if all at once; and the digests of their pages, where asked for."""
    with under_way(ops, pools, row, layout, pages, **options) as way:
        if way is None:
            return "component by component", []
        lanes = way.lanes()
    return "", LaneDigests(ops, layout, *lanes).result(pages) if options.get("digested") else []


@contextmanager
def chunks(pages, page_bytes):
    """Pages of the host go through the device so many at a time, under the interpreter too."""
    takes = {"takes_chunks": lambda ops: hasattr(ops, "through_device")}
    with ExitStack() as stack:
        for module in (portable.pages, portable.manifest, portable.importer, portable.digests):
            stack.enter_context(patch.multiple(module, **takes))
        stack.enter_context(patch.object(cuda_units, "CHUNK", pages * page_bytes))
        yield


def check_chunks(rng, sides, layout, row, want, case):
    """The same with pages in the host's memory, chunk by chunk, and their lanes; ``sides``: ops of both ways."""
    (theirs, ours), (into, mine) = sides
    digests = LaneDigests(theirs, layout).result(want)
    pools = filled(theirs, rng)
    write_rows(theirs, pools, row, content_of(layout, want))
    pools = filled(ours, rng, pools)
    for pool in (None, next(iter(pools.values()))):
        got = passing_pages(pool, *want.shape)
        got[:] = 0xEE
        # More chunks than buffers: the last of five waits for lanes.
        with chunks(1, layout.page_bytes):
            wrong, known = moved(ours, pools, row, layout, got, digested=True)
        yield f"{case}: out of the pools in chunks", wrong
        yield f"{case}: out of the pools in chunks", different(torch.from_numpy(got), want)
        yield f"{case}: lanes on the way out", "" if known == digests else "others"
        plain = filled(into, rng)
        target = filled(mine, rng, plain)
        write_rows(into, plain, row, content_of(layout, want))
        given = passing_pages(pool, *want.shape)
        given[:] = want
        if pool is None:
            given.flags.writeable = False
        with chunks(3, layout.page_bytes):
            wrong, known = moved(mine, target, row, layout, given, store=True, digested=True)
        yield f"{case}: into the pools in chunks", wrong
        yield f"{case}: lanes on the way in", "" if known == digests else "others"
        for name, pool in target.items():
            yield f"{case}: into {name} in chunks", different(pool, plain[name])


def check_hand_off(rng, device):
    """A request exported on the device and pulled there by another cache, of another layout."""
    for window, dim, block_tokens in (
        (Window(dim=512, window=5, format="v4_584"), 16, 16),
        # 15 pages of 60 bytes, then a record of two: it begins in the middle of a word of eight.
        (Window(dim=6, window=3, format="fp32"), 5, 3),
    ):
        layers = [LayerSpec(window=window), LayerSpec(kv=KV(key_heads=1, key_dim=dim))]
        spec = CacheSpec(layers=layers, block_tokens=block_tokens)
        yield f"hand-off from packed to planar, blocks of {block_tokens}", hand_off(spec, rng, device)
        with chunks(2, 1 << 10):
            yield f"the same through the host, blocks of {block_tokens}", hand_off(spec, rng, device, on_device=False)


def hand_off(spec, rng, device, *, on_device=True) -> str:
    """What is wrong with 43 tokens that came another way; empty if nothing."""
    dim, key_dim = spec.layers[0].window.dim, spec.layers[1].kv.key_dim
    options = {"backend": "torch_triton", "device": device, "max_requests": 2, "max_tokens": 256}
    source, target = (
        kvcore.create_cache(spec, layout=layout, max_draft_tokens=drafts, **options)
        for layout, drafts in (("packed", 2), ("planar", 0))
    )
    source.admit()
    request = source.admit()
    for new in (40, 3):
        window, *kv = (
            torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device)
            for shape in ((new, dim), (new, 1, key_dim), (new, 1, key_dim))
        )
        with source.step({request: new}) as step:
            step.layer(0).append_window(window)
            step.layer(1).append_kv(*kv)
    desk = Exporter(source, on_device=on_device)
    moved = pull(target, desk.export(request), Direct(desk), chunk_pages=2, on_device=on_device)
    if target.digest([moved]) != source.digest([request]):
        return "digests differ"
    handle, before = desk.export(request), target.digest()
    pages = desk.staged(desk.name, handle.number, handle.generation).pages
    for page in sorted({0, len(pages) // 2, len(pages) - 1}):
        # Rows begin every page.
        pages[page, 0] ^= 1
        try:
            pull(target, handle, Direct(desk), on_device=on_device)
        except TransferError as error:
            if (target.digest(), list(target.requests), error.reason) != (before, [moved], "damaged"):
                return "what was damaged left something behind"
        else:
            return "what was damaged was taken in"
        pages[page, 0] ^= 1
    again = pull(target, handle, Direct(desk), on_device=on_device)
    return "" if target.digest([again]) == source.digest([request]) else "what is whole was not taken in"
