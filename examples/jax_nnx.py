"""A flax NNX attention layer whose cache is a view: keys and values are kept by kvcore, in a format of its own.

The same weights with flax's own cache give the same tokens' outputs. Needs flax:  python examples/jax_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvcore.interop.jax import inspect_in_place
from kvcore.interop.jax.views import init_views
from kvcore.spec import presets

BATCH, LENGTH, HEADS, DIM = 2, 64, 4, 16
WIDTH = HEADS * DIM


class Attention(nnx.Module):
    """The projections of ``nnx.MultiHeadAttention``, around a view."""

    def __init__(self, own: nnx.MultiHeadAttention) -> None:
        self.query, self.key, self.value, self.out = own.query, own.key, own.value, own.out

    def __call__(self, view, x):
        """New tokens x [B, S, width] -> the view with them, and [B, S, width]."""
        found = view.attend(self.query(x), self.key(x), self.value(x))
        return found.view, self.out(found.out)


theirs = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, rngs=nnx.Rngs(0))
theirs.init_cache((BATCH, LENGTH, WIDTH))
graph, state = nnx.split(Attention(theirs))


def step(view, state, x):
    """One step as a pure function, for ``jit``: the view is donated, the weights are not."""
    return nnx.merge(graph, state)(view, x)


run = jax.jit(step, donate_argnums=0)
spec = presets.classic(layers=1, key_heads=HEADS, key_dim=DIM, key_format="fp32")
view = init_views(spec, batch=BATCH, max_length=LENGTH)[0]
worst, rng = 0.0, np.random.default_rng(0)
for _ in range(20):
    x = jnp.asarray(rng.standard_normal((BATCH, 1, WIDTH)), jnp.float32)
    view, ours = run(view, state, x)
    worst = max(worst, float(jnp.abs(ours - theirs(x)).max()))
found = inspect_in_place(step, view, state, x)
print(f"{int(view.lengths[0])} tokens; flax's own cache differs by {worst:.1e} or less; {len(found.moves)} pools moved")
if worst > 1e-5 or found.moves:
    raise SystemExit("not as with flax's own cache")
