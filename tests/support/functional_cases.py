"""Functional verbs by name: how each is called on one small cache, with arguments of any kind."""

# ruff: noqa: ARG005 - all calls take pools and an index, whatever their verb takes

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvcore
from kvcore.ops import StepIndex
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec, Rope, Tail, Window

ROPE = Rope(dim=4, theta=1e4)
LATENT, PAGED, RING, SLOT, PLAIN = range(5)


def spec(block_tokens: int = 4) -> CacheSpec:
    """A latent layer with all its roles, keys and values in the three storages, and a window alone."""
    latent = LayerSpec(
        window=Window(dim=16, window=4, format="bf16"),
        tail=Tail(dim=16, ratio=2, overlap=True),
        entries=Entries(dim=16, ratio=2, format="bf16"),
        index_tail=Tail(dim=32, ratio=2, overlap=True),
        index_keys=IndexKeys(dim=32, ratio=2, heads=2, topk=2, format="bf16"),
    )
    kinds = ({}, {"storage": "ring", "window": 3}, {"storage": "slot", "key_format": "int8_row"})
    classic = [LayerSpec(kv=KV(key_heads=2, key_dim=16, **kind)) for kind in kinds]
    alone = LayerSpec(window=Window(dim=16, window=4, format="fp32"))
    return CacheSpec(layers=[latent, *classic, alone], block_tokens=block_tokens)


def create(backend: str, **sizes: Any) -> kvcore.Cache:
    """A cache of two requests and four blocks."""
    block_tokens = sizes.pop("block_tokens", 4)
    sizes = {"max_requests": 2, "max_tokens": 4 * block_tokens, **sizes}
    return kvcore.create_cache(spec(block_tokens), backend=backend, **sizes)


def floats(*shape: int) -> np.ndarray:
    """Numbers that are told apart, exact in bf16."""
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 64 - 20) / 8


Calls = dict[str, Callable[[Any, StepIndex], Any]]


def calls(ops: Any, tokens: int, heads: int = 2, k: int = 2, put: Callable[[Any], Any] = lambda array: array) -> Calls:
    """Verb -> a call of it with (pools, index), for verbs whose arguments are arrays of numbers; ``put`` makes them."""

    def given(*shape: int) -> Any:
        return put(floats(*shape))

    t, h = tokens, heads
    tails = {name: given(t, width) for name, width in
             (("kv", 32), ("score", 32), ("index_kv", 64), ("index_score", 64))}  # fmt: skip
    own = {"k": given(t, 2, 16), "v": given(t, 2, 16)}
    found: Calls = {
        "append_window": lambda p, i: ops.append_window(p, 0, i, given(t, 16)),
        "rotated_rows": lambda p, i: ops.rotated_rows(0, i, given(t, 16), rope=ROPE, norm_weight=given(16)),
        "append_rotated_window": lambda p, i: ops.append_rotated_window(
            p, 0, i, given(t, 16), rope=ROPE, norm_weight=given(16)
        ),
        "append_tail": lambda p, i: ops.append_tail(p, 0, i, given(t, 32), given(t, 32)),
        "append_index_tail": lambda p, i: ops.append_index_tail(p, 0, i, given(t, 64), given(t, 64)),
        "gather_window": lambda p, i: ops.gather_window(p, 0, i, given(t, 16)),
        "gather_window, stored": lambda p, i: ops.gather_window(p, 0, i),
        "compress": lambda p, i: ops.compress(p, 0, i, tails["kv"], tails["score"], norm_weight=given(16)),
        "flush": lambda p, i: ops.flush(p, 0, i, *tails.values(), norm_weight=given(16), rope=ROPE),
        "append_flush": lambda p, i: ops.append_flush(p, 0, i, **tails),
        "store_entries": lambda p, i: ops.store_entries(p, 0, i, given(0, 16), index_keys=given(0, 32)),
        "gather_all_entries": lambda p, i: ops.gather_all_entries(p, 0, i),
        "index_scores": lambda p, i: ops.index_scores(p, 0, i, given(t, h, 32), given(t, h)),
        "index_select": lambda p, i: ops.index_select(p, 0, i, given(t, h, 32), given(t, h), k),
        "select": lambda p, i: ops.select(given(t, 3), k),
        "select of nothing": lambda p, i: ops.select(given(t, 0), k),
        "attend": lambda p, i: ops.attend(
            p, 0, i, given(t, h, 16), None, rows=given(t, 16), sink=given(h), rope=ROPE, scale=0.5
        ),
        "attend to a window": lambda p, i: ops.attend(p, PLAIN, i, given(t, h, 16)),
        "join": lambda p, i: ops.join(given(t, 3), given(t, 3)),
        "from_batch": lambda p, i: ops.from_batch(i, given(i.slots.shape[0], 3, 5)),
        "to_batch": lambda p, i: ops.to_batch(i, given(t, 5), 3),
        "closed": lambda p, i: ops.closed(0, i),
    }
    for layer, storage in ((PAGED, "paged"), (RING, "ring"), (SLOT, "slot")):
        found |= {
            f"append_kv, {storage}": lambda p, i, n=layer: ops.append_kv(p, n, i, **own),
            f"append_kv_view, {storage}": lambda p, i, n=layer: ops.append_kv_view(p, n, i, **own)[0],
            f"gather_kv, {storage}": lambda p, i, n=layer: ops.gather_kv(p, n, i, **own),
            f"attend_kv, {storage}": lambda p, i, n=layer: ops.attend_kv(p, n, i, given(t, h, 16), sink=given(h)),
            f"attend_kv to own rows, {storage}": lambda p, i, n=layer: ops.attend_kv(p, n, i, given(t, h, 16), **own),
            f"mask, {storage}": lambda p, i, n=layer: ops.mask(n, i),
            f"visible_rows, {storage}": lambda p, i, n=layer: ops.visible_rows(n, i),
        }
    for role in ("window", "tail", "entries", "index_keys"):
        found[f"gather_rows, {role}"] = lambda p, i, r=role: ops.gather_rows(p, 0, r, i)
        found[f"store_rows, {role}"] = lambda p, i, r=role: ops.store_rows(p, 0, r, i, ops.gather_rows(p, 0, r, i))
    found["digest_rows"] = lambda p, i: ops.digest_rows(ops.gather_rows(p, 0, "window", i), 3)
    return found


def integers(ops: Any, tokens: int, kind: Callable[[list[Any]], Any], one: Callable[[int], Any]) -> Calls:
    """The same for arguments that are integers: lists of them made by ``kind``, single ones by ``one``."""
    t = tokens
    return {
        "copy_slots": lambda p, i: ops.copy_slots(p, kind([1, 0]), kind([0, 1])),
        "copy_blocks": lambda p, i: ops.copy_blocks(p, kind([0, 1]), kind([3, 2])),
        "reset_slots": lambda p, i: ops.reset_slots(p, kind([1])),
        "poison": lambda p, i: ops.poison(p, kind([1]), kind([2])),
        "gather_entries": lambda p, i: ops.gather_entries(p, 0, i, kind([[0, 1, 0]] * t)),
        "attend": lambda p, i: ops.attend(p, 0, i, floats(t, 2, 16), kind([[0, 1]] * t)),
        "select": lambda p, i: ops.select(floats(t, 3), one(2)),
        "index_select": lambda p, i: ops.index_select(p, 0, i, floats(t, 2, 32), floats(t, 2), one(2)),
        "columns": lambda p, i: ops.gather_kv(p, PAGED, i, columns=one(5)),
        "closed": lambda p, i: ops.closed(0, i, one(1)),
        "to_batch": lambda p, i: ops.to_batch(i, floats(t, 5), one(3)),
        "layer": lambda p, i: ops.gather_window(p, one(0), i),
        "decode": lambda p, i: ops.decode("bf16", np.zeros((2, 32), np.uint8), dim=one(16)),
    }


def steps(cache: kvcore.Cache) -> Iterator[tuple[str, Any]]:
    """Open steps of several sizes, by what they are; each is undone."""
    one, other = cache.admit(), cache.admit()
    for name, new in (
        ("no requests", {}),
        ("no tokens", {one: 0}),
        ("two tokens", {one: 2}),
        ("one of two has some", {one: 0, other: 3}),
    ):
        step = cache.step(new)
        try:
            yield name, step
        finally:
            step.abort()


def answer(found: Any) -> Any:
    """What a verb returned as nested lists, pools by name."""
    if found is None or isinstance(found, bool):
        return found
    if isinstance(found, dict) or hasattr(found, "items"):
        return {name: kvcore.to_numpy(pool).reshape(-1).view(np.uint8).tobytes() for name, pool in found.items()}
    if isinstance(found, tuple):
        return tuple(answer(part) for part in found)
    array = kvcore.to_numpy(found)
    return array.shape, array.astype(np.float64)


def same(found: Any, wanted: Any, where: str) -> None:
    """Both answers are alike: shapes and integers exactly, other numbers nearly."""
    if isinstance(wanted, tuple) and len(wanted) == 2 and isinstance(wanted[1], np.ndarray):
        assert found[0] == wanted[0], where
        np.testing.assert_allclose(found[1], wanted[1], rtol=1e-2, atol=1e-2, err_msg=where)
    elif isinstance(wanted, tuple):
        for part, want in zip(found, wanted, strict=True):
            same(part, want, where)
    elif not isinstance(wanted, dict):
        assert found == wanted, where
