"""What others may put in the place of files, and what snapshots and blobs may say that nobody would write."""

import contextlib
import gzip
import json
import os
import threading
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest

import kvcore
from kvcore.errors import KvcoreError, OutOfBlocks, SnapshotError, SpecError, TransferError
from kvcore.handoff import Direct, Exporter, pull
from kvcore.parity.records import LARGEST_BYTES, read
from kvcore.plan import plan_cache
from kvcore.portable import snapshot, version1
from kvcore.portable.blob import MAGIC
from kvcore.portable.disk import Disk, open_regular, write_whole
from kvcore.portable.manifest import root_of
from kvcore.portable.rows import kept_rows, least_kept, owned
from kvcore.spec import CacheSpec, Tail, from_hf_config, from_json, to_json
from tests.support import portable_form, scene, stories, version_1
from tests.support.stories import LATENT, MIXED


def temporary_of(path):
    """Where a save of this thread to ``path`` writes first."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def in_the_way(path, kind):
    """Put something of that kind there; a link leads to a file that must stay as it is."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(path.with_name("precious"))
    elif kind == "link to nothing":
        path.symlink_to(path.with_name("nothing"))
    else:
        path.write_bytes(b"of a killed save")


@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "file"])
@pytest.mark.parametrize("whose", ["ours", "another process's"])
def test_a_save_follows_no_link_and_waits_for_no_pipe(tmp_path, kind, whose):
    path, precious = tmp_path / "cache.kv", tmp_path / "precious"
    precious.write_bytes(b"precious")
    left = temporary_of(path) if whose == "ours" else tmp_path / ".cache.kv.1.2.tmp"
    in_the_way(left, kind)
    write_whole(Disk(), path, b"whole")
    assert path.read_bytes() == b"whole"
    assert not path.is_symlink()
    assert precious.read_bytes() == b"precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.kv", "precious"]


def test_a_temporary_file_is_always_a_new_one(tmp_path):
    """Also between the sweep and the first write."""
    left = temporary_of(tmp_path / "cache.kv")
    for kind in ("pipe", "link", "file"):
        in_the_way(left, kind)
        with pytest.raises(FileExistsError):
            Disk().create(left)
        left.unlink()


def test_a_save_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    path, precious = tmp_path / "cache.kv", tmp_path / "precious"
    precious.write_bytes(b"precious")
    path.symlink_to(precious)
    write_whole(Disk(), path, b"whole")
    assert (path.read_bytes(), path.is_symlink(), precious.read_bytes()) == (b"whole", False, b"precious")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_a_regular_file_is_read_as_a_snapshot(tmp_path, kind):
    path = tmp_path / "cache.kv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(SnapshotError, match="regular file"):
        kvcore.load(path, backend="reference")


def test_a_snapshot_may_be_reached_by_a_link(tmp_path):
    cache = stories.create(MIXED, "reference")
    stories.tell(cache, {cache.admit(): [1, 2, 3]})
    cache.save(tmp_path / "one.kv")
    (tmp_path / "latest.kv").symlink_to("one.kv")
    assert kvcore.load(tmp_path / "latest.kv", backend="reference").digest() == cache.digest()
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(Path(tmp_path / "latest.kv"), follow=False)


def test_the_rows_that_a_rollback_needs_are_those_of_every_length():
    components = [component for spec in (LATENT, MIXED, stories.STORED) for _, _, component in owned(spec)]
    components += [Tail(dim=8, ratio=ratio, overlap=overlap) for ratio in (1, 2, 3) for overlap in (False, True)]
    for component in components:
        for length in (0, 1, 2, 3, 4, 5, 7, 8, 16, 23, 41):
            for floor in range(length + 1):
                lengths = range(floor, length + 1) if component.span is not None else [length]
                rows = sorted({row for at in lengths for row in component.live(at)})
                kept = kept_rows(component, floor, length)
                assert list(kept) == rows
                assert isinstance(kept, range) == (rows == list(range(rows[0], rows[-1] + 1)) if rows else True)
                assert least_kept(component, floor, length) <= len(rows)


@contextlib.contextmanager
def unchanged_and_soon(cache, seconds=20.0):
    """Whatever happens inside changes nothing and is over soon: what was told would take hours, or all memory.

    In processor time, and a multiple of what an idle core needs: other work slows a shared one down.
    """
    before = scene.raw(cache), cache.digest(), cache.free_slots, cache.free_blocks, cache.requests
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds
    assert (scene.raw(cache), cache.digest(), cache.free_slots, cache.free_blocks, cache.requests) == before


def sealed_again(cache, request, version, changes):
    """A blob that says something else, its root worked out anew: whoever lies can do that too."""
    if version == 1:
        return version_1.signed(version_1.blob_fields(cache, request) | changes)
    return portable_form.changed(cache.export_request(request), lambda manifest: told_again(manifest, changes))


def told_again(manifest, changes):
    """A manifest of version 2 that says what a blob of version 1 does with these fields."""
    spec = changes.get("spec", b"")
    manifest["request"] |= {name: value for name, value in changes.items() if name in manifest["request"]}
    manifest |= {name: value for name, value in changes.items() if name in manifest and name != "spec"}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    if spec:
        held = json.dumps(manifest["spec"], separators=(",", ":")).encode()
        return text.replace(held, spec.encode())
    return text


LIES = [
    pytest.param({"length": 2**40, "tokens": None}, id="a length of 2**40"),
    pytest.param({"length": 2**40, "floor": 2**40, "tokens": None}, id="and rows for the last only"),
    pytest.param({"length": 2**31 - 1, "floor": 0, "tokens": None}, id="rows for every length"),
    pytest.param({"length": 2**63 - 1, "floor": 2**63 - 1, "tokens": None}, id="the longest length"),
    pytest.param({"floor": -1}, id="a negative floor"),
    pytest.param({"length": -1, "floor": -1, "tokens": None}, id="a negative length"),
    pytest.param({"tokens": [*range(36), -1]}, id="a negative id"),
    pytest.param({"tokens": [2**63, *range(35), -(2**62)]}, id="ids of both ends"),
    pytest.param({"salt": ""}, id="an empty salt"),
    pytest.param({"spec": "[" * 100_000}, id="a spec nested too deep"),
    pytest.param(
        {"spec": '{"schema_version": 1, "layers": [{"window": {"dim": ' + "9" * 5000 + "}}]}"}, id="a huge dim"
    ),
    pytest.param({"spec": "\x1b[31m"}, id="a spec that drives a terminal"),
]
RINGS = CacheSpec(layers=[scene.ring(6, format="bf16"), scene.ring(4, format="fp16")], name="rings")
"""No plan bounds what a request of it can be."""


@pytest.mark.sampled
@pytest.mark.parametrize("change", LIES)
@pytest.mark.parametrize("spec", [LATENT, MIXED, RINGS], ids=lambda spec: spec.name)
@pytest.mark.parametrize("into", [False, True], ids=["fresh", "into"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_blob_that_lies_is_refused_before_any_work(backend, spec, change, into, version):
    cache = stories.create(spec, backend, prefix="full")
    request = cache.admit()
    stories.tell(cache, {request: list(range(37))})
    bad = sealed_again(cache, request, version, change)
    waiting = cache.admit() if into else None
    with unchanged_and_soon(cache):
        with pytest.raises((SnapshotError, OutOfBlocks)) as caught:
            cache.import_request(bad, into=waiting)
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 2000
    if into:
        assert (waiting.length, waiting.blocks, waiting.tokens) == (0, (), ())


def test_an_import_that_fails_on_the_way_leaves_the_waiting_request_fresh(backend, monkeypatch):
    cache = stories.create(MIXED, backend)
    request = cache.admit()
    stories.tell(cache, {request: list(range(37))})
    blob, waiting = cache.export_request(request), cache.admit()

    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr("kvcore.portable.blob.under_way", fails)
    free = cache.free_blocks
    with pytest.raises(MemoryError):
        cache.import_request(blob, into=waiting)
    monkeypatch.undo()
    assert (waiting.length, waiting.blocks, waiting.tokens, cache.free_blocks) == (0, (), (), free)
    assert cache.digest([cache.import_request(blob, into=waiting)]) == cache.digest([request])


MANIFEST_LIES = [
    *LIES,
    pytest.param({"digests": []}, id="no digests"),
    pytest.param({"digests": [(0, 0)] * 10_000}, id="too many digests"),
    pytest.param({"digests": [(0,)]}, id="a digest of one lane"),
    pytest.param({"digests": [(-1, 2**32)] * 6}, id="digests beyond 32 bits"),
    pytest.param({"digests": ["00" * 32] * 100_000}, id="100,000 digests"),
    pytest.param({"pages": 2**62, "page_bytes": 2**62}, id="exabytes"),
    pytest.param({"checkpoints": list(range(1, 37))}, id="a checkpoint at every length"),
    pytest.param({"checkpoints": list(range(1, 10**6))}, id="a million checkpoints"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("change", MANIFEST_LIES)
@pytest.mark.parametrize("spec", [LATENT, MIXED, RINGS], ids=lambda spec: spec.name)
@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_that_lies_is_refused_before_any_page(spec, change, version):
    cache = stories.create(spec, "reference", prefix="full")
    request = cache.admit()
    stories.tell(cache, {request: list(range(37))})
    desk = Exporter(cache)
    handle = desk.export(request)

    class Lying(Direct):
        def manifest(self, *_, **__):
            return told

        def fetch(self, *_, **__):
            pytest.fail("asked for a page")

    if version == 1:
        known = version_1.staged(cache, request, (desk.name, 0, 0)).manifest
        told = msgspec.msgpack.encode(msgspec.msgpack.decode(known) | change)
    else:
        known = desk.manifest(handle.exporter, handle.number, handle.generation)
        told = told_again(json.loads(known), change)
    with unchanged_and_soon(cache), pytest.raises((TransferError, SnapshotError, OutOfBlocks)):
        pull(cache, msgspec.structs.replace(handle, root=root_of(told)), Lying(desk), salt="a")


def rewritten(cache, version=1, requests=None, sizes=None, **metadata):
    """A snapshot of a cache that says something else, signed anew."""
    if version == 2:
        return rewritten_2(cache, requests, sizes, **metadata)
    data = version_1.snapshot(cache, list(cache.requests))
    end = version1.header_end(data)
    header = msgspec.json.decode(data[8:end])
    told = header["__metadata__"]
    for name, changes in (("requests", requests), ("sizes", sizes)):
        if callable(changes):
            told[name] = msgspec.json.encode(changes(msgspec.json.decode(told[name]))).decode()
    told |= {**metadata, "root": version1.NO_ROOT}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return version_1.signed_file(len(text).to_bytes(8, "little") + text + data[end:])


def rewritten_2(cache, requests=None, sizes=None, **others):
    """The same in version 2: ``requests`` is told what version 1 says of them."""
    directory, blobs = portable_form.blobs_of(snapshot.to_bytes(cache._state, list(cache.requests)))
    if callable(sizes):
        directory["sizes"] = sizes(directory["sizes"])
    if callable(requests):
        known = portable_form.opened(blobs[0])[0]["request"]
        # Each is a whole blob: a thousand of them say as much as a hundred thousand.
        said = requests([known])[:1000]
        again = {}
        for one in said:
            text = json.dumps(one)
            if text not in again:
                again[text] = portable_form.changed(blobs[0], lambda manifest, one=one: manifest.update(request=one))
        blobs = [again[json.dumps(one)] for one in said]
    data = portable_form.bound(directory, blobs)
    if "spec" in others:
        tree, rest = portable_form.opened(data)
        text = json.dumps(tree, separators=(",", ":"))
        held = json.dumps(tree["spec"], separators=(",", ":"))
        data = portable_form.sealed(text.replace(held, others["spec"], 1).encode(), rest)
    elif others:
        tree, rest = portable_form.opened(data)
        data = portable_form.sealed({**tree, **others}, rest)
    return data


SNAPSHOT_LIES = [
    pytest.param({"requests": lambda told: [told[0] | {"length": 2**40, "tokens": None}]}, id="a length of 2**40"),
    pytest.param(
        {"requests": lambda told: [told[0] | {"length": 2**31 - 1, "floor": 0, "tokens": None}]},
        id="rows for every length",
    ),
    pytest.param({"requests": lambda told: [told[0] | {"tokens": [-1] * 37}]}, id="negative ids"),
    pytest.param({"requests": lambda told: [told[0] | {"tokens": [2**64] * 37}]}, id="ids beyond 8 bytes"),
    pytest.param({"requests": lambda told: [told[0] | {"salt": ""}]}, id="an empty salt"),
    pytest.param(
        {"requests": lambda told: told + [told[0] | {"length": 0, "floor": 0, "tokens": []}] * 100_000},
        id="100,000 empty requests",
    ),
    pytest.param({"requests": lambda _: [0] * 100_000}, id="numbers for requests"),
    pytest.param({"sizes": lambda told: told | {"max_tokens": None}}, id="no tokens"),
    pytest.param({"sizes": lambda told: told | {"max_tokens": -1}}, id="negative tokens"),
    pytest.param({"sizes": lambda told: told | {"max_tokens": 2**62}}, id="2**62 tokens"),
    pytest.param({"sizes": lambda told: told | {"max_requests": 10**8}}, id="10**8 requests"),
    pytest.param({"sizes": lambda told: told | {"max_requests": 0}}, id="no requests"),
    pytest.param({"sizes": lambda told: told | {"max_draft_tokens": -1}}, id="negative drafts"),
    pytest.param({"spec": "[" * 100_000}, id="a spec nested too deep"),
    pytest.param(
        {"requests": None, "sizes": None, "more": "\x1b[2J", "kvcore.snapshot": "\x1b[2J"}, id="another version"
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("change", SNAPSHOT_LIES)
@pytest.mark.parametrize("version", [1, 2])
def test_a_snapshot_that_lies_is_refused_before_any_work(backend, tmp_path, change, version):
    cache = stories.create(MIXED, backend)
    stories.tell(cache, {cache.admit(): list(range(37))})
    path = tmp_path / "cache.kv"
    path.write_bytes(rewritten(cache, version))
    assert kvcore.load(path, backend=backend).digest() == cache.digest()
    path.write_bytes(rewritten(cache, version, **change))
    for options in ({}, {"strict": False}, {"max_requests": 2, "max_tokens": 64}):
        with unchanged_and_soon(cache):
            said, damaged = "", ()
            try:
                damaged = kvcore.load(path, backend=backend, **options).damaged
            except KvcoreError as error:
                said = str(error)
        # Sizes of one's own are what counts, and a damaged request is left out by its name.
        assert said or damaged or "max_requests" in options
        assert "\x1b" not in said


def test_the_root_of_a_snapshot_is_not_what_its_header_grows_by(backend):
    cache = stories.create(MIXED, backend)
    data = version_1.snapshot(cache, [cache.admit()])
    end = version1.header_end(data)
    header = msgspec.json.decode(data[8:end])
    for root in ("", "0", None, 5, "0" * 65):
        header["__metadata__"]["root"] = root
        text = msgspec.json.encode(header)
        with pytest.raises(SnapshotError):
            snapshot.parse(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"a":' * 100_000, b'{"__metadata__":[]}', b'{"__metadata__":{}}', b"\xff"]
)
def test_a_header_that_is_none_is_refused(header):
    for size in (len(header), 2**63, 2**64 - 1, 0):
        count = size.to_bytes(8, "little")
        for data in (count + header, MAGIC + count + root_of(header) + header, portable_form.sealed(header)):
            with pytest.raises(SnapshotError):
                snapshot.parse(data)
            with pytest.raises(SnapshotError):
                stories.create(MIXED, "reference").import_request(data)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        pytest.param(MIXED, {"max_tokens": 2**50}, id="tokens"),
        pytest.param(MIXED, {"max_requests": 2**50}, id="requests"),
        pytest.param(RINGS, {"max_draft_tokens": 2**60, "max_tokens": None}, id="drafts"),
    ],
)
def test_pools_beyond_any_memory_are_refused_by_type(backend, spec, sizes):
    # More slots than an index has numbers for are not even planned.
    with pytest.raises((OutOfBlocks, SpecError), match=r"room|max_requests: got"):
        stories.create(spec, backend, **sizes)


def specs_of(text):
    """A spec document with the text in the place of one value after another."""
    document = msgspec.to_builtins(MIXED) | {"schema_version": 1}
    plain = msgspec.json.encode(document).decode()
    yield from (plain.replace(one, f"{one[:-1]}{text}", 1) for one in ('"block_tokens":8', '"window":6', '"dim":8'))


@pytest.mark.parametrize("text", ["9" * 30, "9" * 5000, "1e400", "-1", "[" * 100_000, '"\\ud800"', "NaN", str(2**63)])
def test_a_spec_of_impossible_values_is_refused_or_planned_soon(text):
    for document in specs_of(text):
        began, said = time.process_time(), ""
        try:
            spec = from_json(document)
            plan_cache(spec, max_requests=1, max_tokens=spec.block_tokens)
        except KvcoreError as error:
            said = str(error)
        assert time.process_time() - began < 10
        assert len(said) < 20_000


def test_a_record_that_unpacks_to_too_much_is_refused(tmp_path):
    path = tmp_path / "record.json.gz"
    began = time.process_time()
    path.write_bytes(gzip.compress(b'{"schema":"kvcore.parity/1","more":"' + b" " * LARGEST_BYTES + b'"}', 1))
    tracemalloc.start()
    try:
        with pytest.raises(SpecError, match="more than"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * LARGEST_BYTES
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 20
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(SpecError):
        read(path)
    path.write_bytes(b'{"schema":' + b"[" * 100_000)
    with pytest.raises(SpecError):
        read(path)


@pytest.mark.parametrize("layers", [4097, 2**40, 2**200])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gemma3_text"])
def test_a_configuration_of_more_layers_than_any_model_has_is_refused(kind, layers):
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"), 64)
    known = {"model_type": kind, "head_dim": 64, **sizes}
    assert len(from_hf_config({**known, "num_hidden_layers": 4096}).layers) == 4096
    began = time.process_time()
    with pytest.raises(SpecError, match="num_hidden_layers"):
        from_hf_config({**known, "num_hidden_layers": layers})
    assert time.process_time() - began < 5


@contextlib.contextmanager
def little_memory(most):
    """No more bytes at any time than that."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_a_page_of_a_snapshot_takes_no_more_than_its_rows():
    """However many tokens its spec says that a block has."""
    cache = stories.create(MIXED, "reference")
    stories.tell(cache, {cache.admit(): list(range(37))})
    spec = msgspec.structs.replace(MIXED, block_tokens=1 << 24)
    saved = snapshot.parse(rewritten(cache, spec=to_json(spec)))
    with little_memory(1 << 24):
        assert saved.damage(0, cache.ops)


def test_a_spec_is_no_longer_than_any_models():
    text = to_json(MIXED)
    padded = text[:-1] + " " * ((1 << 24) - len(text)) + "}"
    assert from_json(padded) == MIXED
    with pytest.raises(SpecError, match="16777216 bytes or fewer"):
        from_json(" " + padded)


@pytest.mark.parametrize("text", ['{"schema_version": 1, "layers": [%s]}', '{"schema_version": %s}', '{"more": [%s]}'])
def test_a_spec_of_anything_is_not_made_into_objects(text):
    with little_memory(1 << 24), pytest.raises(SpecError):
        from_json(text % ("[[[[[[]]]]]]," * 300_000 + "[]"))


def test_no_memory_to_check_a_snapshot_in_is_said_by_type(backend, tmp_path, monkeypatch):
    cache = stories.create(MIXED, backend)
    stories.tell(cache, {cache.admit(): list(range(9))})
    path = tmp_path / "cache.kv"
    cache.save(path)

    def full(*_):
        raise MemoryError("unable to allocate")

    monkeypatch.setattr("kvcore.portable.snapshot.Snapshot.damage", full)
    with pytest.raises(kvcore.OutOfBlocks, match="unable to allocate"):
        kvcore.load(path, backend=backend)
