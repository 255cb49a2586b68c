"""R9: one log of operations on every backend and layout; equal digests, blocks and answers at every checkpoint.

The specs store rows as they are given, quantised in several formats, so that not a bit may differ. One of the caches is
replaced now and then by what it exported, saved and loaded, on another backend.
"""

import importlib.util
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import scene
import stories

import kvcore
from benchmarks.reliability import command
from kvcore.errors import KvcoreError
from kvcore.spec import CacheSpec

CLASSIC = CacheSpec(
    layers=[
        scene.classic(key_format="int8_row", value_format="bf16"),
        scene.classic("ring", window=5, key_format="fp8_row"),
        scene.classic("ring", chunk=6, key_format="fp16"),
        scene.ring(4, format="bf16"),
    ],
    block_tokens=8,
)
CHECKPOINT = 5
"""Operations between two digests of everything."""

LAYOUTS = ("packed", "planar", "tpu_tile")


def backends() -> list[str]:
    """Those that run here."""
    found = ["reference", "torch_triton"] if importlib.util.find_spec("torch") else ["reference"]
    return [*found, "jax_pallas"] if importlib.util.find_spec("jax") else found


class Differs(Exception):
    """Two backends gave two answers."""


class Twins:
    """The same requests in one cache for every backend, and in one of the reference with another layout."""

    def __init__(self, spec: CacheSpec, seed: int, folder: Path) -> None:
        self.choice = random.Random(seed)
        self.folder = folder
        sizes = {"max_requests": 4, "max_tokens": 96, "max_draft_tokens": 2, "prefix": "full"}
        kinds = [(backend, "packed") for backend in backends()] + [("reference", LAYOUTS[1 + seed % 2])]
        self.caches = [stories.create(spec, backend, layout=layout, **sizes) for backend, layout in kinds]
        self.kinds = kinds
        self.requests: list[list[kvcore.Request]] = []
        self.happened: Counter[str] = Counter()
        self.turns = 0

    def turn(self) -> None:
        """One operation everywhere; every answer must be the same."""
        kinds = {"admit": 3, "step": 8, "fail": 1, "fork": 2, "truncate": 3, "release": 3, "move": 1, "save": 1}
        what = self.choice.choices(list(kinds), list(kinds.values()))[0] if self.requests else "admit"
        numbers = [self.choice.getrandbits(30) for _ in range(3)]
        answers = [self._do(which, what, numbers) for which in range(len(self.caches))]
        if any(answer != answers[0] for answer in answers):
            raise Differs(f"{what}: {dict(zip(self.kinds, answers, strict=True))}")
        self.happened[what if isinstance(answers[0], tuple) else f"{what}: {answers[0]}"] += 1
        self.requests = [row for row in self._rows if row[0] is not None]
        rows = [[row[which] for row in self.requests] for which in range(len(self.caches))]
        self.turns += 1
        checkpoint = self.turns % CHECKPOINT == 0
        found = [
            (
                cache.digest(held) if checkpoint else None,
                cache.free_slots,
                cache.free_blocks,
                [(r.length, r.tokens, r.slot) for r in held],
            )
            for cache, held in zip(self.caches, rows, strict=True)
        ]
        if any(each != found[0] for each in found):
            raise Differs(f"after {what}: {dict(zip(self.kinds, found, strict=True))}")

    def _do(self, which: int, what: str, numbers: list[int]) -> Any:
        """Do it in one cache: a tuple, or the name of the error. ``_rows`` are the requests afterwards."""
        if which == 0:
            self._rows = [list(row) for row in self.requests]
            self._start = [list(row) for row in self.requests]
        cache = self.caches[which]
        held = [row[which] for row in self._start]
        a, b, c = numbers
        try:
            return self._act(cache, which, held, what, a, b, c)
        except KvcoreError as error:
            return type(error).__name__

    def _act(self, cache, which, held, what, a, b, c):
        at = a % len(held) if held else 0
        if what == "admit":
            prompt = [(token if token < 9 * (b % 3) else 100 * b + token) % 1000 for token in range(1 + c % 30)]
            self._add(which, cache.admit(prompt))
            return (self._rows[-1][which].cached_tokens,)
        request = held[at]
        if what in ("step", "fail"):
            chosen = dict.fromkeys([request, *(held[(b >> shift) % len(held)] for shift in range(b % 3))])
            new = {
                each: [(c + 7 * place + each.length + n) % 1000 for n in range((c >> 3 * place) % 9)]
                for place, each in enumerate(chosen)
            }
            with cache.step(new) as step:
                stories.feed(step, [token for ids in new.values() for token in ids])
                if what == "fail":
                    step.abort()
            return tuple(each.blocks for each in chosen)
        if what == "fork":
            self._add(which, cache.fork(request))
        elif what == "truncate":
            cache.truncate(request, max(0, request.length - b % 4))
        elif what == "release":
            cache.release(request)
            self._rows[at][which] = None
        elif what == "move":
            blob = cache.export_request(request)
            cache.release(request)
            # Without room for blocks that it shared before, it is gone, in every cache alike.
            self._rows[at][which] = None
            self._rows[at][which] = cache.import_request(blob)
            return (blob,)
        else:
            path = self.folder / f"{which}.kv"
            cache.save(path, held)
            loaded = kvcore.load(path, backend=self.kinds[which - 1][0], layout=LAYOUTS[b % 3])
            return (loaded.digest() == cache.digest(held), path.read_bytes())
        return ()

    def _add(self, which: int, request: kvcore.Request) -> None:
        if which == 0:
            self._rows.append([None] * len(self.caches))
        self._rows[-1][which] = request


def run(*, operations: int, seed: int, each: int = 200) -> dict[str, Any]:
    """Replay logs of ``each`` operations until there were enough."""
    happened: Counter[str] = Counter()
    failures: list[str] = []
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        while done < operations and len(failures) < 5 and not command.spent():
            spec = (stories.STORED, CLASSIC)[seed % 2]
            twins = Twins(spec, seed, Path(folder))
            try:
                for _ in range(min(each, operations - done)):
                    twins.turn()
                    done += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                failures.append(f"seed {seed}: {error!r}"[:2000])
                print(failures[-1])
            happened += twins.happened
            seed += 1
    return {
        "figure": "R9",
        "caches": [f"{backend}, {layout}" for backend, layout in twins.kinds],
        "operations": done,
        "divergences": len(failures),
        "failures": failures,
        "happened": dict(happened),
    }


if __name__ == "__main__":
    command.main(__doc__, lambda full, seed: run(operations=10_000 if full else 100, seed=seed))
