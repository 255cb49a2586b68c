"""Windows and tails of an engine: a ring for each request, or pages that a table lists, beside entries in blocks."""

import numpy as np
import pytest

import kvcore
from kvcore.adoption import from_json, to_json
from kvcore.errors import OutOfBlocks, RequestError, RollbackError, ShapeError, SpecError
from kvcore.spec import KV, CacheSpec, LayerSpec, presets
from tests.support import stories

SPEC = presets.deepseek_v4_flash_tiny(draft=False)
KINDS = {"numpy": "reference", "torch": "torch_triton"}
UNITS, PAGES, BLOCKS, PAGE = 9, 20, 6, 4
DRAFTS = 3
BLOCKED = {"entries": "NL_X_NB_BSV_BSS", "index_keys": "NL_X_NB_BSV_BSS"}
LAYOUTS = {
    "rings": {"window": "rings NL_X_NB_BSV_BSS", **dict.fromkeys(("tail", "index_tail"), "rings NL_X_NB_BS_HS")},
    "pages": {"window": "pages NL_X_NB_BSV_BSS", **dict.fromkeys(("tail", "index_tail"), "pages NL_X_NB_BS_HS")},
}
TOKENS = [token % 251 for token in range(61)]


def tensors(kind, where):
    """As an engine allots them: pages padded to 576 bytes, rings of more rows than are needed, states in fp32."""
    found = []
    for _, role, component in SPEC.components():
        row = sum(part.heads * part.format.row for part in component.parts)
        if component.growth == "block":
            shape = BLOCKS, SPEC.block_tokens // component.tokens_per_row, row
        elif where == "rings":
            shape = UNITS, component.ring_rows(DRAFTS) + 2, row
        else:
            shape = PAGES, PAGE, row
        nbytes = shape[1] * row
        padded = -(-nbytes // 576) * 576
        memory = np.full((shape[0], padded), 0x55, np.uint8)[:, :nbytes].reshape(-1, nbytes)
        tensor = np.lib.stride_tricks.as_strided(memory, shape, (padded, row, 1))
        if "tail" in role:
            tensor = tensor.view(np.float32)
        if kind == "torch":
            import torch

            tensor = torch.from_numpy(tensor)
        found.append(tensor)
    return found


def adopted(kind, where, **options):
    held = tensors(kind, where)
    cache = kvcore.adopt(SPEC, held, layout={**BLOCKED, **LAYOUTS[where]}, max_draft_tokens=DRAFTS, **options)
    return held, cache


def pages_of(where, length, least=0):
    """Tables up to a length, without the pages that no window of ``least`` tokens reaches."""
    if where == "rings":
        return {}
    count, gone = -(-length // PAGE), max(0, least - 16) // PAGE
    table = [*[-1] * gone, *((7 * column + 3) % PAGES for column in range(gone, count))]
    return dict.fromkeys(("window", "tail", "index_tail"), table)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", LAYOUTS)
def test_a_request_of_an_engine_goes_on(kind, where):
    held, cache = adopted(kind, where, max_requests=3)
    own = kvcore.create_cache(SPEC, backend=KINDS[kind], max_requests=2, max_tokens=192, max_draft_tokens=DRAFTS)
    first = own.admit()
    stories.tell(own, {first: TOKENS[:41]})
    # What an engine writes, here by an import into its blocks, pages and slot.
    place = {"blocks": [4, 1, 3], "slot": 2, "pages": pages_of(where, 60, 41)}
    request = cache.import_request(own.export_request(first), into=cache.admit(**place))
    assert cache.digest([request]) == own.digest([first])
    cache.release(request)
    # It is all there for whoever knows the places alone.
    told = from_json(to_json(cache.descriptor))
    again = kvcore.adopt(SPEC, held, layout=told, max_requests=3, max_draft_tokens=DRAFTS)
    request = again.admit(length=41, **place)
    assert again.digest([request]) == own.digest([first])
    # Steps, drafts and a failed step; the other requests' storage says nothing.
    for cache_, one in ((again, request), (own, first)):
        stories.tell(cache_, {one: TOKENS[41:45]})
        stories.fail(cache_, {one: TOKENS[45:50]})
        cache_.truncate(one, 43)
        stories.tell(cache_, {one: TOKENS[43:52]})
        stories.tell(cache_, {one: TOKENS[52:53]})
    assert again.digest([request]) == own.digest([first])
    # And the memory has all of it again.
    third = kvcore.adopt(SPEC, held, layout=again.descriptor, max_requests=3, max_draft_tokens=DRAFTS)
    other = third.admit(length=53, **place)
    assert third.digest([other]) == own.digest([first])
    moved = own.import_request(third.export_request(other))
    assert own.digest([moved]) == own.digest([first])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_in_rings_has_the_rows_and_no_more(kind):
    held, cache = adopted(kind, "rings", max_requests=3)
    request = cache.admit(blocks=[0, 1])
    stories.tell(cache, {request: TOKENS[:30]})
    before = [np.asarray(tensor).copy() for tensor in held]
    fork = cache.fork(request)
    assert cache.digest([fork]) == cache.digest([request])
    # What lies between pages, and other requests' rings, are as they were.
    for tensor, old, (_, _, component) in zip(held, before, SPEC.components(), strict=True):
        if component.growth == "slot":
            rest = [unit for unit in range(UNITS) if unit != fork.slot]
            assert (np.asarray(tensor)[rest].view(np.uint8) == old[rest].view(np.uint8)).all()


def test_pages_that_are_missing_or_another_s():
    _, cache = adopted("numpy", "pages", max_requests=3)
    with pytest.raises(OutOfBlocks, match=r"no page 4 of layers\[0\].window"):
        cache.admit(blocks=[0], length=17, pages={role: [0, 1, 2, 3] for role in ("window", "tail", "index_tail")})
    with pytest.raises(OutOfBlocks, match=r"no page 3 of layers\[0\].window"):
        cache.admit(blocks=[0], length=14, pages={role: [0, 1, 2, -1] for role in ("window", "tail", "index_tail")})
    request = cache.admit(blocks=[0, 1], pages=pages_of("pages", 12))
    stories.tell(cache, {request: TOKENS[:10]})
    with pytest.raises(OutOfBlocks, match=r"cache.give"):
        stories.tell(cache, {request: TOKENS[10:14]})
    assert request.length == 10
    cache.give(request, pages={role: [11] for role in ("window", "tail", "index_tail")})
    stories.tell(cache, {request: TOKENS[10:14]})
    other = cache.admit(blocks=[2], length=11, pages=pages_of("pages", 12))
    with pytest.raises(OutOfBlocks):
        stories.tell(cache, {other: TOKENS[:2]})
    with pytest.raises(RequestError, match="which others have too"):
        stories.tell(cache, {other: TOKENS[:1]})
    cache.release(request)
    stories.tell(cache, {other: TOKENS[:1]})
    fork = cache.fork(other)
    with pytest.raises(OutOfBlocks):
        stories.tell(cache, {fork: TOKENS[:1]})
    with pytest.raises(OutOfBlocks, match="import_request"):
        cache.import_request(cache.export_request(other), into=cache.admit(blocks=[3]))


def test_a_page_that_only_a_rollback_needs_is_not_written_if_it_is_another_s():
    held, cache = adopted("numpy", "pages", max_requests=2)
    own = kvcore.create_cache(SPEC, backend="reference", max_requests=2, max_tokens=192, max_draft_tokens=DRAFTS)
    request, first = cache.admit(blocks=[0, 1, 2], pages=pages_of("pages", 44)), own.admit()
    shared = pages_of("pages", 36)["window"][8]
    other = cache.admit(blocks=[3], pages={key: [shared] for key in ("window", "tail", "index_tail")}, length=4)
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[:20]})
    before = [np.asarray(tensor).tobytes() for tensor in held]
    # Its windows begin in its page 9, and in page 8 once three drafts are undone.
    with pytest.raises(RequestError, match=f"page {shared} of .*window, which others have too"):
        stories.tell(cache, {request: TOKENS[20:44]})
    assert [np.asarray(tensor).tobytes() for tensor in held] == before
    cache.release(other)
    for one, who in ((cache, request), (own, first)):
        stories.tell(one, {who: TOKENS[20:44]})
        one.truncate(who, 41)
    again = kvcore.adopt(SPEC, held, layout=cache.descriptor, max_draft_tokens=DRAFTS)
    place = {"blocks": [0, 1, 2], "pages": pages_of("pages", 44)}
    assert again.digest([again.admit(length=41, **place)]) == own.digest([first])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["rings", "pages"])
def test_windows_of_heads(kind, where, rng):
    """Keys and values of a sliding window, heads before rows, in rings or in pages."""
    layer = LayerSpec(kv=KV(key_heads=3, key_dim=4, key_format="fp32", window=6, storage="ring"))
    spec = CacheSpec(layers=[layer, layer], block_tokens=4)
    held = [np.zeros((8, 2, 3, 8, 4), np.float32) for _ in range(2)]
    given = held
    if kind == "torch":
        import torch

        given = [torch.from_numpy(tensor) for tensor in held]
    cache = kvcore.adopt(spec, given, layout={"kv": f"{where} NL_X_NB_TWO_NH_BS_HS"}, max_requests=2)
    request = cache.admit(slot=1, pages={"kv": [6, 2, 4]} if where == "pages" else None)
    keys, values = rng.standard_normal((2, 19, 3, 4)).astype(np.float32)
    for start, end in ((0, 9), (9, 10), (10, 19)):
        with cache.step({request: end - start}) as step:
            for number in range(2):
                step.layer(number).append_kv(keys[start:end] + number, values[start:end] + number)
    for position in range(13, 19):
        unit = 1 if where == "rings" else [6, 2, 4][position // 8]
        for number in range(2):
            found = held[number][unit, :, :, position % 8]
            assert (found == np.stack([keys[position], values[position]]) + number).all()
    again = kvcore.adopt(spec, given, layout=cache.descriptor, max_requests=2)
    place = {"slot": 1, "pages": {"kv": [-1, 2, 4]} if where == "pages" else None}
    assert again.digest([again.admit(length=19, **place)]) == cache.digest([request])


def test_a_rollback_goes_no_further_than_is_known_to_be_there():
    _, cache = adopted("numpy", "pages", max_requests=3)
    request = cache.admit(blocks=[0, 1], length=40, pages=pages_of("pages", 44))
    with pytest.raises(RollbackError):
        cache.truncate(request, 39)


WRONG = (
    {"kv": [1]},
    {"window": [20]},
    {"window": [-2]},
    {"window": [1, 1]},
    {"window": [1.5]},
    {"window": [-1.5]},
    {"window": ["-1"]},
    {"window": [None]},
)


@pytest.mark.parametrize("pages", WRONG)
def test_tables_that_cannot_be(pages):
    _, cache = adopted("numpy", "pages", max_requests=3)
    with pytest.raises(ShapeError, match="pages"):
        cache.admit(pages=pages)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": "NL_X_NB_BSV_BSS"}, "'rings NAME' or 'pages NAME'"),
        ({"entries": "rings NL_X_NB_BSV_BSS"}, "history lies in blocks"),
        ({"window": "rings NL_X_NB_TWO"}, "one of NL_X_TWO"),
    ],
)
def test_layouts_that_cannot_be(change, match):
    with pytest.raises(SpecError, match=match):
        kvcore.adopt(SPEC, tensors("numpy", "rings"), layout={**BLOCKED, **LAYOUTS["rings"], **change})


def test_rings_that_are_too_few_or_too_short():
    held = tensors("numpy", "rings")
    with pytest.raises(SpecError, match="10 or more"):
        kvcore.adopt(SPEC, held, layout={**BLOCKED, **LAYOUTS["rings"]}, max_requests=10)
    with pytest.raises(SpecError, match="max_draft_tokens"):
        kvcore.adopt(SPEC, held, layout={**BLOCKED, **LAYOUTS["rings"]}, max_requests=2, max_draft_tokens=6)
