"""Which code runs a verb and why, as ``ops.explain()`` and ``kvcore info --plan`` say it where no kernel runs."""

import json

import pytest

import kvcore
from kvcore.cli import main
from kvcore.errors import BackendError
from kvcore.ops import Choice
from kvcore.ops.choices import folded
from kvcore.ops.fused import completed
from kvcore.plan import plan_cache
from kvcore.plugins import registry
from kvcore.spec import KV, CacheSpec, LayerSpec, Window, presets

WINDOW = LayerSpec(window=Window(dim=8, window=3, format="fp32"))
SPEC = CacheSpec(
    layers=(
        WINDOW,
        LayerSpec(kv=KV(key_heads=2, key_dim=8)),
        WINDOW,
        LayerSpec(kv=KV(key_heads=2, key_dim=8, value_dim=4)),
    ),
    block_tokens=8,
)
WINDOW_VERBS = ["append_window", "append_rotated_window", "gather_window", "attend", "gather_rows", "store_rows"]
RING_VERBS = ["read_ring", "restore_ring"]
KV_VERBS = ["append_kv", "gather_kv", "kv_view", "append_kv_view", "attend_kv", "gather_rows", "store_rows"]
UNIT_VERBS = ["reset_slots", "poison", "copy_slots", "copy_blocks", "digest_rows", "move_strips", "digest_strips"]
IMPLEMENTATIONS = {"reference": "numpy", "torch_triton": "torch"}


def made(backend: str, spec: CacheSpec = SPEC, layout: str = "packed"):
    pytest.importorskip({"torch_triton": "torch", "reference": "numpy"}[backend])
    plan = plan_cache(spec, max_requests=1, max_tokens=64, layout=layout)
    return registry().backends[backend].load().create(plan, device="cpu")


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
def test_every_verb_of_every_layer_is_listed(backend: str) -> None:
    found = made(backend).explain()
    window = [*WINDOW_VERBS, *RING_VERBS]
    wanted = [(0, window), (1, KV_VERBS), (2, window), (3, KV_VERBS), (None, UNIT_VERBS)]
    assert [choice[:2] for choice in found] == [(layer, verb) for layer, verbs in wanted for verb in verbs]
    said = {choice.implementation for choice in found if not choice.verb.endswith("kv_view")}
    assert said == {IMPLEMENTATIONS[backend]}
    assert all(choice.reason for choice in found)


@pytest.mark.parametrize("layout", ["packed", "tpu_tile"])
@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
def test_plain_operations_on_a_cpu_are_not_refused(monkeypatch, backend: str, layout: str) -> None:
    monkeypatch.setenv("KVCORE_STRICT", "1")
    assert made(backend, presets.deepseek_v4_flash_tiny(), layout).explain()


def test_the_switch_is_checked(monkeypatch) -> None:
    monkeypatch.setenv("KVCORE_STRICT", "yes")
    with pytest.raises(BackendError, match="KVCORE_STRICT: got yes"):
        made("torch_triton")


def test_a_gpu_without_triton_is_refused(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    ops = made("torch_triton")
    ops.check_strict()
    monkeypatch.setattr(ops, "torch_device", torch.device("cuda"))
    with pytest.raises(BackendError, match=r"layers\[0\], append_window: got torch, because: triton is not installed"):
        ops.check_strict()


@pytest.mark.parametrize("queries", ["bf16", "float32"])
def test_classic_attention_runs_as_it_is_said_to(monkeypatch, queries: str) -> None:
    torch = pytest.importorskip("torch")
    from kvcore.backends.torch_triton import cpu_attention
    from kvcore.step import StepRequest, build_index

    ops, pieces = made("torch_triton"), []
    right = cpu_attention.over_rows

    def counted(*arguments):
        pieces.append(arguments)
        return right(*arguments)

    monkeypatch.setattr(cpu_attention, "over_rows", counted)
    said = {choice.layer: choice.reason for choice in ops.explain() if choice.verb == "attend_kv"}
    pools, index = (
        ops.allocate(),
        ops.index(build_index([StepRequest(slot=0, start=0, new=2, blocks=[0])], max_blocks=1)),
    )
    q = torch.ones(2, 2, 8, dtype=torch.bfloat16 if queries == "bf16" else torch.float32)
    for layer, dim in ((1, 8), (3, 4)):
        del pieces[:]
        pools = ops.append_kv(pools, layer, index, torch.ones(2, 2, 8), torch.ones(2, 2, dim))
        ops.attend_kv(pools, layer, index, q)
        assert bool(pieces) == ("over pieces" in said[layer]), said[layer]


def test_a_shard_says_what_runs_on_it() -> None:
    from kvcore.sharding.ops import ShardedOps

    spec = presets.deepseek_v4_flash_tiny()
    plan = plan_cache(spec, max_requests=1, max_tokens=256, layout="packed")
    alone = made("reference", spec)
    sharded = ShardedOps(registry().backends["reference"].load(), plan, None, device="cpu")
    found = sharded.explain()
    assert [choice[:3] for choice in found] == [choice[:3] for choice in alone.explain()]
    reasons = {choice.layer: choice.reason for choice in found if choice.verb == "attend"}
    assert reasons[0] == "the reference is NumPy alone"
    assert reasons[1] == "window: the reference is NumPy alone; entries: the reference is NumPy alone"


def test_a_backend_without_the_verb_does_not_say() -> None:
    class Ops:
        plan, device = made("reference").plan, "abacus"

    assert completed(Ops()).explain()[0] == Choice(0, "append_window", "abacus", "this backend does not say")


def test_equal_layers_are_folded() -> None:
    assert [layers for layers, _ in folded(made("torch_triton").explain())] == [(0, 2), (1,), (3,), (None,)]


def test_the_command_prints_the_table(capsys, tmp_path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(kvcore.spec.to_json(SPEC))
    assert main(["info", "--plan", str(file), "--backend", "reference"]) == 0
    printed = capsys.readouterr().out
    assert "Layers 0, 2" in printed
    assert "the reference is NumPy alone" in printed
    assert main(["info", "--plan", str(file), "--backend", "reference", "--layout", "packed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["layout"]) == ("reference", "packed")
    assert [Choice(**choice) for choice in found["choices"]] == made("reference").explain()


def test_the_command_says_what_it_cannot_do(capsys) -> None:
    assert main(["info", "--plan", "no_such_spec"]) == 2
    assert "--plan: got 'no_such_spec'" in capsys.readouterr().err
