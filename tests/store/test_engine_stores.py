"""What an engine's configuration says of a store, wrong in every way: refused by type, and no folder is made."""

import pytest

from kvcore.errors import ShapeError
from kvcore.interop.stores import store_of


@pytest.mark.parametrize(
    "wrong", [{"secret": "zz" * 16}, {"secret": 5}, {"secret": "00"}, {"secret": ""}, {"host_bytes": "1"}, {"bytes": 0}]
)
def test_a_configuration_that_is_wrong_is_refused(wrong, tmp_path):
    folder = tmp_path / "pages"
    with pytest.raises(ShapeError) as refused:
        store_of({"folder": str(folder), **wrong})
    assert "zz" not in str(refused.value)
    assert not folder.exists()


def test_a_secret_in_hex_seals_pages():
    bare, sealed = (store_of(told, "x.", host_bytes=1 << 12) for told in ({}, {"x.secret": "0f" * 16}))
    assert sealed.put(b"key", b"a page")
    bare.tiers[0].put(b"key", sealed.tiers[0].get(b"key"))
    assert (bare.get(b"key"), bytes(sealed.get(b"key"))) == (None, b"a page")
