"""A part of ``check_cuda``: rows moved between pools and an export's pages at once, against the reference's verbs."""

from types import SimpleNamespace

import numpy as np
import torch

import kvcore
from kvcore.backends.reference import ReferenceOps
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.handoff import Direct, Exporter, pull
from kvcore.plan import plan_cache
from kvcore.portable.manifest import stage_one_by_one
from kvcore.portable.pages import content_of, move_at_once, page_layout
from kvcore.portable.rows import write_rows
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
            got[max(0, pages.blocks - 1) :] = 0
            case = f"rows of {length} tokens, {layout}"
            if not move_at_once(here[1], ours, row, pages, got):
                yield f"{case}: out of the pools", "component by component"
            yield f"{case}: out of the pools", different(got, want)
            theirs = filled(there[0], rng)
            ours = filled(there[1], rng, theirs)
            write_rows(there[0], theirs, row, content_of(pages, want))
            if not move_at_once(there[1], ours, row, pages, torch.from_numpy(want).to(device), store=True):
                yield f"{case}: into the pools", "component by component"
            for name, pool in ours.items():
                yield f"{case}: into {name}", different(pool, theirs[name])
    yield from check_hand_off(rng, device)


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


def hand_off(spec, rng, device) -> str:
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
    desk = Exporter(source, on_device=True)
    moved = pull(target, desk.export(request), Direct(desk), chunk_pages=2, on_device=True)
    return "" if target.digest([moved]) == source.digest([request]) else "digests differ"
