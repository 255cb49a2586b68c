"""Rows of blocks that lie in chunks, fields of a row that step each in their own order, and bytes that lie apart."""

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore.adoption import Descriptor, Lines, describe, from_json, to_json
from kvcore.errors import ShapeError, SpecError
from kvcore.spec import KV, CacheSpec, Entries, IndexKeys, LayerSpec
from tests.support import stories

ROWS, BLOCKS, HEADS, DIM = 8, 8, 2, 32
SPEC = CacheSpec(
    layers=[LayerSpec(kv=KV(key_heads=HEADS, key_dim=DIM, key_format="mxfp4", value_format="fp16"))], block_tokens=ROWS
)
"""Keys of 16 bytes of codes and one of scales a head; values of 64 bytes."""

KINDS = {"numpy": "reference", "torch": "torch_triton"}
TOKENS = [11 * token % 241 for token in range(60)]


def lines(part, field, tensor, **steps):
    which = {"layer": 0, "role": "kv", "part": part, "field": field, "tensor": tensor}
    return Lines(**{"offset": 0, **which, **steps})


CODES = lines("key", "codes", "0", block=ROWS * HEADS * 16, token=HEADS * 16, head=16)
"""Slot by slot."""

SCALES = lines("key", "scales", "1", block=ROWS * HEADS, head=ROWS, chunk_rows=4, token=2, chunk=1)
"""Pages [heads, 4 rows of a chunk, 2 chunks]."""

VALUES = lines(
    "value",
    "codes",
    "2",
    block=ROWS * HEADS * 64,
    head=ROWS * 64,
    chunk_rows=4,
    chunk=256,
    token=1,
    piece_bytes=1,
    piece=4,
)
"""Pages [heads, chunks, 64 bytes, 4 rows of a chunk]."""

RIGHT = Descriptor(block_tokens=ROWS, blocks=BLOCKS, lines=[CODES, SCALES, VALUES])


def memory(kind):
    sizes = ROWS * HEADS * 16, ROWS * HEADS, ROWS * HEADS * 64
    tensors = [np.full((BLOCKS, size), 0xFF, np.uint8) for size in sizes]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        return [torch.from_numpy(one) for one in tensors]
    return tensors


def adopted(tensors, descriptor=RIGHT):
    return kvcore.adopt(SPEC, tensors, layout=descriptor, max_requests=3)


def read(tensors, _layer, part, block, row):
    """The bytes of all heads of a row, as an owner of such pages indexes them."""
    codes, scales, values = (kvcore.to_numpy(one)[block] for one in tensors)
    if part == "value":
        return values.reshape(HEADS, 2, 64, 4)[:, row // 4, :, row % 4]
    own = scales.reshape(HEADS, 4, 2)[:, row % 4, row // 4]
    return np.concatenate([codes.reshape(ROWS, HEADS, 16)[row], own[:, None]], axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_chunks_are_requests(kind, rng):
    tensors = memory(kind)
    cache = adopted(tensors, from_json(to_json(RIGHT)))
    own = kvcore.create_cache(SPEC, backend=KINDS[kind], max_requests=3, max_tokens=128)
    requests = [cache.admit(blocks=[5, 2, 3]), cache.admit(blocks=[6, 1])]
    others = [own.admit() for _ in requests]
    for where, (one, other) in ((cache, requests), (own, others)):
        stories.tell(where, {one: TOKENS[:13], other: TOKENS[30:35]})
        stories.fail(where, {one: TOKENS[13:19]})
        stories.tell(where, {one: TOKENS[13:17], other: TOKENS[35:44]})
        where.truncate(one, 11)
        stories.tell(where, {one: TOKENS[11:18]})
    assert cache.digest(requests) == own.digest(others)
    for request in requests:
        cache.compare(request, lambda *place: read(tensors, *place))
    queries, rows = (rng.standard_normal((1, heads, DIM)).astype(np.float32) for heads in (4, HEADS))
    found = []
    for where, one in ((cache, requests[0]), (own, others[0])):
        with where.step({one: 1}) as step:
            step.layer(0).append_kv(rows, rows)
            found.append(kvcore.to_numpy(step.layer(0).attend(queries).out))
    np.testing.assert_allclose(*found, atol=1e-6)
    # Out and back again, to other blocks; those that nobody has are as they were.
    left = own.import_request(cache.export_request(requests[1]))
    assert own.digest([left]) == own.digest([others[1]])
    cache.release(requests[1])
    again = cache.import_request(own.export_request(others[0]), into=cache.admit(blocks=[1, 6, 4]))
    assert cache.digest([again]) == own.digest([others[0]])
    cache.compare(again, lambda *place: read(tensors, *place))
    assert all((kvcore.to_numpy(one)[0] == 0xFF).all() for one in tensors)


WRONG = {
    "chunks that a block's rows do not fill": ({"chunk_rows": 3}, 1, "chunks that 8 rows"),
    "chunks of more rows than a block has": ({"chunk_rows": 16}, 1, "chunks that 8 rows"),
    "chunks of no rows": ({"chunk_rows": 0}, 1, "chunks of 0 rows"),
    "chunks of fewer than none": ({"chunk_rows": -4}, 1, "chunks of -4 rows"),
    "chunks in one another": ({"chunk": 2}, 1, "bytes from a"),
    "chunks in one place": ({"chunk": 0}, 1, "0 bytes from a chunk"),
    "chunks backwards": ({"chunk": -1}, 1, "-1 bytes from a chunk"),
    "rows in one another": ({"token": 1}, 1, "bytes from a"),
    "heads in one another": ({"head": ROWS - 1}, 1, "7 bytes from a head"),
    "blocks in one another": ({"block": ROWS * HEADS - 1}, 1, "15 bytes from a block"),
    "rows behind the tensor": ({"offset": 1}, 1, "bytes 1 to 129"),
    "bytes in one place": ({"piece": 0}, 2, "0 bytes from a piece"),
    "pieces that are no parts": ({"piece_bytes": 3}, 2, "pieces of 3 bytes"),
    "pieces of fewer bytes than none": ({"piece_bytes": -1}, 2, "pieces of -1 bytes"),
    "bytes of other rows": ({"piece": 3}, 2, "bytes from a"),
    "bytes behind the tensor": ({"piece": 5, "chunk": 320, "head": 640}, 2, "bytes"),
    "values in the keys' tensor": ({"tensor": "0"}, 2, "tensor '0'|in the same bytes"),
    "scales among the values": ({"tensor": "2", "block": ROWS * HEADS * 64}, 1, "in the same bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chunks_are_refused(name):
    changes, which, match = WRONG[name]
    some = list(RIGHT.lines)
    some[which] = msgspec.structs.replace(some[which], **changes)
    with pytest.raises(SpecError, match=match):
        adopted(memory("numpy"), msgspec.structs.replace(RIGHT, lines=some))


def shown():
    """Descriptors of places that could be right, and are another owner's."""
    chunked, split = RIGHT.lines[1:]
    yield 1, msgspec.structs.replace(chunked, chunk_rows=2, token=4)
    yield 1, msgspec.structs.replace(chunked, chunk_rows=0, chunk=0, token=1)
    yield 1, msgspec.structs.replace(chunked, token=1, chunk=4)
    yield 1, msgspec.structs.replace(chunked, token=4, chunk=2, head=1)
    yield 2, msgspec.structs.replace(split, token=64, piece_bytes=0, piece=0)
    yield 2, msgspec.structs.replace(split, chunk_rows=0, chunk=0, token=64, piece_bytes=0, piece=0)
    yield 2, msgspec.structs.replace(split, chunk_rows=2, chunk=128, piece=2)
    yield 2, msgspec.structs.replace(split, head=256, chunk=512)


@pytest.mark.parametrize("number", range(8))
def test_wrong_chunks_that_could_be_right_show_when_compared(number):
    which, line = list(shown())[number]
    tensors = memory("numpy")
    right = adopted(tensors)
    request = right.admit(blocks=[3, 1])
    stories.tell(right, {request: TOKENS[:13]})
    some = [line if place == which else one for place, one in enumerate(RIGHT.lines)]
    wrong = adopted(tensors, msgspec.structs.replace(RIGHT, lines=some))
    other = wrong.admit(blocks=[3, 1], length=13)
    assert wrong.digest([other]) != right.digest([request])
    with pytest.raises(ShapeError, match="other bytes"):
        wrong.compare(other, lambda *place: read(tensors, *place))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_a_block_with_planes_of_their_own(kind, rng):
    """Index keys in pages smaller than a block, each with all its values before all its scales."""
    layer = LayerSpec(
        entries=Entries(dim=8, ratio=2, format="fp32"),
        index_keys=IndexKeys(dim=128, ratio=2, heads=2, topk=2, format="index_fp4_68"),
    )
    spec = CacheSpec(layers=[layer], block_tokens=32)
    tensors = [np.zeros((5, 16, 8), np.float32), np.zeros((5, 4, 4, 68), np.uint8)]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        tensors = [torch.from_numpy(one) for one in tensors]
    layout = {"entries": "NL_X_NB_BS_HS", "index_keys": "NL_X_NB_NC_BSV_BSS"}
    cache = kvcore.adopt(spec, tensors, layout=layout)
    own = kvcore.create_cache(spec, backend=KINDS[kind], max_requests=1, max_tokens=128)
    request = own.admit()
    with own.step({request: 70}) as step:
        step.layer(0).store_entries(*(rng.standard_normal((35, dim)).astype(np.float32) for dim in (8, 128)))
    moved = cache.import_request(own.export_request(request), into=cache.admit(blocks=[4, 1, 2]))
    assert cache.digest([moved]) == own.digest([request])
    with own.step({request: 0}) as step:
        rows = kvcore.to_numpy(step.layer(0).gather_rows("index_keys").rows)[0]
    for number in range(35):
        page = kvcore.to_numpy(tensors[1])[[4, 1, 2][number // 16], number % 16 // 4].reshape(-1)
        at = number % 4
        assert (np.concatenate([page[at * 64 :][:64], page[256 + at * 4 :][:4]]) == rows[number]).all()
    # Chunks are pages of some rows of a block, and of nothing else.
    for shape in ((5, 3, 4, 68), (5, 16, 1, 68), (5, 4, 3, 68)):
        with pytest.raises(ShapeError, match=r"chunks|along BS"):
            describe(spec, [np.zeros((5, 16, 8), np.float32), np.zeros(shape, np.uint8)], layout)
