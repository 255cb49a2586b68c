"""Wrong descriptors: those that cannot be right are refused, and those that could be show when rows are compared."""

import msgspec
import pytest

import kvcore
from kvcore import adoption
from kvcore.errors import ShapeError, SpecError
from tests.support.engine import PAGED, SPEC, Engine

OURS = [7, 3, 5]


def first(lines, **changes):
    """Another place of the first field."""
    return [msgspec.structs.replace(lines[0], **changes), *lines[1:]]


def each(lines, change):
    return [msgspec.structs.replace(one, **change(one)) for one in lines]


WRONG = {
    "rows and heads exchanged": lambda d: each(d, lambda one: {"token": one.head, "head": one.token}),
    "rows and heads of one exchanged": lambda d: first(d, token=d[0].head, head=d[0].token),
    "keys and values exchanged": lambda d: each(d, lambda one: {"part": {"key": "value", "value": "key"}[one.part]}),
    "layers exchanged": lambda d: each(d, lambda one: {"layer": 2 - one.layer}),
    "blocks half as far": lambda d: each(d, lambda one: {"block": one.block // 2}),
    "blocks twice as far": lambda d: each(d, lambda one: {"block": one.block * 2}),
    "rows half as far": lambda d: each(d, lambda one: {"token": one.token // 2}),
    "rows twice as far": lambda d: each(d, lambda one: {"token": one.token * 2}),
    "heads half as far": lambda d: each(d, lambda one: {"head": one.head // 2}),
    "heads twice as far": lambda d: each(d, lambda one: {"head": one.head * 2}),
    "heads as far as rows": lambda d: first(d, head=d[0].token),
    "a channel late": lambda d: each(d, lambda one: {"offset": one.offset + 4}),
    "a row late": lambda d: each(d, lambda one: {"offset": one.offset + one.token}),
    "a block late": lambda d: each(d, lambda one: {"offset": one.offset + one.block}),
    "before the tensor": lambda d: first(d, offset=-4),
    "values where keys are": lambda d: each(
        d,
        lambda one: {
            name: next(getattr(o, name) for o in d if (o.layer, o.part) == (one.layer, "key"))
            for name in ("offset", "tensor")
        },
    ),
    "no step of rows": lambda d: first(d, token=0),
    "no step of blocks": lambda d: first(d, block=0),
    "rows backwards": lambda d: first(d, token=-d[0].token),
    "exabytes": lambda d: first(d, block=1 << 61),
    "beyond 64 bits": lambda d: first(d, block=1 << 63),
    "another tensor": lambda d: first(d, tensor="another"),
    "one field missing": lambda d: d[1:],
    "one field twice": lambda d: [*d, d[0]],
    "a field too many": lambda d: [*d, msgspec.structs.replace(d[0], layer=9)],
    "a field of another name": lambda d: first(d, field="scales"),
}


def compare(engine, descriptor):
    """Adopt, and look at rows."""
    cache = kvcore.adopt(SPEC, engine.tensors, layout=descriptor)
    cache.compare(cache.admit(blocks=OURS, length=40), engine.read)


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_descriptor_is_refused_or_shows(layout, name):
    engine = Engine(layout)
    engine.write(OURS, 0, 40)
    right = adoption.describe(SPEC, engine.tensors, layout)
    lines = WRONG[name](right.lines)
    if lines == right.lines:
        pytest.fail("nothing is wrong with it")
    wrong = msgspec.structs.replace(right, lines=lines)
    before = [engine.at(layer, part, 5, 7).copy() for layer in range(3) for part in (0, 1)]
    with pytest.raises((SpecError, ShapeError)):
        compare(engine, wrong)
    after = [engine.at(layer, part, 5, 7) for layer in range(3) for part in (0, 1)]
    assert all((one == other).all() for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("layout", ["NL_X_NB_TWO_BS_NH_HS", "NB_NL_TWO_NH_BS_HS", "NL_X_NB_BS_NH_CS"])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("rows half as far", "lies on what is between|the same bytes"),
        ("heads half as far", "lies on what is between|the same bytes"),
        ("no step of rows", "less lies on what is between"),
        ("no step of blocks", "less lies on what is between"),
        ("rows backwards", "less lies on what is between"),
        ("blocks twice as far", "bytes [0-9]+ to [0-9]+ of tensor"),
        ("before the tensor", "bytes -4 to"),
        ("exabytes", "bytes 0 to"),
        ("values where keys are", "in the same bytes of tensor"),
        ("one field missing", "no place of"),
        ("one field twice", "twice"),
        ("a field too many", "a place of"),
        ("another tensor", "tensor 'another'"),
    ],
)
def test_what_cannot_be_right_is_refused_before_a_row_is_read(layout, name, match):
    engine = Engine(layout)
    right = adoption.describe(SPEC, engine.tensors, layout)
    with pytest.raises(SpecError, match=match):
        kvcore.adopt(SPEC, engine.tensors, layout=msgspec.structs.replace(right, lines=WRONG[name](right.lines)))


@pytest.mark.parametrize("layout", PAGED)
def test_the_right_one_is_neither(layout):
    engine = Engine(layout)
    engine.write(OURS, 0, 40)
    told = adoption.from_json(adoption.to_json(adoption.describe(SPEC, engine.tensors, layout)))
    compare(engine, told)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_tokens": 8}, "16, the spec's block_tokens"),
        ({"blocks": 11}, "bytes 0 to"),
        ({"blocks": 0}, "descriptor: blocks"),
    ],
)
def test_counts_that_are_not_there(change, match):
    engine = Engine(PAGED[2])
    wrong = msgspec.structs.replace(adoption.describe(SPEC, engine.tensors, PAGED[2]), **change)
    with pytest.raises((SpecError, ShapeError), match=match):
        kvcore.adopt(SPEC, engine.tensors, layout=wrong)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"form": "kvcore.spec"}', b"\xff", '{"lines": 3}'])
def test_text_that_is_no_descriptor(text):
    with pytest.raises(SpecError, match=r"kvcore.descriptor of version 1"):
        adoption.from_json(text)


def test_the_schema_names_every_field():
    schema = adoption.json_schema()
    (_, lines), *_ = [item for item in schema["$defs"].items() if item[0] == "Lines"]
    assert set(lines["required"]) == {"layer", "role", "part", "field", "tensor", "offset", "block", "token", "head"}
