"""What a quick run compiles shows every kernel on every GPU and in every format; the rest is as the record says."""

import re

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("torch")

from tests.support import ahead_of_time  # noqa: E402
from tests.support.ahead_of_time import Record, Resources, check, formats_of, sample  # noqa: E402
from tests.support.backends_under_test import BACKENDS  # noqa: E402
from tests.support.samples import covering, fewest, quick  # noqa: E402

COMPILED, RECORDED = Resources(64, 0, 0, 512, 4), Resources(32, 0, 0, 256, 4)


def pairs(rows):
    """(kernel, GPU), and of each with the formats of a case."""
    return {
        pair for kernel, arch, case in rows for name in formats_of(case) for pair in ((kernel, name), (arch, name))
    } | {(kernel, arch) for kernel, arch, _ in rows}


def words(rows):
    return {(kernel, word) for kernel, _, case in rows for word in re.findall(r"\w+", case)}


def test_every_pair_of_the_record_is_compiled(record):
    chosen = sample(record.known)
    assert chosen < record.known.keys()
    assert pairs(chosen) == pairs(record.known)
    # All that a kernel does, not its formats alone.
    assert words(chosen) == words(record.known)


@pytest.mark.parametrize(
    ("known", "compiles", "found"),
    [
        pytest.param(True, True, COMPILED, id="in the sample"),
        pytest.param(True, False, RECORDED, id="left out"),
        pytest.param(False, False, COMPILED, id="not recorded"),
    ],
)
def test_what_is_left_out_is_what_the_record_says(known, compiles, found, monkeypatch):
    def digest_kernel():
        """Stands for a kernel; nothing of it is compiled."""

    kernel, row = triton.jit(digest_kernel), ("digest_kernel", "sm_90", "one")
    monkeypatch.setattr(ahead_of_time, "compiled", lambda *_, **__: None)
    monkeypatch.setattr(ahead_of_time, "resources", lambda _: COMPILED)
    rows = {row: {"kernel": row[0], "arch": row[1], "case": row[2], **RECORDED._asdict()}} if known else {}
    held = Record(triton.__version__, rows, [], frozenset([row] * compiles))
    assert check(held, "one", kernel, 90, {}) == found
    assert len(held.found) == (found is COMPILED)


def test_a_sample_takes_what_shows_something_new():
    assert covering(["ab", "b", "bc", "ca"], set) == ["ab", "bc"]
    assert covering([], set) == []
    assert fewest(["ab", "b", "bcd", "ca", "a"], set) == ["bcd", "ab"]
    assert fewest(["", "a"], set) == ["a"]
    assert fewest([], set) == []


@pytest.mark.parametrize(
    ("cases", "chosen"),
    [
        pytest.param([""], [""], id="no parameters"),
        pytest.param(["a", "b"], ["a", "b"], id="one parameter"),
        pytest.param(["a-1", "a-2", "b-1", "b-2", "c-1", "c-2"], ["a-1", "b-2", "c-1"], id="a grid"),
        pytest.param(["a-1", "a-2", "b-1"], ["a-1", "a-2", "b-1"], id="a grid with a hole"),
        pytest.param(["a-1-x", "a-2-x", "a-1-y", "a-2-y"], ["a-1-x", "a-2-y"], id="three parameters"),
        pytest.param(["a, b", "a", "b"], ["a, b", "a", "b"], id="words of several"),
    ],
)
def test_a_quick_run_of_a_test_shows_each_word_of_its_ids_on_each_backend(cases, chosen):
    assert sorted(quick(f"test_rows[{case}]" for case in cases)) == sorted(f"test_rows[{case}]" for case in chosen)
    both = [f"test_rows[{name}-{case}]" for name in BACKENDS for case in cases]
    assert sorted(quick(both)) == sorted(f"test_rows[{name}-{case}]" for name in BACKENDS for case in chosen)
