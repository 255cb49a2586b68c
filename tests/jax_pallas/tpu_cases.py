"""What the TPU compiler is asked to compile: every kernel through its verb, formats, whole steps, and a control.

    python -m tests.jax_pallas.tpu_cases v6e [CASE ...]

compiles cases for a chip that is not here (libtpu must be installed) and prints what each program does to its pools,
one JSON object a line. A process of its own for each chip: libtpu may abort it on what it does not support.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvcore.backends.jax_pallas import JaxOps, choice, whole
from kvcore.backends.jax_pallas.rows import Held
from kvcore.interop.jax import inspect_in_place
from kvcore.interop.jax.views import init_views
from kvcore.kernels.pallas.write_rows import write_rows
from kvcore.ops import StepIndex
from kvcore.ops.records import Compression, Streams
from kvcore.plan import plan_cache
from kvcore.spec import FORMATS, KV, CacheSpec, Entries, IndexKeys, LayerSpec, State, Tail, Window
from kvcore.step import StepRequest, build_index

CHIPS = ("v4", "v5e", "v5p", "v6e", "v7x")
REQUESTS, BLOCKS = 8, 16
HEADS, INDEX_HEADS, TOPK = 64, 64, 512
LATENT_FORMATS = ("bf16", "v41_528", "v41_fp4_288", "v32_656", "row_580", "mxfp4_368")
CLASSIC_FORMATS = ("bf16", "fp32", "fp8_row", "int8_row", "mxfp4", "nf4_b64", "int4_g32", "int4_g64")
FOUR_BITS = ("mxfp4", "nf4_b64", "int4_g64")
VIEW_FORMATS = ("bf16", "fp8_row", "mxfp4")
INDEX_FORMATS = ("index_fp8_132", "index_fp8_132_fp32scale", "index_nvfp4")

Case = tuple[Any, ...]


def csa(latent: str = "v4_584", index: str = "index_fp4_68_h") -> LayerSpec:
    """Compressed sparse attention as in DeepSeek-V4: ratio 4, overlapping, with an indexer."""
    scale = 0.5 if "nvfp4" in index else 1.0
    dim = FORMATS[latent].dim or 512
    return LayerSpec(
        window=Window(dim=dim, window=128, format=latent),
        tail=Tail(dim=dim, ratio=4, overlap=True),
        entries=Entries(dim=dim, ratio=4, format=latent),
        index_tail=Tail(dim=128, ratio=4, overlap=True),
        index_keys=IndexKeys(dim=128, ratio=4, heads=INDEX_HEADS, topk=TOPK, format=index, global_scale=scale),
    )


def hca() -> LayerSpec:
    """Heavily compressed attention: ratio 128."""
    return LayerSpec(
        window=Window(dim=512, window=128, format="v4_584"),
        tail=Tail(dim=512, ratio=128, overlap=False),
        entries=Entries(dim=512, ratio=128, format="v4_584"),
    )


def mla() -> LayerSpec:
    """Rows of DeepSeek-V3 in four bits: one a token for all heads."""
    return LayerSpec(entries=Entries(dim=576, ratio=1, format="v32_nvfp4_432"))


def classic() -> LayerSpec:
    """Keys and values a row a head, moved by kernels that know no format: four rows to a tile, and two."""
    return LayerSpec(kv=KV(key_heads=2, key_dim=64, value_heads=2, value_dim=128, key_format="int8_row"))


def llama(format: str, values: str | None = None) -> LayerSpec:
    """Keys and values of Llama 3 8B."""
    return LayerSpec(kv=KV(key_heads=8, key_dim=128, key_format=format, value_format=values))


def delta_net(format: str) -> LayerSpec:
    """A gated delta net of Qwen3-Next's sizes: 2 MiB a state in fp32."""
    return LayerSpec(state=State(heads=32, key_dim=128, value_dim=128, format=format))


def verb(layers: tuple[LayerSpec, ...], fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
    """``fn(ops, pools, index, *inputs) -> pools``, or pools and results, of a decode step of 8 requests."""
    spec = CacheSpec(layers=layers, block_tokens=256)
    plan = plan_cache(spec, max_requests=32, max_tokens=64 * 1024, max_draft_tokens=1, layout="tpu_tile")
    ops = JaxOps(plan, "tpu", None, "tpu")
    pools = jax.eval_shape(JaxOps(plan, "cpu", None).allocate)
    index = build_index([StepRequest(i, 255 + i, 1, (i,)) for i in range(REQUESTS)], max_blocks=BLOCKS)
    inputs = [jax.ShapeDtypeStruct((REQUESTS, *shape), jnp.float32) for shape in shapes]
    return (lambda pools, index, *inputs: fn(ops, pools, index, *inputs)), pools, index, *inputs


def view(format: str) -> Case:
    """A layer view's decode step, append and attention: 8 requests of up to 4,096 tokens of Llama 3 8B."""
    choice.word = lambda _: "tpu"  # of this process, which has nothing else to ask
    views = jax.eval_shape(lambda: init_views(CacheSpec(layers=(llama(format),)), batch=REQUESTS, max_length=4096))
    q, rows = (jax.ShapeDtypeStruct((REQUESTS, 1, heads, 128), jnp.bfloat16) for heads in (32, 8))
    return (lambda view, q, k, v: view.attend(q, k, v)[::-1]), views[0], q, rows, rows


def picks(index: StepIndex) -> Any:
    """Entries that a step selects."""
    return jnp.broadcast_to(jnp.arange(TOPK, dtype=jnp.int32)[None], (len(index.positions), TOPK))


def append_window(o: JaxOps, p: Any, i: StepIndex, rows: Any) -> Any:
    return o.append_window(p, 0, i, rows)


def append_tail(o: JaxOps, p: Any, i: StepIndex, kv: Any, score: Any) -> Any:
    return o.append_tail(p, 0, i, kv, score)


def gather_tail(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.gather_rows(p, 0, "tail", i, columns=8)


def append_kv(o: JaxOps, p: Any, i: StepIndex, k: Any, v: Any) -> Any:
    return o.append_kv(p, 0, i, k, v)


def gather_kv(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.gather_kv(p, 0, i, columns=256)


def attend_kv(o: JaxOps, p: Any, i: StepIndex, q: Any, sink: Any) -> Any:
    return p, o.attend_kv(p, 0, i, q, columns=256 * BLOCKS, sink=sink[0])


def flush_hca(o: JaxOps, p: Any, i: StepIndex, kv: Any, score: Any, turn: Any) -> Any:
    return o.flush(p, 0, i, kv, score, closed=REQUESTS, norm_weight=turn[0, :512], rope=turn[0, 512:])


def flush_csa(o: JaxOps, p: Any, i: StepIndex, kv: Any, score: Any, ikv: Any, iscore: Any, turn: Any) -> Any:
    weights = {"norm_weight": turn[0, :512], "index_norm_weight": turn[0, :128], "rope": turn[0, 512:]}
    return o.flush(p, 0, i, kv, score, ikv, iscore, closed=REQUESTS, **weights)


def store_entries(o: JaxOps, p: Any, i: StepIndex, values: Any, keys: Any) -> Any:
    return o.store_entries(p, 0, i, values, keys)


def store_rows(o: JaxOps, p: Any, i: StepIndex, values: Any) -> Any:
    return o.store_entries(p, 0, i, values)


def gather_window(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.gather_window(p, 0, i)


def gather_entries(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.gather_entries(p, 0, i, picks(i))


def gather_few(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.gather_entries(p, 0, i, picks(i)[:, : TOPK // 2])


def gather_all(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.gather_all_entries(p, 0, i, columns=256)


def index_scores(o: JaxOps, p: Any, i: StepIndex, q: Any, weights: Any) -> Any:
    return p, o.index_scores(p, 0, i, q, weights, columns=64 * BLOCKS)


def select(o: JaxOps, p: Any, _: StepIndex, scores: Any) -> Any:
    return p, o.select(scores, TOPK)


def attend_selected(o: JaxOps, p: Any, i: StepIndex, q: Any, sink: Any) -> Any:
    return p, o.attend(p, 0, i, q, picks(i), sink=sink[0])


def attend_all(o: JaxOps, p: Any, i: StepIndex, q: Any, sink: Any) -> Any:
    return p, o.attend(p, 0, i, q, sink=sink[0])


def read_state(o: JaxOps, p: Any, i: StepIndex) -> Any:
    return p, o.read_state(p, 0, i)


def write_state(o: JaxOps, p: Any, i: StepIndex, states: Any) -> Any:
    return o.write_state(p, 0, i, states, newest=1)


def select_state(o: JaxOps, p: Any, i: StepIndex, states: Any, taken: Any) -> Any:
    return o.select_state(p, 0, i, states, taken)


def step(o: JaxOps, p: Any, i: StepIndex, rows: Any, kv: Any, score: Any, ikv: Any, iscore: Any, *more: Any) -> Any:
    """A CSA decode step, every verb in order."""
    keys_q, weights, q, sink, turn = more
    p = o.append_tail(o.append_window(p, 0, i, rows), 0, i, kv, score)
    p = o.append_index_tail(p, 0, i, ikv, iscore)
    p = flush_csa(o, p, i, kv, score, ikv, iscore, turn)
    selected = o.select(o.index_scores(p, 0, i, keys_q, weights, columns=64 * BLOCKS), TOPK)
    return p, o.attend(p, 0, i, q, selected, sink=sink[0])


def whole_layer(o: JaxOps, p: Any, i: StepIndex, rows: Any, kv: Any, score: Any, *more: Any) -> Any:
    """A layer's decode step as the one program that ``layer.decode`` is: the same verbs, and a CSA layer's indexer."""
    *index_rows, q, sink, turn = more
    index_q, index_weights, index_kv, index_score = index_rows or (None,) * 4
    layer = o.layers[0]
    turns = {"turning": turn[0, 512:], "rows_norm_weight": turn[0, :512], "eps": 1e-6, "rope": turn[0, 512:]}
    norms = {"norm_weight": turn[0, :512], "index_norm_weight": turn[0, :128]}
    pools, answer = whole.store_and_attend(
        layer,
        Held({name: p[theirs] for name, theirs in layer.names.items()}, layer.kernels),
        i,
        q,
        rows,
        {role: jnp.asarray(True) for role in ("window", "tail", "index_tail")},
        streams=Streams(kv, score, index_kv, index_score),
        compression=Compression(rope=turn[0, 512:], **norms),
        index_q=index_q,
        index_weights=index_weights,
        sink=sink[0],
        closed=REQUESTS,
        k=TOPK,
        columns=64 * BLOCKS,
        has_room=True,
        **turns,
    )
    return {theirs: pools[name] for name, theirs in layer.names.items()}, answer


def copies_its_pool() -> Case:
    """The negative control: the donated pool is kept alive by a second output that needs its old value."""
    rows = jax.ShapeDtypeStruct((100,), jnp.int32)
    pool, tiles = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((8, 1024, 4, 128), (100, 4, 128)))
    return (lambda pool, *new: (write_rows(pool, *new), pool)), pool, rows, rows, tiles


TAIL, INDEX_TAIL = ((1024,), (1024,)), ((256,), (256,))
SCORING, ATTENTION, TURN = ((INDEX_HEADS, 128), (INDEX_HEADS,)), ((HEADS, 512), (HEADS,)), (512 + 32,)

KERNELS: dict[str, Callable[[], Case]] = {
    "append_window/v4_584/tpu_tile/decode": lambda: verb((csa(),), append_window, (512,)),
    "append_tail/m4/tpu_tile/decode": lambda: verb((csa(),), append_tail, *TAIL),
    "gather_rows/m4/tpu_tile/decode": lambda: verb((csa(),), gather_tail),
    "append_kv/int8_row/tpu_tile/decode": lambda: verb((classic(),), append_kv, (2, 64), (2, 128)),
    "gather_kv/int8_row/tpu_tile/decode": lambda: verb((classic(),), gather_kv),
    "flush/v4_584.m4+index_fp4_68_h.m4/tpu_tile/decode": lambda: verb((csa(),), flush_csa, *TAIL, *INDEX_TAIL, TURN),
    "flush/v4_584.m128/tpu_tile/decode": lambda: verb((hca(),), flush_hca, (512,), (512,), TURN),
    "store_entries/v4_584.m4+index_fp4_68_h.m4/tpu_tile/decode": lambda: verb((csa(),), store_entries, (512,), (128,)),
    "gather_window/v4_584/tpu_tile/decode": lambda: verb((csa(),), gather_window),
    "gather_entries/v4_584.m4/tpu_tile/decode": lambda: verb((csa(),), gather_entries),
    "gather_all_entries/v4_584.m4/tpu_tile/decode": lambda: verb((csa(),), gather_all),
    "index_scores/index_fp4_68_h.m4/tpu_tile/decode": lambda: verb((csa(),), index_scores, *SCORING),
    "select/top512/tpu_tile/decode": lambda: verb((csa(),), select, (64 * BLOCKS,)),
    "attend/v4_584+v4_584.m4/tpu_tile/decode": lambda: verb((csa(),), attend_selected, *ATTENTION),
    "attend/v4_584+v4_584.m128/tpu_tile/decode": lambda: verb((hca(),), attend_all, *ATTENTION),
}
"""Check id -> the case: a kernel as its verb calls it, at DeepSeek-V4's sizes."""

for _name in ("fp32", "bf16", "int8_row", "fp8_row"):
    for _verb, _given in ((read_state, ()), (write_state, ((32, 128, 128),)), (select_state, ((32, 128, 128), ()))):
        KERNELS[f"{_verb.__name__}/state.{_name}.matrix/tpu_tile/decode"] = lambda n=_name, v=_verb, g=_given: verb(
            (delta_net(n),), v, *g
        )
for _name in LATENT_FORMATS:
    KERNELS[f"append_window/{_name}/tpu_tile/decode"] = lambda n=_name: verb(
        (csa(n),), append_window, (FORMATS[n].dim or 512,)
    )
    KERNELS[f"gather_window/{_name}/tpu_tile/decode"] = lambda n=_name: verb((csa(n),), gather_window)
for _name, _verb, _given in (
    ("store_entries", store_rows, ((576,),)),
    ("gather_entries", gather_few, ()),
    ("attend", attend_selected, ((HEADS, 576), (HEADS,))),
):
    KERNELS[f"{_name}/v32_nvfp4_432.m1/tpu_tile/decode"] = lambda v=_verb, g=_given: verb((mla(),), v, *g)
for _name in INDEX_FORMATS:
    KERNELS[f"index_scores/{_name}.m4/tpu_tile/decode"] = lambda n=_name: verb((csa(index=n),), index_scores, *SCORING)

for _name in CLASSIC_FORMATS:
    KERNELS[f"attend_kv/{_name}/tpu_tile/decode"] = lambda n=_name: verb((llama(n),), attend_kv, (32, 128), (32,))

for _tokens in (32, 64):
    KERNELS[f"attend_kv/int4_ch{_tokens}-int4_g{_tokens}/tpu_tile/decode"] = lambda n=_tokens: verb(
        (llama(f"int4_ch{n}", f"int4_g{n}"),), attend_kv, (32, 128), (32,)
    )
for _name in FOUR_BITS:
    KERNELS[f"append_kv/{_name}/tpu_tile/decode"] = lambda n=_name: verb((llama(n),), append_kv, (8, 128), (8, 128))
for _name in VIEW_FORMATS:
    KERNELS[f"view.attend/{_name}/tpu_tile/decode"] = lambda n=_name: view(n)

STEPS: dict[str, Callable[[], Case]] = {
    "step/v4_584.m4+index_fp4_68_h.m4/tpu_tile/decode": lambda: verb(
        (csa(),), step, (512,), *TAIL, *INDEX_TAIL, *SCORING, *ATTENTION, TURN
    ),
    "whole_layer/v4_584.m4+index_fp4_68_h.m4/tpu_tile/decode": lambda: verb(
        (csa(),), whole_layer, (512,), *TAIL, *SCORING, *INDEX_TAIL, *ATTENTION, TURN
    ),
    "whole_layer/v4_584.m128/tpu_tile/decode": lambda: verb(
        (hca(),), whole_layer, (512,), (512,), (512,), *ATTENTION, TURN
    ),
}
CONTROLS = {"copies its pool": copies_its_pool}
CASES = {**KERNELS, **STEPS, **CONTROLS}


def main(chip: str, names: list[str]) -> None:
    """Compile and print."""
    for name in names or [*KERNELS, *STEPS]:
        started = time.perf_counter()
        fn, *args = CASES[name]()
        args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(args))
        try:
            found = inspect_in_place(fn, *args, chip=chip)._asdict()
        except Exception as error:  # noqa: BLE001 - what the compiler refuses is the finding
            found = {"error": str(error).splitlines()[0]}
        print(json.dumps({"case": name, **found, "seconds": round(time.perf_counter() - started, 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
