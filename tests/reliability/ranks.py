"""One rank of a shard plan as a log meets it: on one device, as a process on gloo, or as a thread that waits its turn.

All have the same four methods: a cache of this rank, whether a request is on its replica, the digest of all replicas'
requests, and the largest of what all ranks say.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch

import kvcore
from kvcore import digest
from kvcore.cache import Cache
from kvcore.interop import torch_distributed
from kvcore.interop.torch_distributed import TorchExchange
from kvcore.plan import plan_cache
from kvcore.plugins import choose_backend
from kvcore.sharding import ShardedOps
from kvcore.spec import CacheSpec
from tests.reliability.turns import TurnExchange, Turns

BACKEND = "torch_triton"


class Rank(Protocol):
    """What a log asks of its rank."""

    def cache(self, spec: CacheSpec, **sizes: Any) -> Cache:
        """This rank's cache."""
        ...

    def mine(self, number: int) -> bool:
        """True for requests of this rank's replica."""
        ...

    def digest(self, cache: Cache, own: Mapping[int, kvcore.Request]) -> int:
        """Over all replicas' requests in order of their numbers, of which ``own`` are this replica's."""
        ...

    def largest(self, value: int) -> int:
        """Of what all ranks say."""
        ...


class Alone:
    """One device: what every plan is compared with."""

    def cache(self, spec: CacheSpec, **sizes: Any) -> Cache:
        """An ordinary one."""
        return kvcore.create_cache(spec, backend=BACKEND, **sizes)

    def mine(self, number: int) -> bool:
        """All are."""
        del number
        return True

    def digest(self, cache: Cache, own: Mapping[int, kvcore.Request]) -> int:
        """The cache's."""
        return cache.digest([own[number] for number in sorted(own)])

    def largest(self, value: int) -> int:
        """Its own."""
        return value


class Process:
    """A process of a group on torch.distributed."""

    def __init__(self, replicas: int, context: int) -> None:
        self._mesh = mesh(replicas, context)

    def cache(self, spec: CacheSpec, **sizes: Any) -> Cache:
        """As any user makes it."""
        return torch_distributed.create_cache(spec, mesh=self._mesh, backend=BACKEND, **sizes)

    def mine(self, number: int) -> bool:
        """As the mesh says."""
        return torch_distributed.request_shard(self._mesh, number) is not None

    def digest(self, cache: Cache, own: Mapping[int, kvcore.Request]) -> int:
        """Gathered over the mesh."""
        return torch_distributed.gathered_digest(cache, self._mesh, own)

    def largest(self, value: int) -> int:
        """By a reduction over all ranks."""
        import torch.distributed as dist

        found = torch.tensor([value])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


class Thread:
    """A thread of ``turns``: number ``rank``, and place ``rank - first`` in a plan whose first rank is ``first``."""

    def __init__(self, turns: Turns, rank: int, first: int, replicas: int, context: int, everyone: int) -> None:
        self._turns, self._rank, self._replicas, self._context = turns, rank, replicas, context
        self._everyone = tuple(range(everyone))
        self._plan = tuple(range(first, first + replicas * context))
        self._replica = (rank - first) // context
        start = first + self._replica * context
        self._shards = tuple(range(start, start + context))

    def cache(self, spec: CacheSpec, **sizes: Any) -> Cache:
        """What ``torch_distributed.create_cache`` makes, over another exchange."""
        if self._context == 1:
            return kvcore.create_cache(spec, backend=BACKEND, **sizes)
        chosen = choose_backend(BACKEND, None)
        prefix, check = sizes.pop("prefix"), sizes.pop("check")
        plan = plan_cache(spec, layout=chosen.default_layout(None), context=self._context, **sizes)
        ops: Any = ShardedOps(chosen, plan, TurnExchange(self._turns, self._shards, self._rank), device=None)
        return Cache(plan, chosen, ops, prefix=prefix, check=check)

    def mine(self, number: int) -> bool:
        """Request n is on replica n mod N."""
        return number % self._replicas == self._replica

    def digest(self, cache: Cache, own: Mapping[int, kvcore.Request]) -> int:
        """Of the lanes that all ranks of the plan say."""
        mine = dict(
            zip(own, cache.exclusive("digest", lambda state: state.digest_lanes(list(own.values()))), strict=True)
        )
        lanes: dict[int, Any] = {}
        for part in self._turns.gather(self._rank, self._plan, mine):
            # Every shard of a replica says the same, or the digests would not be compared by rank.
            lanes |= part | mine
        return digest.combine([lanes[number] for number in sorted(lanes)])

    def largest(self, value: int) -> int:
        """Of all plans: one log is acted on by all of them at once."""
        return max(self._turns.gather(self._rank, self._everyone, value))


class Silent(TorchExchange):
    """The exchange of the first of two shards, the other of which has nothing to say."""

    def __init__(self) -> None:
        self._take_place(2, 0, "cpu")

    def _sum(self, values):
        pass

    def _stack(self, values):
        return torch.stack((values, torch.zeros_like(values)))


def first_of_two(spec: CacheSpec, backend: str, *, prefix: Literal["off", "full"], **sizes: Any) -> Cache:
    """A context shard alone: what it does by itself can be looked at in one thread."""
    chosen = choose_backend(backend, None)
    plan = plan_cache(spec, layout=chosen.default_layout(None), context=2, **sizes)
    ops: Any = ShardedOps(chosen, plan, Silent(), device=None)
    return Cache(plan, chosen, ops, prefix=prefix, check=False)


_meshes: dict[tuple[int, int], Any] = {}


def mesh(replicas: int, context: int) -> Any:
    """The mesh of a plan; made once, since groups are."""
    from torch.distributed.device_mesh import init_device_mesh

    if (replicas, context) not in _meshes:
        names = ("requests", "context")
        _meshes[replicas, context] = init_device_mesh("cpu", (replicas, context), mesh_dim_names=names)
    return _meshes[replicas, context]
