"""Who attends in a model's forward, and why: what ``KVCache(attention=)`` chooses and ``cache.explain()`` lists.

Three ways: ``cache``: our attention reads the pools, and nothing is gathered; ``views``: torch's attention reads the
rows where they lie, the query heads that share a key head as rows of one product; ``model``: the model's own, over what
the cache hands out.
"""

import inspect
from typing import Any, Literal, NamedTuple

import torch

from kvcore import Cache
from kvcore.errors import SpecError
from kvcore.interop.transformers.tensors import stored_as
from kvcore.ops.results import Choice
from kvcore.spec import LayerSpec

Asked = Literal["auto", "cache", "model"]
ASKED = ("auto", "cache", "model")


class Way(NamedTuple):
    """Who attends to a layer, and why."""

    by: Literal["cache", "views", "model"]
    reason: str


class Ways(NamedTuple):
    """Of a layer: for one new token, and for several."""

    one: Way
    more: Way


MEASURED: dict[tuple[str, bool], Ways] = {
    ("cpu", True): Ways(
        Way("views", "0.12 to 0.15 of the model's time in bf16, 0.87 to 1.11 in fp32"),
        Way("model", "over the same rows; as fast"),
    ),
    ("cpu", False): Ways(
        Way(
            "cache",
            "rows are decoded as they are read, in C where there is a compiler: 0.05 to 0.23 of the model's time",
        ),
        Way("model", "torch's attention over decoded rows"),
    ),
    ("cuda", True): Ways(
        Way(
            "cache",
            "no copies of the rows: 0.4 of the model's time at 16 requests of 64K; short contexts are the host's",
        ),
        Way("model", "torch's attention over a prompt's own keys and values, which are not read back"),
    ),
    ("cuda", False): Ways(
        Way(
            "cache",
            "encoded rows are read as they lie, 0.13 to 0.5 of the model's time over decoded copies of long contexts",
        ),
        Way("model", "torch's attention over decoded rows"),
    ),
}
"""(device, whether rows are stored as the model's own numbers) -> the faster ways."""

LATENT = (
    "latents are read as they lie: the module's key and value projections go to the query and to the output, in place "
    "of its expand_kv, which is called where somebody looks"
)
UNKNOWN = "rows are latents, which modules of this model expand elsewhere than in expand_kv"
COMPRESSED = "the window, and of the entries those that a query sees, are read as they lie, once for all query heads"
OVER_TOKENS = "tokens are coded together, and no draft has a part in scales that the tokens before it see"
HANDED_OUT = Way("model", "over windows and entries that are handed out")


class OfLatents(NamedTuple):
    """What is known of the modules that expand latents.

    Attributes:
        count: of modules; 0: nothing stands in front of them.
        against: why compiled code cannot attend to latents; "" where it can.
        most_new: new tokens of a row up to which latents take fewer multiplications than keys and values of heads;
            None: any number.
    """

    count: int
    against: str
    most_new: int | None


def most_absorbed(config: Any) -> int | None:
    """New tokens of a row up to which attending to latents takes fewer multiplications than expanding them.

    Of a row and head, expansion takes rank · (key dim + value dim) once; a query then takes key dim + rotary dim +
    value dim, and rank + rotary dim + rank of a latent. A key's dim is that of its part that is not rotary.
    """
    names = "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"
    rank, dim, value_dim = (getattr(config, name, None) or 0 for name in names)
    more = 2 * rank - dim - value_dim
    return None if more <= 0 else rank * (dim + value_dim) // more


def check_asked(asked: Any) -> Asked:
    """What ``attention=`` may say.

    Raises:
        SpecError: anything else.
    """
    if asked not in ASKED:
        raise SpecError(got=asked, where="attention", allowed=", ".join(ASKED))
    return asked


def decoder_module(model: Any) -> torch.nn.Module:
    """The part of a model whose forwards bring the cache tokens."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    return found if isinstance(found, torch.nn.Module) and hasattr(found, "config") else model


def reason_against(model: Any, asked: Asked, *, static: bool) -> str:
    """Why the model attends in all layers; "" where it need not."""
    if asked == "model":
        return "asked for: attention='model'"
    if static and asked != "cache" and str(getattr(model, "device", "cpu")) != "cpu":
        return (
            "static=True on a GPU: compiled code has masks on the device, and the cache refuses those with holes; "
            "attention='cache' reads the pools"
        )
    if not isinstance(model, torch.nn.Module):
        return "the model is not a torch module, so nothing is told of its forwards"
    can_set = getattr(type(decoder_module(model)), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return f"{type(model).__name__} does not look its attention up in transformers' registry"
    return ""


def ways_of(
    kv: Cache,
    asked: Asked,
    against: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    latents: OfLatents,
    static: bool,
    asking: frozenset[int],
) -> tuple[Ways, ...]:
    """For every layer, who attends; ``asking``: see ``layers_asking``."""
    if against:
        return (Ways(Way("model", against), Way("model", against)),) * len(kv.spec.layers)
    named = {choice.layer: choice for choice in kv.ops.explain() if choice.verb in ("attend", "attend_kv")}
    if static:
        return tuple(
            _static(layer, named.get(number), dtype, device, asked, latents, number in asking)
            for number, layer in enumerate(kv.spec.layers)
        )
    return tuple(
        _of_layer(layer, named.get(number), dtype, device, asked, latents)
        for number, layer in enumerate(kv.spec.layers)
    )


def _of_layer(
    layer: LayerSpec,
    choice: Choice | None,
    dtype: torch.dtype,
    device: torch.device,
    asked: Asked,
    latents: OfLatents,
) -> Ways:
    kv = layer.kv
    if kv is None and layer.conv is None and layer.window is None and layer.entries is not None:
        assert choice is not None
        return _of_latents(choice, device, asked, latents)
    if kv is None and layer.window is not None:
        assert choice is not None
        return _of_one_row_a_token(choice, device, asked, COMPRESSED, HANDED_OUT)
    if kv is None or layer.conv is not None:
        reason = "a recurrent state, or nothing"
        if kv is not None:
            reason = "a recurrent part beside attention, which ends the layer's forward"
        return Ways(Way("model", reason), Way("model", reason))
    assert choice is not None
    if asked == "cache":
        way = Way("cache", "asked for: attention='cache'")
        return Ways(way, way)
    slow = _slow(choice, device)
    if slow:
        return Ways(Way("model", slow), Way("model", slow))
    plain = stored_as(kv) == dtype
    ways = MEASURED.get((device.type, plain), MEASURED["cpu", plain])
    if kv.ratio == 1:
        return ways
    return ways._replace(more=Way("cache", f"up to {kv.ratio} tokens a row, more are the model's; {OVER_TOKENS}"))


COMPILED = "compiled code stores a token's rows and attends to the pools in one operator"
COMPILED_MEASURED: dict[bool, str] = {
    True: "0.23 of the model's time in bf16, 0.12 in fp32",
    False: "0.49 of the model's time in bf16, 0.43 in fp32",
}
"""Whether rows are stored as the model's own numbers -> what that takes of the model's time on a CPU."""

NOT_COMPILED = "static=True: prompts, and steps outside of compiled code, are the model's over rows of a fixed number"
NOT_ASKING = (
    "a module whose forward does not name transformers' registry of attention functions, which code is traced by"
)


def _static(
    layer: LayerSpec,
    choice: Choice | None,
    dtype: torch.dtype,
    device: torch.device,
    asked: Asked,
    latents: OfLatents,
    asks: bool,
) -> Ways:
    """Of a layer with static shapes."""
    assert choice is not None
    against = "" if asks else NOT_ASKING
    if layer.kv is None:
        against = against or (latents.against if latents.count else UNKNOWN)
    elif layer.kv.chunk is not None:
        against = "chunks, whose beginning padding shifts"
    if asked == "auto":
        against = against or _slow(choice, device)
    reason = f"asked for: attention='cache'; {COMPILED}"
    if asked == "auto":
        reason = f"{COMPILED}: {COMPILED_MEASURED[layer.kv is not None and stored_as(layer.kv) == dtype]}"
    return Ways(Way("model", against) if against else Way("cache", reason), Way("model", NOT_COMPILED))


def layers_asking(decoder: Any, count: int) -> frozenset[int]:
    """Numbers of ``count`` layers whose modules look their attention function up where they update the cache."""
    asking: dict[int, bool] = {}
    any_layer = False
    for module in decoder.modules() if isinstance(decoder, torch.nn.Module) else ():
        number, names = getattr(module, "layer_idx", None), names_of(module.forward)
        asks = "ALL_ATTENTION_FUNCTIONS" in names
        if "update" in names and isinstance(number, int):
            asking[number] = asking.get(number, True) and asks
        elif "update" in names:
            any_layer = any_layer or asks  # one that runs all layers; others have dicts to update
    return frozenset(number for number in range(count) if asking.get(number, any_layer))


def names_of(forward: Any) -> tuple[str, ...]:
    """What a function's own code names; () where that is not known."""
    return getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())


def _of_latents(choice: Choice, device: torch.device, asked: Asked, latents: OfLatents) -> Ways:
    if not latents.count:
        return Ways(Way("model", UNKNOWN), Way("model", UNKNOWN))
    few = "" if latents.most_new is None else f"up to {latents.most_new} tokens a row, more are the model's; "
    return _of_one_row_a_token(choice, device, asked, LATENT, Way("cache", few + LATENT))


def _of_one_row_a_token(choice: Choice, device: torch.device, asked: Asked, what: str, several: Way) -> Ways:
    """``what`` the cache does where it attends; ``several``: who attends to more than one token unless asked."""
    if asked == "cache":
        way = Way("cache", f"asked for: attention='cache'; {what}")
        return Ways(way, way)
    slow = _slow(choice, device)
    if slow:
        return Ways(Way("model", slow), Way("model", slow))
    return Ways(Way("cache", what), several)


def _slow(choice: Choice, device: torch.device) -> str:
    """Why a layer's verb of attention is slower than the model's; "" where that is not known beforehand."""
    if choice.implementation == "numpy" or choice.implementation.startswith("jax"):
        return f"the rows are {choice.implementation} arrays, whose attention is no faster on this device"
    if device.type == "cuda" and choice.implementation == "torch":
        return f"no kernel: {choice.reason}"
    return ""


def explained(ways: tuple[Ways, ...], refused: dict[int, str]) -> list[Choice]:
    """One line for every layer and kind of step, and what the last forward fell back to."""
    found: list[Choice] = []
    for number, way in enumerate(ways):
        found += [Choice(number, "attend(one token)", *way.one), Choice(number, "attend(several)", *way.more)]
        if number in refused:
            found.append(Choice(number, "attend(last forward)", "model", refused[number]))
    return found
