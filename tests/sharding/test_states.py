"""Recurrent layers by heads and by requests: shards hold what the whole cache holds, and go on from it."""

import numpy as np
import pytest

import kvcore
from kvcore import digest
from kvcore.handoff import import_shards
from kvcore.sharding import ShardPlan, assemble_rows
from kvcore.spec import KV, CacheSpec, Conv, LayerSpec, State
from tests.support import scene
from tests.support.backends_under_test import BACKENDS

SPEC = CacheSpec(
    layers=(
        LayerSpec(state=State(heads=4, key_dim=3, value_dim=2), conv=Conv(heads=4, dim=3, width=4, format="fp32")),
        LayerSpec(kv=KV(key_heads=4, key_dim=2, key_format="fp32")),
        LayerSpec(state=State(heads=8, key_dim=5, format="bf16")),
    ),
    block_tokens=4,
)
LENGTHS = 9, 3, 6, 5


def values(kind: int, request: int, position: int, *shape: int) -> np.ndarray:
    """What a model would make of a request's tokens so far."""
    return np.random.default_rng([kind, request, position]).integers(-99, 99, shape).astype(np.float32)


def told(plan: ShardPlan, rank: int, backend: str) -> kvcore.Cache:
    """A rank's cache, after steps of several tokens and a rollback."""
    replica, _, _, shard = plan.coordinate(rank)
    numbers = range(replica, len(LENGTHS), plan.requests)
    cache = kvcore.create_cache(
        plan.local_spec(rank), backend=backend, max_requests=5, max_tokens=96, max_draft_tokens=2
    )
    requests = {number: cache.admit() for number in numbers}
    spans = [{n: (0, LENGTHS[n] - 1) for n in numbers}, {n: (LENGTHS[n] - 1, LENGTHS[n] + 2) for n in numbers}]
    for span in spans:
        with cache.step({requests[n]: end - start for n, (start, end) in span.items()}) as step:
            tokens = [(n, at) for n, (start, end) in span.items() for at in range(start, end)]
            for layer, spec in enumerate(SPEC.layers):
                for role, component in spec.components():
                    (heads, *_) = [list(part.on(shard)) for part in plan.parts(layer, role)]
                    if role == "state":
                        found = [values(layer, n, at, *component.shape)[heads] for n, at in tokens]
                        step.layer(layer).append_state(np.stack(found))
                    elif role == "conv":
                        found = [values(7, n, at, 4, 3)[heads].reshape(-1) for n, at in tokens]
                        step.layer(layer).append_conv(np.stack(found))
                    else:
                        found = np.stack([values(8, n, at, 4, 2)[heads] for n, at in tokens])
                        step.layer(layer).append_kv(found, found)
    for number, request in requests.items():
        cache.truncate(request, LENGTHS[number])
    return cache


def lanes_of(cache: kvcore.Cache, layer: int, role: str, raw) -> tuple[int, int]:
    pair = kvcore.to_numpy(cache.ops.digest_rows(raw, digest.region_salt(layer, role)))[0]
    return int(pair[0]), int(pair[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [{"requests": 2, "heads": 2}, {"heads": 4}, {"requests": 4}], ids=str)
def test_shards_have_the_digest_of_the_whole(axes, backend):
    plan = ShardPlan(spec=SPEC, **axes)
    whole = told(ShardPlan(spec=SPEC), 0, backend)
    caches = [told(plan, rank, backend) for rank in range(plan.ranks)]
    found = []
    for number, length in enumerate(LENGTHS):
        lanes = []
        for layer, spec in enumerate(SPEC.layers):
            for role, _ in spec.components():
                shares = []
                for shard in range(plan.heads):
                    cache = caches[plan.rank((number % plan.requests, 0, 0, shard))]
                    with scene.at_rest(cache, cache.requests[number // plan.requests]) as step:
                        raw = step.layer(layer).gather_rows(role)
                    shares.append(kvcore.to_numpy(raw.rows))
                rows = whole.asarray(assemble_rows(plan, layer, role, shares))
                positions = whole.asarray(kvcore.to_numpy(raw.positions))
                lanes.append(lanes_of(whole, layer, role, raw._replace(rows=rows, positions=positions)))
        found.append((length, lanes))
    assert digest.combine(found) == whole.digest()


@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_requests_move_between_sides_that_are_cut_otherwise(sources, targets):
    given, wanted = ShardPlan(spec=SPEC, heads=sources), ShardPlan(spec=SPEC, heads=targets)
    caches = [told(given, rank, "reference") for rank in range(sources)]
    blobs = [cache.export_request(cache.requests[0]) for cache in caches]
    for rank in range(targets):
        own = told(wanted, rank, "reference")
        request = import_shards(own, blobs, whole=SPEC, rank=rank, ranks=targets)
        assert own.digest([request]) == own.digest([own.requests[0]])
        with scene.at_rest(own, request, own.requests[0]) as step:
            moved, there = kvcore.to_numpy(step.layer(0).read_state())
            assert moved.tolist() == there.tolist()
            assert np.abs(there).sum() > 0
