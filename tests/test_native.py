"""The digest's function in C: who gets it, when, and who never does."""

import ctypes
import shutil
import subprocess

import pytest

from kvcore import digest, native
from kvcore.backends.torch_triton import cpu_coded


def wrong(*arguments):
    """A function that leaves the lanes as they are."""


def test_a_process_that_digests_much_gets_a_function(monkeypatch):
    monkeypatch.setattr(native, "compiled", lambda *_: wrong)
    found = native.Native(digest._right)
    assert found(native.WORTH - 1) is None
    assert found._thread is None
    found(1)
    found._thread.join()
    assert found(0) is wrong


def test_a_function_that_is_wrong_is_never_used(monkeypatch):
    monkeypatch.setattr(native, "_compiled", lambda *_: wrong)
    monkeypatch.setattr(native.shutil, "which", lambda _: "cc")
    assert native.Native(digest._right).wait() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("CC", "/nowhere/cc"), ("CC", "false"), ("CC", "'cc"), ("KVCORE_NATIVE", "0"), ("PATH", "")],
)
def test_without_a_compiler_nothing_is_asked_for(monkeypatch, name, value):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(name, value)
    assert native.compiled(lambda _: True) is None


def test_a_compiler_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    assert native.compiled(digest._right) is not None
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("said", ["cc -std=gnu11", "env cc", ""])
def test_a_compiler_may_be_said_with_options_or_another_program(monkeypatch, said):
    monkeypatch.setenv("CC", said)
    assert native.compiled(digest._right) is not None


@pytest.fixture(scope="module")
def attend(tmp_path_factory):
    """Attention as a compiler makes it that does not know its machine; None if nothing that is right comes of it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    strict = tmp_path_factory.mktemp("compilers") / "strict"
    strict.write_text(f'#!/bin/sh\ncase "$*" in *-march*) exit 1;; esac\nexec {compiler} "$@"\n')
    strict.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(strict))
        return native.compiled(cpu_coded._right, "attend")


def test_a_compiler_that_does_not_know_its_machine_compiles_without(attend):
    assert attend is not None


def test_what_is_wrong_for_the_machine_is_compiled_for_any(monkeypatch):
    def right(*arguments):
        """A function of another build."""

    monkeypatch.setattr(native, "_compiled", lambda *given: wrong if given[-1] else right)
    monkeypatch.setattr(native.shutil, "which", lambda _: "cc")
    assert native.compiled(lambda run: run is right, "attend") is right
    assert native.compiled(lambda run: run is wrong, "attend") is wrong
    assert native.compiled(lambda _: False, "attend") is None


def test_a_compiler_that_takes_too_long_is_asked_once(monkeypatch):
    def run(line, **options):
        asked.append(line)
        raise subprocess.TimeoutExpired(line, options["timeout"])

    asked = []
    monkeypatch.setattr(native.subprocess, "run", run)
    monkeypatch.setattr(native.shutil, "which", lambda _: "cc")
    assert native.compiled(lambda _: True, "attend") is None
    assert len(asked) == 1


KIND, OFFSETS, BY_CHANNEL = 12, 8, 21
WRONG = {
    **{f"kind {kind}": lambda side, kind=kind: side[KIND] == kind for kind in sorted({*cpu_coded.KINDS.values()})},
    "offsets": lambda side: side[OFFSETS] != 0,
    "no offsets": lambda side: side[OFFSETS] == 0,
    "by channel": lambda side: side[BY_CHANNEL] == 1,
}


@pytest.mark.parametrize("of", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("what", WRONG)
def test_attention_that_is_wrong_of_some_rows_is_not_right(what, of, attend):
    """Such as vectors of one kind of codes that a compiler gets wrong for its machine."""

    def erring(query, heads, group, scale, *rest):
        attend(query, heads, group, scale, *rest)
        side = (ctypes.c_int64 * 24).from_address(rest[of])
        if WRONG[what](side):
            ctypes.c_float.from_address(rest[6]).value += 1e-3

    assert not cpu_coded._right(erring)
