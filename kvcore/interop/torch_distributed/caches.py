"""A rank's cache of a sharded whole, and digests over all ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kvcore import digest
from kvcore.cache import Cache
from kvcore.errors import BackendError, SpecError
from kvcore.ops.fused import created
from kvcore.plan import plan_cache
from kvcore.plugins import Needs, choose_backend
from kvcore.requests.manager import Request
from kvcore.requests.prefix import Policy, check_policy
from kvcore.sharding import ShardedOps, ShardPlan
from kvcore.sharding.torch import TorchExchange
from kvcore.spec import CacheSpec

RUN = ("requests", "context")
"""Axes that a mesh may have: replicas of requests, and shards of history."""


def create_cache(
    spec: CacheSpec,
    *,
    mesh: DeviceMesh,
    backend: str = "torch_triton",
    device: str | None = None,
    max_requests: int,
    max_tokens: int | None = None,
    budget_bytes: int | None = None,
    max_draft_tokens: int = 0,
    prefix: Policy = "off",
    layout: str = "auto",
    check: bool = False,
    max_request_tokens: int | None = None,
) -> Cache:
    """This rank's cache: of its replica's requests, whole in windows and tails, its own pages of history.

    Args:
        spec: what each layer holds; the same on every rank.
        mesh: with dimensions named ``requests`` and ``context``, or one of them. Each replica (a place along
            ``requests``) has requests of its own; the ranks along ``context`` hold one cache together and must make
            the same calls.
        backend: a torch backend's name.
        device: of this rank; None for the backend's default.
        max_requests: of one replica, like the sizes that follow.
        max_tokens: over all context shards of a replica.
        budget_bytes: of one rank.
        max_draft_tokens: see ``kvcore.create_cache``, like the rest.
        prefix: blocks are published whole: a page on every context shard, ``block_tokens`` times their number.
        layout: of the pools.
        check: refuse non-finite input and unfinished steps.
        max_request_tokens: the most tokens of one request.

    Raises:
        SpecError: the mesh has other dimensions, or the spec cannot be spread over its context shards.
        BackendError: the backend is not one for torch, or cannot run here.
    """
    plan = mesh_plan(spec, mesh)
    chosen = choose_backend(backend, device, Needs.of(spec, layout))
    policy = check_policy(prefix)
    cache_plan = plan_cache(
        spec,
        max_requests=max_requests,
        max_tokens=max_tokens,
        budget_bytes=budget_bytes,
        max_draft_tokens=max_draft_tokens,
        layout=chosen.default_layout(device) if layout == "auto" else layout,
        context=plan.context,
        max_request_tokens=max_request_tokens,
    )
    if plan.context == 1:
        return Cache(cache_plan, chosen, created(chosen, cache_plan, device=device), prefix=policy, check=check)
    exchange = TorchExchange(mesh["context"].get_group(), "cpu" if device is None else device)
    ops: Any = ShardedOps(chosen, cache_plan, exchange, device=device)
    if not isinstance(ops.asarray(np.zeros(1, np.int32)), torch.Tensor):
        raise BackendError(got=backend, where="backend", allowed="a backend of torch tensors, such as 'torch_triton'")
    return Cache(cache_plan, chosen, ops, prefix=policy, check=check)


def mesh_plan(spec: CacheSpec, mesh: DeviceMesh) -> ShardPlan:
    """The shards that a mesh stands for.

    Raises:
        SpecError: as for ``create_cache``.
    """
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in RUN for name in names):
        raise SpecError(
            got=f"dimensions {', '.join(names) or 'without names'}",
            where="mesh",
            allowed=" and ".join(RUN),
            hint="Heads and layers are spread with ShardPlan.local_spec and a cache a rank.",
        )
    return ShardPlan(spec=spec, **{name: mesh.size(place) for place, name in enumerate(names)})


def request_shard(mesh: DeviceMesh, number: int) -> int | None:
    """The request's number within this rank's replica, or None if another replica has it."""
    names = mesh.mesh_dim_names or ()
    if "requests" not in names:
        return number
    own, count = mesh.get_local_rank("requests"), mesh.size(names.index("requests"))
    return number // count if number % count == own else None


def gathered_digest(cache: Cache, mesh: DeviceMesh, requests: Mapping[int, Request]) -> int:
    """The digest of all replicas' requests in order of their numbers: what one device would give.

    Args:
        cache: this rank's.
        mesh: as given to ``create_cache``; every rank calls this.
        requests: this replica's requests by their numbers over all replicas.
    """
    own = list(requests.values())
    found_here = cache.exclusive("digest", lambda state: state.digest_lanes(own))
    lanes = dict(zip(requests, found_here, strict=True))
    if "requests" in (mesh.mesh_dim_names or ()):
        group = mesh["requests"].get_group()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, lanes, group=group)
        lanes = {number: held for part in found for number, held in part.items()}
    return digest.combine([lanes[number] for number in sorted(lanes)])
