"""``kvcore info``: what is installed, which backends there are, and why each can or cannot run. It must always print.

A probe may import a framework and touch a driver, so each runs in a process of its own with a time limit: a driver that
crashes or hangs is a row, not the end of the command.
"""

import argparse
import json
import os
import subprocess
import sys
from glob import glob
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvcore.cli.tables import print_table, say

if TYPE_CHECKING:
    from kvcore.plugins import Needs

PROBE_SECONDS = 60

PROBE = """
import json, sys
from kvcore.plan import plan_cache
from kvcore.plugins import registry
from kvcore.spec import CacheSpec, LayerSpec, Window
info = registry().backends[sys.argv[1]]
reason, how = info.objection(), ""
if reason is None:
    spec = CacheSpec(layers=(LayerSpec(window=Window(dim=8, window=2, format="fp32")),))
    ops = info.load().create(plan_cache(spec, max_requests=1))
    how = getattr(ops, "how", "") or str(ops.device)
    kernels = getattr(ops, "attention_kernels", "")
    how += f"; attention: {kernels}" if kernels else ""
print(json.dumps([reason, how]))
"""
"""What the probing process runs: the backend's own probe, then the smallest cache there is."""

ENVIRONMENT = (
    "KVCORE_BACKEND",
    "KVCORE_BLOCK_PLUGINS",
    "CUDA_VISIBLE_DEVICES",
    "KVCORE_ATTENTION",
    "KVCORE_JAX_KERNELS",
    "KVCORE_STRICT",
    "TRITON_INTERPRET",
    "JAX_PLATFORMS",
)

JAX_DEVICES = (
    ("tpu", ("libtpu",), "/dev/accel*"),
    ("tpu", ("libtpu",), "/dev/vfio/[0-9]*"),
    ("cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin"), "/dev/nvidia[0-9]*"),
)
"""Platform of JAX, in its order -> the modules that serve it, and where its devices are seen."""

EXAMPLES = """\
examples:
  kvcore info                 imports no framework
  kvcore info --probe         asks each backend, in a process of its own, whether and how it runs here
  kvcore info --probe --json  for a bug report
  kvcore info --spec NAME     which backends declare what a spec needs: a preset, a spec's or a model's JSON file
  kvcore info --plan NAME --backend torch_triton  which code runs each verb of its layers there, and why
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "info",
        help="versions, backends, and why each can or cannot run",
        description="What is installed and what can run here.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--probe", action="store_true", help="ask each backend whether it runs, in its own process")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=PROBE_SECONDS,
        help="of each probe (default: %(default)s)",
    )
    parser.add_argument("--spec", metavar="NAME|FILE", help="say which backends do not declare what this spec needs")
    parser.add_argument("--plan", metavar="NAME|FILE", help="say which code runs each verb of this spec, and why")
    parser.add_argument("--backend", metavar="NAME", default="auto", help="of --plan (default: %(default)s)")
    parser.add_argument("--device", metavar="D", help="of --plan, such as cpu or cuda:1")
    parser.add_argument("--layout", default="auto", help="of its pools, as for create_cache (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Gather and print."""
    if options.plan is not None:
        from kvcore.cli import choices

        return choices.run(options)
    needs = None
    if options.spec is not None:
        from kvcore.plugins import Needs
        from kvcore.spec.named import load_spec

        needs = Needs.of(load_spec(options.spec, "--spec"), options.layout)
    found = gather(probe=options.probe, timeout=options.timeout, needs=needs)
    if options.json:
        say(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0


def gather(*, probe: bool = False, timeout: float = PROBE_SECONDS, needs: "Needs | None" = None) -> dict:
    """Everything that the command prints, as plain data. Whatever fails becomes text.

    Args:
        probe: ask each backend whether and how it runs.
        timeout: seconds for each.
        needs: of a spec; a backend that does not declare them is not asked further.
    """
    from kvcore import environment

    found: dict = {**environment.describe(), "executable": sys.executable}
    found["environment"] = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    found["jax_device"] = _jax_device()
    found["backends"], found["failed"] = [], {}
    try:
        from kvcore.plugins import CAPABILITIES, registry

        known = registry()
    except Exception as error:  # noqa: BLE001 - a duplicate or broken plug-in must not hide the rest
        found["failed"]["plug-ins"] = f"{type(error).__name__}: {error}"
        return found
    found["failed"] = dict(known.failed)
    for info in known.backends.values():
        lacking, how = None if needs is None else info.lacks(needs), ""
        reason = lacking or (None if probe else info.objection(probe=False))
        if probe and reason is None:
            reason, how = _probe(info.name, timeout)
        found["backends"].append(
            {
                "name": info.name,
                "summary": info.summary,
                "devices": list(info.devices),
                "capabilities": sorted(info.capabilities),
                "not_declared": sorted(CAPABILITIES - set(info.capabilities)),
                "priority": info.priority,
                "known_gaps": len(info.known_gaps),
                "probed": probe,
                "can_run": reason is None if probe or reason else None,
                "reason": reason,
                "how": how,
            }
        )
    return found


def _probe(name: str, timeout: float) -> tuple[str | None, str]:
    """(why it cannot run or None, how it runs) of a backend, from a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, name], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its probe took longer than {timeout:g} s", ""
    except OSError as error:
        return f"its probe could not be started: {error}", ""
    if done.returncode < 0:
        return f"its probe was killed by signal {-done.returncode}", ""
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"its probe failed: {lines[-1] if lines else f'exit code {done.returncode}'}", ""
    try:
        reason, how = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError, TypeError, RecursionError):
        return "its probe printed no answer", ""
    # A plug-in may print whatever it likes after the answer.
    return (None if reason is None else str(reason)), str(how)


def _jax_device() -> str | None:
    """Which device JAX would use, and why, as far as that is seen without importing it; None where it is not there."""
    if find_spec("jax") is None:
        return None
    said = os.environ.get("JAX_PLATFORMS")
    if said:
        return f"{said.split(',')[0]} (JAX_PLATFORMS)"
    for platform, modules, device in JAX_DEVICES:
        there = [name for name in modules if find_spec(name) is not None]
        nodes = sorted(glob(device))
        if there and nodes:
            return f"{platform} ({there[0]}, {nodes[0]})"
        if nodes:
            return f"cpu ({nodes[0]} is there, but none of {', '.join(modules)} is installed)"
    return "cpu (no accelerator is seen)"


def _without(words: list[str]) -> str:
    return f" (without {', '.join(words)})" if words else ""


def _print(found: dict) -> None:
    commit = f", commit {found['commit'][:12]}{found['commit'][40:]}" if found["commit"] else ""
    say(f"kvcore {found['kvcore']}{commit}, Python {found['python']}, {found['platform']}")
    say(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    if found["jax_device"]:
        say(f"JAX would use: {found['jax_device']}")
    for name, value in found["environment"].items():
        say(f"{name}={value}")
    print()
    print_table(
        "Backends",
        ["name", "devices", "can run", "how, or why not", "auto", "summary"],
        [
            [
                backend["name"],
                ", ".join(backend["devices"]),
                {True: "yes", False: "no", None: "not probed"}[backend["can_run"]],
                backend["reason"] or backend["how"] or "everything it requires is installed",
                "by name only" if backend["priority"] is None else f"priority {backend['priority']}",
                backend["summary"] + _without(backend["not_declared"]),
            ]
            for backend in found["backends"]
        ],
        left=6,
    )
    if found["failed"]:
        print_table("Plug-ins that are blocked or failed", ["name", "why"], list(found["failed"].items()), left=2)
