"""torch_triton against the reference: equal bytes for equal input, equal gathers, arithmetic within bounds."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import kvcore
from kvcore.ops import tolerances
from kvcore.spec import FORMATS, LAYOUTS, CacheSpec, Entries, LayerSpec, Tail, Window, presets
from tests.support.backends_under_test import Codec, seed_of
from tests.support.drive import Options, Seen, assert_agrees, assert_near, assert_same, classic_spec, drive

SPECS = {
    "V4-Flash, tiny": presets.deepseek_v4_flash_tiny(block_tokens=16),
    "V4-Pro, tiny": presets.deepseek_v4_pro_tiny(block_tokens=16),
    "V4.1-Flash, tiny": presets.deepseek_v4_1_flash_tiny(block_tokens=16),
    "V3.2, two layers": CacheSpec(layers=presets.deepseek_v3_2().layers[:2], block_tokens=16),
    "classic, bf16 and fp32": classic_spec([("bf16", "fp32"), ("fp16", "bf16")]),
    "classic, int8_row and fp8_row": classic_spec([("int8_row", "fp8_row"), ("fp8_row", "int8_row")]),
    "classic, nf4_b64 and mxfp4": classic_spec([("nf4_b64", "mxfp4"), ("mxfp4", "nf4_b64")]),
}

PLAIN = CacheSpec(
    layers=[
        LayerSpec(
            window=Window(dim=16, window=5, format="fp32"),
            tail=Tail(dim=16, ratio=ratio, overlap=overlap),
            entries=Entries(dim=16, ratio=ratio, format="fp32"),
        )
        for ratio, overlap in ((4, True), (4, False), (2, True), (1, False))
    ],
    block_tokens=8,
    name="unrounded entries",
)

HAPPENS = ("several requests", "no new tokens", "more tokens than a ring")


def pair(spec: CacheSpec, layout: str) -> list[kvcore.Cache]:
    """The same cache on both backends: three slots, two drafts, room for three full requests."""
    sizes = {"max_requests": 3, "max_tokens": 3 * 64, "max_draft_tokens": 2, "layout": layout}
    return [kvcore.create_cache(spec, backend=backend, **sizes) for backend in ("reference", "torch_triton")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        pytest.param(spec, layout, id=f"{name}-{layout}")
        for name, spec in SPECS.items()
        for layout in LAYOUTS
        if layout != "by_head" or any(layer.kv for layer in spec.layers)  # where rows have heads
    ],
)
def test_the_same_life_leaves_the_same_bytes(spec: CacheSpec, layout: str, rng: np.random.Generator) -> None:
    happened: Counter[str] = Counter()
    for seen in drive(pair(spec, layout), int(rng.integers(2**32)), Options(), happened):
        assert_agrees(seen)
    assert all(happened[what] for what in HAPPENS), f"the workload did not do what it is for: {happened}"
    assert happened["closed entries"] or spec.name == "every classic kind"


@pytest.mark.parametrize("spec", [PLAIN, SPECS["V4-Flash, tiny"]], ids=["unrounded entries", "V4-Flash, tiny"])
def test_what_each_compresses_itself_is_near(spec: CacheSpec, rng: np.random.Generator) -> None:
    happened: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    for seen in drive(pair(spec, "packed"), int(rng.integers(2**32)), Options(flush=True, faults=False), happened):
        compared[seen.what] += seen.answers[0].size
        layer = int(seen.where.rpartition(" ")[2]) if "layer" in seen.where else None
        if seen.what == "compress":
            exact = spec.all_layers[layer].entries.format == "fp32"
            assert_near(seen, tolerances.computed("norm", "fp32" if exact else "bf16"))
        elif seen.what in ("gather_all_entries.0", "gather_all_index_keys.0"):
            component = spec.all_layers[layer].entries if "entries" in seen.what else spec.all_layers[layer].index_keys
            for first, last, tolerance in tolerances.stored("rope", component.parts[0].format):
                assert_near(seen._replace(answers=[answer[..., first:last] for answer in seen.answers]), tolerance)
        elif not reads_entries(seen.what):
            assert_agrees(seen)
    assert happened["closed entries"]
    assert compared["compress"]
    assert compared["gather_all_entries.0"]


def reads_entries(what: str) -> bool:
    """Whether a reading depends on bytes that each backend computed itself."""
    return what in ("gather_rows(entries).0", "gather_rows(index_keys).0", "gather_entries.0", "digest")


@pytest.mark.parametrize("name", ["V4-Flash, tiny", "classic, bf16 and fp32"])
def test_sizes_that_a_caller_leaves_out_are_the_same(name: str, rng: np.random.Generator) -> None:
    spec = SPECS[name]
    caches = pair(spec, "packed")
    for _ in drive(caches, int(rng.integers(2**32)), Options(), Counter()):
        pass
    steps = [cache.step(dict.fromkeys(cache.requests, 0)) for cache in caches]
    for layer, role, component in spec.components():
        verbs = {
            "gather_rows": lambda ops, *given, role=role: tuple(ops.gather_rows(given[0], given[1], role, given[2]))
        }
        if role in ("entries", "index_keys"):
            verbs["gather_all_entries"] = lambda ops, *given, role=role: tuple(
                ops.gather_all_entries(*given, role=role)
            )
            verbs["closed"] = lambda ops, *given, role=role: tuple(ops.closed(*given[1:], role=role))
        if role == "kv":
            verbs["gather_kv"] = lambda ops, *given: tuple(ops.gather_kv(*given))
            verbs["mask"] = lambda ops, *given: (ops.mask(*given[1:]),)
        for what, verb in verbs.items():
            answers = [verb(step.cache.ops, step.cache.pools, layer, step.index) for step in steps]
            for part, parts in enumerate(zip(*answers, strict=True)):
                seen = [kvcore.to_numpy(array) for array in parts]
                assert_same(Seen(f"{what}.{part}", f"layer {layer}, {role}", seen))
                assert what in ("mask", "closed") or part or seen[0].any(), component


SPECIALS = [0.0, -0.0, np.nan, np.inf, -np.inf, 448, -448, 464, 464.1, -465, 240, 6, 5, -3.5, 2.5, 0.25, 65504, 65520]
EXTREMES = [1e-45, -1e-45, 2.0**-126, -(2.0**-127), 2.0**-9, 2.0**-10, 6 * 2.0**-126, 1e-4, 3.4e38, -3.4e38]


def inputs(dim: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows to encode, by what they are for."""
    every = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    every = np.resize(every, -(-len(every) // dim) * dim)
    specials = np.array(SPECIALS + EXTREMES, np.float32)
    exponents = rng.integers(-126, 125, (400, 1))
    wide = np.exp2(rng.integers(-12, 3, (400, dim)) + exponents)
    faulty = rng.standard_normal((400, dim)).astype(np.float32)
    faulty[rng.random((400, dim)) < 0.01] = np.nan
    with np.errstate(over="ignore", under="ignore"):
        return {
            "every bf16 value, in rows": every.reshape(-1, dim),
            "one value a row": np.repeat(every[:: max(1, dim // 2), None], dim, axis=1),
            "any fp32 bits": rng.integers(0, 2**32, (400, dim), np.uint64).astype(np.uint32).view(np.float32),
            "one magnitude a row": (rng.standard_normal((400, dim)) * np.exp2(exponents)).astype(np.float32),
            "wide exponents": (rng.standard_normal((400, dim)) * wide).astype(np.float32),
            "special values": rng.choice(specials, (600, dim)),
            "special values, rows alike": np.repeat(specials[:, None], dim, axis=1),
            "few faults": faulty,
            "bf16 input": rng.standard_normal((400, dim)).astype(ml_dtypes.bfloat16),
            "no rows": np.zeros((0, dim), np.float32),
        }


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_encoding_and_decoding_are_equal_bit_for_bit(name: str, rng: np.random.Generator) -> None:
    reference, torch = Codec("reference"), Codec("torch_triton")
    scales = (1.0, 0.37, 2.0**-20) if FORMATS[name].global_scaled else (1.0,)
    # Sizeless formats: whole groups, a short last group, and rows whose scale lies at an odd address.
    for dim in [FORMATS[name].dim] if FORMATS[name].dim else [128, 96, 40, 6]:
        for what, values in inputs(dim, rng).items():
            for scale in scales:
                where = f"{what}, {dim} channels, global scale {scale}"
                with np.errstate(all="ignore"):
                    rows = reference.encode(name, values, scale)
                assert_same(Seen("encode", where, [rows, torch.encode(name, values, scale)]))
                decoded = [codec.decode(name, rows, dim, scale) for codec in (reference, torch)]
                assert_same(Seen("decode", where, decoded))
        any_bytes = rng.integers(0, 256, (500, FORMATS[name].for_dim(dim).row), np.uint8)
        decoded = [codec.decode(name, any_bytes, dim, scales[-1]) for codec in (reference, torch)]
        assert_same(Seen("decode", "any bytes", decoded))


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_pages_are_equal(name: str, rows: int, rng: np.random.Generator) -> None:
    reference, torch = Codec("reference"), Codec("torch_triton")
    format = FORMATS[name].for_dim(FORMATS[name].dim or 40)
    stored = rng.integers(0, 256, (rows, format.row), np.uint8)
    page = reference.pack_page(format, stored)
    assert_same(Seen("pack_page", name, [page, torch.pack_page(format, stored)]))
    assert_same(Seen("unpack_page", name, [stored, torch.unpack_page(format, page, rows)]))


def test_one_flipped_bit_in_any_pool_is_noticed() -> None:
    spec = CacheSpec(layers=[PLAIN.layers[0]], block_tokens=8)
    caches = pair(spec, "packed")
    last = [seen for seen in drive(caches, seed_of("flipped bit"), Options(), Counter()) if seen.what == "pool"]
    for seen in last[-len(caches[0].pools) :]:
        want, got = seen.answers
        got = got.copy()
        got.reshape(-1)[-1] ^= 1
        with pytest.raises(AssertionError, match=r"pool at .*: 1 differ"):
            assert_agrees(seen._replace(answers=[want, got]))


@pytest.mark.parametrize(
    ("want", "got"),
    [
        pytest.param([0.0], [-0.0], id="zero and minus zero"),
        pytest.param([np.nan], [0.0], id="NaN and zero"),
        pytest.param([1.0], [np.nextafter(np.float32(1), np.float32(2))], id="one step apart"),
    ],
)
def test_exact_comparison_tells_apart(want: list[float], got: list[float]) -> None:
    answers = [np.array(values, np.float32) for values in (want, got)]
    with pytest.raises(AssertionError, match="1 differ"):
        assert_agrees(Seen("gather_window.0", "here", answers))


def test_comparison_within_bounds_has_bounds() -> None:
    want = np.linspace(-1, 1, 50, dtype=np.float32)
    with pytest.raises(AssertionError, match="attend"):
        assert_agrees(Seen("attend.0", "here", [want, want + np.float32(1e-4)]))
