"""Specs behind the published figures, with the formats that only the figures need."""

from functools import partial

from kvcore.spec import FORMATS, CacheSpec, Entries, Field, Format, IndexKeys, LayerSpec, presets


def _raw(name, dims, code):
    """Codes without scales: a per-tensor scale, or none at all, costs no bytes in the row."""
    return FORMATS.register(
        Format(name=name, fields=(Field(name="codes", dims=dims, code=code),), planes=(("codes",),))
    )


# flashinfer pull 4955: 224 bytes of e2m1, 28 e4m3 scales, 4 bytes of padding, 128 bytes of bf16 rope.
FORMATS.register(
    Format(
        name="test_nvfp4_384",
        fields=(
            Field(name="codes", dims=448, code="e2m1", group=16, scale="e4m3", rule="e4m3"),
            Field(name="scales", dims=28, code="e4m3"),
            Field(name="pad", dims=4, code="zero"),
            Field(name="rope", dims=64, code="bf16"),
        ),
        planes=(("codes", "scales", "pad", "rope"),),
        amax_floor=6 * 2.0**-126,
    )
)
_raw("test_naive_512", 512, "e4m3")
_raw("test_naive_64", 128, "e2m1")


def latent(preset, row, keys):
    """A V4 preset without its draft layer, with ``row`` for window and entries."""
    return preset(draft=False, formats={"window": row, "entries": row, "index_keys": keys})


flash = partial(latent, presets.deepseek_v4_flash)
pro = partial(latent, presets.deepseek_v4_pro)


def v41() -> CacheSpec:
    return presets.deepseek_v4_1_flash(draft=False)


def v32_bf16() -> CacheSpec:
    layer = LayerSpec(
        entries=Entries(dim=576, ratio=1, format="bf16"),
        index_keys=IndexKeys(dim=128, ratio=1, heads=64, topk=2048, format="bf16"),
    )
    return CacheSpec(layers=[layer] * 61, block_tokens=64)


def gqa(layers: int) -> CacheSpec:
    """Grouped-query attention, 8 heads of 128, bf16."""
    return presets.classic(layers=layers, key_heads=8, key_dim=128)
