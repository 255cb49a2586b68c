"""What decode steps overwrite that must be kept, by how far along their requests are, is what each ring says itself."""

import numpy as np
import pytest

from kvcore.cache.undo import phases_of
from kvcore.plan import RingKind, plan_cache
from kvcore.spec import CacheSpec, Window, presets
from tests.support import scene

SPECS = {
    **{name: presets.PRESETS[name]() for name in ("deepseek_v4_flash", "deepseek_v4_1_flash_tiny", "gemma_3_1b")},
    "chunks": CacheSpec(layers=[scene.classic("ring", chunk=6), scene.classic("ring", window=5)], block_tokens=8),
    "recurrent": presets.PRESETS["qwen3_next_80b"](),
}


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_phases_say_what_rings_say(name, drafts):
    plan = plan_cache(SPECS[name], max_requests=4, max_tokens=4096, max_draft_tokens=drafts)
    random = np.random.default_rng(len(name) + drafts)
    for kinds in plan.rings:
        phases = phases_of(kinds, plan.rollback_tokens)
        assert phases is not None
        for count in (1, 1, 2, 7):
            for starts in random.integers(phases.least, phases.least + 600, (40, count)):
                wanted = [
                    any(start + 1 - rows > component.live_bounds(start - plan.rollback_tokens)[0] for start in starts)
                    for component, rows, _ in kinds
                ]
                assert phases.of(np.asarray(starts, np.int32)) == tuple(wanted), starts


def test_a_component_that_says_no_period_is_asked_itself():
    class Other(Window, frozen=True, kw_only=True):
        period = None

    kinds = (RingKind(Other(dim=8, window=4, format="bf16"), 5, ((0, "window"),)),)
    assert phases_of(kinds, 1) is None
    assert phases_of((kinds[0]._replace(component=Window(dim=8, window=4, format="bf16")),), 1) is not None
