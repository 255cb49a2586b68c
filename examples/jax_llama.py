"""A Llama in plain ``jax.numpy``: layers scanned over a stack of views, then every token in a loop on the device.

The weights are random, so the text is none; ``from_pretrained`` weights stacked layer by layer go into the same arrays.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.interop.jax import assert_in_place
from kvcore.interop.jax.stack import init_stack
from kvcore.spec import presets

LAYERS, WIDTH, HEADS, KEY_HEADS, DIM, INNER, WORDS = 4, 96, 6, 2, 16, 256, 512
rng = np.random.default_rng(0)


def random(*shape):
    """Weights."""
    return jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5, jnp.float32)


weights = {
    "q": random(LAYERS, WIDTH, HEADS * DIM),
    "k": random(LAYERS, WIDTH, KEY_HEADS * DIM),
    "v": random(LAYERS, WIDTH, KEY_HEADS * DIM),
    "o": random(LAYERS, HEADS * DIM, WIDTH),
    "gate": random(LAYERS, WIDTH, INNER),
    "up": random(LAYERS, WIDTH, INNER),
    "down": random(LAYERS, INNER, WIDTH),
}
words = random(WORDS, WIDTH)


def normed(x):
    """RMS norm."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def rotated(x, positions):
    """Rotary embedding of [B, S, heads, dim] at positions [B, S]."""
    angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(DIM // 2) / (DIM // 2))
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def forward(stack, ids):
    """New tokens [B, S] through all layers -> the stack with them, and the next token of each sequence."""
    positions = stack.lengths[0][:, None] + jnp.arange(ids.shape[1])[None]

    def layer(carry, given):
        x, stack = carry
        number, own = given
        y = normed(x)
        q, k, v = ((y @ own[name]).reshape(*ids.shape, -1, DIM) for name in "qkv")
        out, _, view = stack.layer(number).attend(rotated(q, positions), rotated(k, positions), v)
        x = x + out.reshape(*ids.shape, -1) @ own["o"]
        y = normed(x)
        return (
            x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"],
            stack.with_layer(number, view),
        ), None

    (x, stack), _ = lax.scan(layer, (words[ids], stack), (jnp.arange(LAYERS), weights))
    return stack, jnp.argmax(normed(x[:, -1]) @ words.T, axis=-1)


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def generate(stack, last, count):
    """``count`` tokens of every sequence, without the host in between."""

    def step(carry, _):
        stack, last = carry
        stack, last = forward(stack, last[:, None])
        return (stack, last), last

    (stack, _), found = lax.scan(step, (stack, last), None, length=count)
    return stack, found.T


spec = presets.classic(layers=LAYERS, key_heads=KEY_HEADS, key_dim=DIM, key_format="int8_row")
prompt = jnp.asarray(rng.integers(0, WORDS, (2, 7)))
stack, last = jax.jit(forward, donate_argnums=0)(init_stack(spec, batch=2, max_length=512), prompt)
(found,) = assert_in_place(forward, stack, last[:, None], temporary_bytes=8 << 20)
stack, tokens = generate(stack, last, 40)
print(
    f"{tokens.shape[1]} tokens of {len(tokens)} sequences; {found.alias_bytes} bytes in place; first: {tokens[0, :8]}"
)

# Step by step from the start: one prompt of everything gives the same next token.
whole = jnp.concatenate([prompt, last[:, None], tokens[:, :-1]], axis=1)
_, again = jax.jit(forward)(init_stack(spec, batch=2, max_length=512), whole)
print("the same as one prompt:", bool((again == tokens[:, -1]).all()))
