"""Specs as JSON: both ways, the published schema, and what a reader is told about a bad document."""

import json

import jsonschema
import pytest

from kvcore.errors import SpecError
from kvcore.spec import CacheSpec, from_json, json_schema, presets, to_json
from kvcore.spec.codec import build_json_schema

WINDOW = {"dim": 8, "window": 4, "format": "fp32"}
GOOD = {"schema_version": 1, "layers": [{"window": WINDOW}], "block_tokens": 16}


def text(**changes):
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("indent", [None, 2])
def test_presets_go_there_and_back(preset, indent):
    spec = presets.PRESETS[preset]()
    written = to_json(spec, indent=indent)
    assert from_json(written) == spec
    assert from_json(written.encode()) == spec
    document = json.loads(written)
    assert document["schema_version"] == 1
    assert (document["name"], document["block_tokens"]) == (preset, spec.block_tokens)
    assert [len(document[group]) for group in ("layers", "draft_layers")] == [len(spec.layers), len(spec.draft_layers)]


def test_the_document_written_out():
    spec = from_json(text(name="small"))
    assert json.loads(to_json(spec)) == {
        "schema_version": 1,
        "layers": [{"window": {"dim": 8, "window": 4, "format": "fp32", "rows": None}}],
        "block_tokens": 16,
        "draft_layers": [],
        "name": "small",
    }


def test_fields_left_out_take_their_defaults():
    spec = from_json('{"schema_version": 1, "layers": [{"kv": {"key_heads": 2, "key_dim": 4}}]}')
    assert spec.block_tokens == 256
    assert (spec.draft_layers, spec.name) == ((), "")
    kv = spec.layers[0].kv
    assert kv is not None
    assert (kv.storage, kv.key_format, kv.value_format, kv.value_heads, kv.window) == (
        "paged",
        "bf16",
        None,
        None,
        None,
    )


BAD = [
    pytest.param(
        text(layers=[{"window": WINDOW}, {"window": {**WINDOW, "windw": 8}}]), "layers[1].window.windw", id="windw"
    ),
    pytest.param(text(blocks=3), "blocks", id="unknown key at the top"),
    pytest.param(text(layers=[{"windows": WINDOW}]), "layers[0].windows", id="unknown role"),
    pytest.param(
        text(draft_layers=[{"kv": {"key_heads": 1, "key_dim": 4, "heads": 2}}]),
        "draft_layers[0].kv.heads",
        id="draft key",
    ),
    pytest.param(text(layers=[{"window": {"dim": 8}}]), "layers[0].window.window", id="a missing field"),
    pytest.param('{"schema_version": 1}', "layers", id="no layers field"),
    pytest.param(text(layers={"window": WINDOW}), "layers", id="layers is an object"),
    pytest.param(text(layers=[5]), "layers[0]", id="a layer is a number"),
    pytest.param(text(layers=None), "layers", id="layers is null"),
    pytest.param(text(layers=[{"window": {**WINDOW, "dim": "8"}}]), "layers[0].window.dim", id="a number as text"),
    pytest.param(text(layers=[{"window": {**WINDOW, "dim": 8.5}}]), "layers[0].window.dim", id="a fraction"),
    pytest.param(text(layers=[{"window": {**WINDOW, "dim": True}}]), "layers[0].window.dim", id="a boolean"),
    pytest.param(
        text(layers=[{"window": {**WINDOW, "format": 8}}]), "layers[0].window.format", id="format is a number"
    ),
    pytest.param(text(layers=[{"window": {**WINDOW, "format": "v5"}}]), "layers[0].window.format", id="unknown format"),
    pytest.param(text(layers=[{"window": [8, 4]}]), "layers[0].window", id="a component is a list"),
    pytest.param(
        text(layers=[{"tail": {"dim": 8, "ratio": 4, "overlap": "yes"}}]),
        "layers[0].tail.overlap",
        id="overlap as text",
    ),
    pytest.param(
        text(layers=[{"kv": {"key_heads": 1, "key_dim": 4, "storage": "disk"}}]),
        "layers[0].kv.storage",
        id="storage disk",
    ),
    pytest.param(text(block_tokens="16"), "block_tokens", id="block_tokens as text"),
    pytest.param(text(block_tokens=0), "block_tokens", id="block_tokens 0"),
    pytest.param(text(name=None), "name", id="name is null"),
    pytest.param(text(schema_version=2), "schema_version", id="a newer version"),
    pytest.param(text(schema_version="1"), "schema_version", id="version as text"),
    pytest.param(text(schema_version=True), "schema_version", id="version is true"),
    pytest.param(text(schema_version=None), "schema_version", id="version is null"),
    pytest.param(json.dumps({"layers": GOOD["layers"]}), "schema_version", id="no version"),
]


@pytest.mark.parametrize(("document", "where"), BAD)
def test_a_bad_document_names_the_path(document, where):
    with pytest.raises(SpecError) as caught:
        from_json(document)
    assert caught.value.where == where
    assert caught.value.allowed


@pytest.mark.parametrize(
    "document",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut off"),
        pytest.param(text() + "}", id="something after it"),
        pytest.param("{'schema_version': 1}", id="single quotes"),
        pytest.param("[]", id="a list"),
        pytest.param("null", id="null"),
        pytest.param("7", id="a number"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(text(layers=[{"window": {**WINDOW, "dim": float("nan")}}]), id="NaN, which JSON lacks"),
        pytest.param(None, id="None"),
        pytest.param({"schema_version": 1}, id="a dictionary"),
    ],
)
def test_what_is_not_a_json_object(document):
    with pytest.raises(SpecError) as caught:
        from_json(document)
    assert caught.value.where == "spec JSON"
    assert caught.value.allowed == "one JSON object"


def test_a_newer_version_says_what_to_do():
    with pytest.raises(SpecError, match="Update kvcore"):
        from_json(text(schema_version=2))


def test_the_published_schema_is_the_built_one():
    assert json_schema() == build_json_schema()


def test_the_published_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_validate(preset):
    jsonschema.validate(json.loads(to_json(presets.PRESETS[preset]())), json_schema())


RULES_OF_THE_CONSTRUCTORS = {"unknown format", "block_tokens 0"}


@pytest.mark.parametrize(
    "document", [pytest.param(c.values[0], id=c.id) for c in BAD if c.id not in RULES_OF_THE_CONSTRUCTORS]
)
def test_the_schema_rejects_bad_documents_too(document):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(document), json_schema())


def test_a_spec_built_from_lists_equals_one_from_json():
    spec = from_json(text())
    assert CacheSpec(layers=list(spec.layers), block_tokens=16) == spec
