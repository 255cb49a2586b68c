"""Windows and tails whose rows an engine looks up by the number of a token, or a ring by that of a request."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore.adoption import IndexMap, describe, from_json, to_json
from kvcore.errors import OutOfBlocks, RequestError, ShapeError, SpecError
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, State, Tail
from tests.support import stories

PAGE, BLOCKS, PAGES, DRAFTS = 8, 8, 10, 1
SLIDING = KV(key_heads=2, key_dim=4, key_format="fp32", window=11, storage="ring")
SPEC = CacheSpec(
    layers=[
        LayerSpec(kv=KV(key_heads=2, key_dim=4, key_format="fp32")),
        LayerSpec(kv=SLIDING),
        LayerSpec(tail=Tail(dim=4, ratio=2, overlap=True), entries=Entries(dim=4, ratio=2, format="fp32")),
    ],
    block_tokens=PAGE,
)
LAYOUT = {
    "0.kv": "NL_X_NB_TWO_BS_NH_HS",
    "1.kv": "pages swa NL_X_NB_TWO_BS_NH_HS",
    "tail": "pages swa NL_X_NB_BS_HS",
    "entries": "NL_X_NB_BS_HS",
}
SWA = IndexMap(name="swa", of="token", count=BLOCKS * PAGE + 1, page=PAGE, first=PAGE, aligned=True)
KINDS = {"numpy": "reference", "torch": "torch_triton"}
TOKENS = [7 * token % 251 for token in range(61)]
TAIL = 4
"""Rows of a page that has the newest of a tail alone."""


class Engine:
    """Full pages, pages of windows, and a map from the slots of the first to those of the second."""

    def __init__(self, kind, *, page=PAGE):
        width = sum(part.heads * part.format.row for part in SPEC.layers[2].tail.parts) // 4
        shapes = (BLOCKS, 2, PAGE, 2, 4), (PAGES * PAGE // page, 2, page, 2, 4), (PAGES, TAIL, width), (BLOCKS, 4, 4)
        self.tensors = [np.full(shape, np.nan, np.float32) for shape in shapes]
        self.map = np.zeros(SWA.count, np.int64)
        self.map[-1] = -1
        self.given = self.tensors
        if kind == "torch":
            import torch

            self.given = [torch.from_numpy(tensor) for tensor in self.tensors]

    def let(self, block, page):
        """A full page has that page of windows; None takes it back."""
        numbers = np.arange(PAGE)
        self.map[block * PAGE + numbers] = 0 if page is None else page * PAGE + numbers

    def adopt(self, descriptor=None, **options):
        descriptor = describe(SPEC, self.given, LAYOUT, maps=[SWA]) if descriptor is None else descriptor
        maps = {"swa": self.map}
        return kvcore.adopt(
            SPEC, self.given, layout=descriptor, maps=maps, max_requests=3, max_draft_tokens=DRAFTS, **options
        )


def begun(kind="numpy", length=29):
    """(engine, cache, request, the same request in a cache of kvcore's own)."""
    engine = Engine(kind)
    for block, page in ((4, 3), (1, 9), (6, 1), (2, 7)):
        engine.let(block, page)
    own = kvcore.create_cache(SPEC, backend=KINDS[kind], max_requests=3, max_tokens=192, max_draft_tokens=DRAFTS)
    first = own.admit()
    stories.tell(own, {first: TOKENS[:length]})
    cache = engine.adopt()
    request = cache.import_request(own.export_request(first), into=cache.admit(blocks=[4, 1, 6, 2]))
    return engine, cache, request, own, first


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_on_where_the_map_says(kind):
    engine, cache, request, own, first = begun(kind)
    assert cache.digest([request]) == own.digest([first])
    # The window's rows lie in pages 3, 9, 1 and 7 of their pool, as the map says.
    mine, its = (one.step({who: 0}) for one, who in ((own, first), (cache, request)))
    with mine, its:
        keys = kvcore.to_numpy(its.layer(1).gather_kv()[0])[0]
        positions = kvcore.to_numpy(its.layer(1).gather_kv()[2])[0]
    for row, position in zip(keys, positions.tolist(), strict=True):
        if position >= 0:
            place = engine.map[[4, 1, 6, 2][position // PAGE] * PAGE + position % PAGE]
            assert (engine.tensors[1][place // PAGE, 0, place % PAGE] == row).all()
    # Its first pages go, as an engine takes them back; others come.
    engine.let(4, None)
    engine.let(5, 3)
    cache.give(request, [5])
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[29:31]})
        stories.fail(one, {who: TOKENS[31:35]})
        one.truncate(who, 30)
    # There is room for what the shorter one needs.
    shorter = engine.adopt()
    assert shorter.digest([shorter.admit(blocks=[4, 1, 6, 2, 5], length=30)]) == own.digest([first])
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[30:37]})
    assert cache.digest([request]) == own.digest([first])
    # It is all there for whoever knows the descriptor and the map alone.
    told = from_json(to_json(cache.descriptor))
    again = engine.adopt(told)
    other = again.admit(blocks=[4, 1, 6, 2, 5], length=37)
    assert again.digest([other]) == own.digest([first])
    assert own.digest([own.import_request(again.export_request(other))]) == own.digest([first])
    stories.tell(again, {other: TOKENS[37:39]})
    stories.tell(own, {first: TOKENS[37:39]})
    assert again.digest([other]) == own.digest([first])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_rollback_needs_reach_the_owner_though_no_window_has_them(kind):
    """A step longer than a window: what lives before it once a draft is undone was never read there."""
    engine, cache, request, own, first = begun(kind)
    for block, page in ((5, 2), (0, 5)):
        engine.let(block, page)
    cache.give(request, [5, 0])
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[29:46]})
        one.truncate(who, 45)
    shorter = engine.adopt()
    assert shorter.digest([shorter.admit(blocks=[4, 1, 6, 2, 5, 0], length=45)]) == own.digest([first])


@pytest.mark.parametrize("page", [None, 8], ids=["gone", "another's"])
def test_a_row_that_only_a_rollback_needs_may_have_no_place_and_not_another_s(page):
    engine, cache, request, own, first = begun()
    for block, its in ((5, page), (0, 5), (7, 8)):
        engine.let(block, its)
    cache.give(request, [5, 0, 3])
    engine.let(3, 4)
    other = cache.admit(blocks=[7])
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[29:32]})
    stories.tell(cache, {other: TOKENS[:8]})
    before = cache.digest([request, other])
    # Row 39, in block 5, lives once a draft is undone.
    if page is not None:
        with pytest.raises(ShapeError, match="that of token 63"):
            stories.tell(cache, {request: TOKENS[32:51]})
        assert cache.digest([request, other]) == before
        engine.let(5, None)
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[32:51]})
    cache.release(other)
    assert cache.digest([request]) == own.digest([first])


def test_attention_over_a_window_that_is_looked_up(rng):
    _, cache, request, own, first = begun()
    queries = rng.standard_normal((1, 4, 4)).astype(np.float32)
    rows = rng.standard_normal((1, 2, 4)).astype(np.float32)
    found = []
    for one, who in ((own, first), (cache, request)):
        with one.step({who: 1}) as step:
            step.layer(1).append_kv(rows, rows)
            found.append(step.layer(1).attend(queries, scale=0.5)[0])
            step.abort()
    assert np.array_equal(found[0], found[1])


def test_a_map_of_single_tokens():
    """Pages of one place, as where an engine gives tokens out one by one: in any order."""
    engine = Engine("numpy", page=1)
    layers = [SPEC.layers[0], SPEC.layers[1]]
    spec = CacheSpec(layers=layers, block_tokens=PAGE)
    said = IndexMap(name="swa", of="token", count=SWA.count, first=1)
    engine.map[:-1] = np.random.default_rng(3).permutation(BLOCKS * PAGE) + 1
    tensors = engine.given[:2]
    descriptor = describe(spec, tensors, {name: LAYOUT[name] for name in ("0.kv", "1.kv")}, maps=[said])
    cache = kvcore.adopt(spec, tensors, layout=descriptor, maps={"swa": engine.map}, max_requests=2)
    own = kvcore.create_cache(spec, backend="reference", max_requests=2, max_tokens=128)
    first, request = own.admit(), cache.admit(blocks=[5, 0, 3])
    for one, who in ((own, first), (cache, request)):
        stories.tell(one, {who: TOKENS[:19]})
        stories.tell(one, {who: TOKENS[19:20]})
    again = kvcore.adopt(spec, tensors, layout=descriptor, maps={"swa": engine.map}, max_requests=2)
    other = again.admit(blocks=[5, 0, 3], length=20)
    assert again.digest([other]) == cache.digest([request]) == own.digest([first])

    def read(layer, part, block, row):
        if layer == 0:
            return engine.tensors[0][block, int(part == "value"), row]
        return engine.tensors[1][engine.map[block * PAGE + row], int(part == "value"), 0]

    again.compare(other, read)
    # The map of somebody who counts from another token shows, though all its places can be.
    right = engine.map.copy()
    engine.map[1:-1] = right[:-2]
    late = kvcore.adopt(spec, tensors, layout=descriptor, maps={"swa": engine.map.copy()}, max_requests=2)
    engine.map[:] = right
    with pytest.raises(ShapeError, match=r"layers\[1\].kv"):
        late.compare(late.admit(blocks=[5, 0, 3], length=20), read)


def shifted(values):
    values[1:-1] = values[:-2].copy()


def later(values):
    values[values >= PAGE] += 1


def next_page(values):
    values[values >= PAGE] += PAGE


def of_another(values):
    values[6 * PAGE : 7 * PAGE] = values[7 * PAGE : 8 * PAGE]


def twice(values):
    values[6 * PAGE : 7 * PAGE] = values[2 * PAGE : 3 * PAGE]


def one_twice(values):
    values[2 * PAGE + 3] = values[6 * PAGE + 3]


def beyond(values):
    values[2 * PAGE] = PAGES * PAGE


def far_beyond(values):
    values[2 * PAGE : 3 * PAGE] = 1 << 62


def gone(values):
    values[2 * PAGE + 1] = 0


def in_the_padding(values):
    values[2 * PAGE : 3 * PAGE] -= 7 * PAGE


def negative(values):
    values[2 * PAGE + 2] = -5


def exchanged(values):
    values[[2 * PAGE, 2 * PAGE + 1]] = values[[2 * PAGE + 1, 2 * PAGE]]


def backwards(values):
    values[2 * PAGE : 3 * PAGE] = values[2 * PAGE : 3 * PAGE][::-1].copy()


WRONG = (
    shifted, later, next_page, of_another, twice, one_twice, beyond, far_beyond, gone, in_the_padding, negative,
    exchanged, backwards,
)  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_map_is_refused_or_shows(change, kind):
    engine, cache, request, _, _ = begun(kind)
    # Another request, which stays: block 7 is its.
    engine.let(7, 8)
    stories.tell(cache, {cache.admit(blocks=[7]): TOKENS[:5]})
    right = engine.map.copy()

    def read(layer, part, block, row):
        place = right[block * PAGE + row]
        tensor, unit, at = (engine.tensors[0], block, row) if layer == 0 else (engine.tensors[1], *divmod(place, PAGE))
        return tensor[unit, int(part == "value"), at]

    cache.compare(request, read, role="kv")
    digest = cache.digest([request])
    cache.release(request)
    before = [tensor.copy() for tensor in engine.tensors]
    change(engine.map)
    assert (engine.map != right).any()
    if change is next_page:
        # All its places can be: whoever holds them against what the engine reads, or against a digest, sees it.
        wrong = cache.admit(blocks=[4, 1, 6, 2], length=29)
        assert cache.digest([wrong]) != digest
        with pytest.raises(ShapeError, match=r"layers\[1\].kv"):
            cache.compare(wrong, read, role="kv")
        cache.release(wrong)
    else:
        with pytest.raises((ShapeError, OutOfBlocks), match="map 'swa'"):
            cache.admit(blocks=[4, 1, 6, 2], length=29)
    for one, old in zip(engine.tensors, before, strict=True):
        assert (one.view(np.uint8) == old.view(np.uint8)).all()
    engine.map[:] = right
    assert cache.digest([cache.admit(blocks=[4, 1, 6, 2], length=29)]) == digest


@pytest.mark.parametrize("change", [twice, one_twice])
def test_a_place_twice_is_refused_of_the_first_request_too(change):
    engine, *_ = begun()
    change(engine.map)
    with pytest.raises(ShapeError, match="of its own, not that of token"):
        engine.adopt().admit(blocks=[4, 1, 6, 2], length=29)


def test_a_step_into_one_page_twice_is_refused():
    engine = Engine("numpy")
    engine.let(5, 3)
    engine.let(7, 3)
    cache = engine.adopt()
    request = cache.admit(blocks=[5, 7])
    with pytest.raises(ShapeError, match="of its own, not that of token"):
        stories.tell(cache, {request: TOKENS[:10]})
    assert request.length == 0
    engine.let(7, 4)
    stories.tell(cache, {request: TOKENS[:10]})


def test_places_are_written_when_the_map_has_them_and_not_before():
    engine, cache, request, own, first = begun(length=31)
    engine.map[5 * PAGE :][:PAGE] = 0
    cache.give(request, [5])
    stories.tell(cache, {request: TOKENS[31:32]})
    with pytest.raises(OutOfBlocks, match=r"no place of token 40 in map 'swa'"):
        stories.tell(cache, {request: TOKENS[32:34]})
    engine.let(5, 7)  # the page of block 2, which has it still
    with pytest.raises(ShapeError, match=r"place 56 of token 40.*token 16"):
        stories.tell(cache, {request: TOKENS[32:34]})
    assert request.length == 32
    engine.let(5, 3)
    engine.let(4, None)
    stories.tell(cache, {request: TOKENS[32:34]})
    stories.tell(own, {first: TOKENS[31:34]})
    assert cache.digest([request]) == own.digest([first])
    # A prefix that two share is one token's place; what either writes lies in blocks of its own.
    other = cache.admit(blocks=[4, 1, 6, 2, 5], length=34)
    assert cache.digest([other]) == cache.digest([request])
    with pytest.raises(RequestError, match="others have too"):
        stories.tell(cache, {other: TOKENS[34:35]})


def test_rings_that_a_slot_is_looked_up_for(rng):
    state = State(heads=2, key_dim=3)
    spec = CacheSpec(layers=[LayerSpec(state=state)])
    states = np.full((9, 1, 2, 3), np.nan, np.float32)
    said = IndexMap(name="states", of="slot", count=4, first=1)
    descriptor = describe(spec, [states], {"state": "rings states NL_X_NB_BS_NH_HS"}, maps=[said])
    array = np.array([0, 5, 8, 0], np.int32)
    cache = kvcore.adopt(spec, [states], layout=descriptor, maps={"states": array}, max_requests=4)
    with pytest.raises(ShapeError, match="slot"):
        cache.admit(length=3)
    with pytest.raises(OutOfBlocks, match="no place of slot 3"):
        cache.admit(slot=3, length=3)
    request = cache.admit(slot=1)
    rows = rng.standard_normal((2, 2, 3)).astype(np.float32)
    with cache.step({request: 2}) as step:
        step.layer(0).append_state(rows)
    assert (states[5, 0] == rows[1]).all()
    assert np.isnan(states[[0, 1, 2, 3, 4, 6, 7, 8]]).all()
    array[2] = 5
    with pytest.raises(ShapeError, match="of its own, not that of slot 1"):
        cache.admit(slot=2, length=2)
    array[1], array[3] = 0, 5
    cache.release(request)
    again = cache.admit(slot=2, length=2)
    with cache.step({again: 0}) as step:
        assert (np.asarray(step.layer(0).read_state())[0] == rows[1]).all()


def changed(descriptor, **changes):
    return msgspec.structs.replace(descriptor, maps=[msgspec.structs.replace(SWA, **changes)])


def line_of(descriptor, **changes):
    lines = [msgspec.structs.replace(one, **changes) if one.map else one for one in descriptor.lines]
    return msgspec.structs.replace(descriptor, lines=lines)


BAD = {
    "no map": (lambda d: msgspec.structs.replace(d, maps=[]), r"layers\[1\].kv key codes: got map 'swa'"),
    "another name": (lambda d: line_of(d, map="other"), "got map 'other'"),
    "a map of slots": (lambda d: changed(d, of="slot", page=1, aligned=False), "a map of tokens"),
    "too few tokens": (lambda d: changed(d, count=BLOCKS * PAGE - 1), "one for each token"),
    "no pages": (lambda d: changed(d, page=0), "pages of 0"),
    "pages that tokens are not aligned in": (lambda d: changed(d, page=5), "aligned pages"),
    "pages of other rows": (lambda d: changed(d, page=4), "a divisor of 4"),
    "a first place before all": (lambda d: changed(d, first=-1), "first place"),
    "two of a name": (lambda d: msgspec.structs.replace(d, maps=[SWA, SWA]), "each once"),
    "history that is looked up": (
        lambda d: msgspec.structs.replace(d, lines=[msgspec.structs.replace(d.lines[0], map="swa"), *d.lines[1:]]),
        "one map, or none, for all",
    ),
    "history that is looked up by tokens": (
        lambda d: msgspec.structs.replace(
            d, lines=[msgspec.structs.replace(one, map="swa") if one.kind == "block" else one for one in d.lines]
        ),
        "a map of blocks, or none",
    ),
    "a map of blocks that no line names": (
        lambda d: msgspec.structs.replace(d, maps=[SWA, IndexMap(name="moved", of="block", count=1)]),
        "one that the lines of history name",
    ),
    "a map of blocks of more tokens than another has": (
        lambda d: msgspec.structs.replace(d, maps=[SWA, IndexMap(name="moved", of="block", count=BLOCKS + 1)]),
        "one for each token",
    ),
    "too few pages": (lambda d: changed(d, of="page", count=BLOCKS - 1), "one for each page"),
    "a map of pages that is not aligned": (lambda d: changed(d, of="page", aligned=False), "an aligned one"),
    "rings of pages whose places do not follow": (lambda d: changed(d, aligned=False), "which is aligned"),
    "rings of pages that are too short": (lambda d: line_of(d, rows=2), "2 pages of|10 pages of 2 rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_descriptors_of_maps_that_cannot_be(name):
    change, match = BAD[name]
    engine = Engine("numpy")
    right = describe(SPEC, engine.given, LAYOUT, maps=[SWA])
    with pytest.raises(SpecError, match=match):
        engine.adopt(change(right))


def test_maps_that_are_not_given_or_are_none():
    engine = Engine("numpy")
    right = describe(SPEC, engine.given, LAYOUT, maps=[SWA])
    adopt = lambda **maps: kvcore.adopt(SPEC, engine.given, layout=right, maps=maps, max_requests=1)  # noqa: E731
    with pytest.raises(SpecError, match="no map 'swa'"):
        adopt()
    with pytest.raises(SpecError, match="got map 'other'"):
        adopt(swa=engine.map, other=engine.map)
    for bad in (engine.map[:-1], engine.map.astype(np.float64), engine.map.reshape(1, -1), [1, 2]):
        with pytest.raises(ShapeError, match="map 'swa'"):
            adopt(swa=bad)
    with pytest.raises(SpecError, match=r"a map of \[\]"):
        describe(SPEC, engine.given, LAYOUT)
    with pytest.raises(SpecError, match="IndexMap"):
        kvcore.adopt(SPEC, engine.given, layout=LAYOUT, maps={"swa": engine.map})
    # Without maps nothing is said of them, as before there were some.
    spec = CacheSpec(layers=[SPEC.layers[0]], block_tokens=PAGE)
    assert '"maps"' not in to_json(describe(spec, [np.zeros((8, 2, PAGE, 2, 4), np.float32)], LAYOUT["0.kv"]))


def field_as_the_page_says(told, tensors, array, line, blocks, position):
    """Bytes of a field of head 0, by nothing but docs/portable_format.md."""
    tokens, rows = told["block_tokens"], line.get("rows", 0)
    block, token = blocks[position // tokens], position % tokens
    if line.get("kind", "block") == "block":
        unit, row = block, token
    else:
        (said,) = (one for one in told["maps"] if one["name"] == line["map"])
        place = int(array[block * tokens + token])
        assert place >= said["first"]
        unit, row = place // said["page"], place % said["page"] % rows
    first = line["offset"] + unit * line["block"] + row * line["token"]
    return tensors[int(line["tensor"])].view(np.uint8).reshape(-1)[first : first + 4]


def test_a_reader_of_the_published_page_finds_the_same_rows():
    engine, cache, request, _, _ = begun()
    blocks = [4, 1, 6, 2]
    # What a descriptor is in JSON does not change within its version.
    golden = Path(__file__).with_name("golden_descriptor.json").read_text()
    assert to_json(cache.descriptor) == golden.strip()
    told = json.loads(golden)
    with cache.step({request: 0}) as step:
        for layer, role, part in ((0, "kv", "key"), (1, "kv", "key"), (1, "kv", "value"), (2, "tail", "")):
            raw = step.layer(layer).gather_rows(role)
            lines = [one for one in told["lines"] if (one["layer"], one["role"], one["part"]) == (layer, role, part)]
            half = raw.rows.shape[2] // 2 if part == "value" else 0
            for at, position in enumerate(raw.positions[0].tolist()):
                if position >= 0:
                    found = field_as_the_page_says(told, engine.tensors, engine.map, lines[0], blocks, position)
                    assert found.tolist() == raw.rows[0, at, half : half + 4].tolist()
