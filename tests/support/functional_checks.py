"""The checks of functional verbs at the door, for any backend."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.errors import KvcoreError, ShapeError, SpecError, StepError
from kvcore.spec import FORMATS, CacheSpec, LayerSpec, State
from tests.support import functional_cases as cases


def refusal(kind: type[KvcoreError], call: Any, what: str) -> KvcoreError:
    """The error of a kind that a call ends in."""
    try:
        call()
    except kind as error:
        return error
    pytest.fail(f"{what} was taken")


SIZES = ((0, 0), (0, 3), (2, 0), (4, 2))
"""Heads and k: nothing of one, of the other, of both."""


def both(backend: str):
    """Open steps of equal caches on the reference and on the backend."""
    reference, cache = cases.create("reference"), cases.create(backend)
    for (name, step), (_, other) in zip(cases.steps(reference), cases.steps(cache), strict=True):
        yield name, reference, step, cache, other


def zero_sizes(backend: str, sizes: tuple[tuple[int, int], ...] = SIZES, only: str = "") -> None:
    """Zero tokens, requests, heads, k: an answer of the reference's shape from every verb."""
    for name, reference, step, cache, other in both(backend):
        tokens = step.index.positions.shape[0]
        for heads, k in sizes if only in name else ():
            wanted = cases.calls(reference.ops, tokens, heads, k)
            for verb, call in cases.calls(cache.ops, tokens, heads, k).items():
                where = f"{verb}, {name}, {heads} heads, k = {k}"
                want = cases.answer(wanted[verb](reference.ops.allocate(), step.index))
                cases.same(cases.answer(call(cache.ops.allocate(), other.index)), want, where)
    ops = cases.create(backend).ops
    for verb in ("copy_slots", "copy_blocks", "poison"):
        getattr(ops, verb)(ops.allocate(), [], [])
    ops.reset_slots(ops.allocate(), [])
    assert kvcore.to_numpy(ops.encode("int8_row", np.zeros((0, 16), np.float32))).shape == (0, 20)
    assert kvcore.to_numpy(ops.decode("int8_row", np.zeros((0, 20), np.uint8), 16)).shape == (0, 16)


def kinds_of_floats(backend: str) -> None:
    """The backend's arrays, NumPy's, and NumPy's that are views give one answer."""
    cache = cases.create(backend)
    kinds = {"numpy": np.asarray, "a view": lambda array: np.repeat(array, 2, axis=0)[::2], "own": cache.asarray}
    for name, step in cases.steps(cache):
        tokens = step.index.positions.shape[0]
        answers = {
            kind: {
                verb: cases.answer(call(cache.ops.allocate(), step.index))
                for verb, call in cases.calls(cache.ops, tokens, put=put).items()
            }
            for kind, put in kinds.items()
        }
        for kind in ("numpy", "a view"):
            for verb, want in answers["own"].items():
                cases.same(answers[kind][verb], want, f"{verb} of {kind}, {name}")
                assert not isinstance(want, dict) or answers[kind][verb] == want, (verb, kind)


DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4")


def kinds_of_integers(backend: str) -> None:
    """Lists, tuples, arrays of every integer dtype, the backend's own; numbers of NumPy and of the backend."""
    cache = cases.create(backend)
    kinds: dict[str, Any] = {"list": list, "tuple": lambda values: tuple(map(_tuples, values))}
    kinds |= {dtype: (lambda values, dtype=dtype: np.array(values, dtype)) for dtype in DTYPES}
    kinds["list of numpy"] = lambda values: [_each(value, np.int64) for value in values]
    kinds["own"] = lambda values: cache.asarray(np.array(values, np.int32))
    kinds["own int64"] = lambda values: cache.asarray(np.array(values, np.int64))
    kinds["own int16"] = lambda values: cache.asarray(np.array(values, np.int16))
    kinds["list of own"] = lambda values: [
        _each(value, lambda v: cache.asarray(np.array(v, np.int32))) for value in values
    ]
    ones: list[Any] = [int, np.int64, np.uint8, np.array, lambda value: cache.asarray(np.array(value, np.int32))]
    with cache.step({cache.admit(): 2}) as step:
        index, pools = step.index, cache.ops.allocate
        wanted = {verb: cases.answer(call(_marked(cache), index)) for verb, call in
                  cases.integers(cache.ops, 2, list, int).items()}  # fmt: skip
        for number, (kind, make) in enumerate(kinds.items()):
            found = cases.integers(cache.ops, 2, make, ones[number % len(ones)])
            for verb, call in found.items():
                got = cases.answer(call(_marked(cache), index))
                cases.same(got, wanted[verb], f"{verb} of {kind}")
                assert not isinstance(got, dict) or got == wanted[verb], f"{verb} of {kind}"
        assert wanted["copy_slots"] != cases.answer(pools())
        step.abort()


def _marked(cache: kvcore.Cache) -> Any:
    """Pools whose units are told apart, so that a copy of a wrong one is seen."""
    fresh = cache.ops.allocate()

    def marked(pool: Any) -> Any:
        host = kvcore.to_numpy(pool)
        host.view(np.uint8).reshape(len(host), -1)[:] = np.arange(len(host), dtype=np.uint8)[:, None] + 1
        return cache.asarray(host)

    return type(fresh)({name: marked(pool) for name, pool in fresh.items()})


def _each(value: Any, make: Any) -> Any:
    return [make(one) for one in value] if isinstance(value, list) else make(value)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def no_integers(backend: str) -> None:
    """Booleans, floats, text and nothing are no integers, in lists, in arrays and alone."""
    cache = cases.create(backend)
    bad = {
        "booleans": (lambda values: np.array(values) > 0, True),
        "a list of booleans": (lambda values: [_each(value, bool) for value in values], np.True_),
        "floats": (lambda values: np.array(values, np.float32), 1.0),
        "a list of floats": (lambda values: [_each(value, float) for value in values], np.float32(1)),
        "text": (lambda values: [_each(value, str) for value in values], "1"),
        "own booleans": (lambda values: cache.asarray(np.array(values) > 0), cache.asarray(np.array(True))),
        "objects": (lambda values: np.array(values, object), b"1"),
        "negative": (lambda values: [_each(value, float) for value in values], -1),
    }
    with cache.step({cache.admit(): 2}) as step:
        for kind, (make, one) in bad.items():
            for verb, call in cases.integers(cache.ops, 2, make, lambda _, one=one: one).items():
                refusal(KvcoreError, lambda call=call: call(cache.ops.allocate(), step.index), f"{kind} by {verb}")
        step.abort()


def units_out_of_range(backend: str) -> None:
    """Slots and blocks that are not there, -1 among them where it means nothing; nothing is written."""
    cache = cases.create(backend)
    ops, pools = cache.ops, cache.ops.allocate()
    before = cases.answer(pools)
    for verb, arguments in {
        "copy_slots": ([[2, 0], [0, 1]], [[0, 1], [0, 2]], [[-1, 0], [0, 1]], [[0], [0, 1]]),
        "copy_blocks": ([[4], [0]], [[0], [4]], [[0], [-1]], [[0, 1], [2]]),
        "reset_slots": ([[2]], [[-2]], [[[0]]]),
        "poison": ([[2], []], [[], [4]], [[-1], []]),
    }.items():
        for given in arguments:
            for put in (list, lambda values: cache.asarray(np.array(values, np.int32))):
                with pytest.raises(ShapeError) as refused:
                    getattr(ops, verb)(pools, *map(put, given))
                assert refused.value.where.startswith(f"{verb}: ")
    assert cases.answer(pools) == before


def taken_out_of_range(backend: str) -> None:
    """Fewer than no token, or more than a request has new: refused, also by a call like one that passed."""
    spec = CacheSpec(layers=[LayerSpec(state=State(heads=1, key_dim=2))])
    cache = kvcore.create_cache(spec, backend=backend, max_requests=2, max_tokens=32, max_draft_tokens=3)
    ops, requests = cache.ops, [cache.admit(), cache.admit()]
    with cache.step(dict(zip(requests, (3, 1), strict=True))) as step:
        states = cache.asarray(np.ones((4, 1, 2), np.float32))
        for put in (list, lambda values: cache.asarray(np.array(values, np.int32))):
            pools = ops.select_state(ops.allocate(), 0, step.index, states, put([1, 0]))
            before = cases.answer(pools)
            for taken, wrong in (([-1, 0], -1), ([4, 0], 4), ([3, 2], 2)):
                with pytest.raises(ShapeError) as refused:
                    ops.select_state(pools, 0, step.index, states, put(taken))
                assert (str(refused.value.got), refused.value.where) == (str(wrong), "select_state: taken")
            assert cases.answer(pools) == before
        step.layer(0).append_state(states)


def index_of_another_cache(backend: str) -> None:
    """Other blocks, other numbers of them, other slots: refused by every verb that takes an index, nothing written."""
    cache = cases.create(backend)
    pools = cache.ops.allocate()
    before = cases.answer(pools)
    others = {
        "block_tokens": cases.create(backend, block_tokens=8),
        "blocks": cases.create(backend, max_tokens=32),
        "slots": cases.create(backend, max_requests=3),
        "max_blocks": cases.create(backend, max_request_tokens=8),
    }
    for what, other in others.items():
        with other.step({other.admit(): 2}) as step:
            every = {**cases.calls(cache.ops, 2), **cases.integers(cache.ops, 2, list, int)}
            names = [name for name in every if name.split(",")[0] not in WITHOUT_INDEX]
            for name in names:
                call = partial(every[name], pools, step.index)
                refused = refusal(ShapeError, call, f"{what} by {name}")
                assert refused.where.endswith("index"), name
                assert "the cache whose step it is" in refused.hint
            step.abort()
    assert cases.answer(pools) == before
    twin = cases.create(backend)
    with twin.step({twin.admit(): 2}) as step:
        cache.ops.gather_window(pools, 0, step.index)  # what a plan like this one counts, this one counts alike
        step.abort()


WITHOUT_INDEX = ("select", "select of nothing", "join", "copy_slots", "copy_blocks", "reset_slots", "poison", "decode")


def index_by_hand(backend: str) -> None:
    """An index that says nothing of itself is judged by its shapes, and by its numbers where they lie on the host."""
    cache = cases.create(backend)
    pools = cache.ops.allocate()
    with cache.step({cache.admit(): 2}) as step:
        hand = step.index._replace(paging=None)
        cache.ops.gather_window(pools, 0, hand)
        wide = cache.asarray(np.full((1, cache.plan.max_blocks + 1), -1, np.int32))
        longer = cache.asarray(np.zeros(3, np.int32))
        for name, array in (("block_table", wide), ("request_index", longer), ("lengths", longer), ("stored", longer)):
            with pytest.raises(ShapeError) as refused:
                cache.ops.gather_window(pools, 0, hand._replace(**{name: array}))
            assert refused.value.where == f"gather_window: index.{name}"
        if backend == "reference":
            for name, array in (("slots", np.array([2], np.int32)), ("block_table", np.full((1, 4), 4, np.int32))):
                with pytest.raises(ShapeError, match="the plan's"):
                    cache.ops.append_window(pools, 0, hand._replace(**{name: array}), cases.floats(2, 16))
        for odd in (None, tuple(hand), 3):
            with pytest.raises(ShapeError, match=r"step\.index"):
                cache.ops.append_window(pools, 0, odd, cases.floats(2, 16))
        step.abort()


def pools_of_another_cache(backend: str) -> None:
    """Other sizes, other names, no mapping."""
    cache, other = cases.create(backend), cases.create(backend, max_requests=3, max_tokens=32)
    names = list(cache.pools)
    short = {name: cache.pools[name] for name in names if not name.startswith("0.")}
    with cache.step({cache.admit(): 2}) as step:
        for pools in (other.pools, short, None, list(cache.pools.values())):
            for verb, call in cases.calls(cache.ops, 2).items():
                if verb.split(",")[0] in ("append_window", "attend", "gather_rows", "flush", "index_scores"):
                    with pytest.raises(ShapeError, match="pools"):
                        call(pools, step.index)
            with pytest.raises(ShapeError, match="pools"):
                cache.ops.copy_slots(pools, [0], [1])
        step.abort()


def unsized_formats(backend: str) -> None:
    """Rows of one field say how many channels they have; where scales take part of them, the dim is asked for."""
    ops = cases.create(backend).ops
    values = cases.floats(3, 32)
    for name in ("fp32", "bf16", "fp16"):
        rows = ops.encode(name, values)
        assert np.array_equal(kvcore.to_numpy(ops.decode(name, rows)).astype(np.float32), values)
        page = ops.pack_page(name, rows)
        assert kvcore.to_numpy(page).shape == (rows.shape[0] * rows.shape[1],)
        assert np.array_equal(kvcore.to_numpy(ops.unpack_page(name, page, 3)), kvcore.to_numpy(rows))
    for name in ("int8_row", "fp8_row", "nf4_b64", "mxfp4"):
        rows = ops.encode(name, values)
        for call in (
            lambda name=name, rows=rows: ops.decode(name, rows),
            lambda name=name, rows=rows: ops.pack_page(name, rows),
            lambda name=name: ops.unpack_page(name, np.zeros(36, np.uint8), 1),
        ):
            with pytest.raises(SpecError) as refused:
                call()
            assert "for_dim(dim)" in refused.value.hint
        sized = FORMATS[name].for_dim(32)
        assert kvcore.to_numpy(ops.decode(name, rows, 32)).shape == (3, 32)
        assert kvcore.to_numpy(ops.decode(sized, rows)).shape == (3, 32)
        page = ops.pack_page(sized, rows)
        assert np.array_equal(kvcore.to_numpy(ops.unpack_page(sized, page, 3)), kvcore.to_numpy(rows))
    rows = np.zeros((3, 128), np.uint8)
    for refused_call in (
        lambda: ops.decode("fp32", rows, 16),
        lambda: ops.decode("v4_584", rows),
        lambda: ops.decode("v4_584", rows, 512),
        lambda: ops.decode("fp32", rows.astype(np.int8)),
        lambda: ops.decode("fp32", rows[0]),
        lambda: ops.pack_page("v4_584", rows),
        lambda: ops.unpack_page("v4_584", np.zeros(1727, np.uint8), 2),
        lambda: ops.unpack_page("fp32", np.zeros(7, np.uint8), 2),
        lambda: ops.encode("v4_584", values),
        lambda: ops.encode("fp32", values.astype(np.float64)),
        lambda: ops.encode(7, values),
    ):
        with pytest.raises(KvcoreError):
            refused_call()


def absent_layers(backend: str) -> None:
    """A layer, a role, a format or a head count that is not there."""
    cache = cases.create(backend)
    ops, pools = cache.ops, cache.ops.allocate()
    with cache.step({cache.admit(): 2}) as step:
        for layer in (5, -1, True, None, "0", 1.0):
            with pytest.raises(ShapeError):
                ops.append_window(pools, layer, step.index, cases.floats(2, 16))
        for call in (
            lambda: ops.append_window(pools, cases.PAGED, step.index, cases.floats(2, 16)),
            lambda: ops.attend(pools, cases.PAGED, step.index, cases.floats(2, 2, 16)),
            lambda: ops.append_kv(pools, cases.LATENT, step.index, cases.floats(2, 2, 16), cases.floats(2, 2, 16)),
            lambda: ops.gather_rows(pools, cases.PAGED, "window", step.index),
            lambda: ops.gather_rows(pools, cases.LATENT, "nothing", step.index),
        ):
            with pytest.raises(StepError):
                call()
        for call in (
            lambda: ops.append_window(pools, 0, step.index, cases.floats(3, 16)),
            lambda: ops.append_window(pools, 0, step.index, cases.floats(2, 15)),
            lambda: ops.append_window(pools, 0, step.index, None),
            lambda: ops.append_window(pools, 0, step.index, cases.floats(2, 16).astype(np.float64)),
            lambda: ops.attend_kv(pools, cases.PAGED, step.index, cases.floats(2, 3, 16)),
            lambda: ops.attend(pools, 0, step.index, cases.floats(2, 2, 16), sink=cases.floats(3)),
            lambda: ops.attend(pools, 0, step.index, cases.floats(2, 2, 16), scale=float("nan")),
            lambda: ops.attend(pools, 0, step.index, cases.floats(2, 2, 16), [[0]]),
            lambda: ops.from_batch(step.index, cases.floats(3, 2, 5)),
        ):
            with pytest.raises(ShapeError):
                call()
        step.abort()


class Labelled(np.ndarray):
    """A subclass with a meaning of its own."""


def meaningful_numpy(backend: str) -> None:
    """Masks, matrices, records and objects, at verbs, handles and ``asarray``; what advice makes of them is taken."""
    cache = cases.create(backend)
    values = cases.floats(2, 16)
    odd = {
        "masked": (np.ma.masked_array(values, values > 0), lambda array: array.filled(0)),
        "matrix": (values.view(np.matrix), np.asarray),
        "subclass": (values.view(Labelled), np.asarray),
    }
    with cache.step({cache.admit(): 2}) as step:
        for name, (array, way_out) in odd.items():
            for take in (
                lambda rows: cache.ops.append_window(cache.ops.allocate(), 0, step.index, rows),
                lambda rows: step.layer(cases.PLAIN).append_window(rows),
                lambda rows: cache.ops.encode("fp32", rows),
                cache.asarray,
                kvcore.to_numpy,
            ):
                assert refusal(ShapeError, lambda take=take, array=array: take(array), name).hint
            cache.ops.append_window(cache.ops.allocate(), 0, step.index, way_out(array))
        records = np.zeros((2, 16), [("a", np.float32)])
        for array in (records, values.astype(object), values.astype(complex), values.astype(">f4")):
            with pytest.raises(ShapeError):
                cache.ops.append_window(cache.ops.allocate(), 0, step.index, array)
        masked = np.ma.masked_array([0, 1], [True, False])
        with pytest.raises(ShapeError, match="mask"):
            cache.ops.copy_slots(cache.ops.allocate(), masked, [0, 1])
        step.abort()
