"""Verbs take turns: one at a time on a cache, whole or not at all, whatever interrupts them.

A verb changes what others see in one assignment: the table of requests, or the open step. All else that it counts
(free slots, holders of blocks, free blocks) follows from those, and ``CacheBase._mend`` works it out anew when the
last verb did not get to its end.
"""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from kvcore.cache.base import CacheBase

C = TypeVar("C", bound="CacheBase")
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


def exclusive(
    verb: str, *, in_step: bool = False
) -> Callable[[Callable[Concatenate[C, P], R]], Callable[Concatenate[C, P], R]]:
    """Make a method of a cache a verb: it waits for its turn; see ``CacheBase._take_turn``.

    Args:
        verb: its name, for messages.
        in_step: whether the thread that has a step open may call it.
    """

    def decorate(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
        @functools.wraps(method)
        def turn(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
            act = functools.partial(method, self, *args, **kwargs)
            return self._take_turn(verb, act, in_step=in_step)  # pyright: ignore[reportPrivateUsage]

        return turn

    return decorate


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs under its object's ``_lock``.

    Its one line holds the lock from its beginning to its end: whatever interrupts between two lines finds it either
    not taken or given back.
    """

    @functools.wraps(method)
    def held(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock: return method(self, *args, **kwargs)  # fmt: skip  # noqa: E701

    return held
