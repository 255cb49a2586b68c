"""Two processes: one has a store and answers for it, the other has it as a peer; both do what they are asked to."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from multiprocessing.connection import wait
from typing import Any

import kvcore
from kvcore import store as stores
from kvcore.errors import KvcoreError
from kvcore.handoff import publish
from kvcore.requests.prefix import point_key
from kvcore.spec import presets
from kvcore.store import BlockExporter, BlockStore, HostTier, Peer
from tests.support import stories
from tests.support.ways import join, transport_of

SPEC = presets.deepseek_v4_flash_tiny(draft=False)
TOKENS = [(7 * number) % 251 for number in range(200)]
COUNT = 4 * SPEC.block_tokens
TIMEOUT, PAUSE = 4.0, 30.0
WAIT = 60.0
"""Seconds for a process to answer the test."""


def cache_of(backend: str = "reference") -> Any:
    return kvcore.create_cache(SPEC, backend=backend, max_requests=3, max_tokens=1024)


def saved(store: BlockStore) -> int:
    """Save the request that both processes can compute; its digest."""
    cache = cache_of()
    request = cache.admit()
    stories.tell(cache, {request: TOKENS[:COUNT]})
    stores.save(store, cache, request, TOKENS)
    return cache.digest([request])


def keys() -> list[bytes]:
    """Of its blocks, and of its state."""
    found = stores.keys_of(SPEC, TOKENS[:COUNT])
    return [*found, point_key(found[-1], [])]


def by_pipe(pipe: Any) -> Any:
    """A peer's ``ask`` over a pipe of ``multiprocessing``."""

    def ask(question: bytes, timeout: float) -> bytes:
        while pipe.poll(0):
            # To a question that was given up: what is behind it in the pipe would always be one too late.
            pipe.recv_bytes()
        pipe.send_bytes(question)
        if not pipe.poll(timeout):
            raise TimeoutError("no answer")
        return pipe.recv_bytes()

    return ask


class Exporting:
    """The process that has the blocks."""

    def __init__(self, way: str, folder: str, answers: Any) -> None:
        self.tier = HostTier(1 << 26)
        self.store = BlockStore([self.tier])
        self.digest = saved(self.store)
        self.exporter = BlockExporter(self.store, exported=self.publish if way == "file" else None)
        self.folder, self.answers = folder, answers
        self.late, self.dying = 0.0, False
        self.metadata = b""
        if way == "torch.distributed":
            from kvcore.interop.torch_distributed import serve

            join(folder, 0)
            self.begin(lambda: serve(self.exporter, 1, idle_seconds=WAIT))
        elif way == "nixl":
            from kvcore.interop import nixl

            server = nixl.NixlServer(self.exporter, nixl.agent(f"exporter {folder}"))
            self.metadata = server.metadata
            self.begin(lambda: server.serve(WAIT))

    def begin(self, serve: Any) -> None:
        def act() -> None:
            with contextlib.suppress(KvcoreError):
                serve()

        threading.Thread(target=act, daemon=True).start()

    def publish(self, handle: Any) -> None:
        publish(self.exporter, handle, self.folder)
        self.exporter.finish(handle.exporter, handle.number, handle.generation)

    def answer(self) -> None:
        question = self.answers.recv_bytes()
        time.sleep(self.late)
        self.answers.send_bytes(self.exporter.answer(question))
        if self.dying and b"export" in question:
            os.kill(os.getpid(), signal.SIGKILL)

    def about(self) -> Any:
        return self.digest, self.metadata

    def order(self) -> list[bytes]:
        return self.tier.held()

    def remove(self, key: bytes) -> bool:
        return self.store.remove(key)

    def flip(self, key: bytes, byte: int) -> None:
        data = bytearray(self.tier.peek(key))
        data[byte] ^= 1
        # Where it is, not as one that is put again.
        self.tier._pages[key] = bytes(data)

    def sleep(self, seconds: float) -> None:
        self.late = seconds

    def die(self) -> None:
        """As soon as pages are laid out and their handle is given."""
        self.dying = True


class Reading:
    """The process that asks."""

    def __init__(self, way: str, folder: str, asked: Any, metadata: bytes) -> None:
        self.ask, self.transport = by_pipe(asked), transport_of(way, folder, metadata)
        self.fresh(PAUSE)

    def fresh(self, pause: float, timeout: float = TIMEOUT) -> None:
        """Forget all pages, and what is known of the peer."""
        self.peer = Peer(self.ask, self.transport, timeout=timeout, pause=pause)
        self.store = BlockStore([HostTier(1 << 26)], peers=[self.peer])

    def load(self) -> Any:
        """(length, digest, reason of what failed, failures, seconds)."""
        cache, start = cache_of("torch_triton"), time.monotonic()
        request = stores.load(self.store, cache, TOKENS)
        spent = time.monotonic() - start
        length = 0 if request is None else request.length
        digest = None if request is None else cache.digest([request])
        return length, digest, self.peer.error and self.peer.error.reason, self.peer.failures, spent

    def found(self) -> int:
        return stores.find(self.store, SPEC, TOKENS)

    def held(self) -> list[bool]:
        return [self.store.has(key) for key in keys()]

    def fetch(self) -> Any:
        count = self.store.fetch(keys())
        return count, self.peer.error and self.peer.error.reason


def _exporting(way: str, folder: str, answers: Any, control: Any) -> None:
    side = Exporting(way, folder, answers)
    with contextlib.suppress(EOFError, OSError):
        while True:
            for ready in wait([answers, control]):
                if ready is answers:
                    side.answer()
                else:
                    _obey(side, control)


def _reading(way: str, folder: str, asked: Any, control: Any) -> None:
    side = Reading(way, folder, asked, control.recv())
    with contextlib.suppress(EOFError, OSError):
        while True:
            _obey(side, control)


def _obey(side: Any, control: Any) -> None:
    name, *arguments = control.recv()
    control.send(getattr(side, name)(*arguments))


class Pair:
    """Both processes, as the test drives them: ``exporter("flip", key, 3)``."""

    def __init__(self, way: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvcore.interop.torch_distributed", "numpy", "torch"])
        self._folder = tempfile.TemporaryDirectory()
        asked, answers = context.Pipe()
        self.ends, self.processes = {}, {}
        for name, work, pipe in (("exporter", _exporting, answers), ("reader", _reading, asked)):
            self.ends[name], there = context.Pipe()
            self.processes[name] = context.Process(target=work, args=(way, self._folder.name, pipe, there), daemon=True)
            self.processes[name].start()
            there.close()
        # Here nobody keeps them open: who is left learns that the other one is gone.
        asked.close()
        answers.close()
        if way != "nixl":
            self.ends["reader"].send(b"")
            self.digest, _ = self.exporter("about")
        else:
            self.digest, metadata = self.exporter("about")
            self.ends["reader"].send(metadata)

    def exporter(self, *command: Any) -> Any:
        return self._tell("exporter", command)

    def reader(self, *command: Any) -> Any:
        return self._tell("reader", command)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self._folder.cleanup()

    def _tell(self, name: str, command: Any) -> Any:
        self.ends[name].send(command)
        assert self.ends[name].poll(WAIT), f"no answer of the {name}"
        return self.ends[name].recv()
