"""Pools over a mesh: 8 devices in one process and in two, Auto and Explicit axes; and what is refused."""

import socket
from subprocess import Popen

import jax
import pytest

from kvcore.errors import SpecError
from kvcore.interop.jax.heads import with_heads
from kvcore.interop.jax.sharding import Sharded
from kvcore.spec import KV, LayerSpec, presets
from tests.jax_pallas.processes import finished, start

PROGRAM = "sharded_steps"


def last_line(process: Popen[str]) -> str:
    return finished(process, 300).splitlines()[-1]


@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_every_shard_holds_its_references_bytes(axes: str) -> None:
    assert last_line(start(PROGRAM, axes)) == "88 shards of pools agree"


def test_two_processes_hold_half_of_the_shards_each() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start(PROGRAM, "auto", process, 2, port) for process in range(2)]
    assert [last_line(process) for process in both] == ["44 shards of pools agree"] * 2


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
