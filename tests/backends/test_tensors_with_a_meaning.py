"""Tensors that mean more than their values, or have none, are refused; what the advice says is then taken."""

import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import ShapeError
from kvcore.ops.arguments import check_float
from tests.support import functional_cases as cases

VALUES = torch.from_numpy(cases.floats(2, 16))


class Wrapped(torch.Tensor):
    """A wrapper subclass, as quantisation libraries have them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError


ODD = {
    "sparse": (lambda: VALUES.to_sparse(), lambda tensor: tensor.to_dense(), "to_dense"),
    "sparse rows": (lambda: VALUES.to_sparse_csr(), lambda tensor: tensor.to_dense(), "to_dense"),
    "nested": (
        lambda: torch.nested.nested_tensor([VALUES[0], VALUES[1]]),
        lambda tensor: torch.nested.to_padded_tensor(tensor, 0.0),
        "to_padded_tensor",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([VALUES[0], VALUES[1]], layout=torch.jagged),
        lambda tensor: torch.nested.to_padded_tensor(tensor, 0.0),
        "to_padded_tensor",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(VALUES, 0.125, 0, torch.qint8),
        lambda tensor: tensor.dequantize(),
        "dequantize",
    ),
    "meta": (lambda: VALUES.to("meta"), lambda _: VALUES, "to_empty"),
    "a wrapper": (lambda: Wrapped(VALUES), lambda _: VALUES, "plain tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("backend", ["torch_triton", "reference"])
def test_refused_with_advice_that_works(backend, odd):
    make, way_out, advice = ODD[odd]
    cache = cases.create(backend)
    tensor = make()
    with cache.step({cache.admit(): 2}) as step:
        for take in (
            lambda: cache.ops.append_window(cache.ops.allocate(), 0, step.index, tensor),
            lambda: step.layer(cases.PLAIN).append_window(tensor),
            lambda: cache.asarray(tensor),
            lambda: kvcore.to_numpy(tensor),
        ):
            with pytest.raises(ShapeError) as refused:
                take()
            assert advice in refused.value.hint
        step.layer(cases.PLAIN).append_window(way_out(tensor))
        step.abort()


@pytest.mark.parametrize(
    ("tensor", "taken"),
    [
        (torch.nn.Parameter(VALUES.clone()), VALUES),
        (torch.complex(VALUES, VALUES).conj().imag, -VALUES),  # a view that is to be negated when it is read
        (VALUES.t().contiguous().t(), VALUES),
    ],
    ids=["a parameter", "negated when read", "transposed"],
)
def test_what_is_a_plain_tensor_after_all_is_taken(tensor, taken):
    cache = cases.create("torch_triton")
    with torch.no_grad(), cache.step({cache.admit(): 2}) as step:
        step.layer(cases.PLAIN).append_window(tensor)
        found = kvcore.to_numpy(step.layer(cases.PLAIN).gather_window().values)[0, :2]
        assert np.array_equal(found, taken.numpy())
        step.abort()


def test_a_sparse_tensor_is_seen_where_a_plain_one_like_it_passed():
    """A decode step that looks at its first layer's arrays only must still see this."""
    cache = cases.create("torch_triton")
    key = torch.zeros(1, 2, 16)
    with cache.step({cache.admit(): 1}) as step:
        step.layer(cases.PAGED).append_kv_view(key, key)
        with pytest.raises(ShapeError, match="to_dense"):
            step.layer(cases.RING).append_kv_view(key.to_sparse(), key)
        step.abort()


def test_functional_verbs_in_a_compiled_function():
    """Torch's tracer goes through the door to the verb, and breaks the graph nowhere."""
    cache = cases.create("torch_triton")
    compiled = torch.compile(lambda kv, score: cache.ops.join(kv, score=score), backend="eager", fullgraph=True)
    assert torch.equal(compiled(VALUES, VALUES), torch.cat([VALUES, VALUES], dim=1))


@pytest.mark.parametrize("tensor", [VALUES.bfloat16(), VALUES.clone().requires_grad_()], ids=["bf16", "recorded"])
def test_the_reference_says_how_it_takes_a_tensor(tensor):
    cache = cases.create("reference")
    with pytest.raises(ShapeError, match=r"Tensor on cpu.*Pass kvcore\.to_numpy\(tensor\)"):
        check_float(cache.ops, tensor, "rows", (2, 16))
    assert check_float(cache.ops, kvcore.to_numpy(tensor), "rows", (2, 16)).shape == (2, 16)
