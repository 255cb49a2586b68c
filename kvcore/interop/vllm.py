"""What vLLM calls the pools of a spec: its KV-cache spec classes and their arguments, with equal page sizes.

Records are data; vLLM is imported only by whoever builds its classes from them: ``record.build(kv_cache_interface)``
with ``vllm.v1.kv_cache_interface``. Names and figures are those of vLLM 0.32 (``models/deepseek_v4``): latent rows in
pages of 576-byte alignment, compressor states as sliding windows whose pages match those of entries, a V4.1 tail as a
circular buffer. ``kvcore.interop.vllm_config`` goes the other way, from vLLM's configuration to a spec.
"""

from typing import Any, NamedTuple

from kvcore.errors import SpecError
from kvcore.interop.vllm_config import spec_from
from kvcore.spec import KV, CacheSpec, Component, Entries, IndexKeys, Tail, Window
from kvcore.spec.layout import block_layout

__all__ = ["VllmSpec", "kv_cache_specs", "spec_from"]

WINDOW_BLOCK = 64
"""Tokens of a page of vLLM's sliding-window cache: as many rows as a block of 256 tokens has entries at ratio 4."""

CIRCULAR_BLOCK = 8
"""Smallest ring of its circular buffers."""

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class VllmSpec(NamedTuple):
    """One cache of one layer in vLLM's words.

    Attributes:
        name: ours, ``"L.role"``.
        kind: class in ``vllm.v1.kv_cache_interface``.
        arguments: of the class; ``dtype`` is the name of a torch dtype.
        page_bytes: of a page as vLLM pads it.
        shared_from: layer whose cache is read, or None.
    """

    name: str
    kind: str
    arguments: dict[str, Any]
    page_bytes: int
    shared_from: int | None

    def build(self, kv_cache_interface: Any) -> Any:
        """The class of vLLM itself, from its module."""
        import torch

        arguments = {**self.arguments, "dtype": getattr(torch, self.arguments["dtype"])}
        return getattr(kv_cache_interface, self.kind)(**arguments)


def kv_cache_specs(spec: CacheSpec) -> list[VllmSpec]:
    """Every cache of every layer, in canonical order.

    Raises:
        SpecError: a classic layer has formats that vLLM has no dense dtype for, or keys and values of different heads;
            or a component is of a class that vLLM has no spec for.
    """
    return [_record(spec, layer, role, component) for layer, role, component in spec.components()]


def _record(spec: CacheSpec, layer: int, role: str, component: Component) -> VllmSpec:
    if isinstance(component, KV):
        kind, arguments, page = _kv(spec, layer, component)
    elif isinstance(component, Tail):
        kind, arguments, page = _tail(component)
    elif isinstance(component, (Entries, Window)):
        kind, arguments, page = _latent(spec, component)
    else:
        where = f"{spec.path(layer)}.{role}"
        raise SpecError(got=type(component).__name__, where=where, allowed="Window, Tail, Entries, IndexKeys or KV")
    return VllmSpec(f"{layer}.{role}", kind, arguments, page, component.shared_from)


def _latent(spec: CacheSpec, component: Entries | Window) -> tuple[str, dict[str, Any], int]:
    """Windows, entries and index keys: one byte row a state."""
    format = component.parts[0].format
    block = WINDOW_BLOCK if isinstance(component, Window) else spec.block_tokens
    rows = block // component.tokens_per_row
    arguments: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        # The indexer's head size carries the bytes of its scales.
        "head_size": format.row if isinstance(component, IndexKeys) else component.dim,
        "dtype": "uint8",
        "alignment": format.page_alignment,
    }
    if not isinstance(component, IndexKeys):
        arguments |= {"state_content_bytes": format.row}
    page = block_layout(format, rows, "packed").nbytes
    if isinstance(component, Window):
        return "SlidingWindowMLASpec", arguments | {"sliding_window": component.window}, page
    return "MLAAttentionSpec", arguments | {"tokens_per_state": component.ratio}, page


def _tail(component: Tail) -> tuple[str, dict[str, Any], int]:
    """Compressor states: rows of fp32 kv and score."""
    arguments: dict[str, Any] = {"num_kv_heads": 1, "head_size": 2 * component.width, "dtype": "float32"}
    row = component.parts[0].format.row
    if component.ratio <= 2:
        arguments |= {"block_size": CIRCULAR_BLOCK, "head_size_v": 0}
        return "CircularBufferSpec", arguments, CIRCULAR_BLOCK * row
    # Pages as large as those of 64 latent rows: 4 rows of both streams, 8 of one.
    block = 4 if component.overlap else 8
    span = component.ratio * (2 if component.overlap else 1)
    arguments |= {"block_size": block, "max_tp_shards": 1, "sliding_window": span, "alignment": 576}
    return "SlidingWindowMLASpec", arguments, -(-block * row // 576) * 576


def _kv(spec: CacheSpec, layer: int, component: KV) -> tuple[str, dict[str, Any], int]:
    keys, values = component.parts
    code = keys.format.name
    if code not in TORCH_DTYPES or values.format.name != code or keys.heads != values.heads:
        raise SpecError(
            got=f"{keys.heads} × {code} keys, {values.heads} × {values.format.name} values",
            where=f"{spec.path(layer)}.kv",
            allowed=f"as many keys as values, both {', '.join(TORCH_DTYPES)}",
        )
    arguments: dict[str, Any] = {
        "block_size": spec.block_tokens,
        "num_kv_heads": keys.heads,
        "head_size": component.key_dim,
        "head_size_v": component.value_dim or component.key_dim,
        "dtype": TORCH_DTYPES[code],
    }
    page = spec.block_tokens * keys.heads * (keys.format.row + values.format.row)
    if component.window is not None:
        return "SlidingWindowSpec", arguments | {"sliding_window": component.window}, page
    if component.chunk is not None:
        return "ChunkedLocalAttentionSpec", arguments | {"attention_chunk_size": component.chunk}, page
    return "FullAttentionSpec", arguments, page
