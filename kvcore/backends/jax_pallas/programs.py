"""Compiled functions of the verbs: one for each, which JAX keeps a trace of for every kind of layer and every shape."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from kvcore.backends.jax_pallas import attention, encoding, indexer, kv, lifecycle, tail, window
from kvcore.backends.jax_pallas.gradients import constant
from kvcore.backends.jax_pallas.rows import Held
from kvcore.backends.jax_pallas.runs import as_elements
from kvcore.ops.records import Compression
from kvcore.pools import Pools

jax.tree_util.register_dataclass(
    Compression, data_fields=["norm_weight", "rope", "index_norm_weight"], meta_fields=["eps"]
)


def _outside() -> Any:
    """JAX's state outside of any transformation, as every new thread has it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(get_opaque_trace_state).result()


OUTSIDE = _outside()


def in_trace(verb: str, arrays: tuple[Any, ...] = ()) -> bool:
    """Whether what a verb makes of these arrays has no values here, and is not to be kept beyond a trace.

    Raises:
        ShapeError: one of them is differentiated.
    """
    if get_opaque_trace_state() == OUTSIDE:
        return False
    traced = [array for array in arrays if isinstance(array, Tracer)]
    constant(verb, traced)
    # Where derivatives are taken or a batch is mapped, all else is computed as ever.
    return bool(traced) or isinstance(jax.device_put(np.int32(0)), Tracer)


DIFFERENTIABLE = {
    attention.attend: ("q", "sink", "scale", "rope"),
    kv.attend_kv: ("q", "sink", "scale"),
    indexer.index_scores: ("q", "weights"),
    indexer.index_select: ("q", "weights"),
    tail.compress: ("norm_weight",),
}
"""Verb -> the arguments that gradients go through in ``jax.numpy``, as through the same sums over what is stored.
Nothing goes through any other argument, and nothing at all through kernels."""


def written(pools: Any, *given: Any) -> dict[str, Any]:
    """The mapping that a verb puts its new arrays into, each in the moment in which it gives the old one away.

    That is the pools themselves where they are a cache's, so that nothing is lost if it goes no further; in a trace,
    and for any other mapping, a copy.

    Args:
        given: arrays that the verb changes, and those that it is given.

    Returns:
        What is changed by ``put`` and ``dict.update`` alone.
    """
    if isinstance(pools, Pools) and not any(isinstance(array, Tracer) for array in jax.tree.leaves(given)):
        return pools
    return dict(pools)


put = dict.__setitem__


def as_given(pools: Any, arrays: dict[str, Any]) -> Any:
    """What ``written`` gave, as what a verb returns for such pools."""
    if not isinstance(pools, Pools):
        return arrays
    return pools if arrays is pools else Pools(arrays)


@cache
def program(verb, writes=False):
    """One compiled function a verb; JAX keeps a trace for every (layer kind, options, shapes)."""
    passed = DIFFERENTIABLE.get(verb, ())

    def constants(kernels, given, arrays):
        kept = {name: array for name, array in arrays.items() if kernels == "portable" and name in passed}
        given, rest = constant(verb.__name__, (given, {name: arrays[name] for name in arrays if name not in kept}))
        return given, {**rest, **kept}

    def run(layer, options, written, read, arrays):
        given, arrays = constants(layer.kernels, {**written, **read}, arrays)
        with jax.named_scope(f"kvcore.{verb.__name__}"):
            held = {name: as_elements(pool, *layer.elements[name]) for name, pool in given.items()}
            found = verb(layer, Held(held, layer.kernels), **arrays, **dict(options))
        if not writes:
            return found
        return {name: as_elements(found[name], pool.shape[1:], pool.dtype) for name, pool in written.items()}

    run.__name__ = verb.__name__  # which logs and profiles of JAX say
    return jax.jit(run, static_argnums=(0, 1), donate_argnums=(2,))


@cache
def answering(verb):
    """The same for what gives pools and an answer, of constants: (pools that are written by name, the answer)."""

    def run(layer, options, written, arrays):
        with jax.named_scope(f"kvcore.{verb.__name__}"):
            held = {name: as_elements(pool, *layer.elements[name]) for name, pool in written.items()}
            found, answer = verb(layer, Held(held, layer.kernels), **arrays, **dict(options))
        return {name: as_elements(found[name], pool.shape[1:], pool.dtype) for name, pool in written.items()}, answer

    run.__name__ = verb.__name__
    return jax.jit(run, static_argnums=(0, 1), donate_argnums=(2,))


@cache
def indexed(verb):
    """The same for verbs that need the index only."""

    def run(layer, index, options):
        return verb(layer, index, **dict(options))

    run.__name__ = verb.__name__
    return jax.jit(run, static_argnums=(0, 2))


@jax.jit
def digest(raw, salt):
    """Lanes [Q, 2] uint32 of rows."""
    return lifecycle.digest_rows(raw, salt)


@partial(jax.jit, static_argnums=0)
def zeros(kinds):
    """Arrays of zeros of some (shape, dtype)."""
    return [jnp.zeros(shape, dtype) for shape, dtype in kinds]


def _fresh(pool, fresh):
    return None if fresh is None else jnp.asarray(np.frombuffer(fresh, pool.dtype).reshape(pool.shape[1:]))


reset = jax.jit(
    lambda pool, slots, fresh: lifecycle.reset_slots(pool, slots, _fresh(pool, fresh)),
    static_argnums=2,
    donate_argnums=0,
)
poison = jax.jit(lifecycle.poison, donate_argnums=0)
copy_units = jax.jit(lifecycle.copy_units, donate_argnums=0)
select = jax.jit(lambda scores, k, kernels: indexer.select(scores, k, kernels), static_argnums=(1, 2))
rotated_rows = jax.jit(
    lambda layer, index, arrays, eps: window.rotated_rows(layer, index, **arrays, eps=eps), static_argnums=(0, 3)
)
from_batch = jax.jit(kv.from_batch)
to_batch = jax.jit(kv.to_batch, static_argnums=2)
encode = jax.jit(
    lambda format, values, scale: encoding.encode(format, constant("encode", values), scale), static_argnums=(0, 2)
)
decode = jax.jit(lambda format, rows, scale: encoding.decode(format, rows, None, scale), static_argnums=(0, 2))
