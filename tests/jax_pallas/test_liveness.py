"""The rule of liveness on JAX's arrays, inside and outside of a compiled function."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.cases_of_liveness import COMPONENTS, check


def test_arrays():
    check(jnp.asarray, jnp.maximum, lambda values: values.tolist())


def test_compiled():
    lengths = np.arange(40, dtype=np.int32)
    for component in COMPONENTS.values():
        first, end = jax.jit(lambda given, rule=component: rule.live_bounds(given, jnp.maximum))(lengths)
        assert [*zip(first.tolist(), end.tolist(), strict=True)] == [
            component.live_bounds(length) for length in range(40)
        ]
