"""A cache over memory that belongs to someone else: an engine's paged tensors, adopted where they lie.

``adopt`` gives the verbs of a cache over them without a copy; a ``Descriptor`` says where every field of every row
lies, ``LAYOUTS`` knows the layouts that engines use, by name.
"""

from kvcore.adoption.cache import AdoptedCache, adopt, describe
from kvcore.adoption.descriptor import Descriptor, IndexMap, Lines, from_json, json_schema, to_json
from kvcore.adoption.tables import LAYOUTS

__all__ = [
    "LAYOUTS",
    "AdoptedCache",
    "Descriptor",
    "IndexMap",
    "Lines",
    "adopt",
    "describe",
    "from_json",
    "json_schema",
    "to_json",
]
