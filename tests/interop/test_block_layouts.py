"""vLLM's six block layouts: a table and its inverse, and bytes where the logical axes say."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import SpecError
from kvcore.interop import vllm_layouts
from kvcore.spec import presets

LAYERS, HEADS, DIM, ROWS, BLOCKS = 3, 2, 8, 16, 5
SPEC = presets.classic(layers=LAYERS, key_heads=HEADS, key_dim=DIM, block_tokens=ROWS, key_format="fp32")
COUNTS = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": ROWS, "C": 2 * DIM}


@pytest.mark.parametrize("layout", vllm_layouts.BLOCK_LAYOUTS)
def test_rows_lie_where_the_logical_axes_say(layout, rng):
    memory = np.zeros([COUNTS[axis] for axis in layout], np.float32)
    logical = memory.transpose([layout.index(axis) for axis in "LBHNC"])
    said = vllm_layouts.descriptor(SPEC, layout, blocks=BLOCKS)
    assert vllm_layouts.layout_of(said, SPEC) == layout
    cache = kvcore.adopt(SPEC, memory, layout=said)
    # Views of layers, as an engine hands them out, are the same places.
    views = kvcore.adopt(SPEC, [logical[layer] for layer in range(LAYERS)], layout="NL_X_NB_NH_BS_CS")
    keys, values = rng.standard_normal((2, 20, HEADS, DIM)).astype(np.float32)
    request = cache.admit(blocks=[3, 1])
    with cache.step({request: 20}) as step:
        for layer in range(LAYERS):
            step.layer(layer).append_kv(keys + layer, values + layer)
    for position in range(20):
        found = logical[:, [3, 1][position // ROWS], :, position % ROWS]
        for layer in range(LAYERS):
            both = np.concatenate([keys[position], values[position]], axis=1) + layer
            assert (found[layer] == both).all()
    assert views.digest([views.admit(blocks=[3, 1], length=20)]) == cache.digest([request])


def test_what_is_no_layout_or_several():
    with pytest.raises(SpecError, match="LBHNC, LBNHC"):
        vllm_layouts.descriptor(SPEC, "NHD", blocks=2)
    with pytest.raises(SpecError, match="equal layers"):
        vllm_layouts.descriptor(presets.deepseek_v4_flash_tiny(draft=False), "LBHNC", blocks=2)
    one = presets.classic(layers=1, key_heads=1, key_dim=8, block_tokens=16)
    with pytest.raises(SpecError, match=" or "):
        vllm_layouts.layout_of(vllm_layouts.descriptor(one, "LBHNC", blocks=1), one)
