"""Blocks from another process's store: right, or not there with the reason; nobody waits for them twice."""

import importlib.util
import signal
import threading
import time

import msgspec
import numpy as np
import pytest

from kvcore import store as stores
from kvcore.errors import OutOfSlots, ShapeError, TransferError
from kvcore.handoff import Direct, FileTransport, decode_handle, encode_handle, publish
from kvcore.portable.manifest import root_of
from kvcore.store import BlockExporter, BlockRemoved, BlockStore, BlockStored, DiskTier, HostTier, Peer
from kvcore.store.questions import Answer, Listed, Listing, Question
from kvcore.store.seal import HEAD
from kvcore.store.store import About
from tests.support import block_peers
from tests.support.block_peers import COUNT, SPEC, TOKENS, cache_of, keys, saved
from tests.support.fake_nixl import FakeAgent

WAYS = ["file", "torch.distributed", *(["nixl"] if importlib.util.find_spec("nixl") else [])]


@pytest.fixture(params=WAYS)
def pair(request):
    made = block_peers.Pair(request.param)
    yield made, request.param
    made.close()


def test_two_processes(pair):
    """One pair for all of it: processes take seconds to start."""
    pair, way = pair
    order = pair.exporter("order")
    assert pair.reader("found") == COUNT
    assert pair.reader("held") == [False] * len(keys()), "no page is read to find it"
    length, digest, reason, failures, _ = pair.reader("load")
    assert (length, digest, reason, failures) == (COUNT, pair.digest, None, 0)
    assert pair.reader("held") == [True] * len(keys())
    assert pair.exporter("order") == order, "what others read is no use of a page here"

    # One bit, in the head, in the first row, in the last byte: that page is not there, nor any behind it.
    for byte in (0, 20, HEAD.size, -1):
        pair.reader("fresh", 30.0)
        pair.exporter("flip", keys()[1], byte)
        count, reason = pair.reader("fetch")
        assert (count, reason) == (len(keys()) - 1, "damaged")
        pair.exporter("flip", keys()[1], byte)

    # What goes between question and fetch is a miss.
    pair.reader("fresh", 30.0)
    assert pair.reader("found") == COUNT
    pair.exporter("remove", keys()[2])
    assert pair.reader("fetch") == (len(keys()) - 1, None)
    assert pair.reader("held") == [key != keys()[2] for key in keys()]

    # An answer that comes too late.
    pair.reader("fresh", 0.001, 1.0)
    pair.exporter("sleep", 1.5)
    assert pair.reader("fetch") == (0, "timeout")
    pair.exporter("sleep", 0.0)
    time.sleep(0.01)
    assert pair.reader("fetch") == (len(keys()) - 1, "timeout"), "the reason is that of the last that failed"

    # Stopped rather than killed: it holds its end and says nothing. Who looks for pages waits once.
    pair.reader("fresh", 30.0)
    pair.signal("exporter", signal.SIGSTOP)
    length, _, reason, failures, spent = pair.reader("load")
    assert (length, reason, failures) == (0, "timeout", 1)
    assert spent < 2 * block_peers.TIMEOUT
    assert pair.reader("load")[4] < 1.0
    pair.signal("exporter", signal.SIGCONT)
    time.sleep(0.5)

    # Killed when the pages are laid out: who has them in a folder needs nobody any more.
    pair.reader("fresh", 30.0)
    pair.exporter("die")
    count, reason = pair.reader("fetch")
    assert count == (len(keys()) - 1 if way == "file" else 0)
    assert reason in ("peer_lost", "timeout")
    pair.reader("fresh", 30.0)
    length, _, reason, failures, spent = pair.reader("load")
    assert (length, reason, failures) == (0, "peer_lost", 1)
    assert spent < 2 * block_peers.TIMEOUT


class Direct2(Direct):
    """In this process, with what a test does to manifests and pages on their way."""

    manifested = staticmethod(lambda data: data)
    fetched = staticmethod(lambda _pages: None)

    def manifest(self, handle, *, timeout):
        return self.manifested(super().manifest(handle, timeout=timeout))

    def fetch(self, handle, first, into, *, timeout):
        super().fetch(handle, first, into, timeout=timeout)
        self.fetched(into)


class World:
    """A store, its exporter, and another store that has it as a peer, in this process."""

    def __init__(self, secrets=(None, None), pages=3, peer=None, **options):
        self.tier = HostTier(1 << 26)
        self.store = BlockStore([self.tier], secret=secrets[0])
        for number in range(pages):
            self.store.put(key(number), page(number))
        self.exporter = BlockExporter(self.store, **options)
        self.transport = Direct2(self.exporter)
        self.questions = []
        self.answered = lambda answer: answer
        self.peer = Peer(self.ask, self.transport, **(peer or {}))
        self.near = HostTier(1 << 26)
        self.other = BlockStore([self.near], peers=[self.peer], secret=secrets[1])

    def ask(self, question, timeout):
        assert 0 < timeout <= 2.0
        self.questions.append(msgspec.msgpack.decode(question, type=Question))
        return self.answered(self.exporter.answer(question))

    def reason(self):
        return self.peer.error and self.peer.error.reason

    def free(self):
        return all(place.staged is None for place in self.exporter._places)


def key(number):
    return number.to_bytes(4, "big") * 8


def page(number, size=None):
    return np.random.default_rng(number).bytes(size or 100 + 7 * number)


def test_what_no_tier_has_comes_from_a_peer_and_stays():
    world = World()
    wanted = [key(0), key(1), key(9), key(2)]
    assert world.other.longest(wanted) == 2
    assert len(world.questions) == 1, "one question for all keys"
    assert not world.other.has(key(0)), "of tiers alone"
    assert [world.other.get(one) for one in wanted] == [page(0), page(1), None, page(2)]
    assert world.near.held() == [key(0), key(1), key(2)]
    assert (world.reason(), world.free(), world.other.damaged) == (None, True, [])
    count = len(world.questions)
    assert world.other.get(key(0)) == page(0)
    assert world.other.longest(wanted[:2]) == 2
    assert len(world.questions) == count, "nobody is asked for what is here"
    assert world.other.longest([key(0), key(9)]) == 1
    assert world.questions[-1].keys == [key(9)]


def test_a_fetch_is_one_question_as_far_as_one_export_goes():
    world = World(pages=9, most_bytes=4 * (HEAD.size + 130))
    wanted = [key(number) for number in range(12)]
    assert world.other.fetch(wanted) == 9
    assert [world.other.get(one) for one in wanted[:9]] == [page(number) for number in range(9)]
    verbs = [(one.verb, len(one.keys)) for one in world.questions]
    assert verbs[0] == ("export", 12)
    assert 3 <= len(verbs) <= 5
    assert verbs[-1] == ("export", 3), "what nobody has is asked for until nothing comes"
    assert world.free()
    # A page that is larger than all of it goes alone.
    world.store.put(key(50), page(50, 5000))
    assert world.other.get(key(50)) == page(50, 5000)
    assert world.other.fetch([]) == 0


def test_what_others_read_is_no_use_of_a_page():
    world = World()
    assert world.other.get(key(0)) == page(0)
    assert world.tier.held() == [key(0), key(1), key(2)]


def test_pages_of_all_sizes_go_together(monkeypatch):
    monkeypatch.setattr("kvcore.store.exports.np.empty", lambda shape, dtype: np.full(shape, 0xEE, dtype))
    world = World(pages=0)
    sizes = [0, 1, 700, 700, 700, 699, 701, 5000, 64]
    for number, size in enumerate(sizes):
        world.store.put(key(number), bytes([number + 1]) * size)
    assert world.other.fetch([key(number) for number in range(len(sizes))]) == len(sizes)
    assert [world.other.get(key(number)) for number in range(len(sizes))] == [
        bytes([number + 1]) * size for number, size in enumerate(sizes)
    ]
    handle = world.exporter.export([key(2), key(3), key(5), key(7)])
    pages = world.exporter.pages(handle.exporter, handle.number, handle.generation, 0, handle.pages)
    size = HEAD.size + 700
    assert pages.shape == (1 + 1 + 1 + 7, size)
    rest = pages[-1, HEAD.size + 5000 - 6 * size :]
    assert (pages[0, -1], pages[2, -2], pages[2, -1], len(rest), rest.any()) == (3, 6, 0, 284, False)


@pytest.mark.parametrize("where", ["manifest", "pages"])
def test_a_bit_that_is_flipped_on_the_way_is_found(where):
    world = World(pages=2)
    size = 2 * (2 * HEAD.size + 207)
    for at in range(0, size, 5):

        def flipped(data, at=at):
            flat = np.frombuffer(data, np.uint8).copy() if where == "manifest" else data.reshape(-1)
            flat[at % len(flat)] ^= 1 << at % 8
            return flat.tobytes()

        setattr(world.transport, "manifested" if where == "manifest" else "fetched", flipped)
        came = world.other.fetch([key(0), key(1)])
        if where == "manifest":
            assert (came, world.reason()) == (0, "damaged")
        else:
            # Of a shorter page zeros are left behind it, which are nobody's.
            assert came in (1, 2)
        for number in range(2):
            if world.near.has(key(number)):
                assert world.other._get(key(number)) == page(number)
        assert (came == 2) == (len(world.near.held()) == 2)
        world.other.clear()
    assert len(set(world.other.damaged)) == (2 if where == "pages" else 0)
    del world.transport.__dict__["manifested" if where == "manifest" else "fetched"]
    assert world.other.fetch([key(0), key(1)]) == 2


def test_another_page_under_a_key_is_not_taken():
    world = World()
    whole = world.tier.peek(key(1))
    world.tier.put(key(0), whole)
    assert world.other.get(key(0)) is None
    assert (world.reason(), world.other.damaged) == ("damaged", [key(0)])
    assert world.other.get(key(1)) == page(1)


@pytest.mark.parametrize(
    ("secrets", "taken"),
    [
        pytest.param((b"s" * 16, b"s" * 16), True, id="who knows it"),
        pytest.param((b"t" * 16, b"s" * 16), False, id="another"),
        pytest.param((None, b"s" * 16), False, id="nobody's"),
    ],
)
def test_a_peer_without_the_secret_is_not_believed(secrets, taken):
    world = World(secrets)
    assert (world.other.get(key(0)) == page(0)) == taken
    assert world.other.has(key(0)) == taken


def test_another_peer_has_what_the_first_has_damaged():
    first, second = World(), World()
    first.tier.put(key(1), b"something else")
    store = BlockStore([HostTier(1 << 20)], peers=[first.peer, second.peer])
    assert store.longest([key(0), key(1), key(2), key(3)]) == 3
    assert len(second.questions) == 1, "the second is asked for what the first lacks"
    assert second.questions[0].keys == [key(3)]
    assert store.fetch([key(0), key(1), key(2)]) == 3
    assert [store.get(key(number)) for number in range(3)] == [page(number) for number in range(3)]


ANSWERS = [
    pytest.param(lambda _: b"nonsense", id="nonsense"),
    pytest.param(lambda _: b"", id="nothing"),
    pytest.param(lambda answer: msgspec.structs.replace(answer, number=answer.number + 1), id="of another question"),
    pytest.param(lambda answer: msgspec.structs.replace(answer, handle=b"no handle"), id="no handle"),
    pytest.param(lambda answer: msgspec.structs.replace(answer, reason="because\x1b[2J"), id="a reason of its own"),
    pytest.param(lambda answer: changed(answer, pages=1 << 40), id="more pages than blocks have"),
    pytest.param(lambda answer: changed(answer, root=bytes(32)), id="another root"),
]


def changed(answer, **fields):
    handle = msgspec.structs.replace(decode_handle(answer.handle), **fields)
    return msgspec.structs.replace(answer, handle=encode_handle(handle))


@pytest.mark.parametrize("wrong", ANSWERS)
def test_an_answer_that_no_exporter_gives_is_a_miss(wrong):
    world = World()

    def answered(answer):
        made = wrong(msgspec.msgpack.decode(answer, type=Answer))
        return made if isinstance(made, bytes) else msgspec.msgpack.encode(made)

    world.answered = answered
    assert world.other.get(key(0)) is None
    assert (world.reason(), world.near.held()) == ("damaged", [])
    assert "\x1b" not in str(world.peer.error)
    world.answered = lambda answer: answer
    assert world.other.get(key(0)) == page(0), "damage is no silence: it is asked again at once"


LISTINGS = [
    pytest.param(lambda blocks: [Listed(blocks[1].key, blocks[0].nbytes), *blocks[1:]], id="a key twice"),
    pytest.param(lambda blocks: [Listed(key(7), blocks[0].nbytes), *blocks[1:]], id="a key that nobody asked for"),
    pytest.param(lambda blocks: blocks[:-1], id="pages of no block"),
    pytest.param(lambda blocks: [Listed(blocks[0].key, 1 << 60), *blocks[1:]], id="more bytes than pages"),
    pytest.param(lambda blocks: [Listed(blocks[0].key, -5), *blocks[1:]], id="fewer than none"),
    pytest.param(lambda blocks: [Listed(blocks[0].key, 0), *blocks[1:]], id="none"),
]


@pytest.mark.parametrize("wrong", LISTINGS)
def test_a_manifest_that_does_not_fit_is_a_miss(wrong):
    world = World()

    def made(data):
        listing = msgspec.msgpack.decode(data, type=Listing)
        return msgspec.msgpack.encode(msgspec.structs.replace(listing, blocks=wrong(listing.blocks)))

    def answered(answer):
        found = msgspec.msgpack.decode(answer, type=Answer)
        handle = decode_handle(found.handle)
        listing = made(world.exporter.manifest(handle.exporter, handle.number, handle.generation))
        return msgspec.msgpack.encode(changed(found, root=root_of(listing)))

    world.answered, world.transport.manifested = answered, made
    assert world.other.fetch([key(0), key(1), key(2)]) == 0
    assert (world.reason(), world.near.held()) == ("damaged", [])


def test_an_export_is_no_larger_than_is_wanted():
    world = World(peer={"most_bytes": HEAD.size + 106})
    assert (world.other.get(key(1)), world.reason(), world.free()) == (None, "damaged", True)
    assert world.other.get(key(0)) == page(0)


def test_held_is_one_flag_a_key():
    world = World()
    world.answered = lambda answer: msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(answer, type=Answer), held=b"\1")
    )
    assert (world.other.longest([key(0), key(1)]), world.reason()) == (0, "damaged")


QUESTIONS = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"\xc1", id="no msgpack"),
    pytest.param(msgspec.msgpack.encode({"number": 1, "verb": "remove", "keys": []}), id="another verb"),
    pytest.param(msgspec.msgpack.encode({"number": 1, "verb": "held", "keys": [b""]}), id="an empty key"),
    pytest.param(msgspec.msgpack.encode({"number": 1, "verb": "held", "keys": [bytes(65)]}), id="a long key"),
    pytest.param(msgspec.msgpack.encode({"number": 1, "verb": "export", "keys": [b"k"] * 65537}), id="too many keys"),
    pytest.param(msgspec.msgpack.encode({"number": 1, "verb": "export", "keys": 7}), id="no keys"),
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_is_none_is_answered(question):
    world = World()
    assert msgspec.msgpack.decode(world.exporter.answer(question), type=Answer).reason == "damaged"
    assert world.free()


def test_leases_end_and_places_are_counted():
    now = [100.0]
    world = World(places=2, lease_seconds=30, clock=lambda: now[0])
    first, second = world.exporter.export([key(0)]), world.exporter.export([key(1), key(1)])
    assert (first.pages, second.pages, second.deadline) == (1, 1, 130.0)
    assert world.exporter.export([key(8)]) is None, "what is not here takes no place"
    with pytest.raises(OutOfSlots, match="2 at once"):
        world.exporter.export([key(2)])
    assert (world.other.get(key(2)), world.reason()) == (None, "no_room")
    now[0] += 31
    with pytest.raises(TransferError, match="whose lease has not ended"):
        world.exporter.manifest(first.exporter, first.number, first.generation)
    assert world.other.get(key(2)) == page(2)
    assert world.free(), "leases that ended hold nothing"
    # A place that is used again is not given for the old handle.
    third = world.exporter.export([key(1)])
    with pytest.raises(TransferError) as caught:
        world.exporter.manifest(first.exporter, third.number, first.generation)
    assert caught.value.reason == "stale"


def test_a_lease_that_ends_on_the_way_is_a_miss():
    now = [0.0]
    world = World(clock=lambda: now[0])
    answer = world.exporter.answer

    def late(question):
        found = answer(question)
        now[0] += 31
        return found

    world.exporter.answer = late
    assert (world.other.get(key(0)), world.reason()) == (None, "expired")


def test_numbers_are_checked():
    store = BlockStore([HostTier(1)])
    for options in ({"most_bytes": 0}, {"lease_seconds": 0.0}, {"lease_seconds": float("nan")}):
        with pytest.raises(ShapeError):
            BlockExporter(store, **options)
    for options in ({"timeout": 0.0}, {"pause": -1.0}, {"most_bytes": 0}):
        with pytest.raises(ShapeError):
            Peer(lambda *_: b"", Direct(BlockExporter(store)), **options)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("late"), "timeout"),
        (ConnectionRefusedError("nobody"), "peer_lost"),
        (BrokenPipeError("gone"), "peer_lost"),
        (EOFError("gone"), "peer_lost"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_who_is_silent_is_left_alone_for_a_while(error, reason):
    world = World(peer={"pause": 0.2})
    asked = []

    def silent(question, _timeout):
        asked.append(question)
        raise error

    world.peer._ask = silent
    assert [world.other.get(key(0)), world.other.longest([key(1)]), world.other.fetch([key(2)])] == [None, 0, 0]
    assert (len(asked), world.reason(), world.peer.failures) == (1, reason, 1)
    world.peer._ask = world.ask
    assert world.other.get(key(0)) is None
    time.sleep(0.25)
    assert world.other.get(key(0)) == page(0)


def test_nobody_waits_for_a_slow_peer_but_who_asks_it():
    world = World()
    world.other.put(key(20), page(20))
    waits, go = threading.Event(), threading.Event()

    def slow(answer):
        waits.set()
        assert go.wait(20)
        return answer

    world.answered = slow
    found = []
    asking = threading.Thread(target=lambda: found.append(world.other.get(key(0))))
    asking.start()
    assert waits.wait(20)
    assert world.other.get(key(20)) == page(20)
    assert world.other.put(key(21), page(21))
    go.set()
    asking.join(20)
    # It took longer than the two seconds of a question only if this machine stood still.
    assert found == [page(0)]


def test_engines_blocks_and_requests_come_from_a_peer():
    store = BlockStore([HostTier(1 << 26)])
    digest = saved(store)
    exporter = BlockExporter(store)
    questions = []

    def ask(question, _timeout):
        questions.append(msgspec.msgpack.decode(question, type=Question))
        return exporter.answer(question)

    other = BlockStore([HostTier(1 << 26)], peers=[Peer(ask, Direct(exporter))])
    assert stores.find(other, SPEC, TOKENS) == COUNT
    cache = cache_of()
    moved = stores.load(other, cache, TOKENS)
    assert (moved.length, cache.digest([moved])) == (COUNT, digest)
    assert [one.verb for one in questions] == ["held", "held", "export"], "a question for many blocks"
    # The first half is here, the rest there; a state that the peer lacks takes the prefix back to one that it has.
    for one in keys()[2:]:
        other.remove(one)
    store.remove(keys()[-1])
    assert stores.find(other, SPEC, TOKENS) == 0
    # What a peer has is saved here all the same: a peer may go.
    third = BlockStore([HostTier(1 << 26)], peers=[Peer(ask, Direct(exporter))])
    questions.clear()
    stores.save(third, cache, moved, TOKENS)
    assert (questions, all(map(third.has, keys()))) == ([], True)


def test_what_comes_from_a_peer_is_said():
    store, told = BlockStore([HostTier(1 << 26)]), []
    saved(store)
    exporter = BlockExporter(store)
    peer = Peer(lambda question, _timeout: exporter.answer(question), Direct(exporter))
    other = BlockStore([HostTier(1 << 26)], peers=[peer], events=told.extend)
    stores.find(other, SPEC, TOKENS)
    assert told == [], "what a peer has is not here"
    stores.load(other, cache_of(), TOKENS)
    blocks, size = stores.keys_of(SPEC, TOKENS), SPEC.block_tokens
    right = [
        BlockStored([one], blocks[at - 1] if at else None, TOKENS[at * size : (at + 1) * size], size, None, "CPU", None)
        for at, one in enumerate(blocks[: COUNT // size])
    ]
    assert told == right
    # What goes for another page is said, and so is what comes again; one page as many.
    told.clear()
    other.remove(blocks[1])
    assert other.get(blocks[1], About(blocks[0], TOKENS[size : 2 * size], size)) is not None
    assert told == [BlockRemoved([blocks[1]], "CPU"), right[1]]
    # Of a page whose tokens nobody said there is no event, as of one that is put so; nor of one that is damaged.
    told.clear()
    other.remove(blocks[0])
    assert other.get(blocks[0]) is not None
    other.remove(blocks[0])
    held = bytearray(store.tiers[0].peek(blocks[0]))
    held[-1] ^= 4
    store.tiers[0].put(blocks[0], bytes(held))
    assert other.get(blocks[0], About(None, TOKENS[:size], size)) is None
    assert told == [BlockRemoved([blocks[0]], "CPU")] * 2


def test_what_another_process_put_on_the_disk_is_said_when_it_comes_nearer(tmp_path):
    told = []
    BlockStore([DiskTier(tmp_path, 1 << 20)]).put(key(1), page(1))
    store = BlockStore([HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)], events=told.extend)
    assert store.get(key(1), About(key(0), [1, 2], 2)) == page(1)
    assert told == [BlockStored([key(1)], key(0), [1, 2], 2, None, "CPU", None)]


@pytest.mark.parametrize("way", ["file", "nixl"])
def test_pages_come_through_every_transport(way, tmp_path):
    world = World(pages=9)
    if way == "file":
        world.exporter._exported = lambda handle: publish(world.exporter, handle, tmp_path)
        transport = FileTransport(tmp_path)
        other = BlockStore([HostTier(1 << 20)], peers=[Peer(world.ask, transport)])
        assert other.fetch([key(number) for number in range(9)]) == 9
        assert [other.get(key(number)) for number in range(9)] == [page(number) for number in range(9)]
        return
    from kvcore.interop import nixl

    server = nixl.NixlServer(world.exporter, FakeAgent(f"exporter {tmp_path}"))
    transport = nixl.NixlTransport(FakeAgent(f"importer {tmp_path}"), server.metadata)
    done = threading.Event()

    def serve():
        while not done.is_set():
            server.serve(0.05)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        other = BlockStore([HostTier(1 << 20)], peers=[Peer(world.ask, transport)])
        assert other.fetch([key(number) for number in range(9)]) == 9
        assert [other.get(key(number)) for number in range(9)] == [page(number) for number in range(9)]
    finally:
        done.set()
        serving.join()
    assert world.free()
