"""Views of layers that compress (DeepSeek-V4) and of recurrent ones: what the reference's handles give, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcore
from kvcore.errors import OutOfBlocks, RollbackError, ShapeError, SpecError, StepError
from kvcore.interop.jax.stack import init_stack
from kvcore.interop.jax.views import CacheViews, LayerView, init_views
from kvcore.spec import CacheSpec, Conv, Entries, IndexKeys, LayerSpec, Rope, State, Tail, Window, presets
from tests.jax_pallas.view_kinds import copied

BATCH, LENGTH, HEADS, DIM, ROPE = 2, 90, 2, 32, Rope(dim=8, theta=10000.0)
RING = Window(dim=DIM, window=8, format="bf16")
HCA = LayerSpec(
    window=RING, tail=Tail(dim=DIM, ratio=8, overlap=False), entries=Entries(dim=DIM, ratio=8, format="bf16")
)
CSA = LayerSpec(
    window=RING,
    tail=Tail(dim=DIM, ratio=4, overlap=True),
    entries=Entries(dim=DIM, ratio=4, format="bf16"),
    index_tail=Tail(dim=128, ratio=4, overlap=True),
    index_keys=IndexKeys(dim=128, ratio=4, heads=2, topk=3, format="index_fp4_68_h"),
)
LAYERS = {"window": LayerSpec(window=RING), "csa": CSA, "hca": HCA}
STATE, CONV = State(heads=2, key_dim=4, value_dim=8), Conv(dim=6, width=4, format="fp32")
RECURRENT = {
    "state and conv": LayerSpec(state=STATE, conv=CONV),
    "state": LayerSpec(state=STATE),
    "conv": LayerSpec(conv=CONV),
}


def made(layer: LayerSpec, layers: int = 1, batch: int = BATCH, **options: Any) -> CacheViews:
    return init_views(CacheSpec(layers=(layer,) * layers, block_tokens=16), batch=batch, max_length=LENGTH, **options)


def given(layer: LayerSpec, new: int, seed: int = 0) -> dict[str, Any]:
    """What a step of a layer that compresses takes, by the names of ``attend_compressed``."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal((BATCH, new, *shape)).astype(np.float32)

    dim, keys = layer.window.dim, layer.index_keys
    found: dict[str, Any] = {"query": floats(HEADS, dim), "rows": floats(dim)}
    for name in ("tail", "index_tail"):
        if (tail := getattr(layer, name)) is not None:
            found[name] = floats(tail.width), floats(tail.width)
    if keys is not None:
        found["index"] = floats(keys.heads, keys.dim), floats(keys.heads)
    return found


def weights_of(layer: LayerSpec) -> dict[str, Any]:
    found = {"rope": ROPE, "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)}
    for name, role in (("norm_weight", "entries"), ("index_norm_weight", "index_keys")):
        if (component := getattr(layer, role)) is not None:
            found[name] = np.linspace(0.5, 1.5, component.dim, dtype=np.float32)
    return found


def of_handles(cache: Any, requests: list[Any], x: dict[str, Any], counts: list[int], layer: LayerSpec) -> list[Any]:
    """The same step by the verbs of a handle: outs and log-sum-exps of every sequence's own tokens."""
    weights = weights_of(layer)

    def flat(array: np.ndarray) -> np.ndarray:
        return np.concatenate([part[:count] for part, count in zip(array, counts, strict=True)])

    with cache.step(dict(zip(requests, counts, strict=True))) as step:
        handle = step.layer(0)
        tails = {name: tuple(map(flat, x[name])) for name in ("tail", "index_tail") if name in x}
        handle.append(window=flat(x["rows"]), **tails)
        if tails:
            handle.flush(**{name: one for name, one in weights.items() if name != "sink"})
        selected = handle.index_select(*map(flat, x["index"])) if "index" in x else None
        found = handle.attend(flat(x["query"]), selected, sink=weights["sink"], rope=ROPE)
    cuts = np.cumsum(counts)[:-1]
    return [np.split(np.asarray(array, np.float32), cuts) for array in (found.out, found.lse)]


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        (LAYERS["window"], [(20, [20, 13]), (1, [1, 1])]),
        (CSA, [(22, [22, 7]), (1, [1, 1]), (1, [0, 1]), (1, [1, 1])]),
        (HCA, [(20, [20, 17]), (1, [1, 1])]),
        (presets.deepseek_v4_flash_tiny().layers[1], [(14, [14, 14]), (1, [1, 1])]),
    ],
    ids=["window", "csa", "hca", "v4 csa"],
)
def test_a_step_is_that_of_the_references_handles(layer: LayerSpec, steps: list[tuple[int, list[int]]]) -> None:
    """Prompts that outgrow rings, right padding, sequences that stand still, single tokens."""
    view = made(layer)[0]
    spec = CacheSpec(layers=(layer,), block_tokens=16)
    cache = kvcore.create_cache(spec, backend="reference", max_requests=BATCH, max_tokens=2 * 96)
    requests = [cache.admit() for _ in range(BATCH)]
    weights = weights_of(layer)
    run = jax.jit(lambda view, x, new: view.attend_compressed(**x, new=new, **weights))
    for number, (columns, counts) in enumerate(steps):
        x = given(layer, columns, number)
        out, lse, view = run(view, jax.tree.map(jnp.asarray, x), jnp.asarray(counts))
        wanted = of_handles(cache, requests, x, counts, layer)
        for got, theirs in zip((out, lse), wanted, strict=True):
            for one, other, count in zip(np.asarray(got), theirs, counts, strict=True):
                np.testing.assert_allclose(one[:count], other, rtol=2e-5, atol=2e-5)
        for one, count in zip(np.asarray(out), counts, strict=True):
            assert not one[count:].any()
    assert view.lengths.tolist() == [request.length for request in requests]


def moved(compiled: Any, pools: Any) -> list[str]:
    """Copies of a pool, as it lies or row by row; what a step reads of rings has as many bytes, and further axes."""
    return [line for line in copied(compiled, pools) if line.partition(" = ")[2].partition("]")[0].count(",") < 2]


def compressed_step(view: LayerView, x: Any) -> tuple[LayerView, jax.Array]:
    found = view.attend_compressed(**x, rope=ROPE)
    return found.view, found.out


def recurrent_step(view: LayerView, inputs: jax.Array) -> tuple[LayerView, jax.Array]:
    """A state that remembers sums of inputs."""
    layer = view.kind.layer
    found = view.recall(inputs if layer.conv else None, None if layer.conv else jnp.full(BATCH, inputs.shape[1]))
    total = jnp.sum(inputs if found.inputs is None else found.inputs, axis=(1, 2))
    if found.states is None:
        return found.store(), total
    states = found.states * 0.5 + total[:, None, None, None]
    return found.store(states), states


@pytest.mark.sampled
@pytest.mark.parametrize("new", [1, 20])
@pytest.mark.parametrize("kind", [*LAYERS, *RECURRENT])
def test_a_compiled_loop_of_steps_copies_no_pool(kind: str, new: int) -> None:
    layer = {**LAYERS, **RECURRENT}[kind]
    views = made(layer, layers=2)
    step = compressed_step if kind in LAYERS else recurrent_step
    x: Any = jax.tree.map(jnp.asarray, given(layer, new)) if kind in LAYERS else jnp.ones((BATCH, new, CONV.channels))

    def all_layers(views: CacheViews, x: Any) -> Any:
        outs = []
        for number, view in enumerate(views):
            view, out = step(view, x)
            views, outs = views.with_layer(number, view), [*outs, out]
        return views, outs

    def run(views: CacheViews, x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: all_layers(carry, x), views, None, length=3)

    compiled = jax.jit(run, donate_argnums=0).lower(views, x).compile()
    pools = [pool for view in views for pool in view.pools.values()]
    assert not moved(compiled, pools)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools)


def test_a_stack_gives_what_views_give_and_copies_no_pool() -> None:
    spec = CacheSpec(layers=(CSA,) * 3, block_tokens=16)
    stack, views = (make(spec, batch=BATCH, max_length=LENGTH) for make in (init_stack, init_views))

    def scanned(stack: Any, x: Any) -> Any:
        def body(stack: Any, number: jax.Array) -> Any:
            view, out = compressed_step(stack.layer(number), x)
            return stack.with_layer(number, view), out

        return jax.lax.scan(body, stack, jnp.arange(len(stack)))

    run = jax.jit(scanned, donate_argnums=0)
    for new in (11, 1):
        x = jax.tree.map(jnp.asarray, given(CSA, new, seed=new))
        if new == 1:
            assert not moved(run.lower(stack, x).compile(), stack.pools)
        stack, outs = run(stack, x)
        for number, view in enumerate(views):
            view, out = jax.jit(compressed_step)(view, x)
            views = views.with_layer(number, view)
            np.testing.assert_allclose(np.asarray(outs[number]), np.asarray(out), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", RECURRENT)
def test_states_and_inputs_go_on_where_they_were(kind: str) -> None:
    """Pieces of every size, right padding and a sequence that stands still, against all columns at once."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 14, CONV.channels)).astype(np.float32)
    layer = RECURRENT[kind]
    view = made(layer)[0]
    first, states = [0, 0], np.zeros((BATCH, *STATE.shape), np.float32)
    for columns, counts in ((3, [3, 1]), (1, [1, 1]), (1, [0, 1]), (9, [9, 4])):
        padded = np.full((BATCH, columns, CONV.channels), 7, np.float32)
        for number, count in enumerate(counts):
            padded[number, :count] = x[number, first[number] : first[number] + count]
        found = jax.jit(lambda view, x, new: view.recall(x, new))(
            view, jnp.asarray(padded) if layer.conv else None, jnp.asarray(counts)
        )
        for number, count in enumerate(counts):
            if layer.conv:
                before = np.concatenate([np.zeros((3, CONV.channels), np.float32), x[number]])
                wanted = before[first[number] : first[number] + 3 + count]
                assert np.array_equal(np.asarray(found.inputs[number, : 3 + count]), wanted)
            if layer.state:
                assert np.array_equal(np.asarray(found.states[number]), states[number])
        new = np.asarray(counts)[:, None, None, None] + states
        view = found.store(jnp.asarray(new) if layer.state else None)
        states, first = new, [start + count for start, count in zip(first, counts, strict=True)]
    assert view.lengths.tolist() == first == [13, 7]


def test_views_are_inserted_started_anew_and_taken_apart_but_do_not_go_back() -> None:
    for layer, step in ((CSA, compressed_step), (RECURRENT["state and conv"], recurrent_step)):
        x: Any = given(CSA, 9) if layer is CSA else jnp.ones((BATCH, 9, CONV.channels))
        one = jax.tree.map(lambda array: array[:1], jax.tree.map(jnp.asarray, x))
        many, single = made(layer), made(layer, batch=1)
        if layer is CSA:
            single = single.with_layer(0, step(single[0], one)[0])
        else:
            found = single[0].recall(one)
            single = single.with_layer(0, found.store(jnp.ones((1, *STATE.shape))))
        placed = many.insert(single, 1)
        arrays, metadata = placed.to_pure()
        again = CacheViews.from_pure(jax.tree.map(np.asarray, arrays), metadata)
        for left, right in zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True):
            assert np.array_equal(np.asarray(left), np.asarray(right))
        with pytest.raises(RollbackError, match=r"insert_index: layer 0: got a shorter length.*present length, or 0"):
            placed.insert_index([5], 1)
        with pytest.raises(RollbackError, match="lengths inside jit"):
            jax.jit(lambda views: views.insert_index([5], 1))(placed)
        assert placed.insert_index([9], 1)[0].lengths.tolist() == [0, 9]
        anew = placed.insert_index([0], 1)
        y: Any = jax.tree.map(jnp.asarray, x)
        for left, right in zip(step(anew[0], y)[1], step(made(layer)[0], y)[1], strict=True):
            assert np.array_equal(np.asarray(left), np.asarray(right))


def test_what_a_layer_cannot_take_is_refused_by_name() -> None:
    view, state = made(CSA)[0], made(RECURRENT["state and conv"])[0]
    x = given(CSA, 2)
    for left in ("tail", "index_tail", "index"):
        with pytest.raises(ShapeError, match=f"attend_compressed: {left}: got NoneType"):
            view.attend_compressed(**{name: one for name, one in x.items() if name != left})
    with pytest.raises(ShapeError, match="None: the layer has no index_tail"):
        made(HCA)[0].attend_compressed(**x)
    with pytest.raises(ShapeError, match="attend_compressed: score: got shape"):
        view.attend_compressed(**{**x, "tail": (x["tail"][0], x["tail"][1][..., :5])})
    with pytest.raises(ShapeError, match="attend_compressed: norm_weight"):
        view.attend_compressed(**x, norm_weight=np.ones(5, np.float32))
    with pytest.raises(OutOfBlocks, match="attend_compressed: got 91 columns"):
        view.replace(lengths=jnp.full(BATCH, 89)).attend_compressed(**x)
    for verb, held in (("append", view), ("attend_latents", view), ("attend", state)):
        arrays = [jnp.ones((BATCH, 1, DIM))] * 3
        with pytest.raises(StepError, match="allowed: attend_compressed" if held is view else "allowed: recall"):
            getattr(held, verb)(*arrays[: 2 if verb == "append" else 3])
    with pytest.raises(StepError, match=r"compressed, window.*got recall; allowed: attend_compressed"):
        view.recall()
    with pytest.raises(ShapeError, match="recall: inputs: got NoneType"):
        state.recall()
    with pytest.raises(ShapeError, match="recall: new: got no new"):
        made(RECURRENT["state"])[0].recall()
    found = state.recall(jnp.ones((BATCH, 1, CONV.channels)))
    for wrong in (None, jnp.ones((BATCH, 2))):
        with pytest.raises(ShapeError, match="store: states"):
            found.store(wrong)
    with pytest.raises(ShapeError, match=r"left padding.*new=\[B\]"):
        made(CSA, starts=[0, 1])
    with pytest.raises(ShapeError, match="insert_starts: got left padding"):
        made(CSA).insert_starts([0], 0)
    shared = presets.deepseek_v4_1_flash_tiny(draft=False)
    with pytest.raises(SpecError, match=r"layers\[1\].*create_cache"):
        init_views(shared, batch=1, max_length=LENGTH)


def test_gradients_are_refused() -> None:
    view, state = made(CSA)[0], made(RECURRENT["state and conv"])[0]
    x = jax.tree.map(jnp.asarray, given(CSA, 1))
    for name in x:
        with pytest.raises(ShapeError, match="a differentiated array"):
            jax.grad(lambda one, name=name: jnp.sum(view.attend_compressed(**{**x, name: one}).out))(x[name])
    with pytest.raises(ShapeError, match="recall: inputs: got a differentiated array"):
        jax.grad(lambda inputs: jnp.sum(state.recall(inputs).inputs))(jnp.ones((BATCH, 1, CONV.channels)))
    found = state.recall(jnp.ones((BATCH, 1, CONV.channels)))
    with pytest.raises(ShapeError, match="store: states: got a differentiated array"):
        jax.grad(lambda states: jnp.sum(found.store(states).pools["0.state"].astype(jnp.float32)))(found.states)
