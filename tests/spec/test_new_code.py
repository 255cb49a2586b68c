"""A code that a backend was not written for is refused by name, never stored as one that is like it."""

import numpy as np
import pytest

import kvcore
from kvcore.errors import BackendError, SpecError
from kvcore.spec import Field, Format
from tests.support.new_codes import NAME, layers_of, new_code


@pytest.mark.parametrize("role", ["window", "entries", "kv"])
@pytest.mark.parametrize("kind", ["scaled", "plain"])
def test_new_code_is_refused(backend, kind, role):
    """When the cache is created, and by the verbs that take a format."""
    with new_code() as formats:
        spec = layers_of(formats[kind])[role]
        with pytest.raises(BackendError) as refused:
            kvcore.create_cache(spec, backend=backend, max_requests=1, max_tokens=8)
        assert NAME in refused.value.got
        assert formats[kind].name in refused.value.where


@pytest.mark.parametrize("kind", ["scaled", "plain"])
def test_new_code_is_refused_by_the_codec(codec, kind):
    with new_code() as formats:
        row_bytes = formats[kind].row_bytes
        with pytest.raises(BackendError, match=NAME):
            codec.encode(formats[kind], np.ones((1, 64), np.float32))
        with pytest.raises(BackendError, match=NAME):
            codec.decode(formats[kind], np.ones((1, row_bytes), np.uint8))


@pytest.mark.parametrize(
    ("rule", "scale", "allowed"),
    [
        ("fp32", "e8m0", "fp32"),
        ("fp32", "bf16", "fp32"),
        ("absmax", "e4m3", "fp32"),
        ("e4m3", "fp32", "e4m3"),
        ("pow2", "e4m3", "e8m0 or fp32"),
        ("pow2", "fp16", "e8m0 or fp32"),
    ],
)
def test_a_scale_that_its_code_cannot_hold_is_refused(rule, scale, allowed):
    """Its bits would be cut, without a word."""
    fields = (
        Field(name="codes", dims=32, code="e4m3", group=0, scale=scale, rule=rule),
        Field(name="scales", dims=1, code=scale),
    )
    with pytest.raises(SpecError) as refused:
        Format(name="test_cut", fields=fields, planes=(("codes", "scales"),), amax_floor=1e-4)
    assert refused.value.allowed == f"{allowed}, for rule {rule}"


@pytest.mark.parametrize("code", ["e8m0", "zero"])
def test_channels_in_a_code_without_values_are_refused(code):
    with pytest.raises(SpecError, match="a code of values"):
        Format(name="test_valueless", fields=(Field(name="codes", dims=8, code=code),), planes=(("codes",),))


@pytest.mark.parametrize(("code", "rule"), [("fp16", "fp32"), ("bf16", "pow2"), ("fp32", "absmax")])
def test_a_wide_code_may_have_a_scale(codec, code, rule):
    """Odd, but what the table says: the plain operations know it, and the kernels leave it to them."""
    fields = (
        Field(name="codes", dims=32, code=code, group=0, scale="fp32", rule=rule),
        Field(name="scales", dims=1, code="fp32"),
    )
    format = Format(name=f"test_wide_{code}", fields=fields, planes=(("codes", "scales"),), amax_floor=1e-4)
    values = np.linspace(-3, 3, 32, dtype=np.float32)[None]
    back = codec.decode(format, codec.encode(format, values)).astype(np.float32)
    np.testing.assert_allclose(back, values, rtol=2**-7, atol=1e-6)
