"""Where tails lie, as kernels see it: every layout's rows are theirs, so that no verb goes another way unseen."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.launches.launching import TAILS
from kvcore.kernels.triton.tail import TailRecord, tail_recorded
from kvcore.ops.choices import Declined
from kvcore.plan import plan_cache
from kvcore.spec import CacheSpec, Entries, LayerSpec, Tail, presets

H200 = DeviceProps(capability=90, multiprocessors=132, shared=227 << 10)
V4 = ("deepseek_v4_flash", "deepseek_v4_pro", "deepseek_v4_1_flash")
OVERLAP = {"width": 1024, "dim": 512, "ratio": 4, "rows": 8, "overlap": True}
SHORT = {"width": 16, "dim": 16, "ratio": 3, "rows": 3, "overlap": False}


@pytest.mark.parametrize(
    ("layout", "tail", "places", "buffers"),
    [
        pytest.param(
            "packed",
            OVERLAP,
            {"slot": 8 * 2048, "row": 2048, "kv": 0, "score": 1024, "apart": False},
            ["0.tail.page"] * 2,
            id="packed: side by side",
        ),
        pytest.param(
            "by_head",
            OVERLAP,
            {"slot": 8 * 2048, "row": 2048, "kv": 0, "score": 1024, "apart": False},
            ["0.tail.heads"] * 2,
            id="by head: as packed",
        ),
        pytest.param(
            "planar",
            OVERLAP,
            {"slot": 8 * 1024, "row": 1024, "kv": 0, "score": 0, "apart": True},
            ["0.tail.kv", "0.tail.score"],
            id="planar: in two buffers",
        ),
        pytest.param(
            "tpu_tile",
            OVERLAP,
            {"slot": 8 * 1024, "row": 1024, "kv": 0, "score": 0, "apart": True},
            ["0.tail.tile0", "0.tail.tile1"],
            id="tiles: whole tiles of each",
        ),
        pytest.param(
            "tpu_tile",
            SHORT,
            {"slot": 128, "row": 32, "kv": 0, "score": 16, "apart": False},
            ["0.tail.tile0"] * 2,
            id="tiles: short rows share them, and slots end with padding",
        ),
    ],
)
def test_a_tail_is_told_by_its_places(layout, tail, places, buffers):
    component = Tail(dim=tail["dim"], ratio=tail["ratio"], overlap=tail["overlap"])
    layer = LayerSpec(tail=component, entries=Entries(dim=tail["dim"], ratio=tail["ratio"], format="bf16"))
    spec = CacheSpec(layers=[layer], block_tokens=12)
    (region,) = plan_cache(spec, max_requests=2, max_tokens=24, layout=layout).region(0, "tail")
    assert tail_recorded(region, component) == (TailRecord(**tail, **places), tuple(buffers))


@pytest.mark.parametrize("layout", ["packed", "planar"])
@pytest.mark.parametrize("preset", V4)
def test_compression_of_a_preset_is_the_kernels(preset, layout):
    plan = plan_cache(getattr(presets, preset)(), max_requests=1, max_tokens=256, layout=layout)
    ops = TritonOps(plan, "cuda:0", props=H200)
    found = {key: parts for key, parts in ops.records.items() if "tail" in key[1]}
    assert found
    for (layer, role), bound in found.items():
        assert not isinstance(bound, Declined), f"layer {layer}: {role} is not the kernels'"
        ((number, names, _),) = bound
        fields = ("kv", "score") if layout == "planar" else ("page",)
        assert names == [f"{plan.spec.owner(layer, role)}.{role}.{field}" for field in fields]
        assert (TAILS[number].kv, TAILS[number].score) == (0, len(names) - 1)
        entries = ops.records[layer, "entries" if role == "tail" else "index_keys"]
        assert not isinstance(entries, Declined), f"layer {layer}: {role}'s entries"
