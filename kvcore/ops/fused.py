"""The whole contract: what a backend must have, and verbs that it may fuse or do at once where it can.

Each of these is written here in terms of the others. A backend that lacks one gets this one (``created``); one that
derives from ``Ops`` inherits it. Results are the same either way. Where arrays must be put together, the defaults do it
in NumPy: a backend that is traced, or whose arrays are far from the host, brings its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from ml_dtypes import bfloat16

from kvcore.arrays import to_numpy
from kvcore.ops import bounds, host
from kvcore.ops.choices import NOT_SAID, verbs_of
from kvcore.ops.protocol import RequiredOps
from kvcore.ops.results import Choice, VisibleRows
from kvcore.spec import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int

    from kvcore.ops.protocol import Backend
    from kvcore.ops.results import Array, StepIndex, Strip
    from kvcore.plan import CachePlan
    from kvcore.pools import Pools


class Ops(RequiredOps, Protocol):
    """All verbs of one backend, bound to one plan and device; what stands here has a default.

    Attributes:
        plain_class: arrays of exactly this class mean nothing but their values, on any device, and verbs take them as
            they are; None: each array is looked at.
    """

    plain_class: type | None = None

    @property
    def how(self) -> str:
        """How the verbs run, as reports say it: ``cpu``, ``cuda (NVIDIA H100)``, ``cpu, Triton interpreter``."""
        return self.device

    def explain(self) -> list[Choice]:
        """Which code runs each verb of each layer, and why; known when the verbs are bound, without pools.

        Example:
            >>> import kvcore
            >>> spec = kvcore.spec.presets.deepseek_v4_flash_tiny()
            >>> cache = kvcore.create_cache(spec, backend="reference", max_requests=1, max_tokens=64)
            >>> cache.ops.explain()[0]
            Choice(layer=0, verb='append_window', implementation='numpy', reason='the reference is NumPy alone')
        """
        return [Choice(layer, verb, self.how, NOT_SAID) for layer, verb in verbs_of(self.plan.spec)]

    def join(self, kv: Float[Array, "tokens width"], score: Float[Array, "tokens width"]) -> Float[Array, "tokens row"]:
        """Kv and score [T, width] side by side: [T, 2·width], the channels of a tail row."""
        return self.asarray(np.concatenate([to_numpy(kv), to_numpy(score)], axis=1))

    def padded_index(self, host: StepIndex) -> StepIndex:
        """The index of a padded step, which may be kept in one place: good until the next of the same shape.

        A graph that was captured on one step then finds the next step's numbers where it looks for them.
        """
        return self.index(host)

    def rotated_rows(
        self,
        layer: int,
        index: StepIndex,
        rows: Float[Array, "tokens dim"],
        *,
        rope: Rope | Float[Array, " pairs"],
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
    ) -> Float[Array, "tokens dim"]:
        """Window rows [T, d] normed (if a weight is given) and rotated at their positions, as they are stored then.

        Rounded to bf16 after the norm and after the rotation, as ``flush`` does; not at all where rows are fp32. The
        default computes in NumPy. Rows of padding may be anything.
        """
        exact = self.plan.region(layer, "window")[0].format.is_fp32
        positions = to_numpy(index.positions)
        # Padding may hold anything, and NumPy warns of NaN.
        values = np.where(positions[:, None] < 0, np.float32(0), to_numpy(rows).astype(np.float32))
        if norm_weight is not None:
            mean = np.mean(values * values, axis=-1, keepdims=True, dtype=np.float32)
            values = values * (1 / np.sqrt(mean + np.float32(eps))) * to_numpy(norm_weight).astype(np.float32)
            values = values if exact else values.astype(bfloat16).astype(np.float32)
        values = _rotated(values, positions, rope)
        return self.asarray(values if exact else values.astype(bfloat16))

    def append_rotated_window(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        rows: Float[Array, "tokens dim"],
        *,
        rope: Rope | Float[Array, " pairs"],
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
    ) -> Pools:
        """Append the ``rotated_rows`` of rows [T, d] to the window."""
        rows = self.rotated_rows(layer, index, rows, rope=rope, norm_weight=norm_weight, eps=eps)
        return self.append_window(pools, layer, index, rows)

    def append_flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Float[Array, "tokens width"],
        score: Float[Array, "tokens width"],
        index_kv: Float[Array, "tokens index_width"] | None = None,
        index_score: Float[Array, "tokens index_width"] | None = None,
        *,
        newest: int | None = None,
        closed: int | None = None,
        norm_weight: Float[Array, " dim"] | None = None,
        eps: float = 1e-6,
        rope: Rope | Float[Array, " frequencies"] | None = None,
        index_norm_weight: Float[Array, " index_dim"] | None = None,
    ) -> Pools:
        """``flush`` and the append of the same rows to the tails: all that a decode step does with them.

        Args:
            newest: most new tokens of a request in the step, where the caller knows it: 1 in plain decode. It decides
                only whether one launch may do both.
        """
        del newest
        # The flush reads ring rows that the step's own may overwrite.
        pools = self.flush(
            pools,
            layer,
            index,
            *(kv, score, index_kv, index_score),
            closed=closed,
            norm_weight=norm_weight,
            eps=eps,
            rope=rope,
            index_norm_weight=index_norm_weight,
        )
        pools = self.append_tail(pools, layer, index, kv, score)
        return pools if index_kv is None else self.append_index_tail(pools, layer, index, index_kv, index_score)

    def index_select(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Float[Array, "tokens heads dim"],
        weights: Float[Array, "tokens heads"],
        k: int,
        *,
        columns: int | None = None,
    ) -> Int[Array, "tokens k"]:
        """``select(index_scores(...), k)`` -> [T, k] int32, where a backend can do without all scores at once."""
        return self.select(self.index_scores(pools, layer, index, q, weights, columns=columns), k)

    def select_state(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        states: Float[Array, "tokens heads *dims"],
        taken: Int[Array, " requests"],
    ) -> Pools:
        """Of the states after every token, [T, ...], store the one after each request's first ``taken`` new tokens.

        The lengths before it get NaN, those after it nothing: the step is committed with as many tokens. So of drafts
        that were verified the accepted state becomes the state, and a cache needs no room for the others'.

        Args:
            taken: 0 to each request's new tokens; 0 leaves its state alone.
        """
        starts, lengths, counts = to_numpy(index.starts), to_numpy(index.lengths), to_numpy(taken).astype(np.int32)
        first = np.cumsum(lengths - starts) - (lengths - starts)
        host = to_numpy(states)
        last = np.zeros((len(starts), *host.shape[1:]), host.dtype)
        last[counts > 0] = host[(first + counts - 1)[counts > 0]]
        shorter = index._replace(lengths=self.asarray((starts + counts).astype(np.int32)))
        return self.write_state(pools, layer, shorter, self.asarray(last))

    def kv_view(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None
    ) -> tuple[Array, Array] | None:
        """What ``gather_kv`` gives of rows that are in the pool, as the pool's own memory; None where it must copy."""
        del pools, layer, index, columns

    def append_kv_view(
        self, pools: Pools, layer: int, index: StepIndex, k: Array, v: Array, *, columns: int | None = None
    ) -> tuple[Pools, tuple[Array, Array] | None]:
        """``append_kv``, then ``kv_view``: all that a decode step does whose attention is the caller's."""
        pools = self.append_kv(pools, layer, index, k, v)
        return pools, self.kv_view(pools, layer, index, columns=columns)

    def visible_rows(self, layer: int, index: StepIndex, *, columns: int | None = None) -> VisibleRows:
        """``mask`` with the position of every row, [Q, columns] int32, for kernels that mask by themselves."""
        columns = bounds.positions(self.plan, layer, "kv", index) if columns is None else columns
        starts, lengths = to_numpy(index.starts), to_numpy(index.lengths)
        padding = 0 * starts if index.left_padding is None else to_numpy(index.left_padding)
        component = self.plan.layers[layer].component("kv")
        first, end = component.visible_bounds(starts, lengths, padding, np.maximum)
        rows = first[:, None] + np.arange(columns, dtype=np.int32)
        positions = np.where(rows < end[:, None], rows, -1).astype(np.int32)
        return VisibleRows(self.asarray(positions), self.mask(layer, index, columns=columns))

    def from_batch(self, index: StepIndex, batch: Array) -> Array:
        """A batch [Q, S, ...] padded on the right, a request's new tokens first -> rows [T, ...] in step order."""
        token, request, column = _tokens(index)
        host = to_numpy(batch)
        rows = np.zeros((len(index.positions), *host.shape[2:]), host.dtype)
        rows[token] = host[request, column]
        return self.asarray(rows)

    def to_batch(self, index: StepIndex, rows: Array, width: int) -> Array:
        """The inverse: rows [T, ...] -> [Q, width, ...], zeros where a request has fewer new tokens."""
        token, request, column = _tokens(index, width)
        host = to_numpy(rows)
        batch = np.zeros((len(index.slots), width, *host.shape[1:]), host.dtype)
        batch[request, column] = host[token]
        return self.asarray(batch)

    def move_strips(
        self, pools: Pools, pages: Array, strips: Sequence[Strip], units: Array, *, store: bool = False
    ) -> bool:
        """Copy a request's canonical rows from the pools into pages, or with ``store`` back, all strips at once.

        Row r of a strip's page b is its row ``numbers[b · rows + r]``, which lies in unit ``units[b]``. Bytes of pages
        that are no strip's, and rows of the pools that are in no page, are left alone.

        Args:
            pages: [pages, bytes] uint8 without gaps, written in place: on the device, or NumPy's where the pools lie in
                the host's memory too; with others in NumPy, nothing is done.
            strips: of blocks, or of slots, whose pages are one and which have room for them; numbers are ranges, of
                pages in NumPy also tuples.
            units: block of every page, or the slot, [pages] int32; of a unit -1 rows read as zeros and are not stored.

        Returns:
            True where it was done, all of it in place. False, and nothing was done, where this backend moves a request
            by ``gather_rows`` and ``store_rows`` only: always, or out of a layout that it cannot copy from. The default
            does it wherever pools and pages lie in the host's memory and can be written to.
        """
        return host.move(self.plan, pools, pages, strips, units, store=store)

    def digest_strips(self, pages: Array, strips: Sequence[Strip], first_page: int) -> Array | None:
        """Two lanes for every page, the sums of ``digest_rows`` over its strips -> [pages, 2] int64, all at once.

        Args:
            pages: [pages, bytes] uint8 without gaps, on the device or NumPy's: some of a request's.
            strips: as for ``move_strips``; each is salted with its ``kvcore.digest.region_salt``.
            first_page: number of the first of these pages in the request: its rows begin at ``first_page · rows``.

        Returns:
            None where this backend digests pages by ``digest_rows`` only: always, or of such strips. The default
            digests what lies in the host's memory.
        """
        return host.digest(pages, strips, first_page)


def _tokens(index: StepIndex, width: int | None = None) -> tuple[Any, Any, Any]:
    """(token, request, column of a batch) of every token that is no padding, and within the width."""
    requests = to_numpy(index.request_index)
    columns = to_numpy(index.positions) - np.append(to_numpy(index.starts), 0)[requests]
    (tokens,) = np.nonzero((requests >= 0) & (True if width is None else columns < width))
    return tokens, requests[tokens], columns[tokens]


def _rotated(values: Any, positions: Any, rope: Any) -> Any:
    """Values [T, d] fp32 with their last channels rotated in interleaved pairs, at positions [T]."""
    frequencies = np.asarray(rope.inverse_frequencies if isinstance(rope, Rope) else to_numpy(rope), np.float32)
    angles = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    head, pairs = np.split(values, [values.shape[1] - 2 * len(frequencies)], axis=1)
    even, odd = pairs[:, 0::2], pairs[:, 1::2]
    rotated = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=2).reshape(pairs.shape)
    return np.concatenate([head, rotated], axis=1)


REQUIRED, FUSED = (
    tuple(name for name, member in vars(contract).items() if name[0] != "_" and callable(member))
    for contract in (RequiredOps, Ops)
)
"""Names of the verbs that a backend must have, and of those that have a default."""

MAY_DECLINE = ("kv_view", "append_kv_view", "move_strips", "digest_strips")
"""Verbs that a backend need not do for every layout, or at all: the caller goes another way."""


def _of_pools(*, writes: bool) -> tuple[str, ...]:
    """Verbs that are given pools and return them, or return something else."""
    signatures = {name: getattr(Ops, name).__annotations__ for name in (*REQUIRED, *FUSED) if name not in MAY_DECLINE}
    return tuple(
        name
        for name, types in signatures.items()
        if next(iter(types)) == "pools" and (types["return"] == "Pools") is writes
    )


WRITERS, READERS = _of_pools(writes=True), _of_pools(writes=False)
"""Verbs that return the pools they are given, and those that read them; but those that may decline."""


class _Completed:
    """A backend's verbs, and the defaults of those that it does not have."""

    def __init__(self, ops: RequiredOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        if name == "_ops":  # not there yet: a copy is being made
            raise AttributeError(name)
        if name in LENDABLE and not hasattr(self._ops, name):
            return vars(Ops)[name].__get__(self, Ops)
        return getattr(self._ops, name)


LENDABLE = frozenset({*FUSED, "how"})
"""What may be lent to a backend that lacks it."""


def completed(ops: Any) -> Ops:
    """A backend's verbs, with the defaults of those that it does not have."""
    whole = all(hasattr(ops, name) for name in LENDABLE)
    found: Any = ops if whole else _Completed(ops)
    return found


def created(backend: Backend, plan: CachePlan, **options: Any) -> Ops:
    """All verbs of a backend for a plan.

    Args:
        backend: one that has the required verbs, or more.
        plan: what they address.
        options: of ``Backend.create``: the device.
    """
    return completed(backend.create(plan, **options))
