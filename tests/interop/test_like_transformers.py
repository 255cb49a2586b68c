"""The same calls on transformers' own caches and on ours: the same answers, or a typed refusal that changes nothing."""

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicSlidingWindowLayer, StaticLayer

from kvcore.errors import BackendError, RequestError, ShapeError, StepError
from kvcore.interop.transformers import KVCache
from tests.support import tiny_models as models
from tests.support.rows_by_hand import held, update

KINDS = {
    "full": models.llama,
    "sliding": models.sliding,
    "mixed": models.gemma3,
    "chunked": models.llama4,
    "latent": models.deepseek_v3,
    "indexed": models.deepseek_v32,
    "compressed": models.deepseek_v4,
}
STATIC = ("full", "sliding", "mixed", "latent")
ROWS = 3


class Pair:
    """Their cache and ours, given the same tokens."""

    def __init__(self, kind, *, static=False, backend="torch_triton", rows=ROWS, **options):
        self.model = KINDS[kind]()
        self.static = static
        # A static mask of another width is another order of sums.
        self.tolerance = 1e-4 if static else 1e-5
        if static:
            self.theirs = StaticCache(config=self.model.config, max_cache_len=24)
        else:
            self.theirs = DynamicCache(config=self.model.config)
        options = {"batch": rows, "max_length": 24, "static": static, "backend": backend, **options}
        self.ours = KVCache(self.model, **options)

    def feed(self, first, new, rows=ROWS):
        ids = models.token_ids(8, 40)[:rows, first : first + new]
        with torch.no_grad():
            logits = [self.model(ids, cache=cache).logits for cache in (self.theirs, self.ours)]
        assert torch.allclose(*logits, atol=self.tolerance)

    def call(self, verb, *args):
        for cache in (self.theirs, self.ours):
            getattr(cache, verb)(*args)

    def check(self):
        """All that both can be asked."""
        theirs, ours = self.theirs, self.ours
        assert len(ours) == len(theirs)
        assert (ours.is_sliding, ours.is_linear, ours.is_dummy) == (
            theirs.is_sliding,
            theirs.is_linear,
            theirs.is_dummy,
        )
        assert ours.is_compileable == theirs.is_compileable
        tokens = int(theirs.get_seq_length())
        for number, (their, our) in enumerate(zip(theirs.layers, ours.layers, strict=True)):
            assert int(theirs.get_seq_length(number)) == ours.get_seq_length(number) == our.get_seq_length() == tokens
            assert ours.get_query_offset(number) == tokens
            # Their static windows have sizes that change with the length.
            for new in () if self.static and our.is_sliding else (1, 2, 5):
                assert ours.get_mask_sizes(new, number) == theirs.get_mask_sizes(new, number)
            if not tokens:
                assert our.keys is our.values is None
                continue
            assert our.is_initialized == their.is_initialized == ours.is_initialized
            for ourside, theirside in ((our.keys, their.keys), (our.values, their.values)):
                assert (ourside.dtype, ourside.shape) == (theirside.dtype, theirside.shape)
                # They leave behind what they crop from a static layer.
                end = tokens if self.static and not our.is_sliding else None
                assert torch.allclose(ourside[:, :, :end], theirside[:, :, :end], atol=self.tolerance)
            if hasattr(their, "indexer_keys"):
                assert torch.allclose(our.indexer_keys, their.indexer_keys, atol=1e-5)


@pytest.mark.parametrize(("kind", "static"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in STATIC])
def test_growing_and_resetting(kind, static):
    pair = Pair(kind, static=static)
    if not static:
        pair.check()
    for first, new in ((0, 3), (3, 1), (4, 6), (10, 1), (11, 2)):
        pair.feed(first, new)
        pair.check()
    pair.call("reset")
    assert pair.ours.get_seq_length() == int(pair.theirs.get_seq_length()) == 0
    pair.feed(20, 4, rows=ROWS if static else 2)
    pair.check()


@pytest.mark.parametrize("kind", KINDS)
def test_iteration(kind):
    pair = Pair(kind)
    assert [row[:2] for row in pair.ours] == [(None, None)] * len(pair.theirs)
    pair.feed(0, 11)
    for theirs, ours in zip(pair.theirs, pair.ours, strict=True):
        for their, our in zip(theirs, ours, strict=True):
            assert (our is None) == (their is None)
            assert our is None or torch.allclose(our, their, atol=1e-5)


def test_rows_can_be_read_while_a_forward_is_under_way(backend):
    pair = Pair("mixed", backend=backend, rows=1)
    for cache in (pair.theirs, pair.ours):
        update(cache, 1, 11)
        update(cache, 12, 1, layers=[0, 1])
    for layer in range(3):
        assert torch.equal(pair.ours.layers[layer].keys, pair.theirs.layers[layer].keys)
    for cache in (pair.theirs, pair.ours):
        update(cache, 12, 1, layers=[2])
    pair.check()


CROPS = [pytest.param(crop, id=f"crop({crop})") for crop in (0, -1, -3, -5)]


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize(
    ("kind", "static"),
    [(kind, False) for kind in KINDS if kind != "compressed"] + [(kind, True) for kind in ("full", "latent")],
)
def test_crop(kind, static, crop):
    pair = Pair(kind, static=static, max_draft_tokens=5)
    pair.theirs.activate_past_recording()
    pair.ours.activate_past_recording()
    pair.feed(0, 9)
    pair.call("crop", 0)
    pair.feed(9, 5)
    pair.call("crop", crop)
    pair.check()
    assert pair.ours.is_croppable
    pair.feed(30, 3)
    pair.call("crop", 0)
    pair.check()


@pytest.mark.parametrize("kind", ["full", "latent", "sliding", "mixed"])
@pytest.mark.parametrize("crop", [-4, -5, -100])
def test_crop_of_all_there_is_and_of_more_empties(kind, crop):
    pair = Pair(kind)
    pair.feed(0, 4)
    pair.call("crop", crop)
    assert pair.ours.get_seq_length() == pair.theirs.get_seq_length() == 0
    assert pair.ours.layers[0].keys is None
    assert pair.ours.kv.free_slots == ROWS
    pair.feed(10, 4)
    pair.check()


CHOICES = {
    "tensor": torch.tensor([2, 0]),
    "int32": torch.tensor([2, 0], dtype=torch.int32),
    "list": [2, 0],
    "tuple": (2, 0),
    "one": [1],
    "twice": [1, 1, 0],
    "negative": [-1, 0],
    "negative tensor": torch.tensor([-1, -3]),
    "mask": torch.tensor([True, False, True]),
    "mask of a list": [False, True, True],
    "all": slice(None),
    "slice": slice(1, 3),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", ["full", "mixed", "latent"])
def test_batch_select_indices(kind, choice):
    pair = Pair(kind)
    pair.call("batch_select_indices", CHOICES[choice])
    pair.feed(0, 11)
    pair.call("batch_select_indices", CHOICES[choice])
    pair.check()
    rows = len(pair.ours.requests)
    assert pair.ours.batch_size == rows == pair.theirs.layers[0].keys.shape[0]
    pair.feed(20, 2, rows=rows)
    pair.check()


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 0, 2], [1, 1, 1], [2, 1]])
@pytest.mark.parametrize(
    ("kind", "static"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in ("full", "sliding", "mixed")]
)
def test_reorder_cache(kind, static, order):
    pair = Pair(kind, static=static, beams=2)
    pair.call("reorder_cache", torch.tensor(order))
    pair.feed(0, 11)
    pair.call("reorder_cache", torch.tensor(order))
    pair.check()
    if not static:
        pair.feed(20, 2, rows=len(order))
        pair.check()


@pytest.mark.parametrize("repeats", [1, 2, torch.tensor([1, 0, 3])], ids=["once", "twice", "for each"])
@pytest.mark.parametrize("storage", ["slot", "paged"])
@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_batch_repeat_interleave(kind, storage, repeats):
    """Up to the last token that there is room for: rows that share a block are given blocks of their own."""
    pair = Pair(kind, rows=2 * ROWS, storage=storage, block_tokens=4)
    pair.call("batch_repeat_interleave", repeats)
    pair.feed(0, 10)
    pair.call("batch_repeat_interleave", repeats)
    pair.check()
    rows = pair.ours.batch_size
    for first, new in ((10, 1), (11, 12), (23, 1)):
        pair.feed(first, new, rows=rows)
        pair.check()
    assert pair.ours.length == 24


def test_sizes_of_a_batch():
    cache = KVCache(models.llama(), batch=2, beams=2, max_length=8)
    assert (cache.batch_size, cache.max_batch_size, cache.get_max_length(), cache.get_max_length(1)) == (-1, 4, 8, 8)
    update(cache, 1, 2, rows=3)
    assert (cache.batch_size, cache.is_initialized) == (3, True)
    cache.reset()
    assert (cache.batch_size, cache.is_initialized) == (-1, False)


REFUSED = {
    "crop forwards": (lambda cache: cache.crop(2), ShapeError),
    "crop by a float": (lambda cache: cache.crop(-1.0), ShapeError),
    "crop by a truth": (lambda cache: cache.crop(True), ShapeError),
    "crop by nothing": (lambda cache: cache.crop(None), ShapeError),
    "select a row that is not": (lambda cache: cache.batch_select_indices([0, 3]), RequestError),
    "select before the first": (lambda cache: cache.batch_select_indices([-4]), RequestError),
    "select by another mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False])), RequestError),
    "select by floats": (lambda cache: cache.batch_select_indices(torch.tensor([0.0])), RequestError),
    "select one without its axis": (lambda cache: cache.batch_select_indices(1), RequestError),
    "select by a table": (lambda cache: cache.batch_select_indices(torch.tensor([[0, 1]])), RequestError),
    "select by a name": (lambda cache: cache.batch_select_indices("0"), RequestError),
    "select too many": (lambda cache: cache.batch_select_indices([0, 1, 2, 0]), RequestError),
    "reorder to a row that is not": (lambda cache: cache.reorder_cache(torch.tensor([0, 3])), RequestError),
    "reorder to a negative row": (lambda cache: cache.reorder_cache(torch.tensor([-1, 0])), RequestError),
    "reorder by a mask": (lambda cache: cache.reorder_cache(torch.tensor([True, False])), RequestError),
    "reorder by floats": (lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0])), RequestError),
    "reorder by a name": (lambda cache: cache.reorder_cache("01"), RequestError),
    "repeat too often": (lambda cache: cache.batch_repeat_interleave(2), RequestError),
    "repeat less than never": (lambda cache: cache.batch_repeat_interleave(-1), RequestError),
    "repeat by a float": (lambda cache: cache.batch_repeat_interleave(1.5), RequestError),
    "offload": (lambda cache: cache.offload(0), BackendError),
    "prefetch": (lambda cache: cache.prefetch(0), BackendError),
    "offload one": (lambda cache: cache.layers[0].offload(), BackendError),
    "prefetch one": (lambda cache: cache.layers[0].prefetch(), BackendError),
    "reset one": (lambda cache: cache.layers[0].reset(), StepError),
    "crop one": (lambda cache: cache.layers[0].crop(-1), StepError),
    "reorder one": (lambda cache: cache.layers[0].reorder_cache(torch.tensor([0])), StepError),
    "select of one": (lambda cache: cache.layers[0].batch_select_indices([0]), StepError),
    "repeat one": (lambda cache: cache.layers[0].batch_repeat_interleave(1), StepError),
    "assign keys": (lambda cache: setattr(cache.layers[0], "keys", None), StepError),
    "assign values": (lambda cache: setattr(cache.layers[0], "values", None), StepError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what):
    call, kind = REFUSED[what]
    cache = KVCache(models.llama(), batch=3, max_length=8)
    update(cache, 1, 4, rows=3)
    before = cache.kv.digest(cache.requests)
    with pytest.raises(kind):
        call(cache)
    assert (cache.length, cache.batch_size, cache.kv.digest(cache.requests)) == (4, 3, before)
    assert held(update(cache, 5, 1, rows=3)[0]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("verb", ["fork", "release", "admit"])
def test_an_interrupted_call_leaves_a_cache_that_can_be_used(monkeypatch, verb):
    cache = KVCache(models.llama(), batch=3, max_length=8)
    if verb != "admit":
        update(cache, 1, 4, rows=3)
    calls, original = [], getattr(cache.kv, verb)

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(cache.kv, verb, interrupted)
    with pytest.raises(KeyboardInterrupt):
        update(cache, 1, 4, rows=3) if verb == "admit" else cache.reorder_cache(torch.tensor([1, 1, 1]))
    monkeypatch.undo()
    cache.reset()
    assert (cache.batch_size, cache.kv.free_slots) == (-1, 3)
    assert held(update(cache, 1, 4, rows=3)[0]) == [1, 2, 3, 4]


def test_what_is_read_is_a_copy():
    cache = KVCache(models.llama(), batch=1, max_length=8)
    update(cache, 1, 4)
    for layer in cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    for keys, values, _ in cache:
        keys.zero_()
        values.zero_()
    assert held(cache.layers[0].keys) == [1, 2, 3, 4]


RECURRENT = {
    "get_conv_state",
    "get_recurrent_state",
    "has_previous_state",
    "update_conv_state",
    "update_recurrent_state",
}
COMPARED = {
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "batch_size",
    "crop",
    "early_initialization",
    "get_mask_sizes",
    "get_max_length",
    "get_query_offset",
    "get_seq_length",
    "is_compileable",
    "is_croppable",
    "is_dummy",
    "is_initialized",
    "is_linear",
    "is_recording_past",
    "is_sliding",
    "offload",
    "prefetch",
    "reorder_cache",
    "reset",
    "update",
    "update_indexer",
}
"""Of a cache; what only recurrent layers have is refused by transformers itself."""

OF_LAYERS = {"lazy_initialization", "supports_early_init"}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_no_public_method_is_left_out():
    assert public(Cache) == COMPARED | RECURRENT
    layers = CacheLayerMixin, DynamicSlidingWindowLayer, DynamicIndexedLayer, StaticLayer
    lazy = {"lazy_initialization_indexer"}
    assert set().union(*map(public, layers)) <= COMPARED | OF_LAYERS | lazy


def test_what_only_other_layers_have_is_answered_as_transformers_does():
    pair = Pair("full")
    pair.feed(0, 3)
    states = torch.ones(3, 2, 1, 8)
    for cache in (pair.theirs, pair.ours):
        assert not cache.is_recording_past(0)
        assert cache.get_seq_length(99) == 0
        assert cache.get_max_length(99) == -1
        assert cache.get_mask_sizes(4, 99) == (4, 0)
        for call in (
            lambda cache: cache.get_conv_state(0),
            lambda cache: cache.get_recurrent_state(0),
            lambda cache: cache.has_previous_state(),
            lambda cache: cache.update_conv_state(states, 0),
            lambda cache: cache.update_recurrent_state(states, 0),
            lambda cache: cache.update_indexer(states, 0),
        ):
            with pytest.raises(ValueError, match="layer"):
                call(cache)
        # Nothing is left to initialise.
        cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))
    pair.check()
