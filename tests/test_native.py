"""The digest's function in C: who gets it, when, and who never does."""

import shutil

import pytest

from kvcore import digest, native
from kvcore.backends.torch_triton import cpu_coded


def wrong(*arguments):
    """A function that leaves the lanes as they are."""


def test_a_process_that_digests_much_gets_a_function(monkeypatch):
    monkeypatch.setattr(native, "compiled", lambda _: wrong)
    found = native.Native(lambda run: run is wrong)
    assert found(native.WORTH - 1) is None
    assert found._thread is None
    found(1)
    found._thread.join()
    assert found(0) is wrong


def test_a_function_that_is_wrong_is_never_used(monkeypatch):
    monkeypatch.setattr(native, "compiled", lambda _: wrong)
    assert native.Native(digest._right).wait() is None


@pytest.mark.parametrize(
    ("name", "value"), [("CC", "/nowhere/cc"), ("CC", "false"), ("KVCORE_NATIVE", "0"), ("PATH", "")]
)
def test_without_a_compiler_nothing_is_asked_for(monkeypatch, name, value):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(name, value)
    assert native.compiled() is None


def test_a_compiler_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    assert digest._right(native.compiled())
    assert not [*tmp_path.iterdir()]


def test_a_compiler_that_does_not_know_its_machine_compiles_without(monkeypatch, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    strict = tmp_path / "strict"
    strict.write_text(f'#!/bin/sh\ncase "$*" in *-march*) exit 1;; esac\nexec {compiler} "$@"\n')
    strict.chmod(0o755)
    monkeypatch.setenv("CC", str(strict))
    assert cpu_coded._right(native.compiled("attend"))
