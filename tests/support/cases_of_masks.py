"""Which positions a query of a classic layer sees, by the rule alone, and steps to compare masks and attention on."""

import numpy as np

import kvcore
from tests.support import scene

KINDS = {
    "full": scene.classic(),
    "full in a slot": scene.classic("slot"),
    "sliding": scene.classic("ring", window=5),
    "sliding, paged": scene.classic(window=5),
    "sliding in a slot": scene.classic("slot", window=5),
    "chunked": scene.classic("ring", chunk=4),
    "chunked, paged": scene.classic(chunk=4),
    "chunked in a slot": scene.classic("slot", chunk=4),
}
STEPS = ((13, 2), (1, 1), (1, 0), (3, 9), (1, 1))
"""New tokens of two requests, step by step: a prompt longer than window and chunk, single steps, both mixed."""
HEADS, DIM, VALUE_DIM = 2, 4, 6


def sees(kv, left: int, query: int, position: int) -> bool:
    """The rule: earlier or itself, no padding, and in the query's window (which counts itself) or chunk of tokens."""
    if position > query or position < left:
        return False
    if kv.window is not None:
        return query - position < kv.window
    return kv.chunk is None or (position - left) // kv.chunk == (query - left) // kv.chunk


def run(layer, backend: str, left: tuple[int, int] | None, *, drafts: int = 0) -> None:
    """Steps of two requests through one layer; masks, positions and attention against the rule and plain sums."""
    cache = scene.create([scene.classic(), layer], backend, max_draft_tokens=drafts)
    requests = cache.admit(), cache.admit()
    random = np.random.default_rng(7)
    kept = [np.zeros((0, HEADS, DIM), np.float32), np.zeros((0, HEADS, VALUE_DIM), np.float32)]
    history = [list(kept), list(kept)]
    padding = {} if left is None else {"left_padding": dict(zip(requests, left, strict=True))}
    for news in STEPS:
        k, v, q = (
            random.standard_normal((sum(news), heads, dim), np.float32)
            for heads, dim in ((HEADS, DIM), (HEADS, VALUE_DIM), (2 * HEADS, DIM))
        )
        with cache.step(dict(zip(requests, news, strict=True)), **padding) as step:
            step.layer(0).append_kv(k, v)
            handle = step.layer(1)
            handle.append_kv(k, v)
            mask, (positions, valid) = kvcore.to_numpy(handle.mask()), handle.visible_rows()
            positions = kvcore.to_numpy(positions)
            np.testing.assert_array_equal(kvcore.to_numpy(valid), mask)
            np.testing.assert_array_equal(positions, kvcore.to_numpy(handle.gather_kv()[2]))
            out, lse = map(kvcore.to_numpy, handle.attend(q))
            token = 0
            for request, new in enumerate(news):
                for part, rows in enumerate((k, v)):
                    history[request][part] = np.concatenate([history[request][part], rows[token : token + new]])
                first = (left or (0, 0))[request]
                length = len(history[request][0])
                for query in range(length - new, length):
                    wanted = [p for p in range(length) if sees(layer.kv, first, query, p)]
                    assert positions[request][mask[token]].tolist() == wanted, (request, query)
                    check_attention(q[token], history[request], wanted, out[token], lse[token])
                    token += 1


def check_attention(q, history, wanted, out, lse) -> None:
    """Softmax over the wanted rows, two query heads a key head, in float64."""
    if not wanted:
        assert not out.any()
        assert np.isneginf(lse).all()
        return
    keys, values = (part[wanted].astype(np.float64) for part in history)
    for head in range(2 * HEADS):
        logits = keys[:, head // 2] @ q[head].astype(np.float64) * DIM**-0.5
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(out[head], weights @ values[:, head // 2] / weights.sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[head], np.log(weights.sum()) + logits.max(), rtol=1e-4, atol=1e-5)
