"""Requests, blocks and heads in one rule table, over eight devices of one process and of two."""

import re
import socket
from subprocess import Popen

import jax
import pytest

from kvcore.errors import SpecError
from kvcore.interop.jax.sharding import Sharded
from kvcore.spec import KV, CacheSpec, LayerSpec
from tests.jax_pallas.processes import finished, start

PROGRAM = "mesh_plans"
STEPS = 2


def told_by(process: Popen[str]) -> list[str]:
    # Gloo prints what it does among it, at times in the same line.
    return re.findall(r"[\dx]+: \d+ answers compared|digests(?: [\da-f]{16})+", finished(process))


def test_one_rule_table_cuts_requests_blocks_and_heads_on_any_devices() -> None:
    *told, digests = told_by(start(PROGRAM, "explicit", "2x4x1,2x2x2", STEPS))
    assert told == ["1x1x1: 40 answers compared", "2x4x1: 40 answers compared", "2x2x2: 40 answers compared"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # The context axis runs through both processes: everything that shards tell one another crosses.
    both = [start(PROGRAM, "auto", "1x8x1", STEPS, process, 2, port) for process in range(2)]
    assert [told_by(process) for process in both] == [["1x8x1: 40 answers compared", digests]] * 2


@pytest.mark.parametrize(
    ("rules", "kv", "complaint"),
    [
        pytest.param({"requests": "data", "blocks": "data"}, {}, "every axis of the mesh once", id="one axis for two"),
        pytest.param({"blocks": ("data", "model")}, {"window": 5}, "storage 'ring'", id="a paged window"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(rules: dict, kv: dict, complaint: str) -> None:
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    spec = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=16, **kv))], block_tokens=8)
    with pytest.raises(SpecError, match=complaint):
        Sharded(spec, mesh, rules, max_requests=4, max_tokens=64)
