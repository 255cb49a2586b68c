"""The device's side of ``check_cuda``: run the verbs, compare bytes."""

import numpy as np
import torch

from kvcore.backends.reference import ReferenceOps, tail
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.ops import Attention, RawRows
from kvcore.plan import plan_cache
from kvcore.portable.digests import LaneDigests
from kvcore.portable.pages import page_layout
from kvcore.sharding.torch import TorchExchange, merged
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Rope, Tail, Window, address
from kvcore.step import StepRequest, build_index
from tests.device.check_cuda import CLASSIC, case_of, images_of
from tests.device.strips_on_device import SPEC, check_strips
from tests.support.expected import as_bf16, decoded, encoded, random_values


def poisoned(ops):
    """Fresh pools full of 0xFF."""
    pools = ops.allocate()
    for array in pools.values():
        array.fill_(0xFF)
    return pools


def differing(pools, images) -> str:
    """Which pools differ from their images, and by how much; empty if none."""
    found = []
    for name, image in images.items():
        want = torch.from_numpy(image).to(pools[name].device)
        different = int((pools[name] != want).sum())
        if different:
            found.append(f"{name}: {different} of {image.size} bytes")
    return "; ".join(found)


def bits_differ(got, want) -> str:
    """Compare decoded values with the reference's bits; NaN equals NaN whatever its bits."""
    got = got.contiguous().reshape(-1)
    wanted = torch.from_numpy(want.reshape(-1).view(np.int16 if got.dtype == torch.bfloat16 else np.int32)).to(
        got.device
    )
    bits = got.view(torch.int16 if got.dtype == torch.bfloat16 else torch.int32)
    nan = got.isnan() & wanted.view(got.dtype).isnan()
    different = int(((bits != wanted) & ~nan).sum())
    return f"{different} of {got.numel()} values" if different else ""


def check_format(name, count, dtype, values, stored, back, device):
    """Yield (what, problem) for one format, size and input dtype, in both layouts."""
    for layout in ("packed", "planar"):
        plan, host = case_of(name, layout, count)
        ops = TritonOps(plan, device)
        index = ops.index(host)
        given = torch.from_numpy(values).to(device)
        if dtype == "bf16":
            given = given.to(torch.bfloat16)
        padded = torch.cat([given.reshape(count, -1), given.new_full((2, given.numel() // count), float("nan"))])
        pools = poisoned(ops)
        layer = plan.spec.all_layers[0]
        if name in CLASSIC:
            key, value = plan.region(0, "kv")
            padded = padded.reshape(count + 2, 3, -1)
            columns = int(host.lengths.max())
            picked = (
                torch.from_numpy(host.request_index[:count]).long().to(device),
                torch.from_numpy(host.positions[:count]).long().to(device),
            )
            k, _, _ = ops.gather_kv(pools, 0, index, padded, padded, columns=columns)
            yield f"gather_kv of the step's own {layout}", bits_differ(k[picked], back)
            ops.append_kv(pools, 0, index, padded, padded)
            images = images_of(plan, key, host, stored) | images_of(plan, value, host, stored)
            yield f"append_kv {layout}", differing(pools, images)
            k, _, _ = ops.gather_kv(pools, 0, index, columns=columns)
            yield f"gather_kv {layout}", bits_differ(k[picked], back)
            continue
        if layer.window is not None:
            seen = ops.gather_window(pools, 0, index, padded)
            mine = seen.positions >= 5
            yield f"gather_window of the step's own {layout}", bits_differ(seen.values[mine], back)
            ops.append_window(pools, 0, index, padded)
            (region,) = plan.region(0, "window")
            yield f"append_window {layout}", differing(pools, images_of(plan, region, host, stored))
            seen = ops.gather_window(pools, 0, index)
            yield f"gather_window {layout}", bits_differ(seen.values[mine], back)
        ops.store_role(pools, 0, "index_keys", index, given)
        (region,) = plan.region(0, "index_keys")
        yield f"store index keys {layout}", differing(pools, images_of(plan, region, host, stored))
        columns = int(host.lengths.max())
        everything = ops.gather_all_entries(pools, 0, index, columns=columns, role="index_keys")
        mine = (everything.positions >= 5).cpu().numpy()
        yield f"gather_all_entries {layout}", bits_differ(everything.values[torch.from_numpy(mine).to(device)], back)
        if layer.window is not None:
            ops.store_role(pools, 0, "entries", index, given)
            picks = torch.from_numpy(np.stack([host.positions, np.full_like(host.positions, -1)], axis=1)).to(device)
            picked = ops.gather_entries(pools, 0, index, picks)
            yield f"gather_entries {layout}", bits_differ(picked.values[:count, 0], back)
            wrong = (
                int(picked.valid[:, 1].sum())
                + int(picked.values[:, 1].ne(0).sum())
                + int((~picked.valid[:count, 0]).sum())
            )
            yield f"gather_entries validity {layout}", f"{wrong} wrong" if wrong else ""


def check_rotated(rng, device):
    """The fused norm + rotation + append against the reference's steps."""
    for format, dim in (("v4_584", 512), ("v41_528", 512), ("bf16", 96), ("row_580", 512), ("fp32", 128)):
        for normed in (False, True):
            rows = [StepRequest(slot=2 - n, start=1000 * n, new=40 + n, blocks=[], stored=0) for n in range(3)]
            spec = CacheSpec(layers=[LayerSpec(window=Window(dim=dim, window=64, format=format))])
            plan = plan_cache(spec, max_requests=3)
            here, there = ReferenceOps(plan), TritonOps(plan, device)
            theirs, ours = here.allocate(), poisoned(there)
            host = build_index(rows, max_blocks=1, pad_tokens=125)
            values = as_bf16(rng.standard_normal((125, dim), np.float32))
            weight = (1 + rng.random(dim)).astype(np.float32) if normed else None
            rope = Rope(dim=64, theta=10000.0)
            exact = plan.region(0, "window")[0].format.is_fp32
            turned = tail.rms_norm(values, weight, 1e-6) if normed else values
            turned = turned if exact else as_bf16(turned)
            turned = tail.rotate(turned, host.positions, rope)
            here.append_window(theirs, 0, host, turned if exact else as_bf16(turned))
            given = torch.from_numpy(values).to(device).to(torch.bfloat16)
            weights = None if weight is None else there.asarray(weight)
            index = there.index(host)
            there.append_rotated_window(ours, 0, index, given, rope=rope, norm_weight=weights)
            seen = here.gather_window(theirs, 0, host)
            # Older rows of the rings were never written.
            new = seen.positions >= host.starts[:, None]
            got = there.gather_window(ours, 0, index).values.float().cpu().numpy()
            off = np.abs(got - seen.values.astype(np.float32))[new]
            assert new.sum() == 40 + 41 + 42
            bad = not off.max() <= {"bf16": 0.04, "fp32": 1e-4}.get(format, 0.51) or (off > 1e-3).mean() > 0.01
            yield (
                f"rotated append {format}{' normed' if normed else ''}",
                f"{off.max()} off, {(off > 1e-3).mean()}" if bad else "",
            )


def check_life(rng, device):
    """Reset, poison, copies and digests against the reference, in pools full of noise."""
    layers = [
        LayerSpec(window=Window(dim=512, window=5, format="v4_584")),
        LayerSpec(tail=Tail(dim=12, ratio=4, overlap=True), entries=Entries(dim=12, ratio=4, format="int8_row")),
    ]
    verbs = {
        "reset_slots": ([3, 0, -1],),
        "poison": ([4, 0], [1, 7]),
        "copy_slots": ([0, 1, 2], [1, 0, 4]),
        "copy_blocks": ([0, 1, 2, 5], [1, 2, 7, 0]),
    }
    for layout in ("packed", "planar"):
        plan = plan_cache(CacheSpec(layers=layers, block_tokens=8), max_requests=5, max_tokens=64, layout=layout)
        here, there = ReferenceOps(plan), TritonOps(plan, device)
        for verb, numbers in verbs.items():
            theirs = {name: rng.integers(0, 256, a.shape, np.uint8) for name, a in here.allocate().items()}
            ours = {name: torch.from_numpy(array).to(device) for name, array in theirs.items()}
            theirs = {name: array.copy() for name, array in theirs.items()}
            getattr(here, verb)(theirs, *(np.array(some, np.int32) for some in numbers))
            getattr(there, verb)(ours, *(np.array(some, np.int32) for some in numbers))
            yield f"{verb} {layout}", differing(ours, theirs)
    yield from check_rings(rng, device)
    for size in (7, 528, 584):
        raw = RawRows(rng.integers(0, 256, (3, 37, size), np.uint8), rng.integers(-1, 40, (3, 37)).astype(np.int32))
        for salt in (5, 0xF1234567):
            lanes = there.digest_rows(RawRows(*map(there.asarray, raw)), salt).cpu().numpy()
            wrong = int((lanes != here.digest_rows(raw, salt)).sum())
            yield f"digest of rows of {size} bytes", f"{wrong} lanes" if wrong else ""


def check_rings(rng, device):
    """The rows of all rings that a step takes, read and put back at once, against the reference's, ring by ring."""
    tail = Tail(dim=12, ratio=4, overlap=True)
    layers = [
        LayerSpec(window=Window(dim=512, window=5, format="v4_584")),
        LayerSpec(
            tail=tail,
            entries=Entries(dim=12, ratio=4, format="int8_row"),
            window=Window(dim=12, window=3, format="bf16"),
        ),
        LayerSpec(kv=KV(key_heads=2, key_dim=24, value_dim=8, storage="ring", window=4, key_format="fp8_row")),
    ]
    rings = (0, "window"), (1, "window"), (1, "tail"), (2, "kv")
    for layout in ("packed", "planar", "tpu_tile", "by_head"):
        plan = plan_cache(CacheSpec(layers=layers, block_tokens=8), max_requests=4, max_tokens=64, layout=layout)
        here, there = ReferenceOps(plan), TritonOps(plan, device)
        fresh = here.allocate()
        noise = [{name: rng.integers(0, 256, a.shape, np.uint8) for name, a in fresh.items()} for _ in range(2)]
        before, after = [{name: torch.from_numpy(a).to(device) for name, a in some.items()} for some in noise]
        rows = [StepRequest(slot, start, new, []) for slot, start, new in ((2, 9, 1), (0, 17, 8), (3, 4, 0), (1, 6, 3))]
        index = there.index(build_index(rows, max_blocks=1, pad_tokens=14, pad_requests=5))
        saved = there.read_rings(before, rings, index)
        there.restore_rings(after, rings, index, saved)
        for layer, role in rings:
            ring = plan.region(layer, role)[0].rows
            last = [row._replace(start=max(row.start, row.length - ring)) for row in rows]
            last = [now._replace(new=row.length - now.start) for now, row in zip(last, rows, strict=True)]
            some = here.index(build_index(last, max_blocks=1))
            here.restore_ring(noise[1], layer, role, some, here.read_ring(noise[0], layer, role, some))
        yield f"rings {layout}", differing(after, noise[1])


def check_pages(rng, device):
    """Digests of an export's pages at once, as they arrive, against those of the reference, component by component."""
    spec = CacheSpec(layers=SPEC.layers[:3], block_tokens=16)
    plan = plan_cache(spec, max_requests=2, max_tokens=256, max_draft_tokens=2)
    here, there = ReferenceOps(plan), TritonOps(plan, device)
    for floor, length in ((0, 0), (0, 3), (14, 16), (75, 77), (158, 160)):
        layout = page_layout(spec, floor, length)
        pages = rng.integers(0, 256, (layout.pages, layout.page_bytes), np.uint8)
        want, ours = LaneDigests(here, layout).result(pages), torch.from_numpy(pages).to(device)
        for chunk in (3, 1000):
            digests = LaneDigests(there, layout)
            # None of them: the record may be there alone.
            for first in range(0, layout.pages if chunk == 3 else 0, chunk):
                digests.add(ours[first : first + chunk], first)
            wrong = sum(a != b for a, b in zip(digests.result(ours), want, strict=True))
            yield f"pages of {length} tokens by {chunk}", f"{wrong} of {len(want)}" if wrong else ""
            yield (
                f"pages of {length} tokens at once",
                "" if digests._added == layout.blocks else "component by component",
            )
    yield from check_strips(rng, device)


def check_merge(rng, device):
    """Parts of context shards joined in one launch, against the same in torch on the CPU; some have no keys."""

    class Alike(TorchExchange):
        def __init__(self, parts):
            self.parts = parts
            self._take_place(len(parts), 0, "cpu")

        def _stack(self, values):
            assert values.shape == self.parts.shape[1:]
            return self.parts

    for shards, tokens, heads, dim, dtype in ((2, 5, 3, 512, torch.bfloat16), (4, 3, 2, 24, torch.float32)):
        for once, sink in ((True, True), (True, False), (False, True), (False, False)):
            parts = torch.from_numpy(rng.standard_normal((shards, tokens, heads, dim + 1)).astype(np.float32))
            parts[..., -1] *= 8
            # A shard without keys, a query without any on all shards, and one whose only keys are everybody's.
            parts[1, 0], parts[:, 1], parts[:, 2, 0] = (torch.tensor([*[0.0] * dim, -torch.inf]) for _ in range(3))
            whole = [
                torch.from_numpy(rng.standard_normal((tokens, heads, *s)).astype(np.float32)) for s in ((dim,), ())
            ]
            whole[0][1], whole[1][1] = 0, -torch.inf
            whole = Attention(whole[0].to(dtype), whole[1]) if once else None
            low = torch.from_numpy(rng.standard_normal(heads).astype(np.float32) * 9) if sink else None
            like = torch.zeros(1, dtype=dtype)
            want = Alike(parts).merge(Attention(parts[0, ..., :-1], parts[0, ..., -1]), whole, low, like)
            there = [None if t is None else t.to(device) for t in (parts, low, like)]
            held = None if whole is None else Attention(*(t.to(device) for t in whole))
            got = merged(there[0], held, there[1], there[2])
            bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
            pairs = zip(got, want, strict=True)
            same = all(torch.allclose(a.cpu().float(), b.float(), rtol=bound, atol=bound) for a, b in pairs)
            fine = same and got.out.dtype == dtype and got.out.shape == want.out.shape
            yield f"merge of {shards} shards, window {once}, sink {sink}", "" if fine else "differs"


def check_large(rng, device):
    """A pool of more than 2^32 bytes: rows at both ends, at the addresses that the layout gives."""
    spec = CacheSpec(
        layers=[LayerSpec(window=Window(dim=512, window=128), entries=Entries(dim=512, ratio=1))], block_tokens=64
    )
    blocks = 2**32 // 37440 + 1000
    plan = plan_cache(spec, max_requests=2, max_tokens=64 * blocks)
    ops = TritonOps(plan, device)
    pools = ops.allocate()
    chosen = [0, blocks // 2 + 1, blocks - 1]
    host = build_index([StepRequest(slot=1, start=0, new=192, blocks=chosen, stored=0)], max_blocks=3)
    values = random_values(rng, 192, 512, odd=False)
    index = ops.index(host)
    ops.store_role(pools, 0, "entries", index, torch.from_numpy(values).to(device))
    (region,) = plan.region(0, "entries")
    rows = encoded(region.format, values)
    flat = pools["0.entries.page"].reshape(-1)
    wrong = 0
    for entry in (0, 63, 64, 127, 128, 191):
        for field in ("codes", "rope", "scales"):
            first, last = region.format.byte_range(field)
            at = address("v4_584", 64, chosen[entry // 64], entry % 64, field)
            got = flat[at : at + last - first].cpu().numpy()
            wrong += int((got != rows[entry, first:last]).sum())
    yield "pool of more than 2^32 bytes: store", f"{wrong} bytes" if wrong else ""
    ops.copy_blocks(pools, np.array([chosen[1]]), np.array([blocks - 3]))
    same = torch.equal(pools["0.entries.page"][chosen[1]], pools["0.entries.page"][blocks - 3])
    yield "pool of more than 2^32 bytes: copy", "" if same else "blocks differ"
    got = ops.gather_all_entries(pools, 0, index, columns=192)
    want = decoded(region.format, rows)
    yield "pool of more than 2^32 bytes: gather", bits_differ(got.values[0], want.view(np.uint16))
