"""Backends that are the reference but for one mistake each, and records of them for ``parity.run``."""

from collections.abc import Callable, Iterable
from unittest.mock import patch

import ml_dtypes
import numpy as np

from kvcore.backends import EVERYTHING
from kvcore.backends.reference import ReferenceOps, encoding, entries
from kvcore.backends.reference.tail import rotate
from kvcore.digest import MASK, region_salt
from kvcore.errors import BackendError
from kvcore.ops import Attention, RawRows, WindowRows
from kvcore.plugins import BackendInfo, KnownGap
from kvcore.spec import FORMATS
from kvcore.spec.codes import CODES


class Backend:
    """A backend whose verbs are of one class."""

    name = "broken"

    def __init__(self, ops: type) -> None:
        self.ops = ops

    def create(self, plan, *, device=None, check=False):
        del check
        if device not in (None, "cpu"):
            raise BackendError(got=device, where="device", allowed="cpu")
        return self.ops(plan)

    def default_layout(self, device):
        del device
        return "packed"


def info(
    ops: type = ReferenceOps,
    *,
    name: str = "broken",
    capabilities: frozenset[str] = EVERYTHING,
    requires: tuple[str, ...] = (),
    probe: Callable[[], str | None] = lambda: None,
    load: Callable[[], object] | None = None,
    known_gaps: Iterable[KnownGap] = (),
) -> BackendInfo:
    return BackendInfo(
        name=name,
        summary="the reference with one mistake",
        requires=requires,
        devices=("cpu",),
        capabilities=capabilities,
        priority=None,
        install="pip install nothing",
        probe=probe,
        load=load or (lambda: Backend(ops)),
        known_gaps=tuple(known_gaps),
    )


def swap_nibbles(format, rows):
    """Rows with their 4-bit codes the other way round."""
    format = FORMATS[format] if isinstance(format, str) else format
    if not any(field.name == "codes" and CODES[field.code].bits == 4 for field in format.fields):
        return rows
    return change_field(format, rows, "codes", lambda codes: codes >> 4 | codes << 4)


def change_field(format, rows, name, change):
    """Rows with one field's bytes changed, where the format has that field."""
    format = FORMATS[format] if isinstance(format, str) else format
    rows = rows.copy()
    if name in {field.name for field in format.fields}:
        first, last = format.byte_range(name)
        rows[:, first:last] = change(rows[:, first:last])
    return rows


class Encoding(ReferenceOps):
    """Verbs that store what the class's own ``encode`` makes of values."""


def with_own_encoder(verb):
    def run(self, *given, **options):
        with patch.object(encoding, "encode", self.encode):
            return verb(self, *given, **options)

    return run


for name in ("append_window", "append_rotated_window", "append_kv", "store_entries", "flush", "attend_kv", "attend"):
    setattr(Encoding, name, with_own_encoder(getattr(ReferenceOps, name)))


class RingOffByOne(ReferenceOps):
    """Row of position p at p + 1."""

    def append_window(self, pools, layer, index, rows):
        moved = np.where(index.positions >= 0, index.positions + 1, -1)
        return super().append_window(pools, layer, index._replace(positions=moved, lengths=index.lengths + 1), rows)


class NibblesSwapped(Encoding):
    """The even channel in the high nibble."""

    def encode(self, format, values, global_scale=1.0):
        return swap_nibbles(format, super().encode(format, values, global_scale))


class ScaleInverted(Encoding):
    """1 / scale is stored."""

    def encode(self, format, values, global_scale=1.0):
        return change_field(format, super().encode(format, values, global_scale), "scales", lambda s: 254 - s)


class ScaleRoundedDown(Encoding):
    """Floor where the rule says ceil, on power-of-two scales."""

    def encode(self, format, values, global_scale=1.0):
        return change_field(format, super().encode(format, values, global_scale), "scales", lambda s: s - 1)


class ScaleFloored(Encoding):
    """Floor where the rule says ceil, right where the two agree: at powers of two."""

    def encode(self, format, values, global_scale=1.0):
        with np.errstate(over="ignore", invalid="ignore"):
            larger = values.astype(np.float32) * np.float32(1.0001)
        above = super().encode(format, larger, global_scale)
        format = FORMATS[format] if isinstance(format, str) else format
        rows = super().encode(format, values, global_scale)
        if "scales" not in {field.name for field in format.fields}:
            return rows
        first, last = format.byte_range("scales")
        return change_field(format, rows, "scales", lambda _: above[:, first:last] - 1)


class AnotherRounding(Encoding):
    """Every odd code is one too small: truncation instead of rounding."""

    def encode(self, format, values, global_scale=1.0):
        return change_field(format, super().encode(format, values, global_scale), "codes", lambda c: c - (c & 1))


class BigEndian(Encoding):
    """16-bit elements with the high byte first."""

    def encode(self, format, values, global_scale=1.0):
        rows = super().encode(format, values, global_scale)
        return change_field(format, rows, "rope", lambda b: b.reshape(len(b), -1, 2)[:, :, ::-1].reshape(b.shape))


class SlotsMixedUp(ReferenceOps):
    """Every request's rows in the next one's slot."""

    def append_window(self, pools, layer, index, rows):
        return super().append_window(pools, layer, index._replace(slots=np.roll(index.slots, 1)), rows)


class PaddingWritten(ReferenceOps):
    """Slot -1 is the last slot in NumPy, and nobody stopped it."""

    def append_window(self, pools, layer, index, rows):
        pools = super().append_window(pools, layer, index, rows)
        if (index.request_index < 0).any():
            pools[f"{layer}.window.page"][-1, :900] = 0
        return pools


class NothingWritten(ReferenceOps):
    """A kernel that was never launched."""

    def append_window(self, pools, layer, index, rows):
        del layer, index, rows
        return pools


class FirstLayerToo(ReferenceOps):
    """The layer number is ignored half of the time."""

    def append_window(self, pools, layer, index, rows):
        return super().append_window(super().append_window(pools, layer, index, rows), 0, index, rows)


class HalvesSwapped(ReferenceOps):
    """cur where carry belongs."""

    def append_tail(self, pools, layer, index, kv, score):
        half = kv.shape[1] // 2
        return super().append_tail(pools, layer, index, np.roll(kv, half, axis=1), np.roll(score, half, axis=1))


class StaleCarry(ReferenceOps):
    """A reused slot keeps the raw rows of whoever had it before."""

    def reset_slots(self, pools, slots):
        kept = {name: array.copy() for name, array in pools.items() if name.split(".")[1] == "tail"}
        pools = super().reset_slots(pools, slots)
        for name, array in kept.items():
            pools[name][:] = array
        return pools


class FirstTableForAll(ReferenceOps):
    """Every request uses the first one's block table."""

    def append_kv(self, pools, layer, index, k, v):
        table = np.broadcast_to(index.block_table[:1], index.block_table.shape)
        return super().append_kv(pools, layer, index._replace(block_table=table), k, v)


class FirstTableOnRead(ReferenceOps):
    """The same for the entries that are read."""

    def gather_all_entries(self, pools, layer, index, *, columns=None, role="entries"):
        table = np.broadcast_to(index.block_table[:1], index.block_table.shape)
        found = index._replace(block_table=table)
        return super().gather_all_entries(pools, layer, found, columns=columns, role=role)


class LastEntryForNone(ReferenceOps):
    """Index -1 reads the last entry there is."""

    def gather_entries(self, pools, layer, index, indices):
        ratio = self.layers[layer].component("entries").ratio
        last = index.lengths[np.maximum(index.request_index, 0)] // ratio - 1
        found = super().gather_entries(pools, layer, index, np.where(indices < 0, last[:, None], indices))
        return found._replace(valid=super().gather_entries(pools, layer, index, indices).valid)


class PoisonForgotten(ReferenceOps):
    """What was freed keeps its rows, so that a stale read goes unseen."""

    def poison(self, pools, slots, blocks):
        del slots, blocks
        return pools


class OldestChunkWins(ReferenceOps):
    """Of a step longer than the ring the first rows are kept instead of the last."""

    def append_window(self, pools, layer, index, rows):
        (region,) = self.plan.region(layer, "window")
        start = index.starts[np.maximum(index.request_index, 0)]
        late = index.positions >= start + region.rows
        kept = index._replace(
            positions=np.where(late, -1, index.positions),
            request_index=np.where(late, -1, index.request_index),
            lengths=np.minimum(index.lengths, index.starts + region.rows),
        )
        return super().append_window(pools, layer, kept, rows)


class MaskedByMultiplying(ReferenceOps):
    """0 × NaN is NaN."""

    def gather_window(self, pools, layer, index, rows=None):
        values, positions = super().gather_window(pools, layer, index, rows)
        values[positions < 0] = np.nan
        return WindowRows(values, positions)


class NibblesSwappedOnRead(ReferenceOps):
    """Decodes the high nibble first."""

    def decode(self, format, rows, dim=None, global_scale=1.0):
        return super().decode(format, swap_nibbles(format, rows), dim, global_scale)


class SeesTooLittle(ReferenceOps):
    """Entry s visible from token t iff s < t div m."""

    def index_scores(self, pools, layer, index, q, weights, *, columns):
        earlier = np.maximum(index.positions - 1, -1)
        return super().index_scores(pools, layer, index._replace(positions=earlier), q, weights, columns=columns)


class SeesTooMuch(ReferenceOps):
    """One position more than the query's own is visible."""

    def mask(self, layer, index, *, columns):
        seen = super().mask(layer, index, columns=columns)
        return seen | np.roll(seen, 1, axis=1)


class TieGoesHigh(ReferenceOps):
    """Of equal scores the highest entry wins."""

    def select(self, scores, k):
        picks = super().select(scores[:, ::-1], k)
        return np.where(picks >= 0, scores.shape[1] - 1 - picks, -1).astype(np.int32)


class WideIndices(ReferenceOps):
    """int64 where int32 is promised."""

    def select(self, scores, k):
        return super().select(scores, k).astype(np.int64)


class LendsWrongRows(ReferenceOps):
    """Keys that lie one row further on."""

    def kv_view(self, pools, layer, index, *, columns=None):
        keys, values, _ = self.gather_kv(pools, layer, index, columns=columns)
        return np.roll(keys, 1, axis=1), values


class LentBeforeTheAppend(ReferenceOps):
    """What there was before, where both are asked for at once."""

    def append_kv_view(self, pools, layer, index, k, v, *, columns=None):
        keys, values, _ = self.gather_kv(pools, layer, index, columns=columns)
        return self.append_kv(pools, layer, index, k, v), (keys.copy(), values.copy())


class NotAppendedAtOnce(ReferenceOps):
    """Nothing is stored where both are asked for at once; what is handed out is right."""

    def append_kv_view(self, pools, layer, index, k, v, *, columns=None):
        keys, values, _ = self.gather_kv(pools, layer, index, k, v, columns=columns)
        return pools, (keys, values)


class PartForgotten(ReferenceOps):
    """The best of the second half of the entries alone."""

    def index_select(self, pools, layer, index, q, weights, k, *, columns=None):
        scores = self.index_scores(pools, layer, index, q, weights, columns=columns)
        scores[:, : scores.shape[1] // 2] = -np.inf
        return self.select(scores, k)


class LowPrecision(ReferenceOps):
    """Queries rounded to bf16, as a tensor core left to itself does."""

    def attend(self, pools, layer, index, q, selected=None, **options):
        rounded = q.astype(ml_dtypes.bfloat16).astype(q.dtype)
        return super().attend(pools, layer, index, rounded, selected, **options)


class SinkTwice(ReferenceOps):
    """The sink is in the denominator, and once more."""

    def attend(self, pools, layer, index, q, selected=None, *, sink=None, **options):
        found = super().attend(pools, layer, index, q, selected, sink=sink, **options)
        if sink is None:
            return found
        again = 1 / (1 + np.exp(sink - found.lse))[:, :, None]
        return Attention((found.out * again).astype(q.dtype), found.lse)


class TurnedOn(ReferenceOps):
    """Outputs are turned by the query's position, not back."""

    def attend(self, pools, layer, index, q, selected=None, *, rope=None, **options):
        found = super().attend(pools, layer, index, q, selected, **options)
        if rope is None:
            return found
        rows = found.out.astype(np.float32).reshape(-1, q.shape[2])
        turned = rotate(rows, np.repeat(index.positions, q.shape[1]), rope)
        return found._replace(out=turned.reshape(q.shape).astype(q.dtype))


class RotatedAtWindowEnd(ReferenceOps):
    """RoPE at the last token of an entry's window instead of the first."""

    def flush(self, pools, layer, index, *streams, rope=None, norm_weight=None, **options):
        pools = super().flush(pools, layer, index, *streams, rope=None, norm_weight=norm_weight, **options)
        kv, score = streams[:2]
        count = options["closed"]
        latents = self.compress(
            pools, layer, index, kv, score, closed=count, norm_weight=norm_weight, eps=options["eps"]
        )
        ratio = self.layers[layer].component("entries").ratio
        ends = (self.closed(layer, index, count).entry_index + 1) * ratio - 1
        entries.store_role(self.layers[layer], pools, index, rotate(latents, ends, rope), role="entries")
        return pools


class OneRounding(ReferenceOps):
    """bf16 only at the end, after the norm: no rounding after pooling."""

    def compress(self, pools, layer, index, kv, score, *, closed, role="entries", norm_weight=None, eps=1e-6):
        found = super().compress(
            pools, layer, index, kv, score, closed=closed, role=role, norm_weight=norm_weight, eps=eps
        )
        if norm_weight is not None:
            # A third of the values one bf16 step off, as a missing rounding leaves them.
            found[:, ::3] = np.nextafter(found[:, ::3].astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(np.inf)).astype(
                np.float32
            )
        return found


class RotatedOneTooFar(ReferenceOps):
    """Window rows are turned by the next position's angle."""

    def append_rotated_window(self, pools, layer, index, rows, *, rope, norm_weight=None, eps=1e-6):
        rows = rotate(np.nan_to_num(rows.astype(np.float32)), np.ones(len(rows), np.int32), rope)
        return super().append_rotated_window(pools, layer, index, rows, rope=rope, norm_weight=norm_weight, eps=eps)


class TailForgotten(ReferenceOps):
    """Flush and append in one launch, of which only the flush happens."""

    def append_flush(self, pools, layer, index, *streams, newest=None, **options):
        del newest
        return self.flush(pools, layer, index, *streams, **options)


class IndexKept(ReferenceOps):
    """The buffers of padded steps are filled once."""

    def padded_index(self, host):
        self.kept = getattr(self, "kept", host)
        return self.kept


class CopiesInTurn(ReferenceOps):
    """A copy reads what an earlier copy of the same call wrote."""

    def copy_slots(self, pools, sources, targets):
        for source, target in zip(sources, targets, strict=True):
            pools = super().copy_slots(pools, np.array([source]), np.array([target]))
        return pools


class TailScoresZero(ReferenceOps):
    """A reused slot's scores are 0 instead of -inf."""

    def reset_slots(self, pools, slots):
        pools = super().reset_slots(pools, slots)
        for name in pools:
            if name.split(".")[1] == "tail":
                pools[name][slots[slots >= 0]] = 0
        return pools


class DigestOfOneLane(ReferenceOps):
    """Both lanes with one seed."""

    def digest_rows(self, raw, salt):
        lanes = super().digest_rows(raw, salt)
        return np.stack([lanes[:, 0], lanes[:, 0]], axis=1)


class MovesNothing(ReferenceOps):
    """Says that rows were moved."""

    def move_strips(self, pools, pages, strips, units, *, store=False):
        del pools, pages, strips, units, store
        return True


class DeclinesTooLate(ReferenceOps):
    """Pages are cleared, then rows are left to the caller."""

    def move_strips(self, pools, pages, strips, units, *, store=False):
        del pools, strips, units
        if not store:
            pages[...] = 0
        return False


class PagesCountedFromZero(ReferenceOps):
    """Positions as if the first pages given were a request's first."""

    def digest_strips(self, pages, strips, first_page):
        del first_page
        lanes = np.zeros((len(pages), 2), np.int64)
        for strip in strips:
            rows = pages[:, strip.start : strip.stop].reshape(len(pages), strip.rows, strip.row_bytes)
            number = np.arange(len(pages) * strip.rows).reshape(len(pages), strip.rows)
            positions = (strip.numbers.start + number) * strip.tokens_per_row
            raw = RawRows(rows, np.where(number < len(strip.numbers), positions, -1).astype(np.int32))
            lanes += self.digest_rows(raw, region_salt(strip.layer, strip.role))
        return lanes & MASK


class Raises(ReferenceOps):
    """A kernel that does not compile."""

    def append_window(self, pools, layer, index, rows):
        del pools, layer, index, rows
        raise ValueError("no kernel for this shape\nand a long log")


class StateOneTokenOld(ReferenceOps):
    """A step goes on from the state before the last token's."""

    def read_state(self, pools, layer, index):
        return super().read_state(pools, layer, index._replace(starts=np.maximum(index.starts - 1, 0)))


class StateOfAnother(ReferenceOps):
    """Each request goes on from its neighbour's state."""

    def read_state(self, pools, layer, index):
        return super().read_state(pools, layer, index._replace(slots=np.roll(index.slots, 1)))


class StatesInBetweenKept(ReferenceOps):
    """Lengths for which a step wrote no state show an older one's."""

    def write_state(self, pools, layer, index, states, *, newest=None):
        del newest
        starts = np.maximum(index.starts, index.lengths - 1)
        return super().write_state(pools, layer, index._replace(starts=starts), states)


class StateOfTheFirstToken(ReferenceOps):
    """Of drafts that are given state by state, the first one's is stored for all."""

    def append_state(self, pools, layer, index, states):
        first = index.lengths - index.starts
        first = np.cumsum(first) - first
        return super().append_state(pools, layer, index, states[first[index.request_index]])


class StateOfRefusedDrafts(ReferenceOps):
    """The state after all drafts is stored as that after those that were taken."""

    def select_state(self, pools, layer, index, states, taken):
        new = index.lengths - index.starts
        end, first = np.cumsum(new), np.cumsum(new) - new
        for request, count in enumerate(taken):
            if count:
                states = states.copy()
                states[first[request] + count - 1] = states[end[request] - 1]
        return super().select_state(pools, layer, index, states, taken)


class StateBeforeARollback(ReferenceOps):
    """A step goes on from the state that lies one token further, which was rolled back."""

    def read_state(self, pools, layer, index):
        return super().read_state(pools, layer, index._replace(starts=index.starts + 1))


class InputsOneTokenOld(ReferenceOps):
    """A convolution is given the inputs that end one token too early."""

    def gather_conv(self, pools, layer, index):
        return super().gather_conv(pools, layer, index._replace(starts=np.maximum(index.starts - 1, 0)))
