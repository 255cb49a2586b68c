"""The spec digest: the same for equal specs, another for any field but the name."""

import hashlib
import json

import pytest

from kvcore.spec import CacheSpec, LayerSpec, Window, from_json, presets, to_json

LATENT = {
    "window": {"dim": 8, "window": 4, "format": "fp32", "rows": 9},
    "tail": {"dim": 8, "ratio": 4, "overlap": True, "rows": 12},
    "entries": {"dim": 8, "ratio": 4, "format": "fp32", "share": None},
    "index_tail": {"dim": 6, "ratio": 4, "overlap": True, "rows": 12},
    "index_keys": {
        "dim": 6, "ratio": 4, "format": "fp32", "share": None, "heads": 2, "topk": 3, "global_scale": 0.5,
    },
}  # fmt: skip
CLASSIC = {
    "kv": {
        "key_heads": 2, "key_dim": 8, "value_heads": 4, "value_dim": 6, "storage": "ring", "window": 5, "chunk": None,
        "key_format": "bf16", "value_format": "fp16",
    }
}  # fmt: skip
READER = {
    "entries": {"dim": 8, "ratio": 4, "format": "fp32", "share": 0},
    "index_keys": {**LATENT["index_keys"], "share": 0},
}
DOCUMENT = {"layers": [LATENT, CLASSIC, READER], "block_tokens": 16, "draft_layers": [CLASSIC], "name": ""}


def spec_of(document):
    return from_json(json.dumps({"schema_version": 1, **document}))


def test_the_digest_is_sha256_over_the_sorted_json():
    text = json.dumps(DOCUMENT, sort_keys=True, separators=(",", ":"))
    assert spec_of(DOCUMENT).digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_digest_of_a_small_spec_never_changes():
    spec = CacheSpec(layers=[LayerSpec(window=Window(dim=512, window=128))])
    text = (
        '{"block_tokens":256,"draft_layers":[],"layers":[{"window":{"dim":512,"format":"v4_584","rows":null,'
        '"window":128}}],"name":""}'
    )
    assert spec.digest == hashlib.sha256(text.encode()).hexdigest()


def test_names_do_not_count():
    assert spec_of(DOCUMENT).digest == spec_of({**DOCUMENT, "name": "mine"}).digest


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_digest_survives_json(preset):
    spec = presets.PRESETS[preset]()
    assert from_json(to_json(spec)).digest == spec.digest


def test_every_preset_has_its_own_digest():
    digests = {preset().digest for preset in presets.PRESETS.values()}
    assert len(digests) == len(presets.PRESETS)


def test_a_whole_number_and_its_float_are_one_scale():
    as_integer = {**DOCUMENT, "layers": [{**LATENT, "index_keys": {**LATENT["index_keys"], "global_scale": 2}}]}
    as_float = {**DOCUMENT, "layers": [{**LATENT, "index_keys": {**LATENT["index_keys"], "global_scale": 2.0}}]}
    assert spec_of(as_integer).digest == spec_of(as_float).digest


CHANGES = [
    ("block_tokens", 32), ("draft_layers", []), ("draft_layers", [CLASSIC, CLASSIC]), ("layers", [LATENT, CLASSIC]),
    ("layers", [LATENT, READER, CLASSIC]), ("layers", [LATENT, CLASSIC, READER, CLASSIC]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), CHANGES, ids=range(len(CHANGES)))
def test_every_field_of_the_spec_counts(field, value):
    assert spec_of(DOCUMENT).digest != spec_of({**DOCUMENT, field: value}).digest


@pytest.mark.parametrize(
    ("layer", "changes"),
    [
        pytest.param(0, {"window": {"dim": 12}, "tail": {"dim": 12}, "entries": {"dim": 12}}, id="latent dim"),
        pytest.param(0, {"index_tail": {"dim": 10}, "index_keys": {"dim": 10}}, id="index dim"),
        pytest.param(0, {"window": {"window": 5}}, id="window.window"),
        pytest.param(0, {"window": {"format": "bf16"}}, id="window.format"),
        pytest.param(0, {"window": {"rows": 10}}, id="window.rows"),
        pytest.param(0, {"window": {"rows": None}}, id="window.rows left out"),
        pytest.param(0, {"tail": {"overlap": False}}, id="tail.overlap"),
        pytest.param(0, {"tail": {"rows": 13}}, id="tail.rows"),
        pytest.param(0, {"index_tail": {"overlap": False}}, id="index_tail.overlap"),
        pytest.param(0, {"index_tail": {"rows": 13}}, id="index_tail.rows"),
        pytest.param(0, {"entries": {"format": "bf16"}}, id="entries.format"),
        pytest.param(0, {"index_keys": {"format": "bf16"}}, id="index_keys.format"),
        pytest.param(0, {"index_keys": {"heads": 3}}, id="index_keys.heads"),
        pytest.param(0, {"index_keys": {"topk": 4}}, id="index_keys.topk"),
        pytest.param(0, {"index_keys": {"global_scale": 0.25}}, id="index_keys.global_scale"),
        *(
            pytest.param(1, {"kv": {field: value}}, id=f"kv.{field}")
            for field, value in {
                "key_heads": 1, "key_dim": 10, "value_heads": 2, "value_dim": 8, "storage": "paged", "window": 6,
                "key_format": "fp32", "value_format": "bf16",
            }.items()
        ),
        pytest.param(1, {"kv": {"window": None, "chunk": 5}}, id="kv.chunk instead of window"),
    ],
)  # fmt: skip
def test_every_field_of_a_component_counts(layer, changes):
    plain = {"layers": [LATENT, CLASSIC], "block_tokens": 16}
    changed = [dict(fields) for fields in plain["layers"]]
    for role, fields in changes.items():
        changed[layer][role] = {**changed[layer][role], **fields}
    assert spec_of(plain).digest != spec_of({**plain, "layers": changed}).digest


@pytest.mark.parametrize("ratio", [2, 8])
def test_the_ratio_counts(ratio):
    plain = {"layers": [LATENT], "block_tokens": 16}
    roles = ("tail", "entries", "index_tail", "index_keys")
    changed = {**LATENT, **{role: {**LATENT[role], "ratio": ratio} for role in roles}}
    changed["tail"] = {**changed["tail"], "rows": 20}
    changed["index_tail"] = {**changed["index_tail"], "rows": 20}
    same_rows = {**LATENT, "tail": {**LATENT["tail"], "rows": 20}, "index_tail": {**LATENT["index_tail"], "rows": 20}}
    found = {spec_of({**plain, "layers": [layer]}).digest for layer in (LATENT, same_rows, changed)}
    assert len(found) == 3


def test_sharing_counts():
    owner = {role: LATENT[role] for role in ("entries", "index_keys")}
    apart = {"layers": [owner, owner, owner], "block_tokens": 16}
    shared = {**apart, "layers": [owner, owner, READER]}
    other = {role: {**fields, "share": 1} for role, fields in READER.items()}
    of_another = {**apart, "layers": [owner, owner, other]}
    assert len({spec_of(document).digest for document in (apart, shared, of_another)}) == 3
