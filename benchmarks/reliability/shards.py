"""R9 on shards: one log of operations on every shard plan; equal digests at every checkpoint, and the same attention.

Plans are replicas of requests times context shards, processes on gloo. The log is made from a seed alone: every process
makes all of it, and acts on its replica's requests. Digests are over all requests in order of their numbers.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import gloo
import numpy as np
import scene
import stories
import torch

import kvcore
from benchmarks.reliability import command
from kvcore.interop import torch_distributed
from kvcore.spec import CacheSpec

MIXED = CacheSpec(
    layers=[
        scene.compressed(4, window=6),
        scene.classic(),
        scene.classic("ring", window=5, key_format="bf16"),
        # As wide as its keys, and plain: what backends read as it lies.
        scene.classic(value_dim=4),
    ],
    block_tokens=8,
)
SPECS = (stories.LATENT, stories.STORED, MIXED)
PLANS = {"DP2": (2, 1), "CP2": (1, 2), "CP4": (1, 4), "DP2×CP4": (2, 4)}
"""Name -> (replicas, context shards)."""

CHECKPOINT = 5
"""Operations between two digests of everything."""

ATTENDED = 3
"""Steps of every third operation are attended to."""

LONGEST = 150
HEADS = 2
TOLERANCE = 3e-5
"""Of attention in fp32, where only the order of summation differs, relative to values of about 1."""


class Told(NamedTuple):
    """What one process saw: digests at checkpoints, attention by (operation, layer, request), and counts of operations.

    Attention is a list of arrays: out, lse, and where a layer selects, picks and their scores.
    """

    digests: list[int]
    attention: dict[tuple[int, int, int], list[np.ndarray]]
    happened: Counter[str]


def life(seed: int, operations: int, replicas: int, context: int, which: int) -> Told:
    """One log in this process: on one device if the plan is 1 × 1, else as a rank of the mesh."""
    return Life(seed, replicas, context, SPECS[which]).run(operations)


class Life:
    """The log, made up and acted on at the same time."""

    def __init__(self, seed: int, replicas: int, context: int, spec: CacheSpec) -> None:
        self.choice = random.Random(seed)
        sizes = {"max_requests": 8, "max_tokens": 8 * 256, "max_draft_tokens": 2, "prefix": "full", "check": True}
        self.mesh = None
        if replicas * context == 1:
            self.cache = kvcore.create_cache(spec, backend="torch_triton", **sizes)
        else:
            self.mesh = _mesh(replicas, context)
            self.cache = torch_distributed.create_cache(spec, mesh=self.mesh, **sizes)
        scene.poison(self.cache)
        # All live requests: number -> token ids; and this replica's.
        self.ids: dict[int, list[int]] = {}
        self.own: dict[int, kvcore.Request] = {}
        self.last = -1
        self.told = Told([], {}, Counter())

    def run(self, operations: int) -> Told:
        kinds = {"admit": 3, "step": 10, "fail": 1, "fork": 2, "truncate": 3, "release": 2, "move": 1}
        for turn in range(operations):
            what = self.choice.choices(list(kinds), list(kinds.values()))[0] if self.ids else "admit"
            what = "release" if len(self.ids) >= 6 and what in ("admit", "fork") else what
            getattr(self, f"_{what}")(turn)
            self.told.happened[what] += 1
            if turn % CHECKPOINT == 0:
                self.told.digests.append(self._digest())
        return self.told

    def _digest(self) -> int:
        if self.mesh is None:
            return self.cache.digest([self.own[number] for number in sorted(self.own)])
        return torch_distributed.gathered_digest(self.cache, self.mesh, self.own)

    def _mine(self, number: int) -> bool:
        return self.mesh is None or torch_distributed.request_shard(self.mesh, number) is not None

    def _number(self, like: int | None = None) -> int:
        """A new number; a fork's is on the replica of its source, also where there are two."""
        self.last += 1
        if like is not None and self.last % 2 != like % 2:
            self.last += 1
        return self.last

    def _admit(self, turn: int) -> None:
        number = self._number()
        prompt = [token if token < 40 * self.choice.randrange(3) else 1000 + number + token for token in range(90)]
        prompt = prompt[: self.choice.randrange(1, 90)]
        self.ids[number] = prompt
        if self._mine(number):
            request = self.cache.admit(prompt)
            self.own[number] = request
            self._tell(turn, {number: prompt[request.length :]})

    def _step(self, turn: int, *, fail: bool = False) -> None:
        chosen = self.choice.sample(sorted(self.ids), min(len(self.ids), self.choice.randrange(1, 4)))
        new = {number: [self.choice.randrange(1000) for _ in range(self.choice.randrange(9))] for number in chosen}
        new = {number: ids[: LONGEST - len(self.ids[number])] for number, ids in new.items()}
        self._tell(turn, {number: ids for number, ids in new.items() if self._mine(number)}, fail=fail)
        if not fail:
            for number, ids in new.items():
                self.ids[number] = self.ids[number] + ids

    def _fail(self, turn: int) -> None:
        self._step(turn, fail=True)

    def _fork(self, turn: int) -> None:
        source = self._some()
        number = self._number(like=source)
        self.ids[number] = list(self.ids[source])
        if self._mine(number):
            self.own[number] = self.cache.fork(self.own[source])

    def _truncate(self, turn: int) -> None:
        number = self._some()
        length = max(0, len(self.ids[number]) - self.choice.randrange(3))
        if self._mine(number):
            # How far back a prefix hit or an earlier truncation lets it go is this replica's affair.
            length = max(length, self.cache.floor(self.own[number]))
        if self.mesh is not None and self.mesh.ndim == 2:
            length = _agreed(length)
        if self._mine(number):
            self.cache.truncate(self.own[number], length)
        self.ids[number] = self.ids[number][:length]

    def _release(self, turn: int) -> None:
        number = self._some()
        del self.ids[number]
        if self._mine(number):
            self.cache.release(self.own.pop(number))

    def _move(self, turn: int) -> None:
        number = self._some()
        if self._mine(number):
            blob = self.cache.export_request(self.own[number])
            self.cache.release(self.own[number])
            self.own[number] = self.cache.import_request(blob)

    def _some(self) -> int:
        return self.choice.choice(sorted(self.ids))

    def _tell(self, turn: int, new: dict[int, list[int]], *, fail: bool = False) -> None:
        if not new:
            return
        tokens = [token for ids in new.values() for token in ids]
        owner = [number for number, ids in new.items() for _ in ids]
        with self.cache.step({self.own[number]: ids for number, ids in new.items()}) as step:
            stories.feed(step, tokens)
            positions = kvcore.to_numpy(step.positions)
            for number, layer in enumerate(self.cache.spec.layers if turn % ATTENDED == 0 else ()):
                seen = attend(step.layer(number), layer, number, tokens, positions)
                for request in new:
                    rows = [row for row, of in enumerate(owner) if of == request]
                    self.told.attention[turn, number, request] = [array[rows] for array in seen]
            if fail:
                step.abort()


def attend(handle: Any, layer: Any, number: int, tokens: list[int], positions: np.ndarray) -> list[np.ndarray]:
    """One layer's attention to made-up queries: out, lse, and picks and their scores where it selects."""
    shown, selected = [], None
    if layer.index_keys is not None:
        keys = layer.index_keys
        q = stories.rows(f"iq{number}", tokens, positions, keys.heads, keys.dim)
        scores = handle.index_scores(q, stories.rows(f"iw{number}", tokens, positions, keys.heads))
        selected = handle.select(scores, keys.topk)
        picks = kvcore.to_numpy(selected)
        # Another shard's score is -inf here; the lowest of them all stands for none.
        shown = [picks]
    kind = layer.kv or layer.window or layer.entries
    dim = kind.key_dim if layer.kv else kind.dim
    q = stories.rows(f"q{number}", tokens, positions, HEADS, dim)
    sink = np.linspace(-1, 1, HEADS, dtype=np.float32)
    found = handle.attend(q, selected, sink=sink)
    return [kvcore.to_numpy(found.out), kvcore.to_numpy(found.lse), *shown]


_meshes: dict[tuple[int, int], Any] = {}


def _mesh(replicas: int, context: int) -> Any:
    """The mesh of a plan; made once, since groups are."""
    from torch.distributed.device_mesh import init_device_mesh

    if (replicas, context) not in _meshes:
        names = ("requests", "context")
        _meshes[replicas, context] = init_device_mesh("cpu", (replicas, context), mesh_dim_names=names)
    return _meshes[replicas, context]


def _agreed(length: int) -> int:
    """The largest of all ranks' lengths: a request goes back as far as its own replica allows."""
    import torch.distributed as dist

    value = torch.tensor([length])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def differences(one: Told, ranks: list[Told]) -> list[str]:
    """Where a plan's processes differ from one device."""
    found = [
        f"rank {r}: digest {at}"
        for r, told in enumerate(ranks)
        for at, pair in enumerate(zip(one.digests, told.digests, strict=True))
        if pair[0] != pair[1]
    ]
    union: dict[tuple[int, int, int], list[np.ndarray]] = {}
    for told in ranks:
        union |= told.attention
    for key, arrays in one.attention.items():
        theirs = union.get(key)
        if theirs is None:
            found.append(f"{key}: not attended")
            continue
        # A prefix hit may be longer on one side: what both computed is compared.
        count = min(len(arrays[0]), len(theirs[0]))
        mine, theirs = ([array[len(array) - count :] for array in side] for side in (arrays, theirs))
        if len(mine) == 3 and not (mine[2] == theirs[2]).all():
            found.append(f"{key}: selection differs")
            continue
        for name, a, b in zip(("out", "lse"), mine, theirs, strict=False):
            if not np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE):
                found.append(f"{key}: {name} differs by {np.abs(a - b).max()}")
    return found


def run(*, operations: int, seed: int, plans: dict[str, tuple[int, int]], each: int = 50) -> dict[str, Any]:
    """Logs of ``each`` operations on one device and on every plan, until there were ``operations`` on each."""
    happened: Counter[str] = Counter()
    failures: list[str] = []
    done, compared, at = 0, 0, seed
    processes = {name: gloo.Processes(replicas * context, timeout=900) for name, (replicas, context) in plans.items()}
    while done < operations and len(failures) < 5 and not command.spent():
        count, which = min(each, operations - done), at % len(SPECS)
        one = life(at, count, 1, 1, which)
        for name, shape in plans.items():
            ranks = processes[name].run(life, at, count, *shape, which)
            failures += [f"{name}, seed {at}: {text}" for text in differences(one, ranks)[:3]]
        compared += len(one.attention)
        happened += one.happened
        done += count
        at += 1
    for group in processes.values():
        group.close()
    for failure in failures:
        print(failure)
    return {
        "figure": "R9 on shards",
        "plans": {name: {"requests": shape[0], "context": shape[1]} for name, shape in plans.items()},
        "operations": done,
        "attention_compared": compared,
        "tolerance": TOLERANCE,
        "divergences": len(failures),
        "failures": failures,
        "happened": dict(happened),
    }


if __name__ == "__main__":
    command.main(
        __doc__,
        lambda full, seed: run(
            operations=10_000 if full else 60,
            seed=seed,
            plans=PLANS if full else {name: PLANS[name] for name in ("DP2", "CP2", "CP4")},
        ),
    )
