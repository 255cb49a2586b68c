"""Recurrent layers in somebody's memory: states in rings of one row or more, and rings of a convolution's inputs."""

import ml_dtypes
import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import ShapeError, SpecError
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
