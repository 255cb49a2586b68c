"""Recurrent layers in somebody's memory: states in rings of one row or more, and rings of a convolution's inputs."""

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

import kvcore
from kvcore.adoption import IndexMap, describe, from_json, pages, to_json
from kvcore.errors import OutOfBlocks, OutOfSlots, ShapeError, SpecError
from kvcore.spec import KV, CacheSpec, Conv, LayerSpec, State

SPEC = CacheSpec(
    layers=[
        LayerSpec(state=State(heads=2, key_dim=3, value_dim=4), conv=Conv(dim=5, width=4)),
        LayerSpec(kv=KV(key_heads=1, key_dim=4, key_format="fp32")),
    ],
    block_tokens=4,
)
LAYOUT = {"state": "rings NL_X_NB_BS_NH_HS", "conv": "rings NL_X_NB_BS_HS", "kv": "NL_X_NB_TWO_BS_NH_HS"}
SLOTS, BLOCKS = 6, 8


def memory(kind, drafts):
    """An engine's tensors, of which nobody has written anything: NaN everywhere."""
    states = np.full((SLOTS, 1 + drafts, 2, 12), np.nan, np.float32)
    inputs = np.full((SLOTS, 3 + max(1, drafts), 5), np.nan, ml_dtypes.bfloat16)
    rows = np.full((BLOCKS, 2, 4, 1, 4), np.nan, np.float32)
    if kind == "numpy":
        return [states, inputs, rows]
    return [
        torch.from_numpy(states), torch.from_numpy(inputs.view(np.int16)).view(torch.bfloat16), torch.from_numpy(rows)
    ]  # fmt: skip


def adopted(tensors, drafts=0):
    return kvcore.adopt(SPEC, tensors, layout=LAYOUT, max_requests=SLOTS, max_draft_tokens=drafts)


def tell(world, rng, count, *, abort=False):
    """The same tokens to every request: what was read before they came."""
    given = [rng.standard_normal(shape, np.float32) for shape in ((count, 2, 3, 4), (count, 5), (count, 1, 4))]
    read = []
    for cache, request in world:
        with cache.step({request: count}) as step:
            layer = step.layer(0)
            read.append([kvcore.to_numpy(one).astype(np.float32) for one in (layer.read_state(), layer.gather_conv())])
            layer.append_state(given[0])
            layer.append_conv(given[1])
            step.layer(1).append_kv(given[2], given[2])
            if abort:
                step.abort()
    for one in read[1:]:
        assert all((a == b).all() for a, b in zip(one, read[0], strict=True))
    return given


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_states_are_read_and_written_where_they_lie(kind, drafts, rng):
    tensors = memory(kind, drafts)
    cache = adopted(tensors, drafts)
    own = kvcore.create_cache(SPEC, backend="reference", max_requests=4, max_tokens=64, max_draft_tokens=drafts)
    world = [(own, own.admit()), (cache, cache.admit(blocks=[3, 1, 2], slot=4))]
    length = 0
    for count in (3, 1, 2, 1):
        tell(world, rng, count, abort=True)
        given = tell(world, rng, count)
        length += count
        state = kvcore.to_numpy(tensors[0])[4, (length - 1) % (1 + drafts)]
        assert (state.reshape(2, 3, 4) == given[0][-1]).all()
        row = kvcore.to_numpy(tensors[1])[4, (length - 1) % len(tensors[1][4])]
        assert (row == given[1][-1].astype(ml_dtypes.bfloat16)).all()
    (_, first), (_, request) = world
    assert cache.digest([request]) == own.digest([first])
    if drafts:
        for one, mine in world:
            one.truncate(mine, length - 1)
        tell(world, rng, 1)
        assert cache.digest([request]) == own.digest([first])
    # Nothing but that slot and those blocks was written to.
    assert np.isnan(kvcore.to_numpy(tensors[0])[[0, 1, 2, 3, 5]]).all()
    assert np.isnan(kvcore.to_numpy(tensors[2])[[0, 4, 5, 6, 7]]).all()
    # Into another slot and other blocks, and on from there.
    moved = cache.import_request(own.export_request(first), into=cache.admit(blocks=[5, 6, 7], slot=1))
    tell([*world, (cache, moved)], rng, 2)
    assert cache.digest([moved]) == cache.digest([request]) == own.digest([first])


def test_what_an_engine_has_written_is_the_requests(rng):
    """States that were there before: the owner says how many tokens they are of."""
    tensors = memory("numpy", 0)
    own = kvcore.create_cache(SPEC, backend="reference", max_requests=1, max_tokens=64)
    first = own.admit()
    states, inputs, rows = tell([(own, first)], rng, 7)
    tensors[0][2, 0] = states[6].reshape(2, 12)
    for position in range(7):
        tensors[1][2, position % 4] = inputs[position]
        tensors[2][[6, 0][position // 4], :, position % 4] = rows[position]
    cache = adopted(tensors)
    request = cache.admit(blocks=[6, 0, 1], slot=2, length=7)
    assert cache.digest([request]) == own.digest([first])
    tell([(own, first), (cache, request)], rng, 3)
    assert cache.digest([request]) == own.digest([first])


def test_other_shapes_and_layouts_are_refused():
    states, inputs, rows = memory("numpy", 0)
    for bad in (states[:, :, :1], states[..., :11], states.reshape(SLOTS, 1, 24)):
        with pytest.raises(ShapeError):
            adopted([bad, inputs, rows])
    with pytest.raises(SpecError, match="rings NAME"):
        kvcore.adopt(SPEC, [states, inputs, rows], layout={**LAYOUT, "state": "NL_X_NB_BS_NH_HS"})
    with pytest.raises(ShapeError, match="heads"):
        kvcore.adopt(
            SPEC, [states.reshape(SLOTS, 1, 24), inputs, rows], layout={**LAYOUT, "state": "rings NL_X_NB_BS_HS"}
        )
    # One row more than drafts ask for is the owner's to have; one fewer is not enough.
    with pytest.raises(SpecError, match="drafts"):
        adopted([states, inputs, rows], drafts=1)


SLOT = IndexMap(name="slot", of="slot", count=SLOTS, first=1)
SHIFTED = {**LAYOUT, "state": "rings slot NL_X_NB_BS_NH_HS", "conv": "rings slot NL_X_NB_HS_BS"}


def shifting(kind, drafts=0):
    """(tensors, map, descriptor) of an engine whose convolutions shift their inputs along, channel by channel."""
    states, _, rows = memory(kind, drafts)
    inputs = np.full((SLOTS + 1, 5, 3), np.nan, ml_dtypes.bfloat16)
    table = np.zeros(SLOTS, np.int64)
    if kind == "torch":
        inputs = torch.from_numpy(inputs.view(np.int16)).view(torch.bfloat16)
        table = torch.from_numpy(table)
    tensors = [states, inputs, rows]
    return tensors, table, describe(SPEC, tensors, SHIFTED, maps=[SLOT])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_inputs_that_an_engine_shifts_along(kind, rng):
    tensors, table, descriptor = shifting(kind)
    cache = kvcore.adopt(SPEC, tensors, layout=from_json(to_json(descriptor)), maps={"slot": table}, max_requests=SLOTS)
    own = kvcore.create_cache(SPEC, backend="reference", max_requests=4, max_tokens=64)
    table[4], table[1] = 3, 5
    world = [(own, own.admit()), (cache, cache.admit(blocks=[3, 1, 2], slot=4))]
    told = []
    for count in (1, 1, 4, 1, 2):
        tell(world, rng, count, abort=True)
        told += list(tell(world, rng, count)[1])
        last = np.zeros((3, 5), np.float32)
        last[3 - len(told[-3:]) :] = told[-3:]
        found = kvcore.to_numpy(tensors[1])[3].T.astype(np.float32)
        assert (found == last.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    (_, first), (_, request) = world
    assert cache.digest([request]) == own.digest([first])
    # It is there for whoever knows the length; and comes into another's place.
    again = kvcore.adopt(SPEC, tensors, layout=descriptor, maps={"slot": table}, max_requests=SLOTS)
    assert again.digest([again.admit(blocks=[3, 1, 2], slot=4, length=9)]) == own.digest([first])
    moved = cache.import_request(own.export_request(first), into=cache.admit(blocks=[5, 6, 7], slot=1))
    tell([*world, (cache, moved)], rng, 2)
    assert cache.digest([moved]) == cache.digest([request]) == own.digest([first])
    both = kvcore.to_numpy(tensors[1])[[3, 5]]
    assert both[0].tobytes() == both[1].tobytes()
    # Nothing but those two was written to.
    assert np.isnan(kvcore.to_numpy(tensors[1])[[0, 1, 2, 4, 6]].astype(np.float32)).all()


def two_shifted(kind, drafts=2):
    """(tensors, map, own cache and requests, adopted cache and requests), of which the second has more tokens."""
    tensors, table, descriptor = shifting(kind, drafts)
    table[4], table[1] = 3, 5
    cache = kvcore.adopt(
        SPEC, tensors, layout=descriptor, maps={"slot": table}, max_requests=SLOTS, max_draft_tokens=drafts
    )
    own = kvcore.create_cache(SPEC, backend="reference", max_requests=4, max_tokens=64, max_draft_tokens=drafts)
    mine = [cache.admit(blocks=[3, 1, 2], slot=4), cache.admit(blocks=[5, 6, 7], slot=1)]
    return tensors, table, (own, [own.admit(), own.admit()]), (cache, mine)


def tell_both(world, rng, counts):
    """Tokens to both requests of every cache in one step. Returns each request's states and inputs."""
    total = sum(counts)
    given = [rng.standard_normal(shape, np.float32) for shape in ((total, 2, 3, 4), (total, 5), (total, 1, 4))]
    for cache, requests in world:
        with cache.step(dict(zip(requests, counts, strict=True))) as step:
            step.layer(0).append_state(given[0])
            step.layer(0).append_conv(given[1])
            step.layer(1).append_kv(given[2], given[2])
    first = counts[0]
    return [[list(rows[:first]) for rows in given[:2]], [list(rows[first:]) for rows in given[:2]]]


def check_owner(tensors, unit, states, inputs):
    """What an engine of a request of these tokens looks for: the last state, and the newest input last."""
    last = np.zeros((3, 5), np.float32)
    if inputs:
        last[3 - len(inputs[-3:]) :] = inputs[-3:]
        state = kvcore.to_numpy(tensors[0])[unit, (len(states) - 1) % len(tensors[0][unit])]
        assert (state == states[-1].reshape(2, 12)).all()
    found = kvcore.to_numpy(tensors[1])[unit].T.astype(np.float32)
    assert (found == last.astype(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_an_engine_shifts_along_goes_back(kind, back, rng):
    tensors, _, *world = two_shifted(kind)
    told = [[[], []], [[], []]]
    units = 3, 5
    # From nothing, from fewer tokens than a ring has, and from many.
    for counts in ((2, 3), (1, 2), (5, 2), (2, 4)):
        for held, more in zip(told, tell_both(world, rng, counts), strict=True):
            held[0] += more[0]
            held[1] += more[1]
        for cache, requests in world:
            cache.truncate(requests[1], requests[1].length - back)
        for rows in told[1]:
            del rows[len(rows) - back :]
        for unit, held in zip(units, told, strict=True):
            check_owner(tensors, unit, *held)
    (own, others), (cache, mine) = world
    assert cache.digest(mine) == own.digest(others)
    assert np.isnan(kvcore.to_numpy(tensors[1])[[0, 1, 2, 4, 6]].astype(np.float32)).all()
    assert np.isnan(kvcore.to_numpy(tensors[0])[[0, 1, 2, 4]]).all()


def test_a_request_of_no_tokens_has_zeros_before_it(rng):
    tensors, _, *world = two_shifted("numpy")
    tell_both(world, rng, (2, 1))
    for cache, requests in world:
        cache.truncate(requests[0], 0)
    check_owner(tensors, 3, [], [])
    (own, others), (cache, mine) = world
    assert cache.digest(mine) == own.digest(others)


def unchanged(tensors, cache, requests, act, error, match):
    before = [kvcore.to_numpy(tensor).tobytes() for tensor in tensors[:2]]
    lengths, digest = [request.length for request in requests], cache.digest(requests)
    with pytest.raises(error, match=match):
        act()
    assert [kvcore.to_numpy(tensor).tobytes() for tensor in tensors[:2]] == before
    assert [request.length for request in requests] == lengths
    assert cache.digest(requests) == digest


def test_a_ring_without_a_place_does_not_go_back(rng):
    tensors, table, *world = two_shifted("numpy")
    tell_both(world, rng, (5, 6))
    cache, mine = world[1]
    for place, error, match in (
        (0, OutOfBlocks, "got no place of slot 1"),
        (3, ShapeError, "that of slot 4"),
    ):
        table[1] = place
        unchanged(tensors, cache, mine, lambda: cache.truncate(mine[1], 5), error, match)
    # Its owner has moved it.
    for tensor in tensors[:2]:
        tensor[2] = tensor[5]
    table[1], inputs = 2, tensors[1][5].copy()
    for one, requests in world:
        one.truncate(requests[1], 5)
    assert (tensors[1][5] == inputs).all()
    assert (tensors[1][2][:, 1:] == inputs[:, :2]).all()
    assert cache.digest(mine) == world[0][0].digest(world[0][1])


@pytest.mark.parametrize(("where", "call"), [("read_rows", 2), ("write", 2), ("write", 3)])
def test_a_step_whose_rows_do_not_all_arrive_leaves_the_engines(monkeypatch, rng, where, call):
    """Of two requests the first one's rows are as they were, too, whatever fails for the second."""
    tensors, _, *world = two_shifted("numpy")
    tell_both(world, rng, (4, 7))
    cache, mine = world[1]
    holder = pages if where == "read_rows" else pages.Paged
    real, calls = getattr(holder, where), []

    def failing(*args, **options):
        calls.append(where)
        if len(calls) == call:
            raise MemoryError("no room")
        return real(*args, **options)

    def act():
        tell_both([world[1]], np.random.default_rng(1), (2, 1))

    with monkeypatch.context() as patch:
        patch.setattr(holder, where, failing)
        unchanged(tensors, cache, mine, act, MemoryError, "no room")
    tell_both(world, rng, (1, 2))
    assert cache.digest(mine) == world[0][0].digest(world[0][1])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_fork_has_rings_of_its_own_where_the_owner_looks(kind, rng):
    tensors, table, *world = two_shifted(kind)
    tell_both(world, rng, (6, 3))
    for cache, requests in world:
        cache.truncate(requests[0], 5)
    (own, others), (cache, mine) = world
    table[2] = 1
    fork, branch = cache.fork(mine[0], slot=2), own.fork(others[0])
    for tensor in tensors[:2]:
        held = kvcore.to_numpy(tensor)
        assert held[1].tobytes() == held[3].tobytes()
        assert np.isnan(held[[0, 2, 4]].astype(np.float32)).all()
    # Whoever is told the places alone finds it there before it has taken a step.
    again = kvcore.adopt(SPEC, tensors, layout=cache.descriptor, maps={"slot": table}, max_requests=SLOTS)
    assert again.digest([again.admit(blocks=[3, 1], slot=2, length=5)]) == own.digest([branch])
    # It goes back as far as its source does, and on.
    for where, one, source in ((own, branch, others[0]), (cache, fork, mine[0])):
        where.truncate(one, 4)
        where.release(source)
    cache.give(fork, [0])
    tell([(own, branch), (cache, fork)], rng, 6)
    assert cache.digest([fork, mine[1]]) == own.digest([branch, others[1]])


def test_a_slot_by_which_rings_are_looked_up_is_the_owner_s_to_choose(rng):
    tensors, table, *world = two_shifted("numpy")
    tell_both(world, rng, (5, 6))
    cache, mine = world[1]
    blob = cache.export_request(mine[0])
    # Where others, who were never admitted here, have theirs.
    table[0], table[2], table[3] = 2, 5, 0
    for act, error, match in (
        (lambda: cache.fork(mine[0]), ShapeError, "no slot"),
        (lambda: cache.admit(blocks=[0]), ShapeError, "no slot"),
        (lambda: cache.import_request(blob), ShapeError, "no slot"),
        (lambda: cache.fork(mine[0], slot=1), OutOfSlots, "slot 1"),
        (lambda: cache.fork(mine[0], slot=SLOTS), OutOfSlots, f"slot {SLOTS}"),
        (lambda: cache.admit(blocks=[0], slot=1 << 40, length=1), OutOfSlots, f"slot {1 << 40}"),
        (lambda: cache.fork(mine[0], slot=-1), ShapeError, "fork: slot"),
        (lambda: cache.fork(mine[0], slot=3), OutOfBlocks, "no place of slot 3"),
        (lambda: cache.fork(mine[0], slot=2), ShapeError, "that of slot 1"),
    ):
        unchanged(tensors, cache, mine, act, error, match)
        assert (cache.free_slots, len(cache.requests)) == (SLOTS - 2, 2)


WRONG = {
    "no map": (0, {"shifted": True, "map": ""}, "a map of slots"),
    "rows of a ring that goes round": (1, {"shifted": False}, "3 rows"),
    "pieces that are no parts": (1, {"piece_bytes": 3}, "pieces of 3 bytes"),
    "pieces in one another": (1, {"piece": 4}, "4 bytes from a piece"),
    "rows in one another": (1, {"token": 1}, "1 bytes from a token"),
    "rings of other rows": (1, {"rows": 2}, "shifted rings of 2 rows"),
    "rings behind the tensor": (1, {"units": 9}, "bytes 0 to"),
    "shifted states in blocks": (2, {"shifted": True}, "shifted rows in blocks"),
    "chunks of a ring": (1, {"chunk_rows": 3}, "chunks in rings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shifted_rings_are_refused(name):
    which, changes, match = WRONG[name]
    tensors, table, right = shifting("numpy")
    lines = list(right.lines)
    lines[which] = msgspec.structs.replace(lines[which], **changes)
    wrong = msgspec.structs.replace(right, lines=lines)
    with pytest.raises(SpecError, match=match):
        kvcore.adopt(SPEC, tensors, layout=wrong, maps={"slot": table}, max_requests=SLOTS)
