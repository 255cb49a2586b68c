"""Pools over a mesh: 8 devices in one process and in two, Auto and Explicit axes; and what is refused."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kvcore.errors import SpecError
from kvcore.interop.jax_heads import with_heads
from kvcore.interop.jax_sharding import Sharded
from kvcore.spec import KV, LayerSpec, presets

HERE = Path(__file__)


def start(*arguments: object) -> subprocess.Popen[str]:
    """A process of its own: the number of devices is fixed when JAX starts."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), *filter(None, sys.path)])
    line = [sys.executable, str(HERE.with_name("sharded_steps.py")), *map(str, arguments)]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return out.splitlines()[-1]


@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_every_shard_holds_its_references_bytes(axes: str) -> None:
    assert finished(start(axes)) == "88 shards of pools agree"


def test_two_processes_hold_half_of_the_shards_each() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start("auto", process, 2, port) for process in range(2)]
    assert [finished(process) for process in both] == ["44 shards of pools agree"] * 2


def test_what_does_not_divide_is_refused_or_replicated() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    spec = presets.deepseek_v4_flash_tiny(block_tokens=16)
    one = Sharded(spec, mesh, max_requests=3, max_tokens=48)
    assert repr(one).startswith("Sharded(requests over 1, blocks over 1, heads over 1; on each CachePlan(")
    assert one.shards == {"requests": 1, "blocks": 1, "heads": 1}
    assert {tuple(partition) for partition in one.specs.values()} == {("data", None)}
    with pytest.raises(SpecError, match="requests, blocks, heads"):
        Sharded(spec, mesh, {"request": "data"}, max_requests=3, max_tokens=48)
    with pytest.raises(SpecError, match="one shape"):
        one.index([])


def test_heads_are_cut_where_keys_and_values_divide() -> None:
    layers = [LayerSpec(kv=KV(key_heads=keys, key_dim=16, value_heads=values)) for keys, values in ((8, 4), (8, 3))]
    spec = presets.deepseek_v4_flash_tiny(block_tokens=16)
    local = with_heads(type(spec)(layers=layers, block_tokens=16), 4)
    assert [(layer.kv.key_heads, layer.kv.value_heads) for layer in local.layers] == [(2, 1), (8, 3)]
    assert with_heads(spec, 4) == spec
