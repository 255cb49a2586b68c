"""The ``kvcore`` command: ``info``, ``plan``, ``parity``, ``bench``, ``check``, ``describe`` and ``convert``.

Exit codes: 0 all well (backends agree), 1 backends disagree, 2 the command could not be carried out as it was typed.
Every command has ``--json``. Tables are drawn by rich where it is installed; nothing else depends on it.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from kvcore.errors import KvcoreError
from kvcore.foreign import printable

AGREE, DISAGREE, USAGE = 0, 1, 2

COMMANDS = {
    "info": "kvcore.cli.info",
    "plan": "kvcore.cli.plan",
    "parity": "kvcore.cli.parity",
    "bench": "kvcore.cli.bench",
    "check": "kvcore.portable.checkfile",
    "describe": "kvcore.cli.describe",
    "convert": "kvcore.cli.convert",
}
"""Command -> its module. The one that is typed is imported alone: most of ``kvcore info`` would else be imports."""

EXAMPLES = """\
examples:
  kvcore info                                        what is installed and what can run here
  kvcore plan deepseek_v4_flash --budget 40GiB       what a cache takes, and what it holds
  kvcore parity run --backend torch_triton           compare a backend with the reference
  kvcore bench --only append                         time the verbs on a CUDA device
  kvcore check cache.kv                              is a snapshot whole, and if not, what is damaged
  kvcore describe cache.kv                           what a blob, a snapshot or a descriptor says of itself
  kvcore convert cache.kv small.kv --formats key=int8_row   the same requests in other formats
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's own) and return its exit code."""
    typed = sys.argv[1:] if arguments is None else arguments
    options = _parser(typed[0] if typed else "").parse_args(arguments)
    options.typed = arguments
    try:
        return options.run(options)
    except KvcoreError as error:
        print(f"kvcore: {printable(str(error), lines=True)}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of our output has seen enough: `kvcore info | head`.
        sys.stderr.close()
        return AGREE


def _parser(command: str) -> argparse.ArgumentParser:
    """Of one command; of all where there is none of that name, which then help or an error lists."""
    from kvcore import __version__

    parser = argparse.ArgumentParser(
        prog="kvcore",
        description="Key-value caches of language models: plan them, and check the backends that hold them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvcore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in [COMMANDS[command]] if command in COMMANDS else COMMANDS.values():
        import_module(module).add_to(commands)
    return parser
