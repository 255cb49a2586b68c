"""The digest is that of the canonical order: heads and layers in any number of caches give the one device's number."""

import numpy as np
import pytest

import kvcore
from kvcore import digest
from kvcore.sharding import ShardPlan, assemble_rows
from kvcore.spec import CacheSpec
from tests.support import scene, stories

SPEC = CacheSpec(
    layers=[
        scene.classic(heads=4, key_format="bf16", value_format="int8_row"),
        scene.classic("ring", heads=4, window=5, key_format="fp8_row"),
        scene.classic(heads=2, key_format="fp32"),
        scene.classic("slot", heads=4, value_heads=2, key_format="fp16"),
    ],
    block_tokens=8,
    name="heads",
)
TOKENS = (list(range(50, 79)), list(range(7)), list(range(300, 341)))


def told(spec: CacheSpec, backend: str, histories, layers=None, heads=None) -> kvcore.Cache:
    """A cache in which every request got its history in two steps; rows are those of the whole spec's layers."""
    cache = scene.create(spec, backend, max_requests=3, max_tokens=256)
    requests = [cache.admit() for _ in histories]
    for start in (0, 1):
        new = {
            request: history[: len(history) // 2] if start == 0 else history[len(history) // 2 :]
            for request, history in zip(requests, histories, strict=True)
        }
        tokens = [token for ids in new.values() for token in ids]
        with cache.step(new) as step:
            positions = kvcore.to_numpy(step.positions)
            for local, layer in enumerate(layers or range(len(spec.layers))):
                keys, values = SPEC.layers[layer].kv.parts
                k = stories.rows(f"k{layer}", tokens, positions, keys.heads, keys.format.dim)
                v = stories.rows(f"v{layer}", tokens, positions, values.heads, values.format.dim)
                if heads is not None:
                    k, v = (array[:, list(group)] for array, group in zip((k, v), heads(layer), strict=True))
                step.layer(local).append_kv(k, v)
    return cache


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, id="one"),
        pytest.param({"heads": 2}, id="two groups of heads"),
        pytest.param({"heads": 4}, id="four groups of heads, some of them replicas"),
        pytest.param({"heads": 8}, id="replicas of every head"),
        pytest.param({"heads": 3}, id="heads that do not divide"),
        pytest.param({"layers": 2}, id="two stages"),
        pytest.param({"layers": 2, "heads": 2, "requests": 2}, id="stages, heads and replicas"),
    ],
)
def test_shards_of_heads_and_layers_give_the_one_digest(backend, axes):
    plan = ShardPlan(spec=SPEC, **axes)
    whole = told(SPEC, backend, TOKENS)
    caches = {}
    for rank in range(plan.ranks):
        replica, stage, _, shard = plan.coordinate(rank)
        caches[rank] = told(
            plan.local_spec(rank),
            backend,
            TOKENS[replica :: plan.requests],
            list(plan.stages.on(stage)),
            lambda layer, shard=shard: [group.on(shard) for group in plan.parts(layer, "kv")],
        )
    found = []
    for number, tokens in enumerate(TOKENS):
        replica, local = number % plan.requests, number // plan.requests
        lanes = []
        for layer in range(len(SPEC.layers)):
            stage, at = plan.stages.owner(layer), plan.stages.local(layer)
            shares = []
            for shard in range(plan.heads):
                cache = caches[plan.rank((replica, stage, 0, shard))]
                with scene.at_rest(cache, cache.requests[local]) as step:
                    raw = step.layer(at).gather_rows("kv")
                shares.append(kvcore.to_numpy(raw.rows))
            rows = assemble_rows(plan, layer, "kv", shares)
            raw = raw._replace(rows=whole.asarray(rows))
            pair = kvcore.to_numpy(whole.ops.digest_rows(raw, digest.region_salt(layer, "kv")))[0]
            lanes.append((int(pair[0]), int(pair[1])))
        found.append((len(tokens), lanes))
    assert digest.combine(found) == whole.digest()


def test_a_swapped_head_is_another_digest():
    plan = ShardPlan(spec=SPEC, heads=2)
    whole = told(SPEC, "reference", TOKENS[:1])
    with scene.at_rest(whole, *whole.requests) as step:
        raw = step.layer(0).gather_rows("kv")
    keys, _ = SPEC.layers[0].kv.parts
    rows = kvcore.to_numpy(raw.rows)
    k = rows[..., : keys.heads * keys.format.row].reshape(*rows.shape[:2], 2, -1)
    v = rows[..., keys.heads * keys.format.row :].reshape(*rows.shape[:2], 2, -1)
    shares = [np.concatenate([k[:, :, shard], v[:, :, shard]], axis=-1) for shard in range(2)]
    assert (assemble_rows(plan, 0, "kv", shares) == rows).all()
    assert not (assemble_rows(plan, 0, "kv", shares[::-1]) == rows).all()
