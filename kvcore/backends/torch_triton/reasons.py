"""What ``ops.explain()`` says of the verbs with Triton kernels: read off what was bound, as the verbs themselves do."""

from typing import Any

from kvcore.backends.torch_triton import flash, kv_reading, launch, strips
from kvcore.backends.torch_triton.backend import WITHOUT_KERNEL
from kvcore.kernels.triton.lists import MOST_PICKS
from kvcore.ops.choices import Decision, Declined, kernel
from kvcore.spec import TAIL_OF

TWO_DTYPES = "kv and index_kv are of two dtypes"
LEFT_PADDING = "the step has left padding"

ROLES = {
    "append_window": ("window",),
    "append_rotated_window": ("window",),
    "gather_window": ("window",),
    "append_tail": ("tail",),
    "append_index_tail": ("index_tail",),
    "store_entries": ("entries",),
    "store_entries(index_keys)": ("index_keys",),
    "gather_entries": ("entries",),
    "gather_all_entries": ("entries",),
    "gather_all_entries(index_keys)": ("index_keys",),
    "append_kv": ("kv",),
}
"""Verbs that need no more than records of these roles."""


def decide(ops: Any, layer: int | None, verb: str) -> Decision:
    """What runs a verb of ``TritonOps``."""
    if layer is None:
        return _of_units(ops, verb)
    if verb in WITHOUT_KERNEL:
        return Decision("torch", "this verb has no kernel")
    if verb in ROLES:
        return _chosen(ops, layer, ROLES[verb])
    return OTHERS[verb](ops, layer)


def name_of_kernels() -> str:
    """``triton``, or that kernels are interpreted, which is never taken for hardware."""
    return "triton, interpreted" if launch.INTERPRETED else "triton"


def _chosen(ops: Any, layer: int, roles: tuple[str, ...], declined: str = "", but: tuple[str, ...] = ()) -> Decision:
    """Kernels unless one of the roles is not bound, or for another reason; ``but`` for such calls."""
    unbound = [f"{role}: {ops.why_unbound(layer, role)}" for role in roles if ops.why_unbound(layer, role)]
    regions = [region for role in roles for region in ops.plan.region(layer, role)]
    formats = " and ".join(dict.fromkeys(region.format.name for region in regions))
    why = f"kernels cover {formats} in layout {regions[0].layout}"
    declined = "; ".join(unbound) or declined
    return kernel(name_of_kernels(), why, plain="torch", declined=declined, but=but)


def _flush(ops: Any, layer: int) -> Decision:
    of_index = ops.component(layer, "index_keys") is not None and ops.component(layer, "index_tail") is not None
    mains = ("entries", "index_keys") if of_index else ("entries",)
    roles = tuple(name for role in mains for name in (role, TAIL_OF[role]))
    found = _chosen(ops, layer, roles, but=(TWO_DTYPES,) if of_index else ())
    if found.slower and not any(ops.why_unbound(layer, role) for role in ("entries", "tail")):
        return found._replace(reason=f"{found.reason}; without index_kv kernels run")
    return found


def _index_scores(ops: Any, layer: int) -> Decision:
    return _chosen(ops, layer, ("index_keys",), _why(ops.uncovered.get(("index_scores", layer))))


def _select(ops: Any, layer: int) -> Decision:
    del ops, layer
    return kernel(name_of_kernels(), "kernels find the best k", plain="torch", but=(f"k > {MOST_PICKS}",))


def _index_select(ops: Any, layer: int) -> Decision:
    scores = _index_scores(ops, layer)
    return scores if scores.slower else _chosen(ops, layer, ("index_keys",), but=(f"k > {MOST_PICKS}",))


def _attend(ops: Any, layer: int) -> Decision:
    roles = tuple(role for role in ("window", "entries") if ops.component(layer, role) is not None)
    declined = _why(ops.uncovered.get(("attend", layer)))
    if ops.attention_kernels == "torch":
        declined = f"{flash.VARIABLE}=torch"
    found = _chosen(ops, layer, roles, declined)
    if ops.attention_kernels != "flash_mla":
        return found
    never = flash.never(ops, layer)
    if never:
        return found._replace(reason=f"{found.reason}; {never}")
    heads = " or ".join(map(str, flash.HEADS))
    fits = f"where q is bf16 with {heads} heads, entries are selected and the ring holds the step's rows"
    return Decision("flash_mla", f"{fits}, else {found.implementation}: {found.reason}", found.slower)


def _gather_kv(ops: Any, layer: int) -> Decision:
    ring = ops.component(layer, "kv").span is not None
    return _chosen(ops, layer, ("kv",), but=(LEFT_PADDING,) if ring else ())


def _attend_kv(ops: Any, layer: int) -> Decision:
    if ops.attention_kernels == "torch":
        return _chosen(ops, layer, ("kv",), f"{flash.VARIABLE}=torch")
    cases = {case: ops.kv_covered[layer, case.bf16, case.own] for case in kv_reading.CASES}
    declined = {case: found.reason for case, found in cases.items() if isinstance(found, Declined)}
    reasons = dict.fromkeys(declined.values())
    if len(declined) == len(cases):
        return _chosen(ops, layer, ("kv",), "; ".join(reasons))
    but = tuple(f"{case.words}: {reason}" for case, reason in declined.items())
    return _chosen(ops, layer, ("kv",), but=(*but, kv_reading.ALONE.reason))


def _of_units(ops: Any, verb: str) -> Decision:
    name = name_of_kernels()
    if verb == "move_strips":
        apart = [f"{r.layer}.{r.role}" for r in ops.plan.regions if strips.runs(r) is None]
        declined = f"layout {ops.plan.layout} stores the bytes of an element apart" if apart else ""
        return kernel(name, "one launch moves all rows of a request", plain="torch", declined=declined)
    if verb == "digest_strips":
        return Decision(name, "one launch digests pages of whole 4-byte words, else digest_rows role by role")
    return Decision(name, "whole units are bytes, whatever their format")


def _why(declined: Declined | None) -> str:
    return "" if declined is None else declined.reason


OTHERS = {
    "flush": _flush,
    "append_flush": _flush,
    "index_scores": _index_scores,
    "select": _select,
    "index_select": _index_select,
    "attend": _attend,
    "gather_kv": _gather_kv,
    "attend_kv": _attend_kv,
}
