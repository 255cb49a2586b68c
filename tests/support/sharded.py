"""What the processes of a sharded cache do in tests; each function is run by every rank, or by one device alone."""

from typing import Any

import numpy as np
import torch

import kvcore
from kvcore.errors import KvcoreError
from kvcore.interop import torch_distributed
from kvcore.sharding import ops
from kvcore.sharding import torch as exchange
from kvcore.spec import CacheSpec, Rope, presets
from tests.reliability import ranks, shards
from tests.support import scene, stories

SPECS = {spec.name: spec for spec in (stories.LATENT, stories.STORED)} | {
    "mixed": shards.MIXED,
    "v4 flash tiny": presets.deepseek_v4_flash_tiny(block_tokens=16, draft=False),
    "classic, padded on the left": CacheSpec(
        layers=[scene.classic(), scene.classic("ring", window=5), scene.classic(value_dim=4)], block_tokens=8
    ),
}


def create(name: str, context: int) -> kvcore.Cache:
    """A poisoned cache of three requests, on this rank of ``context`` shards."""
    sizes = {"max_requests": 3, "max_tokens": 1024, "check": True}
    if context == 1:
        cache = kvcore.create_cache(SPECS[name], backend="torch_triton", **sizes)
    else:
        cache = torch_distributed.create_cache(SPECS[name], mesh=mesh(context), **sizes)
    scene.poison(cache)
    return cache


def mesh(context: int) -> Any:
    """All processes as context shards."""
    return ranks.mesh(1, context)


def read_everything(name: str, context: int, lengths: list[int]) -> dict[str, np.ndarray]:
    """Every gather of every layer, inside a step, between its appends and at rest; bytes where they are to be equal."""
    cache = create(name, context)
    requests = [cache.admit() for _ in lengths]
    padding = {"left_padding": {requests[0]: 37}} if "padded" in name else {}
    # Two steps, so that some rows are older than the step.
    for step_number in (0, 1):
        new = {
            request: list(range(length // 2)) if step_number == 0 else list(range(length // 2, length))
            for request, length in zip(requests, lengths, strict=True)
        }
        tokens = [token for ids in new.values() for token in ids]
        found: dict[str, Any] = {}
        with cache.step(new, **padding) as step:
            stories.feed(step, tokens)
            positions = kvcore.to_numpy(step.positions)
            for number, layer in enumerate(cache.spec.layers):
                handle = step.layer(number)
                for role, _ in layer.components():
                    found[f"{number} {role} rows"] = handle.gather_rows(role)
                if layer.entries is not None:
                    picks = (np.arange(len(tokens) * 7).reshape(-1, 7) * 5 % 23 - 2).astype(np.int32)
                    found[f"{number} entries"] = handle.gather_entries(picks)
                    found[f"{number} all entries"] = handle.gather_all_entries()
                    found[f"{number} all keys"] = handle.gather_all_index_keys() if layer.index_keys else ()
                if layer.kv is not None:
                    found[f"{number} kv"] = (*handle.gather_kv(), handle.mask())
                for kind in ("float32", "bfloat16"):
                    found[f"{number} attention {kind}"] = attend(step, number, tokens, positions, kind)
    found["digest"] = (np.array([cache.digest()], np.uint64),)
    return {
        f"{key}.{part}": kvcore.to_numpy(array) for key, arrays in found.items() for part, array in enumerate(arrays)
    }


def attend(step: Any, number: int, tokens: list[int], positions: np.ndarray, kind: str) -> list[Any]:
    """Attention with everything visible, with a selection, and with none; latent layers' outputs turned back, too."""
    layer = step.cache.spec.layers[number]
    part = layer.kv or layer.window or layer.entries
    q = torch.from_numpy(stories.rows(f"q{number}", tokens, positions, 2, part.key_dim if layer.kv else part.dim))
    q = q.to(getattr(torch, kind))
    handle = step.layer(number)
    sink = np.array([0.5, -2], np.float32)
    found = list(handle.attend(q, sink=sink))
    if layer.kv is None:
        found += handle.attend(q, sink=sink, rope=Rope(dim=4, theta=100.0))
    if layer.entries is not None:
        picks = (np.arange(len(tokens))[:, None] * 3 + np.array([0, 1, 5, -1 - 999])) % 40
        found += handle.attend(q, picks.astype(np.int32))
        found += handle.attend(q, np.zeros((len(tokens), 0), np.int32), scale=0.25)
    return found


def ties(context: int) -> np.ndarray:
    """Top 6 of scores that are small integers, so that exact ties lie on both sides of every page."""
    cache = create("latent", context)
    request = cache.admit()
    with cache.step({request: 200}) as step:
        stories.feed(step, list(range(200)))
        handle = step.layer(0)
        scores = kvcore.to_numpy(handle.index_scores(np.zeros((200, 2, 8), np.float32), np.ones((200, 2), np.float32)))
        # Zeros where this shard has a visible entry, -inf elsewhere; then a few equal heights.
        entries = np.arange(scores.shape[1])
        scores = np.where(np.isfinite(scores), (entries % 5 == 3) - (entries % 7 == 1).astype(np.float32), scores)
        picks = handle.select(torch.from_numpy(scores.astype(np.float32)), 6)
        if context > 1:
            # The same without wide scores, for scores of all kinds.
            q, weights = (
                torch.from_numpy(stories.rows(name, range(200), np.arange(200), *shape))
                for name, shape in (("q", (2, 8)), ("w", (2,)))
            )
            one_by_one = handle.select(handle.index_scores(q, weights), 6)
            at_once = cache.ops.index_select(cache.pools, 0, step._device_index, q, weights, 6)
            assert (one_by_one == at_once).all()
        step.abort()
    return kvcore.to_numpy(picks)


def moved(name: str, blob: bytes, context: int) -> tuple[bytes, int, bytes]:
    """Import, export again, go on by 40 tokens: (the export, the digest, the export then)."""
    cache = create(name, context)
    cache.admit()
    request = cache.import_request(blob)
    again = cache.export_request(request)
    stories.tell(cache, {request: list(range(500, 540))})
    return again, cache.digest([request]), cache.export_request(request)


def pool_bytes(context: int) -> int:
    """Bytes of one rank's paged pools, for the same tokens in all."""
    cache = create("v4 flash tiny", context)
    return cache.plan.blocks * cache.plan.block_bytes


def refused(which: str) -> str:
    """The error of a cache that cannot be."""
    from torch.distributed.device_mesh import init_device_mesh

    make = {
        "a paged window": lambda: (stories.PAGED, mesh(2), {}),
        "a mesh without names": lambda: (stories.LATENT, init_device_mesh("cpu", (2,)), {}),
        "a mesh of heads": lambda: (stories.LATENT, init_device_mesh("cpu", (2,), mesh_dim_names=("heads",)), {}),
        "not a torch backend": lambda: (stories.LATENT, mesh(2), {"backend": "reference"}),
        "a budget too small": lambda: (stories.LATENT, mesh(2), {"budget_bytes": 100, "max_tokens": None}),
    }
    spec, on, sizes = make[which]()
    try:
        torch_distributed.create_cache(spec, mesh=on, **{"max_requests": 1, "max_tokens": 64, **sizes})
    except KvcoreError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _sink_twice(right, self, parts, once, sink, like):
    """As if a share of the sink were taken out on every shard."""
    parts = parts if sink is None else parts._replace(out=parts.out * 0.9)
    return right(self, parts, once, sink, like)


def _own_picks(right, self, scores, picks, entries):  # noqa: ARG001 - the signature of what it stands for
    """No merge."""
    return entries


def _window_everywhere(right, self, parts, once, sink, like):
    """The window weighs as often as there are shards."""
    parts = parts if once is None else parts._replace(lse=torch.logaddexp(parts.lse, once.lse))
    return right(self, parts, once, sink, like)


def _not_from_others(right, self, values):
    """Nothing comes from other shards, but the call is made."""
    right(self, values)
    return values


FAULTS = {
    "the sink on every shard": ("merge", _sink_twice),
    "no merge of picks": ("top", _own_picks),
    "the window of every shard": ("merge", _window_everywhere),
    "rows of others missing": ("from_owner", _not_from_others),
}


def broken_life(fault: str, seed: int, operations: int, context: int, which: int) -> Any:
    """A log on shards with a fault."""
    name, broken = FAULTS[fault]
    right = getattr(exchange.TorchExchange, name)
    setattr(exchange.TorchExchange, name, lambda self, *arguments: broken(right, self, *arguments))
    try:
        return shards.life(seed, operations, 1, context, which)
    finally:
        setattr(exchange.TorchExchange, name, right)


def unmasked_life(seed: int, operations: int, context: int, which: int) -> Any:
    """A log on shards that store the pages of others too."""
    right = ops.to_write
    ops.to_write = lambda index, mine: right(index, mine * 0 + 1)
    try:
        return shards.life(seed, operations, 1, context, which)
    finally:
        ops.to_write = right
