"""Masks, left and right padding on JAX: steps of the core, and layer views, against the rule."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvcore.interop.jax.views import init_views
from kvcore.spec import CacheSpec
from tests.support import cases_of_masks as cases


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        pytest.param("full", (3, 0), id="full, one request"),
        pytest.param("sliding", (6, 11), id="sliding, beyond the window"),
        pytest.param("chunked", (8, 12), id="ring of whole chunks"),
        pytest.param("chunked, paged", (3, 0), id="shifted chunks"),
    ],
)
def test_each_query_sees_what_it_should(kind, left):
    cases.run(cases.KINDS[kind], "jax_pallas", left)


@pytest.mark.parametrize("kind", ["sliding", "chunked", "chunked in a slot"])
def test_views_see_what_they_should(kind):
    """Left padding that is no multiple of the chunk, right padding in the second append, prompts beyond the window."""
    layer, left = cases.KINDS[kind], (3, 6)
    view = init_views(CacheSpec(layers=[layer], block_tokens=8), batch=2, max_length=24, starts=left)[0]
    starts = np.zeros(2, np.int32)
    for new in ((11, 11), (2, 1), (1, 1)):
        width = max(new)
        keys = np.zeros((2, width, cases.HEADS, cases.DIM), np.float32)
        values = np.zeros((2, width, cases.HEADS, cases.VALUE_DIM), np.float32)
        keys[..., 0] = starts[:, None, None] + np.arange(width)[None, :, None]
        found = view.append(jnp.asarray(keys), jnp.asarray(values), new)
        view, mask, positions = found.view, np.asarray(found.mask), np.asarray(found.positions)
        for row in range(2):
            for column in range(width):
                query = int(starts[row]) + column
                wanted = [p for p in range(query + 1) if cases.sees(layer.kv, left[row], query, p)]
                wanted = wanted if column < new[row] else []
                assert positions[row][mask[row, column]].tolist() == wanted, (row, query)
                assert np.asarray(found.keys)[row, mask[row, column], 0, 0].tolist() == wanted
        starts += new
