"""One run: ceilings first, then every workload, into a record."""

import gc
from itertools import chain
from typing import Any

import torch
import triton

from kvcore import environment
from kvcore.bench import GROUPS
from kvcore.bench.kv import kv_workloads
from kvcore.bench.reading import reading_workloads
from kvcore.bench.states import state_workloads
from kvcore.bench.timing import ceilings, copy_time, graph, single
from kvcore.bench.workloads import all_workloads, rotating

GOAL_COPY_GB_S, GOAL_EMPTY_US = 4122.0, 0.87
"""Copy speed, and time of an empty kernel in a graph, of the GPU that the goals and the peers' times were taken on."""


MAKERS = dict(zip(GROUPS, (all_workloads, reading_workloads, kv_workloads, state_workloads), strict=True))
"""Groups of rows."""


def measure(device: str, only: str = "", group: str = "") -> dict[str, Any]:
    """Time every workload of a group (all of them) whose name contains ``only``; returns the record as plain data."""
    with torch.cuda.device(torch.device(device)):
        found = ceilings()
        rows = []
        for make in chain.from_iterable(makers(device) for name, makers in MAKERS.items() if group in ("", name)):
            work = make()
            if only in work.name:
                rows.append(timed(work, found))
                print(f"  {rows[-1]}", flush=True)
            del work
            gc.collect()
            torch.cuda.empty_cache()
        return {
            "kind": "bench",
            "command": environment.command(None),
            "commit": environment.commit(),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
            "ceilings": {name: round(value, 2) for name, value in found.items()},
            "goals_measured_at": {"copy_gb_s": GOAL_COPY_GB_S, "empty_kernel_us": GOAL_EMPTY_US},
            "rows": rows,
        }


def timed(work: Any, found: dict[str, float]) -> dict[str, Any]:
    """One row: times, bytes, the floor, the goal as it is and on this device, and a plain copy of as many bytes.

    Where products decide, also the share of what a large product reaches.
    """
    in_graph, alone = graph(work.calls), single(work.calls)
    floor = work.nbytes / found["copy_gb_s"] / 1e3
    return {
        "name": work.name,
        "nbytes": work.nbytes,
        "single_us": round(alone, 2),
        "graph_us": round(in_graph, 2),
        "floor_us": round(floor, 3),
        "share_of_copy": round(floor / in_graph, 3),
        "copy_us": round(copy_time(work.nbytes, rotating(work.nbytes)), 2),
        "goal_us": work.goal,
        "goal_here_us": None if work.goal is None else round(goal_here(work.goal, work.nbytes, found), 2),
        "best_peer_us": work.peer,
        **({"share_of_matmul": round(work.flops / in_graph / 1e6 / found["matmul_tflops"], 3)} if work.flops else {}),
        **({"kept_bytes": work.kept} if work.kept else {}),
    }


def goal_here(goal: float, nbytes: int, found: dict[str, float]) -> float:
    """A goal carried over to another device: its bytes by the copy speed, the rest by what a launch costs."""
    moving = nbytes / GOAL_COPY_GB_S / 1e3
    return nbytes / found["copy_gb_s"] / 1e3 + max(goal - moving, 0) * found["empty_kernel_us"] / GOAL_EMPTY_US
