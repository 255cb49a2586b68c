"""Life cycle: fresh pools, reset, copies, canonical rows, digests, and how arrays come and go."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from kvcore.arrays import to_numpy
from kvcore.conformance.canonical import canonical_noise
from kvcore.conformance.case import Bench
from kvcore.conformance.checks.rings import own_rows
from kvcore.conformance.outputs import Output, exact
from kvcore.digest import region_salt
from kvcore.ops import RawRows, StepIndex
from kvcore.pools import Pools


def allocate(bench: Bench) -> list[Output]:
    """Fresh pools: zeros, and scores of -inf in tails."""
    return bench.stored(bench.ops.allocate())


def reset_slots(bench: Bench) -> list[Output]:
    """The slots of the step's requests, in no order and with a -1, out of pools full of noise."""
    slots = np.append(bench.case.index.slots, np.int32(-1))
    return bench.stored(bench.ops.reset_slots(_noise(bench), bench.put(slots)))


def copy_slots(bench: Bench) -> list[Output]:
    """Pairs that overlap: what is a target of one copy is the source of another."""
    sources, targets = _overlapping(bench.case.plan.slots)
    return bench.stored(bench.ops.copy_slots(_noise(bench), bench.put(sources), bench.put(targets)))


def copy_blocks(bench: Bench) -> list[Output]:
    """The same for blocks."""
    sources, targets = _overlapping(bench.case.plan.blocks)
    return bench.stored(bench.ops.copy_blocks(_noise(bench), bench.put(sources), bench.put(targets)))


def poison(bench: Bench) -> list[Output]:
    """Some slots and blocks that were freed; the others keep what they hold."""
    plan = bench.case.plan
    slots = np.array([3, 0], np.int32)
    blocks = np.array([1, plan.blocks - 1] if plan.blocks else [], np.int32)
    return bench.stored(bench.ops.poison(_noise(bench), bench.put(slots), bench.put(blocks)))


def store_rows(role: str) -> Callable[[Bench], list[Output]]:
    """Given canonical rows at their positions, in no order, some without a position."""

    def drive(bench: Bench) -> list[Output]:
        case = bench.case
        component = case.component(role)
        columns = case.columns(role) + 2
        positions = np.full((len(case.index.slots), columns), -1, np.int32)
        for request, row in enumerate(case.rows):
            live = np.array(component.live(row.length), np.int32) * component.tokens_per_row
            places = case.rng(f"columns {request}").permutation(columns)[: len(live)]
            positions[request, places] = live
        noise = [
            canonical_noise(case.rng(f"rows {part.name}"), positions.size * part.heads, part.format)
            for part in component.parts
        ]
        rows = np.concatenate([part.reshape(*positions.shape, -1) for part in noise], axis=2)
        raw = RawRows(bench.put(rows), bench.put(positions))
        return bench.stored(bench.ops.store_rows(bench.pools(), bench.layer, role, bench.index, raw))

    return drive


def gather_rows(role: str) -> Callable[[Bench], list[Output]]:
    """A role's live rows as canonical bytes: stored, and, for what a step holds back, with the step's own."""

    def drive(bench: Bench) -> list[Output]:
        case, ops = bench.case, bench.ops
        columns = case.columns(role) + 1
        calls: dict[str, tuple[Pools, tuple[object, ...] | None]] = {"stored": (bench.pools(end=(role,)), None)}
        if case.component(role).written_by_step:
            calls["with the step's own"] = (bench.pools(start=(role,)), own_rows(bench, role))
        found: list[Output] = []
        for name, (pools, own) in calls.items():
            raw = ops.gather_rows(pools, bench.layer, role, bench.index, own, columns=columns)
            found.append(exact(f"rows {name}", to_numpy(raw.rows), "request", "row", "byte"))
            found.append(exact(f"positions {name}", to_numpy(raw.positions), "request", "row"))
        return found

    return drive


def digest_rows(role: str) -> Callable[[Bench], list[Output]]:
    """Digest lanes over given rows, some of them without a position."""

    def drive(bench: Bench) -> list[Output]:
        case = bench.case
        size = sum(part.heads * part.format.row for part in case.component(role).parts)
        shape = len(case.index.slots), case.columns(role) + 1
        positions = case.rng("positions").integers(-1, 2**20, shape, np.int32)
        positions[:, ::3] = -1
        noise = case.rng("rows").integers(0, 256, (*shape, size), np.uint8)
        raw = RawRows(bench.put(noise), bench.put(positions))
        lanes = to_numpy(bench.ops.digest_rows(raw, region_salt(bench.layer, role)))
        # The lanes are 32-bit numbers; a framework without 64-bit integers may hold them in 32 bits.
        return [exact("lanes", lanes.astype(np.int64) & 0xFFFFFFFF, "request", "lane")]

    return drive


def asarray(bench: Bench) -> list[Output]:
    """Host arrays to the device and back, in every dtype that verbs take."""
    dtypes = (np.float32, ml_dtypes.bfloat16, np.int32, np.uint8)
    arrays = [bench.case.floats(f"array {i}", 3, 5).astype(np.float32).astype(dtype) for i, dtype in enumerate(dtypes)]
    return [exact(str(array.dtype), to_numpy(bench.ops.asarray(np.abs(array))), "row", "column") for array in arrays]


def index(bench: Bench) -> list[Output]:
    """The step index on the device, field by field; for classic layers with left padding too."""
    padded = [] if bench.case.role != "kv" else _index_fields("padded ", bench.ops.index(bench.case.left_padded))
    return [*_index_fields("", bench.index), *padded]


def padded_index(bench: Bench) -> list[Output]:
    """The index of one padded step, then that of another of the same shape, each read before the next is made."""
    index = bench.case.index
    earlier = index._replace(
        positions=np.maximum(index.positions - 1, -1), slots=index.slots[::-1].copy(), block_table=index.block_table + 1
    )
    return [
        output
        for step, host in (("first ", earlier), ("next ", index))
        for output in _index_fields(step, bench.ops.padded_index(host))
    ]


def padded_steps(role: str) -> Callable[[Bench], list[Output]]:
    """Two padded steps of the same shape, of other slots and blocks: each one's rows are where its own index says."""

    def drive(bench: Bench) -> list[Output]:
        case, ops, layer = bench.case, bench.ops, bench.layer
        index, table = case.index, case.index.block_table
        elsewhere = np.where(table >= 0, case.plan.blocks - 1 - table, -1).astype(np.int32)
        earlier = index._replace(slots=np.roll(index.slots, 1), block_table=elsewhere)
        pools = bench.pools()
        for step, host in enumerate((earlier, index)):
            placed = ops.padded_index(host)
            if role == "window":
                rows = case.token_floats(f"rows {step}", case.component(role).dim)
                pools = ops.append_window(pools, layer, placed, bench.put(rows))
            elif role == "kv":
                keys, values = (
                    bench.put(case.token_floats(f"{part.name} {step}", part.heads, part.format.dim or 0))
                    for part in case.component(role).given
                )
                pools = ops.append_kv(pools, layer, placed, keys, values)
            else:
                entries = case.floats(f"entries {step}", case.closed(role), case.component(role).dim)
                pools = ops.store_entries(pools, layer, placed, bench.put(entries), None)
        return bench.stored(pools)

    return drive


def _index_fields(step: str, index: StepIndex) -> list[Output]:
    axes = {"positions": ("token",), "request_index": ("token",), "block_table": ("request", "block")}
    return [
        exact(f"{step}{name}", to_numpy(array), *axes.get(name, ("request",)))
        for name, array in index._asdict().items()
        if array is not None
    ]


def _noise(bench: Bench) -> Pools:
    image = bench.case.image()
    for name, array in image.items():
        array[:] = bench.case.rng(name).integers(0, 256, array.shape, np.uint8)
    return bench.load(image)


def _overlapping(units: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets: a swap of the first two, and a chain through the third; nothing if there are too few."""
    if units < 4:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    return np.array([0, 1, 2], np.int32), np.array([1, 0, units - 1], np.int32)
