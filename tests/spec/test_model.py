"""Layers composed of components: every rule that spans components, with the path that its error names."""

import pytest

from kvcore.errors import SpecError
from kvcore.spec import CacheSpec, IndexKeys, LayerSpec, Tail, Window, presets
from tests.support.spec_documents import (
    CSA,
    ENTRIES,
    INDEX_KEYS,
    INDEX_TAIL,
    TAIL,
    WINDOW,
    construct,
    layers,
    read,
    refused,
)


def test_a_layer_may_keep_nothing_but_not_all_of_them():
    document = {"layers": [{"window": WINDOW}, {}], "block_tokens": 8}
    assert construct(document) == read(document)
    for document in ({"layers": [{}, {}]}, {"layers": [], "draft_layers": [{}]}):
        for make in (construct, read):
            with pytest.raises(SpecError, match="at least one of window"):
                make(document)


def test_a_layer_of_every_latent_role_is_accepted():
    assert construct(layers(CSA)) == read(layers(CSA))


# What is wrong between components of one layer: the layer, and the path in the error.
OTHER = {"window": WINDOW}
LAYER_RULES = [
    pytest.param({**CSA, "tail": {**TAIL, "dim": 6}}, "layers[1].tail.dim", "that of entries", id="tail of other dim"),
    pytest.param(
        {**CSA, "tail": {**TAIL, "ratio": 8}}, "layers[1].tail.ratio", "that of entries", id="tail of other ratio"
    ),
    pytest.param(
        {**CSA, "index_tail": {**INDEX_TAIL, "dim": 8}},
        "layers[1].index_tail.dim",
        "that of index_keys",
        id="index dim",
    ),
    pytest.param(
        {**CSA, "index_tail": {**INDEX_TAIL, "ratio": 2}},
        "layers[1].index_tail.ratio",
        "that of index_keys",
        id="index tail of other ratio",
    ),
    pytest.param(
        {"window": WINDOW, "index_keys": INDEX_KEYS},
        "layers[1].index_keys.ratio",
        "entries beside it",
        id="index keys of nothing",
    ),
    pytest.param(
        {"entries": {**ENTRIES, "ratio": 8}, "index_keys": INDEX_KEYS},
        "layers[1].index_keys.ratio",
        "8, the ratio of entries",
        id="index keys of another ratio than entries",
    ),
    pytest.param(
        {"window": {**WINDOW, "dim": 12}, "entries": ENTRIES},
        "layers[1].entries.dim",
        "12, the dim of the window",
        id="entries and window of different dims",
    ),
]


@pytest.mark.parametrize("make", [construct, read], ids=["constructed", "from JSON"])
@pytest.mark.parametrize(("layer", "where", "message"), LAYER_RULES)
def test_components_that_contradict_each_other(make, layer, where, message):
    error = refused(make, layers(OTHER, layer))
    assert error.where == where
    assert message in error.allowed
    in_drafts = refused(make, {"layers": [OTHER], "draft_layers": [OTHER, layer], "block_tokens": 8})
    assert in_drafts.where == f"draft_{where}"


@pytest.mark.parametrize("make", [construct, read], ids=["constructed", "from JSON"])
@pytest.mark.parametrize(
    ("document", "where", "message"),
    [
        pytest.param({"layers": []}, "layers", "one layer or more", id="no layers"),
        pytest.param(layers(CSA, block_tokens=0), "block_tokens", "1 or more", id="block_tokens 0"),
        pytest.param(
            layers(CSA, block_tokens=6), "block_tokens", "layers[0].entries.ratio is 4", id="6 is no multiple of 4"
        ),
        pytest.param(
            layers(OTHER, {"entries": {**ENTRIES, "ratio": 3}}, block_tokens=8),
            "block_tokens",
            "layers[1].entries.ratio is 3",
            id="8 is no multiple of 3",
        ),
    ],
)
def test_rules_of_the_whole_spec(make, document, where, message):
    error = refused(make, document)
    assert error.where == where
    assert message in error.allowed


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"layers": None}, "layers"),
        ({"layers": "ab"}, "layers"),
        ({"layers": LayerSpec(window=Window(**WINDOW))}, "layers"),
        ({"layers": [Window(**WINDOW)]}, "layers[0]"),
        ({"layers": [LayerSpec(window=Window(**WINDOW)), None]}, "layers[1]"),
        ({"layers": [LayerSpec(window=Window(**WINDOW))], "draft_layers": [5]}, "draft_layers[0]"),
        ({"layers": [LayerSpec(window=Tail(**TAIL))]}, "layers[0].window"),
        ({"layers": [LayerSpec(entries=IndexKeys(**INDEX_KEYS))], "block_tokens": 8}, "layers[0].entries"),
        ({"layers": [LayerSpec(kv={"key_heads": 1})]}, "layers[0].kv"),
        ({"layers": [LayerSpec(window=Window(**WINDOW))], "block_tokens": True}, "block_tokens"),
        ({"layers": [LayerSpec(window=Window(**WINDOW))], "block_tokens": 8.0}, "block_tokens"),
    ],
)
def test_a_constructor_refuses_what_json_could_not_hold(arguments, where):
    with pytest.raises(SpecError) as caught:
        CacheSpec(**arguments)
    assert caught.value.where == where


SOURCE = {"window": WINDOW, "entries": {**ENTRIES, "ratio": 1}, "index_keys": {**INDEX_KEYS, "ratio": 1}}


def sharing(*, entries=None, index_keys=None):
    """A reader of layer 0's pools, with changes."""
    return {
        "window": WINDOW,
        "entries": {**SOURCE["entries"], "share": 0, **(entries or {})},
        "index_keys": {**SOURCE["index_keys"], "share": 0, **(index_keys or {})},
    }


@pytest.mark.parametrize("make", [construct, read], ids=["constructed", "from JSON"])
@pytest.mark.parametrize(
    ("reader", "where", "message"),
    [
        pytest.param(sharing(entries={"share": 1}), "layers[1].entries.share", "0 to 0", id="a layer shares itself"),
        pytest.param(sharing(entries={"share": 2}), "layers[1].entries.share", "0 to 0", id="a later layer"),
        pytest.param(sharing(entries={"share": 99}), "layers[1].entries.share", "0 to 0", id="no such layer"),
        pytest.param(sharing(entries={"format": "bf16"}), "layers[1].entries", "layer 0", id="another format"),
        pytest.param(
            sharing(entries={"ratio": 2}, index_keys={"ratio": 2}), "layers[1].entries", "layer 0", id="another ratio"
        ),
        pytest.param(sharing(index_keys={"topk": 9}), "layers[1].index_keys", "layer 0", id="another top-k"),
        pytest.param(sharing(index_keys={"heads": 5}), "layers[1].index_keys", "layer 0", id="another head count"),
        pytest.param(
            {**sharing(), "tail": {**TAIL, "ratio": 1}}, "layers[1].tail", "no tail", id="a tail beside shared entries"
        ),
        pytest.param(
            {**sharing(), "index_tail": {**INDEX_TAIL, "ratio": 1}},
            "layers[1].index_tail",
            "no tail",
            id="an index tail beside shared keys",
        ),
    ],
)
def test_rules_of_sharing(make, reader, where, message):
    error = refused(make, layers(SOURCE, reader, OTHER))
    assert error.where == where
    assert message in error.allowed


@pytest.mark.parametrize("make", [construct, read], ids=["constructed", "from JSON"])
def test_only_an_owner_can_be_shared(make):
    third = {"window": WINDOW, "entries": {**SOURCE["entries"], "share": 1}}
    assert refused(make, layers(SOURCE, sharing(), third)).where == "layers[2].entries.share"
    assert refused(make, layers(OTHER, sharing())).where == "layers[1].entries.share"
    draft = {"layers": [SOURCE, sharing()], "draft_layers": [sharing(entries={"share": 1})], "block_tokens": 8}
    assert refused(make, draft).where == "draft_layers[0].entries.share"
    accepted = make({**draft, "draft_layers": [sharing()]})
    assert (accepted.owner(1, "entries"), accepted.owner(2, "index_keys"), accepted.owner(2, "window")) == (0, 0, 2)


def test_a_spec_is_immutable_and_hashable():
    spec = construct(layers(CSA))
    same = construct(layers(CSA))
    assert spec == same
    assert hash(spec) == hash(same)
    assert {spec: 1}[same] == 1
    for record, field in ((spec, "layers"), (spec.layers[0], "window"), (spec.layers[0].window, "dim")):
        with pytest.raises(AttributeError):
            setattr(record, field, None)
    assert isinstance(spec.layers, tuple)


def test_a_list_given_to_a_spec_is_not_kept():
    given = [LayerSpec(window=Window(**WINDOW))]
    spec = CacheSpec(layers=given)
    given.append(given[0])
    assert len(spec.layers) == 1


def test_layers_are_numbered_through_the_drafts():
    spec = presets.deepseek_v4_1_flash_tiny()
    assert (len(spec.layers), len(spec.draft_layers), len(spec.all_layers)) == (6, 1, 7)
    assert (spec.path(5), spec.path(6)) == ("layers[5]", "draft_layers[0]")
    assert [role for _, role, _ in spec.components()][:4] == ["window", "window", "tail", "entries"]
