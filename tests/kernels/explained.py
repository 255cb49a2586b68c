"""What ``ops.explain()`` says of interpreted kernels, against what runs; in a process of its own, see ``test_explain``.

Arguments: ``tables``, ``ran`` or ``strict`` (with KVCORE_STRICT=1).
"""

import os
import sys

import torch

from kvcore.backends.torch_triton import TorchBackend
from kvcore.backends.torch_triton.backend import TorchOps
from kvcore.backends.torch_triton.triton_ops import TritonOps
from kvcore.errors import BackendError
from kvcore.kernels.triton.device import INTERPRETER
from kvcore.ops.choices import VERBS
from kvcore.plan import plan_cache
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Window, presets
from kvcore.step import StepRequest, build_index
from tests.support import fake_flashinfer
from tests.support.new_codes import SCALED_FP16, layers_of

TOKENS = 16
APART = "layout tpu_tile stores the bytes of an element apart"
UNKNOWN = "format test_scaled_fp16 has a scaled code without a scale, or a plain one with one"
V4 = presets.deepseek_v4_flash_tiny()
CLASSIC = CacheSpec(
    layers=[LayerSpec(kv=KV(key_heads=2, key_dim=32, key_format="int8_row", value_format="int8_row"))], block_tokens=16
)
NO_KERNEL = {"compress": "this verb has no kernel", "gather_rows": "this verb has no kernel"}
NO_KERNEL["store_rows"] = NO_KERNEL["compress"]
IN_TILES = {
    **NO_KERNEL,
    "append_window": f"window: {APART}",
    "append_rotated_window": f"window: {APART}",
    "gather_window": f"window: {APART}",
    "flush": f"entries: {APART}",
    "append_flush": f"entries: {APART}",
    "store_entries": f"entries: {APART}",
    "gather_entries": f"entries: {APART}",
    "gather_all_entries": f"entries: {APART}",
    "attend": f"window: {APART}; entries: {APART}",
}
THIRD = {**NO_KERNEL, **dict.fromkeys(("append_window", "append_rotated_window", "gather_window", "attend"))}
THIRD |= {verb: f"window: {UNKNOWN}" for verb, why in THIRD.items() if why is None}


def third() -> CacheSpec:
    return layers_of(SCALED_FP16)["window"]


# name -> (spec, layout, layer, what runs torch operations and why; all other verbs run kernels)
TABLES = {
    "V4": (lambda: V4, "packed", 1, NO_KERNEL),
    "V4 in tiles": (lambda: V4, "tpu_tile", 1, IN_TILES),
    "classic int8_row": (lambda: CLASSIC, "packed", 0, NO_KERNEL),
    "a third party's format": (third, "packed", 0, THIRD),
}


def beside_flashinfer():
    """(a call of a layer with queries of a dtype, runs of both stand-ins) of verbs for which FlashInfer was chosen."""
    found = fake_flashinfer.install()
    latent = LayerSpec(window=Window(dim=512, window=4), entries=Entries(dim=512, ratio=4))
    spec = CacheSpec(layers=[latent, LayerSpec(kv=KV(key_heads=2, key_dim=64))], block_tokens=16)
    os.environ["KVCORE_ATTENTION"] = "flashinfer"
    props = INTERPRETER._replace(capability=120)
    plan = plan_cache(spec, max_requests=2, max_tokens=64, layout="packed")
    ops, plain = TritonOps(plan, "cpu", props=props), TorchOps(plan)
    del os.environ["KVCORE_ATTENTION"]
    pools, random = ops.allocate(), torch.Generator().manual_seed(1)
    for pool in pools.values():
        pool.fill_(0xFF)
    whole, index = (
        ops.index(build_index([StepRequest(1, 19 - n, n, (3, 2)), StepRequest(0, 7 - m, m, (1, 0))], max_blocks=2))
        for n, m in ((19, 7), (1, 1))
    )
    rows = torch.randn(26, 4, 512, generator=random)
    plain.append_window(pools, 0, whole, rows[:, 0])
    plain.store_entries(pools, 0, whole, rows[:5, 1])
    plain.append_kv(pools, 1, whole, rows[:, :2, :64], rows[:, 2:, :64])
    q = [torch.randn(2, 4, dim, generator=random).to(torch.bfloat16) for dim in (512, 64)]
    sink, turned = torch.randn(4, generator=random), {"rope": torch.full((4,), 0.1)}

    def call(layer, dtype):
        verb = ops.attend_kv if layer else ops.attend
        return verb(pools, layer, index, q[layer].to(dtype), sink=sink, **({} if layer else turned))

    def runs():
        return found.mla.SparseMLASm120Wrapper.runs, found.BatchDecodeWithPagedKVCacheWrapper.runs

    return call, runs


def made(spec, layout):
    return TorchBackend().create(plan_cache(spec, max_requests=1, max_tokens=64, layout=layout), device="cpu")


def tables():
    for name, (spec, layout, layer, plain) in TABLES.items():
        ops = made(spec(), layout)
        found = {choice.verb: choice for choice in ops.explain() if choice.layer == layer}
        said = {verb: choice.reason for verb, choice in found.items() if choice.implementation == "torch"}
        wanted = {verb: why for verb, why in plain.items() if verb in found}
        yield name, said == wanted, said
        others = {choice.implementation for verb, choice in found.items() if verb != "kv_view"} - {"torch"}
        yield name, others <= {"triton, interpreted"}, others
    select = next(c for c in made(V4, "packed").explain() if c.verb == "select")
    yield "a condition", select.reason.endswith("else torch: k > 4096"), select


def calls(ops, layer):
    """(verb as ``explain`` names it, a call) of every verb of a layer."""
    spec, block = ops.plan.spec.all_layers[layer], ops.plan.spec.block_tokens
    blocks = list(range(-(-TOKENS // block)))
    index = ops.index(build_index([StepRequest(slot=0, start=0, new=TOKENS, blocks=blocks)], max_blocks=len(blocks)))
    pools, random = ops.allocate(), torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(TOKENS, *shape, generator=random)

    if spec.window is not None:
        rows, rope = some(spec.window.dim), torch.ones(4)
        yield "append_window", lambda: ops.append_window(pools, layer, index, rows)
        yield "append_rotated_window", lambda: ops.append_rotated_window(pools, layer, index, rows, rope=rope)
        yield "gather_window", lambda: ops.gather_window(pools, layer, index)
        q = some(2, spec.window.dim).to(torch.bfloat16)
        yield "attend", lambda: ops.attend(pools, layer, index, q)
    if spec.tail is not None:
        tail, keys = some(spec.tail.width), some(spec.index_tail.width)
        streams = tail, tail, keys, keys
        yield "append_tail", lambda: ops.append_tail(pools, layer, index, tail, tail)
        yield "append_index_tail", lambda: ops.append_index_tail(pools, layer, index, keys, keys)
        yield "flush", lambda: ops.flush(pools, layer, index, *streams)
        count = TOKENS // spec.entries.ratio
        entries, index_keys = some(spec.entries.dim)[:count], some(spec.index_keys.dim)[:count]
        yield "store_entries", lambda: ops.store_entries(pools, layer, index, entries)
        yield "store_entries(index_keys)", lambda: ops.store_entries(pools, layer, index, None, index_keys)
        picks = torch.zeros(TOKENS, 2, dtype=torch.int32)
        yield "gather_entries", lambda: ops.gather_entries(pools, layer, index, picks)
        yield "gather_all_entries", lambda: ops.gather_all_entries(pools, layer, index)
        of_keys = {"role": "index_keys"}
        yield "gather_all_entries(index_keys)", lambda: ops.gather_all_entries(pools, layer, index, **of_keys)
        q_index, weights = some(2, spec.index_keys.dim), some(2)
        yield "index_scores", lambda: ops.index_scores(pools, layer, index, q_index, weights)
        yield "select", lambda: ops.select(some(8), 2)
    if spec.kv is not None:
        k = some(2, 32)
        yield "append_kv", lambda: ops.append_kv(pools, layer, index, k, k)
        yield "gather_kv", lambda: ops.gather_kv(pools, layer, index)
        for dtype in (torch.float32, torch.bfloat16):
            yield "attend_kv", lambda dtype=dtype: ops.attend_kv(pools, layer, index, some(4, 32).to(dtype))
            yield "attend_kv", lambda dtype=dtype: ops.attend_kv(pools, layer, index, some(4, 32).to(dtype), k, k)


def counted(name, right, plain):
    """A verb of plain operations that says that it ran."""

    def run(*arguments, **options):
        plain.append(name)
        return right(*arguments, **options)

    return run


def ran():
    plain = []
    names = {verb.partition("(")[0] for verb, _, _ in VERBS} - {"append_flush", "index_select"}
    for name in (*names, "store_role"):
        setattr(TorchOps, name, counted(name, getattr(TorchOps, name), plain))
    for name, (spec, layout, layer, _) in TABLES.items():
        ops = made(spec(), layout)
        said = {choice.verb: choice.implementation for choice in ops.explain() if choice.layer == layer}
        for verb, call in calls(ops, layer):
            del plain[:]
            call()
            # What stores entries is the part of the verb with a kernel.
            called = "store_role" if verb.startswith("store_entries") else verb.partition("(")[0]
            yield f"{name}, {verb}", (called in plain) == (said[verb] == "torch"), (said[verb], plain)
    ops = made(V4, "packed")
    del plain[:]
    ops.select(torch.zeros(1, 8), 4097)
    yield "k too large", plain == ["select"], plain
    call, runs = beside_flashinfer()
    for layer, verb in enumerate(("attend", "attend_kv")):
        before = runs()
        theirs = call(layer, torch.bfloat16)
        between = runs()
        own = call(layer, torch.float32)
        yield f"flashinfer, {verb}", between[layer] == before[layer] + 1 and runs() == between, (before, runs())
        apart = (theirs.out.float() - own.out).abs().max() / own.out.abs().max(), (theirs.lse - own.lse).abs().max()
        yield f"flashinfer, {verb}: what it answers", apart[0] < 2.0**-7 and apart[1] < 1e-4, apart


def said_by(act):
    """What an error of the backend says; nothing where there is none."""
    try:
        act()
    except BackendError as error:
        return str(error)
    return ""


def strict():
    for name, (spec, layout, _, plain) in TABLES.items():
        said = said_by(lambda spec=spec, layout=layout: made(spec(), layout))
        declined = set(plain) - set(NO_KERNEL)
        yield name, bool(said) == bool(declined) and (not declined or "KVCORE_STRICT=1" in said), said
    ops = made(V4, "packed")
    said = said_by(lambda: ops.select(torch.zeros(1, 8), 4097))
    yield "k too large", "k > 4096" in said, said
    call, _ = beside_flashinfer()
    for layer in range(2):
        said = said_by(lambda layer=layer: call(layer, torch.float32))
        yield "a call that FlashInfer does not take", "triton, interpreted, because: q is" in said, said
    os.environ["KVCORE_ATTENTION"] = "torch"
    said = said_by(lambda: made(CLASSIC, "packed"))
    yield "attention as torch operations", "KVCORE_ATTENTION=torch" in said, said
    os.environ["KVCORE_STRICT"] = "yes"
    said = said_by(lambda: made(CLASSIC, "packed"))
    yield "neither 0 nor 1", "KVCORE_STRICT: got" in said, said


if __name__ == "__main__":
    found = list({"tables": tables, "ran": ran, "strict": strict}[sys.argv[1]]())
    print(len(found), "checks")
    for what, right, seen in found:
        if not right:
            print(what, seen)
    sys.exit(not found or not all(right for _, right, _ in found))
