"""What is timed of recurrent layers: states of Qwen3-Next's and Mamba's shapes, and a convolution's inputs, by slot."""

from collections.abc import Callable, Iterator

import torch

from kvcore.bench.workloads import RANDOM, Setting, Workload, rotating
from kvcore.spec import Conv, LayerSpec, State
from kvcore.step import StepRequest

DELTA = (32, 128, 128)
"""(value heads, key dim, value dim) of a gated delta network: 2 MiB a request in fp32."""
MAMBA = (8192, 16, None)
CHANNELS, WIDTH = 8192, 4
DRAFTS = 4


def state_workloads(device: str) -> Iterator[Callable[[], Workload]]:
    """Makers of all rows."""
    for verb in ("read", "write"):
        for shape, format, counts in (
            (DELTA, "fp32", (1, 16, 64, 256)),
            (DELTA, "bf16", (64,)),
            (MAMBA, "fp32", (64,)),
        ):
            for count in counts:
                yield lambda a=(verb, shape, format, count): one_state(device, *a)
    for format, taken in (("fp32", 1), ("fp32", 3), ("bf16", 1)):
        yield lambda a=(format, 64, taken): select(device, *a)
    for verb in ("read", "write"):
        yield lambda verb=verb: inputs(device, verb, 256)


def one_state(device: str, verb: str, shape: tuple[int, int, int | None], format: str, count: int) -> Workload:
    """The state of each of ``count`` requests, one token each."""
    component = _state(shape, format)
    nbytes = 2 * count * _nbytes(component)
    setting = _setting(device, LayerSpec(state=component), count, rotating(nbytes))
    states = setting.random(count, *component.shape, dtype=_dtype(format))
    for layer, given in enumerate(states):
        setting.ops.write_state(setting.pools, layer, setting.index, given, newest=1)
    if verb == "read":
        calls = [lambda n=n: setting.ops.read_state(setting.pools, n, setting.index) for n in range(setting.layers)]
    else:
        calls = [
            lambda n=n: setting.ops.write_state(setting.pools, n, setting.index, states[n], newest=1)
            for n in range(setting.layers)
        ]
    return Workload(f"{verb} states {_named(component)}, n = {count}", nbytes, calls, None, None)


def select(device: str, format: str, count: int, taken: int) -> Workload:
    """Of the states after each of five tokens that after the ``taken``-th; those before it become NaN."""
    component = _state(DELTA, format)
    nbytes = (1 + taken) * count * _nbytes(component)
    setting = _setting(device, LayerSpec(state=component), count, 2, new=1 + DRAFTS, drafts=DRAFTS)
    states = setting.random(count * (1 + DRAFTS), *component.shape, dtype=_dtype(format))
    number = torch.full((count,), taken, dtype=torch.int32, device=device)
    calls = [
        lambda n=n: setting.ops.select_state(setting.pools, n, setting.index, states[n], number)
        for n in range(setting.layers)
    ]
    name = f"select states {_named(component)}, n = {count}, {taken} of {1 + DRAFTS} tokens"
    return Workload(name, nbytes, calls, None, None)


def inputs(device: str, verb: str, count: int) -> Workload:
    """The last inputs of a convolution read, or one more of each request written."""
    component = Conv(dim=CHANNELS, width=WIDTH)
    nbytes = 4 * CHANNELS * count * (WIDTH - 1 if verb == "read" else 1)
    setting = _setting(device, LayerSpec(conv=component), count, rotating(nbytes))
    rows = setting.random(count, CHANNELS)
    for pool in setting.pools.values():
        pool.zero_()
    if verb == "read":
        calls = [lambda n=n: setting.ops.gather_conv(setting.pools, n, setting.index) for n in range(setting.layers)]
    else:
        calls = [
            lambda n=n: setting.ops.append_conv(setting.pools, n, setting.index, rows[n]) for n in range(setting.layers)
        ]
    return Workload(f"{verb} inputs bf16 of {CHANNELS:,} channels, n = {count}", nbytes, calls, None, None)


def _setting(device: str, layer: LayerSpec, count: int, layers: int, *, new: int = 1, drafts: int = 0) -> Setting:
    slots = RANDOM.permutation(count).tolist()
    rows = [StepRequest(slot=slot, start=300 + n % 7, new=new, blocks=[], stored=0) for n, slot in enumerate(slots)]
    return Setting(layer, rows, 0, layers, device, drafts=drafts)


def _state(shape: tuple[int, int, int | None], format: str) -> State:
    heads, key_dim, value_dim = shape
    return State(heads=heads, key_dim=key_dim, value_dim=value_dim, format=format)


def _named(component: State) -> str:
    return f"{component.format} of {' × '.join(map(str, component.shape))}"


def _dtype(format: str) -> torch.dtype:
    return torch.bfloat16 if format == "bf16" else torch.float32


def _nbytes(component: State) -> int:
    return sum(part.heads * part.format.row for part in component.parts)
