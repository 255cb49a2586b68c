"""R10: what comes from elsewhere, changed at random: snapshots, blobs, manifests, specs as JSON, parity records.

Half of the inputs are changed in their structure and signed anew, as whoever lies can do; the others in their bytes.
Every input must be answered within a second of processor time and 256 MiB, by success or by an error of kvcore's own,
and what refuses it must be as it was: digest, free blocks and slots, requests. Batches run in processes of their own,
whose limits the system keeps; a failure prints its seed, what was changed, and the input.
"""

import base64
import contextlib
import functools
import json
import mmap
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import safetensors.numpy

import kvcore
from kvcore.errors import KvcoreError
from kvcore.foreign import UNREADABLE
from kvcore.handoff import Direct, Exporter, FileTransport, decode_handle, encode_handle, publish, pull
from kvcore.parity import merge
from kvcore.parity.html import render
from kvcore.parity.records import Report, parse, write
from kvcore.parity.show import failure_text, summarise
from kvcore.plan import plan_cache
from kvcore.portable import snapshot, version1
from kvcore.portable.blob import head_of, split
from kvcore.portable.manifest import root_of
from kvcore.spec import from_hf_config, from_json, presets, to_json
from tests.reliability import command
from tests.reliability.hostile import changed, changed_bytes
from tests.support import stories, version_1

SEED_INPUTS = 250
SECONDS = 1.0
MEBIBYTES = 256
LONGEST_WAIT = 60.0
"""Of the clock, for one input: a machine may be busy, and a process that waits uses no processor time."""

HTML_EVERY = 50
SMALL_BYTES, LARGE_BYTES = 1 << 22, 1 << 34
"""Pools in between may be right or too large: that is the machine's."""

LARGEST_INPUT = 1 << 22
"""Bytes."""

LENGTHS = (37, 9, 0, 64)
RECORDS = Path(__file__).parents[2] / "records"


class TooLong(BaseException):
    """An input took more than its time. Not an Exception: no handler may take it for an error of the input."""


class Kind(NamedTuple):
    """One kind of input.

    Attributes:
        inputs: valid ones.
        tree: an input as dicts and lists; what it returns is put back by ``join``.
        join: a tree as an input, signed so that it may be believed.
        take: give an input to the library; a number varies what is done with it.
    """

    inputs: Callable[[], list[bytes]]
    tree: Callable[[bytes], Any]
    join: Callable[[Any], bytes]
    take: Callable[[bytes, int], None]


@functools.cache
def cache_of() -> Any:
    """A cache with live requests, those that are exported, and room for others."""
    cache = stories.create(stories.MIXED, "reference", max_requests=len(LENGTHS) + 2, check=False, prefix="full")
    for number, length in enumerate(LENGTHS):
        request = cache.admit(salt="tenant" if number == 1 else None)
        if length:
            stories.tell(cache, {request: [100 * number + token for token in range(length)]})
    return cache


def told(cache: Any) -> tuple[Any, ...]:
    """All that a refusal must leave as it was, but the bytes."""
    known = [(request.length, request.blocks, request.tokens) for request in cache.requests]
    return cache.free_blocks, cache.free_slots, known


def raw(cache: Any) -> list[int]:
    """Check sums of all pools, free places too."""
    return [zlib.crc32(pool) for pool in cache.pools.values()]


class Changed(Exception):
    """A refusal that left something else behind."""


@contextlib.contextmanager
def unchanged(cache: Any, *, waits: bool = False) -> Any:
    """Errors leave the cache as it was; what was taken in is let go of again, and nothing else is changed by it.

    Gives a request that waits to be filled, if it is asked for.
    """
    before, live = told(cache), set(cache.requests)
    waiting = cache.admit() if waits else None
    known = told(cache), raw(cache)
    try:
        yield waiting
    except KvcoreError:
        if (told(cache), raw(cache)) != known:
            raise Changed("a refused input changed the cache") from None
        raise
    finally:
        for request in set(cache.requests) - live:
            cache.release(request)
    if told(cache) != before or cache.digest() != whole():
        raise Changed("an input that was taken and released changed the cache")


@functools.cache
def whole() -> str:
    """The digest of the cache's own requests."""
    return cache_of().digest()


@functools.cache
def blobs() -> list[bytes]:
    """Exports of requests of several lengths."""
    cache = cache_of()
    return [cache.export_request(request) for request in cache.requests[: len(LENGTHS)]]


@functools.cache
def old_blobs() -> list[bytes]:
    """The same as 0.1.0 wrote them."""
    cache = cache_of()
    return [version_1.blob(cache, request) for request in cache.requests[: len(LENGTHS)]]


def join_old_blob(tree: Any) -> bytes:
    if isinstance(tree, dict) and tree.get("root") == "signed":
        return version_1.signed({name: value for name, value in tree.items() if name != "root"})
    return msgspec.msgpack.encode(tree)


def old_blob_tree(data: bytes) -> Any:
    return {**msgspec.msgpack.decode(data), "root": "signed"}


def form_tree(data: bytes) -> Any:
    """A blob as its manifest and pages; its root is worked out when it is put together."""
    text, _, rest = split(memoryview(data), "input")
    return {"json": msgspec.json.decode(text), "rest": bytes(rest)}


def join_form(tree: Any) -> bytes:
    text = msgspec.json.encode(tree.get("json"))
    return head_of(text) + (tree["rest"] if isinstance(tree.get("rest"), bytes) else b"")


def take_blob(data: bytes, number: int) -> None:
    """Imported into a fresh request, or into one that waits."""
    cache = cache_of()
    with unchanged(cache, waits=bool(number % 2)) as waiting:
        cache.import_request(data, into=waiting, salt="tenant" if number % 4 == 0 else None)


@functools.cache
def snapshots() -> list[bytes]:
    """Snapshots of some and of all requests."""
    cache = cache_of()
    requests = list(cache.requests)
    return [snapshot.to_bytes(cache._state, some) for some in (requests, requests[:1], requests[1:3], [])]


@functools.cache
def old_snapshots() -> list[bytes]:
    """The same as 0.1.0 wrote them."""
    cache = cache_of()
    requests = list(cache.requests)
    return [version_1.snapshot(cache, some) for some in (requests, requests[:1], requests[1:3], [])]


def snapshot_tree(data: bytes) -> Any:
    """A snapshot as its directory and its requests; their places and roots are worked out again."""
    tree = form_tree(data)
    rest = tree.pop("rest")
    blobs = [rest[one["offset"] : one["offset"] + one["bytes"]] for one in tree["json"]["requests"]]
    tree["json"]["requests"] = "signed"
    return {**tree, "requests": list(map(form_tree, blobs))}


def join_snapshot(tree: Any) -> bytes:
    rest, entries = bytearray(), []
    requests = tree.get("requests")
    for one in requests if isinstance(requests, list) else []:
        blob = join_form(one) if isinstance(one, dict) else msgspec.json.encode(one)
        entries.append({"offset": len(rest), "bytes": len(blob), "root": blob[16:48].hex()})
        rest += blob + bytes(-len(blob) % 64)
    told = tree.get("json")
    if isinstance(told, dict) and told.get("requests") == "signed":
        told = {**told, "requests": entries}
    return head_of(msgspec.json.encode(told)) + bytes(rest)


def old_snapshot_tree(data: bytes) -> Any:
    end = 8 + int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8:end])
    metadata = header["__metadata__"]
    for name in ("requests", "sizes", "spec"):
        metadata[name] = msgspec.json.decode(metadata[name])
    metadata["root"] = "signed"
    return {"header": header, "rows": data[end:]}


def join_old_snapshot(tree: Any) -> bytes:
    header, rows = tree["header"], tree["rows"]
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    signed = isinstance(metadata, dict) and metadata.get("root") == "signed"
    if isinstance(metadata, dict):
        for name in ("requests", "sizes", "spec"):
            if name in metadata and not isinstance(metadata[name], str):
                metadata[name] = msgspec.json.encode(metadata[name]).decode()
        if signed:
            metadata["root"] = version1.NO_ROOT
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    rows = rows if isinstance(rows, bytes) else b""
    if signed:
        with contextlib.suppress(Exception):  # a file that safetensors refuses has no root
            arrays = safetensors.numpy.load(text + rows)
            text = text.replace(version1.NO_ROOT.encode(), version1.snapshot_root(text, arrays).encode())
    return text + rows


def take_snapshot(data: bytes, number: int) -> None:
    """Loaded into a cache of its own, of the file's sizes or of others."""
    file = os.memfd_create("snapshot")
    try:
        os.write(file, data)
        sizes: dict[str, Any] = {} if number % 2 else {"max_requests": 6, "max_tokens": 256}
        loaded = kvcore.load(f"/proc/self/fd/{file}", backend="reference", strict=number % 4 < 2, **sizes)
        try:
            loaded.digest()
        except MemoryError:
            # A file may say, and have, what fills most of the limit: then there is a cache, and no room beside it.
            if loaded.nbytes < MEBIBYTES << 18:
                raise
    finally:
        os.close(file)


@functools.cache
def desk() -> tuple[Exporter, list[Any]]:
    """Exports that lie on a desk."""
    cache = cache_of()
    made = Exporter(cache)
    return made, [made.export(request, lease_seconds=1e6, readers=10**9) for request in cache.requests[: len(LENGTHS)]]


def manifests() -> list[bytes]:
    """Manifests of those exports."""
    made, handles = desk()
    return [made.manifest(handle.exporter, handle.number, handle.generation) for handle in handles]


@functools.cache
def old_desk() -> tuple[Exporter, list[Any]]:
    """Exports without checkpoints, whose pages are those of 0.1.0."""
    cache = cache_of()
    made, sizes = Exporter(cache), {"lease_seconds": 1e6, "readers": 10**9, "checkpoints": False}
    return made, [made.export(request, **sizes) for request in cache.requests[: len(LENGTHS)]]


def old_manifests() -> list[bytes]:
    """The manifests that 0.1.0 wrote of them."""
    cache, (made, _) = cache_of(), old_desk()
    requests = enumerate(cache.requests[: len(LENGTHS)])
    return [version_1.staged(cache, request, (made.name, number, 0)).manifest for number, request in requests]


class Lying(Direct):
    """Gives another manifest than the desk has, and as many of its pages as there are."""

    def __init__(self, made: Exporter, manifest: bytes) -> None:
        super().__init__(made)
        self._told = manifest

    def manifest(self, handle: Any, *, timeout: float) -> bytes:
        del handle, timeout
        return self._told

    def fetch(self, handle: Any, first: int, into: Any, *, timeout: float) -> None:
        del timeout
        staged = self._exporter.staged(handle.exporter, handle.number, handle.generation).pages
        pages = staged[first : first + len(into)]
        into[: len(pages)] = pages


def take_manifest(data: bytes, number: int) -> None:
    """Pulled with a handle that vouches for it; or as a handle, or as a file of a shared folder, in its place."""
    take_manifest_of(desk(), data, number)


def take_old_manifest(data: bytes, number: int) -> None:
    """The same where pages are those of 0.1.0."""
    take_manifest_of(old_desk(), data, number)


def take_manifest_of(exports: tuple[Exporter, list[Any]], data: bytes, number: int) -> None:
    made, handles = exports
    handle, cache = handles[number % len(handles)], cache_of()
    with unchanged(cache):
        believed = msgspec.structs.replace(handle, root=root_of(data))
        pull(cache, believed, Lying(made, data), timeout=100, salt="tenant" if number % 2 else None)


@functools.cache
def _folder() -> Any:
    # Ends with this process; batches leave by _exit and remove nothing.
    return tempfile.TemporaryDirectory()


def folder() -> Path:
    """Where exports lie as files."""
    return Path(_folder().name)


def take_handle(data: bytes, number: int) -> None:
    """A handle, and the pull that it asks for."""
    del number
    made, _ = desk()
    cache = cache_of()
    with unchanged(cache):
        pull(cache, decode_handle(data), Direct(made), timeout=100)


def take_file(data: bytes, number: int) -> None:
    """A file in the folder of a ``FileTransport``."""
    _, handles = desk()
    handle, cache = handles[number % len(handles)], cache_of()
    (folder() / f"{handle.exporter}.{handle.number}.kvexport").write_bytes(data)
    with unchanged(cache):
        pull(cache, handle, FileTransport(folder()), timeout=100)


def files() -> list[bytes]:
    """Exports as files."""
    made, handles = desk()
    return [publish(made, handle, folder(), readers=2).read_bytes() for handle in handles]


def file_tree(data: bytes) -> Any:
    end = 4 + int.from_bytes(data[:4], "little")
    return {"head": msgspec.msgpack.decode(data[4:end]), "rest": data[end:]}


def join_file(tree: Any) -> bytes:
    head = msgspec.msgpack.encode(tree["head"])
    return len(head).to_bytes(4, "little") + head + (tree["rest"] if isinstance(tree["rest"], bytes) else b"")


def specs() -> list[bytes]:
    """Specs of several families."""
    made = [*stories.SPECS.values(), stories.STORED, stories.DRAFTED, presets.deepseek_v4_flash_tiny()]
    return [to_json(spec).encode() for spec in made]


def take_spec(data: bytes, number: int) -> None:
    """Read, written, planned; a cache is made of it where it is small, or too large for anything."""
    spec = from_json(data)
    if from_json(to_json(spec)).digest != spec.digest:
        raise Changed("a spec is another one once it was written and read")
    sizes = {"max_requests": 1 + number % 3, "max_tokens": spec.block_tokens * (1 + number % 5)}
    plan = plan_cache(spec, **sizes)
    if not SMALL_BYTES < plan.nbytes < LARGE_BYTES:
        kvcore.create_cache(spec, backend="reference", **sizes).admit()


V4_RATIOS = [0, 0, 4, 128, 4, 0]
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8}
CONFIGURATIONS: list[dict[str, Any]] = [
    {"model_type": "llama", **WIDTHS, "num_key_value_heads": 2},
    {"model_type": "gemma3_text", **WIDTHS, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 64},
    {"model_type": "deepseek_v3", **WIDTHS, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    {
        "model_type": "deepseek_v4",
        **WIDTHS,
        "head_dim": 512,
        "num_hidden_layers": 5,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 8,
        "compress_ratios": V4_RATIOS,
    },
    {"model_type": "llava", "text_config": {"model_type": "mistral", **WIDTHS}},
]


def take_configuration(data: bytes, number: int) -> None:
    """A model's ``config.json``, made a spec and planned."""
    try:
        found = msgspec.json.decode(data)
    except UNREADABLE:
        found = data
    spec = from_hf_config(found)
    plan_cache(spec, max_requests=1, max_tokens=spec.block_tokens * (1 + number % 5))


@functools.cache
def report() -> Report:
    """A part of the recorded evidence, with what failed."""
    whole = parse((RECORDS / "parity.json.gz").read_bytes())
    chosen = [*whole.checks[:4], *(check for check in whole.checks if check.first_mismatch)][:8]
    return msgspec.structs.replace(whole, checks=tuple(chosen), runs=whole.runs[:2], tolerances=whole.tolerances[:3])


def records() -> list[bytes]:
    """Reports, one of them packed."""
    return [write(report()), write(msgspec.structs.replace(report(), quality=())), write(report(), packed=True)]


def take_record(data: bytes, number: int) -> None:
    """Read, summed up, merged, and now and then written as a page."""
    found = parse(data)
    summary = summarise(found)
    for record in found.checks:
        failure_text(record)
    if number % HTML_EVERY == 0:
        render(found)
    merge({"one": report(), "other": found})
    del summary


def json_tree(data: bytes) -> Any:
    return msgspec.json.decode(zlib.decompress(data, 31) if data[:2] == b"\x1f\x8b" else data)


KINDS = {
    "snapshot": Kind(snapshots, snapshot_tree, join_snapshot, take_snapshot),
    "blob": Kind(blobs, form_tree, join_form, take_blob),
    "manifest": Kind(manifests, json_tree, msgspec.json.encode, take_manifest),
    "snapshot of 0.1.0": Kind(old_snapshots, old_snapshot_tree, join_old_snapshot, take_snapshot),
    "blob of 0.1.0": Kind(old_blobs, old_blob_tree, join_old_blob, take_blob),
    "manifest of 0.1.0": Kind(old_manifests, msgspec.msgpack.decode, msgspec.msgpack.encode, take_old_manifest),
    "spec": Kind(specs, json_tree, msgspec.json.encode, take_spec),
    "record": Kind(records, json_tree, msgspec.json.encode, take_record),
    "config": Kind(
        lambda: [msgspec.json.encode(known) for known in CONFIGURATIONS],
        json_tree,
        msgspec.json.encode,
        take_configuration,
    ),
    "handle": Kind(
        lambda: [encode_handle(handle) for handle in desk()[1]],
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
        take_handle,
    ),
    "file": Kind(files, file_tree, join_file, take_file),
}


def mutated(name: str, seed: int, number: int) -> tuple[list[str], bytes]:
    """(what was changed, the input) of a number: the same whenever it is asked for."""
    kind, choice = KINDS[name], random.Random(f"{name}/{seed}/{number}")
    inputs = kind.inputs()
    data, other = choice.choice(inputs), choice.choice(inputs)
    if choice.random() < 0.3:
        what, bad = changed_bytes(choice, data, other)
        return [what], bad
    try:
        tree, sibling = kind.tree(data), kind.tree(other)
        done = [changed(choice, tree, sibling) for _ in range(choice.choice((1, 1, 1, 2, 4)))]
        bad = kind.join(tree)
    except (*UNREADABLE, KeyError, AttributeError, OverflowError):
        # What can't be written as such: a number beyond 8 bytes, a text where a part of the file was.
        what, bad = changed_bytes(choice, data, other)
        return [what], bad
    if choice.random() < 0.1:
        what, bad = changed_bytes(choice, bad, other)
        done.append(what)
    # Time and memory are bounded by what is at hand: of it, no more than a few times a valid input.
    return done, bad[:LARGEST_INPUT]


def batch(name: str, seed: int, first: int, progress: Any) -> dict[str, Any]:
    """Take a batch of inputs in this process, which is nobody else's: counts, and failures."""
    kind = KINDS[name]
    mutated(name, seed, 0)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + (MEBIBYTES << 20), resource.RLIM_INFINITY))

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {SECONDS} s of processor time")

    signal.signal(signal.SIGPROF, stop)
    happened: Counter[str] = Counter()
    failures = []
    for number in range(first, SEED_INPUTS):
        progress[:8] = number.to_bytes(8, "little")
        done, bad = mutated(name, seed, number)
        try:
            try:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                kind.take(bad, number)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            happened["taken"] += 1
        except KvcoreError as error:
            happened[type(error).__name__] += 1
            str(error)
        except (TooLong, Exception) as error:  # noqa: BLE001 - whatever else it is, it is what is looked for
            failures.append(failure(name, seed, number, f"{type(error).__name__}: {error}", done, bad))
            failures[-1]["trace"] += traceback.format_exc().splitlines()[-12:]
    return {"happened": dict(happened), "failures": failures}


def failure(name: str, seed: int, number: int, error: str, done: list[str], bad: bytes) -> dict[str, Any]:
    """A failure's record: its input is there whole, packed."""
    packed = base64.b64encode(zlib.compress(bad, 9)).decode()
    return {"seed": seed, "error": f"{name} {number}: {error}"[:500], "trace": [*done, f"input, zlib: {packed}"]}


def tell(seed: int, options: dict[str, str]) -> command.Told:
    """A batch of one kind, in a process of its own; kinds take turns."""
    names = options["kinds"].split(",")
    name = names[seed % len(names)]
    KINDS[name].inputs()
    reading, writing = os.pipe()
    progress = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            found = json.dumps(batch(name, seed, 0, progress)).encode()
            with os.fdopen(writing, "wb") as file:
                file.write(found)
        finally:
            os._exit(0)
    os.close(writing)
    data = received(child, reading, progress)
    _, status = os.waitpid(child, 0)
    progressed = int.from_bytes(progress[:8], "little")
    try:
        found = json.loads(data)
    except ValueError:
        done, bad = mutated(name, seed, progressed)
        ended = f"the process ended with status {status}"
        found = {"happened": {}, "failures": [failure(name, seed, progressed, ended, done, bad)]}
    for told_failure in found["failures"]:
        print(f"seed {seed}: {told_failure['error']}", *told_failure["trace"], sep="\n  ")
    counts = {"inputs": SEED_INPUTS, "kinds": {name: SEED_INPUTS}, "happened": {name: found["happened"]}}
    return command.Told(counts, found["failures"])


def received(child: int, reading: int, progress: Any) -> bytes:
    """What the child says, if it goes on: one that stays at an input for too long is ended."""
    data, last, since = b"", b"", time.monotonic()
    os.set_blocking(reading, False)
    while True:
        try:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            data += part
        except BlockingIOError:
            time.sleep(0.01)
        if progress[:8] != last:
            last, since = progress[:8], time.monotonic()
        elif time.monotonic() - since > LONGEST_WAIT:
            os.kill(child, signal.SIGKILL)
            break
    os.close(reading)
    return data


MAIN = "snapshot,blob,manifest,spec,record"
OLD = "snapshot of 0.1.0,blob of 0.1.0,manifest of 0.1.0"

FIGURE = command.Figure("R10", "inputs", 5 * SEED_INPUTS, 500_000, tell, {"kinds": MAIN})

if __name__ == "__main__":
    command.run_figure(__doc__, FIGURE)
