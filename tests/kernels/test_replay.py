"""Verbs that are replayed launch what they launch on their own way: the same kernels, compiled for what they are given.

Triton's compiler is a stand-in that remembers what each kernel was specialised on, and refuses to run it on anything
else; so no GPU is needed, and nothing is computed.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
from triton.runtime.jit import KernelInterface

from kvcore.backends.torch_triton import replay, run_triton, tail
from kvcore.backends.torch_triton.device_index import shape_of
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.kernels.triton import attend_hopper
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches import attention, flush, indexer, kv_attention, read, topk, write
from kvcore.ops.arguments import UNKNOWN
from kvcore.ops.functional import FunctionalOps
from kvcore.plan import plan_cache
from kvcore.pools import Pools
from kvcore.spec import Rope, presets
from kvcore.step import StepRequest, build_index

TOKENS = 3
V4 = presets.deepseek_v4_flash_tiny()
CLASSIC = presets.classic(layers=2, key_heads=2, key_dim=32, block_tokens=16, key_format="int8_row")


class Compiled:
    """What a kernel was compiled for, and whether a launch is that."""

    function = packed_metadata = 0

    def __init__(self, world, kernel, given, names):
        self.world, self.kernel, self.names, self.device = world, kernel, names, world.device
        self.kinds = [self.kind(name, value) for name, value in zip(names, given, strict=True)]
        self.dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in given]

    def kind(self, name, value):
        """What Triton specialises a kernel on, of an argument."""
        if name.endswith("_ptr"):
            return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0
        if isinstance(value, bool) or not isinstance(value, int):
            return type(value) is float or value
        if name in self.kernel.do_not_specialize:
            return value >= 1 << 31
        return value >= 1 << 31, value == 1, value % 16 == 0

    def run(self, width, height, *given):
        given = given[7:]  # behind what a launch is told of itself
        kinds = [self.kind(name, value) for name, value in zip(self.names, given, strict=True)]
        assert self.device == self.world.device
        assert kinds == self.kinds, (self.kernel.fn.__name__, kinds, self.kinds)
        for address, dtype in zip(given, self.dtypes, strict=True):
            # Of arrays whose address is known the dtype is that which the kernel was compiled for.
            assert dtype is None or self.world.dtypes.get(address, dtype) == dtype, self.kernel.fn.__name__
        self.world.launched.append((self.kernel.fn.__name__, (width, height), given))


class World:
    """Verbs on a GPU that is not there, and what they launch."""

    def __init__(self, spec, monkeypatch):
        self.launched, self.dispatched, self.dtypes, self.device = [], 0, {}, 0

        def compiled(kernel, grid):
            def dispatch(*given, **_):
                self.dispatched += 1
                addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given]
                size = (grid[0], grid[1] if len(grid) > 1 else 1)
                self.launched.append((kernel.fn.__name__, size, tuple(addresses)))
                return Compiled(self, kernel, given, kernel.arg_names)

            return dispatch

        active = SimpleNamespace(get_current_device=lambda: self.device, get_current_stream=lambda _: 7)
        monkeypatch.setattr(KernelInterface, "__getitem__", compiled)
        monkeypatch.setattr(run_triton, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(run_triton, "native", lambda _: True)
        monkeypatch.setattr(run_triton, "props", lambda _: DeviceProps(90, 132, 227 << 10))
        for module in (attention, flush, indexer, kv_attention, read, topk, write):
            for each in vars(module).values():  # kernels that other tests have compiled
                if hasattr(each, "cache_clear"):
                    each.cache_clear()
        self.ops = TritonOps(
            plan_cache(spec, max_requests=4, max_tokens=512, layout="packed"),
            "cpu",
            props=DeviceProps(90, 132, 227 << 10),
        )
        self.pools = self.ops.allocate()
        self.ops.scratch.take(1, 1)
        self.door = FunctionalOps(self.ops)
        self.door.expect(self.pools)

    def index(self, news=(1, 1, 1), starts=(20, 37, 5), columns=4):
        rows = [
            StepRequest(slot=n, start=start, new=new, blocks=[n])
            for n, (start, new) in enumerate(zip(starts, news, strict=False))
        ]
        return self.door.index(build_index(rows, max_blocks=columns))

    def run(self, verb, *given, **options):
        """(what it launched, its answer); addresses of new arrays by their place in the answer."""
        self.launched.clear()
        self.dtypes.clear()
        self.given = []
        for value in (*given, *options.values()):
            if isinstance(value, torch.Tensor):
                self.given.append(value)
                self.dtypes[value.data_ptr()] = value.dtype
            elif isinstance(value, Rope):
                self.given.append(tail.on_device(value, torch.device("cpu")))
            elif isinstance(value, (Pools, dict)):
                self.given += value.values()
            elif isinstance(value, tuple):
                self.given += [array for array in value if isinstance(array, torch.Tensor)]
        answer = verb(*given, **options)
        new = []
        if not isinstance(answer, Pools):
            new = answer if isinstance(answer, tuple) else (answer,)
            assert all(array.data_ptr() not in self.dtypes for array in new)
        return [
            (name, grid, tuple(self.named(value, new) for value in given)) for name, grid, given in self.launched
        ], answer

    def named(self, value, new):
        """An address by what it is of: new arrays by their place in the answer, what is kept with the place in it."""
        if not isinstance(value, int) or value < 1 << 24:
            return value
        kept = *self.ops.workspaces.buffers(), *self.ops.scratch.take(1, 1)
        for what, arrays in (("given", self.given), ("kept", kept), ("new", new)):
            for n, array in enumerate(arrays):
                if 0 <= value - array.data_ptr() < array.nbytes:
                    return what, n, value - array.data_ptr()
        return "elsewhere"


def some(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def calls(ops, layer):
    """(verb, a function that makes fresh arguments behind the index) of the verbs of a layer."""
    spec, bf16 = ops.plan.spec.all_layers[layer], torch.bfloat16
    if spec.kv is not None:
        yield "append_kv", lambda: ((some(TOKENS, 2, 32), some(TOKENS, 2, 32, dtype=bf16)), {})
        yield "gather_kv", lambda: ((), {"columns": 40})
        yield "attend_kv", lambda: ((some(TOKENS, 4, 32, dtype=bf16),), {"columns": 40, "sink": some(4)})
        return
    dim, rope = spec.window.dim, Rope(dim=8, theta=160000.0)
    yield "append_window", lambda: ((some(TOKENS, dim, dtype=bf16),), {})
    yield "append_rotated_window", lambda: ((some(TOKENS, dim),), {"rope": some(4), "norm_weight": some(dim)})
    yield "gather_window", lambda: ((), {})
    picks = None if spec.entries is None else some(TOKENS, 4, dtype=torch.int32)
    q = dim, bf16
    yield (
        "attend",
        lambda: ((some(TOKENS, 4, q[0], dtype=q[1]), picks), {"rows": None, "sink": some(4), "rope": rope}),
    )
    if spec.tail is not None:
        width, norm = spec.tail.width, spec.entries.dim
        yield "append_tail", lambda: ((some(TOKENS, width), some(TOKENS, width)), {})
        yield "gather_entries", lambda: ((some(TOKENS, 5, dtype=torch.int64),), {})
        streams = [width, width, *([spec.index_tail.width] * 2 if spec.index_tail else [])]
        yield (
            "append_flush",
            lambda: (
                tuple(some(TOKENS, width) for width in streams),
                {"newest": 1, "closed": 1, "norm_weight": some(norm), "eps": 1e-6, "rope": some(4)},
            ),
        )
    if spec.index_keys is not None:
        heads, keys = 4, spec.index_keys.dim
        given = lambda: (some(TOKENS, heads, keys, dtype=bf16), some(TOKENS, heads))  # noqa: E731
        yield (
            "append_index_tail",
            lambda: ((some(TOKENS, spec.index_tail.width), some(TOKENS, spec.index_tail.width)), {}),
        )
        yield "index_scores", lambda: (given(), {"columns": 9})
        # What is seen alone, with room for few of its scores, and for all.
        yield "index_select", lambda: ((*given(), 4), {"columns": 1 << 25})
        yield "index_select", lambda: ((*given(), 4), {"columns": 9000})
        yield "index_select", lambda: ((*given(), 4), {"columns": 9})
        yield "index_select", lambda: ((*given(), 4), {"columns": 900, "run": 64})


@pytest.fixture(params=[V4, CLASSIC], ids=["V4", "classic"])
def world(request, monkeypatch):
    return World(request.param, monkeypatch)


def test_a_replay_launches_what_the_verb_does(world):
    launches_what_the_verb_does(world, world.ops)


def test_a_call_that_has_passed_launches_what_the_verb_does(world, monkeypatch):
    gone_on = []
    again = replay.Replayed.again

    def counted(self, *given):
        found = again(self, *given)
        gone_on.append(found is not UNKNOWN)
        return found

    monkeypatch.setattr(replay.Replayed, "again", counted)
    with torch.no_grad():
        launches_what_the_verb_does(world, world.door)
    assert gone_on[2::3]
    assert all(gone_on[2::3])


def launches_what_the_verb_does(world, verbs):
    ops, index, replayed = world.ops, world.index(), 0
    for layer in range(len(ops.layers)):
        for verb, make in calls(ops, layer):
            run, at = getattr(verbs, verb), (world.pools, layer, index)
            for _ in range(2):
                arguments, options = make()
                world.run(run, *at, *arguments, **options)
            world.dispatched = 0
            fresh = make()
            again, _ = world.run(run, *at, *fresh[0], **fresh[1])
            own, _ = world.run(ops.ways[verb][layer].way, ops, *at, *fresh[0], **fresh[1])
            assert again
            assert again == own, (layer, verb)
            assert world.dispatched == 0
            replayed += ops.ways[verb][layer]._programs != {}
    assert replayed
    assert None not in ops.seen.programs.values()


def test_layers_alike_repeat_a_kind_of_call(monkeypatch):
    """Where the first layer's call is known, the others look at addresses alone, and launch what they would."""
    world = World(CLASSIC, monkeypatch)
    ops, index = world.ops, world.index()
    for verb, make in calls(ops, 0):
        first, second = (ops.ways[verb][layer] for layer in (0, 1))
        arguments, options = make()
        assert first.kind_of(index, arguments, options) is None
        for layer in (0, 0, 1):
            world.run(getattr(ops, verb), world.pools, layer, index, *arguments, **options)
        kind = first.kind_of(index, arguments, options)
        fresh, more = make()
        tensors = tuple(each for each in (*fresh, *more.values()) if isinstance(each, torch.Tensor))
        world.given = [*tensors, *world.pools.values(), *index.arrays]
        for layer, way in ((0, first), (1, second)):
            world.launched.clear()
            assert way.repeat(kind, world.pools, tensors) is not UNKNOWN
            found = [(name, grid) for name, grid, _ in world.launched]
            addresses = [given for *_, given in world.launched]
            world.launched.clear()
            way.way(ops, world.pools, layer, index, *fresh, **more)
            assert found == [(name, grid) for name, grid, _ in world.launched]
            kept = {array.data_ptr() for array in world.given}
            own = [given for *_, given in world.launched]
            for one, other in zip(addresses, own, strict=True):
                assert [a for a in one if a in kept] == [a for a in other if a in kept]
            world.launched.clear()
        other = world.index(starts=(30, 1, 9))
        assert first.in_step(kind, other) == (kind.program, ops.seen.look(other))
        assert first.in_step(kind, world.index((2, 1))) is None
        # Elsewhere nothing is launched: off a boundary, with gaps, and with other pools.
        off = tuple(torch.zeros(each.numel() + 1, dtype=each.dtype)[1:].view(each.shape) for each in tensors)
        assert not tensors or second.repeat(kind, world.pools, off) is UNKNOWN
        assert second.repeat(kind, ops.allocate(), tensors) is UNKNOWN
        assert not world.launched


def test_a_classic_layer_stores_and_attends_in_one_go(monkeypatch):
    """Both verbs' launches in their order, once each verb has passed."""
    world = World(CLASSIC, monkeypatch)
    ops, pools, index = world.ops, world.pools, world.index()
    whole, options = ops.known[1]["decode"], {"columns": 38, "sink": None, "scale": None}
    k, v, q = (some(TOKENS, heads, 32, dtype=torch.bfloat16) for heads in (2, 2, 4))

    def in_turn():
        ops.append_kv(pools, 1, index, k, v)
        return ops.attend_kv(pools, 1, index, q, **options)

    in_turn()
    assert whole.kind_of(index, (k, v, q), options) is None
    whole.learn("decode", pools, index, (k, v, q), options)
    kind, launched = whole.kind_of(index, (k, v, q), options), []
    for run in (lambda: whole.repeat(kind, pools, (k, v, q)), in_turn):
        world.launched.clear()
        assert run() is not UNKNOWN
        launched.append([(name, grid) for name, grid, _ in world.launched])
    assert launched[0] == launched[1]
    assert [name for name, _ in launched[0]][:2] == ["append_kernel"] * 2


def test_a_history_that_grows_is_worked_out_now_and_then(monkeypatch):
    world, programs = World(CLASSIC, monkeypatch), set()
    q = some(TOKENS, 4, 32, dtype=torch.bfloat16)
    for columns in range(1000, 1200):
        index = world.index()
        for layer in range(len(world.ops.layers)):
            found, _ = world.run(world.ops.attend_kv, world.pools, layer, index, q, columns=columns)
            assert len(found) == 2  # several programs share the work, and their parts are merged
        programs |= set(world.ops.seen.programs)
    assert len(programs) == 3  # of 1,024, 1,152 and 1,280 positions
    own, _ = world.run(world.ops.ways["attend_kv"][0].way, world.ops, world.pools, 0, index, q, columns=1280)
    assert world.run(world.ops.attend_kv, world.pools, 0, index, q, columns=1200)[0] == own


@pytest.mark.parametrize("bound", [0, 1, 15, 16, 17, 1000, 1024, 1025, 65537])
def test_a_bound_is_rounded_up(bound):
    assert bound <= replay.rounded(bound) <= bound * 9 / 8
    assert replay.rounded(replay.rounded(bound)) == replay.rounded(bound)


def test_select_is_replayed(monkeypatch):
    world = World(V4, monkeypatch)
    for columns, k in ((9, 4), (5000, 512), (9000, 64)):
        for _ in range(2):
            world.run(world.ops.select, some(2, columns), k)
        world.dispatched = 0
        scores = some(2, columns)
        again, _ = world.run(world.ops.select, scores, k)
        own, _ = world.run(world.ops.ways["select"][None].__self__.way, world.ops, scores, k)
        assert again == own
        assert not world.dispatched
    assert None not in world.ops.seen.programs.values()


@pytest.mark.parametrize(("at_once", "bound"), [(16, True), (1, False)], ids=["on boundaries", "off them"])
def test_parts_of_arrays_are_replayed_where_they_begin_on_boundaries(monkeypatch, at_once, bound):
    world = World(V4, monkeypatch)
    layer = next(n for n, spec in enumerate(V4.all_layers) if spec.index_keys)
    index, dim = world.index((20, 11, 2)), V4.all_layers[layer].index_keys.dim
    monkeypatch.setattr(indexer, "RUNS_AT_ONCE", indexer.FEWEST_RUNS * at_once)
    for _ in range(3):
        given = some(33, 4, dim, dtype=torch.bfloat16), some(33, 4), 4
        options = {"columns": 9000, "run": 64}
        found, _ = world.run(world.ops.index_select, world.pools, layer, index, *given, **options)
        way = world.ops.ways["index_select"][layer].way
        own, _ = world.run(way, world.ops, world.pools, layer, index, *given, **options)
        assert found == own
    assert (None not in world.ops.seen.programs.values()) == bound


def attended(world):
    """A way to call one verb of many kinds."""
    layer = next(n for n, spec in enumerate(V4.all_layers) if spec.index_keys)
    dim = V4.all_layers[layer].window.dim

    def call(
        index, pools=world.pools, dtype=torch.bfloat16, shift=0, picks=4, heads=4, gaps=False, door=True, **options
    ):
        q = torch.zeros(TOKENS * heads * dim + shift, dtype=dtype)[shift:].view(TOKENS, heads, dim)
        if gaps:
            q = some(TOKENS, heads, 2 * dim, dtype=dtype)[:, :, :dim]
        selected = some(TOKENS, picks, dtype=torch.int32)
        at = pools, layer, index, q, selected
        own, _ = world.run(world.ops.ways["attend"][layer].way, world.ops, *at, **options)
        found, _ = world.run(world.ops.attend, *at, **options)
        if door and pools.__class__ is Pools:
            with torch.no_grad():
                assert world.run(world.door.attend, *at, **options)[0] == own
        return found, own

    return call


KINDS = {
    "other queries": {"dtype": torch.float32},
    "an address off 16 bytes": {"shift": 1},
    "gaps": {"gaps": True},
    "another number of picks": {"picks": 16},
    "one pick": {"picks": 1},
    "more heads": {"heads": 16},
    "a scale": {"scale": 0.5},
    "a sink": {"sink": some(4)},
    "a rotation": {"rope": Rope(dim=8, theta=1e5)},
    "a rotation's frequencies": {"rope": some(4)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_another_kind_is_another_program(monkeypatch, kind):
    world = World(V4, monkeypatch)
    call, index = attended(world), world.index()
    others = {"rope": Rope(dim=8, theta=1e4)}, {"scale": 0.25}, {"sink": some(4)}
    for options in ({}, KINDS[kind], {}, KINDS[kind], *others, KINDS[kind], *others):
        found, own = call(index, **options)
        assert found == own, options


def test_each_step_brings_an_index_of_its_own(monkeypatch):
    world = World(V4, monkeypatch)
    call = attended(world)
    wide = world.index((2, 1), (60, 2), columns=16)
    for index in (world.index(), world.index((2, 1)), wide, world.index(), wide, world.index((2, 1), columns=1)):
        found, own = call(index)
        assert found == own


def test_padding_makes_another_kind_of_an_index(monkeypatch):
    """Also where an index was made in one piece, and its arrays are not asked."""
    ops = World(CLASSIC, monkeypatch).ops
    host = build_index([StepRequest(slot=0, start=4, new=2, blocks=[0])], max_blocks=4)
    index = ops.index(host)
    ops.seen.expect(index, shape_of(host))
    plain, padded = ops.seen.look(index), index._replace(left_padding=torch.zeros(1, dtype=torch.int32))
    found = ops.seen.look(padded)
    assert (len(plain.places), len(found.places)) == (7, 8)
    assert found.kind != plain.kind
    assert ops.seen.look(index) == plain


def test_other_pools_are_looked_up_anew(monkeypatch):
    world = World(V4, monkeypatch)
    call, index, others = attended(world), world.index(), world.ops.allocate()
    changed = dict(world.pools.items())
    for pools in (world.pools, others, world.pools, others, changed, changed):
        found, own = call(index, pools)
        assert found == own
    changed.update(others.items())
    found, own = call(index, changed)
    assert found == own


def test_an_index_that_is_no_steps_is_not_replayed(monkeypatch):
    world = World(V4, monkeypatch)
    call, index = attended(world), world.index()
    call(index)
    wide = torch.zeros(TOKENS, 2, dtype=torch.int32)
    for odd in (index._replace(positions=index.positions.long()), index._replace(positions=wide[:, 0])):
        found, own = call(odd)
        assert found == own
        assert world.ops.seen.index.kind is None


def test_another_device_is_compiled_for_anew(monkeypatch):
    world = World(V4, monkeypatch)
    call, index = attended(world), world.index()
    for device in (0, 0, 1, 1, 0):
        world.device = device
        call(index)
        found, own = call(index)
        assert found == own


def test_a_profiler_is_told_of_every_launch(monkeypatch):
    world = World(V4, monkeypatch)
    call, index = attended(world), world.index()
    call(index)
    monkeypatch.setattr(run_triton, "watched", lambda: True)
    world.dispatched = 0
    found, _ = call(index)
    assert world.dispatched == 3 * len(found)


def test_a_kernels_own_hooks_are_run(monkeypatch):
    world = World(V4, monkeypatch)
    call, index = attended(world), world.index()
    call(index)
    hooks = attend_hopper.attend_hopper_kernel.pre_run_hooks
    hooks.append(print)
    try:
        world.dispatched = 0
        call(index)
        assert world.dispatched
    finally:
        hooks.remove(print)


def test_kinds_are_forgotten_in_time(monkeypatch):
    world = World(V4, monkeypatch)
    monkeypatch.setattr(replay, "MOST_KINDS", 4)
    call, index = attended(world), world.index()
    for picks in range(1, 12):
        call(index, picks=picks)
    assert len(world.ops.seen.programs) <= 4


def test_what_torch_does_on_the_way_is_done_every_time(monkeypatch):
    """A call that decodes entries once for all queries is not launches alone."""
    world = World(V4, monkeypatch)
    world.ops.fewest_visits = 0.0
    call, index = attended(world), world.index()
    for _ in range(3):
        found, own = call(index, door=False)
        assert [name for name, _, _ in found] == [name for name, _, _ in own]
    assert None in world.ops.seen.programs.values()
