"""One case of a check: a plan, a step, pool contents and inputs, all on the host and all from the check's id."""

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.backends.reference import encoding
from kvcore.conformance import outputs
from kvcore.conformance.canonical import poisoned, read_rows, write_rows
from kvcore.conformance.outputs import Output
from kvcore.conformance.shapes import TARGET, Shape, Sizes
from kvcore.ops import Ops, StepIndex
from kvcore.plan import CachePlan, Region
from kvcore.pools import Pools
from kvcore.spec import DERIVED, TAIL_OF
from kvcore.step import StepRequest, at_start, build_index


class Case:
    """What a check gives to every backend alike.

    Attributes:
        id: the check's id, from which every seed comes.
        plan: of the small cache.
        role: role under test.
        shape: shape class.
        rows: the step's requests.
        index: the step's index on the host.
    """

    def __init__(self, id: str, plan: CachePlan, role: str, shape: Shape, sizes: Sizes) -> None:
        self.id = id
        self.plan = plan
        self.role = role
        self.shape = shape
        self.rows = self._requests(sizes)
        self._images: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, np.ndarray]] = {}

    @cached_property
    def index(self) -> StepIndex:
        tokens = sum(row.new for row in self.rows) + self.shape.pad_tokens
        requests = len(self.rows) + self.shape.pad_requests
        return build_index(self.rows, max_blocks=self.plan.max_blocks, pad_tokens=tokens, pad_requests=requests)

    @cached_property
    def left_padded(self) -> StepIndex:
        """The index with left padding: of no, some and all positions, whole chunks where a ring holds only those."""
        kv, lengths = self.component("kv"), self.index.lengths
        padding = self.rng("left padding").integers(0, lengths + 1).astype(np.int32)
        padding[:1] = 0
        padding[1:2] = lengths[1:2]
        # From there chunks begin elsewhere than from 0, whatever the first query's position is.
        padding[3:4] = np.minimum(lengths[3:4], 4)
        grain = kv.chunk if kv.storage == "ring" and kv.chunk else 1
        return self.index._replace(left_padding=padding // grain * grain)

    @cached_property
    def late_padded(self) -> StepIndex:
        """The index with left padding up to the last two positions, or to the last chunk: inside what a ring holds."""
        kv = self.component("kv")
        grain = kv.chunk if kv.storage == "ring" and kv.chunk else 1
        return self.index._replace(left_padding=np.maximum(self.index.lengths - 2, 0) // grain * grain)

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return len(self.index.positions)

    def component(self, role: str) -> Any:
        """The component of the layer under test: a role's own class, which the table of verbs knows."""
        return getattr(self.plan.spec.layers[TARGET], role)

    def has(self, role: str) -> bool:
        """True if the layer under test has the role."""
        return getattr(self.plan.spec.layers[TARGET], role) is not None

    def rng(self, name: str) -> np.random.Generator:
        """A generator for one named input of this check: a failure reproduces alone."""
        seed = hashlib.sha256(f"{self.id} {name}".encode()).digest()
        return np.random.default_rng(np.frombuffer(seed, np.uint32))

    def floats(self, name: str, *shape: int, dtype: np.dtype | None = None) -> np.ndarray:
        """Normal values in the shape class's dtype."""
        return self.rng(name).standard_normal(shape, np.float32).astype(dtype or self.shape.dtype)

    def token_floats(self, name: str, *shape: int, dtype: np.dtype | None = None, wild: bool = False) -> np.ndarray:
        """[T, *shape] values for the step's tokens; padding rows are NaN, since nobody may look at them.

        Args:
            wild: rows of very different magnitude, a row of zeros, -0, a NaN with a payload in one channel of the
                fourth, and a number beyond fp16 in one of the fifth: what an encoder must get right.
        """
        values = self.rng(name).standard_normal((self.tokens, *shape), np.float32)
        if wild:
            steps = self.rng(f"{name} magnitude").integers(-12, 8, self.tokens)
            values *= np.exp2(steps).astype(np.float32).reshape(-1, *[1] * len(shape))
            values[1:2] = 0
            values[..., :1] = -0.0
            values[4:5, ..., 3:4] = 1e6
        values[self.index.request_index < 0] = np.nan
        values = values.astype(dtype or self.shape.dtype)
        if wild:
            values[3:4, ..., 2:3] = nan_with_payload(values.dtype, self.tokens)
        return values

    def image(self, *, start: tuple[str, ...] = (), end: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Host pools: poison, and the live rows of some roles as they are before the step, of others as after it."""
        key = start, end
        if key not in self._images:
            image = poisoned(self.plan)
            for role in self._with_rings(start):
                self._fill(image, role, [row.start for row in self.rows])
            for role in self._with_rings(end):
                self._fill(image, role, [row.length for row in self.rows])
            self._images[key] = image
        return {name: array.copy() for name, array in self._images[key].items()}

    def _with_rings(self, roles: tuple[str, ...]) -> list[str]:
        """The roles, and those that follow from them: the ring of a group that is open."""
        held = self.plan.layers[TARGET].regions
        return [*roles, *(ring for ring, role in DERIVED.items() if role in roles and ring in held)]

    def closed(self, role: str) -> int:
        """Entries of ``role`` that the step completes; in a padded step, more rows than that, to be left alone."""
        ratio = self.component(role).tokens_per_row
        completed = sum(row.length // ratio - row.start // ratio for row in self.rows)
        return completed + self.shape.pad_requests

    def columns(self, role: str, *, ended: bool = True) -> int:
        """Most rows of ``role`` that a request has live before or after the step."""
        component = self.component(role)
        return max((len(component.live(row.length if ended else row.start)) for row in self.rows), default=0)

    def holds(self, role: str) -> bool:
        """Whether the pool holds, after the step, every row that the step's queries see: a ring only if few are new."""
        component = self.component(role)
        if self.plan.layers[TARGET].over_tokens and role == "kv":
            # Queries before the last one see raw what is coded by the step's end.
            return all(row.new <= 1 for row in self.rows)
        spare = None if component.span is None else self.plan.region(TARGET, role)[0].rows - component.span
        return spare is None or all(row.new <= spare + 1 for row in self.rows)

    def global_scale(self, role: str) -> float:
        """The component's global scale, 1 where it has none."""
        return getattr(self.component(role), "global_scale", 1.0)

    def _requests(self, sizes: Sizes) -> tuple[StepRequest, ...]:
        """Slots and blocks in no order, the last of each left free: where a wrapped -1 would write."""
        requests = self.shape.requests(sizes)
        stored = self.shape.stored(sizes) if self.shape.stored else (0,) * len(requests)
        if self.shape.apart is None:
            slots = self.rng("slots").permutation(self.plan.slots - 1)
            blocks = iter(self.rng("blocks").permutation(max(self.plan.blocks - 1, 0)))
        else:
            # Requests of one block each.
            slots = np.arange(len(requests)) + np.cumsum(self.shape.apart)
            blocks = iter(slots)
        found: list[StepRequest] = []
        for slot, (start, new), taken_over in zip(slots, requests, stored, strict=False):
            count = self.plan.blocks_for(start + new)
            found.append(StepRequest(int(slot), start, new, tuple(int(next(blocks)) for _ in range(count)), taken_over))
        return tuple(found)

    def _fill(self, image: dict[str, np.ndarray], role: str, lengths: list[int]) -> None:
        component = self.component(role)
        for region in self.plan.region(TARGET, role):
            places = [
                _place(region, row, number)
                for row, length in zip(self.rows, lengths, strict=True)
                for number in component.live(length)
            ]
            units, numbers = np.array(places, np.int64).reshape(-1, 2).T
            values = self.rng(f"{role} {region.part} rows").standard_normal(
                (len(places) * region.heads, region.format.dim or 0), np.float32
            )
            if role in TAIL_OF.values():
                without_weight(values[1::3])
            encoded = encoding.encode(region.format, values, self.global_scale(role))
            write_rows(image, region, units, numbers, encoded.reshape(len(places), region.heads, region.format.row))


class Bench:
    """A case in the hands of one backend: the same inputs on its device, its results back on the host."""

    def __init__(self, case: Case, ops: Ops) -> None:
        self.case = case
        self.ops = ops
        self.layer = TARGET
        self.index = ops.index(case.index)

    @property
    def before(self) -> StepIndex:
        """The index of the same requests before the step, without new tokens."""
        return self.ops.index(at_start(self.case.index))

    def put(self, array: np.ndarray) -> object:
        """A copy of a host array on the backend's device."""
        return self.ops.asarray(array.copy())

    def pools(self, **filled: tuple[str, ...]) -> Pools:
        """Pools as ``Case.image`` describes them."""
        return self.load(self.case.image(**filled))

    def load(self, image: dict[str, np.ndarray]) -> Pools:
        """Host pools in the backend's own arrays."""
        return Pools({name: self.put(array) for name, array in image.items()})

    def hold(self, pools: Pools) -> dict[str, np.ndarray]:
        """Pools back on the host, as [units, bytes of a unit]."""
        return {name: to_numpy(array).reshape(len(array), -1).view(np.uint8) for name, array in pools.items()}

    def stored(self, pools: Pools, *, computed: dict[str, str] | None = None) -> list[Output]:
        """All canonical rows of all regions: what was written, and that nothing else was.

        Args:
            computed: role -> operation, for rows of the layer under test whose values were computed by the verb.
        """
        held = self.hold(pools)
        found: list[Output] = []
        for region in self.case.plan.regions:
            name = f"{region.layer}.{region.role}" + (f".{region.part}" if region.part else "")
            array = read_rows(held, region)
            operation = (computed or {}).get(region.role) if region.layer == self.layer else None
            if operation is None:
                found.append(outputs.rows(name, array, region.format))
            else:
                scale = self.case.global_scale(region.role)
                found.append(outputs.computed_rows(name, array, region.format, operation, global_scale=scale))
        return found


def without_weight(rows: np.ndarray) -> None:
    """Let every other channel of raw compressor rows [n, kv and score] hold NaN under a score of -inf, in place."""
    width = rows.shape[1] // 2
    rows[:, :width:2], rows[:, width::2] = np.nan, -np.inf


def nan_with_payload(dtype: np.dtype, number: int) -> np.ndarray:
    """One of four NaNs that are not the one a row holds: signed or not, with low or high bits set; [] of the dtype."""
    bits = (0x7FC00001, 0xFFC00001, 0x7FA50000, 0xFFFF0000)[number % 4]
    if dtype.itemsize == 2:
        bits = (0x7FC1, 0xFFC1, 0x7FA5, 0xFFFF)[number % 4]
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


def _place(region: Region, row: StepRequest, number: int) -> tuple[int, int]:
    """(unit, row in it) of row ``number`` of a request."""
    if region.growth == "slot":
        return row.slot, number % region.rows
    return row.blocks[number // region.rows], number % region.rows
