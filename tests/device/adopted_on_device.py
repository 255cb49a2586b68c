"""Tensors of an engine on a CUDA device, adopted where they lie: the same lives as on the CPU, byte for byte.

``python -m tests.device.adopted_on_device`` prints a line a scene, and leaves with 1 if one differs.
"""

import sys

import torch

import kvcore
from kvcore.handoff import Direct, Exporter, pull
from tests.adoption import test_chunks as chunks
from tests.adoption import test_rings_and_pages as rings
from tests.support import stories
from tests.support.engine import SPEC, Engine

LAYOUTS = ("NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_NH_BS_HS", "NB_NL_TWO_BS_NH_HS", "TWO_X_NL_X_NBBS_NH_HS")


def moved(tensors):
    """The same, on the device."""
    if isinstance(tensors, list):
        return [moved(tensor) for tensor in tensors]
    # ``to`` would close the gaps between pages.
    whole = torch.as_tensor(tensors)
    bare = torch.zeros(whole.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda")
    return bare.view(whole.dtype).as_strided(whole.shape, whole.stride())


def live(cache, place, backend):
    """Digests of a life beside a cache of the library's own."""
    own = kvcore.create_cache(cache.spec, backend=backend, max_requests=2, max_tokens=192, max_draft_tokens=3)
    first = own.admit()
    stories.tell(own, {first: rings.TOKENS[:41]})
    request = cache.import_request(own.export_request(first), into=cache.admit(**place))
    cache.release(request)
    request = cache.admit(length=41, **place)
    for held, one in ((cache, request), (own, first)):
        stories.tell(held, {one: rings.TOKENS[41:45]})
        stories.fail(held, {one: rings.TOKENS[45:50]})
        held.truncate(one, 43)
        stories.tell(held, {one: rings.TOKENS[43:53]})
    exporter = Exporter(cache)
    there = pull(own, exporter.export(request, lease_seconds=60), Direct(exporter))
    return cache.digest([request]), own.digest([first]), own.digest([there])


def scenes():
    """(name, cache, place) of all of them."""
    for layout in LAYOUTS:
        cache = kvcore.adopt(SPEC, moved(Engine(layout, "torch").tensors), layout=layout, max_draft_tokens=3)
        yield layout, cache, {"blocks": [4, 1, 7, 2]}
    held = moved(chunks.memory("torch"))
    cache = kvcore.adopt(chunks.SPEC, held, layout=chunks.RIGHT, max_requests=3, max_draft_tokens=rings.DRAFTS)
    yield "rows in chunks, bytes apart", cache, {"blocks": [4, 1, 0, 6, 2, 5, 3]}
    for where, layout in rings.LAYOUTS.items():
        held = moved(rings.tensors("torch", where))
        cache = kvcore.adopt(
            rings.SPEC, held, layout={**rings.BLOCKED, **layout}, max_requests=3, max_draft_tokens=rings.DRAFTS
        )
        yield where, cache, {"blocks": [4, 1, 3], "slot": 2, "pages": rings.pages_of(where, 60, 41)}


def main() -> int:
    """Run all of them."""
    wrong = 0
    for name, cache, place in scenes():
        found = live(cache, place, "torch_triton")
        device = next(iter(cache.pools.values())).device
        same = len(set(found)) == 1 and device.type == "cuda"
        wrong += not same
        print(f"{name} on {device}: {'equal' if same else found}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
