"""What runs a verb and why, written out for four specs: as on CUDA, of which no more than its capability is known; CPU.

No kernel runs here: the tables are bound from a plan and what is known of the device.
"""

import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from kvcore.backends.torch_triton import cuda, flash, flash_infer
from kvcore.backends.torch_triton.backend import TorchOps
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.errors import BackendError
from kvcore.kernels.triton import device
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches.attention import hopper_splits
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, LayerSpec, presets
from tests.support import fake_flashinfer

H200 = DeviceProps(capability=90, multiprocessors=132, shared=227 << 10)
INT8 = {"key_format": "int8_row", "value_format": "int8_row"}
SLIDING = KV(key_heads=8, key_dim=64, window=128, storage="ring")
SPECS = {
    "V4-Flash": (presets.deepseek_v4_flash(), 2),
    "V3 latent": (presets.deepseek_v3_2(), 0),
    "classic int8": (CacheSpec(layers=[LayerSpec(kv=KV(key_heads=8, key_dim=128, **INT8))], block_tokens=16), 0),
    "sliding with sinks": (CacheSpec(layers=[LayerSpec(kv=SLIDING)], block_tokens=16), 0),
}
"""Name -> (spec, layer). A sink is an argument of the attention, which the kernels take."""

NO_KERNEL = ("torch", "this verb has no kernel")
RINGS = ("triton", "one launch moves a part's rows, bytes as they are")
LONG = ", else torch: k > 4096"
NO_VIEWS = ("none", "there are views on a CPU only")
UNITS = {
    **dict.fromkeys(
        ("reset_slots", "poison", "copy_slots", "copy_blocks", "digest_rows"),
        ("triton", "whole units are bytes, whatever their format"),
    ),
    "move_strips": ("triton", "one launch moves all rows of a request"),
    "digest_strips": ("triton", "one launch digests pages of whole 4-byte words, else digest_rows role by role"),
}


def covered(formats: str, more: str = "") -> tuple[str, str]:
    return "triton", f"kernels cover {formats} in layout packed{more}"


HOPPER = "; a pipelined one for Hopper takes bf16 q where the ring holds the step's rows"
BEST = ("triton", f"kernels find the best k{LONG}")
FLUSH = covered("v4_584 and tail and index_fp4_68_h", ", else torch: kv and index_kv are of two dtypes")
V4 = {
    **dict.fromkeys(("append_window", "append_rotated_window", "gather_window"), covered("v4_584")),
    **dict.fromkeys(("append_tail", "append_index_tail"), covered("tail")),
    **dict.fromkeys(("compress", "gather_rows", "store_rows"), NO_KERNEL),
    **dict.fromkeys(("flush", "append_flush"), FLUSH),
    **dict.fromkeys(("store_entries", "gather_entries", "gather_all_entries"), covered("v4_584")),
    "attend": covered("v4_584", HOPPER),
    **dict.fromkeys(("store_entries(index_keys)", "gather_all_entries(index_keys)"), covered("index_fp4_68_h")),
    "index_scores": covered("index_fp4_68_h"),
    "select": BEST,
    "index_select": covered("index_fp4_68_h", LONG),
    **dict.fromkeys(("read_ring", "restore_ring"), RINGS),
}
KEYS = "index_fp8_132_fp32scale"
V3 = {
    **dict.fromkeys(("gather_rows", "store_rows"), NO_KERNEL),
    **dict.fromkeys(("store_entries", "gather_entries", "gather_all_entries"), covered("v32_656")),
    **dict.fromkeys(("store_entries(index_keys)", "gather_all_entries(index_keys)", "index_scores"), covered(KEYS)),
    "select": BEST,
    "index_select": covered(KEYS, LONG),
    "attend": covered("v32_656"),
}
ONE = "else torch: k or v is given without the other"
CLASSIC = {
    **dict.fromkeys(("gather_rows", "store_rows"), NO_KERNEL),
    **dict.fromkeys(("append_kv", "gather_kv", "append_kv_view"), covered("int8_row")),
    "kv_view": NO_VIEWS,
    "attend_kv": covered("int8_row", f", {ONE}"),
}
RING = {
    **dict.fromkeys(("gather_rows", "store_rows"), NO_KERNEL),
    **dict.fromkeys(("append_kv", "append_kv_view"), covered("bf16")),
    "gather_kv": covered("bf16", ", else torch: the step has left padding"),
    "kv_view": NO_VIEWS,
    "attend_kv": covered("bf16", f", {ONE}"),
    **dict.fromkeys(("read_ring", "restore_ring"), RINGS),
}
ON_CUDA = {"V4-Flash": V4, "V3 latent": V3, "classic int8": CLASSIC, "sliding with sinks": RING}

PLAIN = ("torch", "on the CPU the verbs are torch operations")
PIECES = (
    "torch",
    "torch's fused attention over pieces of the rows; all rows are gathered first where k and v are given, in a padded "
    "step, and where a number is not finite",
)
IN_C = "one new token of each request attends in C where that is worth it and there is a compiler"
BY_ROW = ("torch", "rows are moved one by one: int8_row in layout packed")
BY_RUN = ("torch", "runs of rows are copied as they lie; one by one in a padded step or one of many requests")
VIEWS = ("views", "rows are read where they lie; none where requests see unevenly many, or not in one run")
ON_CPU = {
    "classic int8": {
        **dict.fromkeys(("append_kv", "gather_kv"), BY_ROW),
        "kv_view": ("none", "no views of int8_row in layout packed"),
        "append_kv_view": ("torch", "no views of int8_row in layout packed"),
        "attend_kv": ("torch", f"{PIECES[1]}; {IN_C}"),
    },
    "sliding with sinks": {
        **dict.fromkeys(("append_kv", "gather_kv"), BY_RUN),
        **dict.fromkeys(("kv_view", "append_kv_view"), VIEWS),
        "attend_kv": PIECES,
    },
}
"""What is not said of every verb."""


def table(ops, layer: int | None) -> dict[str, tuple[str, str]]:
    return {choice.verb: choice[2:] for choice in ops.explain() if choice.layer == layer}


def made(spec: CacheSpec, layout: str = "packed", attention: str | None = None, capability: int = 90) -> TritonOps:
    props = H200._replace(capability=capability)
    ops = TritonOps(plan_cache(spec, max_requests=1, max_tokens=1024, layout=layout), "cuda:0", props=props)
    if attention is not None:
        ops.attention_kernels = attention
    return ops


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(cuda.launch, "INTERPRETED", False)
    monkeypatch.setenv("KVCORE_ATTENTION", "triton")


@pytest.mark.parametrize("name", SPECS)
def test_tables_of_a_gpu(name: str) -> None:
    spec, layer = SPECS[name]
    ops = made(spec)
    assert table(ops, layer) == ON_CUDA[name]
    assert table(ops, None) == UNITS
    ops.check_strict()


@pytest.mark.parametrize("name", SPECS)
def test_tables_of_a_cpu(name: str) -> None:
    spec, layer = SPECS[name]
    found = table(TorchOps(plan_cache(spec, max_requests=1, max_tokens=1024, layout="packed")), layer)
    assert found == {**dict.fromkeys(ON_CUDA[name], PLAIN), **ON_CPU.get(name, {})}


@pytest.mark.parametrize(
    ("attention", "verb", "said"),
    [
        ("torch", "attend", ("torch", "KVCORE_ATTENTION=torch")),
        ("flash_mla", "append_window", covered("v4_584")),
        (
            "flash_mla",
            "attend",
            (
                "flash_mla",
                "where q is bf16 with 64 or 128 heads and the ring holds the step's rows, else "
                f"triton: kernels cover v4_584 in layout packed{HOPPER}",
            ),
        ),
    ],
)
def test_whose_attention_it_is(attention: str, verb: str, said: tuple[str, str]) -> None:
    assert table(made(SPECS["V4-Flash"][0], attention=attention), 2)[verb] == said


LATENT = "where q is bf16 with up to 128 heads and the ring holds the step's rows"
ONE_EACH = "where each request brings one token, outside of graphs"


@pytest.mark.parametrize(
    ("name", "verb", "capability", "implementation", "said"),
    [
        (
            "V4-Flash",
            "attend",
            120,
            "flashinfer",
            f"{flash_infer.UNMEASURED}; {LATENT}, else triton: {covered('v4_584')[1]}",
        ),
        ("V4-Flash", "attend", 100, "triton", "FlashInfer reads such rows on compute capability 12.0 and 12.1"),
        ("V3 latent", "attend", 120, "triton", "FlashInfer needs a window"),
        (
            "plain",
            "attend_kv",
            100,
            "flashinfer",
            f"{flash_infer.UNMEASURED}; {ONE_EACH}, else triton: {covered('bf16', f', {ONE}')[1]}",
        ),
        ("sliding with sinks", "attend_kv", 90, "triton", "FlashInfer reads rows in order, not rings"),
    ],
)
def test_flashinfer_attends_where_it_was_chosen_and_reads_the_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, verb: str, capability: int, implementation: str, said: str
) -> None:
    for module, stand_in in fake_flashinfer.installed().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    plain = CacheSpec(layers=[LayerSpec(kv=KV(key_heads=8, key_dim=128))], block_tokens=16), 0
    spec, layer = SPECS.get(name, plain)
    ops = made(spec, attention="flashinfer", capability=capability)
    found = table(ops, layer)[verb]
    assert found[0] == implementation
    if implementation == "flashinfer":
        assert found[1] == said
    else:
        assert found[1].endswith(f"; {said}")
        with pytest.raises(BackendError, match=said):
            ops.check_strict()


def test_what_is_slower_is_refused_with_its_reason() -> None:
    spec = SPECS["V4-Flash"][0]
    why = "entries: layout tpu_tile stores the bytes of an element apart"
    ops = made(spec, layout="tpu_tile")
    assert table(ops, 2)["flush"] == ("torch", why)
    with pytest.raises(BackendError) as caught:
        ops.check_strict()
    got = f"torch, because: {why.replace('entries', 'window')}"
    assert (caught.value.got, caught.value.where) == (got, "layers[0], append_window")
    assert "ops.explain() lists what runs" in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "gluon", "attends"),
    [
        pytest.param(90, True, "triton", id="Hopper has a kernel that is faster"),
        pytest.param(90, False, "flash_mla", id="which an older Triton lacks"),
        pytest.param(100, True, "flash_mla", id="as Blackwell does"),
        pytest.param(80, True, "triton", id="FlashMLA has none for Ampere"),
    ],
)
def test_flash_mla_attends_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, capability: int, gluon: bool, attends: str
) -> None:
    monkeypatch.delenv(flash.VARIABLE, raising=False)
    monkeypatch.setattr(flash, "unusable", lambda: "")
    monkeypatch.setattr(device, "GLUON", gluon)
    assert flash.chosen("cuda", capability) == attends


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "splits"),
    [
        pytest.param(2, 64, 640, 10, id="few queries: a tile a program"),
        pytest.param(64, 64, 640, 2, id="so that every multiprocessor has one"),
        pytest.param(128, 64, 640, 1, id="a program a query where those fill the GPU"),
        pytest.param(64, 128, 640, 1, id="or its halves"),
        pytest.param(133, 64, 1152, 2, id="a second wave is no emptier than need be"),
    ],
)
def test_programs_of_a_pipeline_fill_the_gpu_and_are_traced(tokens: int, heads: int, keys: int, splits: int) -> None:
    assert hopper_splits(H200, tokens, heads, keys) == splits
    traced = torch.compile(lambda x: x + hopper_splits(H200, tokens, heads, keys), fullgraph=True, backend="eager")
    assert traced(torch.zeros(())) == splits


@pytest.mark.parametrize(
    ("capability", "gluon", "warps"), [(90, True, 1056), (100, True, 1056), (80, True, 0), (90, False, 0)]
)
def test_launches_come_up_ahead_where_they_can(
    monkeypatch: pytest.MonkeyPatch, capability: int, gluon: bool, warps: int
) -> None:
    monkeypatch.setattr(device, "GLUON", gluon)
    assert device.ahead(H200._replace(capability=capability)) == warps
