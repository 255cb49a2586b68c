"""Launches beside the kernels' own parameters, on arrays that are nothing but names and shapes: no GPU, no framework.

Every array that a launch is given knows its name, so that a kernel which is given another's in its place is seen.
"""

import pytest

pytest.importorskip("triton")

from kvcore.kernels.triton import topk
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.groups import groups_recorded
from kvcore.kernels.triton.launches import LAUNCHES, launching
from kvcore.kernels.triton.launches.launching import (
    Array,
    Bound,
    BoundGroups,
    BoundTail,
    Kernel,
    Part,
    bind,
)
from kvcore.kernels.triton.launches.states import bind_states
from kvcore.kernels.triton.record import recorded
from kvcore.kernels.triton.tail import tail_recorded
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, State, Tail, Window
from tests.support.ahead_of_time import kernels

T, Q, COLUMNS, HEADS, DIM, K = 300, 3, 7, 64, 512, 8
"""Tokens, requests, columns of the block table, heads, channels, selected entries."""
CSA = LayerSpec(
    window=Window(dim=DIM, window=128),
    tail=Tail(dim=DIM, ratio=4, overlap=True),
    entries=Entries(dim=DIM, ratio=4),
    index_tail=Tail(dim=128, ratio=4, overlap=True),
    index_keys=IndexKeys(dim=128, ratio=4, heads=HEADS, topk=K, format="index_fp4_68_h"),
)
LAYERS = (
    CSA,
    LayerSpec(kv=KV(key_heads=8, key_dim=128)),
    LayerSpec(state=State(heads=4, key_dim=128, value_dim=128)),
    LayerSpec(kv=KV(key_heads=8, key_dim=128, key_format="int4_ch32", value_format="int4_g32")),
    LayerSpec(kv=KV(key_heads=8, key_dim=128, key_format="int8_row", value_format="nf4_b64")),
    LayerSpec(
        entries=Entries(dim=DIM, ratio=4),
        index_keys=IndexKeys(dim=128, ratio=4, heads=HEADS, topk=K, format="index_fp8_132"),
    ),
    LayerSpec(
        entries=Entries(dim=DIM, ratio=4),
        index_keys=IndexKeys(dim=128, ratio=4, heads=HEADS, topk=K, format="index_fp4_68"),
    ),
)
PLAN = plan_cache(CacheSpec(layers=LAYERS), max_requests=Q, max_tokens=4096, max_draft_tokens=3)


class Named:
    """An array by its name; ``fresh``: a launch made it."""

    def __init__(self, name, shape, dtype="float32", *, fresh=False):
        self.name, self.shape, self.dtype, self.fresh = name, tuple(shape), dtype, fresh


class Recorder:
    """A framework whose launches are looked at: (kernel, grid, arrays and numbers by the kernel's names for them)."""

    float32, bfloat16, e4m3, int64, int32, int8, flag = (
        "float32", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8", "bool"
    )  # fmt: skip

    def __init__(self, props=None, *, gluon=True):
        self.launched = []
        self._props = props or DeviceProps(90, 132, 227 << 10)
        self.gluon = gluon

    def native(self, _):
        return True

    def ahead(self, _):
        return 1056

    def props(self, _):
        return self._props

    def empty(self, shape, dtype, _):
        return Named("", shape, dtype, fresh=True)

    def empty_like(self, array):
        return Named("", array.shape, array.dtype, fresh=True)

    def filled(self, shape, _, dtype, like):
        return self.empty(shape, dtype, like)

    def part(self, room, _, shape, dtype):
        return Named(room.name, shape, dtype, fresh=room.fresh) if room else self.empty(shape, dtype, None)

    def view(self, array, dtype):
        return Named(array.name, array.shape, dtype, fresh=array.fresh)

    def words(self, pool):
        return Named(pool.name, (pool.shape[0], pool.shape[1] // 4), "int32")

    def dense(self, array):
        return array

    aligned = dense

    def run(self, kernel, grid, arrays, numbers):
        assert isinstance(kernel, Kernel)
        self.launched.append((kernel, grid, dict(zip(kernel.names, [*arrays, *numbers], strict=True))))


def number_of(role, layer=0, part=0):
    record, _ = recorded(PLAN.region(layer, role)[part])
    return bind(Bound(record, 0, 1, 2))


def tail_of(role):
    record, _ = tail_recorded(PLAN.region(0, role)[0], getattr(CSA, role))
    return bind(BoundTail(record, 0, 1), launching.TAILS)


def groups_of(part):
    record, _ = groups_recorded(PLAN.region(3, "kv")[part])
    return bind(BoundGroups(record, 0, 1, 2), launching.GROUPS)


def pools(mark=""):
    return [Named(f"{mark}{field}", (9, 4096), "uint8") for field in ("codes", "scales", "plain")]


def tails(mark=""):
    return [Named(f"{mark}{field}_tail", (9, 4096), "uint8") for field in ("kv", "score")]


GROUPS = {
    "keys": pools("key_"), "values": pools(),
    "tails": [Named(f"{mark}tail", (9, 4096), "uint8") for mark in ("key_", "")],
    "records": [groups_of(0), groups_of(1), number_of("kv_tail", 3), number_of("kv_tail", 3, 1)],
}  # fmt: skip
"""What launches of groups of tokens take."""
STATE = bind_states(Part(number_of("state", 2), [], False)).number

SHAPES = {
    **dict.fromkeys(("positions", "request_index"), (T,)),
    **dict.fromkeys(("slots", "starts", "lengths", "stored", "left_padding", "taken"), (Q,)),
    "bound": (Q,), "block_table": (Q, COLUMNS), "frequencies": (32,), "sink": (HEADS,), "norm_weight": (DIM,),
    "values": (T, DIM), "kv": (T, 2 * DIM), "score": (T, 2 * DIM), "index_kv": (T, 256), "index_score": (T, 256),
    "q": (T, HEADS, DIM), "selected": (T, K), "indices": (T, K), "weights": (T, HEADS), "scores": (T, 40_000),
    "out": (Q, 16, DIM), "pages": (5, 64), "words": (Q, 16, 32), "held": (T, 1, 584), "parts": (2, T, HEADS, DIM + 1),
}  # fmt: skip
"""Of arrays by the launches' names for them; of others a shape does not matter."""

GIVEN = {
    "append_rows": {"record": number_of("window")},
    "append_rotated_rows": {"record": number_of("window"), "eps": 1e-6},
    "store_rows": {"record": number_of("entries"), "ratio": 4},
    "append_tail_rows": {"buffers": tails(), "record": tail_of("tail")},
    "append_last_rows": {"buffers": tails(), "record": tail_of("tail")},
    "flush_rows": {
        "tail_buffers": tails(), "buffers": pools(), "index_tail_buffers": tails("index_"),
        "index_buffers": pools("index_"), "eps": 1e-6, "append": True, "beside": False,
        "records": [number_of("entries"), tail_of("tail"), number_of("index_keys"), tail_of("index_tail")],
    },
    "read_before_rows": {"record": STATE, "before": 1, "shape": [4, 128, 128]},
    "write_last_states": {"record": STATE, "columns": 2, "values": Named("values", (Q, 4, 128, 128))},
    "select_state_rows": {"record": STATE, "values": Named("values", (T, 4, 128, 128))},
    "gather_window_rows": {"record": number_of("window"), "window": 128},
    "gather_selected_rows": {"record": number_of("entries"), "ratio": 4},
    "gather_all_rows": {"record": number_of("entries"), "ratio": 4, "columns": 16},
    "gather_kv_rows": {"record": number_of("kv", 1), "columns": 16, "ring": False, "window": 0, "chunk": 0},
    "put_own_rows": {"record": number_of("window"), "last": True, "ring": True, "window": 128, "chunk": 0},
    "attend_rows": {
        "window": pools(), "entries": pools("entry_"), "scale": 0.1, "bf16": True,
        "records": [number_of("window"), number_of("entries"), number_of("window")], "sizes": [128, 4, 2, 128 + K],
    },
    "attend_kv_rows": {
        "q": Named("q", (T, HEADS, 128)), "keys": pools("key_"), "values": pools(), "scale": 0.1, "bf16": True,
        "records": [number_of("kv", 1), number_of("kv", 1, 1)] * 2, "sizes": [0, 0, 2],
    },
    "attend_groups_rows": {
        **GROUPS, "q": Named("q", (T, HEADS, 128)), "sizes": [0, 0, 2], "scale": 0.1, "fast": True
    },
    "append_groups_rows": {**GROUPS, "k": Named("k", (T, 8, 128)), "v": Named("v", (T, 8, 128)), "most": 0},
    "inverse_rope_rows": {"out": Named("out", (T, HEADS, DIM))},
    "flash_answer": {"out": Named("out", (T, HEADS, DIM))},
    "score_rows": {"q": Named("q", (T, HEADS, 128)), "record": number_of("index_keys"), "ratio": 4, "columns": 16},
    "score_select_rows": {
        "q": Named("q", (T, HEADS, 128)), "record": number_of("index_keys"), "ratio": 4, "columns": 40_000, "k": K,
        "run": 8192,
    },
    "seen_select_rows": {
        "q": Named("q", (T, HEADS, 128), "bfloat16"), "record": number_of("index_keys"), "ratio": 4,
        "block_table": Named("block_table", (T, COLUMNS)), "columns": 1 << 24, "k": K,
    },
    "select_rows": {"k": K},
    "fill_units": {"pool": Named("pool", (9, 4096), "uint8"), "value": 0},
    "copy_units": {
        "pool": Named("pool", (9, 4096), "uint8"), "sources": Named("sources", (2,)), "targets": Named("targets", (2,))
    },
    "move_ring_rows": {
        "buffers": [Named(name, (9, 4096)) for name in ("one", "two", "three")], "rows": 8, "copies": 1, "back": True,
        "fields": [0, 9000, 0, 64, 512, 64, 0],
    },
    "move_rings": {"held": Named("held", (T, 64)), "back": True},
    "move_strips": {"store": True, "first_page": 0},
    "digest_lanes": {"salt": 5},
    "digest_runs": {},
    "digest_strips": {"words": Named("words", (5, 64)), "first_page": 0},
    "join_shards": {},
    "watch_rows": {
        "asked": Named("asked", (4096,)), "requests": Q, "sample": 16, "most": 8, "turn": 3, "seals": True,
        "narrow": False, "roles": Named("roles", (5, 11)), "pieces": Named("pieces", (9, 10)),
    },
    "flash_rows": {"sizes": [128, 130, 64, 4, 0, 64]},
}  # fmt: skip
"""What is no array, or another than is meant by its name."""

KNOWN = {
    "request": "request_index", "table": "block_table", "norm": "norm_weight", "index_norm": "index_norm_weight",
    "left": "left_padding", "units": "numbers",
}  # fmt: skip
"""What kernels call it, and launches."""
ATTENTION = "attend_rows", "attend_kv_rows", "attend_groups_rows"
SCORES = "score_rows", "score_select_rows", "seen_select_rows"
ALSO = {
    # Several arrays in one room, or one array in several roles.
    **{(name, part): ("workspace",) for name in ATTENTION for part in ("partial", "partial_lse")},
    **{(name, part): ("rotated",) for name in SCORES for part in ("out", "q")},
    **{(name, "given_counts"): ("counts",) for name in ("select_rows", "score_select_rows")},
    ("select_rows", "hands"): ("counts",),
    ("score_select_rows", "given"): ("pairs",), ("select_rows", "given"): ("scores", "pairs"),
    **{(name, "scores"): ("held",) for name in ("score_select_rows", "seen_select_rows")},
    ("digest_lanes", "rows"): ("words",),
    ("copy_units", "units"): ("sources", "targets"), ("copy_units", "others"): ("sources", "targets"),
    # Sums are let be where they are right.
    ("inverse_rope_rows", "lse"): ("out",),
    # Outputs of keys and values are not turned back.
    **{(name, "frequencies"): ("positions",) for name in ("attend_kv_rows", "attend_groups_rows")},
}  # fmt: skip
LENGTHS = {
    "table_columns": COLUMNS, "requests": Q, "heads": HEADS, "topk": K, "k": K, "splits": 2,
}  # fmt: skip
"""Numbers that are known by the shapes."""


OF_HOPPER = ("score_rows", "select_rows")
"""Launches that have kernels for Hopper."""
BF16 = {"score_rows": {"q": Named("q", (T, HEADS, 128), "bfloat16")}}
"""Queries that those take."""

FILLED = {
    # By the launch before.
    ("take_units_kernel", "held"), ("merge_kernel", "partial"),
    # Attention with splits writes its parts alone.
    *((name, part) for name in ("attend_kernel", "attend_hopper_kernel") for part in ("out", "lse")),
    # So does the choice of parts of rows.
    ("hopper_top_kernel", "indices"),
    # Scores by the launch before, and how many there are.
    ("hopper_top_kernel", "given"), ("hopper_top_kernel", "given_counts"),
}  # fmt: skip
"""Arrays that a launch makes, and that a kernel does not write."""


def launches_of(name, function=None, *, gluon=True, **given):
    """What a launch launches."""
    launch, to, arguments = LAUNCHES[name], Recorder(gluon=gluon), {}
    for parameter, kind in launch.parameters.items():
        if parameter in (known := {**GIVEN[name], **given}):
            arguments[parameter] = known[parameter]
        elif kind in (Array, Array | None):
            arguments[parameter] = Named(parameter, SHAPES.get(parameter, (5, 16)))
        else:
            assert kind == list[Array], parameter
            arguments[parameter] = pools()
    (function or launch.function)(to, **arguments)
    assert to.launched, name
    return to.launched


def faults(name, launched):
    """Parameters of kernels that are given another array than theirs, or a number that is not so."""
    found = []
    for kernel, grid, given in launched:
        kind = kernel.kernel.fn.__name__
        assert all(programs > 0 for programs in grid)
        for parameter, value in given.items():
            plain = parameter.removesuffix("_ptr")
            if isinstance(value, Named) != (plain != parameter):
                found.append(f"{kind}: {parameter}")
            elif not isinstance(value, Named):
                expected = {**LENGTHS, "heads": 1} if name == "move_ring_rows" else LENGTHS
                if value != expected.get(plain, value):
                    found.append(f"{kind}: {parameter} = {value}")
            elif value.fresh:
                if parameter not in kernel.writes and (kind, plain) not in FILLED:
                    found.append(f"{kind}: {parameter} is not written")
            elif value.name not in (plain, KNOWN.get(plain), *ALSO.get((name, plain), ())):
                found.append(f"{kind}: {parameter} is given {value.name}")
    return found


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_are_given_the_arrays_that_their_parameters_name(name):
    assert not faults(name, launches_of(name))


@pytest.mark.parametrize("name", [name for name in LAUNCHES if Array | None in LAUNCHES[name].parameters.values()])
def test_what_is_absent_has_a_stand_in(name):
    absent = {key: None for key, kind in LAUNCHES[name].parameters.items() if kind == Array | None}
    for kernel, _, given in launches_of(name, **absent):
        assert [*given] == [*kernel.names]
        assert all(isinstance(value, Named) == key.endswith("_ptr") for key, value in given.items())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("most", [0, 5])
def test_every_kernel_of_groups_is_given_its_arrays(fast, most):
    assert not faults("attend_groups_rows", launches_of("attend_groups_rows", fast=fast))
    assert not faults("append_groups_rows", launches_of("append_groups_rows", most=most))


def of_few_rows():
    """A choice from few rows, whose lists several programs share."""
    return launches_of("select_rows", gluon=False, scores=Named("scores", (1, 100)))


def test_few_rows_are_given_what_many_are():
    assert not faults("select_rows", of_few_rows())


def of_long_rows():
    """A choice from few long rows, which Hopper has kernels for."""
    return launches_of("select_rows", scores=Named("scores", (2, 40_000)))


def test_few_long_rows_are_given_what_others_are():
    launched = of_long_rows()
    kernels = [kernel.kernel.fn.__name__ for kernel, _, _ in launched]
    assert kernels == ["hopper_hands_kernel", "hopper_list_kernel", "hopper_last_kernel"]
    assert [grid for _, grid, _ in launched] == [(40,), (40,), (2,)]
    assert not faults("select_rows", launched)


def of_pool_rows():
    """Attention without the step's own rows, which Hopper has a kernel for."""
    return launches_of("attend_rows", own=None)


def test_attention_on_hopper_is_given_what_others_are():
    launched = of_pool_rows()
    assert [kernel.kernel.fn.__name__ for kernel, _, _ in launched] == ["attend_hopper_kernel", "merge_kernel"]
    assert launched[0][1] == (T * 2,)
    assert faults("attend_rows", launched) == ["attend_hopper_kernel: own_ptr is given positions"]  # instead of none


def of_codes(layer, heads=HEADS, tokens=Q, **given):
    """Scores of queries in e4m3, one a request."""
    q = Named("q", (tokens, heads, 128), "float8_e4m3fn")
    return launches_of("score_rows", q=q, record=number_of("index_keys", layer), columns=262_144, **given)


@pytest.mark.parametrize(("layer", "name"), [(5, "hopper_codes_kernel"), (6, "hopper_nibbles_kernel")])
def test_scores_of_codes_on_hopper_are_given_what_others_are(layer, name):
    ((kernel, grid, given),) = launched = of_codes(layer)
    assert kernel.kernel.fn.__name__ == name
    assert not faults("score_rows", launched)
    # Every column is some program's, and all programs run at once.
    assert grid[0] * 64 * given["tiles"] >= Q * 262_144
    assert grid[0] <= 132 * 5
    for others in ({"gluon": False}, {"heads": 128}, {"tokens": 2 * Q}):
        ((kernel, _, _),) = launched = of_codes(layer, **others)
        assert kernel.kernel.fn.__name__ != name
        assert set(faults("score_rows", launched)) <= {"hopper_scores_kernel: heads = 128"}


def of_packed_rows(**given):
    """Attention of a token of each request to rows that are taken as they are, without the step's own."""
    records = [number_of("kv", 4), number_of("kv", 4, 1), -1, -1]
    return launches_of(
        "attend_kv_rows", own_keys=None, own_values=None, records=records, slots=Named("slots", (T,)), **given
    )


@pytest.mark.parametrize("gluon", [True, False])
def test_attention_from_packed_rows_is_given_what_others_are(gluon):
    launched = of_packed_rows(gluon=gluon)
    kernel = "attend_packed_kernel" if gluon else "attend_kv_kernel"
    assert [kernel.kernel.fn.__name__ for kernel, _, _ in launched] == [kernel, "merge_kernel"]
    absent = [] if gluon else [f"{kernel}: own_{part}_ptr is given positions" for part in ("keys", "values")]
    assert faults("attend_kv_rows", launched) == absent  # instead of none


@pytest.mark.parametrize("name", OF_HOPPER)
def test_kernels_of_hopper_are_given_what_their_twins_are(name):
    for gluon in (True, False):
        launched = launches_of(name, gluon=gluon, **BF16.get(name, {}))
        assert any(kernel.kernel.is_gluon() for kernel, _, _ in launched) == gluon
        assert not faults(name, launched)


def test_every_kernel_is_launched():
    others = *launches_of("attend_groups_rows", fast=False), *launches_of("append_groups_rows", most=5)
    every = [
        *of_few_rows(),
        *of_long_rows(),
        *of_pool_rows(),
        *of_codes(5),
        *of_codes(6),
        *of_packed_rows(),
        *others,
        *(one for name in LAUNCHES for one in launches_of(name)),
    ]
    every += [
        one
        for name in OF_HOPPER
        for gluon in (True, False)
        for one in launches_of(name, gluon=gluon, **BF16.get(name, {}))
    ]
    assert {one.kernel.fn.__name__ for one, _, _ in every} == {*kernels()}


def test_a_launch_that_mixes_arrays_up_is_seen(monkeypatch):
    def run(self, kernel, grid, arrays, numbers):
        values, codes, scales, plain, starts, lengths, *others = arrays
        right(self, kernel, grid, (values, scales, codes, plain, lengths, starts, *others), numbers)

    right = Recorder.run
    monkeypatch.setattr(Recorder, "run", run)
    given = ("codes", "scales"), ("scales", "codes"), ("starts", "lengths"), ("lengths", "starts")
    wanted = [f"store_entries_kernel: {one}_ptr is given {other}" for one, other in given]
    assert faults("store_rows", launches_of("store_rows")) == wanted


def test_a_launch_with_too_few_or_other_arguments_is_seen(monkeypatch):
    right = Recorder.run
    monkeypatch.setattr(Recorder, "run", lambda self, kernel, grid, a, n: right(self, kernel, grid, a[:-1], n))
    with pytest.raises(ValueError, match="shorter"):
        launches_of("append_rows")
    monkeypatch.setattr(Recorder, "run", lambda self, kernel, grid, a, n: right(self, kernel, grid, a, n[::-1]))
    assert faults("append_rows", launches_of("append_rows")) == [f"append_kernel: table_columns = {T}"]


def test_a_kernel_is_known_by_its_constants_and_what_it_writes():
    constants = {"BLOCK": 16, "OTHERS": 16}
    assert Kernel(topk.rank_kernel, constants, writes=("indices",)).writes == ("indices_ptr",)
    for wrong in ({"BLOCK": 16}, {**constants, "ROOM": 5}):
        with pytest.raises(TypeError, match="OTHERS"):
            Kernel(topk.rank_kernel, wrong)
    with pytest.raises(TypeError, match="'k'"):
        Kernel(topk.rank_kernel, constants, writes=("k",))


@pytest.mark.parametrize(("tokens", "ahead"), [(1, True), (256, True), (8192, False)])
def test_small_launches_alone_come_up_ahead(tokens, ahead):
    positions = Named("positions", (tokens,))
    ((kernel, _, _),) = launches_of("append_rows", positions=positions, values=Named("values", (tokens, DIM)))
    assert kernel.constants["AHEAD"] == ahead
    assert kernel.options == ({"launch_pdl": True} if ahead else {})
