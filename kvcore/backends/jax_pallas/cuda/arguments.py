"""What launches share: records of regions, pools under the kernels' names for them, and pools after a launch."""

import jax.numpy as jnp

from kvcore.backends.jax_pallas.cuda.call import As, launch
from kvcore.backends.jax_pallas.cuda.choice import capability
from kvcore.kernels.triton.device import native
from kvcore.kernels.triton.record import RegionBuffers, RowRecord, row_record
from kvcore.kernels.triton.tail import TailBuffers, TailRecord, tail_record
from kvcore.plan import Region


def covers(region: Region) -> bool:
    """True where rows of a region are encoded and decoded by the kernels."""
    return row_record(region) is not None


def keeps_tail(layer, role: str) -> bool:
    """True where a tail's rows are stored and pooled by the kernels."""
    return tail_record(layer.regions[role][0], layer.component(role)) is not None


def record_of(region: Region, global_scale: float = 1.0) -> tuple[RowRecord, RegionBuffers]:
    """The record of a region that is covered, and its pools' names."""
    found = row_record(region, float(global_scale))
    assert found is not None
    return found


def tail_of(layer, role: str) -> tuple[TailRecord, TailBuffers]:
    """The record of a tail that is kept, and its pools' names."""
    found = tail_record(layer.regions[role][0], layer.component(role))
    assert found is not None
    return found


def fields(pools, names):
    """The pools of a region's codes, scales and plain channels under the kernels' names for them."""
    return {f"{field}_ptr": pools[name] for field, name in zip(("codes", "scales", "plain"), names, strict=True)}


def tails(pools, names):
    """The pools of a tail's kv and score under the kernels' names for them."""
    return {f"{field}_tail_ptr": As(pools[name], "float32") for field, name in zip(("kv", "score"), names, strict=True)}


def floats(values):
    """Values as the kernels read them: fp32 or bf16."""
    return values if values.dtype in (jnp.float32, jnp.bfloat16) else values.astype(jnp.float32)


def is_native() -> bool:
    """``native`` of the device."""
    return native(capability())


def launched(kernel, grid, arguments, **options):
    """``launch`` on the device."""
    return launch(kernel, grid, arguments, capability=capability(), **options)


def updated(pools, kernel, grid, arguments, names, **options):
    """Pools after a launch that updates those of ``names``."""
    names = sorted(set(names))
    changed, _ = launched(kernel, grid, arguments, written=[pools[name] for name in names], **options)
    for name, pool in zip(names, changed, strict=True):
        pools = pools.replace(name, pool)
    return pools
