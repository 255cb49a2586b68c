"""Attention to coded rows on the CPU in C: what torch's operations give of the same rows, and when it is theirs."""

import shutil
import zlib

import numpy as np
import pytest
import torch

import kvcore
from kvcore import native
from kvcore.backends.torch_triton import cpu_coded
from kvcore.spec import KV, CacheSpec, LayerSpec

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: torch attends")

FORMATS = {
    "int8_row": ("int8_row", "int8_row"),
    "fp8_row": ("fp8_row", "fp8_row"),
    "nf4_b64": ("nf4_b64", "nf4_b64"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "int4_g32": ("int4_g32", "int4_g32"),
    "per_token_head": ("int8_per_token_head", "fp8_per_token_head"),
    "keys alone": ("int8_row", "bf16"),
    "values alone": ("fp32", "nf4_b64"),
}
SCENES = {
    "blocks": ({}, "packed"),
    "planes": ({}, "planar"),
    "slots": ({"storage": "slot"}, "by_head"),
    "a window": ({"window": 50}, "by_head"),
    "a chunk": ({"chunk": 48}, "packed"),
}
LENGTHS = 70, 131, 2
GROUP, HEADS, DIM = 3, 2, 64


def torch_attends(*_, **__):
    """In the place of C."""


@pytest.fixture(autouse=True)
def any_is_worth_it(monkeypatch):
    monkeypatch.setattr(cpu_coded, "WORTH", 1)
    assert cpu_coded.native.wait() is not None


@pytest.fixture
def seed(request):
    return torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))


def cache_of(formats, options, layout):
    keys, values = formats
    kv = KV(key_heads=HEADS, key_dim=DIM, key_format=keys, value_format=values, **options)
    spec = CacheSpec(layers=[LayerSpec(kv=kv)])
    cache = kvcore.create_cache(spec, backend="torch_triton", max_requests=4, max_tokens=2048, layout=layout)
    for pool in cache.pools.values():
        pool.fill_(0xA5)
    return cache


def rows(seed, tokens, heads=HEADS):
    return torch.randn(tokens, heads, DIM, generator=seed)


def filled(cache, seed, lengths=LENGTHS):
    requests = [cache.admit() for _ in lengths]
    # The first slot is one that was used before.
    cache.release(requests[0])
    requests[0] = cache.admit()
    with cache.step(dict(zip(requests, lengths, strict=True))) as step:
        step.layer(0).append_kv(rows(seed, sum(lengths)), rows(seed, sum(lengths)))
    return requests


def both(cache, requests, seed, monkeypatch, dtype=torch.float32, **options):
    """(what C gives, what torch's operations give) of a token of each request."""
    gave = []
    attend = cpu_coded.attend
    count = len(requests)
    with cache.step(dict.fromkeys(requests, 1)) as step:
        layer = step.layer(0)
        layer.append_kv(rows(seed, count), rows(seed, count))
        q = rows(seed, count, GROUP * HEADS).to(dtype)
        monkeypatch.setattr(cpu_coded, "attend", lambda *a, **k: gave.append(attend(*a, **k)) or gave[-1])
        mine = layer.attend(q, **options)
        monkeypatch.setattr(cpu_coded, "attend", torch_attends)
        theirs = layer.attend(q, **options)
        monkeypatch.setattr(cpu_coded, "attend", attend)
    return gave[0], mine, theirs


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("formats", FORMATS)
def test_it_is_what_torch_gives(formats, scene, seed, monkeypatch):
    cache = cache_of(FORMATS[formats], *SCENES[scene])
    requests = filled(cache, seed)
    sink = torch.randn(GROUP * HEADS, generator=seed)
    for step in range(3):
        found, mine, theirs = both(cache, requests, seed, monkeypatch, sink=sink if step else None)
        assert found is not None
        torch.testing.assert_close(mine.out, theirs.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(mine.lse, theirs.lse, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "formats",
    [("int4_ch32", "int4_ch32"), ("int4_ch32", "int4_g32"), ("int4_ch64", "nf4_b64"), ("mxfp4", "int4_ch32")],
    ids=" ".join,
)
@pytest.mark.parametrize("layout", ["packed", "planar", "by_head"])
def test_groups_of_tokens_are_what_torch_gives(formats, layout, seed, monkeypatch):
    """Requests of no whole group, of some, of groups in several blocks, and of one that ends with the step."""
    cache = cache_of(formats, {}, layout)
    requests = filled(cache, seed, (191, 2, 300, 64))
    gave, attend = [], cpu_coded.attend_groups
    monkeypatch.setattr(cpu_coded, "attend_groups", lambda *a, **k: gave.append(attend(*a, **k)) or gave[-1])
    for step in range(2):
        with cache.step(dict.fromkeys(requests, 1)) as opened:
            layer, count = opened.layer(0), len(requests)
            layer.append_kv(rows(seed, count), rows(seed, count))
            q = rows(seed, count, GROUP * HEADS)
            sink = torch.randn(GROUP * HEADS, generator=seed) if step else None
            mine = layer.attend(q, sink=sink)
            with monkeypatch.context() as patch:
                patch.setattr(cpu_coded, "attend_groups", torch_attends)
                theirs = layer.attend(q, sink=sink)
        torch.testing.assert_close(mine.out, theirs.out, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(mine.lse, theirs.lse, atol=3e-6, rtol=1e-6)
    assert len(gave) == 2
    assert None not in gave


def test_a_group_with_a_number_that_is_none_is_torch_s_affair(seed, monkeypatch):
    cache = cache_of(("int4_ch32", "int4_g32"), {}, "packed")
    request = cache.admit()
    k, v = rows(seed, 70), rows(seed, 70)
    k[3, 0, 5] = torch.nan
    with cache.step({request: 70}) as step:
        step.layer(0).append_kv(k, v)
    with cache.step({request: 1}) as step:
        layer = step.layer(0)
        layer.append_kv(rows(seed, 1), rows(seed, 1))
        q = rows(seed, 1, GROUP * HEADS)
        mine = layer.attend(q)
        monkeypatch.setattr(cpu_coded, "attend_groups", torch_attends)
        theirs = layer.attend(q)
    torch.testing.assert_close(mine.out, theirs.out, atol=3e-6, rtol=1e-5, equal_nan=True)
    assert mine.out[0, :GROUP].isnan().all()
    assert mine.out[0, GROUP:].isfinite().all()


def test_every_number_of_eight_bits_is_what_torch_decodes():
    """As values of one row, which is attended to alone."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.where((codes & 127) == 127, 0, codes).view(torch.float8_e4m3fn).float()
    kv = KV(key_heads=1, key_dim=DIM, value_dim=256, key_format="fp32", value_format="fp8_row")
    cache = kvcore.create_cache(
        CacheSpec(layers=[LayerSpec(kv=kv)]), backend="torch_triton", max_requests=1, max_tokens=64
    )
    with cache.step({cache.admit(): 1}) as step:
        step.layer(0).append_kv(torch.zeros(1, 1, DIM), values.reshape(1, 1, 256))
        found = step.layer(0).attend(torch.zeros(1, 1, DIM)).out
    assert torch.equal(found.reshape(256), values)


def test_threads_share_a_call(seed, monkeypatch):
    monkeypatch.setattr(cpu_coded, "ALONE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cache = cache_of(FORMATS["int8_row"], *SCENES["blocks"])
    found, mine, theirs = both(cache, filled(cache, seed), seed, monkeypatch, dtype=torch.bfloat16)
    assert found is not None
    torch.testing.assert_close(mine.out, theirs.out, atol=1e-2, rtol=1e-2)


def test_a_row_that_is_not_a_number_is_torch_s_affair(seed, monkeypatch):
    cache = cache_of(FORMATS["int8_row"], *SCENES["blocks"])
    requests = filled(cache, seed)
    k, v = rows(seed, 3), rows(seed, 3)
    k[1, 0, 3] = np.nan
    with cache.step(dict.fromkeys(requests, 1)) as step:
        step.layer(0).append_kv(k, v)
    found, mine, theirs = both(cache, requests, seed, monkeypatch)
    assert found is None
    torch.testing.assert_close(mine.out, theirs.out, equal_nan=True)
    assert mine.out[1, :GROUP].isnan().all()
    assert mine.out[[0, 2]].isfinite().all()


def test_an_infinite_key_that_weighs_nothing_changes_nothing(seed, monkeypatch):
    """Its numbers lie behind those of the last rows' values, which are smaller."""
    kv = KV(key_heads=HEADS, key_dim=DIM, value_dim=DIM // 2, key_format="fp32", value_format="nf4_b64")
    cache = kvcore.create_cache(
        CacheSpec(layers=[LayerSpec(kv=kv)]), backend="torch_triton", max_requests=4, max_tokens=2048
    )
    requests = [cache.admit() for _ in LENGTHS]
    with cache.step(dict(zip(requests, LENGTHS, strict=True))) as step:
        step.layer(0).append_kv(rows(seed, sum(LENGTHS)), rows(seed, sum(LENGTHS))[..., : DIM // 2])
    k, q = rows(seed, len(LENGTHS)), rows(seed, len(LENGTHS), GROUP * HEADS)
    k[..., -3], q[..., -3] = torch.inf, -1
    attend, gave = cpu_coded.attend, []
    with cache.step(dict.fromkeys(requests, 1)) as step:
        layer = step.layer(0)
        layer.append_kv(k, rows(seed, len(LENGTHS))[..., : DIM // 2])
        monkeypatch.setattr(cpu_coded, "attend", lambda *a, **k: gave.append(attend(*a, **k)) or gave[-1])
        mine = layer.attend(q)
        monkeypatch.setattr(cpu_coded, "attend", torch_attends)
        theirs = layer.attend(q)
    assert gave[0] is not None
    assert mine.out.isfinite().all()
    torch.testing.assert_close(mine.out, theirs.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(mine.lse, theirs.lse, atol=2e-6, rtol=1e-6)


def test_padding_at_the_left_is_not_seen(seed, monkeypatch):
    cache = cache_of(FORMATS["nf4_b64"], *SCENES["slots"])
    requests = filled(cache, seed)
    padding = dict(zip(requests, (5, 131, 0), strict=True))
    attend, gave = cpu_coded.attend, []
    with cache.step(dict.fromkeys(requests, 1), left_padding=padding) as step:
        layer = step.layer(0)
        layer.append_kv(rows(seed, 3), rows(seed, 3))
        q = rows(seed, 3, GROUP * HEADS)
        monkeypatch.setattr(cpu_coded, "attend", lambda *a, **k: gave.append(attend(*a, **k)) or gave[-1])
        mine = layer.attend(q)
        monkeypatch.setattr(cpu_coded, "attend", torch_attends)
        theirs = layer.attend(q)
    assert gave[0] is not None
    torch.testing.assert_close(mine.out, theirs.out, atol=2e-6, rtol=1e-5)


def test_few_numbers_and_several_tokens_are_torch_s(seed, monkeypatch):
    cache = cache_of(FORMATS["int8_row"], *SCENES["blocks"])
    requests = filled(cache, seed)
    monkeypatch.setattr(cpu_coded, "WORTH", 1 << 40)
    assert both(cache, requests, seed, monkeypatch)[0] is None
    monkeypatch.setattr(cpu_coded, "WORTH", 1)
    gave, attend = [], cpu_coded.attend
    monkeypatch.setattr(cpu_coded, "attend", lambda *a, **k: gave.append(attend(*a, **k)) or gave[-1])
    with cache.step(dict.fromkeys(requests, 2)) as step:
        step.layer(0).append_kv(rows(seed, 6), rows(seed, 6))
        step.layer(0).attend(rows(seed, 6, GROUP * HEADS))
    assert gave == [None]


@pytest.mark.parametrize(
    ("keys", "values", "value_dim", "whole"),
    [
        ("int4_ch32", "bf16", 16, True),
        ("int4_ch32", "bf16", 12, False),
        ("int4_ch32", "int4_ch32", 12, False),
        ("int8_row", "bf16", 12, False),
        ("int8_row", "int8_row", 24, True),
    ],
)
def test_tokens_of_eight_numbers_at_a_time_are_decoded_in_c(keys, values, value_dim, whole):
    kv = KV(key_heads=HEADS, key_dim=DIM, value_dim=value_dim, key_format=keys, value_format=values)
    assert [cpu_coded.fits(part.format, kv.ratio) for part in kv.parts] == [True, whole]


def test_a_wrong_function_is_never_used():
    assert native.Native(lambda _: False, "attend").wait() is None
