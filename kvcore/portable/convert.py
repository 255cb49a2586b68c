"""A request of one spec as one of another that differs in formats alone: its rows are read, and coded anew.

Only whoever asks gets it, and what is made says so (``record.converted``). Rows of formats that are equal on both sides
stay the bytes they were. All others are what a cache of the target would hold had it been given what the source reads:
exact wherever the target's codes can say that. It knows the portable form, encoders and decoders; no cache, no pools.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from kvcore.errors import SnapshotError, SpecError
from kvcore.ops import Ops
from kvcore.portable.digests import digests_of
from kvcore.portable.manifest import Described, damaged, layout_of, manifest_of, refuse_blob
from kvcore.portable.pages import Array, PageLayout, content_in, content_of, page_layout, put_rows
from kvcore.portable.recode import Codec, Rows, Tokens, joined, pieces, scale_of
from kvcore.portable.record import MOST_CONVERSIONS, RequestRecord, difference_of
from kvcore.portable.rows import Content, kept_positions, owned
from kvcore.requests.request import Conversion
from kvcore.spec import DERIVED, FORMATS, CacheSpec, Component, Format, LayerSpec, from_json
from kvcore.spec.component import Part

CHOSEN = ("format", "key_format", "value_format", "global_scale", "scales")
"""Fields of a spec in which source and target may differ."""

SIDES = {"key": "key_format", "value": "value_format"}
"""What a caller names one side of keys and values by, and the field that says its format."""

Key = tuple[int, str]
"""Layer and role."""


class Converted(NamedTuple):
    """A request of the target's spec: what it says of itself, its manifest as bytes, and its pages."""

    record: RequestRecord
    manifest: bytes
    pages: Array


def with_formats(spec: CacheSpec, formats: Mapping[str, str]) -> CacheSpec:
    """The spec with other formats.

    Args:
        spec: any.
        formats: by role (``window``, ``entries``, ``index_keys`` …) or side of keys and values (``key``, ``value``).

    Raises:
        SpecError: no layer has such a role, or a component does not take the format.

    Example:
        >>> from kvcore.portable.convert import with_formats
        >>> from kvcore.spec import presets
        >>> with_formats(presets.classic(layers=1, key_heads=1, key_dim=8), {"key": "int8_row"}).layers[0].kv.key_format
        'int8_row'
    """
    left = set(formats)

    def changed(layer: LayerSpec) -> LayerSpec:
        found: dict[str, Component] = {}
        for role in layer.roles:
            component: Any = getattr(layer, role, None)
            fields = {name: field for name, field in SIDES.items() if hasattr(component, field)}
            fields = fields or ({role: "format"} if hasattr(component, "format") else {})
            wanted: dict[str, Any] = {field: formats[name] for name, field in fields.items() if name in formats}
            if wanted and "value_format" in fields.values():
                # A side that is not named keeps its format, though it was said by the other's.
                wanted.setdefault("value_format", component.value_format or component.key_format)
            if wanted and isinstance(getattr(component, "scales", None), tuple):
                sides = (wanted.get("key_format", component.key_format), wanted.get("value_format"))
                wanted["scales"] = tuple(
                    scale if FORMATS[side or sides[0]].global_scaled else 1.0
                    for scale, side in zip(component.scales, sides, strict=True)
                )
            if wanted:
                found[role] = msgspec.structs.replace(component, **wanted)
                left.difference_update(fields)
        return msgspec.structs.replace(layer, **found)

    layers, drafts = ([changed(layer) for layer in group] for group in (spec.layers, spec.draft_layers))
    if left:
        roles = {role for layer in spec.all_layers for role in layer.roles if role not in DERIVED}
        allowed = sorted(roles - {"kv"} | set(SIDES if "kv" in roles else ()))
        raise SpecError(got=min(left), where="formats", allowed=", ".join(allowed))
    return msgspec.structs.replace(spec, layers=layers, draft_layers=drafts)


def other_formats(source: CacheSpec, target: CacheSpec) -> str | None:
    """The first field but formats in which two specs differ, with both values; None if there is none."""
    ours, theirs = (_without_formats(msgspec.to_builtins(spec)) for spec in (target, source))
    return difference_of(ours, theirs)


def _without_formats(tree: Any) -> Any:
    if isinstance(tree, dict):
        named = cast("dict[str, Any]", tree)
        return {key: _without_formats(value) for key, value in named.items() if key not in (*CHOSEN, "name")}
    if isinstance(tree, (list, tuple)):
        return [_without_formats(value) for value in cast("list[Any]", tree)]
    return tree


def spec_of(described: Described, where: str) -> CacheSpec:
    """The spec that a manifest names.

    Raises:
        SnapshotError: it cannot be read, as one with components of outside code.
    """
    try:
        return from_json(described.spec)
    except SpecError as error:
        raise SnapshotError(got=str(error), where=where, allowed="a spec that this version reads") from error


def convert(
    described: Described, pages: Array, source: CacheSpec, target: CacheSpec, ops: Ops, where: str
) -> Converted:
    """A request's pages, verified, as those of a cache of another spec.

    Where keys and values are coded over tokens on either side and their formats change, the request goes back no
    farther than to the open group, and checkpoints stay behind: what they need is not in the rows that are read.

    Args:
        described: its manifest.
        pages: [pages, page_bytes] uint8 on the host.
        source: the manifest's spec.
        target: another, that differs in formats only.
        ops: of any backend, for its encoders and decoders.
        where: for messages.

    Raises:
        SnapshotError: the specs differ in more, the channels of a component among it, pages are damaged, or it went
            through as many conversions as a record says.
    """
    difference = other_formats(source, target)
    if difference is not None:
        raise SnapshotError(
            got=f"a spec with {difference}", where=f"{where}: convert", allowed="a spec that differs in formats only"
        )
    if len(described.record.converted) >= MOST_CONVERSIONS:
        # One more would be a record that nobody reads.
        raise SnapshotError(
            got=f"a request that was converted {MOST_CONVERSIONS} times",
            where=f"{where}: convert",
            allowed="fewer",
            hint="Run its tokens again: every conversion that is not exact rounds what the last one left.",
        )
    layout = layout_of(source, described, pages.shape, where, refuse_blob)
    bad = damaged(layout, digests_of(described.digest, ops, layout).result(pages), described.digests)
    if bad:
        raise SnapshotError(got=f"other bytes than were exported in {bad[0]}", where=where, allowed="as exported")
    return _Conversion(described, layout, pages, source, target, ops).result()


class _Conversion:
    """One request on its way.

    Attributes:
        grouped: layers of keys and values that are coded over tokens on a side, and not alike on both.
        floor: smallest length that the rows it makes can be rolled back to.
    """

    def __init__(
        self, described: Described, layout: PageLayout, pages: Array, source: CacheSpec, target: CacheSpec, ops: Ops
    ) -> None:
        self._described, self._from, self._pages, self._specs = described, layout, pages, (source, target)
        self._source = {(layer, role): component for layer, role, component in owned(source)}
        self._target = {(layer, role): component for layer, role, component in owned(target)}
        self._codec = Codec(ops)
        self._ops = ops
        record = described.record
        self.grouped = [key for key in self._target if self._is_grouped(key)]
        sides = [side[key].tokens_per_row for key in self.grouped for side in (self._source, self._target)]
        self.floor = max([record.floor, *(record.length // ratio * ratio for ratio in sides if ratio > 1)])
        self._checkpoints = [] if self.grouped else record.checkpoints

    def result(self) -> Converted:
        """The manifest and the pages."""
        spec, old = self._specs[1], self._described.record
        layout = page_layout(spec, self.floor, old.length, self._checkpoints)
        pages = np.zeros((layout.pages, layout.page_bytes), np.uint8)
        held = content_of(self._from, self._pages)
        for section in (layout.history, layout.record):
            for strip in section.strips:
                put_rows(section.of(pages), strip, self._rows((strip.layer, strip.role), held))
        past = dict(zip(self._from.lengths, self._from.checkpoints, strict=True))
        for length, section in zip(layout.lengths, layout.checkpoints, strict=True):
            then = content_in((past[length],), self._pages)
            for strip in section.strips:
                key = strip.layer, strip.role
                put_rows(section.of(pages), strip, self._coded(key, then[key].rows))
        # Rows are all coded by now: whether each was exact is known.
        last = Conversion(spec=self._specs[0].digest, formats=self._changed(), exact=self._codec.exact)
        record = msgspec.structs.replace(
            old, floor=self.floor, checkpoints=list(self._checkpoints), converted=[*old.converted, last]
        )
        digests = digests_of(self._described.digest, self._ops, layout).result(pages)
        return Converted(record, manifest_of(spec, record, layout, self._described.digest, digests), pages)

    def _is_grouped(self, key: Key) -> bool:
        if key[1] not in DERIVED.values():
            return False
        ours, theirs = self._target[key], self._source[key]
        return ours.parts != theirs.parts and max(ours.tokens_per_row, theirs.tokens_per_row) > 1

    def _rows(self, key: Key, held: Content) -> Rows:
        """The target's canonical rows of one component."""
        layer, role = key
        paged = layer, DERIVED.get(role, role)
        if paged in self.grouped:
            ring = next((held.get((layer, own)) for own, of in DERIVED.items() if of == paged[1]), None)
            tokens = Tokens(self._codec, self._source[paged], held[paged].rows, ring, self._described.record.length)
            return self._tail(key, tokens) if role in DERIVED else self._groups(key, tokens)
        wanted = kept_positions(self._target[key], self.floor, self._described.record.length)
        rows, positions = held[key]
        return self._coded(key, rows[np.searchsorted(np.asarray(positions), np.asarray(wanted, np.int64))])

    def _coded(self, key: Key, rows: Rows) -> Rows:
        """Rows [n, bytes] of a component, one for one in the target's formats."""
        old, new = self._source[key], self._target[key]
        scales = scale_of(old), scale_of(new)
        out, at = list[Rows](), 0
        for before, after in zip(old.parts, new.parts, strict=True):
            size = before.heads * before.format.row
            part, at = rows[:, at : at + size], at + size
            if (before.format, scales[0]) != (after.format, scales[1]):
                flat = part.reshape(len(rows) * before.heads, before.format.row)
                part = self._codec.recoded(before.format, after.format, flat, scales)
                part = part.reshape(len(rows), after.heads * after.format.row)
            out.append(part)
        return np.concatenate(out, axis=1)

    def _groups(self, key: Key, tokens: Tokens) -> Rows:
        """Keys and values in rows of as many tokens as the target has, as if their tokens had been appended."""
        component = self._target[key]
        ratio, parts = component.tokens_per_row, component.parts
        closed = self._described.record.length // ratio * ratio
        sides: list[Rows] = []
        for number, part in enumerate(parts):
            done = [
                self._group(tokens, number, part, component, range(first, end))
                for first, end in pieces(closed, self._specs[1].block_tokens, part)
            ]
            sides.append(np.concatenate(done) if done else np.zeros((0, part.heads * part.format.row), np.uint8))
        return np.concatenate(sides, axis=1)

    def _group(self, tokens: Tokens, number: int, part: Part, component: Component, span: range) -> Rows:
        ratio, format = component.tokens_per_row, part.format
        dim = component.given[number].format.dim or 0
        rows = len(span) // ratio
        one = FORMATS[format.name].for_dim(dim).scaled(format.global_scale) if format.tokens == 1 else None
        if one is not None and _kind(tokens.format(number)) == _kind(format):
            # Coded token by token on both sides: the same bytes, token by token.
            return joined(tokens.coded(number, one, span), one, ratio).reshape(rows, part.heads * format.row)
        values = tokens.values(number, span)
        if ratio > 1:
            # A group is coded from what its open ring holds: bf16.
            values = self._codec.rounded(values)
        # [tokens, heads, dim] -> a row for every head: channel by channel over tokens, or token by token.
        axes = (0, 2, 3, 1) if format.tokens > 1 else (0, 2, 1, 3)
        laid = values.reshape(rows, ratio, part.heads, dim).transpose(axes).reshape(rows * part.heads, ratio * dim)
        return self._codec.encoded(format, laid).reshape(rows, part.heads * format.row)

    def _tail(self, key: Key, tokens: Tokens) -> Rows:
        """The raw rows of the open group."""
        component = self._target[key]
        kept = kept_positions(component, self.floor, self._described.record.length)
        span = range(kept[0], kept[-1] + 1) if kept else range(0)
        sides: list[Rows] = []
        for number, part in enumerate(component.parts):
            rows = self._codec.encoded(part.format, tokens.values(number, span).reshape(-1, part.format.dim or 0))
            sides.append(rows.reshape(len(span), part.heads * part.format.row))
        return np.concatenate(sides, axis=1)

    def _changed(self) -> list[tuple[str, str, str, str]]:
        """(role, part, format before, format now) of everything that changed, each once."""
        found: dict[tuple[str, str, str, str], None] = {}
        for (layer, role), new in self._target.items():
            old = self._source.get((layer, role))
            if old is not None and role not in DERIVED:
                for before, after in zip(old.parts, new.parts, strict=True):
                    if (*_kind(before.format), scale_of(old)) != (*_kind(after.format), scale_of(new)):
                        found[role, after.name, before.format.name, after.format.name] = None
        return list(found)


def _kind(format: Format) -> tuple[str, float]:
    """What is left of a format beside its size."""
    return format.name, format.global_scale
