"""An exception after functional verbs: every row readable at the old length must have its old bytes."""

import numpy as np
import pytest

from tests.support import scene
from tests.support.scene import numbered


@pytest.mark.parametrize("new", [1, 2, 4])
def test_an_exception_after_functional_verbs_leaves_the_old_rows(backend, new):
    cache = scene.create([scene.ring(5)], backend)
    a = cache.admit()
    scene.write(cache, {a: range(12)})
    before = cache.digest()
    rows = cache.asarray(np.full((new, scene.DIM), 99, np.float32))
    step = cache.step({a: new})
    cache.pools = cache.ops.append_window(cache.pools, 0, step.index, rows)
    step.abort()
    assert scene.read(cache, scene.window_of, a) == [numbered(7, 11)]
    assert cache.digest() == before
