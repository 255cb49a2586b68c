"""Which code runs a verb under JAX on CUDA, and why: launches of Triton kernels, whose tables need no GPU."""

import pytest

from kvcore.backends.jax_pallas import JaxOps
from kvcore.errors import BackendError
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec, presets

NO_KERNEL = ("jax.numpy", "this verb has no kernel under JAX")
NO_VIEWS = ("none", "arrays of JAX never change: there are no views of pools")
LONG = ", else jax.numpy: k > 4096"


def covered(formats: str, more: str = "") -> tuple[str, str]:
    return "triton", f"kernels cover {formats} in layout packed{more}"


FLUSH = covered("v4_584 and tail and index_fp4_68_h")
V4 = {
    **dict.fromkeys(("append_window", "append_rotated_window", "gather_window"), covered("v4_584")),
    **dict.fromkeys(("append_tail", "append_index_tail"), covered("tail")),
    **dict.fromkeys(("compress", "gather_rows", "store_rows", "read_ring", "restore_ring"), NO_KERNEL),
    **dict.fromkeys(("flush", "append_flush"), FLUSH),
    **dict.fromkeys(("store_entries", "gather_entries", "gather_all_entries"), covered("v4_584")),
    **dict.fromkeys(("store_entries(index_keys)", "gather_all_entries(index_keys)"), covered("index_fp4_68_h")),
    "index_scores": covered("index_fp4_68_h"),
    **dict.fromkeys(("select", "index_select"), covered("index_fp4_68_h", LONG)),
    "attend": covered("v4_584", ", else jax.numpy: scale is an array; rows are others than the step's"),
}
RING = {
    **dict.fromkeys(("attend_kv", "gather_rows", "store_rows", "read_ring", "restore_ring"), NO_KERNEL),
    **dict.fromkeys(("append_kv", "append_kv_view"), covered("bf16")),
    "gather_kv": covered("bf16", ", else jax.numpy: the step has left padding"),
    "kv_view": NO_VIEWS,
}
SLIDING = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=8, key_dim=64, window=128, storage="ring"))], block_tokens=16)


def made(spec: CacheSpec, layout: str) -> JaxOps:
    return JaxOps(plan_cache(spec, max_requests=1, max_tokens=1024, layout=layout), "cuda", None, "triton")


@pytest.mark.parametrize(
    ("spec", "layer", "wanted"), [(presets.deepseek_v4_flash(), 2, V4), (SLIDING, 0, RING)], ids=["V4-Flash", "sliding"]
)
def test_tables_of_a_gpu(spec: CacheSpec, layer: int, wanted: dict[str, tuple[str, str]]) -> None:
    ops = made(spec, "packed")
    assert {choice.verb: choice[2:] for choice in ops.explain() if choice.layer == layer} == wanted
    ops.check_strict()


def test_what_kernels_do_not_cover_is_refused() -> None:
    ops = made(SLIDING, "by_head")
    with pytest.raises(BackendError, match=r"append_kv: got jax\.numpy, because: kv: layout by_head stores the heads"):
        ops.check_strict()
