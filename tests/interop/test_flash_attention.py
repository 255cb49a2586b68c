"""Attention through FlashMLA: what it is called with, computed by a stand-in from those arguments alone."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore.backends.torch_triton import flash  # noqa: E402
from kvcore.backends.torch_triton.backend import TorchOps  # noqa: E402
from kvcore.errors import BackendError  # noqa: E402
from kvcore.plan import plan_cache  # noqa: E402
from kvcore.spec import CacheSpec, Entries, LayerSpec, Window  # noqa: E402
from kvcore.step import StepRequest, build_index  # noqa: E402
from tests.support.fake_flashinfer import rows_at  # noqa: E402

HEADS, DIM = 64, 512


@pytest.fixture
def module(monkeypatch):
    """A module called flash_mla that computes what FlashMLA's documentation says, in fp64."""
    found = ModuleType("flash_mla")
    found.calls = 0

    def attend(q, k_cache, table, lengths, dim, metadata, *, softmax_scale, is_fp8_kvcache, indices, attn_sink=None,
               extra_k_cache=None, extra_indices_in_kvcache=None):  # fmt: skip
        assert (table, lengths, dim, metadata, is_fp8_kvcache) == (None, None, DIM, "schedule", True)
        assert all(array.shape[2] % 64 == 0 for array in (indices, extra_indices_in_kvcache) if array is not None)
        found.calls += 1
        out, lse = torch.zeros_like(q), torch.full((len(q), HEADS, 1), torch.inf)
        for token in range(len(q)):
            keys = [rows_at(k_cache, [i for i in indices[token, 0] if i >= 0], flash.FORMAT)]
            if extra_k_cache is not None:
                picks = [i for i in extra_indices_in_kvcache[token, 0] if i >= 0]
                keys.append(rows_at(extra_k_cache, picks, flash.FORMAT))
            k = torch.cat(keys)
            if len(k):
                logits = q[token, 0].double() @ k.T * softmax_scale
                sums = logits.logsumexp(1)
                share = torch.ones_like(sums) if attn_sink is None else torch.sigmoid(sums - attn_sink)
                out[token, 0], lse[token, :, 0] = (logits.softmax(1) @ k * share[:, None]).to(q.dtype), sums
        return out, lse

    found.flash_mla_with_kvcache = attend
    found.get_mla_metadata = lambda: ("schedule", None)
    monkeypatch.setitem(sys.modules, "flash_mla", found)
    flash.metadata.cache_clear()
    return found


@pytest.mark.parametrize("entries", ["picks", "all", ""], ids=["window and picks", "every entry", "window alone"])
def test_attention_equals_the_plain_verb(module, entries):
    layer = {"window": Window(dim=DIM, window=6, rows=9)}
    if entries:
        layer["entries"] = Entries(dim=DIM, ratio=4)
    plan = plan_cache(CacheSpec(layers=[LayerSpec(**layer)], block_tokens=16), max_requests=4, max_tokens=128)
    ops = TorchOps(plan)
    pools = ops.allocate()
    rng = np.random.default_rng(5)
    for name, pool in pools.items():
        pool.copy_(torch.from_numpy(rng.integers(96, 120, pool.shape, np.uint8)))
        assert name
    rows = [StepRequest(slot=2, start=37, new=3, blocks=(5, 1, 3)), StepRequest(slot=0, start=2, new=1, blocks=(4,))]
    index = ops.index(build_index(rows, max_blocks=3, pad_tokens=5, pad_requests=3))
    q = torch.from_numpy(rng.standard_normal((5, HEADS, DIM), np.float32)).bfloat16()
    selected = torch.from_numpy(rng.permuted(np.tile(np.arange(-2, 10), (5, 1)), axis=1).astype(np.int32))
    selected = selected if entries == "picks" else None
    sink = torch.from_numpy(rng.standard_normal(HEADS, np.float32))
    served = flash.served(ops, 0)
    assert flash.fits(served, index, q, selected, None)
    got = flash.attend(ops, pools, served, index, q, selected, sink, 0.05)
    want = ops.attend(pools, 0, index, q.float(), selected, sink=sink, scale=0.05)
    torch.testing.assert_close(got.out.float(), want.out, rtol=2**-7, atol=2**-7 * float(want.out.abs().max()))
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    assert module.calls == 1


@pytest.mark.parametrize(
    ("heads", "dtype", "format", "own"),
    [
        pytest.param(16, torch.bfloat16, "v4_584", None, id="16 heads"),
        pytest.param(64, torch.float32, "v4_584", None, id="fp32 queries"),
        pytest.param(64, torch.bfloat16, "bf16", None, id="another format"),
        pytest.param(64, torch.bfloat16, "v4_584", torch.zeros(1, DIM), id="rows that the ring does not hold yet"),
    ],
)
def test_what_does_not_fit_stays_with_the_own_kernels(heads, dtype, format, own):
    layer = LayerSpec(window=Window(dim=DIM, window=6, format=format))
    served = flash.served(TorchOps(plan_cache(CacheSpec(layers=[layer]), max_requests=1)), 0)
    if format != "v4_584":
        assert served == "FlashMLA reads packed v4_584 rows"
        return
    assert not flash.fits(served, None, torch.zeros(1, heads, DIM, dtype=dtype), None, own)


def test_lists_of_every_entry_that_would_be_long_stay_with_the_own_kernels():
    served = flash.Served("window", 9, 6, "entries", 64, 4)
    q = torch.zeros(8, HEADS, DIM, dtype=torch.bfloat16)
    for columns, fits in ((1 << 13, True), ((1 << 13) + 1, False)):
        index = SimpleNamespace(block_table=torch.zeros(1, columns, dtype=torch.int32))
        assert flash.fits(served, index, q, None, None) == fits
        assert flash.fits(served, index, q, torch.zeros(8, 5, dtype=torch.int32), None)


@pytest.mark.parametrize("wanted", ["flash_mla", "cutlass"], ids=["not installed", "no such choice"])
def test_a_choice_that_cannot_be_met_is_refused(monkeypatch, wanted):
    monkeypatch.setenv("KVCORE_ATTENTION", wanted)
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    with pytest.raises(BackendError, match="KVCORE_ATTENTION"):
        flash.chosen("cpu")


def of_2026_09_30(q, k_cache, *, enable_batch_invariant=False): ...


def of_a_fork(q, k_cache, *, enable_batch_invariant=False, use_legacy=False): ...


@pytest.mark.parametrize(
    ("function", "legacy", "usable"),
    [
        pytest.param(of_2026_09_30, None, False, id="reads V4.1 rows alone"),
        pytest.param(of_a_fork, False, False, id="a fork without its older kernels"),
        pytest.param(of_a_fork, True, True, id="a fork with them"),
    ],
)
def test_a_release_without_kernels_for_the_rows_is_not_used(module, monkeypatch, function, legacy, usable):
    module.flash_mla_with_kvcache, module.has_legacy = function, lambda: legacy
    monkeypatch.setenv("KVCORE_ATTENTION", "flash_mla")
    if usable:
        assert flash.chosen("cpu") == "flash_mla"
    else:
        with pytest.raises(BackendError, match="kernels"):
            flash.chosen("cpu")


def test_the_older_kernels_of_a_fork_are_asked_for(module):
    attend, asked = module.flash_mla_with_kvcache, []

    def of_fork(*arguments, use_legacy=False, **options):
        asked.append(use_legacy)
        return attend(*arguments, **options)

    module.flash_mla_with_kvcache = of_fork
    test_attention_equals_the_plain_verb(module, "picks")
    assert asked == [True]


def test_plain_operations_can_be_forced(monkeypatch):
    monkeypatch.setenv("KVCORE_ATTENTION", "torch")
    assert flash.chosen("cpu") == "torch"


def test_triton_is_the_choice_where_flash_mla_is_missing(monkeypatch):
    monkeypatch.delenv("KVCORE_ATTENTION", raising=False)
    assert flash.chosen("cpu") == "triton"
