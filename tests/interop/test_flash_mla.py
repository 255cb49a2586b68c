"""The arguments for FlashMLA: the pools' own memory, read back as FlashMLA's page layout says."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvcore  # noqa: E402
from kvcore.errors import ShapeError  # noqa: E402
from kvcore.interop import flash_mla  # noqa: E402
from kvcore.spec import FORMATS, CacheSpec, Entries, LayerSpec, Tail, Window  # noqa: E402

DIM, W, E = 512, 8, 4


def page_row(cache, index):
    """Codes, rope and scales of physical row ``index``, by FlashMLA's layout of a page of P rows.

    Row r: 448 codes and 64 bf16 rope at r * 576; 7 scales and a zero at P * 576 + r * 8.
    """
    pages, rows = cache.shape[0], cache.shape[1]
    page, row = divmod(int(index), rows)
    assert 0 <= page < pages
    flat = cache.as_strided((cache.stride(0),), (1,), cache.storage_offset() + page * cache.stride(0)).numpy()
    scales = rows * 576 + row * 8
    return np.concatenate([flat[row * 576 : row * 576 + 576], flat[scales : scales + 8]])


def layer_spec(format="v4_584"):
    return LayerSpec(
        window=Window(dim=DIM, window=W, format=format),
        tail=Tail(dim=DIM, ratio=2, overlap=False),
        entries=Entries(dim=DIM, ratio=2, format=format),
    )


def rows_of(rng, count):
    return rng.standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture
def two_requests():
    """A cache of two requests of different lengths after a decode step was opened and written, and what went in."""
    rng = np.random.default_rng(0)
    spec = CacheSpec(layers=[layer_spec(), layer_spec()], block_tokens=2 * E)
    cache = kvcore.create_cache(spec, backend="torch_triton", device="cpu", max_requests=3, max_tokens=96)
    for pool in cache.pools.values():
        pool.fill_(0xFF)
    skipped, first, second = cache.admit(), cache.admit(), cache.admit()
    cache.release(skipped)
    windows, entries = {first: [], second: []}, {first: [], second: []}
    step = None
    for news in ({first: 21, second: 5}, {second: 1, first: 1}):
        step = cache.step(news)
        step.__enter__()
        for number in range(2):
            layer = step.layer(number)
            layer.append_window(rows := rows_of(rng, sum(news.values())))
            closed = len(layer.closed.entry_index)
            layer.store_entries(latents := rows_of(rng, closed))
            if number == 1:
                start = 0
                for request, new in news.items():
                    windows[request] += list(rows[start : start + new])
                    start += new
                for owner, latent in zip(layer.closed.request_index, latents, strict=True):
                    entries[list(news)[int(owner)]].append(latent)
        if len(news) and step.positions.shape[0] > 2:
            step.__exit__(None, None, None)
    yield step, [second, first], windows, entries
    step.__exit__(None, None, None)


def test_window_rows_are_the_requests_last_positions(two_requests):
    step, requests, windows, _ = two_requests
    found = flash_mla.sparse_decode(step.layer(1), step.positions, step.request_index, W, None)
    assert found.extra_k_cache is None
    for token, request in enumerate(requests):
        want = cached(windows[request][-W:])
        indices = found.indices[token, 0].tolist()
        assert indices[len(want) :] == [-1] * (W - len(want))
        got = np.stack([page_row(found.k_cache, index) for index in indices[: len(want)]])
        np.testing.assert_array_equal(got, want)


def test_selected_entries_are_found_through_the_block_table(two_requests):
    step, requests, _, entries = two_requests
    picks = torch.tensor([[2, -1, 0, 90], [9, 0, -1, 4]], dtype=torch.int32)
    found = flash_mla.sparse_decode(step.layer(1), step.positions, step.request_index, W, picks)
    assert found.extra_indices.shape == (2, 1, 4)
    for token, request in enumerate(requests):
        for pick, index in zip(picks[token].tolist(), found.extra_indices[token, 0].tolist(), strict=True):
            if not 0 <= pick < len(entries[request]):
                assert index == -1
                continue
            want = cached([entries[request][pick]])[0]
            np.testing.assert_array_equal(page_row(found.extra_k_cache, index), want)


def test_nothing_is_copied(two_requests):
    step = two_requests[0]
    found = flash_mla.sparse_decode(step.layer(1), step.positions, step.request_index, W, None)
    pool = step.cache.pools["1.window.page"]
    assert found.k_cache.data_ptr() == pool.data_ptr()
    # A page of 8 rows: 8 * 584 bytes, up to a multiple of 576.
    assert found.k_cache.shape == (3, W, 1, 584)
    assert found.k_cache.stride() == (5184, 584, 584, 1)


def test_another_format_is_refused():
    cache = kvcore.create_cache(
        CacheSpec(layers=[layer_spec("v41_528")], block_tokens=8), backend="torch_triton", max_requests=1, max_tokens=8
    )
    request = cache.admit()
    step = cache.step({request: 1})
    step.layer(0).append_window(np.zeros((1, DIM), np.float32))
    with pytest.raises(ShapeError, match="v4_584"):
        flash_mla.sparse_decode(step.layer(0), step.positions, step.request_index, W, None)


def cached(rows):
    """Canonical rows, which are FlashMLA's fields in its order: codes, rope, scales, pad."""
    reference = kvcore.create_cache(
        CacheSpec(layers=[LayerSpec(window=Window(dim=DIM, window=1))]), backend="reference", max_requests=1
    )
    return reference.ops.encode(FORMATS["v4_584"], np.stack(rows))
