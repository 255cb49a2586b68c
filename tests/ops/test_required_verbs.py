"""A backend with only the verbs that the contract requires: it gets the others, which answer as fused ones do."""

from typing import Any

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore import plugins
from kvcore.backends.reference import ReferenceBackend
from kvcore.conformance.agreement import compare
from kvcore.conformance.checks import VERBS
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of
from kvcore.ops import Ops
from kvcore.ops.fused import FUSED, READERS, REQUIRED, WRITERS, created
from kvcore.sharding import ShardedOps
from kvcore.spec import presets

HAS = (*REQUIRED, "plan", "device", "in_place")
# The last of a row's verbs are those that its check calls beside the one that it is named after.
LENT = {verb.name for verb in VERBS if set(FUSED) & {verb.name, *verb.also}}


class Bare:
    """What another backend must have, and nothing else of it."""

    def __init__(self, ops: Any) -> None:
        for name in HAS:
            setattr(self, name, getattr(ops, name))


class BareBackend:
    """Creates ``Bare``; as outside code may, it takes an option that nobody gives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._whole = plugins.registry().backends[name].load()

    def create(self, plan: Any, *, device: str | None = None, check: bool = False) -> Bare:
        del check
        return Bare(self._whole.create(plan, device=device))

    def default_layout(self, device: str | None) -> str:
        return self._whole.default_layout(device)


def lent() -> list[Any]:
    """The kit's checks of verbs that a backend need not have; of shapes and layouts those that differ for them."""
    found = [check for check in checks_of(conformance_spec()) if check.id.split("/")[0] in LENT]
    taken = [check for check in found if check.id.split("/")[2] in ("packed", "any")]
    return [check for check in taken if check.id.split("/")[3] == "ragged"] + [
        check for check in taken[::7] if check.id.split("/")[3] == "padded"
    ]


def test_verbs_are_required_or_have_a_default() -> None:
    assert not set(REQUIRED) & set(FUSED)
    assert len(REQUIRED) == 38
    assert {*WRITERS, *READERS} < {*REQUIRED, *FUSED}
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (Ops,), {})()


@pytest.mark.parametrize("backend", ["reference", "torch_triton"])
def test_defaults_answer_as_fused_verbs(backend: str) -> None:
    checks = lent()
    assert {check.id.split("/")[0] for check in checks} == LENT
    bare = BareBackend(backend)
    for check in checks:
        drive = check.prepare()
        found = compare(drive(ReferenceBackend().create(check.plan)), drive(created(bare, check.plan)))
        assert not found.mismatches, check.id


def test_a_shard_has_every_verb() -> None:
    """Those that a shard has no method of its own for are the backend's: none of them reads a row that others hold."""
    assert {*REQUIRED, *FUSED} - set(vars(ShardedOps)) == {
        *("allocate", "asarray", "join", "index", "padded_index", "from_batch", "to_batch"),
        *("encode", "decode", "pack_page", "unpack_page", "digest_rows", "digest_strips"),
        *("append_window", "rotated_rows", "append_rotated_window", "append_tail", "append_index_tail"),
        *("gather_window", "compress", "closed", "read_ring", "restore_ring"),
        *("append_state", "write_state", "select_state", "read_state", "append_conv", "gather_conv"),
        *("reset_slots", "poison", "copy_slots", "copy_blocks"),
    }


@pytest.mark.parametrize("backend", ["reference", "torch_triton"])
def test_a_cache_of_such_a_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Padded batches, a handle's verbs, a request that moves, and a digest: the same as of the whole backend."""
    info = plugins.registry().backends[backend]
    monkeypatch.setitem(
        plugins.registry().backends,
        "bare",
        msgspec.structs.replace(info, name="bare", load=lambda: BareBackend(backend)),
    )
    found = [lived(name) for name in (backend, "bare")]
    assert found[0] == found[1]


def lived(backend: str) -> list[Any]:
    spec = presets.deepseek_v4_flash_tiny(draft=False)
    cache = kvcore.create_cache(spec, backend=backend, max_requests=2, max_tokens=256)
    random = np.random.default_rng(4)
    requests = [cache.admit(), cache.admit()]
    seen: list[Any] = []
    for counts in ((5, 9), (1, 1), (70, 3)):
        with cache.step(dict(zip(requests, counts, strict=True))) as step:
            for number, layer_spec in enumerate(spec.layers):
                layer = step.layer(number)
                width = layer_spec.window.dim
                batch = random.standard_normal((2, max(counts), width)).astype(np.float32)
                rows = step.from_batch(batch)
                layer.append_window(rows)
                for role in ("tail", "index_tail"):
                    tail = getattr(layer_spec, role)
                    if tail is not None:
                        kv, score = random.standard_normal((2, sum(counts), tail.width)).astype(np.float32)
                        getattr(layer, f"append_{role}")(kv, score)
                if layer_spec.tail is not None:
                    layer.flush()
                seen.append(kvcore.to_numpy(step.to_batch(rows)).tobytes())
                seen.append(layer.digest())
    return [*seen, cache.digest(requests), cache.export_request(requests[0])]
