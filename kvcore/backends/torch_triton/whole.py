"""All that a layer does with its cache in a step, as one call: its verbs' launches, worked out together.

It is no verb. ``LayerHandle.decode`` calls a latent layer's verbs one by one; where each of them has passed as it is
given, this has their launches in the same order, and a step looks once at all that a layer is given. Of a classic layer
these are two verbs, which whoever runs a model calls.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcore.backends.torch_triton.replay import Replayed

VERBS = {
    "window": ("append_window", "append_rotated_window"),
    "tail": ("append_flush",),
    "index_keys": ("index_select",),
}
"""Role -> verbs that a step calls for it; attention is every layer's."""


def whole_layer(known: Mapping[str, Replayed], roles: tuple[str, ...]) -> Replayed | None:
    """A layer's step in one go, of its verbs that are replayed; None where one of them is not."""
    if roles == ("kv",) and {"append_kv", "attend_kv"} <= known.keys():
        parts = {verb: known[verb] for verb in ("append_kv", "attend_kv")}
        way = _kv_in_turn(parts["append_kv"].way, parts["attend_kv"].way)
        return Replayed.in_turn("decode", way, parts, bounds=("columns",))
    verbs = [verb for role, named in VERBS.items() if role in roles for verb in named]
    if "window" not in roles or not {*verbs, "attend"} <= known.keys():
        return None
    parts = {verb: known[verb] for verb in (*verbs, "attend")}
    return Replayed.in_turn("decode", _in_turn({verb: part.way for verb, part in parts.items()}), parts)


def _kv_in_turn(append: Callable[..., Any], attend: Callable[..., Any]) -> Callable[..., Any]:
    def decode(ops: Any, pools: Any, layer: int, index: Any, k: Any, v: Any, q: Any, **options: Any) -> Any:
        append(ops, pools, layer, index, k, v)
        return attend(ops, pools, layer, index, q, **options)

    return decode


def _in_turn(ways: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    def decode(
        ops: Any,
        pools: Any,
        layer: int,
        index: Any,
        q: Any,
        window: Any,
        kv: Any,
        score: Any,
        index_kv: Any,
        index_score: Any,
        index_q: Any,
        index_weights: Any,
        *,
        rotate: bool,
        window_norm_weight: Any,
        rope: Any,
        eps: float,
        norm_weight: Any,
        index_norm_weight: Any,
        newest: int,
        k: int | None,
        columns: int | None,
        sink: Any,
        scale: float | None,
    ) -> Any:
        at = ops, pools, layer, index
        if rotate:
            ways["append_rotated_window"](*at, window, rope=rope, norm_weight=window_norm_weight, eps=eps)
        else:
            ways["append_window"](*at, window)
        if kv is not None:
            options = {"norm_weight": norm_weight, "eps": eps, "rope": rope, "index_norm_weight": index_norm_weight}
            ways["append_flush"](*at, kv, score, index_kv, index_score, newest=newest, **options)
        selected = None
        if index_q is not None:
            selected = ways["index_select"](*at, index_q, index_weights, k, columns=columns)
        return ways["attend"](*at, q, selected, sink=sink, scale=scale, rope=rope)

    return decode
