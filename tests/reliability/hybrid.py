"""R13: random lives of hybrid models, whose states answer for one length each, against a model of their tokens.

Steps that give every state or the last alone, steps that are given up half-way, rollbacks within the bound and beyond,
forks, prefix hits at kept points, requests and whole snapshots that leave and come back. Every step reads the states,
the convolutions' inputs and the keys that it goes on from, and each must be what the request's own tokens make of
nothing. What a rollback may and may not reach is told by the model as well.

With ``--planted 1`` a state is put wrong now and then, behind the cache's back: the one before the last token, that of
another request, that of tokens that were rolled back. The next step that reads it must notice, each time:
``python -m tests.reliability.hybrid --planted 1`` counts how many did.
"""

import traceback
from collections import Counter
from typing import Any

import kvcore
from kvcore.cache.loading import take_in
from kvcore.portable import snapshot
from kvcore.spec import KV, CacheSpec, Conv, LayerSpec, State
from tests.reliability import command
from tests.support import recurrent, scene

SEED_OPERATIONS = 2000
"""Of one life, as long as it is."""

SPECS = (
    recurrent.spec(),
    recurrent.spec(state="bf16", conv="bf16"),
    CacheSpec(
        layers=(
            LayerSpec(state=State(heads=1, key_dim=3, value_dim=2), conv=Conv(dim=3, width=3, format="fp32")),
            LayerSpec(state=State(heads=4, key_dim=2, format="bf16")),
            LayerSpec(conv=Conv(dim=2, width=5, format="fp32")),
            LayerSpec(kv=KV(key_heads=1, key_dim=2, key_format="fp32")),
        ),
        block_tokens=3,
        name="states, inputs and keys apart",
    ),
)
WEIGHTS = {
    "admit": 3, "step": 8, "abort": 2, "truncate": 4, "fork": 2, "release": 3, "move": 1, "checkpoint": 2,
    "reload": 0.1,
}  # fmt: skip
FAULTS = ("one token old", "of another request", "after a rollback")


class World(recurrent.Lives):
    """A cache, what is asked of it, and what it must say."""

    def __init__(self, seed: int, backend: str, device: str | None) -> None:
        policies = "full", kvcore.Periodic(1 + seed % 5), "off", "zero"
        policy = policies[seed % 4]

        def create() -> kvcore.Cache:
            return kvcore.create_cache(
                SPECS[seed % len(SPECS)], backend=backend, device=device, max_requests=2 + seed % 4,
                max_tokens=128 + 16 * (seed % 7), max_draft_tokens=seed % 5, prefix=policy, check=seed % 11 == 0,
            )  # fmt: skip

        super().__init__(create(), seed, prefix=policy != "off", looks=0.1)
        self._create = create
        self._acts = [getattr(self, name) for name in WEIGHTS]
        self.undone: dict[Any, int] = {}

    def operate(self) -> None:
        """One operation that was done."""
        while not self.do(self.rng.choices(self._acts, WEIGHTS.values())[0] if self.model else self.admit):
            pass

    def reload(self) -> bool:
        """All requests into a snapshot, and from there into a cache that takes the place of this one."""
        requests = list(self.model)
        saved = snapshot.parse(snapshot.to_bytes(self.cache._state, requests))
        told = [(self.model[each], self.that_leave(each), self.deepest(each)) for each in requests]
        if sum(-(-len(tokens) // self.cache.spec.block_tokens) for tokens, *_ in told) > self.cache.plan.blocks:
            return False
        self.cache = self._create()
        take_in(self.cache, saved, list(range(len(requests))), where="snapshot")
        for known in (self.model, self.states, self.high, self.floor, self.undone):
            known.clear()
        for request, what in zip(self.cache.requests, told, strict=True):
            self.note(request, *what)
        return True

    def finish(self) -> None:
        """Everything is given back."""
        for request in list(self.model):
            self.cache.release(request)
        assert self.cache.free_slots == self.cache.plan.slots
        assert self.cache.free_blocks == self.cache.plan.blocks

    def truncate(self) -> bool:
        before = {request: len(tokens) for request, tokens in self.model.items()}
        done = super().truncate()
        for request, tokens in self.model.items():
            if len(tokens) < before[request]:
                self.undone[request] = before[request]
        return done

    def step(self) -> bool:
        self.undone.clear()
        return super().step()

    def plant(self) -> str | None:
        """Put a state wrong for one step, which must notice: what was done; None where there was nothing to do."""
        state = self.cache._state
        layers = [number for number, layer in enumerate(self.cache.spec.layers) if layer.state is not None]
        (region,) = self.cache.plan.region(self.rng.choice(layers), "state")
        known = [request for request, tokens in self.model.items() if tokens]
        ways: dict[str, list[Any]] = {}
        for request in known:
            for fault in FAULTS:
                source = self._wrong(fault, request, known, region.rows)
                if source is not None:
                    ways.setdefault(fault, []).append((request, source))
        if not ways:
            return None
        # Seldom there is something to put wrong after a rollback.
        fault = FAULTS[-1] if FAULTS[-1] in ways else self.rng.choice(list(ways))
        request, source = self.rng.choice(ways[fault])
        to = request.slot, (len(self.model[request]) - 1) % region.rows
        ((name, _),) = region.buffers.values()
        before = kvcore.to_numpy(state.pools[name]).copy()
        after = before.reshape(len(before), region.rows, -1).copy()
        if (after[to] == after[source]).all():
            return None
        after[to] = after[source]
        scene.put(self.cache, name, after.reshape(before.shape))
        new = {request: (self.model[request], [1])}
        noticed = False
        try:
            recurrent.advance(self.cache, new)
        except AssertionError:
            noticed = True
        assert noticed, f"a state {fault} was read as the request's own"
        scene.put(self.cache, name, before)
        return fault

    def _wrong(self, fault: str, request: Any, known: list[Any], rows: int) -> tuple[int, int] | None:
        """Where a state lies that a request may be given by mistake, (slot, row); None where there is none."""
        length = len(self.model[request])
        if fault == "one token old":
            return (request.slot, (length - 2) % rows) if rows > 1 and length - 1 in self.states[request] else None
        if fault == "after a rollback":
            gone = self.undone.get(request, 0)
            return (request.slot, (gone - 1) % rows) if length < gone < length + rows else None
        other = self.rng.choice(known)
        if self.model[other] == self.model[request]:
            return None
        return other.slot, (len(self.model[other]) - 1) % rows


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """One life of a cache."""
    world = World(seed, options["backend"], options["device"] or None)
    planted: Counter[str] = Counter()
    done, failures = 0, []
    try:
        while done < int(options["operations"]):
            world.operate()
            done += 1
            if options["planted"] == "1" and world.rng.random() < 0.5:
                planted[world.plant() or ""] += 1
        world.finish()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is what is looked for
        failures.append({"seed": seed, "operation": done, "error": "".join(traceback.format_exception(error))[-2000:]})
    del planted[""]
    counts: dict[str, Any] = {"operations": done, "prefix hits": world.hits, "happened": dict(world.happened)}
    if options["planted"] == "1":
        counts |= {"planted": planted.total(), "noticed": dict(planted)}
    return command.Told(counts, failures)


FIGURE = command.Figure(
    "R13",
    "operations",
    4000,
    1_000_000,
    tell,
    {"backend": "reference", "device": "", "operations": str(SEED_OPERATIONS), "planted": "0"},
)

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
