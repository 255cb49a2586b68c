"""What a cache is: components, layers, formats, layouts, presets. Data only; no framework, no arrays."""

from kvcore.spec import presets
from kvcore.spec.codec import from_json, json_schema, to_json
from kvcore.spec.components import KV, Component, Entries, IndexKeys, KVTail, Part, Tail, Window
from kvcore.spec.formats import FORMATS, Field, Format, tail_format
from kvcore.spec.hf_config import from_hf_config
from kvcore.spec.layout import LAYOUTS, BlockLayout, Place, address, block_layout
from kvcore.spec.model import DERIVED, ROLES, TAIL_OF, CacheSpec, LayerSpec
from kvcore.spec.recurrent import Conv, State
from kvcore.spec.rope import Rope, Yarn

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
