"""From a vLLM engine's ``KVCacheConfig`` to a spec: what its layers hold, as far as the configuration says.

vLLM is not imported: classes are known by their names and read by their attributes (those of vLLM 0.33). What no
attribute says (heads and top-k of an indexer, which of several formats of one size, whose cache a layer reads) is
given, or refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.errors import SpecError
from kvcore.spec import KV, ROLES, CacheSpec, Component, Entries, IndexKeys, LayerSpec, Tail, Window
from kvcore.spec.formats import FORMATS

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\b|^(\d+)\.")
"""A layer's number in its name; names of ``kv_cache_specs`` begin with it."""

CODES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

QUANTISED = {
    "NONE": None,
    "INT8_PER_TOKEN_HEAD": "int8_per_token_head",
    "FP8_PER_TOKEN_HEAD": "fp8_per_token_head",
}
"""``KVQuantMode`` -> format of a head's row; None: that of the dtype."""


def spec_from(
    config: Any,
    *,
    index: Mapping[str, int] | None = None,
    formats: Mapping[str, str] | None = None,
    shares: Mapping[int, int] | None = None,
    name: str = "",
) -> CacheSpec:
    """The spec of a ``KVCacheConfig``: classic, per-token-head, hybrid, V3.2, V4 and V4.1.

    Args:
        config: vLLM's, or anything with ``kv_cache_groups`` of ``layer_names`` and a ``kv_cache_spec``.
        index: ``{"heads": 64, "topk": 512}`` of indexers, of which a configuration says nothing.
        formats: role -> format, where several have rows of as many bytes.
        shares: layer -> the layer whose entries and index keys it reads.
        name: of the spec.

    Returns:
        A spec whose ``block_tokens`` are those of the groups in blocks. Windows and tails are rings in it; vLLM keeps
        them in pages, which ``kvcore.adopt`` reads as ``"pages ..."``.

    Raises:
        SpecError: a class, a mode or a dtype that kvcore has no component or format for; a name without a layer's
            number; groups of different blocks; what must be given and is not.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> full = type("FullAttentionSpec", (Some,), {})(
        ...     block_size=16, num_kv_heads=8, head_size=128, head_size_v=128, dtype="torch.bfloat16"
        ... )
        >>> group = Some(layer_names=["model.layers.0.self_attn.attn"], kv_cache_spec=full)
        >>> spec_from(Some(kv_cache_groups=[group])).layers[0].kv.key_heads
        8
    """
    read = _Reader(dict(index or {}), dict(formats or {}))
    layers: dict[int, dict[str, Component]] = {}
    for named, spec in specs_of(config):
        number = _number(named)
        role, component = read.component(named, spec)
        if role in layers.setdefault(number, {}):
            raise SpecError(got=f"a second {role} of layer {number}, {named!r}", where="spec_from", allowed="one")
        layers[number][role] = component
    if not layers or sorted(layers) != list(range(len(layers))):
        raise SpecError(got=f"layers {sorted(layers)}", where="spec_from", allowed="all layers from 0 on")
    for number, owner in (shares or {}).items():
        for role in ("entries", "index_keys"):
            source = layers.get(owner, {}).get(role)
            if isinstance(source, Entries) and number in layers:
                values: dict[str, Any] = {field: getattr(source, field) for field in type(source).__struct_fields__}
                layers[number].setdefault(role, type(source)(**{**values, "share": owner}))
    if len(read.blocks) > 1:
        raise SpecError(
            got=f"blocks of {sorted(read.blocks)} tokens",
            where="spec_from",
            allowed="one size for all groups in blocks",
        )
    found: Any = [roles for _, roles in sorted(layers.items())]
    options: Any = {"block_tokens": read.blocks.pop()} if read.blocks else {}
    return CacheSpec(layers=tuple(LayerSpec(**roles) for roles in found), name=name, **options)


def names_from(
    config: Any, *, index: Mapping[str, int] | None = None, formats: Mapping[str, str] | None = None
) -> list[str]:
    """The caches' names in the order of the spec's components, by layer and role; arguments as for ``spec_from``."""
    read = _Reader(dict(index or {}), dict(formats or {}))
    found = [(_number(name), ROLES.index(read.component(name, spec)[0]), name) for name, spec in specs_of(config)]
    return [name for *_, name in sorted(found)]


def component_of(
    name: str, kind: Any, *, index: Mapping[str, int] | None = None, formats: Mapping[str, str] | None = None
) -> tuple[str, Component]:
    """(role, component) of one cache of vLLM's, by its name and its spec; the others as for ``spec_from``."""
    return _Reader(dict(index or {}), dict(formats or {})).component(name, kind)


def specs_of(config: Any) -> Iterator[tuple[str, Any]]:
    """(layer's name, its spec); a group of several kinds has one for each."""
    for group in config.kv_cache_groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield name, group.kv_cache_spec if each is None else each[name]


def _number(name: str) -> int:
    found = LAYER.search(name)
    if found is None:
        raise SpecError(got=f"layer {name!r}", where="spec_from", allowed="names with a number: model.layers.3...")
    return int(found[1] or found[2])


class _Reader:
    """Components from vLLM's specs.

    Attributes:
        blocks: tokens of a block, of all that lie in blocks.
    """

    def __init__(self, index: dict[str, int], formats: dict[str, str]) -> None:
        self.blocks: set[int] = set()
        self._index = index
        self._formats = formats

    def component(self, name: str, spec: Any) -> tuple[str, Component]:
        """(role, component) of one cache."""
        kind = type(spec).__name__
        of_index = "index" in name.rpartition("layers.")[2]
        dtype = str(spec.dtype).rpartition(".")[2] if hasattr(spec, "dtype") else ""
        state = dtype == "float32" and not getattr(spec, "head_size_v", 0)
        if state and kind in ("SlidingWindowMLASpec", "CircularBufferSpec"):
            return ("index_tail" if of_index else "tail"), self._tail(kind, spec)
        if kind == "SlidingWindowMLASpec":
            format = self._format("window", name, spec, dtype)
            return "window", Window(dim=spec.head_size, window=spec.sliding_window, format=format)
        if kind == "MLAAttentionSpec":
            self.blocks.add(spec.block_size)
            return self._entries(name, spec, dtype, of_index=of_index)
        bounds = {"SlidingWindowSpec": "window", "ChunkedLocalAttentionSpec": "chunk", "FullAttentionSpec": ""}
        if kind not in bounds:
            allowed = f"{', '.join(bounds)}, MLAAttentionSpec, SlidingWindowMLASpec or CircularBufferSpec"
            raise SpecError(got=kind, where=f"spec_from: {name}", allowed=allowed)
        self.blocks.add(spec.block_size)
        return "kv", self._kv(name, spec, dtype)

    def _kv(self, name: str, spec: Any, dtype: str) -> KV:
        mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
        format = QUANTISED.get(mode, "") or (CODES.get(dtype) if mode == "NONE" else None)
        if format is None:
            raise SpecError(
                got=f"{dtype} under {mode}",
                where=f"spec_from: {name}",
                allowed=f"{', '.join(CODES)}, or {', '.join(key for key, value in QUANTISED.items() if value)}",
            )
        window = getattr(spec, "sliding_window", None)
        return KV(
            key_heads=spec.num_kv_heads,
            key_dim=spec.head_size,
            value_dim=None if spec.head_size_v in (None, spec.head_size) else spec.head_size_v,
            key_format=format,
            window=window,
            chunk=None if window is not None else getattr(spec, "attention_chunk_size", None),
        )

    def _entries(self, name: str, spec: Any, dtype: str, *, of_index: bool) -> tuple[str, Component]:
        ratio = int(spec.tokens_per_state)
        if not of_index:
            format = self._format("entries", name, spec, dtype)
            return "entries", Entries(dim=spec.head_size, ratio=ratio, format=format)
        if not {"heads", "topk"} <= set(self._index):
            allowed = "index={'heads': ..., 'topk': ...}: a configuration does not say them"
            raise SpecError(got="no index", where=f"spec_from: {name}", allowed=allowed)
        format = self._format("index_keys", name, spec, dtype)
        dim = FORMATS[format].dim or spec.head_size
        return "index_keys", IndexKeys(dim=dim, ratio=ratio, format=format, **self._index)

    def _format(self, role: str, name: str, spec: Any, dtype: str) -> str:
        """The format of a row of so many bytes: the one that is given, or the only one."""
        if dtype in CODES:
            return CODES[dtype]
        size = getattr(spec, "state_content_bytes", None) or spec.head_size
        fixed = {key: format for key, format in FORMATS.items() if format.dim is not None}
        dims = {key for key in fixed if role == "index_keys" or fixed[key].dim == spec.head_size}
        found = sorted(key for key in dims if fixed[key].row == size)
        given = self._formats.get(role)
        if given is None and len(found) == 1:
            return found[0]
        if given not in found:
            raise SpecError(
                got=f"rows of {size} bytes, format {given}",
                where=f"spec_from: {name}",
                allowed=f"formats={{{role!r}: ...}}: {', '.join(found)}" if found else "rows of a format",
            )
        return given

    def _tail(self, kind: str, spec: Any) -> Tail:
        """A row is kv and score side by side; where windows overlap, each has two halves."""
        width = spec.head_size // 2
        if kind == "CircularBufferSpec":
            return Tail(dim=width, ratio=2, overlap=False)
        # vLLM's pages of states: 4 rows of two halves, 8 of one.
        overlap = spec.block_size == 4
        halves = 2 if overlap else 1
        return Tail(dim=width // halves, ratio=spec.sliding_window // halves, overlap=overlap)
