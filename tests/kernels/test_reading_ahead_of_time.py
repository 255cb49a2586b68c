"""The kernels that read, compiled for GPUs that are not there: they fit into registers and shared memory.

What they take is in the record of ``test_ahead_of_time``.
"""

import inspect
from itertools import product

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.kernels.triton import (
    attend,
    attend_hopper,
    attend_kv,
    flash_index,
    scores,
    scores_hopper,
    scores_nibbles,
    topk,
    topk_hopper,
)
from kvcore.kernels.triton.attend import FEW, FULL, TENSOR, WHOLE, alike, parts_of_each
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches.attention import HOPPER_WARPS, PIPELINE, on_hopper
from kvcore.kernels.triton.launches.indexer import (
    CODES_PROGRAMS,
    CODES_REGISTERS,
    CODES_STAGES,
    LEAN_REGISTERS,
    NIBBLES_PROGRAMS,
    NIBBLES_REGISTERS,
    ROUND,
    SEEN_REGISTERS,
)
from kvcore.kernels.triton.record import plain_record, power_of_two, recorded
from kvcore.kernels.triton.scores import hopper_takes, score_config, takes_codes
from kvcore.kernels.triton.shape import tile
from kvcore.kernels.triton.topk import (
    HOPPER_PART,
    HOPPER_ROOM,
    HOPPER_SLOTS,
    OTHERS,
    RANKED,
    TOP_WARPS,
    hopper_lists,
    room_for,
    tile_for,
)
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Window
from tests.support.ahead_of_time import AMD, ARCHITECTURES, FOR_NVIDIA, HOPPER, check, compiled, kernels

SHARED = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that a block may have."""

SPILLS = 2560
"""Bytes of spills in attention: addresses that wait while sums of 512 channels fill the registers."""


MERGE = {"DIM": 512, "WIDTH": 512, "PARTS": 8, "SPLITS": 16, "SINK": True}

ROLES = {"window": {"window": 128}, "entries": {"ratio": 4}}

PIPELINE_SPILLS = 256
"""Of the programs whose warps share a multiprocessor's registers out among them."""

CLASSIC_SPILLS = 512
"""Of classic attention: a single warp holds a whole program of four-bit codes."""


def record_of(role, **component):
    kinds = {"window": Window, "entries": Entries, "index_keys": IndexKeys}
    layer = {role: kinds[role](**component)}
    if role == "index_keys":
        layer["entries"] = Entries(dim=16, ratio=4, format="bf16")
    plan = plan_cache(CacheSpec(layers=[LayerSpec(**layer)]), max_requests=2, max_tokens=512)
    return recorded(plan.region(0, role)[0])[0]


def attention_constants(name, arch, *, bf16=True, config=None, decoded=False, **options):
    """``decoded``: a prefill's, whose entries and own rows were decoded before."""
    window = record_of("window", dim=512, window=128, format=name)
    entries = record_of("entries", dim=512, ratio=4, format=name)
    own = window
    if decoded:
        entries, own = plain_record(entries), plain_record(window)
        options |= {"OWN": True, "SPLIT": False}
    config = (config or (TENSOR if entries.quant else WHOLE)[arch]) if bf16 else FULL
    parts = parts_of_each(window, entries, own, bf16=bf16)
    constants = {
        "W": window, "E": entries, "CHUNK": own, **dict(zip(("S", "ENTRY_S", "CHUNK_S"), parts, strict=True)),
        "WINDOW": 128, "RATIO": 4, "ALL": False, "SINK": True, "OWN": False, "SPLIT": True, "HEADS": config.heads,
        "KEYS": config.keys, "ALIKE": alike(window, entries), "STAGES": config.stages,
        "SPREAD": max(1, 32 * config.warps // config.keys), "PAIRS": 0, "NATIVE": arch >= 89, **options,
    }  # fmt: skip
    return constants, config.warps


@pytest.mark.parametrize(
    ("name", "arch", "options"),
    [
        pytest.param("v4_584", 80, {}, id="v4_584 A100"),
        pytest.param("v4_584", 90, {}, id="v4_584 H100"),
        pytest.param("v4_584", 100, {}, id="v4_584 B200"),
        pytest.param("v4_584", 80, {"config": FEW}, id="few queries A100"),
        pytest.param("v4_584", 90, {"config": FEW}, id="few queries H100"),
        pytest.param("v4_584", 80, {"decoded": True}, id="prefill over decoded entries A100"),
        pytest.param("v4_584", 90, {"decoded": True}, id="prefill over decoded entries H100"),
        pytest.param("v4_584", 90, {"SPLIT": False, "PAIRS": 32}, id="outputs turned back H100"),
        pytest.param("v4_584", 80, {"SPLIT": False, "PAIRS": 5}, id="some of the outputs' channels turned back A100"),
        pytest.param("mxfp4_368", 90, {"ALL": True}, id="mxfp4_368, every entry, H100"),
        pytest.param(
            "v4_584", 90, {"bf16": False, "OWN": True, "SPLIT": False}, id="fp32 queries, a chunk's own rows, H100"
        ),
    ],
)
def test_attention_compiles(name, arch, options, record, request):
    constants, warps = attention_constants(name, arch, **options)
    bf16 = options.get("bf16", True)
    given = "bf16" if bf16 else "fp32"
    options = {"given": given, "exact": bf16, "warps": warps, "shared": SHARED[arch] * 1024}
    found = check(record, case_of(request), attend.attend_kernel, arch, constants, **options)
    assert found.spilled_bytes <= SPILLS, found


@pytest.mark.parametrize(
    ("name", "arch", "heads", "selected"),
    [
        pytest.param("v32_nvfp4_432", 80, 128, False, id="v32_nvfp4_432 A100"),
        pytest.param("v32_nvfp4_432", 90, 128, False, id="v32_nvfp4_432 H100"),
        pytest.param("v32_nvfp4_432", 90, 16, False, id="v32_nvfp4_432, 16 heads, H100"),
        pytest.param("v32_nvfp4_432", 90, 128, True, id="v32_nvfp4_432, picks, H100"),
        pytest.param("v32_nvfp4_432", 100, 128, False, id="v32_nvfp4_432 B200"),
        pytest.param("v32_656", 90, 128, True, id="v32_656 of MLA, picks, H100"),
        pytest.param("bf16", 90, 128, True, id="bf16 of MLA, picks, H100"),
    ],
)
def test_attention_to_rows_of_mla_compiles(name, arch, heads, selected, record, request):
    """576 channels are nine chunks; every row is an entry."""
    entries, props = record_of("entries", dim=576, ratio=1, format=name), DeviceProps(arch, 132, SHARED[arch] << 10)
    parts = attend.parts_of(None, entries, bf16=True)
    config = attend.attend_config(props, 64, heads, 4096, parts, None, entries, selected=selected)
    constants = {
        **attend.attend_constants(config, None, entries, None, bf16=True), "WINDOW": 0, "RATIO": 1,
        "ALL": not selected, "SINK": False, "SPLIT": True, "PAIRS": 0, "NATIVE": arch >= 89,
    }  # fmt: skip
    options = {"given": "bf16", "exact": True, "warps": config.warps, "shared": SHARED[arch] * 1024}
    found = check(record, case_of(request), attend.attend_kernel, arch, constants, **options)
    assert found.spilled_bytes <= SPILLS, found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"SPLIT": False}, id="of a pipeline"),
        pytest.param({"SPLIT": True, "ALL": True}, id="parts of a pipeline, every entry"),
        pytest.param({"SPLIT": False, "PAIRS": 32}, id="of a pipeline, turned back"),
        pytest.param({"SPLIT": False, "RATIO": 0}, id="of a pipeline, the window alone"),
    ],
)
def test_attention_on_hopper_compiles(options, record, request):
    window, entries = (record_of(role, dim=512, **more, format="v4_584") for role, more in ROLES.items())
    assert on_hopper(DeviceProps(HOPPER, 132, SHARED[HOPPER] << 10), window, entries, bf16=True)
    constants = {
        "W": window, "E": entries, "WINDOW": 128, "RATIO": 4, "ALL": False, "SINK": True, "PAIRS": 0, **options,
        **{name.upper(): value for name, value in PIPELINE._asdict().items()},
    }  # fmt: skip
    kernel = attend_hopper.attend_hopper_kernel
    options = {"warps": HOPPER_WARPS, "shared": SHARED[HOPPER] * 1024}
    found = check(record, case_of(request), kernel, HOPPER, constants, **options)
    assert found.spilled_bytes <= PIPELINE_SPILLS, found


def classic_constants(
    keys, values, arch, *, bf16=True, dims=(128, 128), heads=8, group=4, each=1, block=256, **options
):
    kv = KV(key_heads=heads, key_dim=dims[0], value_dim=dims[1], key_format=keys, value_format=values)
    spec = CacheSpec(layers=[LayerSpec(kv=kv)], block_tokens=block)
    k, v = (recorded(region)[0] for region in plan_cache(spec, max_requests=2, max_tokens=512).region(0, "kv"))
    sides = attend_kv.sides_of(k, v, None, bf16=bf16, native=arch >= 89)
    config = attend_kv.config_of(arch, sides)
    span, some = attend_kv.span_of(each), power_of_two(group)
    constants = {
        "K": k, "V": v, "NK": k, "NV": v, "SK": sides[0], "SV": sides[1], "OWN": False, "LEFT": False,
        "GROUPS": heads, "HEADS": some, "SPAN": span, "ROWS": max(16, some * span),
        "KEYS": config.keys, "WHOLE": attend_kv.whole_tiles(k, config), "STAGES": config.stages,
        "SPREAD": max(1, 32 * config.warps // config.keys), "NATIVE": arch >= 89, **options,
    }  # fmt: skip
    return constants, config


@pytest.mark.parametrize(
    ("keys", "values", "arch", "options"),
    [
        *(
            pytest.param(name, name, arch, {}, id=f"{name} {gpu}")
            for gpu, arch in (("A100", 80), ("H100", 90), ("B200", 100))
            for name in ("bf16", "fp16", "fp32", "fp8_row", "int8_row", "nf4_b64", "mxfp4", "nvfp4")
            # Formats that are read like another one need not be compiled for every GPU.
            if arch == 90 or name in ("bf16", "nf4_b64", "int8_row")
        ),
        pytest.param("bf16", "fp8_row", 90, {"each": 4}, id="four tokens, H100"),
        pytest.param("mxfp4", "int8_row", 90, {"OWN": True, "each": 4}, id="the step's own rows, H100"),
        pytest.param("bf16", "bf16", 90, {"each": 3, "block": 16}, id="blocks of 16, three tokens, H100"),
        pytest.param("bf16", "bf16", 90, {"bf16": False}, id="fp32 queries, H100"),
        pytest.param("bf16", "bf16", 90, {"heads": 1, "group": 64}, id="MQA, 64 heads, H100"),
        pytest.param("bf16", "bf16", 90, {"dims": (192, 128), "group": 1}, id="dims 192 and 128, H100"),
    ],
)
def test_classic_attention_compiles(keys, values, arch, options, record, request):
    constants, config = classic_constants(keys, values, arch, **options)
    given = "bf16" if options.get("bf16", True) else "fp32"
    more = {"given": given, "exact": True, "warps": config.warps, "shared": SHARED[arch] * 1024}
    found = check(record, case_of(request), attend_kv.attend_kv_kernel, arch, constants, **more)
    assert found.spilled_bytes <= CLASSIC_SPILLS, found
    # As many programs of plain decode fit as the work is shared out for; wider ones may be fewer.
    resident = 1 if options else config.resident
    assert resident * found.shared_bytes <= SHARED[arch] * 1024, found
    assert resident * 32 * config.warps * found.registers <= 1 << 16, found


@pytest.mark.parametrize(
    ("name", "given", "arch", "size"),
    [
        *product(("index_fp8_132", "index_fp4_68_h", "index_nvfp4"), ("bf16", "fp32"), SHARED, (2,)),
        *product(("index_fp8_132",), ("e4m3",), (90, 100), range(3)),
    ],
)
def test_scores_compile(name, given, arch, size, record):
    keys = record_of("index_keys", dim=128, ratio=4, heads=64, topk=512, format=name)
    codes = given == "e4m3"
    assert takes_codes(keys) == (name == "index_fp8_132")
    config, constants = score_config(keys, 64, arch >= 89, codes, size)
    constants["RATIO"] = 4
    listed = {"ROUND": ROUND, "ROOM": 2 * ROUND, "KEPT": 1024}
    alone = {
        scores.scores_kernel: {"TILES": 4}, scores.best_scores_kernel: listed, scores.long_scores_kernel: listed
    }  # fmt: skip
    for kernel, more in alone.items():
        if kernel is scores.long_scores_kernel and arch != HOPPER:
            continue
        types = {"q": "fp8e4nv"} if codes else {}
        options = {
            "given": "bf16" if codes else given,
            "types": types,
            "exact": False,
            "warps": config.warps,
            "shared": SHARED[arch] * 1024 // 2,
        }
        found = check(
            record, f"{name}, {given}{f', size {size}' * codes}", kernel, arch, {**constants, **more}, **options
        )
        # Tiles of 256 keys, and fp32 queries, take all registers there are, and are the fastest all the same.
        assert found.spilled_bytes <= 128, found


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("name", ["index_fp4_68", "index_fp8_132"])
def test_scores_on_hopper_compile(name, queries, record):
    keys = record_of("index_keys", dim=128, ratio=4, heads=64, topk=512, format=name)
    taken = hopper_takes(keys, 64)
    assert taken == ("nibbles" if name == "index_fp4_68" else "codes")
    lean = taken == "nibbles" and queries == 1
    constants = {
        "R": keys, "RATIO": 4, "HEADS": 64, "QUERIES": queries, "TAKEN": taken, "WHOLE": keys.rows % 64 == 0,
        "LEAN": lean,
    }  # fmt: skip
    options = {"exact": False, "shared": SHARED[90] * 1024 // (5 if lean else 4)}
    options["registers"] = LEAN_REGISTERS if lean else None
    case = f"{name}, {queries} tokens"
    found = check(record, case, scores_hopper.hopper_scores_kernel, 90, constants, **options)
    assert not found.spilled_bytes, found
    if queries == 1:
        del constants["QUERIES"]
        options["registers"] = LEAN_REGISTERS if lean else SEEN_REGISTERS
        found = check(record, case, scores_hopper.hopper_seen_scores_kernel, 90, constants, **options)
        assert not found.spilled_bytes, found


@pytest.mark.parametrize("ahead", [False, True])
def test_scores_of_codes_on_hopper_compile(ahead, record):
    keys = record_of("index_keys", dim=128, ratio=4, heads=64, topk=512, format="index_fp8_132")
    constants = {"R": keys, "RATIO": 4, "HEADS": 64, "STAGES": CODES_STAGES, "AHEAD": ahead}
    options = {"exact": False, "types": {"q": "fp8e4nv"}, "registers": CODES_REGISTERS}
    options["shared"] = SHARED[90] * 1024 // CODES_PROGRAMS
    case = f"index_fp8_132{', ahead' * ahead}"
    found = check(record, case, scores_hopper.hopper_codes_kernel, 90, constants, **options)
    # Fused products and sums, as they are launched, spill none.
    assert found.spilled_bytes <= 16, found
    if ahead:
        options = {"registers": CODES_REGISTERS, "types": {"q": "fp8e4nv"}}
        text = compiled(scores_hopper.hopper_codes_kernel, 90, constants, exact=False, **options).asm["ptx"]
        first = min(text.find(word) for word in ("ld.global", "cp.async", "st.global"))
        assert 0 <= text.find("griddepcontrol.launch_dependents") < text.find("griddepcontrol.wait") < first


@pytest.mark.parametrize("ahead", [False, True])
def test_scores_of_nibbles_on_hopper_compile(ahead, record):
    keys = record_of("index_keys", dim=128, ratio=4, heads=64, topk=512, format="index_fp4_68")
    constants = {"R": keys, "RATIO": 4, "HEADS": 64, "AHEAD": ahead}
    options = {"exact": False, "types": {"q": "fp8e4nv"}, "registers": NIBBLES_REGISTERS}
    options["shared"] = SHARED[90] * 1024 // NIBBLES_PROGRAMS
    case = f"index_fp4_68, e4m3{', ahead' * ahead}"
    found = check(record, case, scores_nibbles.hopper_nibbles_kernel, 90, constants, **options)
    assert not found.spilled_bytes, found


@pytest.mark.parametrize("arch", SHARED, ids=["A100", "H100", "B200"])
@pytest.mark.parametrize("slots", [1024, 16384])
@pytest.mark.parametrize("lists", [False, True], ids=["of scores", "of lists"])
def test_best_compiles(lists, slots, arch, record):
    tile = tile_for(512, slots)
    constants = {
        "TOPK": tile.topk, "HANDS": tile.hands, "DEEP": tile.deep, "ROOM": room_for(512), "LIST": 512 * lists,
    }  # fmt: skip
    types = {"given": "i64" if lists else "fp32"}
    case = f"{slots} of {'lists' if lists else 'scores'}"
    options = {"warps": tile.warps, "types": types, "shared": SHARED[arch] * 1024}
    found = check(record, case, topk.best_kernel, arch, constants, **options)
    # Pointers of a whole tile of lists' pairs, when 32 warps leave 64 registers to a thread.
    assert found.spilled_bytes <= 512, found


@pytest.mark.parametrize(
    ("rows", "columns", "seen"),
    [
        *product((1, 64), (16384, 262144), (False,)),
        (1000, 65536, False), (64, 262144, True), (1000, 65536, True),
    ],
)  # fmt: skip
def test_best_on_hopper_compiles(rows, columns, seen, record):
    parted = hopper_lists(132, rows, columns, 512)
    launches = [
        (parted.first, 0, parted.parts == 1, parted.run),
        (parted.last, parted.room, True, parted.parts * parted.room),
    ]
    for held, lists, last, slots in launches[: 1 + (parted.parts > 1)]:
        constants = {
            "WARPS": held.warps, "DEEP": held.deep, "HANDS": held.hands, "BINS": 2048, "ROOM": parted.room,
            "LIST": lists, "LAST": last, "ONE": slots <= 32 * held.warps * held.deep, "WHOLE": True,
            "SEEN": seen,
        }  # fmt: skip
        case = f"{rows} rows of {columns}{', as far as seen' * seen}{', lists' * bool(lists)}"
        types = {"given": "i64" if lists else "fp32"}
        found = check(record, case, topk_hopper.hopper_top_kernel, 90, constants, warps=held.warps, types=types)
        # What waits while a full list is cut, which few calls come to.
        assert found.spilled_bytes <= 1024, found


@pytest.mark.parametrize("held", [4, 16])
def test_best_of_long_rows_on_hopper_compiles(held, record):
    part = {"WARPS": TOP_WARPS, "DEEP": HOPPER_PART // (32 * TOP_WARPS), "WHOLE": True}
    last = {"WARPS": TOP_WARPS, "BINS": 2048, "GIVEN": HOPPER_SLOTS, "ROOM": HOPPER_ROOM, "WHOLE": True}
    kernels = {
        topk_hopper.hopper_hands_kernel: part,
        topk_hopper.hopper_list_kernel: {**part, "HELD": held, "BINS": 2048, "ROOM": HOPPER_SLOTS},
        topk_hopper.hopper_last_kernel: last,
    }
    for kernel, constants in kernels.items():
        found = check(record, f"{held} hands of a thread", kernel, 90, constants, warps=TOP_WARPS)
        # As of ``hopper_top_kernel``.
        assert found.spilled_bytes <= 1024, found


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (topk.rank_kernel, {"BLOCK": RANKED, "OTHERS": OTHERS}),
        (topk.sort_kernel, {"SLOTS": 1024}),
        (
            flash_index.flash_index_kernel,
            {"WINDOW": 128, "LINE": 128, "RING": 130, "ROWS": 64, "RATIO": 4, "ALL": False, "WIDTH": 128, "BLOCK": 512},
        ),
        *((attend.merge_kernel, {**MERGE, "PAIRS": pairs}) for pairs in (0, 32)),
        (attend.inverse_rope_kernel, {"DIM": 512, "PAIRS": 32, "HEADS": attend.TURN_HEADS, "LSE": True}),
    ],
    ids=["rank", "sort", "rows for FlashMLA", "merge", "merge, turned back", "turned back"],
)
def test_small_kernels_compile(kernel, constants, arch, record, request):
    known, parameters = {"NATIVE": arch >= 89, "AHEAD": False}, inspect.signature(kernel.fn).parameters
    constants = constants | {name: value for name, value in known.items() if name in parameters}
    found = check(record, case_of(request), kernel, arch, constants)
    # A word or two for a B200.
    assert found.spilled_bytes <= 16, found


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("name", ["index_fp4_68_h", "index_nvfp4_h"])
def test_rotation_of_queries_compiles(name, arch, record):
    keys = record_of("index_keys", dim=128, ratio=4, heads=64, topk=512, format=name)
    rows, warps = tile(keys, 4096)
    constants = {"R": keys, "ROWS": rows, "NATIVE": arch >= 89}
    check(record, name, scores.rotate_kernel, arch, constants, warps=warps)


def case_of(request):
    """A case by the name that its test goes by."""
    return request.node.callspec.id


def test_every_kernel_is_recorded_for_every_gpu(record):
    recorded = {(kernel, arch) for kernel, arch, _ in record.known}
    nvidia = tuple(f"sm_{arch}" for arch in ARCHITECTURES.values())
    everywhere = {name: (*nvidia, *AMD.values()) for name, kernel in kernels().items() if not kernel.is_gluon()}
    of_one = {name: (f"sm_{HOPPER}",) for name, kernel in kernels().items() if kernel.is_gluon()}
    of_some = {name: tuple(f"sm_{arch}" for arch in written_for) for name, written_for in FOR_NVIDIA.items()}
    wanted = everywhere | of_one | of_some
    assert recorded == {(name, arch) for name, every in wanted.items() for arch in every}
