"""Keys of blocks: the chain that engines with ``sha256_cbor`` block hashes use, told here with cbor2 and hashlib."""

import hashlib

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import SpecError
from kvcore.requests.prefix import cbor, chain, point_key, seed_of
from tests.support import stories

VALUES = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.binary(max_size=70) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=30),
    max_leaves=60,
)


def sha256_cbor(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


@given(VALUES)
def test_cbor_equals_cbor2(value):
    assert cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize(
    "value",
    [pytest.param(edge, id=f"{edge:#x}") for edge in (0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1)],
)
def test_cbor_of_edge_integers(value):
    assert cbor([value]) == cbor2.dumps([value], canonical=True)


def test_cbor_refuses_what_it_has_no_head_for():
    with pytest.raises(SpecError):
        cbor(2**64)


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 200_000), max_size=70),
    st.integers(1, 20),
    st.none() | st.text(min_size=1, max_size=9),
)
def test_the_chain_is_sha256_cbor(seed, tokens, block_tokens, salt):
    parent, wanted = seed, []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        block = tuple(tokens[start : start + block_tokens])
        # A salt enters the first block only: those after it follow from its hash.
        parent = sha256_cbor((parent, block, (salt,) if salt and start == 0 else None))
        wanted.append(parent)
    assert list(chain(seed, tokens, block_tokens, salt)) == wanted


def test_a_chain_can_be_taken_up_at_any_block():
    tokens = list(range(1000, 1064))
    keys = list(chain(b"seed", tokens, 16))
    assert list(chain(keys[1], tokens[32:], 16)) == keys[2:]


def test_a_golden_key():
    # Worked out by hand: 83 = list of 3, 58 20 = 32 bytes, 84 = list of 4, 18 18 = 24, f6 = null.
    text = bytes.fromhex("83 58 20" + "00" * 32 + "84 01 02 03 18 18 f6")
    assert next(chain(bytes(32), [1, 2, 3, 24], 4)) == hashlib.sha256(text).digest()


def test_the_seed_tells_specs_apart():
    assert len({seed_of(spec) for spec in stories.SPECS.values()}) == 3
    assert seed_of(stories.LATENT) == sha256_cbor(["kvcore", stories.LATENT.digest])


def test_salts_tell_blocks_and_points_apart():
    salts = (None, "tenant a", "tenant b", "point")
    chains = {tuple(chain(bytes(32), range(12), 4, salt)) for salt in salts}
    assert len({key for keys in chains for key in keys}) == 3 * 4
    assert len({point_key(bytes(32), [1, 2], salt) for salt in salts}) == 4
    assert point_key(bytes(32), [1, 2], "a") == sha256_cbor([bytes(32), [1, 2], ["point", "a"]])


def test_a_point_is_no_block():
    block = list(range(4))
    assert point_key(bytes(32), block) != next(chain(bytes(32), block, 4))
    assert point_key(bytes(32), block[:2]) != point_key(bytes(32), block[:3])
