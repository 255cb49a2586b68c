"""R9: one log of operations on every backend and layout; equal digests, blocks and answers at every checkpoint.

The specs store rows as they are given, quantised in several formats, so that not a bit may differ. One of the caches is
replaced now and then by what it exported, saved and loaded, on another backend. Which backends, and where, is said as
``--backends reference,torch_triton@cuda,jax_pallas@cpu``.
"""

import importlib.util
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import kvcore
from kvcore.errors import KvcoreError
from kvcore.spec import CacheSpec
from kvcore.testing.operations import Operation, operations_of, run_all
from tests.reliability import command
from tests.support import scene, stories

CLASSIC = CacheSpec(
    layers=[
        scene.classic(key_format="int8_row", value_format="bf16"),
        scene.classic("ring", window=5, key_format="fp8_row"),
        scene.classic("ring", chunk=6, key_format="fp16"),
        scene.ring(4, format="bf16"),
    ],
    block_tokens=8,
)
SALT = "one tenant"
"""Of all requests, wherever they are."""

CHECKPOINT = 5
"""Operations between two digests of everything."""

LAYOUTS = ("packed", "planar", "tpu_tile")
KINDS = {"admit": 3, "step": 8, "fail": 1, "fork": 2, "truncate": 3, "release": 3, "point": 1, "move": 1, "save": 1}
PADDING = {"pad_tokens": 32, "pad_requests": 4}
"""Of the compiled backend's steps: one shape, so that few programs serve a log."""


def backends() -> str:
    """Those that run here."""
    needs = {"reference": "numpy", "torch_triton": "torch", "jax_pallas": "jax"}
    return ",".join(name for name, module in needs.items() if importlib.util.find_spec(module))


class Differs(Exception):
    """Two backends gave two answers."""


class Twins:
    """The same requests in one cache for every backend, and in one of the reference with another layout.

    Every operation is done in one cache after the other; ``_rows`` are the requests after it, ``_start`` before it.
    """

    def __init__(self, seed: int, folder: Path, backends: list[str]) -> None:
        self.folder = folder
        self.policy = ("full", kvcore.Periodic(4), "zero")[seed // 2 % 3]
        sizes = {"max_requests": 4, "max_tokens": 96, "max_draft_tokens": 2, "prefix": self.policy}
        named = [backend.partition("@")[::2] for backend in backends]
        kinds = [(backend, "packed") for backend, _ in named] + [("reference", LAYOUTS[1 + seed % 2])]
        spec = (stories.STORED, CLASSIC)[seed % 2]
        self.devices = [*(device or None for _, device in named), None]
        self.caches = [
            stories.create(spec, backend, layout=layout, device=device, **sizes)
            for (backend, layout), device in zip(kinds, self.devices, strict=True)
        ]
        self.kinds = kinds
        self.requests: list[list[kvcore.Request]] = []
        # Ids that a prefix hit must still be given, by the first cache's request.
        self.rest: dict[kvcore.Request, list[int]] = {}
        self.happened: Counter[str] = Counter()
        self.turns = 0

    def apply(self, operation: Operation) -> None:
        """One operation everywhere; every answer must be the same."""
        what = operation.what if self.requests else "admit"
        answers = [self._do(which, what, operation) for which in range(len(self.caches))]
        if any(answer != answers[0] for answer in answers):
            raise Differs(f"{what}: {dict(zip(self.kinds, answers, strict=True))}")
        self.happened[what if isinstance(answers[0], tuple) else f"{what}: {answers[0]}"] += 1
        self.requests = [row for row in self._rows if row[0] is not None]
        rows = [[row[which] for row in self.requests] for which in range(len(self.caches))]
        self.turns += 1
        self.happened["digests compared"] += self.turns % CHECKPOINT == 0
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

    def finish(self) -> None:
        """A last digest."""
        digests = [cache.digest([row[which] for row in self.requests]) for which, cache in enumerate(self.caches)]
        if any(digest != digests[0] for digest in digests):
            raise Differs(f"at the end: {dict(zip(self.kinds, digests, strict=True))}")

    def _do(self, which: int, what: str, operation: Operation) -> Any:
        """Do it in one cache: a tuple, or the name of the error. ``_rows`` are the requests afterwards."""
        if which == 0:
            self._rows = [list(row) for row in self.requests]
            self._start = [list(row) for row in self.requests]
        cache = self.caches[which]
        held = [row[which] for row in self._start]
        try:
            return self._act(cache, which, held, what, operation)
        except KvcoreError as error:
            return type(error).__name__

    def _act(self, cache: kvcore.Cache, which: int, held: list[kvcore.Request], what: str, operation: Operation) -> Any:
        _, a, b, c = operation
        at = a % len(held) if held else 0
        if what == "admit":
            prompt = [(token if token < 15 * (b % 4) else 100 * b + token) % 1000 for token in range(1 + c % 60)]
            self._add(which, cache.admit(prompt, salt=SALT))
            request = self._rows[-1][which]
            self.rest[request] = prompt[request.length :]
            return request.cached_tokens, cache._state.row(request).stored
        request = held[at]
        if what in ("step", "fail"):
            chosen = dict.fromkeys([request, *(held[(b >> shift) % len(held)] for shift in range(b % 3))])
            new = {}
            for place, each in enumerate(chosen):
                count = (c >> 3 * place) % 9
                ids = self.rest.get(each, [])[:count]
                new[each] = ids + [(c + 7 * place + each.length + n) % 1000 for n in range(len(ids), count)]
            padding = PADDING if cache.backend.name == "jax_pallas" else {}
            with cache.step(new, **padding) as step:
                stories.feed(step, [token for ids in new.values() for token in ids])
                if what == "fail":
                    step.abort()
                    return tuple(each.blocks for each in chosen)
            for each, ids in new.items():
                self.rest[each] = self.rest.get(each, [])[len(ids) :]
            return tuple(each.blocks for each in chosen)
        if what == "fork":
            self._add(which, cache.fork(request))
            self.rest[self._rows[-1][which]] = list(self.rest.get(request, []))
        elif what == "point":
            cache.checkpoint(request)
        elif what == "truncate":
            length = request.length
            cache.truncate(request, max(0, length - b % 4))
            if request.length < length:
                self.rest[request] = []
        elif what == "release":
            cache.release(request)
            self._rows[at][which] = None
        elif what == "move":
            blob = cache.export_request(request)
            cache.release(request)
            # Without room for blocks that it shared before, it is gone, in every cache alike.
            self._rows[at][which] = None
            self._rows[at][which] = cache.import_request(blob, salt=SALT)
            return (blob,)
        else:
            path = self.folder / f"{which}.kv"
            cache.save(path, held)
            other, _ = self.kinds[which - 1]
            chosen = [number for number in range(len(held)) if not c >> number & 1]
            loaded = kvcore.load(
                path, backend=other, device=self.devices[which - 1], layout=LAYOUTS[b % 3], requests=chosen
            )
            whole = loaded.digest() == cache.digest([held[number] for number in chosen])
            return (whole, path.read_bytes())
        return ()

    def _add(self, which: int, request: kvcore.Request) -> None:
        if which == 0:
            self._rows.append([None] * len(self.caches))
        self._rows[-1][which] = request


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """One log."""
    operations = operations_of(seed, int(options["operations"]), KINDS)
    backends = options["backends"].split(",")
    with tempfile.TemporaryDirectory() as folder:
        twins, failures = run_all(seed, lambda: Twins(seed, Path(folder), backends), operations)
    happened = dict(twins.happened) if isinstance(twins, Twins) else {}
    return command.Told({"operations": len(operations), "logs": 1, "happened": happened}, failures)


FIGURE = command.Figure("R9", "operations", 100, 10_000, tell, {"backends": backends(), "operations": "100"})

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
