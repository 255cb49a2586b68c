"""What a peer, a handle or a file in the folder may say that no desk says: refused, typed, with nothing changed."""

import math
import os
import threading
import time

import msgspec
import numpy as np
import pytest

from kvcore.errors import KvcoreError, ShapeError, TransferError
from kvcore.handoff import Direct, Exporter, FileTransport, Handle, decode_handle, encode_handle, publish, pull
from kvcore.interop import nixl
from tests.support import fake_nixl, stories

SPEC = stories.STORED


@pytest.fixture
def desk():
    cache = stories.create(SPEC, "reference")
    request = cache.admit()
    stories.tell(cache, {request: list(range(21))})
    desk = Exporter(cache)
    desk.request = request
    return desk


EXPORTERS = [
    pytest.param("../outside/" + "0" * 32, id="another folder"),
    pytest.param("/tmp/" + "0" * 32, id="absolute"),
    pytest.param("0" * 31, id="too short"),
    pytest.param("0" * 33, id="too long"),
    pytest.param("0" * 32 + "\n", id="a line's end"),
    pytest.param("0" * 31 + "g", id="no hex digit"),
    pytest.param("٣" * 32, id="digits of another script"),
    pytest.param("0" * 30 + "\0/", id="a zero byte"),
    pytest.param("", id="empty"),
    pytest.param(b"0" * 32, id="bytes"),
]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_exporter_is_32_hex_digits_and_nothing_else(desk, exporter):
    """No carrier makes a path or a message of anything else, since no handle holds it."""
    handle = desk.export(desk.request)
    with pytest.raises(TransferError, match="32 hexadecimal digits") as caught:
        msgspec.structs.replace(handle, exporter=exporter)
    assert caught.value.reason == "damaged"
    fields = {**msgspec.to_builtins(handle), "root": handle.root, "exporter": exporter}
    with pytest.raises(TransferError) as caught:
        decode_handle(msgspec.msgpack.encode(fields))
    assert caught.value.reason == "damaged"


HANDLES = [
    pytest.param({"number": -1}, id="a negative place"),
    pytest.param({"number": 2**64 - 1}, id="a place beyond 8 bytes"),
    pytest.param({"number": True}, id="a place that is true"),
    pytest.param({"generation": -1}, id="a negative generation"),
    pytest.param({"pages": -5}, id="negative pages"),
    pytest.param({"page_bytes": -4096}, id="negative bytes of a page"),
    pytest.param({"page_bytes": 0}, id="pages of nothing"),
    pytest.param({"root": b"short"}, id="a root that is none"),
    pytest.param({"deadline": math.nan}, id="a lease that never ends"),
    pytest.param({"deadline": math.inf}, id="an endless lease"),
]


@pytest.mark.parametrize("change", HANDLES)
def test_a_handle_of_impossible_numbers_is_refused(desk, change):
    handle = desk.export(desk.request)
    fields = {name: getattr(handle, name) for name in Handle.__struct_fields__} | change
    for make in (
        lambda: Handle(**fields),
        lambda: decode_handle(msgspec.msgpack.encode(fields)),
    ):
        with pytest.raises(TransferError) as caught:
            make()
        assert caught.value.reason == "damaged"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"\x87\xa8exporter\xa4\xff\xff\xff\xff", id="a name that is not UTF-8"),
        pytest.param(b"\x91" * 100_000, id="nested too deep"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="four billion fields"),
    ],
)
def test_bytes_that_are_no_handle_are_refused(data):
    with pytest.raises(TransferError) as caught:
        decode_handle(data)
    assert caught.value.reason == "damaged"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1, 0, True, "60", None, 10**400])
def test_a_lease_ends(desk, seconds):
    with pytest.raises(ShapeError, match="lease_seconds"):
        desk.export(desk.request, lease_seconds=seconds)
    # No place was lost to it.
    assert [desk.export(desk.request).number for _ in range(64)] == list(range(64))


@pytest.mark.parametrize("readers", [0, -1, "2", 1.0, True, None])
def test_an_export_has_readers(desk, tmp_path, readers):
    with pytest.raises(ShapeError, match="readers"):
        desk.export(desk.request, readers=readers)
    handle = desk.export(desk.request)
    with pytest.raises(ShapeError, match="readers"):
        publish(desk, handle, tmp_path, readers=readers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"timeout": math.nan}, {"timeout": "1"}, {"chunk_pages": 0}, {"chunk_pages": -1}])
def test_a_pull_has_an_end_and_moves_something(desk, options):
    handle = desk.export(desk.request)
    with pytest.raises(ShapeError, match=next(iter(options))):
        pull(stories.create(SPEC, "reference"), handle, Direct(desk), **options)


class Folder:
    """An export in a folder, and what its file can be replaced by."""

    def __init__(self, desk, folder):
        self.handle = desk.export(desk.request)
        self.path = publish(desk, self.handle, folder)
        self.carrier = FileTransport(folder)
        self.data = self.path.read_bytes()

    def head(self, **changes):
        """The file with another head."""
        size = int.from_bytes(self.data[:4], "little")
        fields = msgspec.msgpack.decode(self.data[4 : 4 + size]) | changes
        head = msgspec.msgpack.encode(fields)
        return len(head).to_bytes(4, "little") + head + self.data[4 + size :]

    def reasons(self):
        """What each verb says of the file."""
        into = np.zeros((self.handle.pages, self.handle.page_bytes), np.uint8)
        found = []
        for verb, arguments in (("manifest", ()), ("fetch", (0, into)), ("finish", ())):
            try:
                getattr(self.carrier, verb)(self.handle, *arguments, timeout=5)
            except TransferError as error:
                found.append(error.reason)
            else:
                found.append("fine")
        return found


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"manifest_bytes": 2**62}, id="a manifest of exabytes"),
        pytest.param({"manifest_bytes": -1}, id="a negative manifest"),
        pytest.param({"pages": 2**40}, id="more pages than there are"),
        pytest.param({"pages": -1}, id="negative pages"),
        pytest.param({"page_bytes": -1}, id="negative bytes of a page"),
        pytest.param({"page_bytes": 1}, id="smaller pages"),
        pytest.param({"deadline": math.nan}, id="a lease that is no number"),
        pytest.param({"deadline": "soon"}, id="a lease that is text"),
        pytest.param({"more": 1}, id="an unknown field"),
    ],
)
def test_a_file_whose_head_lies_is_refused(desk, tmp_path, change):
    folder = Folder(desk, tmp_path)
    lying = folder.head(**change)
    folder.path.write_bytes(lying)
    assert folder.reasons() == ["damaged"] * 3
    assert folder.path.read_bytes() == lying


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x02\0\0\0\xff\xff", b"\0\0\0\0"])
def test_a_file_that_is_none_of_ours_is_refused(desk, tmp_path, data):
    folder = Folder(desk, tmp_path)
    folder.path.write_bytes(data)
    assert folder.reasons() == ["damaged"] * 3


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_exports(desk, tmp_path, kind):
    inside = tmp_path / "inside"
    inside.mkdir()
    folder = Folder(desk, inside)
    elsewhere = tmp_path / "elsewhere"
    folder.path.rename(elsewhere)
    if kind == "link":
        folder.path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(folder.path)
    else:
        folder.path.mkdir()
    began = time.monotonic()
    assert folder.reasons() == ["unknown"] * 3
    assert time.monotonic() - began < 60
    assert elsewhere.read_bytes() == folder.data


class Agents:
    """An exporter and an importer over stand-ins for NIXL, and what the importer may ask in its own words."""

    def __init__(self, desk, name):
        self.server = nixl.NixlServer(desk, fake_nixl.FakeAgent(f"exporter {name}"))
        self.agent = fake_nixl.FakeAgent(f"importer {name}")
        self.carrier = nixl.NixlTransport(self.agent, self.server.metadata)

    def ask(self, handle, **changes):
        """The reason of the answer."""
        fields = {
            "agent": self.agent.name,
            "metadata": self.agent.get_agent_metadata(),
            "sequence": 1,
            "verb": "pages",
            "exporter": handle.exporter,
            "number": handle.number,
            "generation": handle.generation,
            "first": 0,
            "count": 1,
        } | changes
        self.agent.send_notif(self.server.metadata.decode(), msgspec.msgpack.encode(fields))
        self.server.poll()
        notes = [note for notes in self.agent.get_new_notifs().values() for note in notes]
        return [msgspec.msgpack.decode(note, type=nixl.Answer).reason for note in notes]

    def answer_all(self, **fields):
        """In the exporter's place, to every question."""

        def answered(peer, _):
            answer = nixl.Answer(sequence=self.carrier._sequence, **fields)
            self.agent._notes.append((peer, msgspec.msgpack.encode(answer)))

        self.agent.send_notif = answered


def test_a_nixl_service_answers_nonsense_and_goes_on(desk, tmp_path):
    handle = desk.export(desk.request)
    agents = Agents(desk, tmp_path)
    assert agents.ask(handle, verb="destroy") == ["unknown"]
    assert agents.ask(handle, verb="") == ["unknown"]
    assert agents.ask(handle, number=-1) == ["unknown"]
    assert agents.ask(handle, generation=2**60) == ["unknown"]
    assert agents.ask(handle, exporter="../outside") == ["unknown"]
    assert agents.ask(handle, first=-1) == ["out_of_range"]
    assert agents.ask(handle, count=2**62) == ["out_of_range"]
    assert agents.ask(handle, verb="manifest", first=-1) == ["out_of_range"]
    # Who cannot be answered, and what is no question.
    assert agents.ask(handle, agent="nobody") == []
    assert agents.ask(handle, metadata=b"\xff", agent="somebody") == []
    assert agents.ask(handle, number="first") == []
    agents.agent.send_notif(agents.server.metadata.decode(), b"\x91" * 100_000)
    assert agents.server.poll() == 0
    assert agents.ask(handle) == [""]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param({"reason": "\x1b[2J"}, "damaged", id="a reason that is none"),
        pytest.param({"reason": "stale"}, "stale", id="a reason"),
        pytest.param({"stride": -1}, "damaged", id="a manifest of negative size"),
        pytest.param({"stride": 2**62, "data": b"x"}, "damaged", id="a manifest of exabytes"),
        pytest.param({"stride": 1, "data": b"xx"}, "damaged", id="more than all of it"),
        pytest.param({"stride": 9, "data": b""}, "damaged", id="nothing of it"),
    ],
)
def test_a_nixl_peer_that_answers_nonsense_is_not_believed(desk, tmp_path, answer, reason):
    handle = desk.export(desk.request)
    agents = Agents(desk, tmp_path)
    agents.answer_all(**answer)
    cache = stories.create(SPEC, "reference")
    with pytest.raises(TransferError) as caught:
        pull(cache, handle, agents.carrier, timeout=2)
    assert caught.value.reason == reason
    assert "\x1b" not in str(caught.value)
    assert (cache.requests, cache.free_slots) == ((), 4)


def test_a_peers_stride_is_that_of_the_pages_asked_for(desk, tmp_path):
    """Own memory is written by it."""
    handle = desk.export(desk.request)
    agents = Agents(desk, tmp_path)
    into = np.zeros((2, handle.page_bytes // 2), np.uint8)
    agents.answer_all(stride=handle.page_bytes, metadata=agents.server.metadata)
    with pytest.raises(TransferError, match="pages of") as caught:
        agents.carrier.fetch(handle, 0, into, timeout=2)
    assert caught.value.reason == "damaged"


PROMPT = list(range(21))


def found(cache, *salts):
    """How much of the prompt requests of these salts find."""
    return [cache.restorable(PROMPT, salt=salt).length for salt in salts]


@pytest.mark.parametrize("named", [None, "alice"])
@pytest.mark.parametrize("carried", ["direct", "file", "nixl"])
def test_the_importer_says_whom_prefixes_serve(backend, tmp_path, named, carried):
    """What a manifest names is its exporter's word: with it, anybody could answer for anybody."""
    cache = stories.create(stories.PAGED, backend, prefix="zero")
    request = cache.admit(salt=named)
    stories.tell(cache, {request: PROMPT})
    desk = Exporter(cache)
    handle = desk.export(request, readers=9)
    publish(desk, handle, tmp_path, readers=9)
    agents = Agents(desk, tmp_path)
    if carried == "nixl":
        serving = threading.Event()
        thread = threading.Thread(target=lambda: [agents.server.serve(0.01) for _ in iter(serving.is_set, True)])
        thread.start()
    carrier = {"direct": Direct(desk), "file": FileTransport(tmp_path), "nixl": agents.carrier}[carried]
    salts = (None, "alice", "bob")
    try:
        other = stories.create(stories.PAGED, backend, prefix="zero")
        moved = pull(other, handle, carrier)
        stories.tell(other, {moved: [1, 2, 3] * 5, other.fork(moved): [4] * 9})
        assert found(other, *salts) == [0, 0, 0]
        assert moved.salt is None
        third = stories.create(stories.PAGED, backend, prefix="zero")
        theirs = pull(third, handle, carrier, salt="bob")
        assert theirs.salt == "bob"
        assert third.digest([theirs]) == cache.digest([request])
        assert found(third, *salts) == [0, 0, 16]
    finally:
        if carried == "nixl":
            serving.set()
            thread.join()


@pytest.mark.parametrize("salt", ["", b"alice", 7, "\ud800", "x" * 10**6])
def test_a_salt_that_is_none_is_refused_before_anything_is_asked(desk, salt):
    handle = desk.export(desk.request)
    cache = stories.create(SPEC, "reference")
    with pytest.raises(ShapeError, match="pull: salt"):
        pull(cache, handle, Direct(desk), salt=salt)
    assert pull(cache, handle, Direct(desk)).length == 21


def test_a_handle_travels(desk):
    handle = desk.export(desk.request, lease_seconds=5)
    assert decode_handle(encode_handle(handle)) == handle
    assert issubclass(TransferError, KvcoreError)


def test_whoever_waits_for_a_step_to_export_keeps_nobody_from_the_desk(desk):
    """The thread of the step itself asks the desk, while another waits for the step's end."""
    cache, handle = desk._cache, desk.export(desk.request)
    waits, answered = threading.Event(), threading.Event()
    exported = []

    def export():
        waits.set()
        exported.append(desk.export(desk.request))

    def step():
        with cache.step({desk.request: 0}):
            other.start()
            waits.wait()
            time.sleep(0.1)  # until it stands before the cache's turn
            desk.manifest(handle.exporter, handle.number, handle.generation)
            answered.set()

    other, first = threading.Thread(target=export, daemon=True), threading.Thread(target=step, daemon=True)
    first.start()
    first.join(10)
    assert answered.is_set()
    other.join(10)
    assert len(exported) == 1
