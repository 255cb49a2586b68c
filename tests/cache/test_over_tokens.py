"""Keys and values in formats over tokens: what is stored, and what a query sees, depends on positions alone."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.arrays import to_numpy
from kvcore.errors import KvcoreError, SpecError
from kvcore.spec import FORMATS, KV, CacheSpec, LayerSpec
from kvcore.spec.codes import CODES
from tests.support.backends_under_test import BACKENDS

GROUP = 32
TOKENS = 150
KEYS = {"key_heads": 2, "key_dim": 16, "key_format": "int4_ch32"}
SPEC = CacheSpec(layers=[LayerSpec(kv=KV(**KEYS, value_dim=32, value_format="int4_g32"))], block_tokens=64)
ROWS = np.random.default_rng(21)
K, V = (ROWS.standard_normal((TOKENS, 2, dim)).astype(np.float32) for dim in (16, 32))
Q = ROWS.standard_normal((TOKENS, 4, 16)).astype(np.float32)


def create(backend: str, **options: Any) -> kvcore.Cache:
    return kvcore.create_cache(SPEC, backend=backend, **{"max_requests": 3, "max_tokens": 640, **options})


def tell(cache: kvcore.Cache, request: Any, end: int, *, keys: np.ndarray = K, values: np.ndarray = V) -> np.ndarray:
    """The request's next tokens up to ``end``, and what their queries get."""
    start = request.length
    with cache.step({request: end - start}) as step:
        step.layer(0).append_kv(keys[start:end], values[start:end])
        return to_numpy(step.layer(0).attend(Q[start:end])[0])


def store(cache: kvcore.Cache, request: Any, end: int) -> None:
    """The request's next tokens up to ``end``."""
    start = request.length
    with cache.step({request: end - start}) as step:
        step.layer(0).append_kv(K[start:end], V[start:end])


@cache
def digest_at(length: int) -> int:
    """Of a request of the reference that got all its tokens in one step."""
    told = create("reference")
    request = told.admit()
    if length:
        store(told, request, length)
    return told.digest([request])


@cache
def answers() -> np.ndarray:
    told = create("reference")
    return tell(told, told.admit(), TOKENS)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=6)
@given(
    cuts=st.lists(st.integers(1, 70) | st.sampled_from([1, 31, 32, 33, 64]), max_size=6),
    layout=st.sampled_from(["packed", "planar", "tpu_tile", "by_head"]),
    drafts=st.sampled_from([0, 1, 5]),
)
def test_bytes_and_answers_are_those_of_one_step(name, cuts, layout, drafts):
    told, out = create(name, layout=layout, max_draft_tokens=drafts), []
    request = told.admit()
    for count in (*cuts, TOKENS):
        out.append(tell(told, request, min(request.length + count, TOKENS)))
        assert told.digest([request]) == digest_at(request.length)
    np.testing.assert_allclose(np.concatenate(out), answers(), atol=1e-5)


def test_what_a_query_sees_does_not_depend_on_later_tokens(backend):
    other = K.copy()
    other[40:] *= 50
    told = create(backend)
    found = tell(told, told.admit(), TOKENS, keys=other)
    np.testing.assert_allclose(found[:40], answers()[:40], atol=1e-5)
    assert np.abs(found[40:] - answers()[40:]).max() > 0.1


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_every_length_within_the_bound_can_be_gone_back_to_and_none_beyond(backend, drafts):
    told = create(backend, max_draft_tokens=drafts)
    bound = told.plan.rollback_tokens
    assert bound >= drafts
    for length in (64, 65, 97):
        for depth in range(bound + 2):
            request = told.admit()
            for end in (length - 1, length):
                store(told, request, end)
            if depth > bound:
                with pytest.raises(KvcoreError):
                    told.truncate(request, length - depth)
            else:
                told.truncate(request, length - depth)
                assert told.digest([request]) == digest_at(length - depth)
                store(told, request, length + 32)
            assert told.digest([request]) == digest_at(request.length)
            told.release(request)


def test_within_the_open_group_a_long_way_back_is_a_shorter_length():
    told = create("reference", max_draft_tokens=20)
    request = told.admit()
    tell(told, request, 60)
    told.truncate(request, 41)
    assert told.digest([request]) == digest_at(41)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_an_aborted_step_leaves_bytes_and_the_next_one_is_right(backend, count):
    told = create(backend, max_draft_tokens=1)
    request = told.admit()
    tell(told, request, 95)
    step = told.step({request: count})
    step.layer(0).append_kv(K[95 : 95 + count] + 1, V[95 : 95 + count])
    step.abort()
    assert told.digest([request]) == digest_at(95)
    tell(told, request, 100)
    assert told.digest([request]) == digest_at(100)


def test_forks_prefixes_blobs_and_snapshots(backend, tmp_path):
    told = create(backend, prefix="full", layout="by_head")
    ids = list(range(TOKENS))
    request = told.admit(ids)
    with told.step({request: ids[:140]}) as step:
        step.layer(0).append_kv(K[:140], V[:140])
    hit = told.admit(ids)
    assert hit.length == 128
    tell_ids(told, hit, ids[:TOKENS])
    fork = told.fork(request)
    tell_ids(told, fork, ids[:TOKENS])
    assert told.digest([hit]) == told.digest([fork]) == digest_at(TOKENS)
    assert told.digest([request]) == digest_at(140)
    for layout in ("packed", "planar", "tpu_tile"):
        other = create("reference", layout=layout)
        taken = other.import_request(told.export_request(request))
        tell(other, taken, TOKENS)
        assert other.digest([taken]) == digest_at(TOKENS)
    told.save(tmp_path / "saved.kv")
    loaded = kvcore.load(tmp_path / "saved.kv", backend="reference", max_requests=4)
    assert {loaded.digest([one]) for one in loaded.requests} == {digest_at(140), digest_at(TOKENS)}


def tell_ids(told: kvcore.Cache, request: Any, ids: list[int]) -> None:
    start = request.length
    with told.step({request: ids[start:]}) as step:
        step.layer(0).append_kv(K[start : len(ids)], V[start : len(ids)])


def test_a_checkpoint_and_what_is_read_within_a_long_step_have_the_groups_that_it_closes(backend):
    told = create(backend, prefix=kvcore.Periodic(50))
    ids = list(range(TOKENS))
    with told.step({told.admit(): ids[:50]}) as step:
        step.layer(0).append_kv(K[:50], V[:50])
        within, groups = step.layer(0).digest(), step.layer(0).gather_rows("kv")
    hit = told.admit(ids)
    assert hit.length == 50
    assert told.digest([hit]) == digest_at(50)
    with told.step({hit: 0}) as step:
        assert step.layer(0).digest() == within
    assert to_numpy(groups.positions).tolist() == [[0]]


def test_what_is_read_is_the_open_group_exactly_and_closed_ones_to_half_a_code(backend):
    told = create(backend)
    request = told.admit()
    tell(told, request, 70)
    with told.step({request: 0}) as step:
        keys, values, positions = (to_numpy(rows)[0] for rows in step.layer(0).gather_kv())
    assert positions.tolist() == list(range(70))
    bf16 = K[64:70].astype(keys.dtype).view(np.uint32) + 0x7FFF & 0xFFFF0000
    assert np.abs(keys[64:] - bf16.view(np.float32)).max() < 0.01
    spread = np.ptp(K[:64].reshape(2, GROUP, 2, 16), axis=1)
    error = np.abs(keys[:64] - K[:64]).reshape(2, GROUP, 2, 16).max(axis=1)
    assert (error <= 0.51 * spread / 15 + 0.02).all()
    spread = np.ptp(V[:64], axis=2)
    assert (np.abs(values[:64] - V[:64]).max(axis=2) <= 0.51 * spread / 15 + 0.02).all()


def test_a_fault_stays_in_its_channel_and_group_and_is_seen(backend):
    keys, values = K.copy(), V.copy()
    keys[40, 0, 3] = np.nan
    keys[10, 1, 5] = np.inf
    keys[:, 1, 7] = 0
    keys[70, 0, 9] = 1e30
    values[50, 0, 4] = np.nan
    told, whole = create(backend), create(backend)
    request, clean = told.admit(), whole.admit()
    tell(told, request, 128, keys=keys, values=values)
    tell(whole, clean, 128)

    def held(cache, one):
        with cache.step({one: 0}) as step:
            return [to_numpy(rows)[0].copy() for rows in step.layer(0).gather_kv()[:2]]

    (found_keys, found_values), (clean_keys, clean_values) = held(told, request), held(whole, clean)
    faulty = np.zeros(found_keys.shape, bool)
    faulty[32:64, 0, 3] = faulty[0:32, 1, 5] = True
    assert np.array_equal(np.isnan(found_keys), faulty)
    assert (found_keys[:, 1, 7] == 0).all()
    assert found_keys[70, 0, 9] == pytest.approx(1e30, rel=0.01)
    touched = faulty.copy()
    touched[64:96, 0, 9] = touched[:, 1, 7] = True
    assert np.array_equal(found_keys[~touched], clean_keys[~touched])
    of_values = np.zeros(found_values.shape, bool)
    of_values[50, 0, :] = True
    assert np.array_equal(np.isnan(found_values), of_values)
    assert np.array_equal(found_values[~of_values], clean_values[~of_values])


def test_a_step_that_was_not_appended_to_is_refused_by_the_name_of_keys_and_values(backend):
    told = create(backend)
    request = told.admit()
    with pytest.raises(KvcoreError, match="no rows for kv"), told.step({request: 3}):
        pass
    assert request.length == 0


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"storage": "slot"}, "storage"),
        ({"storage": "ring", "window": 64}, "storage"),
        ({"value_format": "int8_row"}, "key_dim"),
        ({"value_format": "nf4_b64"}, "key_dim"),
        ({"value_format": "int4_ch64"}, "format"),
    ],
)
def test_what_cannot_be_coded_over_tokens_is_refused(fields, where):
    with pytest.raises(SpecError, match=where):
        KV(**KEYS, **fields)


def test_rows_of_one_token_are_in_formats_over_channels():
    with pytest.raises(SpecError, match="over channels"):
        kvcore.spec.Window(dim=64, window=8, format="int4_ch32")
    drafts = LayerSpec(kv=KV(**KEYS))
    with pytest.raises(SpecError, match="main layers"):
        CacheSpec(layers=[LayerSpec(kv=KV(key_heads=1, key_dim=16))], draft_layers=[drafts], block_tokens=64)
    with pytest.raises(SpecError, match="multiple of every ratio"):
        CacheSpec(layers=[drafts], block_tokens=48)


def test_bits_of_the_formats():
    bits = {
        name: 8 * FORMATS[name].for_dim(128).row / 128 for name in ("int4_g32", "int4_g64", "int4_ch32", "int4_ch64")
    }
    assert bits == {"int4_g32": 5.0, "int4_g64": 4.5, "int4_ch32": 5.0, "int4_ch64": 4.5}
    assert CODES["uint4"].largest == 15


@pytest.mark.parametrize("window", [None, 7, 45])
def test_one_token_at_a_time_gets_what_all_at_once_get(backend, window):
    # Groups that close under way, one group, none, and a window that begins in one; with and without a sink.
    kv = KV(key_heads=2, key_dim=16, key_format="int4_ch32", value_format="int4_ch32", window=window)
    spec = CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=64)
    out = []
    for name in ("reference", backend):
        told = kvcore.create_cache(spec, backend=name, max_requests=2, max_tokens=256)
        first, second = told.admit(), told.admit()
        found = []
        for tokens, at in ({first: 30, second: 64}, 0), *(({first: 1, second: 1}, 94 + 2 * step) for step in range(5)):
            some = slice(at, at + sum(tokens.values()))
            with told.step(tokens) as step:
                step.layer(0).append_kv(K[some], K[some, ::-1])
                sink = np.linspace(-1, 1, 4, dtype=np.float32) if at % 4 else None
                found += map(to_numpy, step.layer(0).attend(Q[some], sink=sink)[:2])
        out.append(found)
    for mine, wanted in zip(out[1], out[0], strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)


def test_a_fault_of_one_channel_reaches_one_token_at_a_time(backend):
    told = create(backend)
    request = told.admit()
    keys, values = K.copy(), V.copy()
    values[3, 1, 5] = np.nan
    tell(told, request, 64, keys=keys, values=values)
    out = tell(told, request, 65, keys=keys, values=values)[0]
    assert np.isnan(out[2:, :]).any()
    assert np.isfinite(out[:2]).all()
    keys[65, 0, 0] = np.inf
    assert not np.isfinite(tell(told, request, 66, keys=keys, values=values)).all()
