"""What only torch callers meet: tensors that are shared, recorded, frozen, strided, elsewhere, or views of a slab."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvcore
from kvcore.errors import BackendError, ShapeError
from kvcore.spec import KV, CacheSpec, Entries, LayerSpec, Tail, Window
from tests.support.backends_under_test import poison

SPEC = CacheSpec(
    layers=[
        LayerSpec(
            window=Window(dim=512, window=4, format="v4_584"),
            tail=Tail(dim=512, ratio=2, overlap=True),
            entries=Entries(dim=512, ratio=2),
        ),
        LayerSpec(kv=KV(key_heads=2, key_dim=6, storage="ring", window=3, key_format="int8_row")),
        LayerSpec(kv=KV(key_heads=2, key_dim=8, value_dim=4)),
    ],
    block_tokens=4,
)


def create(**sizes: object) -> kvcore.Cache:
    """A poisoned cache of every kind of layer, on the CPU."""
    cache = kvcore.create_cache(SPEC, backend="torch_triton", **{"max_requests": 2, "max_tokens": 32, **sizes})
    poison(cache)
    return cache


def rows(tokens: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """One step's inputs by name, contiguous fp32."""
    sizes = {"window": (512,), "kv": (1024,), "score": (1024,), "k1": (2, 6), "v1": (2, 6), "k2": (2, 8), "v2": (2, 4)}
    return {
        name: torch.from_numpy(rng.standard_normal((tokens, *size)).astype(np.float32)) for name, size in sizes.items()
    }


def append(step: Any, given: dict[str, torch.Tensor]) -> None:
    """Give every layer its rows."""
    step.layer(0).append_window(given["window"])
    step.layer(0).append_tail(given["kv"], given["score"])
    step.layer(0).flush()
    step.layer(1).append_kv(given["k1"], given["v1"])
    step.layer(2).append_kv(given["k2"], given["v2"])


def run(cache: kvcore.Cache, given: list[dict[str, torch.Tensor]]) -> int:
    """The digest after one request's steps."""
    request = cache.admit()
    for inputs in given:
        with cache.step({request: len(inputs["window"])}) as step:
            append(step, inputs)
    return cache.digest()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a larger tensor, last axes swapped."""
    wide = torch.zeros((*tensor.shape[:-2], tensor.shape[-1], 2 * tensor.shape[-2]))
    view = wide[..., ::2].transpose(-1, -2)
    view[:] = tensor
    return view


FORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "recorded by autograd": lambda tensor: tensor.clone().requires_grad_() * 1,
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.clone()),
    "strided": strided,
    "expanded": lambda tensor: tensor[None].expand(3, *tensor.shape)[1],
    "NumPy": lambda tensor: tensor.numpy().copy(),
    "NumPy, read-only": lambda tensor: np.frombuffer(tensor.numpy().tobytes(), np.float32).reshape(tensor.shape),
    "NumPy, Fortran order": lambda tensor: np.asfortranarray(tensor.numpy()),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_form_of_an_input_does_not_matter(form: Callable[[torch.Tensor], object], rng: np.random.Generator) -> None:
    given = [rows(tokens, rng) for tokens in (7, 1, 2)]
    formed = [{name: form(tensor) for name, tensor in inputs.items()} for inputs in given]
    with torch.no_grad():
        assert run(create(), formed) == run(create(), given)


def test_rows_that_wait_for_the_commit_are_those_that_were_given(rng: np.random.Generator) -> None:
    given = rows(9, rng)
    changed = {name: tensor.numpy().copy() for name, tensor in given.items()}
    cache = create()
    request = cache.admit()
    with cache.step({request: 9}) as step:
        append(step, changed)
        for array in changed.values():
            array[:] = 77
    assert cache.digest() == run(create(), [given])


def test_pools_stay_where_they_are(rng: np.random.Generator) -> None:
    cache = create()
    pools = cache.pools
    places = {name: pool.data_ptr() for name, pool in pools.items()}
    run(cache, [rows(7, rng), rows(2, rng)])
    assert cache.pools is pools
    assert {name: pool.data_ptr() for name, pool in pools.items()} == places


@pytest.mark.parametrize("made", [False, True], ids=["made outside", "made inside"])
@pytest.mark.parametrize("used", [False, True], ids=["used outside", "used inside"])
def test_inference_mode_may_be_on_or_off(made: bool, used: bool, rng: np.random.Generator) -> None:
    given = [rows(tokens, rng) for tokens in (7, 1, 2)]
    want = run(create(), given)
    with torch.inference_mode(made):
        cache = create()
        given = [{name: tensor.clone() for name, tensor in inputs.items()} for inputs in given]
    with torch.inference_mode(used):
        assert run(cache, given) == want
    assert run(cache, given) != want, "two requests are not one"


def test_nothing_returned_is_recorded_by_autograd(rng: np.random.Generator) -> None:
    cache = create()
    given = {name: tensor.requires_grad_() for name, tensor in rows(5, rng).items()}
    q = torch.randn(5, 4, 512, requires_grad=True)
    with torch.no_grad(), cache.step({cache.admit(): 5}) as step:
        append(step, given)
        layer, ring, full = (step.layer(number) for number in range(3))
        answers = [*layer.gather_window(), *layer.gather_all_entries(), *layer.attend(q), *ring.gather_kv()]
        answers += [*full.gather_kv(), *full.attend(q[..., :8])]
    assert not any(answer.requires_grad for answer in answers)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 64], ids="offset {}".format)
def test_pools_may_be_views_of_one_slab(offset: int, rng: np.random.Generator) -> None:
    given = [rows(tokens, rng) for tokens in (7, 1, 2)]
    cache = create()
    sizes = [pool.numel() for pool in cache.pools.values()]
    slab = torch.full((offset + sum(sizes) + offset * len(sizes),), 0xFF, dtype=torch.uint8)
    views, start = {}, offset
    for (name, pool), size in zip(cache.pools.items(), sizes, strict=True):
        views[name] = slab[start : start + size].view(pool.shape)
        start += size + offset
    cache.pools = views
    assert run(cache, given) == run(create(), given)
    gaps = [slab[:offset], slab[start - offset : start]]
    assert all((gap == 0xFF).all() for gap in gaps), "bytes outside the pools were written"


def test_pools_may_have_room_between_units(rng: np.random.Generator) -> None:
    given = [rows(tokens, rng) for tokens in (7, 1, 2)]
    cache = create()
    wide = {
        name: torch.full((len(pool), pool.shape[1] + 24), 0xFF, dtype=torch.uint8) for name, pool in cache.pools.items()
    }
    cache.pools = {name: pool[:, : cache.pools[name].shape[1]] for name, pool in wide.items()}
    assert run(cache, given) == run(create(), given)
    assert all((pool[:, -24:] == 0xFF).all() for pool in wide.values()), "bytes outside the pools were written"


def test_a_gather_is_a_copy(rng: np.random.Generator) -> None:
    cache = create()
    request = cache.admit()
    with cache.step({request: 3}) as step:
        append(step, rows(3, rng))
        gathered = step.layer(2).gather_kv()[0]
        before = gathered.clone()
    with cache.step({request: 1}) as step:
        append(step, rows(1, rng))
    assert torch.equal(gathered, before)
    gathered.zero_()
    with cache.step({request: 0}) as step:
        assert torch.equal(step.layer(2).gather_kv()[0][:, :3], before)


def test_a_tensor_elsewhere_is_refused_and_changes_nothing(rng: np.random.Generator) -> None:
    cache = create()
    request = cache.admit()
    before = {name: pool.clone() for name, pool in cache.pools.items()}
    with pytest.raises(ShapeError, match=r"meta.*cpu") as error, cache.step({request: 2}) as step:
        step.layer(0).append_window(rows(2, rng)["window"].to("meta"))
    assert "to_empty" in error.value.hint  # a move would have nothing to move
    assert all(torch.equal(pool, before[name]) for name, pool in cache.pools.items())
    assert request.length == 0


@pytest.mark.parametrize(
    "device",
    ["", "cpu:0", "CPU", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "cuda:4096", "mps", "meta", 0],
)
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(BackendError, match="device"):
        create(device=device)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "int64", "bool"])
def test_arrays_come_back_as_they_went(dtype: str, rng: np.random.Generator) -> None:
    cache = create()
    array = rng.integers(0, 2, (3, 5)).astype(dtype)
    back = kvcore.to_numpy(cache.asarray(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_bf16_arrays_come_back_to_the_bit() -> None:
    array = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    tensor = create().asarray(array)
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(kvcore.to_numpy(tensor).view(np.uint16), array.view(np.uint16))


def test_e4m3_arrays_come_back_to_the_bit() -> None:
    array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    tensor = create().asarray(array)
    assert tensor.dtype == torch.float8_e4m3fn
    assert np.array_equal(kvcore.to_numpy(tensor).view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3, object, "U3"], ids=["fp8", "objects", "text"])
def test_a_dtype_that_torch_does_not_have_is_refused(dtype: object) -> None:
    with pytest.raises(ShapeError, match="dtype"):
        create().asarray(np.zeros(3).astype(dtype))
