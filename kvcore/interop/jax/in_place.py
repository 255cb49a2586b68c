"""Proof that a compiled JAX function updates its pools in place, for the device here or for TPUs that are not.

Donation is a wish: XLA copies a whole pool where the donation was lost on an inner ``jit``, a layout does not fit, a
scan returns pools as outputs, a kernel reads what another one writes, or a pool is read as it was before the step's
rows. ``assert_in_place`` compiles and looks; ``read_first`` is for the one read that can't wait for the write.
"""

import os
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from kvcore.backends.jax_pallas.order import read_first

__all__ = ["InPlace", "absent_mesh", "assert_in_place", "inspect_in_place", "read_first"]

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


EXCHANGE = re.compile(
    r" = (.+?) (?:all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
)
"""An instruction by which devices of a mesh send each other something; of two halves the first."""

BITS = re.compile(r"(\w*?)(\d+)[a-z\d]*\[([\d,]*)\]")
"""An array in XLA's text: f32[4,128]; ``pred`` alone has no number of bits."""


class InPlace(NamedTuple):
    """What a compiled function holds: bytes of the donated pools, of the outputs that alias them, of temporaries.

    Over a mesh they are those of one device, and pools its parts of them. ``moves`` are the compiled instructions that
    copy or transpose an array of a pool's shape; ``exchanges`` those by which devices send each other as much as the
    smallest pool has.
    """

    device: str
    pool_bytes: int
    alias_bytes: int
    temporary_bytes: int
    moves: tuple[str, ...]
    exchanges: tuple[str, ...] = ()


def inspect_in_place(fn: Callable[..., Any], pools: Any, *args: Any, chip: str | None = None) -> InPlace:
    """Compile ``jit(fn, donate_argnums=0)`` for the shapes of ``pools`` and ``args``, and say what it does to pools.

    Args:
        fn: takes pools first and returns the new ones, alone or first in a tuple.
        pools: arrays or shapes; any pytree. On a mesh, which may be one of ``absent_mesh``, they say where they lie.
        args: likewise.
        chip: a TPU to compile for, without having one (needs ``libtpu``): v4, v5e, v5p, v6e, v7x. None: the devices
            that the arrays name, or the default one.
    """
    # A new function each time: a trace for one chip must not be served to another.
    jitted = jax.jit(lambda *arrays: fn(*arrays), donate_argnums=0)
    arrays = (pools, *args)
    leaves = jax.tree.leaves(pools)
    mesh = next((leaf.sharding.mesh for leaf in leaves if isinstance(_sharding(leaf), NamedSharding)), None)
    if chip is not None:
        compiled = _compile_for(chip, jitted, arrays)
    elif mesh is None:
        compiled = jitted.lower(*arrays).compile()
    else:
        compiled = jitted.trace(*arrays).lower(lowering_platforms=(mesh.devices.flat[0].platform,)).compile()
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    parts = [_part(leaf) for leaf in leaves]
    return InPlace(
        device=chip or (jax.default_backend() if mesh is None else mesh.devices.flat[0].device_kind),
        pool_bytes=sum(map(_nbytes, parts)),
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        moves=tuple(_moves(text, parts)),
        exchanges=tuple(_exchanges(text, parts)),
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
        AssertionError: a pool is not aliased, an instruction copies or transposes one, devices exchange as much as one
            has, or temporaries are too large.
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
        if one.exchanges:
            raise AssertionError(f"{one.device}: as much as a pool has goes over the mesh: {one.exchanges[0]}")
        if one.temporary_bytes > temporary_bytes:
            raise AssertionError(
                f"{one.device}: {one.temporary_bytes} bytes of temporaries, allowed {temporary_bytes} (temporary_bytes)"
            )
    return found


def absent_mesh(chip: str, **axes: int) -> Mesh:
    """A mesh of TPUs that are not here, to compile for (needs ``libtpu``): ``absent_mesh("v6e", data=2, model=2)``.

    Args:
        chip: as for ``inspect_in_place``.
        axes: name -> size; together no more than the chip's smallest topology has, 4 of most.

    Raises:
        ValueError: another chip, or more devices.
    """
    devices, wanted = _devices(chip), prod(axes.values())
    if wanted > len(devices):
        raise ValueError(f"absent_mesh: got {wanted} devices, allowed {len(devices)} of {chip}")
    return Mesh(np.array(devices[:wanted]).reshape(tuple(axes.values())), tuple(axes))


def _devices(chip: str) -> Any:
    # Compiling needs no metadata server and no exclusive hold on a device that is not there.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if chip not in TOPOLOGIES:
        raise ValueError(f"chip: got {chip!r}, allowed {', '.join(TOPOLOGIES)}")
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices


def _compile_for(chip: str, jitted: Any, args: tuple[Any, ...]) -> Any:
    device = _devices(chip)[0]
    sharding = SingleDeviceSharding(device)
    here = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Explicit,), abstract_device=here)
    specs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), args)
    # Pallas lowers for the chip of the mesh in context.
    with use_abstract_mesh(mesh):
        lowered = jitted.trace(*specs).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _part(leaf: Any) -> jax.ShapeDtypeStruct:
    """What one device has of an array."""
    sharding = _sharding(leaf)
    return jax.ShapeDtypeStruct(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape), leaf.dtype)


def _exchanges(text: str, pools: Sequence[Any]) -> list[str]:
    least = min((_nbytes(pool) for pool in pools if str(pool.dtype) != "int32"), default=1)
    found = []
    for line in text.splitlines():
        said = line.strip().split(", metadata=")[0]
        match = EXCHANGE.search(said)
        if match and _sent(match[1]) >= least:
            found.append(said)
    return found


def _sent(made: str) -> int:
    """Bytes of the arrays in an instruction's type."""
    return sum(int(bits) * prod(map(int, filter(None, sizes.split(",")))) // 8 for _, bits, sizes in BITS.findall(made))


def _nbytes(pool: Any) -> int:
    return pool.size * pool.dtype.itemsize


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
