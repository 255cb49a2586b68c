"""Calling code of others, which may fail in any way, without letting it take the process along."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


class Failed(NamedTuple):
    """What a call raised: the error, and its kind and text in one line."""

    error: BaseException

    @property
    def reason(self) -> str:
        """``ImportError: no module named x``; a broken ``__str__`` leaves the kind."""
        kind = type(self.error).__name__
        try:
            lines = str(self.error).splitlines()
        except Exception:  # noqa: BLE001 - an error of outside code may be broken itself
            lines = []
        return f"{kind}: {lines[0]}" if lines else kind


def isolated(call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result | Failed:
    """What the call returns, or what it raised: an error, ``SystemExit``, a ``KeyboardInterrupt`` of its own.

    A ``KeyboardInterrupt`` is passed on if an interrupt arrived meanwhile: then it is the user's, who wants to stop.
    """
    with _interrupts() as arrived:
        try:
            return call(*args, **kwargs)
        except KeyboardInterrupt as error:
            if arrived:
                raise
            return Failed(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told as the reason of a row
            return Failed(error)


@contextmanager
def _interrupts() -> Generator[list[int]]:
    """The interrupts that arrive within the block, on the way to whoever handles them.

    Python delivers them to the main thread alone; a block in another thread sees none, and none can be raised there.
    """
    arrived: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield arrived
        return

    def noted(number: int, frame: Any) -> Any:
        arrived.append(number)
        return before(number, frame)

    signal.signal(signal.SIGINT, noted)
    try:
        yield arrived
    finally:
        # A plug-in may have installed a handler of its own, which stays.
        if signal.getsignal(signal.SIGINT) is noted:
            signal.signal(signal.SIGINT, before)
