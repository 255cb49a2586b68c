"""The public cases of classic caches, rings, batches and positions on JAX: the tests that the other backends run.

Sweeps over every size are left out, each size compiles anew: RING-02's is in ``test_known_faults`` at one padded shape.
"""

import pytest

from tests.cases import test_batch, test_classic, test_compress, test_ring

SWEEPS = (
    "test_ring_02_every_pair_of_call_sizes",
    "test_ring_05_calls_of_every_size_after_wrapping",
    "test_ring_07_before_wrapping_every_rollback_is_possible",
)
CASES = {
    name: test
    for module in (test_batch, test_classic, test_ring)
    for name, test in vars(module).items()
    if name.startswith("test_") and name not in SWEEPS
} | {name: test for name, test in vars(test_compress).items() if name.startswith("test_cmp_07_")}
globals().update(CASES)


@pytest.fixture
def backend():
    return "jax_pallas"
