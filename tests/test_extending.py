"""Extending costs what ``CONTRIBUTING.md`` says: each is done here, in a copy of the sources where it is in them."""

import pytest

from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import FORMATS, KV, CacheSpec, Field, Format, LayerSpec, Window
from tests.support import extended
from tests.support.backends_under_test import BACKENDS


@pytest.fixture
def plain_e4m3():
    fields = (Field(name="codes", dims=64, code="e4m3"),)
    format = FORMATS.register(Format(name="test_plain_e4m3", fields=fields, planes=(("codes",),)))
    yield format.name
    del FORMATS._formats[format.name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_format_of_known_codes_is_one_entry(plain_e4m3, backend):
    layers = (
        LayerSpec(window=Window(dim=64, window=5, format=plain_e4m3)),
        LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format=plain_e4m3)),
    )
    report = run(CacheSpec(layers=layers, block_tokens=8), [registry().backends[backend]], only="*/p*/[rp]a*")
    assert {record.status for record in report.checks} == {"agree"}
    assert {"append_window", "append_kv", "attend_kv", "gather_kv"} <= {record.verb for record in report.checks}


@pytest.fixture(scope="module")
def with_e5m2(tmp_path_factory):
    return extended.copy(tmp_path_factory.mktemp("e5m2"), *extended.E5M2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_formats_of_a_new_code_are_four_lines_in_four_files(with_e5m2, backend):
    assert len({line.file for line in extended.E5M2}) == len(extended.E5M2) == 4
    found = extended.told(with_e5m2, extended.E5M2_CHECKS, backend, *extended.E5M2_CHOSEN)
    assert len(found) > 100
    assert set(found.values()) == {"agree"}


@pytest.fixture(scope="module")
def with_row_counts(tmp_path_factory):
    return extended.copy(tmp_path_factory.mktemp("row_counts"), *extended.ROW_COUNTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_verb_is_five_files_and_runs_on_every_backend(with_row_counts, backend):
    """Its default is in terms of other verbs; a backend that can do better writes it once more."""
    assert len({line.file for line in extended.ROW_COUNTS}) == 5
    found = extended.told(with_row_counts, extended.ROW_COUNTS_CHECKS, backend)
    # A ring gives what any query of the step sees: of nine tokens at once all of them.
    assert found.pop("of a layer") == [3, 9]
    assert len(found) > 5
    assert set(found.values()) == {"agree"}


def test_a_backend_is_a_folder_and_a_record(tmp_path):
    """The reference's own folder under another name, judged by the kit as any other."""
    tree = extended.copy(tmp_path, extended.MIRROR)
    folder = tree / "kvcore" / "backends" / "mirror"
    folder.mkdir()
    for path in (tree / "kvcore" / "backends" / "reference").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        text = text.replace("kvcore.backends.reference", "kvcore.backends.mirror").replace('"reference"', '"mirror"')
        (folder / path.name).write_text(text, encoding="utf-8")
    found = extended.told(tree, extended.MIRROR_CHECKS, "*/packed/ragged")
    assert len(found) > 20
    assert set(found.values()) == {"agree"}
