"""Shapes in the contract's signatures: true of what JAX's verbs take and give, wrong ones refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.roar import BeartypeDoorHintViolation

from kvcore.backends.jax_pallas import JaxBackend, JaxOps
from kvcore.backends.reference import ReferenceBackend
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.ops import Ops
from tests.support.shapes_of_verbs import CHECKED, VERBS, checked, run_checks


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_has_the_contracts_signature(name: str) -> None:
    assert list(inspect.signature(getattr(JaxOps, name)).parameters) == list(
        inspect.signature(getattr(Ops, name)).parameters
    )


def test_what_verbs_take_and_give_is_as_annotated() -> None:
    with checked(JaxOps, jax.Array) as called:
        run_checks(ReferenceBackend(), JaxBackend())
    assert called >= {name.split("/")[0] for name in (*CHECKED, "encode", "decode", "asarray", "index")}


def test_a_wrong_shape_or_dtype_is_refused_by_the_annotation() -> None:
    (check,) = [one for one in checks_of(conformance_spec()) if one.id == "attend_kv/bf16.full.paged/planar/ragged"]
    ops = JaxBackend().create(check.plan)
    with checked(JaxOps, jax.Array):
        with pytest.raises(BeartypeDoorHintViolation):
            ops.select(jnp.zeros(3, jnp.float32), 2)
        with pytest.raises(BeartypeDoorHintViolation):
            ops.join(jnp.zeros((3, 4)), jnp.zeros((3, 5)))
        with pytest.raises(BeartypeDoorHintViolation):
            ops.reset_slots(ops.allocate(), jnp.zeros(2, jnp.float32))
        assert np.asarray(ops.join(jnp.zeros((3, 4)), jnp.zeros((3, 4)))).shape == (3, 8)
