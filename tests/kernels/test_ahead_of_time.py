"""Every kernel that writes, gathers or moves bytes, in every format and layout, compiled for GPUs that are not there:
nothing fails, and nothing spills more than ``records/compile_triton.json`` says. Of that record a run compiles what
``ahead_of_time.sample`` takes, and all of it, in an hour, with ``--every``. After a change that is meant to spill:

    KVCORE_COMPILE_RECORD=records/compile_triton.json pytest tests/kernels -k "ahead_of_time or compile"
"""

import re

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcore.kernels.triton import append, canary, checksum, flush, gather, rings, shards, strips, tail, units  # noqa: E402
from kvcore.kernels.triton import states as state_kernels  # noqa: E402
from kvcore.kernels.triton.launches import canary as canary_launch  # noqa: E402
from kvcore.kernels.triton.launches.states import state_tile  # noqa: E402
from kvcore.kernels.triton.record import PLAIN_BYTES, recorded  # noqa: E402
from kvcore.kernels.triton.shape import boundary_chunk, flush_shape, tile, window_rows  # noqa: E402
from kvcore.kernels.triton.tail import tail_recorded  # noqa: E402
from kvcore.plan import plan_cache  # noqa: E402
from kvcore.spec import FORMATS, KV, CacheSpec, Entries, IndexKeys, LayerSpec, State, Tail, Window  # noqa: E402
from tests.support.ahead_of_time import ARCHITECTURES, check, compiled  # noqa: E402


def is_for_kernels(field):
    """Whether kernels take rows with the field: groups with offsets and unscaled codes of a byte are torch's."""
    return not field.has_offsets and (field.group is not None or not field.is_value or field.code in PLAIN_BYTES)


NAMES = [name for name, format in sorted(FORMATS.items()) if all(map(is_for_kernels, format.fields))]
PER_HEAD = ("int8_per_token_head", "fp8_per_token_head")
CLASSIC = ("bf16", "fp16", "fp32", "int8_row", "fp8_row", "nf4_b64", "mxfp4", "nvfp4", *PER_HEAD)
ALONE = {"AHEAD": False}
"""Of kernels that wait for none before them, as all GPUs launch them."""
FLUSHES = [
    pytest.param(count, requests, arch, id=f"{count} {gpu}")
    for gpu, arch in ARCHITECTURES.items()
    for count, requests in ((64, 64), (256, 256), (8192, 1), (65536, 1))
    # Two shapes of a flush are enough for GPUs that it was not tuned on.
    if gpu == "H100" or count in (64, 8192)
]


def regions(name, layout):
    """Regions of every role that takes the format, by role."""
    format = FORMATS[name]
    dim = format.dim or 128
    layer = {"index_keys": IndexKeys(dim=dim, ratio=4, heads=1, topk=1, format=name)}
    layer["entries"] = Entries(dim=dim, ratio=4, format="bf16" if format.global_scaled else name)
    if not format.global_scaled:
        layer["window"] = Window(dim=dim, window=128, format=name)
    plan = plan_cache(CacheSpec(layers=[LayerSpec(**layer)]), max_requests=2, max_tokens=512, layout=layout)
    found = {role: plan.region(0, role)[0] for role in layer}
    if name in CLASSIC:
        scales = {"scales": (0.5, 3.0)} if format.global_scaled else {}
        kv = LayerSpec(kv=KV(key_heads=3, key_dim=dim, key_format=name, **scales))
        found["kv"] = plan_cache(CacheSpec(layers=[kv]), max_requests=2, max_tokens=512, layout=layout).region(0, "kv")[
            0
        ]
    return found


@pytest.mark.parametrize(
    ("layout", "arch"),
    [*(("packed", arch) for arch in ARCHITECTURES.values()), ("planar", 90)],
    ids=[*(f"packed {name}" for name in ARCHITECTURES), "planar H100"],
)
@pytest.mark.parametrize("name", NAMES)
def test_write_and_gather_kernels_compile(name, layout, arch, record):
    found = regions(name, layout)
    # Two tile shapes exist; the small one only drops rows.
    for count in (64, 65536) if (layout, arch) == ("packed", 90) else (65536,):
        keys = recorded(found["index_keys"], 0.5 if FORMATS[name].global_scaled else 1.0)[0]
        rows, warps = tile(keys, count)
        common = {"ROWS": rows, "NATIVE": arch >= 89}
        options = {"warps": warps, "exact": keys.exact}
        case = f"{name} {layout}, {count} rows"
        check(
            record,
            case,
            append.store_entries_kernel,
            arch,
            {"R": keys, "RATIO": 4, "REQUESTS": 64, "SPREAD": False, **ALONE, **common},
            **options,
        )
        check(record, case, gather.gather_all_kernel, arch, {"R": keys, "RATIO": 4, **common}, **options)
        if "window" in found:
            window, entries = recorded(found["window"])[0], recorded(found["entries"])[0]
            check(record, case, append.append_kernel, arch, {"R": window, **ALONE, **common}, **options)
            check(record, case, gather.gather_window_kernel, arch, {"R": window, "WINDOW": 128, **common}, **options)
            check(record, case, gather.gather_entries_kernel, arch, {"R": entries, "RATIO": 4, **common}, **options)
            whole = {"LAST": True, "RING": True, "WINDOW": 128, "CHUNK": 0}
            check(record, case, gather.own_rows_kernel, arch, {"R": window, **whole, **common}, **options)
        if "kv" in found:
            kv = recorded(found["kv"])[0]
            heads = f"{case}, three heads"
            check(record, heads, append.append_kernel, arch, {"R": kv, **ALONE, **common}, given="fp32", **options)
            ring = {"RING": True, "WINDOW": 7, "CHUNK": 0}
            check(record, case, gather.gather_kv_kernel, arch, {"R": kv, **ring, **common}, **options)
            own = {"LAST": False, **ring, **common}
            check(record, case, gather.own_rows_kernel, arch, {"R": kv, **own}, given="fp32", **options)


def test_kernels_that_are_launched_ahead_wait_before_they_touch_memory():
    found = regions("v4_584", "packed")
    window, keys = recorded(found["window"])[0], recorded(found["entries"])[0]
    rows = {"ROWS": 1, "NATIVE": True}
    for kernel, constants in (
        (append.append_kernel, {"R": window, **rows}),
        (append.append_rotated_kernel, {"R": window, "NORM": True, "PAIRS": 32, **rows}),
        (append.store_entries_kernel, {"R": keys, "RATIO": 4, "REQUESTS": 64, "SPREAD": True, **rows}),
    ):
        text = compiled(kernel, 90, {**constants, "AHEAD": True}).asm["ptx"]
        first = min(text.find(word) for word in ("ld.global", "st.global", "atom.global") if word in text)
        assert 0 <= text.find("griddepcontrol.launch_dependents") < text.find("griddepcontrol.wait") < first, kernel


def test_clamping_and_clearing_cost_an_instruction_each():
    window = recorded(regions("v4_584", "packed")["window"])[0]
    rows, warps = tile(window, 65536)
    text = compiled(append.append_kernel, 90, {"R": window, "ROWS": rows, "NATIVE": True, **ALONE}, warps=warps).asm[
        "ptx"
    ]
    each = rows * window.tiles * window.width // (32 * warps)
    assert len(re.findall(r"min\.xorsign\.abs\.f32", text)) == each
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", text)) == each // 2
    assert len(re.findall(r"and\.b32 %r\d+, word, %r\d+", text)) == each // 4
    assert not re.findall(r"max\.f32", text)


@pytest.mark.parametrize("name", PER_HEAD)
def test_rows_of_several_heads_are_moved_on_their_own_alignment(name):
    # Heads of 64 channels and their scale are 68 bytes: every second row lies off what 8 bytes at once would need.
    kv = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=2, key_dim=64, key_format=name))])
    region = plan_cache(kv, max_requests=2, max_tokens=512, layout="packed").region(0, "kv")[0]
    found = recorded(region)[0]
    assert found.codes_stride == 68
    rows, warps = tile(found, 64)
    constants = {"R": found, "ROWS": rows, "NATIVE": True}
    stored = compiled(append.append_kernel, 90, {**constants, **ALONE}, given="fp32", warps=warps).asm["ptx"]
    assert re.findall(r"st\.global\S*", stored)
    assert not re.findall(r"st\.global\.v\S*", stored)
    constants |= {"RING": False, "WINDOW": 0, "CHUNK": 0}
    read = compiled(gather.gather_kv_kernel, 90, constants, warps=warps, exact=found.exact).asm["ptx"]
    assert re.findall(r"ld\.global\S*", read)
    assert not re.findall(r"ld\.global\.v\S*", read)


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("name", ["v4_584", "v41_528", "row_580", "bf16"])
def test_rotating_append_compiles(name, arch, record):
    window = recorded(regions(name, "packed")["window"])[0]
    rows, warps = tile(window, 64)
    constants = {"R": window, "NORM": True, "PAIRS": 32, "ROWS": rows, "NATIVE": arch >= 89, **ALONE}
    case = f"{name}, 64 rows"
    check(record, case, append.append_rotated_kernel, arch, constants, warps=warps)


@pytest.mark.parametrize("given", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("ratio", "overlap", "entries", "keys"),
    [(4, True, "v4_584", "index_fp4_68_h"), (128, False, "v4_584", None), (2, False, "v41_fp4_288", None)],
    ids=["CSA with index keys", "HCA", "ratio 2"],
)
@pytest.mark.parametrize(("count", "requests", "arch"), FLUSHES)
def test_flush_and_tail_compile(count, requests, ratio, overlap, entries, keys, given, arch, record):
    check_flush_and_tail(record, "packed", count, requests, ratio, overlap, entries, keys, given, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize(
    ("count", "requests", "ratio", "overlap", "entries", "keys", "given"),
    [(64, 64, 4, True, "v4_584", "index_fp4_68_h", "fp32"), (8192, 1, 128, False, "v4_584", None, "bf16")],
    ids=["decode of CSA with index keys", "prefill of HCA"],
)
def test_flush_and_tail_in_planar_compile(count, requests, ratio, overlap, entries, keys, given, arch, record):
    check_flush_and_tail(record, "planar", count, requests, ratio, overlap, entries, keys, given, arch)


def check_flush_and_tail(record, layout, count, requests, ratio, overlap, entries, keys, given, arch):
    def tail_of(dim):
        component = Tail(dim=dim, ratio=ratio, overlap=overlap)
        layer = LayerSpec(tail=component, entries=Entries(dim=dim, ratio=ratio, format="bf16"))
        plan = plan_cache(CacheSpec(layers=[layer]), max_requests=2, max_tokens=512, layout=layout)
        return tail_recorded(plan.region(0, "tail")[0], component)[0]

    main, t = recorded(regions(entries, layout)["entries"])[0], tail_of(512)
    index = main if keys is None else recorded(regions(keys, layout)["index_keys"])[0]
    it = t if keys is None else tail_of(128)
    shape = flush_shape(main, t, count, requests, 4 if given == "fp32" else 2)
    constants = {
        "T": t, "R": main, "NORM": True, "ROWS": window_rows(t), "CHUNK": shape.chunk, "PARTS": shape.parts,
        "BOUNDARY": 0, "BOUNDARY_CHUNK": boundary_chunk(t, 512, shape.boundary), "IT": it,
        "IR": index, "INDEX_NORM": True, "INDEX_ROWS": window_rows(it), "INDEX_CHUNK": min(window_rows(it), 32),
        "INDEX_BOUNDARY": 0, "INDEX_BOUNDARY_CHUNK": boundary_chunk(it, 128, 1),
        "INDEX": keys is not None, "PAIRS": 32, "TOKENS": shape.tokens, "APPEND": shape.tokens == 1,
        "NATIVE": arch >= 89, **ALONE,
    }  # fmt: skip
    case = f"ratio {ratio}, {entries}, {given}, {count} tokens" + (layout != "packed") * f", {layout}"
    check(record, case, flush.flush_kernel, arch, constants, warps=shape.warps, given=given)
    if shape.tokens > 1:
        bordered = {**constants, "APPEND": True, "BOUNDARY": shape.boundary, "INDEX_BOUNDARY": 1}
        check(record, f"{case} and tail", flush.flush_kernel, arch, bordered, warps=shape.warps, given=given)
    if count == 64:
        constants = {"T": t, "ROWS": 1, "COLUMNS": 1024 if overlap else 512}
        check(record, case, tail.append_tail_kernel, arch, constants, given=given)
        check(record, case, flush.append_last_kernel, arch, {**constants, "ROWS": flush.LAST_ROWS}, given=given)


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("copies", [1, 2])
def test_rows_of_rings_compile(copies, arch, record):
    fields = (0, 9000, 0, 64, 512, 64, 0), (1, 2000, 8, 4, 32, 4, 64)
    constants = {"FIELDS": fields, "COUNT": 2, "ROWS": 8, "COPIES": copies, "SIZE": 68, "BLOCK": 64}
    types = dict.fromkeys(("one", "two", "three", "held"), "u8")
    for back in (True, False):
        what = f"{copies} copies, {back}"
        check(record, what, units.ring_rows_kernel, arch, {**constants, "BACK": back}, types=types)


STATES = {
    "fp32 matrices": State(heads=4, key_dim=128, value_dim=128),
    "bf16 vectors": State(heads=64, key_dim=16, format="bf16"),
    "int8": State(heads=2, key_dim=64, value_dim=64, format="int8_row"),
    "odd": State(heads=3, key_dim=7, value_dim=5),
}


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("name", STATES)
def test_kernels_of_recurrent_layers_compile(name, arch, record):
    spec = CacheSpec(layers=[LayerSpec(state=STATES[name])])
    region = plan_cache(spec, max_requests=2, max_tokens=64, max_draft_tokens=3).region(0, "state")[0]
    states = state_kernels.flattened(recorded(region)[0])
    for kernel, more, count in (
        (state_kernels.write_last_kernel, {}, 1 << 20),
        (state_kernels.select_state_kernel, {}, 0),
        (state_kernels.read_before_kernel, {"BEFORE": 3}, 1 << 20),
    ):
        rows, warps = state_tile(states, count)
        constants = {**more, "R": states, "ROWS": rows, "NATIVE": arch >= 89}
        check(record, name, kernel, arch, constants, warps=warps, exact=states.exact)


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("narrow", [False, True])
def test_rows_beside_their_check_words_compile(narrow, arch, record):
    launched = canary_launch._watch(narrow)
    types = dict.fromkeys(("roles", "pieces"), "i64")
    check(record, f"narrow {narrow}", canary.watch_kernel, arch, launched.constants, warps=launched.warps, types=types)


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("element", ["i32", "u8"])
def test_kernels_on_whole_units_compile(element, arch, record):
    types = {"pool": element, "unit": element, "held": element}
    for filled in (True, False):
        constants = {"FROM_UNIT": filled, "VALUE": -1 if element == "i32" else 255, "BLOCK": units.BLOCK}
        check(record, f"{element}, {filled}", units.fill_units_kernel, arch, constants, types=types)
        constants = {"BACK": filled, "BLOCK": units.BLOCK}
        check(record, f"{element}, {filled}", units.take_units_kernel, arch, constants, types=types)
    constants = {"ROWS": checksum.ROWS, "WORDS": checksum.WORDS}
    check(record, element, checksum.digest_kernel, arch, constants)
    constants = {"ENTRY": checksum.ENTRY, "BLOCK": checksum.BLOCK}
    check(record, element, checksum.strips_kernel, arch, constants)
    constants = {"RUN": checksum.RUN, "BLOCK": checksum.BLOCK}
    check(record, element, checksum.runs_kernel, arch, constants, types={"table": "i64"})
    for store in (True, False):
        constants = {"STORE": store, "ENTRY": strips.ENTRY, "BLOCK": strips.BLOCK}
        for words in (element, {"i32": "i64", "u8": "i16"}[element]):
            types = {"pages": words, "table": "i64"}
            check(record, f"{words}, {store}", strips.move_strips_kernel, arch, constants, types=types)
            types, constants = {"held": words, "table": "i64"}, {"BACK": store, "ENTRY": rings.ENTRY, "BLOCK": 1024}
            check(record, f"{words}, {store}", rings.move_rings_kernel, arch, constants, types=types)
            constants = {"STORE": store, "ENTRY": strips.ENTRY, "BLOCK": strips.BLOCK}
    types = {"out": "bf16", "once": "bf16", **dict.fromkeys(("parts", "once_lse", "sink", "lse"), "fp32")}
    for once in (True, False):
        constants = {"SHARDS": 2, "ONCE": once, "SINK": once, "DIM": 512, "BLOCK": 512}
        check(record, f"{element}, {once}", shards.shards_kernel, arch, constants, types=types)
