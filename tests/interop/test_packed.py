"""Many requests through a model of transformers, packed into steps: the logits are the model's own."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from kvcore.backends.torch_triton import cpu_views
from kvcore.errors import BackendError, OutOfBlocks, ShapeError, SpecError, StepError
from kvcore.interop.transformers import PackedModel, packed
from tests.support import tiny_models as models

MODELS = models.llama, models.sliding, models.qwen2, models.gemma3, models.gpt_oss, models.llama4
CUTS = [(13, 1), (1, 9), (1, 1), (20, 1), (1, 20), (4, 8)]
"""New tokens of two requests, step by step: chunks and single tokens side by side."""


def step_by_step(model, cache, ids, cuts=CUTS):
    """Logits of two requests that are stepped together."""
    requests = [cache.admit(row) for row in ids]
    found = [[], []]
    for counts in cuts:
        pairs = list(zip(requests, ids, counts, strict=True))
        batch = {request: row[request.length :][:count] for request, row, count in pairs}
        parts = model.logits(cache, batch, counts).clone().split(counts)
        for mine, part in zip(found, parts, strict=True):
            mine.append(part)
    return [torch.cat(parts) for parts in found]


def own(model, ids):
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0] for row in ids]


@pytest.mark.parametrize("make", MODELS)
def test_logits_are_the_models_own(make):
    model, ids = make(), models.token_ids(2, 40).tolist()
    wanted, before = own(model, ids), model.config._attn_implementation
    ran = PackedModel(model)
    for backend in ("torch_triton", "reference"):
        cache = ran.create_cache(backend=backend, block_tokens=8, max_requests=2, max_tokens=128)
        for mine, theirs in zip(step_by_step(ran, cache, ids), wanted, strict=True):
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert model.config._attn_implementation == before
    assert all(torch.equal(a, b) for a, b in zip(own(model, ids), wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_models_and_formats_of_their_own(dtype):
    ran = PackedModel(model := models.multi_head(dtype))
    ids = models.token_ids(2, 40).tolist()
    for formats in (None, {"key": "int8_row", "layers[1]": "fp32"}):
        found = step_by_step(ran, ran.create_cache(formats, max_requests=2, max_tokens=512), ids)
        for mine, theirs in zip(found, own(model, ids), strict=True):
            assert mine.dtype == dtype
            assert (mine - theirs).abs().max() <= 0.05 * theirs.abs().max()


def test_formats_over_tokens_do_not_depend_on_who_is_beside():
    """Groups close where positions say, whatever the steps; compared with one request at a time."""
    ran = PackedModel(models.multi_head())
    ids = models.token_ids(2, 40).tolist()
    options = {"block_tokens": 32, "max_requests": 2, "max_tokens": 128}
    both = step_by_step(ran, ran.create_cache({"key": "int4_ch32"}, **options), ids)
    cache = ran.create_cache({"key": "int4_ch32"}, **options)
    for row, mine in zip(ids, both, strict=True):
        request = cache.admit()
        cuts = [counts[ids.index(row)] for counts in CUTS]
        parts = [ran.logits(cache, {request: row[request.length :][:count]}, [count]).clone() for count in cuts]
        assert (torch.cat(parts) - mine).abs().max() <= 1e-4 * mine.abs().max()
    own_rows = own(ran.model, ids)
    assert all(
        (mine - theirs).abs().max() <= 0.4 * theirs.abs().max() for mine, theirs in zip(both, own_rows, strict=True)
    )


def test_wanted_rows_and_a_prefix():
    ran = PackedModel(model := models.multi_head())
    cache = ran.create_cache(block_tokens=8, max_requests=2, max_tokens=128, prefix="full")
    (row, _), ((whole, _)) = (ids := models.token_ids(2, 40).tolist()), own(model, ids)
    first = cache.admit(row)
    assert ran.logits(cache, {first: row[:20]}, [0]).shape == (0, models.VOCABULARY)
    torch.testing.assert_close(ran.logits(cache, {first: row[20:]}), whole[-1:])
    again = cache.admit(row)
    assert again.cached_tokens == 32
    torch.testing.assert_close(ran.logits(cache, {again: row[32:]}, [8]), whole[32:])


def test_what_fails_changes_nothing():
    ran = PackedModel(model := models.multi_head())
    cache = ran.create_cache(block_tokens=8, max_requests=2, max_tokens=32)
    one, two = cache.admit(), cache.admit()
    ran.logits(cache, {one: range(9)})
    for error, batch, last in [
        (OutOfBlocks, {one: [1] * 7, two: [1] * 17}, None),
        (ShapeError, {one: [1, 2]}, [3]),
        (ShapeError, {one: [1, 2]}, [1, 1]),
        (ShapeError, {one: [1, 2]}, [True]),
        (ShapeError, {one: ["a"]}, None),
        (IndexError, {one: [models.VOCABULARY]}, None),
    ]:
        digest = cache.digest()
        with pytest.raises(error):
            ran.logits(cache, batch, last)
        assert (cache.digest(), one.length, two.length, cache.free_blocks) == (digest, 9, 0, 2)
        assert model.config._attn_implementation == "sdpa"
    with cache.step({one: 2}) as step:
        with pytest.raises(ShapeError, match="2"):
            ran.forward(step, [1])
        assert ran.forward(step, [1, 2]).shape == (2, models.VOCABULARY)


def test_what_a_cache_does_not_do_is_refused():
    for make in (models.deepseek_v3, models.deepseek_v4):
        with pytest.raises(SpecError, match="classic attention"):
            PackedModel(make()).spec()
    with pytest.raises(SpecError, match="without config"):
        PackedModel(object())
    with pytest.raises(SpecError, match="float64"):
        PackedModel(models.llama(torch.float64))
    for sizes in ([1], [8, True], ["a"]):
        with pytest.raises(ShapeError, match="captured"):
            PackedModel(models.llama(), captured=sizes)
    config = Gemma2Config(**models.CLASSIC, head_dim=8, attn_logit_softcapping=10.0)
    ran = PackedModel(Gemma2ForCausalLM(config).eval())
    cache = ran.create_cache(max_requests=1, max_tokens=256)
    with pytest.raises(BackendError, match="softcap"):
        ran.logits(cache, {cache.admit(): [1]})
    model = models.llama()
    model.config._attn_implementation = packed.NAME
    with pytest.raises(StepError, match="outside of a step"):
        model(torch.tensor([[1]]))


@pytest.mark.parametrize("make", [models.llama, models.sliding, models.gpt_oss], ids=["full", "sliding", "sinks"])
def test_padded_steps_as_a_graph_runs_them(make, monkeypatch):
    """The forward of a captured step, run by hand where there is no GPU: it reads the step's numbers anew."""
    made = []

    def captured(run):
        out = run()
        made.append(run)
        return SimpleNamespace(replay=lambda: out.copy_(run())), out

    monkeypatch.setattr(packed, "captured", captured)
    # The CPU remembers the numbers of an index that is not written to.
    monkeypatch.setattr(cpu_views.Memory, "of", lambda _, index: cpu_views.HostStep(index))
    monkeypatch.setattr(PackedModel, "captures", True)
    ran = PackedModel(model := make(), captured=[4, 16])
    cache = ran.create_cache(block_tokens=8, max_requests=2, max_tokens=128, max_draft_tokens=1)
    ids = models.token_ids(2, 40).tolist()
    cuts = [(13, 1), (1, 1), (1, 10), (1, 1), (2, 1), (2, 2), *[(1, 1)] * 20, (0, 4)]
    assert [sum(counts) for counts in zip(*cuts, strict=True)] == [40, 40]
    for mine, theirs in zip(step_by_step(ran, cache, ids, cuts), own(model, ids), strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert len(made) == 2


def test_prepared_products_are_the_models_as_long_as_its_weights_are():
    model, ids = models.llama(), models.token_ids(2, 40).tolist()
    ran = PackedModel(model, prepared=True)
    cache = ran.create_cache(block_tokens=8, max_requests=2, max_tokens=128)
    wanted = own(model, ids)
    for mine, theirs in zip(step_by_step(ran, cache, ids), wanted, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(own(model, ids), wanted, strict=True))  # elsewhere it is what it was
    linear = next(layer for layer in model.modules() if type(layer) is torch.nn.Linear)
    for change in (
        lambda: linear.weight.mul_(2),
        lambda: setattr(linear, "weight", torch.nn.Parameter(linear.weight.detach().flip(0))),
        lambda: linear.__dict__.update(forward=lambda x: x.new_zeros(*x.shape[:-1], linear.out_features)),
    ):
        with torch.no_grad():
            change()
        cache = ran.create_cache(block_tokens=8, max_requests=1, max_tokens=64)
        found = ran.logits(cache, {cache.admit(): ids[0]}, [len(ids[0])])
        theirs = own(model, ids[:1])[0]
        assert (found - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        assert not torch.allclose(theirs, wanted[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_cannot_be_prepared_is_refused(dtype):
    with pytest.raises(BackendError, match="fp32 on a CPU"):
        PackedModel(models.llama(dtype), prepared=True)
