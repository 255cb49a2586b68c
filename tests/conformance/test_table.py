"""The table of checks against what it must cover, and the reference against itself on all of it."""

from collections import Counter

import pytest

from kvcore.backends.reference import ReferenceBackend
from kvcore.conformance.agreement import compare
from kvcore.conformance.checks import FORMAT_CHECKS, VERBS
from kvcore.conformance.specs import conformance_spec
from kvcore.conformance.suite import checks_of, sample_of
from kvcore.ops.fused import FUSED, REQUIRED
from kvcore.spec import LAYOUTS, ROLES, presets

SHAPES = {"no_tokens", "one_token", "exactly_full", "one_over", "ragged", "longer", "padded"}


def test_every_verb_of_the_protocol_has_a_check() -> None:
    promised = {*REQUIRED, *FUSED}
    covered = {row.name for row in FORMAT_CHECKS} | {verb.name for verb in VERBS}
    covered |= {name for verb in VERBS for name in verb.also}
    # Records know the checks of ``kv_view`` by another name; ``explain`` says what runs, and touches nothing.
    assert covered - {"borrow_kv"} == promised - {"explain"}


def test_suite_crosses_roles_layouts_and_shapes() -> None:
    ids = [check.id.split("/") for check in checks_of(conformance_spec())]
    appended = [
        (formats, layout, shape)
        for verb, formats, layout, shape in ids
        if verb == "append_window" and ".edges" not in formats
    ]
    layouts = set(LAYOUTS) - {"by_head"}  # packed, where rows have one head
    assert {layout for _, layout, _ in appended} == layouts
    assert {shape for _, _, shape in appended} == SHAPES
    windows = {formats for formats, _, _ in appended}
    assert len(appended) == len(windows) * len(layouts) * len(SHAPES)
    assert {"v4_584", "v41_528", "v32_656", "row_580", "mxfp4_368", "bf16", "fp32", "nf4_b64"} <= windows
    assert {verb.role for verb in VERBS if verb.name == "gather_rows"} == set(ROLES)


@pytest.mark.parametrize("name", ["conformance", "deepseek_v4_flash_tiny", "deepseek_v4_1_flash_tiny", "gemma_3_1b"])
def test_ids_are_unique(name: str) -> None:
    spec = conformance_spec() if name == "conformance" else presets.PRESETS[name]()
    repeated = [id for id, count in Counter(check.id for check in checks_of(spec)).items() if count > 1]
    assert repeated == []


def test_a_sample_has_every_shape_of_every_verb_and_formats_once() -> None:
    every = checks_of(conformance_spec())
    chosen = sample_of(every)
    parts = [check.id.split("/") for check in chosen]
    assert {check.id for check in chosen} <= {check.id for check in every}
    assert len(chosen) < len(every) / 2
    shapes = Counter((verb, formats, shape) for verb, formats, _, shape in parts)
    assert shapes.keys() == {(verb, formats, shape) for verb, formats, _, shape in (c.id.split("/") for c in every)}
    assert set(shapes.values()) == {1}
    # No layout is forgotten where a verb has many formats.
    appended = {(layout, shape) for verb, _, layout, shape in parts if verb == "append_kv"}
    assert appended >= {(layout, shape) for layout in LAYOUTS for shape in SHAPES}


def test_ids_are_stable() -> None:
    ids = [check.id for check in checks_of(presets.deepseek_v4_flash_tiny())]
    for expected in (
        "encode/v4_584/any/edges",
        "append_window/v4_584/packed/ragged",
        "append_tail/tail.m8/tpu_tile/padded",
        "flush/v4_584.m4+index_fp4_68_h.m4/planar/longer",
        "flush/v4_584.m8/packed/one_token",
        "attend/v4_584+v4_584.m8/packed/no_tokens",
        "select/index_fp4_68_h.m4/any/ragged",
    ):
        assert ids.count(expected) == 1


def test_inputs_come_from_the_id_alone() -> None:
    by_id = {check.id: check for check in checks_of(presets.deepseek_v4_flash_tiny())}
    again = {check.id: check for check in checks_of(presets.deepseek_v4_flash_tiny())}
    backend = ReferenceBackend()

    def outputs(check):
        return check.prepare()(backend.create(check.plan))

    one, two = "append_window/v4_584/packed/ragged", "append_window/v4_584/packed/longer"
    assert compare(outputs(by_id[one]), outputs(again[one])).mismatches == 0
    assert outputs(by_id[one])[1].array.tobytes() != outputs(by_id[two])[1].array.tobytes()


def test_nothing_is_checked_on_untouched_pools_alone() -> None:
    """A writer's check that brings tokens must change the pool: else it could not fail."""
    from kvcore.conformance.canonical import untouched

    backend = ReferenceBackend()
    for check in checks_of(presets.deepseek_v4_flash_tiny()):
        if check.verb in ("append_window", "append_tail", "append_index_tail") and not check.id.endswith("no_tokens"):
            outputs = check.prepare()(backend.create(check.plan))
            assert any(
                not untouched(output.array, output.format).all() for output in outputs if output.name[0] == "1"
            ), check.id
            assert all(untouched(output.array, output.format).all() for output in outputs if output.name[0] == "0")


@pytest.mark.parametrize("verb", ["flush", "store_entries", "compress"])
def test_compression_checks_close_entries(verb: str) -> None:
    backend = ReferenceBackend()
    closing = [check for check in checks_of(presets.deepseek_v4_flash_tiny()) if check.verb == verb]
    sizes = [sum(output.array.size for output in check.prepare()(backend.create(check.plan))) for check in closing]
    assert all(size > 0 for check, size in zip(closing, sizes, strict=True) if not check.id.endswith("no_tokens"))
