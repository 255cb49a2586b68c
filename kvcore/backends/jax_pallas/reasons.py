"""Which code runs a verb of a layer under JAX, and why: read off the predicates that the verbs ask while traced."""

from typing import TYPE_CHECKING, Any

from kvcore.backends.jax_pallas import fused, tiles
from kvcore.backends.jax_pallas.calls import TILED
from kvcore.backends.jax_pallas.layer import Layer
from kvcore.kernels.pallas import attend_groups, walks
from kvcore.kernels.pallas.top_k import LARGEST
from kvcore.kernels.triton.record import recorded
from kvcore.ops.choices import Decision, Declined, kernel
from kvcore.spec import TAIL_OF
from kvcore.spec.layout import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = "jax.numpy"
BOTH = "pallas and jax.numpy"
NO_KERNEL = Decision(PLAIN, "this verb has no kernel under JAX")
NO_VIEWS = Decision("none", "arrays of JAX never change: there are no views of pools")
MOVED = Decision(BOTH, "rows are moved by Pallas, encoded and decoded by jax.numpy")
UNITS = Decision(PLAIN, "whole units are bytes, which XLA copies")

ROLES = {
    "append_window": "window",
    "append_rotated_window": "window",
    "gather_window": "window",
    "store_entries": "entries",
    "store_entries(index_keys)": "index_keys",
    "gather_entries": "entries",
    "gather_all_entries": "entries",
    "gather_all_entries(index_keys)": "index_keys",
}
"""Verbs that have a kernel where the rows of one role are covered, on CUDA and on a TPU."""

STATES = {
    **dict.fromkeys(("append_state", "write_state", "select_state", "read_state"), "state"),
    **dict.fromkeys(("append_conv", "gather_conv"), "conv"),
}
"""Verbs of recurrent layers, which have a kernel on CUDA; on a TPU those of states."""

ALSO = ("flush", "append_flush", "attend", "index_scores", "select", "index_select")
ON_CUDA = (*ROLES, *STATES, *ALSO, "append_tail", "append_index_tail", "append_kv", "gather_kv")
ON_TPU = (*ROLES, *ALSO, "attend_kv", *(verb for verb, role in STATES.items() if role == "state"))
"""Verbs that have kernels."""


def decide(ops: Any, number: int | None, verb: str) -> Decision:
    """What runs a verb of ``JaxOps``, and why."""
    if verb in ("kv_view", "append_kv_view"):
        return NO_VIEWS if verb == "kv_view" else decide(ops, number, "append_kv")
    if number is None:
        return UNITS
    layer = ops.layers[number]
    if layer.kernels == "triton":
        return _triton(layer, verb)
    if layer.kernels in TILED:
        return _pallas(layer, verb, "pallas" if layer.kernels == "tpu" else "pallas, interpreted")
    slower = verb in {"cuda": ON_CUDA, "tpu": ON_TPU}.get(ops.device, ())
    return Decision(PLAIN, ops.why_portable, slower)


def _triton(layer: Layer, verb: str) -> Decision:
    """Of launches of Triton kernels."""
    if verb not in ON_CUDA:
        return NO_KERNEL
    but: tuple[str, ...] = ()
    if verb in ("select", "index_select"):
        from kvcore.kernels.triton.topk import LARGEST_K

        but = (f"k > {LARGEST_K}",)
    elif verb == "gather_kv" and layer.component("kv").span is not None:
        but = ("the step has left padding",)
    elif verb == "attend":
        but = ("scale is an array", "rows are others than the step's")
    roles = _touched(layer, verb)
    reasons = [f"{role}: {reason}" for role in roles if (reason := _uncovered(layer, role))]
    reasons = reasons or [reason for reason in [_unlaunched(layer, verb, roles)] if reason]
    return kernel("triton", _said(layer, roles), plain=PLAIN, declined="; ".join(reasons), but=but)


def _touched(layer: Layer, verb: str) -> tuple[str, ...]:
    """Roles whose pools the verb's kernel reads or writes."""
    if verb in ROLES or verb in STATES:
        return ((ROLES | STATES)[verb],)
    if verb in ("flush", "append_flush"):
        mains = [main for main in TAIL_OF if main in layer.regions and TAIL_OF[main] in layer.regions]
        return tuple(role for main in mains for role in (main, TAIL_OF[main]))
    if verb == "attend":
        return tuple(role for role in ("window", "entries") if role in layer.regions)
    return ({"append_tail": "tail", "append_index_tail": "index_tail"}.get(verb) or _after(verb),)


def _after(verb: str) -> str:
    return "kv" if verb.endswith("_kv") else "index_keys"


def _uncovered(layer: Layer, role: str) -> str:
    """Why Triton's kernels do not cover a role; "" where they do."""
    if role in TAIL_OF.values():
        from kvcore.kernels.triton.tail import tail_recorded

        found = tail_recorded(layer.regions[role][0], layer.component(role))
        return found.reason if isinstance(found, Declined) else ""
    every = [recorded(region, float(layer.global_scale(role))) for region in layer.regions[role]]
    if role in STATES.values():
        from kvcore.kernels.triton.states import flattened

        every = [one if isinstance(one, Declined) else flattened(one[0]) for one in every]
    return "; ".join(dict.fromkeys(found.reason for found in every if isinstance(found, Declined)))


def _unlaunched(layer: Layer, verb: str, roles: tuple[str, ...]) -> str:
    """Why covered rows are not attended to, or scored; "" where they are."""
    if verb not in ("attend", "index_scores", "index_select"):
        return ""
    from kvcore.kernels.triton.attend import attended
    from kvcore.kernels.triton.scores import scored

    records = {role: recorded(layer.regions[role][0], float(layer.global_scale(role))) for role in roles}
    known = {role: found[0] for role, found in records.items() if not isinstance(found, Declined)}
    if verb == "attend":
        found = attended(known.get("window"), known.get("entries"), bf16=True)
    else:
        found = scored(known["index_keys"])
    return found.reason if isinstance(found, Declined) else ""


def _pallas(layer: Layer, verb: str, name: str) -> Decision:
    """Of kernels of whole tiles."""
    if verb not in ON_TPU:
        return MOVED
    if verb in STATES:
        role = STATES[verb]
        declined = "" if tiles.keeps_states(layer, layer.regions[role][0]) else MOVED.reason
        format = layer.regions[role][0].format
        way = "as numbers" if format.is_plain else f"in {format.name}, encoded and decoded on the way"
        return kernel(name, f"states are moved {way}, a piece at a time", plain=BOTH, declined=declined)
    if verb in ROLES:
        role = ROLES[verb]
        but = ("rows of the step are given",) if verb == "gather_window" else ()
        return kernel(name, _said(layer, (role,)), plain=BOTH, declined=_unmoved(layer, role), but=but)
    roles = _touched(layer, verb)
    declined, but = OTHERS[verb](layer)
    plain = PLAIN if verb == "select" else BOTH
    return kernel(name, _said(layer, roles), plain=plain, declined=declined, but=but)


def _said(layer: Layer, roles: tuple[str, ...]) -> str:
    regions = [region for role in roles for region in layer.regions[role]]
    formats = " and ".join(dict.fromkeys(region.format.name for region in regions))
    return f"kernels cover {formats} in layout {regions[0].layout}"


def _unmoved(layer: Layer, *roles: str) -> str:
    """Why rows of some roles are not encoded in the kernel that moves them; "" where they are."""
    apart = [region for role in roles for region in layer.regions[role] if not fused.moves(layer, region)]
    rows = dict.fromkeys(f"{r.format.name} of {r.heads} heads" if r.heads > 1 else r.format.name for r in apart)
    return f"no kernel encodes and decodes rows of {' or '.join(rows)}" if rows else ""


def _flush(layer: Layer) -> tuple[str, tuple[str, ...]]:
    mains = [role for role in _touched(layer, "flush") if role in TAIL_OF]
    declined = _unmoved(layer, *mains)
    if not declined and not all(fused.flushes(layer, layer, role, None) for role in mains):
        declined = f"a flush pools rings of whole fp32 lines, into entries of a multiple of {LANES} channels"
    return declined, (f"a rope turns more than {LANES} channels",)


def _attend(layer: Layer) -> tuple[str, tuple[str, ...]]:
    roles = _touched(layer, "attend")
    declined = _unmoved(layer, *roles)
    if not declined and any((layer.regions[role][0].format.dim or 0) < LANES for role in roles):
        declined = f"attention needs rows of {LANES} channels or more"
    return declined, ("rows of the step are given", "entries are not selected, and too many")


def _attend_kv(layer: Layer) -> tuple[str, tuple[str, ...]]:
    declined = (attend_groups if layer.over_tokens else walks).declined
    return declined(*layer.regions["kv"]), ("k and v are given", "too many columns")


def _index_scores(layer: Layer) -> tuple[str, tuple[str, ...]]:
    declined = _unmoved(layer, "index_keys")
    if not declined and not fused.scores(layer, layer.regions["index_keys"][0]):
        declined = f"scores need keys of {LANES} channels in one buffer"
    return declined, ()


def _select(layer: Layer) -> tuple[str, tuple[str, ...]]:
    del layer
    return "", (f"more than {LARGEST} scores a token",)


def _index_select(layer: Layer) -> tuple[str, tuple[str, ...]]:
    return _index_scores(layer)[0], _select(layer)[1]


OTHERS: "dict[str, Callable[[Layer], tuple[str, tuple[str, ...]]]]" = {
    "flush": _flush,
    "append_flush": _flush,
    "attend": _attend,
    "attend_kv": _attend_kv,
    "index_scores": _index_scores,
    "select": _select,
    "index_select": _index_select,
}
"""Verb -> (why no kernel covers the layer, or ""; arguments of calls that it does not cover)."""
