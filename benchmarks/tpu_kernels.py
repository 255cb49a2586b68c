"""Which TPU kernels are weighed by their bundles, and beside whose: one table; see ``benchmarks.compile_tpu``."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as public

from kvcore.backends.jax_pallas import JaxOps
from kvcore.kernels.pallas import attend_rows, gather_blocks, gather_rows, index_scores
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.plan import Region, plan_cache
from kvcore.spec import FORMATS, CacheSpec, LayerSpec
from kvcore.spec.layout import LANES, TILE_BYTES
from tests.jax_pallas import tpu_cases as verbs

HEADS, TOKENS, TOPK, WINDOW, BLOCKS = 64, 8, 512, 128, 64
Case = tuple[Any, ...]


class Kernel(NamedTuple):
    """A kernel to weigh.

    Attributes:
        build: ``(function, pools, *arguments)``, pools donated; arrays may be shapes.
        call: part of the name under which the kernel lies in libtpu's dump, the largest of them.
        unit: what one turn of its hot loop does.
        needed: bytes of HBM that the unit must move, pads of the layout included; None: all that it does move.
        inner: the hot loop is one whose turns the data decides, not that of the grid.
        quick: compiled by the test too, which holds it against the record.
        whose: the package that it comes from.
    """

    build: Callable[[], Case]
    call: str
    unit: str
    needed: Callable[[], int] | None = None
    inner: bool = False
    quick: bool = False
    whose: str = "kvcore"


def of_rows(layer: LayerSpec, role: str, fn: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> Case:
    """``fn(region, pools, *arrays)`` over the pools of a role's rows."""
    spec = CacheSpec(layers=(layer,), block_tokens=256)
    plan = plan_cache(spec, max_requests=32, max_tokens=64 * 1024, max_draft_tokens=1, layout="tpu_tile")
    pools = jax.eval_shape(JaxOps(plan, "cpu", None).allocate)
    (region,) = plan.layers[0].regions[role]
    mine = [pools[name] for name, _ in region.buffers.values()]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]

    def run(pools: Any, *arrays: Any) -> Any:
        with jax.named_scope(fn.__name__):
            return pools, fn(region, pools, *arrays)

    return run, mine, *arrays


def tile_bytes(layer: LayerSpec, role: str) -> int:
    """Bytes of one row of a role in ``tpu_tile``."""
    (region,) = (
        plan_cache(CacheSpec(layers=(layer,), block_tokens=256), max_requests=1, max_tokens=256, layout="tpu_tile")
        .layers[0]
        .regions[role]
    )
    return sum(buffer.lines * LANES for buffer in buffers_of(region))


def attended(role: str, rows: int, dtype: Any = jnp.float32) -> Callable[[], Case]:
    """Attention over rows of one role."""

    def attend(region: Region, pools: Any, q: Any, unit: Any, row: Any) -> Any:
        source = attend_rows.Source(region, pools, unit, row)
        return attend_rows.attend_rows(q, [source], interpret=False)

    places = ((TOKENS, rows), jnp.int32)
    return lambda: of_rows(verbs.csa(), role, attend, ((TOKENS, HEADS, 512), dtype), places, places)


def gathered() -> Case:
    """Selected entries, decoded."""

    def gather(region: Region, pools: Any, unit: Any, row: Any) -> Any:
        return gather_rows.gather_rows(region, pools, unit, row, dtype=jnp.bfloat16, interpret=False)

    places = ((TOKENS * TOPK,), jnp.int32)
    return of_rows(verbs.csa(), "entries", gather, places, places)


def gathered_blocks(layer: LayerSpec) -> Callable[[], Case]:
    """All entries of a layer, decoded."""

    def gather_all(region: Region, pools: Any, blocks: Any) -> Any:
        return gather_blocks.gather_blocks(region, pools[0], blocks, dtype=jnp.bfloat16, interpret=False)

    return lambda: of_rows(layer, "entries", gather_all, ((TOKENS * BLOCKS,), jnp.int32))


def scored(format: str) -> Callable[[], Case]:
    """Index scores over blocks of keys."""

    def score(region: Region, pools: Any, blocks: Any, q: Any, weights: Any) -> Any:
        return index_scores.index_scores(region, pools[0], blocks, q, weights, interpret=False)

    # Where a format rotates, queries are rounded to bf16.
    queries = jnp.bfloat16 if FORMATS[format].hadamard else jnp.float32
    inputs = ((TOKENS, BLOCKS), jnp.int32), ((TOKENS, 64, 128), queries), ((TOKENS, 64), jnp.float32)
    return lambda: of_rows(verbs.csa(index=format), "index_keys", score, *inputs)


def row_bytes(role: str, rows: Callable[[], int]) -> Callable[[], int]:
    """Bytes of a unit of so many rows."""
    return lambda: rows() * tile_bytes(verbs.csa(), role)


def attended_kv(format: str, dtype: Any = jnp.float32) -> Callable[[], Case]:
    """Attention of Llama 3 8B's heads over keys and values."""

    def build() -> Case:
        fn, pools, index, q, sink = verbs.verb((verbs.llama(format),), verbs.attend_kv, (32, 128), (32,))
        return fn, pools, index, jax.ShapeDtypeStruct(q.shape, dtype), sink

    return build


def attended_groups(tokens: int, dtype: Any = jnp.float32) -> Callable[[], Case]:
    """The same over keys coded over tokens, beside values in as many channels a group."""

    def build() -> Case:
        layer = verbs.llama(f"int4_ch{tokens}", f"int4_g{tokens}")
        fn, pools, index, q, sink = verbs.verb((layer,), verbs.attend_kv, (32, 128), (32,))
        return fn, pools, index, jax.ShapeDtypeStruct(q.shape, dtype), sink

    return build


def jax_paged(dtype: Any) -> Callable[[], Case]:
    """JAX's ragged paged attention v2, a decode step of Llama 3 8B: blocks of 256 tokens in pages of 64."""

    def over(pages: Any, q: Any, lengths: Any, tables: Any, starts: Any, count: Any) -> Any:
        sizes = {"num_kv_pages_per_block": 4, "num_queries_per_block": 8, "vmem_limit_bytes": 64 << 20}
        scales = {} if dtype == jnp.bfloat16 else {"k_scale": 1.0, "v_scale": 1.0}
        return pages, public.ragged_paged_attention(q, pages, lengths, tables, starts, count, **sizes, **scales)

    pages = jax.ShapeDtypeStruct((256, 64, 16, 128), dtype)
    q = jax.ShapeDtypeStruct((TOKENS, 32, 128), jnp.bfloat16)
    whole = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TOKENS,), (TOKENS, 64), (TOKENS + 1,), (1,))]
    return lambda: (over, pages, q, *whole)


def inference_paged(dtype: Any) -> Callable[[], Case]:
    """tpu-inference's ragged paged attention v3, which also appends: the same step.

    Raises:
        ModuleNotFoundError: its wheel is not here.
    """

    def over(pages: Any, q: Any, k: Any, v: Any, lengths: Any, tables: Any, starts: Any, counts: Any) -> Any:
        kernel: Any = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
        # It asks the device that it runs on; here it is that which is compiled for.
        kernel.get_tpu_version = lambda: pltpu.get_tpu_info().generation
        sizes = (1, V3_TOKENS, 1, V3_TOKENS)
        out, pages = kernel.ragged_paged_attention(
            q, k, v, pages, lengths, tables, starts, counts, d_block_sizes=sizes, vmem_limit_bytes=64 << 20
        )
        return pages, out

    def build() -> Case:
        _kernels_alone("tpu_inference")
        packed = 4 // jnp.dtype(dtype).itemsize
        pages = jax.ShapeDtypeStruct((256, 64, 16 // packed, packed, 128), dtype)
        q = jax.ShapeDtypeStruct((TOKENS, 32, 128), jnp.bfloat16)
        new = jax.ShapeDtypeStruct((TOKENS, 8, 128), dtype)
        whole = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TOKENS,), (TOKENS * 64,), (TOKENS + 1,), (3,))]
        return over, pages, q, new, new, *whole

    return build


def _kernels_alone(package: str) -> None:
    """Let a package's kernels be imported without the package itself, which brings a serving engine and its devices."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed")
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = module


def _scored_bytes() -> int:
    return index_scores.TILES_A_STEP * TILE_BYTES


V3_TOKENS = 512
QUERIES = (("", jnp.float32), (", queries in bf16", jnp.bfloat16))
LOOKED_AT = ("nf4_b64", "int4_g32", "int4_g64")
"""Formats with several scales apart, of whose time products with queries are much."""
PAGED = "ragged_paged_attention"
KERNELS: dict[str, Kernel] = {
    **{
        f"attend_kv {format}": Kernel(
            attended_kv(format),
            "attend_heads" if format.startswith("int4") else "attend_kv",
            "a chunk of keys and values",
            inner=True,
            quick=format in ("bf16", "mxfp4", "int4_g64"),
        )
        for format in ("bf16", "fp8_row", "int8_row", "mxfp4", *LOOKED_AT)
    },
    **{
        f"attend_kv {format}, queries in bf16": Kernel(
            attended_kv(format, jnp.bfloat16),
            "attend_heads" if format.startswith("int4") else "attend_kv",
            "a chunk of keys and values",
            inner=True,
        )
        for format in LOOKED_AT
    },
    **{
        f"attend_kv int4_ch{tokens} and int4_g{tokens}{word}": Kernel(
            attended_groups(tokens, dtype),
            "attend_groups",
            "a chunk of keys and values",
            inner=True,
            quick=tokens == 64 and not word,
        )
        for tokens in (32, 64)
        for word, dtype in QUERIES
    },
    **{
        f"attend_rows v4_584 selected{word}": Kernel(
            attended("entries", TOPK, dtype),
            "attend.",
            "512 rows",
            row_bytes("entries", lambda: attend_rows.TOKENS_A_STEP * attend_rows.NARROW_ROWS_A_STEP),
        )
        for word, dtype in QUERIES
    },
    **{
        f"attend_rows v4_584 window{word}": Kernel(
            attended("window", WINDOW, dtype),
            "attend.",
            "512 rows",
            row_bytes("window", lambda: attend_rows.RINGS_A_STEP * WINDOW),
            quick=True,
        )
        for word, dtype in QUERIES
    },
    "gather_rows v4_584 selected": Kernel(
        gathered, "gather.", "256 rows", row_bytes("entries", lambda: gather_rows.ROWS_A_STEP), quick=True
    ),
    **{
        f"gather_blocks v4_584, {rows} rows each": Kernel(
            gathered_blocks(layer),
            "gather_all.",
            "256 rows",
            row_bytes("entries", lambda: gather_blocks.ROWS_A_STEP),
        )
        for rows, layer in ((64, verbs.csa()), (2, verbs.hca()))
    },
    "index_scores index_fp8_132": Kernel(scored("index_fp8_132"), "score.", "2,048 keys", _scored_bytes, quick=True),
    "index_scores index_fp4_68_h": Kernel(scored("index_fp4_68_h"), "score.", "4,096 keys", _scored_bytes),
    "flush v4_584.m128": Kernel(
        lambda: verbs.verb((verbs.hca(),), verbs.flush_hca, (512,), (512,), verbs.TURN), "kvcore.flush", "an entry"
    ),
    "append_window v4_584": Kernel(
        lambda: verbs.verb((verbs.csa(),), verbs.append_window, (512,)), "kvcore.append_window", "8 rows"
    ),
    "append_kv int4_g64": Kernel(
        lambda: verbs.verb((verbs.llama("int4_g64"),), verbs.append_kv, (8, 128), (8, 128)),
        "kvcore.append_kv",
        "scales of 8 positions",
    ),
    "gather_kv int4_g64": Kernel(
        lambda: verbs.verb((verbs.llama("int4_g64"),), verbs.gather_kv), "kvcore.gather_kv", "64 neighbours"
    ),
    "select top 512 of 1024": Kernel(
        lambda: verbs.verb((verbs.csa(),), verbs.select, (64 * verbs.BLOCKS,)), "", "a token"
    ),
    "ragged_paged_attention v2 bf16": Kernel(jax_paged(jnp.bfloat16), PAGED, "256 tokens", inner=True, whose="jax"),
    "ragged_paged_attention v2 float8_e4m3fn": Kernel(
        jax_paged(jnp.float8_e4m3fn), PAGED, "256 tokens", inner=True, whose="jax"
    ),
    "ragged_paged_attention v3 bf16": Kernel(
        inference_paged(jnp.bfloat16),
        "RPAd",
        "512 tokens",
        lambda: V3_TOKENS * 2 * 8 * 128 * 2,
        inner=True,
        whose="tpu-inference",
    ),
    "ragged_paged_attention v3 float8_e4m3fn": Kernel(
        inference_paged(jnp.float8_e4m3fn),
        "RPAd",
        "512 tokens",
        lambda: V3_TOKENS * 2 * 8 * 128,
        inner=True,
        whose="tpu-inference",
    ),
}
"""What it is called in the record -> the kernel. A row more is all that another kernel takes."""
