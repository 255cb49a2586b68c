"""Misuse of specs, formats and layouts: nothing exists yet that could change."""

import functools

import msgspec

from kvcore.errors import SpecError
from kvcore.spec import (
    FORMATS,
    KV,
    CacheSpec,
    Entries,
    IndexKeys,
    LayerSpec,
    Rope,
    Tail,
    Window,
    Yarn,
    address,
    from_hf_config,
    from_json,
    presets,
    to_json,
)
from kvcore.spec.formats import Field, Format
from tests.bad_input.world import SPEC, Case
from tests.support import scene

DOCUMENT = msgspec.json.decode(to_json(SPEC))


def document(path: str = "", value: object = None, *, remove: str = "") -> str:
    """The spec as JSON with the value at a dotted path replaced, or a key removed."""
    changed = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    *parents, last = (path or remove).split(".")
    inner = functools.reduce(lambda node, key: node[int(key) if key.isdigit() else key], parents, changed)
    if remove:
        del inner[last]
    else:
        inner[last] = value
    return msgspec.json.encode(changed).decode()


JSON = {
    "no JSON": lambda: from_json("layers: []"),
    "nothing": lambda: from_json(""),
    "half a document": lambda: from_json(to_json(SPEC)[:100]),
    "a list": lambda: from_json("[1]"),
    "a number": lambda: from_json("7"),
    "bytes that are not UTF-8": lambda: from_json(b'{"name": "\xff"}'),
    "an object instead of text": lambda: from_json(DOCUMENT),
    "no schema version": lambda: from_json(document(remove="schema_version")),
    "a newer schema version": lambda: from_json(document("schema_version", 2)),
    "a schema version that is text": lambda: from_json(document("schema_version", "1")),
    "a schema version that is a boolean": lambda: from_json(document("schema_version", True)),
    "an unknown key": lambda: from_json(document("blocks", 3)),
    "an unknown key in a component": lambda: from_json(document("layers.1.window.windw", 3)),
    "an unknown role": lambda: from_json(document("layers.1.states", {})),
    "a required key missing": lambda: from_json(document(remove="layers.1.window.dim")),
    "text instead of a number": lambda: from_json(document("layers.1.window.dim", "8")),
    "a fraction instead of a number": lambda: from_json(document("block_tokens", 4.5)),
    "a rule broken": lambda: from_json(document("layers.1.tail.ratio", 0)),
    "a rule across components broken": lambda: from_json(document("layers.1.tail.ratio", 2)),
    "an unknown format": lambda: from_json(document("layers.1.window.format", "fp7")),
    "a list of layers that is an object": lambda: from_json(document("layers", {})),
}


def spec(*layers: LayerSpec, **fields: object) -> CacheSpec:
    """A spec with blocks of 4 tokens."""
    return CacheSpec(layers=layers, **{"block_tokens": 4, **fields})


entries = functools.partial(Entries, dim=8, ratio=2, format="fp32")
keys = functools.partial(IndexKeys, dim=8, ratio=2, heads=2, topk=2, format="fp32")
kv = functools.partial(KV, key_heads=2, key_dim=4)

SPECS = {
    "no layers": lambda: CacheSpec(layers=[]),
    "one layer instead of a sequence": lambda: CacheSpec(layers=scene.ring(4)),
    "layers that are numbers": lambda: CacheSpec(layers=[4]),
    "a layer without components": lambda: spec(LayerSpec()),
    "blocks of no tokens": lambda: spec(scene.ring(4), block_tokens=0),
    "blocks of half tokens": lambda: spec(scene.ring(4), block_tokens=4.5),
    "blocks that a ratio does not divide": lambda: spec(LayerSpec(entries=entries(ratio=3))),
    "a component in another's role": lambda: spec(LayerSpec(tail=Window(dim=8, window=4, format="fp32"))),
    "a tail of another ratio": lambda: spec(LayerSpec(tail=Tail(dim=8, ratio=4, overlap=True), entries=entries())),
    "a tail of another dim": lambda: spec(LayerSpec(tail=Tail(dim=4, ratio=2, overlap=True), entries=entries())),
    "index keys without entries": lambda: spec(LayerSpec(index_keys=keys())),
    "index keys of another ratio": lambda: spec(LayerSpec(entries=entries(), index_keys=keys(ratio=4))),
    "a pool shared with itself": lambda: spec(LayerSpec(entries=entries(share=0))),
    "a pool shared with a later layer": lambda: spec(LayerSpec(entries=entries(share=1)), LayerSpec(entries=entries())),
    "a pool shared with a layer without one": lambda: spec(scene.ring(4), LayerSpec(entries=entries(share=0))),
    "a pool shared in another format": lambda: spec(
        LayerSpec(entries=entries()), LayerSpec(entries=entries(share=0, format="bf16"))
    ),
    "a negative share": lambda: entries(share=-1),
    "a share that is a boolean": lambda: entries(share=True),
    "a window of nothing": lambda: Window(dim=8, window=0, format="fp32"),
    "a dim that is negative": lambda: Window(dim=-8, window=4, format="fp32"),
    "a dim that is a boolean": lambda: Window(dim=True, window=4, format="fp32"),
    "a dim that the format does not have": lambda: Window(dim=8, window=4),
    "a ring smaller than its window": lambda: Window(dim=8, window=4, format="fp32", rows=3),
    "a tail smaller than its groups": lambda: Tail(dim=8, ratio=4, overlap=True, rows=7),
    "an overlap that is a number": lambda: Tail(dim=8, ratio=4, overlap=1),
    "an unknown format": lambda: Window(dim=8, window=4, format="e4m3fnuz"),
    "a format that is a number": lambda: Window(dim=8, window=4, format=584),
    "no top-k": lambda: keys(topk=0),
    "no index heads": lambda: keys(heads=0),
    "a global scale of zero": lambda: keys(global_scale=0),
    "a global scale of infinity": lambda: keys(global_scale=float("inf")),
    "a global scale that is text": lambda: keys(global_scale="1"),
    "an unknown storage": lambda: kv(storage="disk"),
    "a ring without a window": lambda: kv(storage="ring"),
    "a window and a chunk": lambda: kv(storage="ring", window=4, chunk=4),
    "a chunk of nothing": lambda: kv(storage="ring", chunk=0),
    "no key heads": lambda: kv(key_heads=0),
    "keys in a rotated format": lambda: kv(key_dim=128, key_format="index_fp8_132_h"),
    "values in a format with a global scale": lambda: kv(key_dim=128, value_format="index_nvfp4"),
    "an odd rotation": lambda: Rope(dim=7, theta=1e4),
    "a rotation without a base": lambda: Rope(dim=8, theta=0),
    "a stretch by nothing": lambda: Rope(
        dim=8, theta=1e4, yarn=Yarn(factor=0, original_length=16, beta_fast=32, beta_slow=1)
    ),
    "a preset with an unknown role": lambda: presets.deepseek_v4_flash_tiny(formats={"windows": "bf16"}),
    "a preset with an unknown format": lambda: presets.deepseek_v4_flash_tiny(formats={"window": "fp7"}),
    "a preset with blocks that its ratios do not divide": lambda: presets.deepseek_v4_flash_tiny(block_tokens=12),
    "a configuration of an unknown model": lambda: from_hf_config(type("Config", (), {"model_type": "abacus"})()),
    "a configuration that is nothing": lambda: from_hf_config(None),
}


def build_format(*fields: Field, planes: tuple[tuple[str, ...], ...] = (("codes",),), **others: object) -> Format:
    """A format called ``bad``."""
    return Format(name="bad", fields=fields, planes=planes, **others)


plain = Field(name="codes", dims=8, code="fp32")
scaled = functools.partial(Field, name="codes", dims=8, code="e4m3", group=4, scale="e8m0", rule="pow2")

FORMAT_CASES = {
    "an unknown one": lambda: FORMATS["fp7"],
    "a number as its name": lambda: FORMATS[584],
    "another one of the same name": lambda: FORMATS.register(msgspec.structs.replace(build_format(plain), name="bf16")),
    "planes that leave a field out": lambda: build_format(plain, planes=()),
    "planes with an unknown field": lambda: build_format(plain, planes=(("codes", "rope"),)),
    "an unknown code": lambda: build_format(Field(name="codes", dims=8, code="e4m3fnuz")),
    "an odd number of nibbles": lambda: build_format(Field(name="codes", dims=7, code="e2m1")),
    "no channels": lambda: build_format(Field(name="codes", dims=0, code="fp32")),
    "an alignment of nothing": lambda: build_format(plain, page_alignment=0),
    "a scale without a field": lambda: build_format(scaled(), amax_floor=1e-4),
    "an unknown rule": lambda: build_format(scaled(rule="log2"), amax_floor=1e-4),
    "too few scales": lambda: build_format(
        scaled(), Field(name="scales", dims=1, code="e8m0"), planes=(("codes", "scales"),), amax_floor=1e-4
    ),
    "no floor": lambda: build_format(
        scaled(), Field(name="scales", dims=2, code="e8m0"), planes=(("codes", "scales"),), amax_floor=0.0
    ),
    "a rotation of six channels": lambda: build_format(Field(name="codes", dims=6, code="fp32"), hadamard=True),
    "another size than it has": lambda: FORMATS["v4_584"].for_dim(8),
    "a field that it lacks": lambda: FORMATS["bf16"].field("rope"),
    "the address of a row beyond the block": lambda: address("v4_584", 4, 0, 4, "codes"),
    "the address of a negative row": lambda: address("v4_584", 4, 0, -1, "codes"),
    "the address of a negative block": lambda: address("v4_584", 4, -1, 0, "codes"),
    "the address of an unknown field": lambda: address("v4_584", 4, 0, 0, "keys"),
    "the address in a block without rows": lambda: address("v4_584", 0, 0, 0, "codes"),
}

CASES = [
    *[Case(f"spec as JSON: {name}", SpecError, call) for name, call in JSON.items()],
    *[Case(f"spec: {name}", SpecError, call) for name, call in SPECS.items()],
    *[Case(f"format: {name}", SpecError, call) for name, call in FORMAT_CASES.items()],
]
