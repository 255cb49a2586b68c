"""Tables and progress on a terminal: by rich where it is installed, in plain text otherwise."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from kvcore.foreign import printable

PIPED_WIDTH = 200
"""Columns when nobody's terminal says otherwise, so that tables in a log are not folded."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> None:
    """Print a table; the first ``left`` columns are words, the others are figures."""
    title, cells = printable(title), [[printable(str(cell)) for cell in row] for row in rows]
    columns = [printable(column, lines=True) for column in columns]
    if find_spec("rich") is None:
        print(plain_table(title, columns, cells, left=left))
        return
    from rich import box
    from rich.table import Table

    print(title)
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    _console().print(table, markup=False)


def say(text: str) -> None:
    """Print lines whose text may come from elsewhere: nothing in it drives the terminal."""
    print(printable(text, lines=True))


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """The same as text; a heading of several lines is joined by spaces."""
    heads = [column.replace("\n", " ") for column in columns]
    widths = [max(len(line[number]) for line in [heads, *rows]) for number in range(len(columns))]
    lines = [title] if title else []
    for line in [heads, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, ""])


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar on standard error while the block runs, if that is a terminal and rich is there; else None.

    What it yields is called with (done, all, what is being done).
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, title=title)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield update


def _console():
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
