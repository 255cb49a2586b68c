"""R9 on shards: one log of operations on every shard plan; equal digests at every checkpoint, and the same attention.

Plans are replicas of requests times context shards. The log is made from a seed alone: every rank makes all of it, and
acts on its replica's requests. Digests are over all requests in order of their numbers. By default the ranks of all
plans are threads of one process that take turns (``--over threads``), with the product's own shards, merges and digests
over an exchange within the process; ``--over gloo`` tells the same logs to processes on torch.distributed.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

import kvcore
from kvcore.spec import CacheSpec
from tests.reliability import command
from tests.reliability.ranks import Alone, Process, Rank, Thread
from tests.reliability.turns import Turns
from tests.support import gloo, scene, stories

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

SALT = "one tenant"
"""Of all requests, wherever they are."""

CHECKPOINT = 5
"""Operations between two digests of everything."""

ATTENDED = 3
"""Steps of every third operation are attended to."""

EACH = 50
"""Operations of one log."""

LONGEST = 150
HEADS = 2
TOLERANCE = 3e-5
"""Of attention in fp32, where only the order of summation differs, relative to values of about 1."""


class Told(NamedTuple):
    """What one rank saw.

    Attributes:
        digests: at checkpoints.
        attention: by (operation, layer, request): out, lse, and picks where a layer selects.
        happened: operations by kind.
        lengths: those that truncations left, by operation.
    """

    digests: list[int]
    attention: dict[tuple[int, int, int], list[np.ndarray]]
    happened: Counter[str]
    lengths: dict[int, int]


def life(
    seed: int, operations: int, replicas: int, context: int, which: int, lengths: dict[int, int] | None = None
) -> Told:
    """One log in this process: on one device if the plan is 1 × 1, else as a process of the mesh."""
    rank = Alone() if replicas * context == 1 else Process(replicas, context)
    return Life(seed, rank, SPECS[which], lengths).run(operations)


def lives(
    seed: int, operations: int, plans: dict[str, tuple[int, int]], which: int
) -> tuple[Told, dict[str, list[Told]]]:
    """One log on one device and on every plan at once, in threads that take turns: what each rank saw."""
    shapes = [(1, 1), *plans.values()]
    starts = [sum(replicas * context for replicas, context in shapes[:n]) for n in range(len(shapes) + 1)]
    turns, spec = Turns(starts[-1]), SPECS[which]

    def work(rank: int) -> Told:
        plan = max(number for number, start in enumerate(starts) if start <= rank)
        return Life(seed, Thread(turns, rank, starts[plan], *shapes[plan], starts[-1]), spec).run(operations)

    (one, *others) = turns.run(work)
    parts = {
        name: others[start - 1 : end - 1] for name, start, end in zip(plans, starts[1:-1], starts[2:], strict=True)
    }
    return one, parts


class Life:
    """The log, made up and acted on at the same time; ``lengths`` are those that truncations were agreed to leave."""

    def __init__(self, seed: int, rank: Rank, spec: CacheSpec, lengths: dict[int, int] | None = None) -> None:
        self.choice = random.Random(seed)
        self.rank = rank
        self.lengths = lengths
        self.cache = rank.cache(spec, max_requests=8, max_tokens=8 * 256, max_draft_tokens=2, prefix="full", check=True)
        scene.poison(self.cache)
        # All live requests: number -> token ids; and this replica's.
        self.ids: dict[int, list[int]] = {}
        self.own: dict[int, kvcore.Request] = {}
        self.last = -1
        self.told = Told([], {}, Counter(), {})

    def run(self, operations: int) -> Told:
        kinds = {"admit": 3, "step": 10, "fail": 1, "fork": 2, "truncate": 3, "release": 2, "move": 1}
        for turn in range(operations):
            what = self.choice.choices(list(kinds), list(kinds.values()))[0] if self.ids else "admit"
            what = "release" if len(self.ids) >= 6 and what in ("admit", "fork") else what
            getattr(self, f"_{what}")(turn)
            self.told.happened[what] += 1
            if turn % CHECKPOINT == 0:
                self.told.digests.append(self.rank.digest(self.cache, self.own))
        return self.told

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
        if self.rank.mine(number):
            request = self.cache.admit(prompt, salt=SALT)
            self.own[number] = request
            self._tell(turn, {number: prompt[request.length :]})

    def _step(self, turn: int, *, fail: bool = False) -> None:
        chosen = self.choice.sample(sorted(self.ids), min(len(self.ids), self.choice.randrange(1, 4)))
        new = {number: [self.choice.randrange(1000) for _ in range(self.choice.randrange(9))] for number in chosen}
        new = {number: ids[: LONGEST - len(self.ids[number])] for number, ids in new.items()}
        self._tell(turn, {number: ids for number, ids in new.items() if self.rank.mine(number)}, fail=fail)
        if not fail:
            for number, ids in new.items():
                self.ids[number] = self.ids[number] + ids

    def _fail(self, turn: int) -> None:
        self._step(turn, fail=True)

    def _fork(self, turn: int) -> None:
        source = self._some()
        number = self._number(like=source)
        self.ids[number] = list(self.ids[source])
        if self.rank.mine(number):
            self.own[number] = self.cache.fork(self.own[source])

    def _truncate(self, turn: int) -> None:
        number = self._some()
        length = max(0, len(self.ids[number]) - self.choice.randrange(3))
        if self.rank.mine(number):
            # How far back a prefix hit or an earlier truncation lets it go depends on the pages of a plan.
            length = max(length, self.cache._state.least_length(self.own[number]))
        length = self.rank.largest(length) if self.lengths is None else self.lengths[turn]
        self.told.lengths[turn] = length
        if self.rank.mine(number):
            self.cache.truncate(self.own[number], length)
        self.ids[number] = self.ids[number][:length]

    def _release(self, turn: int) -> None:
        number = self._some()
        del self.ids[number]
        if self.rank.mine(number):
            self.cache.release(self.own.pop(number))

    def _move(self, turn: int) -> None:
        number = self._some()
        if self.rank.mine(number):
            blob = self.cache.export_request(self.own[number])
            self.cache.release(self.own[number])
            self.own[number] = self.cache.import_request(blob, salt=SALT)

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


def differences(one: Told, ranks: list[Told]) -> list[str]:
    """Where a plan's processes differ from one device."""
    found = [
        f"rank {r}: digest {at}"
        for r, told in enumerate(ranks)
        for at, pair in enumerate(zip(one.digests, told.digests, strict=True))
        if pair[0] != pair[1]
    ]
    for key, arrays in one.attention.items():
        seen = {r: told.attention[key] for r, told in enumerate(ranks) if key in told.attention}
        if not seen:
            found.append(f"{key}: not attended")
        for r, theirs in seen.items():
            found += [f"rank {r}: {key}: {text}" for text in apart(arrays, theirs)]
    return found


def apart(one: list[np.ndarray], theirs: list[np.ndarray]) -> list[str]:
    """Where two attentions differ. A prefix hit may be longer on one side: what both computed is compared."""
    count = min(len(one[0]), len(theirs[0]))
    mine, theirs = ([array[len(array) - count :] for array in side] for side in (one, theirs))
    if len(mine) == 3 and not (mine[2] == theirs[2]).all():
        return ["selection differs"]
    return [
        f"{name} differs by {np.abs(a - b).max()}"
        for name, a, b in zip(("out", "lse"), mine, theirs, strict=False)
        if not np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    ]


_processes: dict[int, gloo.Processes] = {}


def on_gloo(seed: int, operations: int, which: int, lengths: dict[int, int]) -> dict[str, list[Told]]:
    """The log in processes on torch.distributed, one group for each plan, started once."""
    found = {}
    for name, (replicas, context) in PLANS.items():
        count = replicas * context
        if count not in _processes:
            _processes[count] = gloo.Processes(count, timeout=900)
        found[name] = _processes[count].run(life, seed, operations, replicas, context, which, lengths)
    return found


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """One log of ``EACH`` operations: ranks of all plans against one device."""
    which = seed % len(SPECS)
    one, plans = lives(seed, EACH, PLANS, which)
    if options["over"] == "gloo":
        plans = on_gloo(seed, EACH, which, one.lengths)
    failures = [f"{name}: {text}" for name, ranks in plans.items() for text in differences(one, ranks)[:3]]
    counts = {
        "operations": EACH,
        "ranks": sum(len(ranks) for ranks in plans.values()),
        "digests_compared": sum(len(told.digests) for ranks in plans.values() for told in ranks),
        "attention_compared": sum(len(told.attention) for ranks in plans.values() for told in ranks),
        "happened": dict(one.happened),
    }
    return command.Told(counts, [{"seed": seed, "error": text} for text in failures])


FIGURE = command.Figure(
    name="R9 on shards", counted="operations", short=100, full=10_000, tell=tell, options={"over": "threads"}
)


if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
