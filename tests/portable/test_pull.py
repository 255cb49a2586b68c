"""Pulls: bit for bit through every carrier, and every reference that is not live refused with its reason."""

import importlib.util
import itertools
import threading

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, OutOfSlots, RollbackError, SnapshotError, TransferError
from kvcore.handoff import Direct, Exporter, FileTransport, decode_handle, encode_handle, publish, pull, region_table
from kvcore.interop import nixl
from kvcore.portable.manifest import root_of
from kvcore.portable.pages import page_layout
from kvcore.spec import presets
from tests.support import gloo, pulling, scene, stories
from tests.support.fake_nixl import FakeAgent

BACKENDS = ("reference", "torch_triton")
SPECS = [stories.LATENT, stories.MIXED, stories.STORED]


@pytest.fixture(scope="module")
def pair():
    """Two processes: rank 0 exports, rank 1 pulls."""
    processes = gloo.Processes(2)
    yield processes
    processes.close()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, id=" to ".join(pair)) for pair in itertools.product(BACKENDS, BACKENDS)],
)
@pytest.mark.parametrize("count", [0, 1, 16, 41])
def test_a_pulled_request_is_the_exported_one(source, target, spec, count):
    cache = stories.create(spec, source)
    cache.admit()
    request = cache.admit()
    if count:
        stories.tell(cache, {request: list(range(count))})
    desk = Exporter(cache)
    handle = decode_handle(encode_handle(desk.export(request)))
    digest = cache.digest([request])
    # The export is a finished copy: the request goes on, and its slot gets another.
    stories.tell(cache, {request: [7, 8, 9]})
    cache.release(request)
    other = stories.create(spec, target, layout="planar", max_requests=2, max_tokens=128)
    stories.tell(other, {other.admit(): [3] * 11})
    moved = pull(other, handle, Direct(desk), chunk_pages=2)
    assert other.digest([moved]) == digest
    assert moved.tokens == tuple(range(count))
    stories.tell(other, {moved: [7, 8, 9]})
    if source == target or spec is stories.STORED:
        assert other.digest([moved]) == stories.retell(source, spec, [*range(count), 7, 8, 9])


def test_a_pulled_request_can_be_rolled_back_as_far(backend):
    cache = stories.create(stories.LATENT, backend, max_draft_tokens=4)
    request = cache.admit()
    stories.tell(cache, {request: list(range(45))})
    desk = Exporter(cache)
    other = stories.create(stories.LATENT, backend, max_draft_tokens=4)
    moved = pull(other, desk.export(request), Direct(desk))
    with pytest.raises(RollbackError, match="41 to 45"):
        other.truncate(moved, 40)
    other.truncate(moved, 41)
    assert other.digest([moved]) == stories.retell(backend, stories.LATENT, range(41))


def test_the_five_stale_references_are_refused(carrier_world):
    world = carrier_world
    handle = world.export(40)
    unknown = msgspec.structs.replace(handle, number=handle.number + 1)
    foreign = msgspec.structs.replace(handle, exporter="00" * 16)
    later = msgspec.structs.replace(handle, generation=handle.generation + 1)
    for reference in (unknown, foreign, later):
        assert world.refusal(reference) == "unknown"
    assert world.range_refusal(handle, handle.pages - 1, 2) == "out_of_range"
    assert world.range_refusal(handle, -1, 1) == "out_of_range"
    # Consumed.
    assert world.refusal(handle) == "committed"
    assert world.refusal(handle) == "consumed"
    # Stale after reuse: the place holds another request now, and its answer is not given for the first one's.
    second = world.export(25)
    assert (second.number, second.generation) == (handle.number, handle.generation + 1)
    assert world.refusal(handle) == "stale"
    # Lease expired.
    world.let_time_pass(61)
    assert world.refusal(second) == "expired"
    third = world.export(30)
    assert world.refusal(third) == "committed"


class InProcess:
    """A desk and a cache in this process, through ``Direct`` or files."""

    def __init__(self, folder):
        self.now = 0.0
        self.folder = folder
        self.cache = stories.create(pulling.SPEC, "reference")
        self.desk = Exporter(self.cache, places=1, clock=lambda: self.now)
        self.carrier = FileTransport(folder, clock=lambda: self.now) if folder else Direct(self.desk)

    def export(self, count):
        request = self.cache.admit()
        stories.tell(self.cache, {request: list(range(count))})
        if self.folder and self.now == 0 and (path := next(self.folder.iterdir(), None)):
            # Files that were pulled tell the desk by its own lease; here the reader says so.
            assert path.suffix == ".kvexport"
            self.desk.finish(self.desk.name, 0, self.generation)
        handle = self.desk.export(request)
        self.generation = handle.generation
        self.cache.release(request)
        if self.folder:
            publish(self.desk, handle, self.folder)
        return handle

    def refusal(self, handle):
        return pulling.outcome(handle, self.carrier)

    def range_refusal(self, handle, first, count):
        with pytest.raises(TransferError) as caught:
            self.carrier.fetch(handle, first, np.zeros((count, handle.page_bytes), np.uint8), timeout=5)
        return caught.value.reason

    def let_time_pass(self, seconds):
        self.now += seconds


class ThroughNixl(InProcess):
    """The same through NIXL's calls: its own agents where it is installed, stand-ins elsewhere."""

    def __init__(self, number):
        super().__init__(None)
        make = nixl.agent if importlib.util.find_spec("nixl") else FakeAgent
        self.server = nixl.NixlServer(self.desk, make(f"exporter {number}"))
        self.agent = make(f"importer {number}")
        self.carrier = nixl.NixlTransport(self.agent, self.server.metadata)
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while not self.done.is_set():
            self.server.serve(0.05)

    def close(self):
        self.done.set()
        self.thread.join()


class TwoProcesses:
    """The same over torch.distributed; each call is made by both processes."""

    def __init__(self, pair):
        self.run = pair.run
        self.run(pulling.begin)

    def export(self, count):
        return self.run(pulling.export, count)[0]

    def refusal(self, handle):
        return self.run(pulling.pull_from_peer, handle)[1]

    def range_refusal(self, handle, first, count):
        return self.run(pulling.fetch_from_peer, handle, first, count)[1]

    def let_time_pass(self, seconds):
        self.run(pulling.pass_time, seconds)


@pytest.fixture(params=["direct", "file", "torch.distributed", "nixl"])
def carrier_world(request, tmp_path):
    """Exports and pulls through one carrier."""
    if request.param == "nixl":
        world = ThroughNixl(tmp_path)
        yield world
        world.close()
    elif request.param == "torch.distributed":
        yield TwoProcesses(request.getfixturevalue("pair"))
    else:
        yield InProcess(tmp_path if request.param == "file" else None)


def test_a_service_answers_nonsense_and_goes_on(pair):
    world = TwoProcesses(pair)
    handle = world.export(40)
    assert world.run(pulling.ask_nonsense, handle)[1] == ["unknown"] * 8 + ["out_of_range"] * 3 + ["unknown"]
    # None of it was taken for a verb: the export is still there, once.
    assert [world.refusal(handle), world.refusal(handle)] == ["committed", "consumed"]


def test_a_peer_that_answers_nonsense_is_not_believed(pair):
    world = TwoProcesses(pair)
    handle = world.export(40)
    assert world.run(pulling.believe_lies, handle)[1] == ["damaged"] * len(pulling.LIES)
    assert world.refusal(handle) == "committed"


def test_context_shards_pull_all_or_none(pair, tmp_path):
    cache = stories.create(pulling.SPEC, "reference")
    request = cache.admit()
    stories.tell(cache, {request: list(range(40))})
    desk = Exporter(cache)
    handle = desk.export(request, readers=2)
    publish(desk, handle, tmp_path, readers=2)
    arguments = str(tmp_path), encode_handle(handle)
    assert pair.run(pulling.pull_together, *arguments, 1) == [("peer_lost", True), ("damaged", True)]
    assert pair.run(pulling.pull_together, *arguments, None) == [("committed", True)] * 2


def test_memory_that_is_gone_cannot_be_read(tmp_path):
    """One-sided reads ask nobody: what was replaced meanwhile is not registered any more, or does not verify."""
    world = ThroughNixl(tmp_path)
    try:
        handle = world.export(40)
        inner = world.agent.initialize_xfer

        def late(*arguments):
            # Between the answer and the read the place gets another export.
            if world.desk.expire() or handle.generation == world.generation:
                world.let_time_pass(61)
                world.export(33)
                world.server._register(0, (world.desk.name, 0, world.generation))
            return inner(*arguments)

        world.agent.initialize_xfer = late
        assert world.refusal(handle) in ("peer_lost", "damaged", "stale")
    finally:
        world.close()


def test_a_request_takes_a_descriptor_for_each_block_and_page_of_its_record(tmp_path):
    """Whatever the number of layers: 128K tokens of DeepSeek-V4-Pro are far fewer than a thousand."""
    world = ThroughNixl(tmp_path)
    try:
        handle = world.export(40)
        there = stories.create(pulling.SPEC, "reference")
        assert pull(there, handle, world.carrier).length == 40
        blocks = -(-40 // pulling.SPEC.block_tokens)
        if isinstance(world.agent, FakeAgent):
            assert world.agent.descriptors == handle.pages < 2 * blocks + 2
    finally:
        world.close()
    assert page_layout(presets.deepseek_v4_pro(), 131072 - 3, 131072).pages == 531 <= 1000


class Faulty(Direct):
    """Changes what it carries."""

    def __init__(self, desk, change):
        super().__init__(desk)
        self._change = change
        self.pages = None

    def fetch(self, handle, first, into, *, timeout):
        super().fetch(handle, first, into, timeout=timeout)
        self._change(first, into)


def flip(page, byte):
    def change(first, into):
        if first <= page < first + len(into):
            into[page - first, byte] ^= 0x10

    return change


def swap(_, into):
    into[[0, 1]] = into[[1, 0]]


def nothing(_, into):
    into[:] = 0


def late(_, into):
    into[1:] = into[:-1].copy()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(flip(0, 0), "page 0", id="the first bit of a page"),
        pytest.param(flip(2, 40), "page 2", id="one bit of another page"),
        pytest.param(flip(5, 3), "the record", id="one bit of a ring"),
        pytest.param(swap, "page 0", id="two pages swapped"),
        pytest.param(nothing, "page 0", id="zeros"),
        pytest.param(late, "page 1", id="every page one late"),
    ],
)
def test_what_comes_damaged_is_refused_and_changes_nothing(backend, change, named):
    cache = stories.create(stories.LATENT, backend)
    request = cache.admit()
    stories.tell(cache, {request: list(range(77))})
    desk = Exporter(cache)
    handle = desk.export(request, readers=2)
    assert page_layout(stories.LATENT, cache._state.least_length(request), 77).blocks == 5
    other = stories.create(stories.LATENT, backend)
    stories.tell(other, {other.admit(): [5] * 20})
    before = scene.raw(other), other.digest(), other.free_slots, other.free_blocks
    with pytest.raises(TransferError, match=named) as caught:
        pull(other, handle, Faulty(desk, change))
    assert caught.value.reason == "damaged"
    assert (scene.raw(other), other.digest(), other.free_slots, other.free_blocks) == before
    assert other.digest([pull(other, handle, Direct(desk))]) == cache.digest([request])


def test_every_flipped_bit_of_every_page_is_noticed(rng):
    cache = stories.create(stories.STORED, "reference")
    request = cache.admit()
    stories.tell(cache, {request: list(range(21))})
    desk = Exporter(cache)
    handle = desk.export(request, readers=1000)
    for _ in range(60):
        page, byte = int(rng.integers(handle.pages)), int(rng.integers(handle.page_bytes))
        other = stories.create(stories.STORED, "reference", max_requests=1, max_tokens=64)
        with pytest.raises(TransferError):
            pull(other, handle, Faulty(desk, flip(page, byte)))


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        pytest.param({"max_requests": 1}, OutOfSlots, id="no slot"),
        pytest.param({"max_requests": 2, "max_tokens": 40}, OutOfBlocks, id="no blocks"),
    ],
)
def test_without_room_nothing_changes(backend, sizes, error):
    cache = stories.create(stories.MIXED, backend)
    request = cache.admit()
    stories.tell(cache, {request: list(range(40))})
    desk = Exporter(cache)
    handle = desk.export(request)
    other = stories.create(stories.MIXED, backend, **sizes)
    stories.tell(other, {other.admit(): [5] * 20})
    before = scene.raw(other), other.digest(), other.free_slots, other.free_blocks
    with pytest.raises(error):
        pull(other, handle, Direct(desk))
    assert (other.digest(), other.free_slots, other.free_blocks) == before[1:]
    # Not consumed: it can be pulled where there is room.
    assert pull(stories.create(stories.MIXED, backend), handle, Direct(desk)).length == 40


def test_another_spec_is_refused(backend):
    cache = stories.create(stories.MIXED, backend)
    desk = Exporter(cache)
    handle = desk.export(cache.admit())
    with pytest.raises(SnapshotError, match="spec"):
        pull(stories.create(stories.LATENT, backend), handle, Direct(desk))


def test_a_handle_of_other_bytes_is_refused():
    with pytest.raises(TransferError) as caught:
        decode_handle(b"\x81\xa1x")
    assert caught.value.reason == "damaged"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"floor": 22}, id="rows from beyond the end"),
        pytest.param({"tokens": [1, 2]}, id="fewer ids than tokens"),
        pytest.param({"length": "21"}, id="a length that is no number"),
    ],
)
def test_a_manifest_that_makes_no_request_is_refused(change):
    cache = stories.create(stories.STORED, "reference")
    request = cache.admit()
    stories.tell(cache, {request: list(range(21))})
    desk = Exporter(cache)
    handle = desk.export(request)

    class Lying(Direct):
        """An exporter whose own root vouches for it."""

        def manifest(self, handle, *, timeout):
            assert timeout > 0
            assert handle.root == root_of(told)
            return told

    known = msgspec.json.decode(desk.manifest(handle.exporter, handle.number, handle.generation))
    told = msgspec.json.encode({**known, "request": {**known["request"], **change}})
    with pytest.raises(TransferError, match="manifest") as caught:
        pull(cache, msgspec.structs.replace(handle, root=root_of(told)), Lying(desk))
    assert caught.value.reason == "damaged"
    assert cache.requests == (request,)


def test_a_full_desk_keeps_its_leases_and_frees_ended_ones():
    now = [0.0]
    cache = stories.create(stories.MIXED, "reference")
    request = cache.admit()
    desk = Exporter(cache, places=2, clock=lambda: now[0])
    desk.export(request, lease_seconds=10)
    desk.export(request, lease_seconds=20)
    with pytest.raises(OutOfSlots):
        desk.export(request)
    now[0] = 10.0
    assert desk.export(request).number == 0
    now[0] = 30.0
    assert desk.expire() == 1


def test_a_long_request_is_hundreds_of_pieces():
    flash = presets.deepseek_v4_flash(draft=False)
    layout = page_layout(flash, 131_072, 131_072)
    assert layout.blocks == 512
    assert 512 < layout.pages < 600
    # 64 + 64 + 2 rows a block of 21 CSA and 20 HCA layers.
    assert layout.page_bytes == 21 * 64 * (584 + 68) + 20 * 2 * 584
    layerwise = len(layout.history.strips) * layout.blocks
    assert layerwise == 512 * 62


def test_the_region_table_says_what_lies_where(backend):
    cache = stories.create(stories.LATENT, backend, max_requests=3, max_tokens=64)
    table = {region.name: region for region in region_table(cache)}
    assert set(table) == set(cache.pools)
    entries = table["0.entries.page"]
    assert entries.layers == (0, 2)
    assert (entries.role, entries.growth, entries.units, entries.tokens_per_state) == ("entries", "block", 4, 4)
    assert entries.axes == {"layers": 1, "blocks": 4, "heads": 1, "states": 4, "content": 32}
    assert (entries.in_checkpoint, entries.sharding, entries.window) == (False, "by_block", None)
    window = table["0.window.page"]
    assert (window.growth, window.units, window.window, window.in_checkpoint) == ("slot", 3, 6, True)
    for region in table.values():
        # The addresses are those of the memory: read it there.
        import ctypes

        for unit, (address, size, device) in enumerate(region.descriptors(range(region.units))):
            held = np.frombuffer(ctypes.string_at(address, size), np.uint8)
            assert held.tolist() == kvcore.to_numpy(cache.pools[region.name])[unit].tolist()
            assert device == 0


def test_pages_whose_way_is_not_trusted_have_a_digest_that_nobody_forges(backend):
    cache = stories.create(stories.MIXED, backend)
    request = cache.admit()
    stories.tell(cache, {request: list(range(21))})
    for digest, accepted in (("xxh3_128", ("xxh3_128", "sha256")), ("sha256", ("sha256",))):
        desk = Exporter(cache, digest=digest)
        moved = pull(cache, desk.export(request), Direct(desk), digests=accepted)
        assert cache.digest([moved]) == cache.digest([request])
        cache.release(moved)
    desk = Exporter(cache)
    with pytest.raises(kvcore.errors.TransferError, match=r"pages verified by xxh3_128; allowed: sha256"):
        pull(cache, desk.export(request), Direct(desk), digests=("sha256",))
    with pytest.raises(kvcore.errors.SpecError, match="xxh3_128 or sha256"):
        Exporter(cache, digest="lanes")


def test_a_long_request_of_a_large_model_is_few_pieces():
    layout = page_layout(presets.deepseek_v4_pro(), 131_072 - 8, 131_072)
    assert layout.pages <= 1000
    assert layout.blocks == 131_072 // 256
