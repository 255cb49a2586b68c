"""Text that came from elsewhere, as a terminal may be given it: a name may hold the sequences that drive one."""

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
