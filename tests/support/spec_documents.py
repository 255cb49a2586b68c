"""Specs as dictionaries, built through the constructors or through JSON, and how they are refused."""

import json

import pytest

from kvcore.errors import SpecError
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Tail, Window, from_json

WINDOW = {"dim": 8, "window": 4, "format": "fp32"}
TAIL = {"dim": 8, "ratio": 4, "overlap": True}
ENTRIES = {"dim": 8, "ratio": 4, "format": "fp32"}
INDEX_TAIL = {"dim": 6, "ratio": 4, "overlap": True}
INDEX_KEYS = {"dim": 6, "ratio": 4, "heads": 2, "topk": 3, "format": "fp32"}
KV_FIELDS = {"key_heads": 2, "key_dim": 8}

KINDS = {
    "window": (Window, WINDOW),
    "tail": (Tail, TAIL),
    "entries": (Entries, ENTRIES),
    "index_tail": (Tail, INDEX_TAIL),
    "index_keys": (IndexKeys, INDEX_KEYS),
    "kv": (KV, KV_FIELDS),
}


def construct(document):
    """A spec from the same dictionaries that JSON has, through the constructors."""

    def layer(fields):
        return LayerSpec(**{role: KINDS[role][0](**values) for role, values in fields.items()})

    groups = {name: [layer(fields) for fields in document.get(name, [])] for name in ("layers", "draft_layers")}
    return CacheSpec(**{**document, **groups})


def read(document):
    return from_json(json.dumps({"schema_version": 1, **document}))


def refused(make, document):
    with pytest.raises(SpecError) as caught:
        make(document)
    error = caught.value
    assert error.allowed
    assert str(error).startswith(f"{error.where}: got ")
    return error


def layers(*given, block_tokens=8):
    return {"layers": list(given), "block_tokens": block_tokens}


CSA = {"window": WINDOW, "tail": TAIL, "entries": ENTRIES, "index_tail": INDEX_TAIL, "index_keys": INDEX_KEYS}
