"""A request whose entries stay in the host's memory until steps pick them, beside one that has all of its rows."""

from typing import Any

import numpy as np

import kvcore
from kvcore import store as stores
from kvcore.store import BlockStore, HostTier
from tests.support import stories

SPEC = stories.LATENT
TOKENS = [(11 * number) % 241 for number in range(140)]
SAVED = 96


def saved(backend: str = "reference", spec: Any = SPEC) -> BlockStore:
    """A store with the first tokens."""
    store = BlockStore([HostTier(1 << 24)])
    cache = stories.create(spec, backend)
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:SAVED]})
    assert stores.save(store, cache, request, TOKENS) == SAVED
    return store


def decode(
    cache: kvcore.Cache, requests: dict[kvcore.Request, list[int]], seed: int, *, fetch: bool
) -> tuple[list[np.ndarray], list[int]]:
    """What a step of some tokens attends to, layer by layer, and the rows that came for it."""
    rng, found, came = np.random.default_rng(seed), [], []
    with cache.step(requests) as step:
        tokens = [token for ids in requests.values() for token in ids]
        positions = kvcore.to_numpy(step.positions)
        for number, layer in enumerate(cache.spec.layers):
            handle = step.layer(number)
            stories.feed_layer(handle, layer, number, tokens, positions)
            picks = None
            if layer.index_keys is not None:
                q = rng.standard_normal((len(tokens), layer.index_keys.heads, layer.index_keys.dim), np.float32)
                picks = handle.index_select(cache.asarray(q), cache.asarray(np.ones(q.shape[:2], np.float32)))
                if fetch:
                    coming = handle.fetch(picks)
                    came.append(coming.rows)
            if layer.entries is not None:
                q = cache.asarray(rng.standard_normal((len(tokens), 2, layer.entries.dim), np.float32))
                out, lse = handle.attend(q, picks)
                found += [kvcore.to_numpy(out), kvcore.to_numpy(lse)]
                if picks is not None:
                    found += map(kvcore.to_numpy, handle.gather_entries(picks))
    return found, came


def check(backend: str, counts: tuple[int, ...] = (1, 1, 3, 1)) -> None:
    """Steps of both, alone and beside others, give the same bytes; what came once does not come again."""
    store = saved()
    near_cache, far_cache = (stories.create(SPEC, backend) for _ in range(2))
    near, far = stores.load(store, near_cache, TOKENS[:SAVED]), stores.load(store, far_cache, TOKENS[:SAVED], far=True)
    others = [cache.admit() for cache in (near_cache, far_cache)]
    entry = far_cache.plan.region(0, "entries")[0].format.row
    left = stores.bring(far_cache, far, 0)
    assert left == SAVED // 4 * entry
    total = 0
    for number, count in enumerate(counts):
        first = SAVED + sum(counts[:number])
        new = TOKENS[first : first + count]
        asked, _ = decode(near_cache, {others[0]: [number] * 5, near: new}, number, fetch=False)
        got, came = decode(far_cache, {others[1]: [number] * 5, far: new}, number, fetch=True)
        for one, other in zip(asked, got, strict=True):
            assert np.array_equal(one, other)
        total += sum(came)
        assert stores.bring(far_cache, far, 0) == left - total * entry
    assert 0 < total < SAVED // 4
    # The rest comes in pieces; then it is a request as any other.
    while stores.bring(far_cache, far, 3 * entry):
        pass
    assert far_cache.digest([far]) == near_cache.digest([near])
    asked, _ = decode(near_cache, {near: [5]}, 9, fetch=False)
    got, came = decode(far_cache, {far: [5]}, 9, fetch=True)
    assert all(np.array_equal(one, other) for one, other in zip(asked, got, strict=True))
    assert came == [0, 0]
    assert len(far_cache.export_request(far)) == len(near_cache.export_request(near))
