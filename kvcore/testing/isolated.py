"""Requests that come and go in one cache, and what every reader must find in it: their own rows and nobody else's."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.cache import Cache, LayerHandle, Step
from kvcore.testing.names import NOBODY, Stream, named_spec, names, streams, whose
from kvcore.testing.tagged_rows import append_layer

if TYPE_CHECKING:
    from kvcore.requests.manager import Request

SPEC = named_spec()
NUMBER = {stream: number for number, stream in enumerate(streams(SPEC))}


class IsolatedRequests:
    """A cache, its live requests by name, and for each of them who wrote each of its tokens.

    The verbs are what a scenario is made of; after each of them every row that can be read is looked at.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.requests: dict[str, Request] = {}
        self.writers: dict[str, list[int]] = {}
        self._last = 0

    def admit(self, name: str) -> None:
        """One more request."""
        self.requests[name] = self.cache.admit()
        self.writers[name] = []

    def write(self, **tokens: int) -> None:
        """A committed step; requests in the order given."""
        self._step(tokens)

    def write_padded(self, **tokens: int) -> None:
        """The same with padding tokens and padding requests."""
        self._step(tokens, pads=3)

    def fail(self, **tokens: int) -> None:
        """A step that got all its rows and is undone."""
        self._step(tokens, fails=True)

    def truncate(self, name: str, back: int) -> None:
        """Forget the last tokens."""
        length = len(self.writers[name]) - back
        self.cache.truncate(self.requests[name], length)
        del self.writers[name][length:]

    def release(self, name: str) -> None:
        """Give slot and blocks to whoever comes next."""
        self.cache.release(self.requests.pop(name))
        del self.writers[name]

    def fork(self, source: str, name: str) -> None:
        """A second request with the same past."""
        self.requests[name] = self.cache.fork(self.requests[source])
        self.writers[name] = list(self.writers[source])

    def move(self, source: str, name: str) -> None:
        """A second request with the same past, through a blob."""
        self.requests[name] = self.cache.import_request(self.cache.export_request(self.requests[source]))
        self.writers[name] = list(self.writers[source])

    def look(self) -> None:
        """Compare every row of every live request, as stored and as read."""
        order = list(self.requests)
        held = {block for request in self.requests.values() for block in request.blocks}
        assert self.cache.free_blocks == self.cache.plan.blocks - len(held), "blocks that nobody holds are not free"
        with self.cache.step({self.requests[name]: 0 for name in order}) as step:
            self._look_at_rows(step, order)
            self._look_at_readers(step, order, self.writers)

    def _step(self, tokens: Mapping[str, int], *, pads: int = 0, fails: bool = False) -> None:
        after = {name: list(keys) for name, keys in self.writers.items()}
        for name, count in tokens.items():
            self._last += 1
            after[name] += [self._last] * count
        padded: dict[str, Any] = {}
        if pads:
            padded = {"pad_tokens": sum(tokens.values()) + pads, "pad_requests": len(tokens) + pads}
        with self.cache.step({self.requests[name]: count for name, count in tokens.items()}, **padded) as step:
            self._fill(step, list(tokens), after, pads)
            self._look_at_readers(step, list(tokens), after)
            if fails:
                step.abort()
                return
        self.writers = after

    def _fill(self, step: Step, order: Sequence[str], after: Mapping[str, list[int]], pads: int) -> None:
        places = [(after[name][p], p) for name in order for p in range(len(self.writers[name]), len(after[name]))]

        # An entry carries the name of whoever wrote its last token.
        closing = [(w, p - 3) for w, p in places if p % 4 == 3]

        def named(of: list[tuple[int, int]], stream: Stream, *shape: int) -> np.ndarray:
            found = names(NUMBER[stream], [w for w, _ in of], [p for _, p in of], int(np.prod(shape)))
            return found.reshape(len(of), *shape)

        def rows(stream: Stream, *shape: int) -> np.ndarray:
            return np.concatenate([named(places, stream, *shape), np.full((pads, *shape), NOBODY, np.float32)])

        for layer, spec in enumerate(SPEC.layers):
            append_layer(step.layer(layer), layer, spec, rows, partial(named, closing))

    def _look_at_rows(self, step: Step, order: Sequence[str]) -> None:
        for layer, role, component in SPEC.components():
            raw = step.layer(layer).gather_rows(role)
            held, positions = to_numpy(raw.rows).copy().view(np.float32), to_numpy(raw.positions)
            for number, name in enumerate(order):
                live = component.live(len(self.writers[name]))
                wanted = [row * component.tokens_per_row for row in live]
                self._compare(
                    f"gather_rows {role}", layer, role, self.writers[name], wanted, held[number], positions[number]
                )

    def _look_at_readers(self, step: Step, order: Sequence[str], writers: Mapping[str, list[int]]) -> None:
        for layer, spec in enumerate(SPEC.layers):
            read = _read(step.layer(layer), latent=spec.kv is None)
            for number, name in enumerate(order):
                length, start = len(writers[name]), len(self.writers[name])
                for (verb, role, part), (values, positions) in read.items():
                    if role == "window":
                        wanted = list(range(max(0, length - 5), length))
                    elif role == "kv":
                        assert spec.kv is not None
                        wanted = list(spec.kv.visible(start, length))
                    else:
                        wanted = list(range(0, length - 3, 4))
                    self._compare(verb, layer, role, writers[name], wanted, values[number], positions[number], part)

    def _compare(
        self,
        verb: str,
        layer: int,
        role: str,
        writers: Sequence[int],
        wanted: Sequence[int],
        got: np.ndarray,
        positions: np.ndarray,
        part: str = "",
    ) -> None:
        """Rows [n, width] of one request against the names they must bear; beyond them nothing but zeros."""
        count = len(wanted)
        where = f"{verb} of layer {layer}"
        assert positions.tolist() == [*wanted, *[-1] * (len(positions) - count)], f"{where}: other positions"
        assert not got[count:].any(), f"{where}: a row that is not valid is not zero"
        last = 3 if role in ("entries", "index_keys") else 0
        owners = [writers[position + last] for position in wanted]
        want = np.concatenate(
            [
                names(NUMBER[stream], owners, list(wanted), width)
                for stream, width in _side_by_side(layer, role, got.shape[1], part)
            ],
            axis=1,
        )
        wrong = np.argwhere(want != got[:count])
        if len(wrong):
            row, channel = wrong[0]
            found, mine = whose(SPEC, float(got[row, channel])), whose(SPEC, float(want[row, channel]))
            raise AssertionError(f"{where}, channel {channel}: {found} where {mine} belongs")


def _read(handle: LayerHandle, *, latent: bool) -> dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]:
    """(verb, role, part) -> values [Q, n, width], positions [Q, n] of every reader of the layer."""
    found = {}
    if latent:
        window = handle.gather_window()
        found["gather_window", "window", ""] = window.values, window.positions
        entries, keys = handle.gather_all_entries(), handle.gather_all_index_keys()
        found["gather_all_entries", "entries", ""] = entries.values, entries.positions
        found["gather_all_index_keys", "index_keys", ""] = keys.values, keys.positions
    else:
        k, v, positions = handle.gather_kv()
        found["gather_kv", "kv", "key"] = k, positions
        found["gather_kv", "kv", "value"] = v, positions
    return {what: (_flat(to_numpy(values)), to_numpy(positions)) for what, (values, positions) in found.items()}


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(*values.shape[:2], int(np.prod(values.shape[2:])))


def _side_by_side(layer: int, role: str, width: int, part: str) -> list[tuple[Stream, int]]:
    """The streams that a row of ``width`` values is made of, and each one's share."""
    if part:
        return [(Stream(layer, role, part), width)]
    if role == "kv":
        return [(Stream(layer, role, "key"), 8), (Stream(layer, role, "value"), 4)]
    if role.endswith("tail"):
        return [(Stream(layer, role, one), width // 2) for one in ("kv", "score")]
    return [(Stream(layer, role), width)]
