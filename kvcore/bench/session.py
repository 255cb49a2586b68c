"""One run: ceilings first, then every workload, into a record."""

import gc
from typing import Any

import torch
import triton

from kvcore.bench.reading import reading_workloads
from kvcore.bench.timing import ceilings, graph, single
from kvcore.bench.workloads import all_workloads

GOAL_COPY_GB_S = 4122.0
"""Copy speed of the GPU that the goals and the peers' times were taken on."""


def measure(device: str, only: str = "") -> dict[str, Any]:
    """Time every workload whose name contains ``only``; returns the record as plain data."""
    with torch.cuda.device(torch.device(device)):
        found = ceilings()
        rows = []
        for make in (*all_workloads(device), *reading_workloads(device)):
            work = make()
            if only in work.name:
                rows.append(timed(work, found["copy_gb_s"]))
                print(f"  {rows[-1]}", flush=True)
            del work
            gc.collect()
            torch.cuda.empty_cache()
        return {
            "kind": "bench",
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
            "ceilings": {name: round(value, 2) for name, value in found.items()},
            "goals_measured_at_copy_gb_s": GOAL_COPY_GB_S,
            "rows": rows,
        }


def timed(work: Any, copy_gb_s: float) -> dict[str, Any]:
    """One row: times, bytes, and the share of the copy ceiling that the graph time reaches."""
    in_graph, alone = graph(work.calls), single(work.calls)
    floor = work.nbytes / copy_gb_s / 1e3
    return {
        "name": work.name,
        "nbytes": work.nbytes,
        "single_us": round(alone, 2),
        "graph_us": round(in_graph, 2),
        "floor_us": round(floor, 3),
        "share_of_copy": round(floor / in_graph, 3),
        "goal_us": work.goal,
        "best_peer_us": work.peer,
    }
