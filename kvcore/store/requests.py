"""Requests of a cache in a store: a page for every full block under the key of its prefix, and states beside them.

A block's page has the rows of all its components in canonical order; a state, those of windows and tails at a block's
end. Whoever asks with the same tokens, spec and salt finds them: other layouts, backends and processes too.
"""

# pyright: reportPrivateUsage=false

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcore.cache import far as far_rows
from kvcore.cache.cache import Cache
from kvcore.cache.far import Far
from kvcore.counts import check_count
from kvcore.errors import RequestError, ShapeError, SpecError
from kvcore.portable.record import RequestRecord
from kvcore.portable.rows import Content, HostRows, owned, read_rows, write_rows
from kvcore.requests.manager import Request
from kvcore.requests.prefix import chain, point_key, seed_of
from kvcore.requests.tokens import check_salt, token_ids
from kvcore.spec import CacheSpec, Component
from kvcore.spec.sizes import row_bytes
from kvcore.step import StepRequest
from kvcore.store.pages import BlockPages, Key
from kvcore.store.store import BlockStore, abouts


def keys_of(spec: CacheSpec, tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    """The keys of all full blocks of some tokens."""
    return list(chain(seed_of(spec), tokens, spec.block_tokens, salt))


def save(store: BlockStore, cache: Cache, request: Request, tokens: Any, *, salt: str | None = None) -> int:
    """Put a request's full blocks into a store, those that are not there yet, and the states that it has.

    What is there is not read again.

    Args:
        store: where.
        cache: whose request.
        request: of at least one block; windows and tails can be restored where a block ends at its present length, or
            at a checkpoint that is kept.
        tokens: its ids.
        salt: under which alone they are found.

    Returns:
        Tokens of full blocks; ``find`` says how many are there, where a disk may have refused some.

    Raises:
        ShapeError: fewer ids than the request has tokens. RequestError: stale, foreign, converted, or of an approximate
            replay.
    """
    spec, salt = cache.spec, check_salt(salt, "store.save: salt")
    ids = token_ids(tokens, "store.save: tokens")
    state = cache._state

    form, rings, block = BlockPages(spec), _rings(spec), spec.block_tokens

    def read(held: Any) -> tuple[list[bytes], list[int], list[Any], dict[bytes, Content]]:
        held.manager.check(request)
        held.check_whole(request, "store.save")
        if request.converted:
            raise RequestError(
                got="a request that was converted",
                where="store.save",
                allowed="rows that the tokens have in these formats: others would find them under the tokens' keys",
                hint="Compute the prompt in this cache, and save that.",
            )
        if request.approximate:
            raise RequestError(
                got="a request that comes of an approximate replay",
                where="store.save",
                allowed="rows that an uninterrupted run has: others would find them under the tokens' keys",
                hint="Its blob says what it is: cache.export_request.",
            )
        row = held.row(request)
        if len(ids) < row.length:
            raise ShapeError(got=f"{len(ids)} ids", where="store.save: tokens", allowed=f"{row.length}, the request's")
        keys = keys_of(spec, ids[: row.length], salt)
        new = [number for number, key in enumerate(keys) if not store.has(key)]
        some = StepRequest(row.slot, len(new) * block, 0, tuple(row.blocks[number] for number in new), 0)
        pages = form.read(state.ops, state.pools, some) if new else []
        states: dict[bytes, Content] = {}
        for length, kept in held.kept_states(request):
            if rings and _aligned(spec, length):
                states[point_key(keys[length // block - 1], [], salt)] = kept
        if rings and _aligned(spec, row.length):
            key = point_key(keys[-1], [], salt)
            if not store.has(key):
                states[key] = read_rows(state.ops, state.pools, row, row.length, growth="slot")
        return keys, new, pages, states

    keys, new, pages, states = cache.exclusive("store.save", read)
    for place, number in enumerate(new):
        store.put(keys[number], pages[place], abouts(keys, ids, block, [number])[0])
    for key, kept in states.items():
        if not store.has(key):
            store.put(key, b"".join(kept[one].rows.tobytes() for one in rings))
    return len(keys) * block


def find(store: BlockStore, spec: CacheSpec, tokens: Any, *, salt: str | None = None) -> int:
    """How many of the tokens a store or its peers have, as far as can be said without reading a page."""
    ids, salt = token_ids(tokens, "store.find: tokens"), check_salt(salt, "store.find: salt")
    return _found(store, spec, keys_of(spec, ids, salt), salt) * spec.block_tokens


def load(
    store: BlockStore,
    cache: Cache,
    tokens: Any,
    *,
    salt: str | None = None,
    into: Request | None = None,
    far: bool = False,
) -> Request | None:
    """A request with the longest prefix that a store has, verified; None where it has none.

    A page that is damaged is not used, nor any behind it.

    Args:
        store: from where.
        cache: into which.
        tokens: the prompt's ids. All of them may be there: give one less to have the last one computed.
        salt: as saved.
        into: a request without tokens to fill, of an adopted cache with its blocks.
        far: leave the entries of layers with an indexer in the host's memory, verified. The request goes on at once;
            ``layer.fetch(picks)`` brings what a step's queries picked, and ``bring`` the rest.

    Raises:
        OutOfSlots, OutOfBlocks: no room. SpecError: ``far`` where rows have check words, or are somebody else's.
        Nothing is changed.
    """
    if far and (cache._state.canary is not None or into is not None):
        raise SpecError(
            got="rows that stay in the host's memory",
            where="store.load: far",
            allowed="a cache without canary, and no into",
        )
    spec, salt = cache.spec, check_salt(salt, "store.load: salt")
    ids = token_ids(tokens, "store.load: tokens")
    keys = keys_of(spec, ids, salt)
    form, rings = BlockPages(spec), _rings(spec)
    pages: list[memoryview] = []
    count = _found(store, spec, keys, salt)
    about = dict(zip(keys[:count], abouts(keys, ids, spec.block_tokens, range(count)), strict=True))
    if count:
        store.fetch([*keys[:count], *([point_key(keys[count - 1], [], salt)] if rings else [])], about)
    while count:
        while len(pages) < count:
            key = keys[len(pages)]
            page = _sized(store.get(key, about[key]), form.nbytes)
            if page is None:
                break
            pages.append(page)
        held: Any = b""
        if rings and len(pages) == count:
            held = _sized(store.get(point_key(keys[count - 1], [], salt)), _state_bytes(spec, rings, count))
        if len(pages) >= count and held is not None:
            break
        count = _found(store, spec, keys[: min(count - (held is None), len(pages))], salt)
        pages = pages[:count]
    else:
        return None
    length = count * spec.block_tokens
    state, pages = cache._state, pages[:count]
    rows = _state(rings, held, length)
    left = RequestRecord(length=length, floor=state.floor(length), tokens=ids[:length], salt=salt, checkpoints=[])
    behind, layers = None, {key for key in form.keys if far and _is_selected(spec, key)}
    if layers:
        behind = _left_behind(spec, form.rows(pages, set(form.keys) - layers), length)

    def write(ops: Any, pools: Any, row: StepRequest) -> Any:
        return write_rows(ops, form.write(ops, pools, row, pages, layers), row, rows)

    shares = False if layers else None
    return cache.exclusive(
        "store.load", lambda held: held.restore(left, write, into, salt=salt, shares=shares, far=behind)
    )


def bring(cache: Cache, request: Request, most: int | None = None) -> int:
    """Bring entries of a request that ``load(..., far=True)`` left in the host's memory, between steps.

    Args:
        cache: of the request.
        request: whose; once all are there it is as any other.
        most: bytes at a time, in whole rows; None: all.

    Returns:
        Bytes that are still to come.

    Raises:
        ShapeError: ``most`` is no count. RequestError: stale or foreign. StepError: a step is open.
    """
    most = None if most is None else check_count(ShapeError, "store.bring: most", most, 0)
    return cache.exclusive("store.bring", lambda held: far_rows.bring(held, request, most))


def _is_selected(spec: CacheSpec, key: Key) -> bool:
    """Whether an indexer selects a component's rows."""
    return key[1] == "entries" and spec.all_layers[key[0]].index_keys is not None


def _left_behind(spec: CacheSpec, content: Content, length: int) -> Far:
    """The entries that an indexer selects."""
    rows = {layer: held.rows for (layer, _), held in content.items()}
    ratios = {layer: one.tokens_per_row for layer, role, one in owned(spec) if (layer, role) in content}
    return Far(rows, {layer: np.zeros(len(held), bool) for layer, held in rows.items()}, ratios, length)


def _aligned(spec: CacheSpec, length: int) -> bool:
    return length > 0 and length % spec.block_tokens == 0


def _rings(spec: CacheSpec) -> dict[Key, Component]:
    """Components in slots by (layer, role)."""
    return {(layer, role): component for layer, role, component in owned(spec) if component.growth != "block"}


def _found(store: BlockStore, spec: CacheSpec, keys: Sequence[bytes], salt: str | None) -> int:
    """Blocks that can be restored, as far as can be said without reading a page."""
    rings = _rings(spec)
    there = store.look_up([*keys, *(point_key(key, [], salt) for key in keys if rings and store.peers)])
    count = next((number for number, key in enumerate(keys) if not there(key)), len(keys))
    if rings:
        while count and not there(point_key(keys[count - 1], [], salt)):
            count -= 1
    return count


def _sized(page: memoryview | None, size: int) -> memoryview | None:
    """A page of so many bytes: others are somebody's under a key of ours."""
    return page if page is not None and len(page) == size else None


def _state_bytes(spec: CacheSpec, rings: Mapping[Key, Component], blocks: int) -> int:
    return sum(len(one.live(blocks * spec.block_tokens)) * row_bytes(one) for one in rings.values())


def _state(rings: Mapping[Key, Component], held: Any, length: int) -> dict[Key, HostRows]:
    """Rows of windows and tails at a length."""
    content: dict[Key, HostRows] = {}
    first = 0
    for key, component in rings.items():
        live, size = component.live(length), row_bytes(component)
        rows = np.frombuffer(held, np.uint8, len(live) * size, first).reshape(len(live), size).copy()
        content[key] = HostRows(rows, list(live))
        first += len(live) * size
    return content
