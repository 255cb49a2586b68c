"""A model's cache: layers, each composed of components.

Cross-component rules are checked here, once, with the full path in the error; a component checks itself.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, SupportsIndex, cast, get_args

import msgspec

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.spec.component import Component
from kvcore.spec.components import Entries, IndexKeys, Tail, Window
from kvcore.spec.kv import KV, KVTail
from kvcore.spec.recurrent import Conv, State


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """What one layer holds: at most one component for every role; without any it is a layer that keeps nothing.

    A subclass with a further field, ``notes: Notes | None = None``, has a further role; see CONTRIBUTING.md.
    """

    window: Window | None = None
    tail: Tail | None = None
    entries: Entries | None = None
    index_tail: Tail | None = None
    index_keys: IndexKeys | None = None
    kv: KV | None = None
    state: State | None = None
    conv: Conv | None = None

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that the layer has a component for, in role order."""
        return tuple(role for role in self.every_role if getattr(self, role) is not None)

    @cached_property
    def kv_tail(self) -> KVTail | None:
        """What follows from keys and values in a format over tokens: the ring of their open group."""
        return self.kv.tail if isinstance(self.kv, KV) else None  # another's is refused with the spec

    @property
    def every_role(self) -> tuple[str, ...]:
        """The roles that a layer of this class can have, in role order."""
        before = self.__struct_fields__.index("kv")
        return (*self.__struct_fields__[:before], *DERIVED, *self.__struct_fields__[before:])

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Those that a step's tokens must reach; an indexer's tail may be left out, its keys given instead."""
        return tuple(
            role for role in self.roles if getattr(self, role).written_by_step and role != TAIL_OF["index_keys"]
        )

    @cached_property
    def compressed(self) -> tuple[str, ...]:
        """Those whose entries the layer makes itself, as windows close; shared ones are made by their owner."""
        return tuple(role for role in self.roles if role in TAIL_OF and getattr(self, role).shared_from is None)

    def components(self) -> Iterator[tuple[str, Component]]:
        """(role, component) for every component the layer has, in role order."""
        for role in self.roles:
            yield role, getattr(self, role)


ROLES: tuple[str, ...] = LayerSpec.__struct_fields__
"""Every role there is, in canonical order: the fields of a LayerSpec."""

DERIVED: dict[str, str] = {"kv_tail": "kv"}
"""Roles that no spec names, since they follow from the component of another."""

TAIL_OF: dict[str, str] = {"entries": "tail", "index_keys": "index_tail"}
"""The role whose rows are compressed into a paged role."""


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, cache_hash=True):
    """The layers of a model, main ones first and draft layers apart.

    Attributes:
        layers: main layers; layer number i is ``layers[i]``.
        block_tokens: tokens that one block of every paged component covers; a multiple of every ratio.
        draft_layers: layers of a draft model that shares requests with the main one; numbered after the main layers.
        name: for people; not part of the digest.

    Example:
        >>> from kvcore.spec import KV, CacheSpec, LayerSpec
        >>> layer = LayerSpec(kv=KV(key_heads=8, key_dim=128, key_format="int8_row", value_format="nf4_b64"))
        >>> spec = CacheSpec(layers=[layer] * 4, block_tokens=64)
        >>> len(spec.layers), spec.layers[0].roles
        (4, ('kv',))
    """

    layers: tuple[LayerSpec, ...]
    block_tokens: int = 256
    draft_layers: tuple[LayerSpec, ...] = ()
    name: str = ""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            layers: Sequence[LayerSpec],
            block_tokens: SupportsIndex = 256,
            draft_layers: Sequence[LayerSpec] = (),
            name: str = "",
        ) -> None:
            """Any sequence of layers; they are kept as tuples."""

    def __post_init__(self) -> None:
        """Check every rule that spans components."""
        for group in ("layers", "draft_layers"):
            msgspec.structs.force_setattr(self, group, _layer_specs(group, getattr(self, group)))
        if not self.layers and not self.draft_layers:
            raise SpecError(got="no layers", where="layers", allowed="one layer or more")
        block_tokens = check_count(SpecError, "block_tokens", self.block_tokens, 1)
        msgspec.structs.force_setattr(self, "block_tokens", block_tokens)
        if not any(layer.roles for layer in self.all_layers):
            raise SpecError(
                got="no components",
                where="layers",
                allowed="at least one of " + ", ".join(_kinds(type(self.all_layers[0]))),
            )
        for number, layer in enumerate(self.all_layers):
            self._check_layer(number, layer)

    @cached_property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Main layers, then draft layers: index by layer number."""
        return self.layers + self.draft_layers

    @cached_property
    def digest(self) -> str:
        """sha256 over the canonical JSON of everything but the name: equal digests mean interchangeable caches."""
        fields = msgspec.to_builtins(msgspec.structs.replace(self, name=""))
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()

    def components(self) -> Iterator[tuple[int, str, Component]]:
        """(layer, role, component) for every component, in canonical order."""
        for number, layer in enumerate(self.all_layers):
            for role, component in layer.components():
                yield number, role, component

    def owner(self, layer: int, role: str) -> int:
        """The layer whose pool ``role`` of ``layer`` reads: itself, or the one it shares."""
        shared = getattr(self.all_layers[layer], role).shared_from
        return layer if shared is None else shared

    def path(self, layer: int) -> str:
        """A layer's place in the spec, as errors write it: ``layers[3]`` or ``draft_layers[0]``."""
        main = len(self.layers)
        return f"layers[{layer}]" if layer < main else f"draft_layers[{layer - main}]"

    def _check_layer(self, number: int, layer: LayerSpec) -> None:
        path = self.path(number)
        kinds = _kinds(type(layer)) | {"kv_tail": KVTail}
        components = dict(layer.components())
        for role, component in components.items():
            # IndexKeys are Entries, but not in the place of entries: JSON could not tell them apart.
            if type(component) is not kinds[role]:
                raise SpecError(got=component, where=f"{path}.{role}", allowed=f"a {kinds[role].__name__}")
            _check_declared(f"{path}.{role}", component)
            if role in DERIVED and number >= len(self.layers):
                raise SpecError(
                    got=getattr(layer, DERIVED[role]),
                    where=f"{path}.{DERIVED[role]}",
                    allowed="formats over tokens in main layers: a step may leave draft layers out, and no group may",
                )
            if component.recurrent and number >= len(self.layers):
                raise SpecError(
                    got=component,
                    where=f"{path}.{role}",
                    allowed="states in main layers: a step may leave draft layers out, and no state may be missing",
                )
            if self.block_tokens % component.tokens_per_row:
                raise SpecError(
                    got=self.block_tokens,
                    where="block_tokens",
                    allowed=f"a multiple of every ratio; {path}.{role}.ratio is {component.tokens_per_row}",
                )
            self._check_share(path, number, role, component)
        for paged, tail in TAIL_OF.items():
            self._check_pair(path, components, paged, tail)
        keys, entries = layer.index_keys, layer.entries
        if layer.window is not None and entries is not None and layer.window.dim != entries.dim:
            raise SpecError(
                got=entries.dim,
                where=f"{path}.entries.dim",
                allowed=f"{layer.window.dim}, the dim of the window: a query attends to both",
            )
        if keys is not None and (entries is None or entries.ratio != keys.ratio):
            got = "no entries" if entries is None else f"ratio {keys.ratio}"
            allowed = "entries beside it" if entries is None else f"{entries.ratio}, the ratio of entries"
            raise SpecError(got=got, where=f"{path}.index_keys.ratio", allowed=allowed)

    def _check_pair(self, path: str, components: dict[str, Component], paged: str, tail: str) -> None:
        rows, source = components.get(tail), components.get(paged)
        if rows is None or source is None:
            return
        for field in ("dim", "ratio"):
            if getattr(rows, field) != getattr(source, field):
                raise SpecError(
                    got=getattr(rows, field), where=f"{path}.{tail}.{field}", allowed=f"that of {paged}: {source}"
                )
        if source.shared_from is not None:
            raise SpecError(
                got=tail, where=f"{path}.{tail}", allowed=f"no tail: {paged} are read from layer {source.shared_from}"
            )

    def _check_share(self, path: str, number: int, role: str, component: Component) -> None:
        source = component.shared_from
        if source is None:
            return
        where = f"{path}.{role}.share"
        if source >= number:
            raise SpecError(got=source, where=where, allowed=f"an earlier layer, 0 to {number - 1}")
        owner = getattr(self.all_layers[source], role)
        if owner is None or owner.shared_from is not None:
            raise SpecError(got=source, where=where, allowed=f"a layer that owns {role}")
        if msgspec.structs.replace(owner, share=source) != component:
            raise SpecError(got=component, where=f"{path}.{role}", allowed=f"the fields of layer {source}: {owner}")


@cache
def _kinds(layer: type[LayerSpec]) -> dict[str, type[Component]]:
    """Role -> class of its component, from the fields of a class of layers."""
    found: dict[str, type[Component]] = {}
    for field in msgspec.structs.fields(layer):
        kinds = [kind for kind in get_args(field.type) if kind is not type(None)]
        if len(kinds) != 1 or not isinstance(kinds[0], type) or not issubclass(kinds[0], Component):
            where = f"{layer.__name__}.{field.name}"
            raise SpecError(got=field.type, where=where, allowed="one class of components, or None: Window | None")
        found[field.name] = kinds[0]
    return found


def _check_declared(path: str, component: Component) -> None:
    """A class of components that lacks what everything else asks is refused here, before anything is planned."""
    try:
        first, end = component.live_bounds(0)
        parts = len(component.parts)
    except NotImplementedError:
        raise SpecError(
            got=f"{type(component).__name__} without live_bounds or parts",
            where=path,
            allowed="a component that says what its rows are and which are live",
            hint="Override Component.parts and Component.live_bounds.",
        ) from None
    if not parts or (first, end) != (0, 0):
        raise SpecError(
            got=f"{parts} parts, rows {first} to {end} live without tokens",
            where=path,
            allowed="one part or more, and no rows without tokens",
        )
    span = component.span
    for length in (1, 2) if span is None else (1, span, span + 1):
        first, end = component.live_bounds(length)
        rows = -(-length // component.tokens_per_row)
        if not 0 <= first <= end <= rows or (span is not None and end - first > span):
            raise SpecError(
                got=f"rows {first} to {end} live at {length} tokens",
                where=path,
                allowed=f"rows within 0 to {rows}" + ("" if span is None else f", {span} at most, its span"),
                hint="Every row that is live must be one that was written and is not overwritten.",
            )


def _layer_specs(group: str, given: object) -> tuple[LayerSpec, ...]:
    """The layers as a tuple, from any sequence of LayerSpec."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise SpecError(got=given, where=group, allowed="a sequence of LayerSpec")
    layers: list[LayerSpec] = []
    for number, layer in enumerate(cast("Sequence[object]", given)):
        if not isinstance(layer, LayerSpec):
            raise SpecError(got=layer, where=f"{group}[{number}]", allowed="a LayerSpec")
        layers.append(layer)
    return tuple(layers)
