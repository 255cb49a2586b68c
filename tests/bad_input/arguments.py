"""Wrong arguments of a layer's verbs. The step brings two tokens of ``a`` and one of ``b``: three rows."""

# ruff: noqa: ARG005 - the entries of a table share one signature

import ml_dtypes
import numpy as np

from kvcore.errors import NonFiniteError, ShapeError
from kvcore.spec import Rope
from tests.bad_input.world import CSA, FP4, FP16, HCA, OWNER, PAGED, RING, SLIDING, Case, World, ones
from tests.support import scene

T = 3


def meta(*shape: int) -> object:
    """An array on a device that holds no data."""
    import torch

    return torch.zeros(shape, device="meta")


def _arrays() -> list[Case]:
    """Every array argument of every verb, with each kind of wrong array."""
    arguments = {
        "append_window rows": ((T, 8), lambda s, x: s.layer(RING).append_window(x)),
        "append_tail kv": ((T, 16), lambda s, x: s.layer(CSA).append_tail(x, ones(T, 16))),
        "append_tail score": ((T, 16), lambda s, x: s.layer(CSA).append_tail(ones(T, 16), x)),
        "append_index_tail kv": ((T, 16), lambda s, x: s.layer(CSA).append_index_tail(x, ones(T, 16))),
        "append_kv k": ((T, 2, 4), lambda s, x: s.layer(PAGED).append_kv(x, ones(T, 2, 6))),
        "append_kv v": ((T, 2, 6), lambda s, x: s.layer(SLIDING).append_kv(ones(T, 2, 4), x)),
        "store_entries entries": ((2, 8), lambda s, x: s.layer(OWNER).store_entries(x, ones(2, 8))),
        "store_entries index_keys": ((2, 8), lambda s, x: s.layer(OWNER).store_entries(ones(2, 8), x)),
    }
    cases = []
    for name, (shape, call) in arguments.items():
        wrong = {
            "one row more": ones(shape[0] + 1, *shape[1:]),
            "one row less": ones(shape[0] - 1, *shape[1:]),
            "one channel more": ones(*shape[:-1], shape[-1] + 1),
            "an axis missing": ones(*shape[1:]),
            "an axis too many": ones(1, *shape),
            "fp64": ones(*shape, dtype=np.float64),
            "integers": ones(*shape, dtype=np.int32),
            "a list": ones(*shape).tolist(),
            "nothing": None,
            "a device without data": meta(*shape),
        }
        if "tail" in name:
            wrong["bf16"] = ones(*shape, dtype=ml_dtypes.bfloat16)
        if "index_keys" in name:
            del wrong["nothing"]  # they are optional
        cases += [
            Case(f"{name}: {kind}", ShapeError, lambda s, w, call=call, array=array: call(s, array))
            for kind, array in wrong.items()
        ]
    return cases


def _append(number: int):
    def prepare(step, world: World) -> None:
        scene.fill_layer(step.layer(number), world.cache.spec.layers[number], np.arange(T, dtype=np.float32))

    return prepare


def _readers() -> list[Case]:
    """Arguments of the verbs that read."""
    int32, floats = np.int32, np.float32
    calls = {
        "layer number: negative": (lambda s: s.layer(-1), None),
        "layer number: too large": (lambda s: s.layer(10), None),
        "layer number: text": (lambda s: s.layer("0"), None),
        "layer number: a float": (lambda s: s.layer(1.0), None),
        "layer number: a boolean": (lambda s: s.layer(True), None),
        "layer number: nothing": (lambda s: s.layer(None), None),
        "indices: floats": (lambda s: s.layer(CSA).gather_entries(ones(T, 2)), None),
        "indices: int16": (lambda s: s.layer(CSA).gather_entries(ones(T, 2, dtype=np.int16)), None),
        "indices: booleans": (lambda s: s.layer(CSA).gather_entries(ones(T, 2, dtype=bool)), None),
        "indices: one axis": (lambda s: s.layer(CSA).gather_entries(ones(T, dtype=int32)), None),
        "indices: of too few tokens": (lambda s: s.layer(CSA).gather_entries(ones(2, 2, dtype=int32)), None),
        "indices: a list": (lambda s: s.layer(CSA).gather_entries([[0], [0], [0]]), None),
        "scores: one axis": (lambda s: s.layer(CSA).select(ones(T), 1), None),
        "scores: integers": (lambda s: s.layer(CSA).select(ones(T, 2, dtype=int32), 1), None),
        "scores: of too few tokens": (lambda s: s.layer(CSA).select(ones(2, 2), 1), None),
        "top-k: negative": (lambda s: s.layer(CSA).select(ones(T, 2), -1), None),
        "top-k: a fraction": (lambda s: s.layer(CSA).select(ones(T, 2), 1.5), None),
        "top-k: a boolean": (lambda s: s.layer(CSA).select(ones(T, 2), True), None),
        "top-k: text": (lambda s: s.layer(CSA).select(ones(T, 2), "4"), None),
        "top-k: nothing": (lambda s: s.layer(CSA).select(ones(T, 2), None), None),
        "indexer queries: another width": (lambda s: s.layer(CSA).index_scores(ones(T, 2, 9), ones(T, 2)), CSA),
        "indexer queries: no head axis": (lambda s: s.layer(CSA).index_scores(ones(T, 8), ones(T, 2)), CSA),
        "indexer queries: integers": (lambda s: s.layer(CSA).index_scores(ones(T, 2, 8, dtype=int32), ones(T, 2)), CSA),
        "indexer weights: of other heads": (lambda s: s.layer(CSA).index_scores(ones(T, 2, 8), ones(T, 3)), CSA),
        "queries: another width": (lambda s: s.layer(RING).attend(ones(T, 2, 9)), RING),
        "queries: of too few tokens": (lambda s: s.layer(RING).attend(ones(2, 2, 8)), RING),
        "queries: fp64": (lambda s: s.layer(RING).attend(ones(T, 2, 8, dtype=np.float64)), RING),
        "queries: heads that keys do not divide": (lambda s: s.layer(PAGED).attend(ones(T, 3, 4)), PAGED),
        "selected on a classic layer": (lambda s: s.layer(PAGED).attend(ones(T, 2, 4), ones(T, 1, dtype=int32)), PAGED),
        "selected: floats": (lambda s: s.layer(CSA).attend(ones(T, 2, 8), ones(T, 1)), CSA),
        "selected: of too few tokens": (lambda s: s.layer(CSA).attend(ones(T, 2, 8), ones(2, 1, dtype=int32)), CSA),
        "sink: of other heads": (lambda s: s.layer(RING).attend(ones(T, 2, 8), sink=ones(3)), RING),
        "sink: a number": (lambda s: s.layer(RING).attend(ones(T, 2, 8), sink=1.0), RING),
        "sink: integers": (lambda s: s.layer(PAGED).attend(ones(T, 2, 4), sink=ones(2, dtype=int32)), PAGED),
        "scale: text": (lambda s: s.layer(RING).attend(ones(T, 2, 8), scale="large"), RING),
        "scale: a list": (lambda s: s.layer(PAGED).attend(ones(T, 2, 4), scale=[1.0]), PAGED),
        "rotation of outputs: more channels than there are": (
            lambda s: s.layer(RING).attend(ones(T, 2, 8), rope=ones(5)),
            RING,
        ),
        "rotation of outputs: a Rope wider than rows": (
            lambda s: s.layer(RING).attend(ones(T, 2, 8), rope=Rope(dim=10, theta=1e4)),
            RING,
        ),
        "rotation of outputs: two axes": (lambda s: s.layer(RING).attend(ones(T, 2, 8), rope=ones(T, 2)), RING),
        "rotation of outputs: integers": (
            lambda s: s.layer(RING).attend(ones(T, 2, 8), rope=ones(2, dtype=int32)),
            RING,
        ),
        "rotation of outputs: text": (lambda s: s.layer(RING).attend(ones(T, 2, 8), rope="yarn"), RING),
        "rotation of outputs: a list": (lambda s: s.layer(RING).attend(ones(T, 2, 8), rope=[1.0]), RING),
        "rotation of outputs on a classic layer": (lambda s: s.layer(PAGED).attend(ones(T, 2, 4), rope=ones(2)), PAGED),
        "norm weight: another width": (lambda s: s.layer(HCA).flush(norm_weight=ones(9)), "tail"),
        "norm weight: two axes": (lambda s: s.layer(HCA).flush(norm_weight=ones(1, 8)), "tail"),
        "norm weight: integers": (lambda s: s.layer(HCA).flush(norm_weight=ones(8, dtype=int32)), "tail"),
        "norm weight: a list": (lambda s: s.layer(HCA).flush(norm_weight=[1.0] * 8), "tail"),
        "eps: text": (lambda s: s.layer(HCA).flush(eps="small"), "tail"),
        "eps: nothing": (lambda s: s.layer(HCA).flush(eps=None), "tail"),
        "compress eps: text": (lambda s: s.layer(HCA).compress(eps="small"), "tail"),
        "rope: two axes": (lambda s: s.layer(HCA).flush(rope=ones(2, 2)), "tail"),
        "rope: fp64": (lambda s: s.layer(HCA).flush(rope=ones(2, dtype=np.float64)), "tail"),
        "rope: text": (lambda s: s.layer(HCA).flush(rope="yarn"), "tail"),
        "rope: more channels than a row has": (lambda s: s.layer(HCA).flush(rope=ones(5, dtype=floats)), "tail"),
    }
    tail = lambda s, w: s.layer(HCA).append_tail(ones(T, 8), ones(T, 8))  # noqa: E731
    return [
        Case(name, ShapeError, lambda s, w, call=call: call(s), tail if number == "tail" else _ready(number))
        for name, (call, number) in calls.items()
    ]


def _ready(number: int | None):
    return None if number is None else _append(number)


def _with(value: float, *shape: int, dtype=np.float32) -> np.ndarray:
    """Ones, and one value in the last place."""
    array = np.ones(shape, dtype)
    array[(-1,) * len(shape)] = value
    return array


def _values() -> list[Case]:
    """Values that a format cannot hold, under ``check=True``."""
    calls = {
        "NaN in a window row": lambda s: s.layer(RING).append_window(_with(np.nan, T, 8)),
        "NaN in a bf16 window row": lambda s: s.layer(RING).append_window(
            _with(np.nan, T, 8, dtype=ml_dtypes.bfloat16)
        ),
        "infinity in a window row": lambda s: s.layer(RING).append_window(_with(-np.inf, T, 8)),
        "beyond fp16 in a window row": lambda s: s.layer(FP16).append_window(_with(65600.0, T, 8)),
        "NaN in a tail's kv": lambda s: s.layer(CSA).append_tail(_with(np.nan, T, 16), ones(T, 16)),
        "infinity in a tail's kv": lambda s: s.layer(HCA).append_tail(_with(np.inf, T, 8), ones(T, 8)),
        "NaN in a tail's score": lambda s: s.layer(CSA).append_tail(ones(T, 16), _with(np.nan, T, 16)),
        "infinity in a tail's score": lambda s: s.layer(HCA).append_tail(ones(T, 8), _with(np.inf, T, 8)),
        "NaN in an index tail": lambda s: s.layer(CSA).append_index_tail(_with(np.nan, T, 16), ones(T, 16)),
        "NaN in a key": lambda s: s.layer(PAGED).append_kv(_with(np.nan, T, 2, 4), ones(T, 2, 6)),
        "infinity in a value": lambda s: s.layer(SLIDING).append_kv(ones(T, 2, 4), _with(np.inf, T, 2, 6)),
        "NaN in an entry": lambda s: s.layer(OWNER).store_entries(_with(np.nan, 2, 8), ones(2, 8)),
        "NaN in an index key": lambda s: s.layer(OWNER).store_entries(ones(2, 8), _with(np.nan, 2, 8)),
        "beyond fp4 in an entry": lambda s: s.layer(FP4).store_entries(_with(2689.0, 2, 512), ones(2, 8)),
    }
    return [Case(name, NonFiniteError, lambda s, w, call=call: call(s), check=True) for name, call in calls.items()]


CASES = [
    *_arrays(),
    *_readers(),
    *_values(),
    Case(
        "rows of fewer tokens than the step has",
        ShapeError,
        lambda s, w: s.layer(RING).append_window(ones(T, 8)),
        tokens=lambda w: {w.a: 2, w.b: 2},
    ),
]
