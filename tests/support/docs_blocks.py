"""Blocks of Python in the documentation: which there are, and which are complete in themselves."""

import ast
import builtins
import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> dict[str, str]:
    """``page:number`` -> source, of what is not a doctest."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"^ *```python\n(.*?)^ *```", text, re.M | re.S)):
            found[f"{page.name}:{number}"] = dedent(block)
    return found


def missing(source: str) -> set[str]:
    """Names that a block uses and does not make."""
    used, made = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(ctx=ast.Load()):
                used.add(node.id)
            case ast.Name():
                made.add(node.id)
            case ast.FunctionDef() | ast.ClassDef():
                made.add(node.name)
            case ast.arg():
                made.add(node.arg)
            case ast.alias():
                made.add((node.asname or node.name).partition(".")[0])
    return used - made


def complete(framework: str | None) -> dict[str, str]:
    """Blocks that can be run as they are, of those that import a framework; None: any but JAX."""
    return {
        name: source
        for name, source in blocks().items()
        if not missing(source)
        and ("import jax" in source if framework == "jax" else "jax" not in source)
        and "kvcore_mybackend" not in source  # a package that the reader is about to write
    }
