"""Rows between pools and pages in the host's memory, against the verbs that gather and store them row by row."""

import random

import numpy as np
import pytest

import kvcore
from kvcore import digest
from kvcore.arrays import host_view
from kvcore.ops import Strip, host
from kvcore.portable import digests
from kvcore.portable.manifest import stage_one_by_one
from kvcore.portable.pages import content_of, page_layout
from kvcore.portable.record import RequestRecord
from kvcore.portable.rows import write_rows
from kvcore.spec import presets
from kvcore.spec.layout import LAYOUTS
from kvcore.testing.tagged_rows import life_spec, stored_spec

SPECS = {"life": life_spec(), "stored": stored_spec(), "v4": presets.deepseek_v4_flash_tiny(draft=False)}


def scene(spec, backend, layout, tokens=37, drafts=3):
    """A cache of any bytes, and a request in its second slot."""
    cache = kvcore.create_cache(
        spec, backend=backend, max_requests=3, max_tokens=160, layout=layout, max_draft_tokens=drafts
    )
    rng = np.random.default_rng(7)
    for pool in cache.pools.values():
        held = host_view(pool).view(np.uint8)
        held[:] = rng.integers(0, 256, held.shape, np.uint8)
    record = RequestRecord(length=tokens, floor=tokens, tokens=None, salt=None, checkpoints=[])
    cache.admit()
    return cache, cache._state.row(cache._state.restore(record, lambda _ops, pools, _row: pools))


def pages_of(cache, row, drafts=3):
    floor = max(0, row.length - drafts)
    layout = page_layout(cache.spec, floor, row.length)
    pages = np.zeros((layout.pages, layout.page_bytes), np.uint8)
    stage_one_by_one(cache._state, row, floor, layout, pages)
    return layout, pages


def parts(layout, pages, row):
    yield layout.history.of(pages), layout.history.strips, np.array(row.blocks[: layout.blocks], np.int32)
    yield layout.record.of(pages), layout.record.strips, np.array([row.slot], np.int32)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["as they come", "shuffled", "two by two"])
def test_rows_are_those_that_are_gathered(backend, layout, spec, order):
    cache, row = scene(SPECS[spec], backend, layout)
    blocks = list(row.blocks)
    if order == "shuffled":
        random.Random(3).shuffle(blocks)
    if order == "two by two":
        blocks = blocks[2:] + blocks[:2]
    row = row._replace(blocks=tuple(blocks))
    places, wanted = pages_of(cache, row)
    found = np.zeros_like(wanted)
    for part, strips, units in parts(places, found, row):
        assert cache.ops.move_strips(cache.pools, part, strips, units)
    assert (found == wanted).all()
    # And back, into pools that hold something else.
    other, there = scene(SPECS[spec], backend, layout)
    for pool in other.pools.values():
        host_view(pool).view(np.uint8)[:] = 0xA5
    there = row._replace(slot=2)
    for part, strips, units in parts(places, wanted, there):
        assert other.ops.move_strips(other.pools, part, strips, units, store=True)
    assert (pages_of(other, there)[1] == wanted).all()
    # As rows are stored one by one, copies of rings too.
    third, _ = scene(SPECS[spec], backend, layout)
    for pool in third.pools.values():
        host_view(pool).view(np.uint8)[:] = 0xA5
    write_rows(third._state.ops, third._state.pools, there, content_of(places, wanted))
    for name, pool in other.pools.items():
        assert (host_view(pool).view(np.uint8) == host_view(third.pools[name]).view(np.uint8)).all()
    # Nobody else's units were touched.
    for region in other.plan.regions:
        mine = {2} if region.growth == "slot" else set(row.blocks)
        for name, _ in region.buffers.values():
            pool = host_view(other.pools[name]).view(np.uint8)
            assert all((pool[unit] == 0xA5).all() for unit in range(len(pool)) if unit not in mine)


def test_the_digest_of_pages_is_that_of_rows(backend):
    cache, row = scene(SPECS["life"], backend, "planar")
    places, pages = pages_of(cache, row)
    for part, strips, _ in parts(places, pages, row):
        if all(isinstance(strip.numbers, range) for strip in strips):
            for first in range(min(2, len(part))):
                lanes = np.zeros((len(part) - first, 2), np.int64)
                for strip in strips:
                    lanes += host.digest(part[first:], (strip,), first)
                found = cache.ops.digest_strips(part[first:], strips, first)
                assert (kvcore.to_numpy(found) == lanes & 0xFFFFFFFF).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_has_the_digest_that_gathered_rows_have(backend, layout, monkeypatch):
    cache, _ = scene(SPECS["life"], backend, layout)
    requests = cache.requests
    at_once = cache.digest(requests)
    monkeypatch.setattr("kvcore.portable.digests.AT_ONCE", 100)
    assert cache.digest(requests) == at_once
    monkeypatch.setattr(host, "move", lambda *_, **__: False)
    assert cache.digest(requests) == at_once


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["neighbours", "pieces", "backwards"])
def test_rows_are_digested_where_they_lie_or_where_they_are_put(backend, layout, order, monkeypatch):
    spec = presets.classic(layers=2, key_heads=2, key_dim=8, block_tokens=8, key_format="fp16", value_format="fp32")
    cache, row = scene(spec, backend, layout, tokens=61, drafts=0)
    blocks = {
        "neighbours": row.blocks,
        "pieces": (*row.blocks[3:], *row.blocks[:3]),
        "backwards": row.blocks[::-1],
    }[order]
    row = row._replace(blocks=tuple(blocks))
    ops, pools = cache._state.ops, cache._state.pools
    monkeypatch.setattr(digests, "LEAST", 0)
    in_place = digests.request_lanes(ops, pools, row)
    monkeypatch.setattr(digests, "LEAST", 1 << 30)
    assert digests.request_lanes(ops, pools, row) == in_place
    assert (host.rows_in_place(cache.plan, pools, 0, "kv") is not None) == (layout in ("packed", "planar"))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_digested_in_place_by_a_function_that_was_compiled(backend, layout, spec, monkeypatch):
    cache, row = scene(SPECS[spec], backend, layout)
    row = row._replace(blocks=tuple(row.blocks[::-1]))
    ops, pools = cache._state.ops, cache._state.pools
    before = digests.request_lanes(ops, pools, row)
    run = digest.native.wait()
    monkeypatch.setattr(digests, "native", lambda _: run)
    direct = digests._lanes_in_place(run, ops, pools, row)
    assert direct
    # A byte of zeros behind the scales of v4_584 is not stored there.
    assert layout != "planar" or spec != "v4" or {role for _, role in direct} >= {"window", "entries", "index_keys"}
    assert digests.request_lanes(ops, pools, row) == before
    # A block that is not there is not read.
    beyond = row._replace(blocks=(*row.blocks[:-1], cache.plan.blocks))
    paged = [key for key in direct if cache.plan.region(*key)[0].growth == "block"]
    assert not set(paged) & {*digests._lanes_in_place(run, ops, pools, beyond)}


def test_units_that_are_not_there_read_as_zeros_and_take_nothing(backend):
    cache, row = scene(SPECS["stored"], backend, "packed")
    layout = page_layout(cache.spec, row.length, row.length)
    pages = np.full((layout.blocks, layout.page_bytes), 0xEE, np.uint8)
    strips = layout.history.strips
    units = np.array([-1, 0, *row.blocks[2 : layout.blocks]], np.int32)
    assert cache.ops.move_strips(cache.pools, pages, strips, units)
    assert not pages[0, : strips[-1].stop].any()
    before = [host_view(pool).copy() for pool in cache.pools.values()]
    assert cache.ops.move_strips(cache.pools, pages, strips, np.full_like(units, -1), store=True)
    assert all((host_view(pool) == was).all() for pool, was in zip(cache.pools.values(), before, strict=True))


def test_what_cannot_be_written_to_is_left_to_others(backend):
    cache, _ = scene(SPECS["stored"], backend, "packed")
    strip = Strip(0, "window", 0, 1, 128, range(1), 1)
    pages = np.zeros((1, 128), np.uint8)
    pages.flags.writeable = False
    assert not cache.ops.move_strips(cache.pools, pages, (strip,), np.array([0], np.int32))
