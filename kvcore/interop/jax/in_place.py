"""Proof that a compiled JAX function updates its pools in place, for the device here or for TPUs that are not.

Donation is a wish: XLA copies a whole pool where the donation was lost on an inner ``jit``, a layout does not fit, a
scan returns pools as outputs, a kernel reads what another one writes, or a pool is read as it was before the step's
rows. ``assert_in_place`` compiles and looks; ``read_first`` is for the one read that can't wait for the write.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

from kvcore.backends.jax_pallas.order import read_first

__all__ = ["InPlace", "assert_in_place", "inspect_in_place", "read_first"]

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}
"""Chip -> the smallest topology by which libtpu knows it."""

MOVES = ("copy", "copy-start", "transpose")
DTYPES = {"uint8": "u8", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "s8", "uint32": "u32"}


class InPlace(NamedTuple):
    """What a compiled function holds: bytes of the donated pools, of the outputs that alias them, of temporaries.

    ``moves`` are the compiled instructions that copy or transpose an array of a pool's shape.
    """

    device: str
    pool_bytes: int
    alias_bytes: int
    temporary_bytes: int
    moves: tuple[str, ...]


def inspect_in_place(fn: Callable[..., Any], pools: Any, *args: Any, chip: str | None = None) -> InPlace:
    """Compile ``jit(fn, donate_argnums=0)`` for the shapes of ``pools`` and ``args``, and say what it does to pools.

    Args:
        fn: takes pools first and returns the new ones, alone or first in a tuple.
        pools: arrays or shapes; any pytree.
        args: likewise.
        chip: a TPU to compile for, without having one (needs ``libtpu``): v4, v5e, v5p, v6e, v7x. None: the default
            device.
    """
    # A new function each time: a trace for one chip must not be served to another.
    jitted = jax.jit(lambda *arrays: fn(*arrays), donate_argnums=0)
    arrays = (pools, *args)
    compiled = jitted.lower(*arrays).compile() if chip is None else _compile_for(chip, jitted, arrays)
    leaves = jax.tree.leaves(pools)
    memory: Any = compiled.memory_analysis()
    return InPlace(
        device=chip or jax.default_backend(),
        pool_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        moves=tuple(_moves(compiled.as_text() or "", leaves)),
    )


def assert_in_place(
    fn: Callable[..., Any],
    pools: Any,
    *args: Any,
    chips: Sequence[str | None] = (None,),
    temporary_bytes: int = 1 << 20,
) -> list[InPlace]:
    """Raise unless ``fn`` updates every pool in place on every chip; the arguments are those of ``inspect_in_place``.

    Args:
        chips: TPUs to compile for, None for the default device.
        temporary_bytes: temporaries to allow beside the pools.

    Raises:
        AssertionError: a pool is not aliased, an instruction copies or transposes one, or temporaries are too large.
    """
    found = [inspect_in_place(fn, pools, *args, chip=chip) for chip in chips]
    for one in found:
        if one.alias_bytes < one.pool_bytes:
            raise AssertionError(
                f"{one.device}: {one.alias_bytes} of {one.pool_bytes} bytes of pools are updated in place. "
                "Return every pool, and donate at the outermost jit."
            )
        if one.moves:
            raise AssertionError(f"{one.device}: a whole pool is moved: {one.moves[0]}")
        if one.temporary_bytes > temporary_bytes:
            raise AssertionError(
                f"{one.device}: {one.temporary_bytes} bytes of temporaries, allowed {temporary_bytes} (temporary_bytes)"
            )
    return found


def _compile_for(chip: str, jitted: Any, args: tuple[Any, ...]) -> Any:
    # Compiling needs no metadata server and no exclusive hold on a device that is not there.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if chip not in TOPOLOGIES:
        raise ValueError(f"chip: got {chip!r}, allowed {', '.join(TOPOLOGIES)}")
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    sharding = SingleDeviceSharding(device)
    here = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Explicit,), abstract_device=here)
    specs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), args)
    # Pallas lowers for the chip of the mesh in context.
    with use_abstract_mesh(mesh):
        lowered = jitted.trace(*specs).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def _moves(text: str, pools: Sequence[Any]) -> list[str]:
    # Integers are lengths and starts of views, of a few bytes for each sequence.
    pools = [pool for pool in pools if str(pool.dtype) != "int32"]
    shapes = {f"{DTYPES.get(str(pool.dtype), pool.dtype)}[{','.join(map(str, pool.shape))}]" for pool in pools}
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+\[[\d,]*\]).*? ([a-z-]+)\(", line)
        if match and match[1] in shapes and match[2] in MOVES:
            found.append(line.strip().split(", metadata=")[0])
    return found
