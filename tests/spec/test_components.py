"""Rules inside one component, with the field that the error names and the path that JSON readers see."""

from fractions import Fraction

import numpy as np
import pytest

from kvcore.errors import SpecError
from kvcore.spec import CacheSpec, LayerSpec, from_json, to_json
from tests.support.spec_documents import KINDS, WINDOW, layers, read, refused

# What is wrong inside one component: role, changed fields, the field that the error names, part of the message.
FIELDS = [
    *(("window", {name: 0}, name, "1 or more") for name in ("dim", "window", "rows")),
    *(("tail", {name: 0}, name, "1 or more") for name in ("dim", "ratio", "rows")),
    *(("entries", {name: -1}, name, "1 or more") for name in ("dim", "ratio")),
    *(("index_keys", {name: 0}, name, "1 or more") for name in ("dim", "ratio", "heads", "topk")),
    *(
        ("kv", {name: 0}, name, "1 or more")
        for name in ("key_heads", "key_dim", "value_heads", "value_dim", "window", "chunk")
    ),
    ("window", {"rows": 3}, "rows", "4 or more"),
    ("tail", {"rows": 7}, "rows", "8 or more"),
    ("tail", {"rows": 3, "overlap": False}, "rows", "4 or more"),
    ("window", {"format": "v4"}, "format", "v4_584"),
    ("window", {"format": "v4_584"}, "dim", "512, for format v4_584"),
    ("entries", {"format": "nope"}, "format", "v4_584"),
    ("entries", {"format": "v32_656"}, "dim", "576, for format v32_656"),
    ("entries", {"format": "mxfp4", "dim": 7}, "dim", "an even number"),
    ("entries", {"share": -1}, "share", "0 or more, or null"),
    ("index_keys", {"format": "index_fp4_68"}, "dim", "128, for format index_fp4_68"),
    ("index_keys", {"global_scale": 0.0}, "global_scale", "above 0"),
    ("index_keys", {"global_scale": -1.0}, "global_scale", "above 0"),
    ("index_keys", {"global_scale": 1e-40}, "global_scale", "normal in fp32"),
    ("index_keys", {"global_scale": 1e39}, "global_scale", "normal in fp32"),
    ("kv", {"window": 4, "chunk": 4}, "chunk", "not both"),
    ("kv", {"storage": "ring"}, "storage", "ring only with a window or a chunk"),
    ("kv", {"key_format": "nope"}, "key_format", "bf16"),
    ("kv", {"value_format": "nope"}, "value_format", "bf16"),
    ("kv", {"value_format": ""}, "value_format", "bf16"),
    ("kv", {"key_format": "v4_584"}, "key_dim", "512, for format v4_584"),
    ("kv", {"value_format": "v4_584"}, "key_dim", "512, for format v4_584"),
    ("kv", {"value_format": "v4_584", "value_dim": 16}, "value_dim", "512, for format v4_584"),
    ("kv", {"key_format": "mxfp4", "value_dim": 7}, "value_dim", "an even number"),
    ("kv", {"key_format": "index_fp4_68_h", "key_dim": 128}, "key_format", "a format for K-V rows"),
    ("kv", {"value_format": "index_nvfp4", "value_dim": 128}, "value_format", "a format for K-V rows"),
    ("kv", {"key_format": "nvfp4", "scales": (0.5, 0.0)}, "scales", "two numbers above 0"),
    ("kv", {"key_format": "nvfp4", "value_format": "bf16", "scales": (0.5, 0.5)}, "scales", "without a global scale"),
]


@pytest.mark.parametrize(
    ("role", "change", "field", "message"), FIELDS, ids=[f"{role} {change}" for role, change, _, _ in FIELDS]
)
def test_a_component_that_contradicts_itself(role, change, field, message):
    kind, fields = KINDS[role]
    with pytest.raises(SpecError, match=message) as caught:
        kind(**{**fields, **change})
    assert caught.value.where == field

    second = {role: {**fields, **change}}
    error = refused(read, layers({"window": WINDOW}, second))
    assert error.where == f"layers[1].{role}.{field}"
    assert message in error.allowed
    draft = refused(read, {"layers": [{"window": WINDOW}], "draft_layers": [second], "block_tokens": 8})
    assert draft.where == f"draft_layers[0].{role}.{field}"


@pytest.mark.parametrize("value", [True, 1.5, "4", None, [4], float("nan")], ids=repr)
@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("window", "dim"), ("window", "window"), ("tail", "dim"), ("tail", "ratio"), ("entries", "dim"),
        ("entries", "ratio"), ("index_keys", "heads"), ("index_keys", "topk"), ("kv", "key_heads"), ("kv", "key_dim"),
    ],
)  # fmt: skip
def test_counts_are_plain_integers(role, field, value):
    kind, fields = KINDS[role]
    with pytest.raises(SpecError) as caught:
        kind(**{**fields, field: value})
    assert caught.value.where == field


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        ("tail", "overlap", 1), ("tail", "overlap", None), ("tail", "overlap", "yes"), ("entries", "share", True),
        ("entries", "share", 1.0), ("entries", "share", "0"), ("index_keys", "global_scale", True),
        ("index_keys", "global_scale", float("inf")), ("index_keys", "global_scale", float("nan")),
        ("index_keys", "global_scale", "1"), ("kv", "storage", "disk"), ("kv", "storage", None),
        ("window", "format", None), ("window", "format", ["fp32"]), ("kv", "key_format", 16),
    ],
)  # fmt: skip
def test_other_fields_have_their_types(role, field, value):
    kind, fields = KINDS[role]
    with pytest.raises(SpecError) as caught:
        kind(**{**fields, field: value})
    assert caught.value.where == field


@pytest.mark.parametrize("scales", [(np.float32(0.1), np.float16(2)), (np.int64(3), Fraction(1, 3))], ids=repr)
def test_scales_are_any_real_numbers(scales):
    kind, fields = KINDS["kv"]
    found = kind(**{**fields, "key_format": "nvfp4", "scales": scales})
    assert found.scales == (float(scales[0]), float(scales[1]))
    assert [type(scale) for scale in found.scales] == [float, float]
    kind, fields = KINDS["index_keys"]
    assert kind(**{**fields, "global_scale": scales[0]}).global_scale == float(scales[0])


@pytest.mark.parametrize("scale", [10**400, Fraction(1, 10**60), np.float16(0), np.bool_(True), 1j, None], ids=repr)
def test_scales_that_are_none(scale):
    kind, fields = KINDS["kv"]
    with pytest.raises(SpecError, match="two numbers above 0"):
        kind(**{**fields, "key_format": "nvfp4", "scales": (1.0, scale)})


def test_scales_of_one_are_none():
    kind, fields = KINDS["kv"]
    bare, said = (kind(**{**fields, "key_format": "nvfp4", **more}) for more in ({}, {"scales": (1, np.float32(1))}))
    assert bare == said
    assert hash(bare) == hash(said)
    specs = [CacheSpec(layers=[LayerSpec(kv=one)], block_tokens=8) for one in (bare, said)]
    assert to_json(specs[0]) == to_json(specs[1])
    assert from_json(to_json(specs[1])) == specs[0]
