"""Save, load, export and import: the continuation is the same, and nothing is left out in silence."""

import pytest

import kvcore
from kvcore.errors import SnapshotError
from tests.support import portable_form, scene
from tests.support.scene import numbered

LAYERS = [scene.ring(8), scene.classic("ring", window=8), scene.compressed(4), scene.classic("ring", chunk=8)]
COMPONENTS = [f"{number}.{role}" for number, layer in enumerate(LAYERS) for role, _ in layer.components()]


@pytest.mark.parametrize("length", [7, 8, 9, 20])
@pytest.mark.parametrize("way", ["save and load", "export and import"])
def test_ser_01_the_continuation_is_that_of_an_uninterrupted_run(backend, length, way, tmp_path):
    cache = scene.create(LAYERS, backend)
    other, a = cache.admit(), cache.admit()
    scene.write(cache, {other: range(500, 503), a: range(length)})
    if way == "save and load":
        cache.save(tmp_path / "one.kv", [a])
        target = kvcore.load(tmp_path / "one.kv", backend=backend, max_requests=3)
        (b,) = target.requests
    else:
        target = scene.create(LAYERS, backend, max_requests=3)
        target.admit()
        target.admit()
        b = target.import_request(cache.export_request(a))
    assert b.slot != a.slot
    assert b.length == length
    scene.poison(target)
    for position in range(length, length + 2):
        for each, request in ((cache, a), (target, b)):
            scene.write(each, {request: [position]})
        assert target.digest([b]) == cache.digest([a])
    last = length + 1
    assert scene.read(target, scene.window_of, b) == [numbered(max(0, last - 7), last)]
    assert scene.read(target, scene.kv_of, b, layer=1) == [numbered(max(0, last - 7), last)]
    assert scene.read(target, scene.kv_of, b, layer=3) == [numbered(last // 8 * 8, last)]


def exported(backend):
    """A request's blob, and its cache."""
    cache = scene.create(LAYERS, backend)
    a = cache.admit()
    scene.write(cache, {a: range(11)})
    return cache, a, cache.export_request(a)


def test_ser_03_every_component_of_the_spec_and_no_other(backend):
    cache, a, blob = exported(backend)
    assert sorted(portable_form.rows_of(blob)) == sorted(COMPONENTS)
    target = scene.create(LAYERS, backend)
    b = target.import_request(blob)
    assert target.digest([b]) == cache.digest([a])
    assert scene.read(target, scene.window_of, b) == [numbered(3, 10)]
    assert scene.read(target, scene.entries_of, b, layer=2) == [[1.5, 53.5]]
    assert scene.read(target, scene.tail_of, b, layer=2) == [numbered(4, 10)]
    # Sealed again unchanged, the blob is taken: what is refused below is refused for its content.
    assert portable_form.changed(blob, lambda _: None) == blob


def strips_of(manifest, component):
    """The list that the component's rows are in, and their place there."""
    for section in manifest["layout"]["sections"]:
        for number, strip in enumerate(section["strips"]):
            if f"{strip['layer']}.{strip['role']}" == component:
                return section["strips"], number
    raise KeyError(component)


@pytest.mark.parametrize("component", COMPONENTS)
def test_ser_03_a_component_left_out_is_refused(backend, component):
    _, _, blob = exported(backend)

    def without(manifest):
        strips, number = strips_of(manifest, component)
        del strips[number]

    target = scene.create(LAYERS, backend)
    before = scene.raw(target), target.free_slots, target.free_blocks, target.digest()
    with pytest.raises(SnapshotError, match="rows in other places"):
        target.import_request(portable_form.changed(blob, without))
    assert (scene.raw(target), target.free_slots, target.free_blocks, target.digest()) == before


def test_ser_03_an_unknown_component_is_refused(backend):
    _, _, blob = exported(backend)

    def ghost(manifest):
        strips, number = strips_of(manifest, "0.window")
        strips.append({**strips[number], "role": "states"})

    target = scene.create(LAYERS, backend)
    before = scene.raw(target), target.free_slots, target.digest()
    with pytest.raises(SnapshotError, match="rows in other places"):
        target.import_request(portable_form.changed(blob, ghost))
    assert (scene.raw(target), target.free_slots, target.digest()) == before
