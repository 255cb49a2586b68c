"""Processes on gloo that run a function together, for tests: started once, given one task after another."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from tests.support.ways import join

TIMEOUT = 60.0
"""Seconds that a task may take."""


class Processes:
    """``count`` processes of one gloo group; ``run(function, *arguments)`` answers what each of them returned."""

    def __init__(self, count: int, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        # A fresh interpreter imports torch for seconds; one server without threads does so once, and is forked.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvcore.interop.torch_distributed", "numpy", "torch"])
        self._folder = tempfile.TemporaryDirectory()
        self.pipes = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            given = there, rank, count, self._folder.name, timeout
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(*arguments)`` in every process."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__qualname__, pickle.dumps(arguments)))
        answers: dict[int, Any] = {}
        end = time.monotonic() + self.timeout
        while len(answers) < len(self.pipes):
            # Whoever fails is heard first: the others wait for it in a collective until their time is over.
            ready = wait(
                [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers], max(0.0, end - time.monotonic())
            )
            assert ready, f"no answer in time of ranks {sorted(set(range(len(self.pipes))) - set(answers))}"
            for rank, pipe in enumerate(self.pipes):
                if pipe in ready:
                    fine, answers[rank] = pipe.recv()
                    assert fine, f"rank {rank}: {answers[rank]}"
        return [answers[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(self.timeout)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(pipe: Any, rank: int, count: int, folder: str, timeout: float) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    join(folder, rank, count, timeout)
    while (task := pipe.recv()) is not None:
        module, name, arguments = task
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*pickle.loads(arguments))))
        except BaseException:  # noqa: BLE001 - told to the test, whatever it is
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
