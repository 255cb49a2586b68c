"""Save, load, export and import: the continuation is the same, and nothing is left out in silence."""

import msgspec
import pytest
import scene
from scene import numbered

import kvcore
from kvcore.errors import SnapshotError
from kvcore.portable.blob import Blob, _root

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
    """A request's blob, its cache, and the blob's fields."""
    cache = scene.create(LAYERS, backend)
    a = cache.admit()
    scene.write(cache, {a: range(11)})
    blob = cache.export_request(a)
    return cache, a, blob, msgspec.msgpack.decode(blob)


def sealed(fields):
    """The fields as a blob whose checksum is right."""
    fields = {name: value for name, value in fields.items() if name != "root"}
    return msgspec.msgpack.encode({**fields, "root": _root(fields)})


def test_ser_03_every_component_of_the_spec_and_no_other(backend):
    cache, a, blob, fields = exported(backend)
    assert sorted(fields["rows"]) == sorted(COMPONENTS)
    target = scene.create(LAYERS, backend)
    b = target.import_request(blob)
    assert target.digest([b]) == cache.digest([a])
    assert scene.read(target, scene.window_of, b) == [numbered(3, 10)]
    assert scene.read(target, scene.entries_of, b, layer=2) == [[1.5, 53.5]]
    assert scene.read(target, scene.tail_of, b, layer=2) == [numbered(4, 10)]
    # Sealed again unchanged, the blob is taken: what is refused below is refused for its content.
    assert sealed(msgspec.msgpack.decode(blob)) == blob
    assert set(Blob.__struct_fields__) == set(fields)


@pytest.mark.parametrize(
    "component", [f"{n}.{role}" for n, layer in enumerate(LAYERS) for role, _ in layer.components()]
)
def test_ser_03_a_component_left_out_is_refused(backend, component):
    _, _, _, fields = exported(backend)
    for part in ("rows", "digests"):
        del fields[part][component]
    target = scene.create(LAYERS, backend)
    before = scene.raw(target), target.free_slots, target.free_blocks, target.digest()
    with pytest.raises(SnapshotError, match=component.replace(".", r"\.")):
        target.import_request(sealed(fields))
    assert (scene.raw(target), target.free_slots, target.free_blocks, target.digest()) == before


def test_ser_03_an_unknown_component_is_refused(backend):
    _, _, _, fields = exported(backend)
    for part in ("rows", "digests"):
        fields[part]["0.states"] = fields[part]["0.window"]
    target = scene.create(LAYERS, backend)
    before = scene.raw(target), target.free_slots, target.digest()
    with pytest.raises(SnapshotError, match=r"0\.states"):
        target.import_request(sealed(fields))
    assert (scene.raw(target), target.free_slots, target.digest()) == before
