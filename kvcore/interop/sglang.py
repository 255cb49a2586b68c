"""What SGLang calls the pools of a DeepSeek-V4 spec: names of its ``PoolName``, and how a prefix hit treats each.

Data only; SGLang is not imported. Names are those of ``mem_cache/hicache_storage.py`` in SGLang 0.5.23, which fixes
ratios 4 and 128 in them.
"""

from typing import NamedTuple

from kvcore.errors import SpecError
from kvcore.interop.sglang_pools import spec_from
from kvcore.spec import CacheSpec, Component

__all__ = ["POOLS", "SglangPool", "pool_name", "pools", "spec_from"]

POOLS = {
    ("window", None): "swa",
    ("entries", 4): "deepseek_v4_c4",
    ("index_keys", 4): "deepseek_v4_c4_indexer",
    ("entries", 128): "deepseek_v4_c128",
    ("tail", 4): "deepseek_v4_c4_state",
    ("index_tail", 4): "deepseek_v4_c4_indexer_state",
    ("tail", 128): "deepseek_v4_c128_state",
    ("kv", None): "kv",
}
"""(role, ratio) -> pool name."""


class SglangPool(NamedTuple):
    """One pool over its layers: ``hit`` is ``all_pages`` (history) or ``trailing_pages`` (windows and states)."""

    name: str
    layers: tuple[int, ...]
    hit: str


def pools(spec: CacheSpec) -> list[SglangPool]:
    """The pools of a spec, in order of their first layers.

    Raises:
        SpecError: a ratio that SGLang has no pool name for.
    """
    found: dict[str, list[int]] = {}
    hits: dict[str, str] = {}
    for layer, role, component in spec.components():
        name = pool_name(spec, layer, role, component)
        found.setdefault(name, []).append(layer)
        hits[name] = "all_pages" if component.restore == "retain" else "trailing_pages"
    return [SglangPool(name, tuple(layers), hits[name]) for name, layers in found.items()]


def pool_name(spec: CacheSpec, layer: int, role: str, component: Component) -> str:
    """The pool of one component."""
    ratio = getattr(component, "ratio", None)
    if (role, ratio) not in POOLS:
        raise SpecError(got=f"ratio {ratio}", where=f"{spec.path(layer)}.{role}.ratio", allowed="4 or 128")
    return POOLS[role, ratio]
