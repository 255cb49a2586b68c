"""What somebody else made: malformed bytes, text that may drive a terminal, calls that may fail in any way."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

Result = TypeVar("Result")
Given = ParamSpec("Given")

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError)
"""What decoders raise for bytes that are none of theirs: malformed, of other types, not UTF-8, nested too deep."""

LONGEST = 2**31 - 1
"""Tokens that a request can say to have: positions are int32 on every backend."""

LARGEST_ID = 2**64 - 1
"""Of a token: ids enter keys as 8 bytes."""

MOST = 200
"""Characters of one foreign value in a message."""


def printable(text: str, *, lines: bool = False) -> str:
    """The text with every control, format and surrogate character written as an escape.

    Args:
        text: of any origin.
        lines: leave the ends of lines as they are.
    """
    if text.isprintable():
        return text
    kept = "\n" if lines else ""
    return "".join(one if one.isprintable() or one in kept else _escape(one) for one in text)


def written(value: object) -> str:
    """A value as ``repr`` writes it, or what it is where that is refused: integers of many digits, deep lists."""
    try:
        return repr(value)
    except (ValueError, RecursionError) as error:
        return f"{type(value).__name__} that cannot be written: {error}"


def shortened(value: object) -> str:
    """A foreign value as ``repr`` writes it, printable and of bounded length."""
    text = printable(written(value[: MOST + 1] if isinstance(value, (str, bytes)) else value))
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def _escape(one: str) -> str:
    """As JSON writes it, so that JSON stays what it is: backslash, u, four digits; twice beyond 16 bits."""
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


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
