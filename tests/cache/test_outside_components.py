"""A component that kvcore does not know goes all the way, by what its class declares; what it lacks is said at once."""

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore.backends.reference import ReferenceBackend
from kvcore.backends.reference.backend import ReferenceOps
from kvcore.cli.plan_figures import describe
from kvcore.errors import ShapeError, SnapshotError, SpecError, StepError
from kvcore.interop import sglang, vllm
from kvcore.parity.run import run
from kvcore.plugins import registry
from kvcore.spec import FORMATS, CacheSpec, Component, LayerSpec, Part, Window, from_json, to_json
from tests.support import outside_components as outside
from tests.support.backends_under_test import BACKENDS


@pytest.fixture(scope="module")
def expected():
    return outside.live_a_life("reference", "packed")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["packed", "planar", "tpu_tile", "by_head"])
def test_the_same_life_everywhere(backend, layout, expected):
    assert outside.live_a_life(backend, layout) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kit_checks_it(backend):
    report = run(outside.spec(), [registry().backends[backend]], only="*/[sn][to][at]*/p*/[rlp]*")
    verbs = {record.check.partition("/")[0] for record in report.checks}
    assert verbs == {
        "allocate", "copy_blocks", "copy_slots", "gather_rows", "poison", "reset_slots", "restore_ring", "store_rows",
    }  # fmt: skip
    assert {record.status for record in report.checks} == {"agree"}


def test_the_kit_reports_a_backend_that_reads_other_rows_of_it():
    """A backend with a rule of liveness of its own: its rows are those of the whole history."""

    class Ops(ReferenceOps):
        def gather_rows(self, pools, layer, role, index, rows=None, *, columns=None):
            raw = super().gather_rows(pools, layer, role, index, rows, columns=columns)
            return raw if role != "last" else raw._replace(positions=np.minimum(raw.positions, 0))

    class Broken(ReferenceBackend):
        def create(self, plan, **_):
            return Ops(plan)

    info = msgspec.structs.replace(registry().backends["reference"], name="broken", load=Broken)
    report = run(outside.spec(), [info], only="gather_rows/last.fp32/packed/*")
    assert "disagree" in {record.status for record in report.checks}


def test_the_kit_reports_a_component_that_fails():
    class Worse(outside.Last, frozen=True, kw_only=True):
        def live_bounds(self, length, maximum=max):
            if isinstance(length, int) and length > 2:
                raise ZeroDivisionError("no rule for so many")
            return super().live_bounds(length, maximum)

    class WorseLayer(LayerSpec, frozen=True, kw_only=True):
        worse: Worse | None = None

    spec = CacheSpec(layers=(WorseLayer(worse=Worse(dim=4)),), block_tokens=4)
    report = run(spec, [registry().backends["reference"]], only="gather_rows/worse.fp32/packed/*")
    found = {record.check.rpartition("/")[2]: (record.status, record.detail) for record in report.checks}
    assert found["ragged"] == ("error", "the reference failed: ZeroDivisionError: no rule for so many")
    assert found["one_token"][0] == "agree"  # a check that does not come that far is one like any other


def test_engines_that_have_no_word_for_it_say_so():
    with pytest.raises(SpecError, match="Last"):
        vllm.kv_cache_specs(outside.spec())
    with pytest.raises(SpecError, match="last"):
        sglang.pools(outside.spec())


def test_every_part_of_the_plan_knows_it():
    cache = outside.create("reference")
    assert [region.role for region in cache.plan.regions if region.layer == 1] == ["notes", "notes"]
    assert cache.plan.region(0, "last")[0].rows == 3
    described = describe(cache.plan)
    assert {pool["role"] for pool in described["pools"]} == {"window", "kv", "last", "notes"}
    assert "last 1" in str(described)
    assert {name.split(".")[1] for name in cache.pools} == {"window", "kv", "last", "notes"}


def test_a_step_that_never_wrote_it_does_not_commit():
    cache = outside.create("reference")
    request = cache.admit()
    step = cache.step({request: 1})
    step.layer(0).append_window(np.zeros((1, 8), np.float32))
    with pytest.raises(StepError, match="no rows for last"):
        step.commit()
    assert request.length == 0


def test_more_tokens_than_its_ring_holds_wait_for_the_commit():
    """An abort leaves the old row; a commit the newest."""
    cache = outside.create("reference")
    request = cache.admit()
    outside.take(cache, {request: (1, 2)})
    before = cache.digest()
    step = cache.step({request: 9})
    outside.fill(step, {1: range(2, 11)})
    step.abort()
    assert cache.digest() == before
    outside.take(cache, {request: (1, 9)})
    one_by_one = outside.create("reference")
    other = one_by_one.admit()
    for _ in range(11):
        outside.take(one_by_one, {other: (1, 1)})
    assert cache.digest() == one_by_one.digest()


APPENDS = {
    "no such role": (StepError, "mamba", [(2, 6)], "a component of the layer"),
    "a role with a verb": (StepError, "window", [(2, 8)], "append_window"),
    "too many arrays": (ShapeError, "last", [(2, 6), (2, 6)], "1, one for each part"),
    "too few": (ShapeError, "last", [], "1, one for each part"),
    "another width": (ShapeError, "last", [(2, 5)], "shape [2, 6]"),
    "another number of tokens": (ShapeError, "last", [(3, 6)], "shape [2, 6]"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", APPENDS)
def test_rows_that_do_not_fit(backend, case):
    kind, role, shapes, allowed = APPENDS[case]
    cache = outside.create(backend)
    step = cache.step({cache.admit(): 2})
    with pytest.raises(kind) as caught:
        step.layer(0).append_rows(role, *(np.zeros(shape, np.float32) for shape in shapes))
    assert allowed in caught.value.allowed
    step.layer(0).append_rows("last", np.zeros((2, 6), np.float32))
    with pytest.raises(StepError, match="second append"):
        step.layer(0).append_rows("last", np.zeros((2, 6), np.float32))
    step.abort()


class NoRule(Component, frozen=True, kw_only=True):
    dim: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", 1, FORMATS["fp32"].for_dim(self.dim)),)


class NoParts(Component, frozen=True, kw_only=True):
    def live_bounds(self, length, maximum=max):
        return maximum(0 * length, 0), length


class Always(outside.Last, frozen=True, kw_only=True):
    def live_bounds(self, length, maximum=max):
        return maximum(0 * length, 0), length + 1


class NoRuleLayer(LayerSpec, frozen=True, kw_only=True):
    mine: NoRule | None = None


class NoPartsLayer(LayerSpec, frozen=True, kw_only=True):
    mine: NoParts | None = None


class AlwaysLayer(LayerSpec, frozen=True, kw_only=True):
    mine: Always | None = None


class Unclear(LayerSpec, frozen=True, kw_only=True):
    number: int | None = None


@pytest.mark.parametrize(
    ("layer", "where", "said"),
    [
        (lambda: NoRuleLayer(mine=NoRule(dim=4)), "layers[0].mine", "live_bounds"),
        (lambda: NoPartsLayer(mine=NoParts()), "layers[0].mine", "parts"),
        (lambda: AlwaysLayer(mine=Always(dim=4)), "layers[0].mine", "no rows without tokens"),
        (lambda: Unclear(number=3), "Unclear.number", "one class of components"),
        (lambda: outside.OpenLayer(last=Window(dim=4, window=2, format="fp32")), "layers[0].last", "a Last"),
    ],
    ids=["no rule of liveness", "no parts", "rows without tokens", "no component", "another component"],
)
def test_what_a_class_lacks_is_said_when_the_spec_is_made(layer, where, said):
    with pytest.raises(SpecError) as caught:
        CacheSpec(layers=(layer(),), block_tokens=4)
    assert caught.value.where == where
    assert said in str(caught.value)


def test_json_of_it_is_refused_with_its_path():
    with pytest.raises(SpecError) as caught:
        from_json(to_json(outside.spec()))
    assert caught.value.where == "layers[0].last"


def test_no_snapshot_is_written_that_nobody_could_read(tmp_path):
    cache = kvcore.create_cache(outside.spec(), backend="reference", max_requests=1, max_tokens=16)
    with pytest.raises(SnapshotError, match=r"layers\[0\].last.*export_request"):
        cache.save(tmp_path / "cache.kv")
    assert not list(tmp_path.iterdir())
