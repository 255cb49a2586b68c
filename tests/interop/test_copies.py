"""A cache copied, saved and loaded: independent of the one it came from, or refused in words that say what to do."""

import copy
import io
import pickle

import pytest
import torch

from kvcore.errors import RequestError, SnapshotError
from kvcore.interop.transformers import KVCache
from tests.support import tiny_models as models
from tests.support.rows_by_hand import held, update

STATIC = [pytest.param(False, id="growing"), pytest.param(True, id="static")]
KINDS = [
    pytest.param(models.llama, {}, id="full"),
    pytest.param(models.llama, {"static": True}, id="full, static"),
    pytest.param(models.llama, {"beams": 2}, id="blocks"),
    pytest.param(models.llama, {"formats": "int8_row"}, id="int8"),
    pytest.param(models.gemma3, {}, id="mixed"),
    pytest.param(models.gemma3, {"max_draft_tokens": 3}, id="mixed, drafts"),
    pytest.param(models.deepseek_v3, {}, id="latent"),
    pytest.param(models.deepseek_v3, {"static": True}, id="latent, static"),
    pytest.param(models.deepseek_v32, {}, id="indexed"),
    pytest.param(models.deepseek_v4, {}, id="compressed"),
]


def generated(model, ids, cache, new=5):
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, cache=cache, min_new_tokens=new, max_new_tokens=new, **options)


def prefilled(model, ids, **options):
    cache = KVCache(model, batch=len(ids), max_length=40, **options)
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_two_questions_about_one_prompt(make, options, backend):
    """The recipe of transformers' documentation: the prompt once, a copy for every question."""
    model, prompt = make(), models.token_ids(2, 21)[:, :11]
    questions = [torch.cat([prompt, models.token_ids(2, 20)[:, start : start + 4]], dim=1) for start in (3, 13)]
    original = prefilled(model, prompt, backend=backend, **options)
    before = original.kv.digest(original.requests)
    for question in questions:
        copied = copy.deepcopy(original)
        assert copied.kv.digest(copied.requests) == before
        fresh = prefilled(model, prompt, backend=backend, **options)
        assert torch.equal(generated(model, question, copied), generated(model, question, fresh))
        assert copied.kv.digest(copied.requests) == fresh.kv.digest(fresh.requests)
        assert (original.length, original.kv.digest(original.requests)) == (11, before)


@pytest.mark.parametrize("static", STATIC)
def test_neither_a_copy_nor_its_original_is_written_by_the_other(static, backend):
    original = KVCache(models.llama(), batch=1, max_length=8, static=static, backend=backend)
    update(original, 1, 3)
    copied = copy.deepcopy(original)
    assert original.number != copied.number
    assert held(update(copied, 7, 1)[0])[:4] == [1, 2, 3, 7]
    assert held(update(original, 4, 2)[0])[:5] == [1, 2, 3, 4, 5]
    assert (original.length, copied.length) == (5, 4)
    copied.crop(-2)
    assert held(original.layers[1].keys)[:5] == [1, 2, 3, 4, 5]
    original.reset()
    assert held(copied.layers[2].values)[:2] == [-1, -2]


def test_a_copy_keeps_settings_room_and_what_can_be_undone():
    original = KVCache(models.sliding(), batch=2, max_length=40, max_draft_tokens=3, zero_copy=False, check=True)
    update(original, 1, 20, rows=2)
    copied = copy.deepcopy({"cache": original, "again": original})
    assert copied["cache"] is copied["again"]
    copied = copied["cache"]
    for name in ("rows", "max_length", "static", "zero_copy", "can_undo", "dtype", "nbytes", "batch_size", "length"):
        assert getattr(copied, name) == getattr(original, name), name
    for cache in (copied, original):
        cache.crop(-3)
        assert held(update(cache, 90, 1, rows=2)[0]) == [*range(11, 18), 90]
    assert original.kv.digest(original.requests) == copied.kv.digest(copied.requests)


def test_an_empty_cache_is_copied_empty():
    copied = copy.deepcopy(KVCache(models.llama(), batch=2, max_length=8))
    assert (copied.length, copied.batch_size, copied.kv.free_slots) == (0, -1, 2)
    update(copied, 1, 8)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        pytest.param(pickle.dumps, "save", id="pickle"),
        pytest.param(lambda cache: torch.save({"cache": cache}, io.BytesIO()), "save", id="torch.save"),
        pytest.param(copy.copy, "deepcopy", id="copy.copy"),
    ],
)
def test_other_ways_to_copy_say_which_to_take(way, said):
    with pytest.raises(SnapshotError, match=said):
        way(KVCache(models.llama(), batch=1, max_length=8))


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_saved_rows_go_on_in_another_cache(make, options, tmp_path, backend):
    model, ids = make(), models.token_ids(2, 25)
    first = prefilled(model, ids[:, :19], **options)
    first.save(tmp_path / "rows")
    second = KVCache(model, batch=3, max_length=64, backend=backend, **options)
    second.load(tmp_path / "rows")
    assert (second.length, second.batch_size) == (19, 2)
    assert second.kv.digest(second.requests) == first.kv.digest(first.requests)
    for layer, other in zip(first.layers, second.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :8], other.keys[:, :, :8])
    assert torch.equal(generated(model, ids, second), generated(model, ids, first))


def test_loading_is_refused_whole(tmp_path):
    model = models.llama()
    saved = KVCache(model, batch=2, max_length=20)
    update(saved, 1, 9, rows=2)
    saved.save(tmp_path / "rows")
    cases = [
        ({"batch": 1, "max_length": 20}, RequestError, "at most 1 rows"),
        ({"batch": 2, "max_length": 8}, RequestError, "of 8 tokens"),
        ({"batch": 2, "max_length": 20, "formats": "int8_row"}, SnapshotError, "key_format"),
    ]
    for options, kind, said in cases:
        cache = KVCache(model, **options)
        with pytest.raises(kind, match=said):
            cache.load(tmp_path / "rows")
        assert (cache.length, cache.kv.free_slots) == (0, cache.rows)
    cache = KVCache(model, batch=2, max_length=20)
    update(cache, 50, 1)
    with pytest.raises(RequestError, match=r"reset\(\)"):
        cache.load(tmp_path / "rows")
    assert held(cache.layers[0].keys) == [50]
    cache.kv.truncate(cache.requests[0], 0)
    uneven = [saved.kv.fork(saved.requests[0])] if saved.kv.free_slots else saved.requests[1:]
    saved.kv.truncate(uneven[0], 4)
    saved.save(tmp_path / "uneven")
    with pytest.raises(SnapshotError, match=r"rows of \[4, 9\] tokens"):
        KVCache(model, batch=2, max_length=20).load(tmp_path / "uneven")
    KVCache(model, batch=2, max_length=20).save(tmp_path / "nothing")
    cache = KVCache(model, batch=2, max_length=20)
    cache.load(tmp_path / "nothing")
    assert cache.batch_size == -1


@pytest.mark.parametrize("make", [models.gemma3, models.deepseek_v3], ids=["mixed", "latent"])
def test_a_prompt_is_taken_over_by_later_ones(make):
    """Cut by blocks, and whole: with windows and without, to the last token."""
    model, ids = make(), models.token_ids(1, 25)
    other = torch.cat([ids[:, :13], ids[:, 13:].flip(1)], 1)
    cache = KVCache(model, batch=1, max_length=40, block_tokens=4, prefix="full", prefix_tokens=128)
    assert cache.admit(ids) == 0
    generated(model, ids, cache)
    cache.reset()
    for prompt, taken in ((torch.cat([ids, ids[:, :3]], 1), 25), (other, 12)):
        assert cache.admit(prompt) == taken
        assert torch.equal(generated(model, prompt, cache), generated(model, prompt, None))
        cache.reset()
