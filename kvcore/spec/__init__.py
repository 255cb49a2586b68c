"""What a cache is: components, layers, formats, layouts, presets. Data only; no framework, no arrays.

The tables of models are read at first use: half of what there is, and no part of most programs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcore.spec.codec import from_json, json_schema, to_json
from kvcore.spec.component import Component, Part
from kvcore.spec.components import Entries, IndexKeys, Tail, Window
from kvcore.spec.formats import FORMATS, Field, Format, tail_format
from kvcore.spec.kv import KV, KVTail
from kvcore.spec.layout import LAYOUTS, BlockLayout, Place, address, block_layout
from kvcore.spec.model import DERIVED, ROLES, TAIL_OF, CacheSpec, LayerSpec
from kvcore.spec.recurrent import Conv, State
from kvcore.spec.rope import Rope, Yarn

if TYPE_CHECKING:
    from kvcore.spec import presets
    from kvcore.spec.hf_config import from_hf_config

__all__ = [
    "DERIVED",
    "FORMATS",
    "KV",
    "LAYOUTS",
    "ROLES",
    "TAIL_OF",
    "BlockLayout",
    "CacheSpec",
    "Component",
    "Conv",
    "Entries",
    "Field",
    "Format",
    "IndexKeys",
    "KVTail",
    "LayerSpec",
    "Part",
    "Place",
    "Rope",
    "State",
    "Tail",
    "Window",
    "Yarn",
    "address",
    "block_layout",
    "from_hf_config",
    "from_json",
    "json_schema",
    "presets",
    "tail_format",
    "to_json",
]


def __getattr__(name: str) -> Any:
    """``presets`` and ``from_hf_config``."""
    if name == "presets":
        return import_module("kvcore.spec.presets")
    if name == "from_hf_config":
        return import_module("kvcore.spec.hf_config").from_hf_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, which are loaded as they are asked for."""
    return sorted(__all__)
