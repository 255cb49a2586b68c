"""A code that is in the table and in no backend: what a maintainer has after the first of the steps of adding one."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.spec import FORMATS, KV, CacheSpec, Entries, Field, Format, LayerSpec, Window
from kvcore.spec.codes import CODES, Code

NAME = "e5m2_test"

SCALED_FP16 = Format(
    name="test_scaled_fp16",
    fields=(
        Field(name="codes", dims=64, code="fp16", group=32, scale="fp32", rule="fp32"),
        Field(name="scales", dims=2, code="fp32"),
    ),
    planes=(("codes", "scales"),),
    amax_floor=1e-4,
)
"""A wide code with a scale, which kernels know as a plain one only: scaled it would be stored as NF4."""


@contextmanager
def new_code(name: str = NAME) -> Iterator[dict[str, Format]]:
    """The code is known to formats while the context lasts: formats that use it, by how."""
    CODES[name] = Code(name=name, bits=8, largest=57344.0, significand=3, nan=0x7F)
    try:
        scaled = Field(name="codes", dims=64, code=name, group=32, scale="fp32", rule="fp32")
        scales = Field(name="scales", dims=2, code="fp32")
        yield {
            "scaled": Format(
                name="test_new_scaled", fields=(scaled, scales), planes=(("codes", "scales"),), amax_floor=1e-4
            ),
            "plain": Format(
                name="test_new_plain", fields=(Field(name="codes", dims=64, code=name),), planes=(("codes",),)
            ),
        }
    finally:
        del CODES[name]
        for format in ("test_new_scaled", "test_new_plain"):
            FORMATS._formats.pop(format, None)


def layers_of(format: Format) -> dict[str, CacheSpec]:
    """A cache of one layer for each kind of component that takes the format."""
    name = FORMATS.register(format).name
    layers = {
        "window": LayerSpec(window=Window(dim=64, window=4, format=name)),
        "entries": LayerSpec(
            window=Window(dim=64, window=4, format="bf16"), entries=Entries(dim=64, ratio=4, format=name)
        ),
        "kv": LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format="bf16", value_format=name)),
    }
    return {role: CacheSpec(layers=[layer], block_tokens=4) for role, layer in layers.items()}
