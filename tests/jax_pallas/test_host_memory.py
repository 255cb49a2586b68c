"""Rows that come into pools in the host's memory are put there in place, and nobody's array changes for it."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore import store as stores
from kvcore.backends.jax_pallas.backend import JaxOps
from kvcore.backends.jax_pallas.host_memory import Memory
from kvcore.handoff import Direct, Exporter, pull
from kvcore.portable.blob import copy_request
from kvcore.portable.convert import with_formats
from kvcore.spec import from_json
from kvcore.store import BlockStore, HostTier
from tests.support import stories

GOLDEN = Path(__file__).parent.parent / "portable" / "golden_v1"
OPS = {"planar": {}, "tpu_tile": {"layout": "tpu_tile"}}


@pytest.fixture(params=OPS)
def caches(request):
    """A cache with a request, and its blob."""
    cache = stories.create(stories.MIXED, "jax_pallas", max_requests=2, **OPS[request.param])
    one = cache.admit()
    stories.tell(cache, {one: list(range(21))})
    return cache, one, cache.export_request(one)


def test_what_comes_in_lies_where_pools_lay_and_who_held_those_is_told(caches):
    cache, one, blob = caches
    right = cache.digest([one])
    before = dict(cache.pools)
    where = {name: pool.unsafe_buffer_pointer() for name, pool in before.items()}
    pool, other, *_ = (name for name, array in before.items() if array.size)
    seen = np.asarray(before[pool])
    kept, coming = seen.copy(), before[pool].astype(jnp.int32).sum() + jnp.zeros(1 << 20, jnp.int32)
    moved = cache.import_request(blob)
    assert cache.digest([one, moved]) == cache.digest([moved, one])
    assert cache.digest([moved]) == cache.digest([one]) == right
    # What was given away is dead; what somebody looks at, or computes with, is what it was.
    assert before[other].is_deleted()
    assert (seen == kept).all()
    assert int(coming[0]) == int(kept.astype(np.int64).sum())
    now = {name: array.unsafe_buffer_pointer() for name, array in cache.pools.items() if array.size}
    assert len(set(now.values())) == len(now)
    same = [name for name in now if now[name] == where[name]]
    assert len(same) >= len(now) - 1
    # And what goes on from there is as ever.
    stories.tell(cache, {moved: list(range(21, 30)), one: list(range(21, 30))})
    assert cache.digest([moved]) == cache.digest([one])


def test_pools_that_nobody_can_write_to_are_left_to_programs(caches):
    cache, one, blob = caches
    ops, pools = cache.ops, cache.pools
    traced = jax.jit(lambda held: ops.reset_slots(kvcore.pools.Pools(held), jnp.array([0])))(dict(pools))
    assert {type(array) for array in traced.values()} == {type(pools[name]) for name in pools}
    cache.admit()
    plain = {name: array + 0 for name, array in cache.pools.items()}
    given = ops.reset_slots(plain, jnp.array([1]))
    assert type(given) is dict
    assert set(given) == set(plain)
    del one, blob


def test_a_slot_that_is_given_again_is_fresh():
    cache = stories.create(stories.MIXED, "jax_pallas", max_requests=1)
    own = kvcore.create_cache(stories.MIXED, backend="jax_pallas", max_requests=1, max_tokens=64)
    for _ in range(2):
        one = cache.admit()
        fresh = {name: np.asarray(cache.pools[name])[one.slot].tobytes() for name in cache.ops._fresh}
        wanted = {name: np.asarray(own.pools[name])[0].tobytes() for name in own.ops._fresh}
        assert fresh == wanted
        stories.tell(cache, {one: list(range(9))})
        cache.release(one)


def test_who_looks_at_a_slot_before_rows_come_keeps_what_it_saw(caches):
    cache, one, blob = caches
    request = cache.admit()
    seen = {name: np.asarray(cache.pools[name]) for name in cache.ops._fresh if cache.pools[name].size}
    kept = {name: array.copy() for name, array in seen.items()}
    assert cache.digest([cache.import_request(blob, into=request)]) == cache.digest([one])
    assert all((seen[name] == kept[name]).all() for name in seen)
    # Another pool of a name is read as it is, whatever lay at its address.
    for _ in range(2):
        cache.pools = cache.pools.replace({name: jnp.flip(array) for name, array in cache.pools.items()})
    assert cache.digest([request]) == cache.digest([one])


WRITE_ALONE = {"alone", "asarray", "host_pools", "index", "move_strips", "poison", "reset_slots", "store_rows"}
"""What may be called of the verbs while pools are written to without being renewed: none of it has a program read a
pool that it does not give away."""


@pytest.fixture
def alone(monkeypatch):
    """Every time that pools were alone, while every other verb is an error."""
    times = []
    enter = Memory.alone

    def counted(memory):
        times.append(memory)
        return enter(memory)

    def watched(name, verb):
        def run(self, *given, **options):
            assert self.memory._ours is None, f"{name} between two writes"
            return verb(self, *given, **options)

        return run

    for name in dir(JaxOps):
        verb = inspect.getattr_static(JaxOps, name)
        if inspect.isfunction(verb) and not name.startswith("_") and name not in WRITE_ALONE:
            monkeypatch.setattr(JaxOps, name, watched(name, verb))
    monkeypatch.setattr(Memory, "alone", counted)
    return times


@pytest.mark.parametrize("canary", [False, 1])
def test_no_program_reads_pools_while_rows_come_in(alone, canary):
    spec, tokens = stories.MIXED, list(range(2 * stories.MIXED.block_tokens))
    source, options = stories.create(spec, "reference", prefix="full"), {"prefix": "full", "canary": canary}
    one = source.admit(tokens)
    stories.tell(source, {one: tokens})
    cache = stories.create(spec, "jax_pallas", max_requests=8, max_tokens=512, **options)
    store = BlockStore([HostTier(1 << 24)])
    stores.save(store, source, one, tokens)
    exporter = Exporter(source)
    made = {
        "blob": lambda: cache.import_request(source.export_request(one), salt="a"),
        "into": lambda: cache.import_request(source.export_request(one), into=cache.admit()),
        "store": lambda: stores.load(store, cache, tokens),
        "pull": lambda: pull(cache, exporter.export(one), Direct(exporter), salt="b"),
        "copy": lambda: copy_request(source, one, cache),
    }
    for number, (way, make) in enumerate(made.items()):
        assert cache.digest([make()]) == source.digest([one]), way
        assert len(alone) == number + 1, way
    if canary:
        assert not cache.faults()


def test_nor_while_rows_of_other_formats_or_of_an_older_version_do(alone):
    source = stories.create(stories.MIXED, "reference")
    one = source.admit()
    stories.tell(source, {one: list(range(21))})
    wide = with_formats(stories.MIXED, {"key": "fp32"})
    cache = stories.create(wide, "jax_pallas")
    assert cache.import_request(source.export_request(one), convert=True).converted
    old = kvcore.create_cache(
        from_json((GOLDEN / "spec.json").read_text()), backend="jax_pallas", max_requests=2, max_tokens=256
    )
    assert old.import_request((GOLDEN / "blob").read_bytes()).length == 21
    assert len(alone) == 2
