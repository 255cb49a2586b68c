"""Formats of a new code on JAX: the same four lines as on the other backends."""

from tests.support import extended


def test_formats_of_a_new_code_are_four_lines_in_four_files(tmp_path):
    tree = extended.copy(tmp_path, *extended.E5M2)
    found = extended.told(tree, extended.E5M2_CHECKS, "jax_pallas", "*_kv*/packed/ragged", "*e5m2*/any/*")
    assert len(found) > 20
    assert set(found.values()) == {"agree"}
