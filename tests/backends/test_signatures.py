"""Shapes in the contract's signatures: written for every verb, true on the reference and torch, wrong ones refused."""

import inspect

import numpy as np
import pytest
import torch
from beartype.roar import BeartypeDoorHintViolation

from kvcore.backends.reference import ReferenceBackend, ReferenceOps
from kvcore.backends.torch_triton import TorchBackend, TorchOps
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.ops import Ops
from tests.support.shapes_of_verbs import CHECKED, VERBS, annotations, checked, run_checks


@pytest.mark.parametrize("name", VERBS)
def test_every_argument_and_result_is_annotated(name: str) -> None:
    given = [one for one in inspect.signature(getattr(Ops, name)).parameters if one != "self"]
    assert set(annotations(np.ndarray)[name]) == {*given, "return"}


@pytest.mark.parametrize("ops", [ReferenceOps, TorchOps])
@pytest.mark.parametrize("name", VERBS)
def test_a_backends_verb_has_the_contracts_signature(ops: type, name: str) -> None:
    assert list(inspect.signature(getattr(ops, name)).parameters) == list(
        inspect.signature(getattr(Ops, name)).parameters
    )


@pytest.mark.parametrize(
    ("ops", "array", "backend"), [(ReferenceOps, np.ndarray, ReferenceBackend), (TorchOps, torch.Tensor, TorchBackend)]
)
def test_what_verbs_take_and_give_is_as_annotated(ops: type, array: type, backend: type) -> None:
    with checked(ops, array) as called:
        run_checks(ReferenceBackend(), backend())
    assert called >= {name.split("/")[0] for name in (*CHECKED, "encode", "decode", "asarray", "index")}


def test_a_wrong_shape_or_dtype_is_refused_by_the_annotation() -> None:
    (check,) = [one for one in checks_of(conformance_spec()) if one.id == "attend_kv/bf16.full.paged/planar/ragged"]
    ops = TorchBackend().create(check.plan)
    with checked(TorchOps, torch.Tensor):
        for call in (
            lambda: ops.select(torch.zeros(3), 2),
            lambda: ops.join(torch.zeros(3, 4), torch.zeros(3, 5)),
            lambda: ops.reset_slots(ops.allocate(), torch.zeros(2)),
        ):
            with pytest.raises(BeartypeDoorHintViolation):
                call()
        assert ops.join(torch.zeros(3, 4), torch.zeros(3, 4)).shape == (3, 8)
