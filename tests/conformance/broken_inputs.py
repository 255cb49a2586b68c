"""Backends that are the reference but for one mistake each, which only an unusual input shows."""

from unittest.mock import patch

import numpy as np

from kvcore.backends.reference import ReferenceOps, kv, tail
from kvcore.conformance.shapes import LONG
from kvcore.ops import Attention
from kvcore.spec import FORMATS
from tests.conformance.broken import Encoding, change_field


def named(index):
    """The arrays that an index has, by name."""
    return [(name, array) for name, array in index._asdict().items() if array is not None]


class LentEvenly(ReferenceOps):
    """The third request's rows are taken to lie as far behind the second's as those behind the first's."""

    def kv_view(self, pools, layer, index, *, columns=None):
        if len(set(index.lengths.tolist())) > 1 or min(index.slots, default=0) < 0:
            return None
        number = np.arange(len(index.slots))[:, None]
        slots, table = index.slots[:, None], index.block_table
        if len(slots) > 1:
            slots, table = (places[:1] + number * (places[1:2] - places[:1]) for places in (slots, table))
        evenly = index._replace(slots=slots[:, 0], block_table=np.where(index.block_table < 0, -1, table))
        return self.gather_kv(pools, layer, evenly, columns=columns)[:2]


class MidpointsUp(Encoding):
    """A value half way between two levels of NF4 takes the upper one."""

    def encode(self, format, values, global_scale=1.0):
        rows = super().encode(format, values, global_scale)
        format = FORMATS[format] if isinstance(format, str) else format
        if format.fields[0].code != "nf4":
            return rows
        values = values.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            largest = np.abs(values).max(axis=1, keepdims=True, initial=0)
            above = np.where(np.abs(values) == largest, values, np.nextafter(values, np.float32(np.inf)))
        codes = slice(*format.byte_range("codes"))
        upper = super().encode(format, above, global_scale)
        return change_field(format, rows, "codes", lambda _: upper[:, codes])


class WrittenAgain(ReferenceOps):
    """Rows that were taken over are written like any other."""

    def append_kv(self, pools, layer, index, k, v):
        return super().append_kv(pools, layer, index._replace(stored=np.zeros_like(index.stored)), k, v)

    def store_entries(self, pools, layer, index, entries, index_keys=None):
        taken = index._replace(stored=np.zeros_like(index.stored))
        return super().store_entries(pools, layer, taken, entries, index_keys)

    def flush(self, pools, layer, index, *streams, **options):
        return super().flush(pools, layer, index._replace(stored=np.zeros_like(index.stored)), *streams, **options)


class LastPieceOnly(ReferenceOps):
    """Of the pieces that a request's rows come in the last one counts."""

    def attend_kv(self, pools, layer, index, q, k=None, v=None, **options):
        if index.lengths.max(initial=0) <= LONG:
            return super().attend_kv(pools, layer, index, q, k, v, **options)
        last = np.maximum(index.lengths - 1, 0) // LONG * LONG
        left = last if index.left_padding is None else np.maximum(index.left_padding, last)
        left = np.where(index.lengths > LONG, left, 0 if index.left_padding is None else index.left_padding)
        return super().attend_kv(pools, layer, index._replace(left_padding=left.astype(np.int32)), q, k, v, **options)


class PayloadKept(Encoding):
    """NaN is cut down to bf16 with whatever it carries."""

    def encode(self, format, values, global_scale=1.0):
        rows = super().encode(format, values, global_scale)
        format = FORMATS[format] if isinstance(format, str) else format
        if format.fields[0].code != "bf16":
            return rows
        cut = (np.ascontiguousarray(values.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16) | 0x40

        def kept(codes):
            bits = np.ascontiguousarray(codes).view(np.uint16)
            return np.where(np.isnan(values.astype(np.float32)), cut, bits).view(np.uint8)

        return change_field(format, rows, "codes", kept)


class PaddingOfRingsForgotten(ReferenceOps):
    """Left padding counts where history is paged alone."""

    def attend_kv(self, pools, layer, index, q, k=None, v=None, **options):
        if self.layers[layer].component("kv").storage == "ring":
            index = index._replace(left_padding=None)
        return super().attend_kv(pools, layer, index, q, k, v, **options)


class NothingTimesNaN(ReferenceOps):
    """A row without weight is multiplied by 0."""

    def compress(self, *given, **options):
        def pool(keys, scores):
            largest = np.where(np.isneginf(scores.max(axis=0)), 0, scores.max(axis=0))
            weights = np.exp(scores - largest)
            total = weights.sum(axis=0)
            return (weights * keys).sum(axis=0) / np.where(total == 0, 1, total)

        with patch.object(tail, "pool", pool):
            return super().compress(*given, **options)


class NaNAboveLargest(Encoding):
    """What is above the largest value of e4m3 becomes NaN, also where it is nearer to that value than to the next."""

    def encode(self, format, values, global_scale=1.0):
        rows = super().encode(format, values, global_scale)
        format = FORMATS[format] if isinstance(format, str) else format
        if format.fields[0].code != "e4m3" or format.fields[0].group is not None:
            return rows
        with np.errstate(invalid="ignore"):
            beyond = (np.abs(values) > 448) & (np.abs(values) < 464)
        return change_field(format, rows, "codes", lambda codes: np.where(beyond, 0x7F, codes).astype(np.uint8))


class KeptByIndex(ReferenceOps):
    """What was read in a step is read again, whatever the pools hold by then."""

    def gather_kv(self, pools, layer, index, k=None, v=None, *, columns=None):
        kept = self.__dict__.setdefault("kept", {})
        key = id(index), layer, columns, k is None
        if key not in kept:
            kept[key] = index, super().gather_kv(pools, layer, index, k, v, columns=columns)
        return kept[key][1]


class MemoryHandedOutTwice(ReferenceOps):
    """Entries that were read lie where those lay that were read before."""

    def gather_entries(self, pools, layer, index, indices):
        found = super().gather_entries(pools, layer, index, indices)
        kept = self.__dict__.setdefault("kept", {}).setdefault(found.values.shape, found.values)
        kept[...] = found.values
        return found._replace(values=kept)


class PlacesByIndex(ReferenceOps):
    """Places are worked out once for an index; a padded step's is kept in one object, with other numbers in it."""

    def padded_index(self, host):
        kept = self.__dict__.setdefault(
            "kept", host._replace(**{name: host_array.copy() for name, host_array in named(host)})
        )
        for name, array in named(host):
            getattr(kept, name)[...] = array
        return kept

    def append_kv(self, pools, layer, index, k, v):
        places = self.__dict__.setdefault("places", {})
        key = id(index)
        if key not in places:
            places[key] = index, index._replace(slots=index.slots.copy(), block_table=index.block_table.copy())
        return super().append_kv(pools, layer, places[key][1], k, v)


class LastColumnForgotten(ReferenceOps):
    """The last column of a block table is read as the one before it."""

    def append_kv(self, pools, layer, index, k, v):
        table = index.block_table.copy()
        table[:, 1:][:, -1:] = table[:, :-1][:, -1:]
        return super().append_kv(pools, layer, index._replace(block_table=table), k, v)


class NothingDividedByNothing(ReferenceOps):
    """Weights that are all 0 are divided by their sum."""

    def compress(self, *given, **options):
        def pool(keys, scores):
            with np.errstate(invalid="ignore"):
                weights = np.exp(scores - scores.max(axis=0))
                products = np.where(weights == 0, 0, weights * keys)
                return products.sum(axis=0) / weights.sum(axis=0)

        with patch.object(tail, "pool", pool):
            return super().compress(*given, **options)


class DeadRowsDigested(ReferenceOps):
    """Rows without a position count in a digest, as if they had the first."""

    def digest_rows(self, raw, salt):
        return super().digest_rows(raw._replace(positions=np.maximum(raw.positions, 0)), salt)


class MidpointsUpOnTheWay(ReferenceOps):
    """``append_kv`` encodes otherwise than ``encode``: half way between two levels it takes the upper one."""

    def append_kv(self, pools, layer, index, k, v):
        largest = np.abs(v).max(axis=2, keepdims=True, initial=0)
        with np.errstate(invalid="ignore", over="ignore"):
            above = np.where(np.abs(v) == largest, v, np.nextafter(v, np.float32(np.inf)))
        return super().append_kv(pools, layer, index, k, above if v.dtype == np.float32 else v)


class BeyondHalf(ReferenceOps):
    """What fp16 cannot hold becomes infinite."""

    def append_kv(self, pools, layer, index, k, v):
        with np.errstate(over="ignore"):
            k, v = (values.astype(np.float16).astype(values.dtype) for values in (k, v))
        return super().append_kv(pools, layer, index, k, v)


class ValueHeadsLikeKeys(ReferenceOps):
    """Query heads that share a key head share a value head."""

    def attend_kv(self, *given, **options):
        gather = kv.gather_kv

        def gather_kv(*given, **options):
            keys, values, positions = gather(*given, **options)
            heads = values.shape[2]
            return keys, values[:, :, np.arange(heads) * keys.shape[2] // heads], positions

        with patch.object(kv, "gather_kv", gather_kv):
            return super().attend_kv(*given, **options)


class NaNIsLargest(Encoding):
    """Where a code without NaN stands alone, NaN is its largest value."""

    def encode(self, format, values, global_scale=1.0):
        return super().encode(format, np.where(np.isnan(values), np.float32(np.inf), values), global_scale)


class UnseenWeighed(ReferenceOps):
    """A row that a query does not see weighs 0, and 0 times NaN is NaN."""

    def attend_kv(self, pools, layer, index, q, k=None, v=None, **options):
        out, lse = super().attend_kv(pools, layer, index, q, k, v, **options)
        values = self.gather_kv(pools, layer, index, k, v, columns=options["columns"])[1]
        faulty = np.flatnonzero(np.isnan(values.astype(np.float32)).any(axis=(1, 2, 3)))
        out[np.isin(index.request_index, faulty)] = np.nan
        return Attention(out, lse)


class TiesTurnedInTiles(ReferenceOps):
    """Where rows are whole tiles, a tie goes to the highest entry."""

    def select(self, scores, k):
        if self.plan.layout != "tpu_tile":
            return super().select(scores, k)
        picks = super().select(scores[:, ::-1], k)
        return np.where(picks < 0, -1, scores.shape[1] - 1 - picks)
