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


def shortened(value: object) -> str:
    """A foreign value as ``repr`` writes it, printable and of bounded length."""
    if isinstance(value, (str, bytes)):
        value = value[: MOST + 1]
    elif isinstance(value, int) and value.bit_length() > MOST:
        return f"an integer of {value.bit_length()} bits"
    text = printable(repr(value))
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def _escape(one: str) -> str:
    """As in a literal: backslash, x, two digits, or u and four."""
    return repr(one)[1:-1] if ord(one) < 0x80 else one.encode("unicode_escape").decode()
