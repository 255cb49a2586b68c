"""Verbs that a backend may do in one launch, composed of its other verbs for a backend that does not.

A backend's verbs inherit from ``ComposedVerbs`` and override what they fuse; results are the same either way.
"""

from collections.abc import Sequence
from typing import Any

from kvcore.ops import Array, Choice, StepIndex, Strip
from kvcore.ops.choices import Decision, refused, verbs_of
from kvcore.pools import Pools
from kvcore.spec import Rope


class ComposedVerbs:
    """Defaults of the fused verbs of ``kvcore.ops.Ops``."""

    plan: Any
    device: Any
    index: Any
    flush: Any
    append_tail: Any
    append_index_tail: Any
    append_kv: Any
    index_scores: Any
    select: Any

    def explain(self) -> list[Choice]:
        """Which code runs each verb of each layer, and why; see ``kvcore.ops.Ops.explain``."""
        return [Choice(layer, verb, *self.decide(layer, verb)[:2]) for layer, verb in verbs_of(self.plan.spec)]

    def decide(self, layer: int | None, verb: str) -> Decision:
        """What runs a verb: that a backend which does not override this does not say."""
        del layer, verb
        return Decision(str(getattr(self, "how", "") or self.device), "this backend does not say")

    def check_strict(self) -> None:
        """Refuse verbs that run slower code than the backend has for the device: called once they are bound.

        Raises:
            BackendError: naming the first such verb, and why.
        """
        for layer, verb in verbs_of(self.plan.spec):
            found = self.decide(layer, verb)
            if found.slower:
                raise refused(verb, layer, found.implementation, found.reason)

    def padded_index(self, host: StepIndex) -> StepIndex:
        """A padded step's index: like any other where nothing is gained by keeping it in one place."""
        return self.index(host)

    def kv_view(
        self, pools: Pools, layer: int, index: StepIndex, *, columns: int | None = None
    ) -> tuple[Array, Array] | None:
        """None: this backend has no views."""
        del pools, layer, index, columns

    def append_kv_view(
        self, pools: Pools, layer: int, index: StepIndex, k: Array, v: Array, *, columns: int | None = None
    ) -> tuple[Pools, tuple[Array, Array] | None]:
        """One after the other."""
        pools = self.append_kv(pools, layer, index, k, v)
        return pools, self.kv_view(pools, layer, index, columns=columns)

    def move_strips(
        self, pools: Pools, pages: Array, strips: Sequence[Strip], units: Array, *, store: bool = False
    ) -> bool:
        """False: this backend moves rows component by component."""
        del pools, pages, strips, units, store
        return False

    def digest_strips(self, pages: Array, strips: Sequence[Strip], first_page: int) -> Array | None:
        """None: this backend digests rows component by component."""
        del pages, strips, first_page

    def append_flush(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        kv: Array,
        score: Array,
        index_kv: Array | None = None,
        index_score: Array | None = None,
        *,
        newest: int | None = None,
        closed: int | None = None,
        norm_weight: Array | None = None,
        eps: float = 1e-6,
        rope: Rope | Array | None = None,
        index_norm_weight: Array | None = None,
    ) -> Pools:
        """Flush, then append: the flush reads ring rows that the step's own may overwrite."""
        del newest
        options = {"norm_weight": norm_weight, "eps": eps, "rope": rope, "index_norm_weight": index_norm_weight}
        pools = self.flush(pools, layer, index, kv, score, index_kv, index_score, closed=closed, **options)
        pools = self.append_tail(pools, layer, index, kv, score)
        return pools if index_kv is None else self.append_index_tail(pools, layer, index, index_kv, index_score)

    def index_select(
        self,
        pools: Pools,
        layer: int,
        index: StepIndex,
        q: Array,
        weights: Array,
        k: int,
        *,
        columns: int | None = None,
    ) -> Array:
        """Score every entry, then select."""
        return self.select(self.index_scores(pools, layer, index, q, weights, columns=columns), k)
