"""The index of padded steps stays where it is, so that a captured graph sees the next step's numbers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvcore  # noqa: E402
from kvcore.backends.torch_triton.device_index import DeviceIndex  # noqa: E402
from kvcore.ops import StepIndex  # noqa: E402
from kvcore.spec import KV, CacheSpec, LayerSpec  # noqa: E402
from kvcore.step import BlockTables, StepNumbers, StepRequest, build_index, kept_index  # noqa: E402


def padded(start: int, *, tokens: int = 5, requests: int = 3, left_padding: int | None = None):
    """Two requests, the second without a new token, padded."""
    rows = [
        StepRequest(slot=4, start=start, new=2, blocks=[start % 7, 9], stored=1, left_padding=left_padding),
        StepRequest(slot=1, start=start + 3, new=0, blocks=[8]),
    ]
    return build_index(rows, max_blocks=4, pad_tokens=tokens, pad_requests=requests)


def nothing():
    """Nobody keeps what an index said."""


def addresses(index):
    return [array.data_ptr() for array in index if array is not None]


def assert_holds(index, host):
    for got, want in zip(index, host, strict=True):
        assert (got is None) == (want is None)
        if got is None:
            continue
        assert got.dtype == torch.int32
        np.testing.assert_array_equal(got.cpu().numpy(), want)


def test_steps_of_one_shape_share_a_place():
    kept = DeviceIndex("cpu", nothing)
    first = kept.put(padded(0))
    where = addresses(first)
    assert_holds(first, padded(0))
    for start in (2, 4, 6, 8):
        later = kept.put(padded(start))
        assert addresses(later) == where
        assert_holds(later, padded(start))
        assert_holds(first, padded(start))


def test_every_array_starts_on_16_bytes():
    for place in addresses(DeviceIndex("cpu", nothing).put(padded(3))):
        assert place % 16 == 0


def test_other_shapes_have_places_of_their_own():
    kept = DeviceIndex("cpu", nothing)
    small, large = kept.put(padded(1)), kept.put(padded(2, tokens=9, requests=4))
    assert_holds(small, padded(1))
    assert_holds(large, padded(2, tokens=9, requests=4))


def test_left_padding_is_kept_like_the_rest():
    kept = DeviceIndex("cpu", nothing)
    without, with_it = kept.put(padded(1)), kept.put(padded(1, left_padding=3))
    again = kept.put(padded(2, left_padding=1))
    assert addresses(again) == addresses(with_it)
    assert again.left_padding.tolist() == [1, 0, 0]
    assert_holds(without, padded(1))


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)], ids=["made inside", "made outside"])
def test_inference_mode_may_come_and_go(first, second):
    kept = DeviceIndex("cpu", nothing)
    with torch.inference_mode(first):
        kept.put(padded(1))
    with torch.inference_mode(second):
        assert_holds(kept.put(padded(5)), padded(5))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_kept_tables_are_those_of_the_step_whatever_was_there_before(device, monkeypatch):
    """Requests that come, grow, shrink and go, in any order of a batch, padded and not."""
    # Few enough to be sent that rows of tables need several copies.
    monkeypatch.setattr("kvcore.backends.torch_triton.device_index.MOST_SENT", 60)
    rng, tables, kept = np.random.default_rng(0), BlockTables(), DeviceIndex(device, nothing)
    held = {slot: (slot,) for slot in range(6)}
    for _ in range(200):
        for slot in rng.choice(6, 2, replace=False).tolist():
            count = int(rng.integers(0, 20))
            longer = (*held[slot], *rng.integers(0, 99, 20).tolist())
            held[slot] = longer[:count] if rng.random() < 0.8 else tuple(rng.integers(0, 99, count).tolist())
        slots = rng.permutation(6)[: int(rng.integers(1, 6))].tolist()
        blocks = [held[slot] for slot in slots]
        lists = [rng.integers(0, 9, len(slots)).tolist() for _ in range(3)]
        numbers = StepNumbers(slots, *lists, blocks)
        tables.update(slots, blocks)
        shape = numbers.shape(21, numbers.tokens + 2, 6)
        rows = [StepRequest(*row) for row in zip(slots, lists[0], lists[1], blocks, lists[2], strict=True)]
        want = build_index(rows, max_blocks=21, pad_tokens=numbers.tokens + 2, pad_requests=6)
        assert_holds(kept.send(numbers, shape, tables), want)
        assert_holds(StepIndex(*map(torch.from_numpy, kept_index(numbers, shape, tables).arrays)), want)


def test_what_did_not_change_is_not_written_again():
    tables, kept = BlockTables(), DeviceIndex("cpu", nothing)
    held = [(1, 2), (3, 4), ()]

    def send():
        numbers = StepNumbers([0, 1, 2], [5, 6, 7], [1, 1, 1], [0, 0, 0], list(held))
        tables.update(numbers.slots, numbers.blocks)
        return kept.send(numbers, numbers.shape(8, 4, 4), tables).block_table

    send()[:, 0] = 77
    held[1] = (*held[1], 9)
    assert send()[:, :3].tolist() == [[77, 2, -1], [3, 4, 9], [77, -1, -1], [77, -1, -1]]


@pytest.mark.parametrize("kv", [KV(key_heads=2, key_dim=8, storage="slot"), KV(key_heads=2, key_dim=8, window=3)])
def test_verbs_that_know_a_steps_numbers_on_the_host_know_the_last_ones(kv):
    """Steps of one shape get the same index; what is read of it for one of them is not the next one's."""
    cache = kvcore.create_cache(CacheSpec(layers=(LayerSpec(kv=kv),)), backend="torch_triton", device="cpu",
                                max_requests=2, max_tokens=512)  # fmt: skip
    requests = [cache.admit(), cache.admit()]
    for length in range(1, 9):
        rows = torch.full((3, 2, 8), float(length))
        with cache.step(dict.fromkeys(requests, 1), pad_tokens=3, pad_requests=2) as step:
            step.layer(0).append_kv(rows, rows)
            keys, _, positions = step.layer(0).gather_kv()
        assert positions.max() == length - 1
        assert (keys[:2, :, 0, 0][positions[:2] == length - 1] == length).all()
        seen = positions[0] >= 0
        assert keys[0, seen, 0, 0].tolist() == [float(1 + position) for position in positions[0, seen]]
