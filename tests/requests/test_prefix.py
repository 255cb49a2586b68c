"""Prefix reuse: a hit holds exactly what an uninterrupted run holds, and where it would not, there is none."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import RequestError, ShapeError, SpecError
from kvcore.portable.rows import owned
from kvcore.spec import CacheSpec, presets
from tests.support import scene, stories
from tests.support.stories import DRAFTED, LATENT, MIXED, PAGED

PROMPT = list(range(100, 171))
OTHER = [7] * 71

ENDS = {
    # Lengths at which the steps below end: 20, 40, 48, 71.
    "full": {16: 16, 20: 16, 47: 32, 48: 48, 70: 64, 71: 64},
    "Periodic(8)": {16: 0, 39: 0, 40: 40, 47: 40, 48: 48, 71: 48},
    "Periodic(5)": {19: 0, 20: 20, 39: 20, 40: 40, 71: 40},
}
POLICIES = {"full": "full", "Periodic(8)": kvcore.Periodic(8), "Periodic(5)": kvcore.Periodic(5)}
STEPS = (20, 20, 8, 23)


def told(spec, backend, prefix, **sizes):
    """A cache in which one request was given the prompt, in steps that end at 20, 40, 48 and 71."""
    cache = stories.create(spec, backend, prefix=prefix, **sizes)
    first = cache.admit(PROMPT)
    assert first.cached_tokens == 0
    rest = PROMPT
    for count in STEPS:
        stories.tell(cache, {first: rest[:count]})
        rest = rest[count:]
    return cache, first


@pytest.mark.parametrize("name", ENDS)
def test_where_a_latent_prefix_can_be_resumed(backend, name):
    cache, first = told(LATENT, backend, POLICIES[name])
    for n, length in ENDS[name].items():
        assert cache.restorable(PROMPT, n) == (length, 0, True), n
    for n in ENDS[name]:
        # One token is always left to compute.
        wanted = cache.restorable(PROMPT, n - 1).length
        request = cache.admit(PROMPT[:n])
        assert request.cached_tokens == request.length == wanted
        stories.tell(cache, {request: PROMPT[request.length : n]})
        assert cache.digest([request]) == stories.retell(backend, LATENT, PROMPT[:n])
        cache.release(request)
    assert cache.digest([first]) == stories.retell(backend, LATENT, PROMPT)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [LATENT, MIXED, PAGED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("prefix", ["full", kvcore.Periodic(4), "zero"], ids=str)
def test_a_hit_equals_an_uninterrupted_run_however_tokens_were_split(backend, spec, prefix, rng):
    cache = stories.create(spec, backend, prefix=prefix, max_requests=3)
    wanted = stories.retell(backend, spec, PROMPT), stories.retell(backend, spec, [*PROMPT[:50], *OTHER[:20]])
    hits = []
    for _ in range(4):
        requests = cache.admit(PROMPT), cache.admit([*PROMPT[:50], *OTHER[:20]])
        hits.append([request.cached_tokens for request in requests])
        for request, tokens in zip(requests, (PROMPT, [*PROMPT[:50], *OTHER[:20]]), strict=True):
            for piece in stories.split(tokens[request.length :], rng):
                stories.tell(cache, {request: piece})
        assert tuple(cache.digest([request]) for request in requests) == wanted
        for request in requests:
            cache.release(request)
        scene.poison_slots(cache)
    assert hits[0] == [0, 0]
    assert min(hits[-1]) > 0


def test_less_is_taken_over_where_the_caller_says_so(backend):
    cache, first = told(LATENT, backend, "full")
    for most, length in ((0, 0), (15, 0), (16, 16), (50, 48), (71, 64), (10**6, 64)):
        request = cache.admit(PROMPT, reuse=most)
        assert request.length == request.cached_tokens == length
        stories.tell(cache, {request: PROMPT[length:]})
        assert cache.digest([request]) == cache.digest([first])
        cache.release(request)
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(ShapeError, match="reuse"):
            cache.admit(PROMPT, reuse=wrong)
    assert cache.requests == (first,)


def test_full_restores_every_boundary_within_one_long_step(backend):
    cache = stories.create(LATENT, backend, prefix="full")
    stories.tell(cache, {cache.admit(PROMPT): PROMPT})
    for blocks in range(1, 5):
        request = cache.admit(PROMPT[: 16 * blocks + 1])
        assert request.cached_tokens == 16 * blocks
        assert cache.digest([request]) == stories.retell(backend, LATENT, PROMPT[: 16 * blocks])
        cache.release(request)


def test_zero_replays_the_rings_and_writes_no_block_again(backend):
    cache, first = told(LATENT, backend, "zero")
    # Spans by layer: 7 (tail of ratio 4 with overlap), 7 (tail of ratio 8), 4, 7.
    assert cache.restorable(PROMPT) == (64, 25, True)
    assert cache.restorable(PROMPT, 47) == (32, 25, True)
    assert cache.restorable(PROMPT, 16) == (0, 0, True)
    request = cache.admit(PROMPT)
    assert (request.length, request.blocks) == (39, first.blocks[:4])
    before = scene.raw(cache)
    stories.tell(cache, {request: PROMPT[39:64]})
    paged = {name for name in before if name.split(".")[1] in ("entries", "index_keys")}
    assert paged
    assert not paged & set(scene.changed(before, scene.raw(cache)))
    assert request.blocks == first.blocks[:4]
    stories.tell(cache, {request: PROMPT[64:]})
    assert cache.digest([request]) == cache.digest([first]) == stories.retell(backend, LATENT, PROMPT)


def test_zero_refuses_other_tokens_than_those_of_the_blocks(backend):
    cache, _ = told(LATENT, backend, "zero")
    request = cache.admit(PROMPT)
    before = cache.digest(), cache.free_blocks
    for ids in (OTHER[:3], [*PROMPT[39:64], *OTHER[:1]][:24] + OTHER[:1]):
        with pytest.raises(RequestError, match="prompt"):
            cache.step({request: ids})
    assert (cache.digest(), cache.free_blocks) == before
    # Beyond the blocks the tokens are the caller's choice.
    stories.tell(cache, {request: [*PROMPT[39:64], *OTHER[:2]]})
    assert cache.digest([request]) == stories.retell(backend, LATENT, [*PROMPT[:64], *OTHER[:2]])


def test_a_semantic_point_may_lie_anywhere(backend):
    for prefix in ("zero", kvcore.Periodic(1000), "full"):
        cache, first = told(LATENT, backend, prefix)
        cache.checkpoint(first)
        assert cache.restorable(PROMPT) == (71, 0, True)
        request = cache.admit([*PROMPT, 5, 6])
        assert request.cached_tokens == 71
        # The partial block is a copy, not shared.
        assert request.blocks[:4] == first.blocks[:4]
        assert not set(request.blocks[4:]) & set(first.blocks)
        stories.tell(cache, {request: [5, 6], first: [8]})
        assert cache.digest([request]) == stories.retell(backend, LATENT, [*PROMPT, 5, 6])
        assert cache.digest([first]) == stories.retell(backend, LATENT, [*PROMPT, 8])


def test_blocks_alone_suffice_only_where_nothing_else_is_kept(backend):
    cache, _ = told(PAGED, backend, "zero")
    assert cache.restorable(PROMPT) == (64, 0, True)
    contiguous = CacheSpec(layers=[scene.classic(), scene.classic("slot")], block_tokens=8)
    for prefix in ("zero", kvcore.Periodic(1000)):
        cache, _ = told(contiguous, backend, prefix)
        # A contiguous layer needs the whole history: no replay short of it brings it back.
        assert cache.restorable(PROMPT) == (0, 0, True)
        assert cache.admit(PROMPT).cached_tokens == 0
    cache, _ = told(contiguous, backend, "full")
    request = cache.admit(PROMPT)
    assert request.cached_tokens == 64
    stories.tell(cache, {request: PROMPT[64:]})
    assert cache.digest([request]) == stories.retell(backend, contiguous, PROMPT)


def test_a_hit_needs_a_page_not_the_largest_ratio_times_page(backend):
    # Ratios 4 and 8 beside ratio 1: 8 tokens are one block of each, and enough.
    spec = CacheSpec(
        layers=[scene.compressed(4, window=6), scene.compressed(8, overlap=False), scene.classic()], block_tokens=8
    )
    cache = stories.create(spec, backend, prefix="full")
    stories.tell(cache, {cache.admit(PROMPT[:9]): PROMPT[:9]})
    request = cache.admit(PROMPT[:9])
    assert request.cached_tokens == 8
    stories.tell(cache, {request: PROMPT[8:9]})
    assert cache.digest([request]) == stories.retell(backend, spec, PROMPT[:9])


def test_pressure_evicts_and_what_was_evicted_is_no_hit(backend):
    cache, first = told(LATENT, backend, "full", max_tokens=96)
    cache.release(first)
    assert cache.free_blocks == 6
    assert cache.restorable(PROMPT).length == 64
    other = cache.admit(OTHER)
    stories.tell(cache, {other: OTHER[:40]})
    # One block was free, the two that follow in the chain had to go: the last ones first.
    assert cache.block_statistics.evicted == 1
    assert cache.restorable(PROMPT).length == 48
    stories.tell(cache, {other: OTHER[40:]})
    assert cache.restorable(PROMPT).length == 16
    request = cache.admit(PROMPT[:30])
    assert request.cached_tokens == 16
    assert cache.digest([request, other]) == _both(backend, PROMPT[:16], OTHER)
    # Checkpoints go with the blocks that they continue.
    assert cache._state.prefix.checkpoints == 1 + 4


def _both(backend, *histories):
    cache = stories.create(LATENT, backend)
    requests = [cache.admit() for _ in histories]
    for request, tokens in zip(requests, histories, strict=True):
        stories.tell(cache, {request: tokens})
    return cache.digest(requests)


def test_no_room_for_the_partial_block_means_no_hit(backend):
    cache, first = told(LATENT, backend, "zero", max_tokens=80)
    cache.checkpoint(first)
    assert cache.free_blocks == 0
    request = cache.admit([*PROMPT, 5])
    assert (request.cached_tokens, request.length, request.blocks) == (0, 0, ())
    assert cache.digest([first]) == stories.retell(backend, LATENT, PROMPT)


def test_counts_instead_of_ids_publish_nothing(backend):
    cache = stories.create(LATENT, backend, prefix="full")
    request = cache.admit()
    with cache.step({request: 40}) as step:
        stories.feed(step, PROMPT[:40])
    assert request.tokens is None
    assert cache.restorable(PROMPT).length == 0
    with pytest.raises(RequestError, match="ids"):
        cache.checkpoint(request)


def test_a_failed_step_publishes_nothing(backend):
    cache = stories.create(LATENT, backend, prefix="full")
    request = cache.admit(PROMPT)
    stories.fail(cache, {request: OTHER[:40]})
    assert cache.restorable(OTHER).length == 0
    assert cache._state.prefix.checkpoints == 0
    stories.tell(cache, {request: PROMPT[:40]})
    assert (cache.restorable(OTHER).length, cache.restorable(PROMPT).length) == (0, 32)


def test_rolled_back_drafts_do_not_change_what_was_published(backend):
    cache = stories.create(LATENT, backend, prefix="full", max_draft_tokens=4)
    request = cache.admit(PROMPT)
    stories.tell(cache, {request: PROMPT[:30]})
    stories.tell(cache, {request: [*PROMPT[30:31], *OTHER[:3]]})  # fills the second block with two wrong tokens
    assert cache.restorable([*PROMPT[:31], *OTHER[:1]]).length == 32
    cache.truncate(request, 31)
    stories.tell(cache, {request: PROMPT[31:40]})
    for tokens in (PROMPT[:31] + OTHER[:1], PROMPT[:32]):
        hit = cache.admit([*tokens, 1])
        assert hit.cached_tokens == 32
        assert cache.digest([hit]) == stories.retell(backend, LATENT, tokens)
    assert cache.digest([request]) == stories.retell(backend, LATENT, PROMPT[:40])


def test_drafts_stepped_alone_publish_nothing_until_the_main_layers_follow(backend):
    cache = stories.create(DRAFTED, backend, prefix="full", max_draft_tokens=4)
    request = cache.admit(PROMPT)
    stories.tell(cache, {request: PROMPT[:14]})
    stories.tell(cache, {request: PROMPT[14:17]}, main=False)
    assert cache.restorable(PROMPT).length == 8
    with pytest.raises(RequestError, match="layer"):
        cache.checkpoint(request)
    cache.truncate(request, 14)
    stories.tell(cache, {request: PROMPT[14:17]})
    assert cache.restorable(PROMPT).length == 16
    hit = cache.admit(PROMPT[:17])
    assert cache.digest([hit]) == stories.retell(backend, DRAFTED, PROMPT[:16])


def test_draft_layers_that_are_never_used_do_not_stand_in_the_way(backend):
    cache = stories.create(DRAFTED, backend, prefix="full")
    request = cache.admit(PROMPT)
    stories.tell(cache, {request: PROMPT}, drafts=False)
    assert cache.restorable(PROMPT).length == 64
    # From here on the draft layer lacks the beginning, so nothing more is shared.
    stories.tell(cache, {request: OTHER[:9]})
    assert cache.restorable([*PROMPT, *OTHER]).length == 64


def test_off_finds_nothing_and_has_no_points(backend):
    cache, first = told(LATENT, backend, "off")
    assert cache.restorable(PROMPT) == (0, 0, True)
    assert cache.admit(PROMPT).cached_tokens == 0
    with pytest.raises(SpecError, match="prefix"):
        cache.checkpoint(first)


@pytest.mark.parametrize("n", [-1, 72, 1.5, True, "2"])
def test_restorable_refuses_odd_lengths(backend, n):
    cache, _ = told(PAGED, backend, "full")
    with pytest.raises(ShapeError):
        cache.restorable(PROMPT, n)


@pytest.mark.parametrize("policy", ["half", None, True, 4])
def test_unknown_policies_are_refused(backend, policy):
    with pytest.raises(SpecError, match="prefix"):
        stories.create(PAGED, backend, prefix=policy)


def test_a_hit_cannot_be_rolled_back_below_what_was_restored(backend):
    cache, _ = told(LATENT, backend, "full", max_draft_tokens=4)
    request = cache.admit(PROMPT)
    stories.tell(cache, {request: PROMPT[64:66]})
    with pytest.raises(kvcore.errors.RollbackError, match="64 to 66"):
        cache.truncate(request, 63)
    cache.truncate(request, 64)
    stories.tell(cache, {request: PROMPT[64:]})
    assert cache.digest([request]) == stories.retell(backend, LATENT, PROMPT)


WINDOW_BYTES, CARRY_BYTES = {"flash": 3_214_336, "pro": 4_559_872}, {"flash": 430_080, "pro": 614_400}


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_bytes_of_a_checkpoint_at_an_aligned_boundary(name):
    """Windows, and the rows of the last CSA window: whole rows, so twice the carry halves that attention needs."""
    spec = getattr(presets, f"deepseek_v4_{name}")(draft=False)
    found = {"window": 0, "tail": 0, "index_tail": 0}
    for _, role, component in owned(spec):
        if component.in_checkpoint:
            (part,) = component.parts
            found[role] += len(component.live(4096)) * part.heads * part.format.row
    assert found["window"] == WINDOW_BYTES[name]
    assert found["tail"] + found["index_tail"] == 2 * CARRY_BYTES[name]


def test_kept_bytes_are_what_the_checkpoints_hold(backend):
    cache, _ = told(LATENT, backend, "full")
    # Windows of 6, 5, 4 and 7 rows; the last 4 rows of the CSA tail and of its indexer's; the HCA tail is empty.
    row = {"fp32": 32, "bf16": 16, "fp16": 16}
    windows = (6 + 5) * row["fp32"] + 4 * row["bf16"] + 7 * row["fp16"]
    assert cache._state.prefix.kept_bytes == 4 * (windows + 2 * 4 * (2 * 2 * 32))


def test_thousands_of_tokens_hash_each_block_once(monkeypatch):
    spec = CacheSpec(layers=[scene.ring(4), scene.classic(heads=1, dim=2)], block_tokens=16)
    cache = stories.create(spec, "torch_triton", prefix="full", max_tokens=4096)
    tokens = np.arange(4000).tolist()
    calls = []
    real = kvcore.cache.reuse.chain
    monkeypatch.setattr("kvcore.cache.reuse.chain", lambda *args: [calls.append(1) or key for key in real(*args)])
    request = cache.admit()
    for start in range(0, 4000, 500):
        stories.tell(cache, {request: tokens[start : start + 500]})
    assert len(calls) == 250


def test_prefixes_are_shared_among_requests_of_one_salt_only(backend):
    cache = stories.create(LATENT, backend, prefix="full", max_requests=6, max_tokens=512)
    requests = {salt: cache.admit(PROMPT, salt=salt) for salt in (None, "tenant a", "tenant b")}
    for salt, request in requests.items():
        assert (request.salt, request.cached_tokens) == (salt, 0)
        stories.tell(cache, {request: PROMPT})
        assert cache.restorable(PROMPT, salt=salt).length == 64
        # The salt enters keys, not rows.
        assert cache.digest([request]) == stories.retell(backend, LATENT, PROMPT)
    assert cache.restorable(PROMPT, salt="tenant c").length == 0
    again = cache.admit(PROMPT, salt="tenant a")
    assert again.blocks[:4] == requests["tenant a"].blocks[:4]
    assert len({block for request in requests.values() for block in request.blocks}) == 3 * 5


def test_a_point_before_the_first_block_is_of_its_salt(backend):
    cache = stories.create(LATENT, backend, prefix=kvcore.Periodic(1000))
    request = cache.admit(salt="a")
    stories.tell(cache, {request: PROMPT[:9]})
    cache.checkpoint(request)
    assert [cache.restorable(PROMPT, salt=salt).length for salt in (None, "a", "b")] == [0, 9, 0]


def test_a_salt_stays_with_forks_and_snapshots_and_imports_are_given_theirs(backend, tmp_path):
    cache = stories.create(LATENT, backend, prefix="full")
    request = cache.admit(PROMPT, salt="a")
    stories.tell(cache, {request: PROMPT})
    fork = cache.fork(request)
    stories.tell(cache, {fork: OTHER[:9]})
    blob = cache.export_request(fork)
    cache.save(tmp_path / "cache.kv", [fork])
    moved = stories.create(LATENT, backend, prefix="zero")
    moved.import_request(blob, salt="a")
    loaded = kvcore.load(tmp_path / "cache.kv", backend=backend, prefix="zero")
    into = stories.create(LATENT, backend, prefix="zero")
    into.import_request(blob, into=into.admit(salt="a"), salt="a")
    for other in (cache, moved, loaded, into):
        lengths = [other.restorable([*PROMPT, *OTHER], salt=salt).length for salt in (None, "a", "b")]
        assert lengths == [0, 80, 0]
    assert [r.salt for r in (fork, *moved.requests, *loaded.requests, *into.requests)] == ["a"] * 4


SALTS = (None, "alice", "bob", "mallory")


@pytest.mark.parametrize("policy", ["full", "zero", kvcore.Periodic(1)], ids=str)
@pytest.mark.parametrize("claimed", [None, "alice"])
@pytest.mark.parametrize("into", [None, "fresh", "admitted for bob"])
def test_a_blob_that_names_a_salt_serves_those_whom_its_importer_says(backend, claimed, into, policy):
    source = stories.create(MIXED, backend, prefix="full")
    request = source.admit(PROMPT, salt=claimed)
    stories.tell(source, {request: PROMPT[:40]})
    blob = source.export_request(request)
    cache = stories.create(MIXED, backend, prefix=policy)

    def target():
        return None if into is None else cache.admit(salt=None if into == "fresh" else "bob")

    before = cache.digest(), len(cache.requests)
    for salt in SALTS:
        if into is not None and salt not in (None, None if into == "fresh" else "bob"):
            waiting = target()
            with pytest.raises(RequestError, match="salt"):
                cache.import_request(blob, waiting, salt=salt)
            cache.release(waiting)
    assert (cache.digest(), len(cache.requests)) == before
    # Nobody finds what no salt was said for, nor what is computed on from there.
    hidden = cache.import_request(blob, target())
    stories.tell(cache, {hidden: PROMPT[40:48]})
    fork = cache.fork(hidden)
    stories.tell(cache, {fork: PROMPT[48:64]})
    assert fork.tokens == tuple(PROMPT[:64])
    with pytest.raises(RequestError, match="salt"):
        cache.checkpoint(fork)
    assert [cache.restorable(PROMPT, salt=salt).length for salt in SALTS] == [0] * 4
    if into != "fresh":
        seen = cache.import_request(blob, target(), salt="bob")
        assert seen.salt == "bob"
        stories.tell(cache, {seen: PROMPT[40:48]})
        # Under "zero" the checkpoint that came with it needs fewer tokens than a replay.
        length = 40 if policy == "zero" else 48
        assert [cache.restorable(PROMPT, salt=salt).length for salt in SALTS] == [0, 0, length, 0]


NO_SALTS = ["", 7, b"alice", True, ["alice"], "\ud800", "a\udfff", "x" * 4097, "é" * 2049]


@pytest.mark.parametrize("salt", NO_SALTS, ids=lambda salt: ascii(salt)[:12])
def test_what_no_key_can_be_made_of_is_refused_at_the_door(backend, salt):
    cache = stories.create(PAGED, backend, prefix="full")
    request = cache.admit(PROMPT)
    stories.tell(cache, {request: PROMPT})
    blob, free = cache.export_request(request), (cache.free_slots, cache.free_blocks)
    for act in (
        lambda: cache.admit([1], salt=salt),
        lambda: cache.restorable([1], salt=salt),
        lambda: cache.import_request(blob, salt=salt),
    ):
        with pytest.raises(ShapeError) as caught:
            act()
        assert len(str(caught.value).encode()) < 800
    assert (cache.free_slots, cache.free_blocks) == free


@pytest.mark.parametrize("salt", ["x" * 4096, "é" * 2048, "\0", " ", "\U0001f511"], ids=lambda salt: ascii(salt)[:12])
def test_any_other_text_is_a_salt(backend, salt):
    cache = stories.create(PAGED, backend, prefix="full")
    stories.tell(cache, {cache.admit(PROMPT, salt=salt): PROMPT})
    assert (cache.restorable(PROMPT, salt=salt).length, cache.restorable(PROMPT).length) == (64, 0)


WITH_DRAFT = CacheSpec(
    layers=[scene.classic(), scene.compressed(4, window=6)],
    draft_layers=[
        scene.classic(),
        scene.classic("ring", window=5),
        scene.classic("slot"),
        scene.compressed(4, window=5),
        scene.stored(4),
    ],
    block_tokens=8,
)


def draft_rows(cache, *requests):
    """What the draft layers show of each request: floats of every component, NaN and zero told apart."""
    found = []
    with cache.step(dict.fromkeys(requests, 0)) as step:
        for layer in range(2, 7):
            for role, _ in WITH_DRAFT.all_layers[layer].components():
                raw = step.layer(layer).gather_rows(role)
                values = kvcore.to_numpy(raw.rows).view(np.float32)
                found += [
                    values[number][kvcore.to_numpy(raw.positions)[number] >= 0] for number in range(len(requests))
                ]
    return found


def test_draft_layers_that_are_left_out_show_nobodys_rows(backend, tmp_path):
    cache = stories.create(WITH_DRAFT, backend, prefix="full", check=False, max_requests=3, max_tokens=80)
    # Every slot and block gets rows of every layer, and is given back.
    for _ in range(3):
        secret = cache.admit()
        stories.tell(cache, {secret: [777] * 80})
        cache.release(secret)
    request = cache.admit(PROMPT[:40])
    for piece in (PROMPT[:13], PROMPT[13:14], PROMPT[14:37]):
        stories.tell(cache, {request: piece}, drafts=False)
    fork = cache.fork(request)
    stories.tell(cache, {request: PROMPT[37:40], fork: OTHER[:3]}, drafts=False)
    hit = cache.admit(PROMPT[:40])
    assert hit.cached_tokens == 32
    stories.tell(cache, {hit: PROMPT[32:40]}, drafts=False)
    cache.save(tmp_path / "cache.kv")
    others = stories.create(WITH_DRAFT, backend, check=False)
    moved = others.import_request(cache.export_request(fork))
    loaded = kvcore.load(tmp_path / "cache.kv", backend=backend)
    shown = [draft_rows(cache, request, fork, hit), draft_rows(others, moved), draft_rows(loaded, *loaded.requests)]
    # Rings and slots are as fresh ones (scores -inf), paged rows are NaN: nothing finite but zero.
    for rows in (rows for each in shown for rows in each):
        assert not (np.isfinite(rows) & (rows != 0)).any()
    assert (
        cache.digest([request]) == cache.digest([hit]) == stories.retell(backend, WITH_DRAFT, PROMPT[:40], drafts=False)
    )


def test_main_layers_show_nobodys_rows_after_a_step_of_drafts_alone(backend):
    cache = stories.create(WITH_DRAFT, backend, check=False, max_draft_tokens=3, max_requests=1, max_tokens=32)
    secret = cache.admit()
    stories.tell(cache, {secret: [777] * 32})
    cache.release(secret)
    request = cache.admit()
    stories.tell(cache, {request: PROMPT[:11]})
    stories.tell(cache, {request: PROMPT[11:14]}, main=False)
    with cache.step({request: 0}) as step:
        keys, values, _ = (kvcore.to_numpy(array)[0, 11:14] for array in step.layer(0).gather_kv())
    assert np.isnan(keys).all()
    assert np.isnan(values).all()
    cache.truncate(request, 12)
    cache.truncate(request, 11)
    stories.tell(cache, {request: PROMPT[11:14]})
    assert cache.digest([request]) == stories.retell(backend, WITH_DRAFT, PROMPT[:14])
