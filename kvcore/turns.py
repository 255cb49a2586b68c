"""Verbs take turns: one at a time on a cache, whole or not at all, whatever interrupts them.

A verb changes what others see in one assignment: the table of requests, or the open step. All else that it counts
(free slots, holders of blocks, free blocks) follows from those, and ``CacheState.mend`` works it out anew when the
last verb did not get to its end.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Owner:
    """A running thread, as the object that ends with it: numbers of threads are used again."""

    __slots__ = ("__weakref__", "name")

    def __init__(self) -> None:
        self.name = threading.current_thread().name


_here = threading.local()


def owner() -> Owner:
    """The thread that asks."""
    try:
        return _here.owner
    except AttributeError:
        _here.owner = Owner()
        return _here.owner


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs under its object's ``_lock``.

    Its one line holds the lock from its beginning to its end: whatever interrupts between two lines finds it either
    not taken or given back.
    """

    @functools.wraps(method)
    def held(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock: return method(self, *args, **kwargs)  # fmt: skip  # noqa: E701

    return held
