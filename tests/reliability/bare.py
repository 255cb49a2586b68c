"""A cache without bytes: real requests, slots, blocks and prefix keys over a backend that stores nothing.

What counts, locks and shares is the library's own; only the rows are left out, so that millions of operations fit.
"""

import numpy as np

from kvcore.cache import Cache
from kvcore.ops import RawRows
from kvcore.plan import CachePlan, plan_cache
from kvcore.pools import Pools
from kvcore.spec import CacheSpec, LayerSpec, Window
from kvcore.spec.sizes import row_bytes
from tests.support import scene


def plan_of(*, slots: int = 6, max_tokens: int = 96, drafts: int = 2, latent: bool = False) -> CachePlan:
    """A small plan: a window and paged rows, of a latent layer or a classic one, blocks of four tokens."""
    paged = scene.compressed(4, window=5) if latent else scene.classic(heads=1, dim=2)
    layers = [LayerSpec(window=Window(dim=4, window=3, format="fp32")), paged]
    spec = CacheSpec(layers=layers, block_tokens=4, name="bare")
    return plan_cache(spec, max_requests=slots, max_tokens=max_tokens, max_draft_tokens=drafts)


class NoBytes:
    """Verbs that accept everything and store nothing."""

    device = "none"
    in_place = True
    how = "no bytes"

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan

    def allocate(self):
        return Pools({})

    def asarray(self, array):
        return array

    def index(self, host):
        return host

    def gather_rows(self, pools, layer, role, index, rows=None, *, columns):
        component = getattr(self.plan.spec.all_layers[layer], role)
        positions = np.full((len(index.slots), columns), -1, np.int32)
        for request, length in enumerate(index.lengths.tolist()):
            live = component.live(length)
            positions[request, : len(live)] = live
        return RawRows(np.zeros((*positions.shape, row_bytes(component)), np.uint8), positions)

    def digest_rows(self, raw, salt):
        return np.zeros((len(raw.rows), 2), np.int64)

    def move_strips(self, pools, pages, strips, units, *, store=False):
        return False

    def digest_strips(self, pages, strips, first_page):
        return None

    def _same(self, pools, *rest):
        return pools

    reset_slots = copy_slots = copy_blocks = store_rows = poison = _same


class Nothing:
    """The backend of that name."""

    name = "none"


class BareCache(Cache):
    """A cache whose steps need no rows."""

    def __init__(self, plan: CachePlan, **options) -> None:
        super().__init__(plan, Nothing(), NoBytes(plan), **options)

    def step(self, tokens, pad_tokens=None, pad_requests=None):
        step = super().step(tokens, pad_tokens, pad_requests)
        # As outside code does that fills the pools itself: completeness is the caller's business.
        step._state.pools_replaced = True
        # Nothing is stored, so no row takes another's place.
        step._state._harms = lambda _: False
        return step
