"""The signatures by which FlashInfer is called, against those of its wheel."""

import ast
import inspect
import os
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support import fake_flashinfer as fake

WHEEL = next(Path(os.environ["KVCORE_ENGINES"]).glob("flashinfer_python-*.whl"), None)
pytestmark = pytest.mark.skipif(WHEEL is None, reason="no wheel of flashinfer_python, of 100 MB, beside the others")
FILES = {
    "flashinfer/decode.py": ("BatchDecodeWithPagedKVCacheWrapper", ("__init__", "plan", "_plan_impl", "run")),
    "flashinfer/mla/_sparse_mla_sm120/_api.py": ("_SparseMLAPagedAttentionRunner", ("__init__", "run")),
}
STAND_INS = {
    "BatchDecodeWithPagedKVCacheWrapper": fake.BatchDecodeWithPagedKVCacheWrapper,
    "_SparseMLAPagedAttentionRunner": fake.SparseMLASm120Wrapper,
}
KIND = inspect.Parameter


def of_source(function: ast.FunctionDef, names: dict[str, object]) -> list[tuple[str, object, object]]:
    """(name, kind, default) of a function's parameters; ``names``: constants that defaults are."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [KIND.empty] * (len(plain) - len(given.defaults)) + [value(one, names) for one in given.defaults]
    found = [(one.arg, KIND.POSITIONAL_OR_KEYWORD, default) for one, default in zip(plain, defaults, strict=True)]
    if given.vararg:
        found.append((given.vararg.arg, KIND.VAR_POSITIONAL, KIND.empty))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append((one.arg, KIND.KEYWORD_ONLY, KIND.empty if default is None else value(default, names)))
    if given.kwarg:
        found.append((given.kwarg.arg, KIND.VAR_KEYWORD, KIND.empty))
    return found


def value(default: ast.expr, names: dict[str, object]) -> object:
    return names[default.id] if isinstance(default, ast.Name) else ast.literal_eval(default)


@pytest.mark.parametrize("file", FILES)
def test_the_stand_in_is_called_as_the_release_is(file: str) -> None:
    name, methods = FILES[file]
    with zipfile.ZipFile(WHEEL) as wheel:
        tree = ast.parse(wheel.read(file))
    (found,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    for method in methods:
        # Overloads come before the method itself.
        *_, source = (one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == method)
        known = inspect.signature(getattr(STAND_INS[name], method)).parameters.values()
        stand_in = [(one.name, one.kind, one.default) for one in known]
        assert stand_in == of_source(source, {"_D_V": 512}), method


def test_it_is_the_release_that_was_read() -> None:
    assert WHEEL.name.startswith(f"flashinfer_python-{fake.VERSION}-")
