"""What is behind a cache, a step and a handle, for packages of the library that drive them; users need none of it."""

from typing import Any

from kvcore.cache.cache import Cache
from kvcore.cache.layer import LayerHandle
from kvcore.cache.ring_writes import RingWrites
from kvcore.cache.state import CacheState
from kvcore.cache.step import Step, StepState


def writes_of(handle: LayerHandle) -> RingWrites:
    """What a layer got in its step, and the step's context."""
    return handle._writes  # pyright: ignore[reportPrivateUsage]


def opened(step: Step[Any]) -> StepState:
    """A step as it is kept while it is open."""
    return step._state  # pyright: ignore[reportPrivateUsage]


def state_of(cache: Cache) -> CacheState:
    """What a cache holds, and whose turn it is."""
    return cache._state  # pyright: ignore[reportPrivateUsage]
