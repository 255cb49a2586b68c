"""Which code runs each verb of a backend, and why: what ``ops.explain()`` lists and what ``KVCORE_STRICT=1`` refuses.

A backend decides once, when its verbs are bound to a plan. Where a kernel does not cover something, its own predicate
answers ``Declined`` with the reason; the verb and the explanation both read that answer.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvcore.errors import BackendError
from kvcore.ops.results import Choice
from kvcore.plan import CachePlan
from kvcore.spec import CacheSpec, LayerSpec

VARIABLE = "KVCORE_STRICT"
NOT_SAID = "this backend does not say"
SETTINGS = {"": False, "0": False, "1": True}

VERBS = (
    ("append_window", ("window",), True),
    ("append_rotated_window", ("window",), True),
    ("gather_window", ("window",), False),
    ("append_tail", ("tail",), True),
    ("append_index_tail", ("index_tail",), True),
    ("compress", ("entries", "tail"), True),
    ("flush", ("entries", "tail"), True),
    ("append_flush", ("entries", "tail"), True),
    ("store_entries", ("entries",), True),
    ("store_entries(index_keys)", ("index_keys",), True),
    ("gather_entries", ("entries",), False),
    ("gather_all_entries", ("entries",), False),
    ("gather_all_entries(index_keys)", ("index_keys",), False),
    ("index_scores", ("index_keys",), False),
    ("select", ("index_keys",), False),
    ("index_select", ("index_keys",), False),
    ("attend", (), False),
    ("append_kv", ("kv",), True),
    ("gather_kv", ("kv",), False),
    ("kv_view", ("kv",), False),
    ("append_kv_view", ("kv",), True),
    ("attend_kv", ("kv",), False),
    ("append_state", ("state",), True),
    ("write_state", ("state",), True),
    ("select_state", ("state",), True),
    ("read_state", ("state",), False),
    ("append_conv", ("conv",), True),
    ("gather_conv", ("conv",), False),
    ("gather_rows", (), False),
    ("store_rows", (), False),
    ("read_ring", (), False),
    ("restore_ring", (), True),
)
"""(verb, roles that a layer must have for it, whether it writes them); a verb that is given a role names it."""

UNITS = ("reset_slots", "poison", "copy_slots", "copy_blocks", "digest_rows", "move_strips", "digest_strips")
"""Verbs on whole slots, blocks and pages: of no layer."""


class Declined(NamedTuple):
    """A predicate's answer for what its kernel does not cover."""

    reason: str


class Decision(NamedTuple):
    """What runs a verb.

    Attributes:
        implementation: as in ``Choice``.
        reason: likewise.
        slower: the backend has faster code for the verb on this device, which does not cover this.
    """

    implementation: str
    reason: str
    slower: bool = False


def kernel(name: str, why: str, *, plain: str, declined: str = "", but: Iterable[str] = ()) -> Decision:
    """The decision between a kernel and plain operations.

    Args:
        name: of the kernels.
        why: they cover the verb.
        plain: name of the plain operations.
        declined: why they do not; "" where they do.
        but: arguments of a call for which plain operations run all the same.
    """
    if declined:
        return Decision(plain, declined, slower=True)
    calls = "; ".join(but)
    return Decision(name, f"{why}, else {plain}: {calls}" if calls else why)


def strict() -> bool:
    """Whether slower code is refused. Read once, when verbs are bound.

    Raises:
        BackendError: KVCORE_STRICT is neither 0 nor 1.
    """
    said = os.environ.get(VARIABLE, "")
    if said not in SETTINGS:
        raise BackendError(got=said, where=VARIABLE, allowed="1: code that is slower than it could be is refused; or 0")
    return SETTINGS[said]


def refused(verb: str, layer: int | None, implementation: str, reason: str) -> BackendError:
    """The error of strict mode."""
    where = verb if layer is None else f"layers[{layer}], {verb}"
    return BackendError(
        got=f"{implementation}, because: {reason}",
        where=where,
        allowed=f"the fastest code of this backend: {VARIABLE}=1",
        hint=f"Change what the reason names, or unset {VARIABLE}; ops.explain() lists what runs.",
    )


def verbs_of(spec: CacheSpec, *, shared: bool = False) -> Iterator[tuple[int | None, str]]:
    """(layer, verb) of everything that a cache of the spec can be asked for; last what is of no layer.

    ``shared``: also what is to be asked of another layer, whose pool a layer shares.
    """
    for number, layer in enumerate(spec.all_layers):
        for verb, roles, writes in VERBS:
            if _has(layer, verb, roles, writes=writes and not shared):
                yield number, verb
    for verb in UNITS:
        yield None, verb


def _has(layer: LayerSpec, verb: str, roles: Sequence[str], *, writes: bool) -> bool:
    components = dict(layer.components())
    if verb == "attend":
        return "window" in components or "entries" in components
    if verb in ("read_ring", "restore_ring"):
        # Rows that an abort puts back: in blocks a step's rows take no other's place.
        own = [component for component in components.values() if component.shared_from is None or not writes]
        return any(component.growth == "slot" for component in own)
    some = [components.get(role) for role in roles]
    # Rows of a pool that is another layer's are written there.
    return not any(component is None or (writes and component.shared_from is not None) for component in some)


class Decided:
    """What a backend that decides once for every verb of a layer says of it, and refuses."""

    plan: CachePlan

    def decide(self, layer: int | None, verb: str) -> Decision:
        """What runs a verb."""
        raise NotImplementedError

    def explain(self) -> list[Choice]:
        """Which code runs each verb of each layer, and why; see ``kvcore.ops.Ops.explain``."""
        return [Choice(layer, verb, *self.decide(layer, verb)[:2]) for layer, verb in verbs_of(self.plan.spec)]

    def check_strict(self) -> None:
        """Refuse verbs that run slower code than the backend has for the device: called once they are bound.

        Raises:
            BackendError: naming the first such verb, and why.
        """
        for layer, verb in verbs_of(self.plan.spec):
            found = self.decide(layer, verb)
            if found.slower:
                raise refused(verb, layer, found.implementation, found.reason)


def folded(choices: Iterable[Choice]) -> list[tuple[tuple[int | None, ...], tuple[Choice, ...]]]:
    """[(layers, their choices)]: layers of equal choices together, in order of the first of them."""
    kinds: dict[tuple[tuple[str, str, str], ...], list[tuple[int | None, tuple[Choice, ...]]]] = {}
    for layer, some in groupby(choices, key=lambda choice: choice.layer):
        own = tuple(some)
        kinds.setdefault(tuple(choice[1:] for choice in own), []).append((layer, own))
    return [(tuple(layer for layer, _ in alike), alike[0][1]) for alike in kinds.values()]
