"""What the kernels were not written for: refused when a plan is bound, and where a kernel is compiled all the same."""

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.errors import BackendError  # noqa: E402
from kvcore.kernels.triton import append, attend, gather  # noqa: E402
from kvcore.kernels.triton.record import recorded  # noqa: E402
from kvcore.ops.choices import Declined  # noqa: E402
from kvcore.plan import plan_cache  # noqa: E402
from kvcore.spec import FORMATS, CacheSpec, Format, LayerSpec, Window  # noqa: E402
from tests.support.ahead_of_time import compiled  # noqa: E402
from tests.support.new_codes import NAME, SCALED_FP16, layers_of, new_code  # noqa: E402


def region_of(format: Format, role: str = "window"):
    plan = plan_cache(layers_of(format)[role], max_requests=1, max_tokens=8, layout="packed")
    return plan.region(0, role)[-1]


@pytest.mark.parametrize("role", ["window", "entries", "kv"])
@pytest.mark.parametrize("kind", ["scaled", "plain"])
def test_new_code_is_refused(kind, role):
    with new_code() as formats, pytest.raises(BackendError) as refused:
        recorded(region_of(formats[kind], role))
    assert NAME in refused.value.got
    assert refused.value.where == f"format {formats[kind].name}: Triton kernels"


def test_a_wide_code_with_a_scale_is_left_to_plain_operations():
    try:
        assert isinstance(recorded(region_of(SCALED_FP16)), Declined)
    finally:
        FORMATS._formats.pop(SCALED_FP16.name, None)


def record_of(name: str, **changes):
    plan = plan_cache(
        CacheSpec(layers=[LayerSpec(window=Window(dim=64, window=4, format=name))]), max_requests=1, layout="packed"
    )
    record, _ = recorded(plan.region(0, "window")[0])
    return record._replace(**changes)


ODD = {
    "an element code": ("fp8_row", {"code": NAME}),
    "a scale code": ("fp8_row", {"scale": NAME}),
    "a scale rule": ("fp8_row", {"rule": NAME}),
    "a plain code": ("bf16", {"plain": NAME}),
}


KERNELS = {
    "append": (append.append_kernel, {"AHEAD": False}),
    "gather": (gather.gather_window_kernel, {"WINDOW": 4}),
    "own rows": (gather.own_rows_kernel, {"LAST": True, "RING": True, "WINDOW": 4, "CHUNK": 0}),
}
"""A kernel that writes, one that reads, and one that does both in registers."""


# Reading needs no rule.
CASES = [(kernel, odd) for kernel in KERNELS for odd in ODD if (kernel, odd) != ("gather", "a scale rule")]


@pytest.mark.parametrize(("kernel", "odd"), CASES)
def test_kernels_do_not_compile_for_what_they_do_not_know(kernel, odd):
    name, changes = ODD[odd]
    function, constants = KERNELS[kernel]
    record = record_of(name, **changes)
    with pytest.raises(triton.CompilationError) as refused:
        compiled(function, 90, {"R": record, "ROWS": 1, "NATIVE": True, **constants}, exact=record.exact)
    assert "CompileTimeAssertionFailure" in repr(_first(refused.value)), refused.value


@pytest.mark.parametrize("odd", ["an element code", "a scale code", "a plain code"])
def test_attention_does_not_compile_for_what_it_does_not_know(odd):
    name, changes = ODD[odd]
    record = record_of(name, **changes)
    parts = attend.parts_of(record, None, bf16=True)
    constants = {
        "W": record, "E": record, "CHUNK": record, "S": parts, "ENTRY_S": parts, "CHUNK_S": parts,
        "WINDOW": 4, "RATIO": 4, "ALL": False, "SINK": True, "OWN": False, "SPLIT": True, "HEADS": 16, "KEYS": 16,
        "ALIKE": False, "STAGES": 1, "SPREAD": 8, "PAIRS": 0, "NATIVE": True,
    }  # fmt: skip
    with pytest.raises(triton.CompilationError) as refused:
        compiled(attend.attend_kernel, 90, constants)
    assert "CompileTimeAssertionFailure" in repr(_first(refused.value)), refused.value


def _first(error: BaseException) -> BaseException:
    """Where a chain of errors began."""
    cause = error
    while cause is not None:
        error, cause = cause, cause.__cause__ or cause.__context__
    return error
