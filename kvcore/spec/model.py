"""A model's cache: layers, each composed of components.

Cross-component rules are checked here, once, with the full path in the error; a component checks itself.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import cast

import msgspec

from kvcore.counts import check_count
from kvcore.errors import SpecError
from kvcore.spec.components import KV, Component, Entries, IndexKeys, Tail, Window


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """What one layer holds: at most one component for every role."""

    window: Window | None = None
    tail: Tail | None = None
    entries: Entries | None = None
    index_tail: Tail | None = None
    index_keys: IndexKeys | None = None
    kv: KV | None = None

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that the layer has a component for, in role order."""
        return tuple(role for role in ROLES if getattr(self, role) is not None)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Those of them whose rows are the step's own tokens."""
        return tuple(role for role in self.roles if role in ("window", "tail", "kv"))

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

TAIL_OF: dict[str, str] = {"entries": "tail", "index_keys": "index_tail"}
"""The role whose rows are compressed into a paged role."""


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The layers of a model, main ones first and draft layers apart.

    Attributes:
        layers: main layers; layer number i is ``layers[i]``.
        block_tokens: tokens that one block of every paged component covers; a multiple of every ratio.
        draft_layers: layers of a draft model that shares requests with the main one; numbered after the main layers.
        name: for people; not part of the digest.
    """

    layers: tuple[LayerSpec, ...]
    block_tokens: int = 256
    draft_layers: tuple[LayerSpec, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        """Check every rule that spans components."""
        for group in ("layers", "draft_layers"):
            msgspec.structs.force_setattr(self, group, _layer_specs(group, getattr(self, group)))
        if not self.layers and not self.draft_layers:
            raise SpecError(got="no layers", where="layers", allowed="one layer or more")
        block_tokens = check_count(SpecError, "block_tokens", self.block_tokens, 1)
        msgspec.structs.force_setattr(self, "block_tokens", block_tokens)
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
        kinds = {
            "window": Window,
            "tail": Tail,
            "entries": Entries,
            "index_tail": Tail,
            "index_keys": IndexKeys,
            "kv": KV,
        }
        components = dict(layer.components())
        if not components:
            raise SpecError(got="no components", where=path, allowed="at least one of " + ", ".join(ROLES))
        for role, component in components.items():
            # IndexKeys are Entries, but not in the place of entries: JSON could not tell them apart.
            if type(component) is not kinds[role]:
                raise SpecError(got=component, where=f"{path}.{role}", allowed=f"a {kinds[role].__name__}")
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


def _layer_specs(group: str, given: object) -> tuple[LayerSpec, ...]:
    """The layers as a tuple, from a list or a tuple of LayerSpec."""
    if not isinstance(given, (list, tuple)):
        raise SpecError(got=given, where=group, allowed="a sequence of LayerSpec")
    layers: list[LayerSpec] = []
    for number, layer in enumerate(cast("Sequence[object]", given)):
        if not isinstance(layer, LayerSpec):
            raise SpecError(got=layer, where=f"{group}[{number}]", allowed="a LayerSpec")
        layers.append(layer)
    return tuple(layers)
