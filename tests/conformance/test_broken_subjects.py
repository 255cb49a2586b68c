"""Mistakes in what is no backend: components and transports that are right but for one thing, each told apart."""

from typing import Any

import numpy as np
import pytest

from kvcore.errors import SpecError, TransferError
from kvcore.handoff import Direct, Exporter, pull
from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import CacheSpec, LayerSpec
from tests.support import outside_components as outside
from tests.support import scene, stories


class PythonsOwnMaximum(outside.Last, frozen=True, kw_only=True):
    """Its rule knows ints alone."""

    def live_bounds(self, length: Any, maximum: Any = max) -> tuple[Any, Any]:
        del maximum
        return max(length - 1, 0), length


class AnotherRuleForArrays(outside.Last, frozen=True, kw_only=True):
    """Arrays have another live row than ints."""

    def live_bounds(self, length: Any, maximum: Any = max) -> tuple[Any, Any]:
        last = 1 if isinstance(length, int) else 2
        return maximum(length - last, 0), maximum(length - last + 1, 0)


class OneMore(outside.Last, frozen=True, kw_only=True):
    """More rows are live than its ring has, so that one of them is another's."""

    def live_bounds(self, length: Any, maximum: Any = max) -> tuple[Any, Any]:
        return maximum(length - 2, 0), length


class NotYet(outside.Last, frozen=True, kw_only=True):
    """A row is live before it was written."""

    def live_bounds(self, length: Any, maximum: Any = max) -> tuple[Any, Any]:
        return maximum(length, 0), maximum(2 * length, length)


class Broken(LayerSpec, frozen=True, kw_only=True):
    arrays: AnotherRuleForArrays | None = None
    ints: PythonsOwnMaximum | None = None
    wide: OneMore | None = None
    early: NotYet | None = None


@pytest.mark.parametrize(
    ("component", "status", "said"),
    [
        pytest.param({"arrays": AnotherRuleForArrays(dim=4)}, "disagree", "", id="another rule for arrays"),
        pytest.param({"ints": PythonsOwnMaximum(dim=4)}, "error", "Boolean value of Tensor", id="ints alone"),
    ],
)
def test_a_component_with_two_rules_is_told_by_the_kit(component, status, said):
    spec = CacheSpec(layers=(Broken(**component),), block_tokens=4)
    (role,) = component
    report = run(spec, [registry().backends["torch_triton"]], only=f"*/{role}.fp32*/packed/padded")
    found = {record.verb: (record.status, record.detail) for record in report.checks}
    assert found["gather_rows"][0] == status
    assert said in found["gather_rows"][1]
    # Where no rule of liveness is asked, nothing is wrong.
    assert {verb: found[verb][0] for verb in ("reset_slots", "poison", "copy_slots")} == {
        "reset_slots": "agree",
        "poison": "agree",
        "copy_slots": "agree",
    }


@pytest.mark.parametrize(
    ("component", "got", "allowed"),
    [
        pytest.param({"wide": OneMore(dim=4)}, "rows 0 to 2 live at 2 tokens", "1 at most, its span", id="too many"),
        pytest.param({"early": NotYet(dim=4)}, "rows 1 to 2 live at 1 tokens", "rows within 0 to 1", id="not written"),
    ],
)
def test_a_component_whose_rows_cannot_be_there_is_no_spec(component, got, allowed):
    with pytest.raises(SpecError) as caught:
        CacheSpec(layers=(Broken(**component),), block_tokens=4)
    (role,) = component
    assert caught.value.where == f"layers[0].{role}"
    assert (caught.value.got, allowed in caught.value.allowed) == (got, True)


class Another(Direct):
    """Pages of another export, under this one's manifest."""

    def __init__(self, exporter: Exporter, other: Any) -> None:
        super().__init__(exporter)
        self._other = other

    def fetch(self, handle: Any, first: int, into: Any, *, timeout: float) -> None:
        del handle
        super().fetch(self._other, first, into, timeout=timeout)


class AnothersManifest(Another):
    """The manifest of another export."""

    def manifest(self, handle: Any, *, timeout: float) -> bytes:
        del handle
        return super().manifest(self._other, timeout=timeout)


class LosesTheLast(Direct):
    """The last page of every fetch stays what was in memory: not by chance what belongs there."""

    def fetch(self, handle: Any, first: int, into: Any, *, timeout: float) -> None:
        into[-1:] = 0xEE
        super().fetch(handle, first, into[:-1], timeout=timeout)


class DoesNotWait(Direct):
    """Pages that are said to be here are still on the way."""

    def begin(self, handle: Any, first: int, into: Any, *, timeout: float) -> Any:
        del handle, timeout
        into[:] = np.uint8(first)
        return lambda: None


class Dies(Direct):
    """The peer is gone in the middle."""

    def fetch(self, handle: Any, first: int, into: Any, *, timeout: float) -> None:
        if first:
            raise TransferError(reason="peer_lost", got="no answer", where="pull", allowed="a peer that answers")
        super().fetch(handle, first, into, timeout=timeout)


@pytest.mark.parametrize(
    ("broken", "reason", "got"),
    [
        (lambda exporter, other: Another(exporter, other), "damaged", "in page 0"),
        (lambda exporter, other: AnothersManifest(exporter, other), "damaged", "a manifest of another export"),
        (lambda exporter, _: LosesTheLast(exporter), "damaged", "in page 1"),
        (lambda exporter, _: DoesNotWait(exporter), "damaged", "in page 0"),
        (lambda exporter, _: Dies(exporter), "peer_lost", "no answer"),
    ],
    ids=["pages of another", "a manifest of another", "loses the last page", "does not wait", "dies"],
)
def test_a_broken_transport_is_refused_and_changes_nothing(backend, broken, reason, got):
    cache = stories.create(stories.LATENT, backend)
    request, beside = cache.admit(), cache.admit()
    stories.tell(cache, {request: list(range(77)), beside: list(range(100, 177))})
    exporter = Exporter(cache)
    handle, other = exporter.export(request), exporter.export(beside)
    into = stories.create(stories.LATENT, backend)
    stories.tell(into, {into.admit(): [5] * 20})
    before = scene.raw(into), into.digest(), into.free_slots, into.free_blocks
    with pytest.raises(TransferError) as caught:
        pull(into, handle, broken(exporter, other), chunk_pages=2)
    assert (caught.value.reason, got in caught.value.got) == (reason, True), caught.value
    assert (scene.raw(into), into.digest(), into.free_slots, into.free_blocks) == before
    # Nothing of it is lost for whoever pulls it rightly.
    assert into.digest([pull(into, handle, Direct(exporter))]) == cache.digest([request])
