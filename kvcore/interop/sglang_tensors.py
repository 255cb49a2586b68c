"""The memory of SGLang's pools as ``kvcore.adopt`` takes it: views of their buffers, and the layout's name.

SGLang is not imported; names and layouts are those of 0.5.23. A pool's page of latent rows is padded to a multiple of
576 bytes, and has all rows' values before all rows' scales. Rows of windows lie where ``full_to_swa_index_mapping``
says, which the allocator writes as it gives slots out; states of an overlapping compressor are a ring in each page of
windows, those of others a ring for each request slot, or one row where they are compressed as they come.
"""

from typing import Any, NamedTuple

from kvcore.adoption.cache import describe
from kvcore.adoption.descriptor import Descriptor, IndexMap, Lines
from kvcore.errors import SpecError
from kvcore.interop.sglang_pools import ONLINE, coded, spec_from
from kvcore.spec import CacheSpec, Field

VALUES_AND_SCALES = {"DeepSeekV4SingleKVPool": "kv_buffer", "DeepSeekV4IndexerPool": "index_k_with_scale_buffer"}
"""Pools of pages -> the attribute with a tensor [pages, bytes] for every layer."""


PLANES, INTERLEAVED = "NL_X_NB_BSV_BSS", "NL_X_NB_BS_HS"
"""Layouts of pages: values before scales, or each row with its own."""

CHUNKS = "NL_X_NB_NC_BSV_BSS"
"""Layout of pages of the full pool that have several of a smaller one."""

WINDOWS = "full_to_swa"
"""Name of the map of tokens to slots of the windows' pool."""


WORD = 4
"""Scales of a row of MXFP8 that lie in chunks."""

GROUP = 4
"""Rows whose scales of values in NVFP4 lie together."""

STATES = "states"
"""Name of the map of requests to slots of states."""

PAGES = "virtual_to_physical"
"""Name of the map of pages to where they lie in the unified memory pool."""

UNIFIED = {
    "UnifiedMHATokenToKVPool": ("kv", ("k_buffer", "v_buffer"), "TWO_X_NL_X_NBBS_NH_HS"),
    "UnifiedMLATokenToKVPool": ("entries", ("kv_buffer",), "NL_X_NBBS_ONE_HS"),
}
"""Pools of the unified memory pool -> role, attributes with a tensor for every layer, layout."""


class Mapped(NamedTuple):
    """What ``kvcore.adopt(spec, tensors, layout=descriptor, maps=maps)`` takes."""

    tensors: list[Any]
    descriptor: Descriptor
    maps: dict[str, Any]


def tensors_from(pool: Any) -> tuple[list[Any], dict[str, str] | Descriptor]:
    """(tensors, layout) of a pool of keys and values, of latent rows, or of those with index keys, for ``adopt``.

    Args:
        pool: ``MHATokenToKVPool``, ``MLATokenToKVPool``, their kinds with codes in MXFP8 and FP4, or
            ``DSATokenToKVPool``, whose spec ``spec_from`` gives.

    Returns:
        Views, in the spec's order; blocks are the pool's pages, block n the slots ``n * page_size`` and following.
        Of codes whose scales lie in tensors of their own the layout is a descriptor.

    Raises:
        SpecError: another pool, or one that lays its memory out otherwise.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> import numpy as np
        >>> buffers = {"k_buffer": [np.zeros((80, 2, 8))], "v_buffer": [np.zeros((80, 2, 8))]}
        >>> pool = type("MHATokenToKVPool", (Some,), {})(page_size=16, kv_cache_layout="nhd", **buffers)
        >>> tensors, layout = tensors_from(pool)
        >>> layout, [one.shape for one in tensors[0]]
        ({'kv': 'TWO_X_NL_X_NBBS_NH_HS'}, [(80, 2, 8)])
    """
    kind = type(pool).__name__
    if coded(pool) is not None:
        return _of_codes(pool)
    if kind == "MHATokenToKVPool":
        laid = pool.kv_cache_layout
        if laid not in ("nhd", "hnd") or getattr(pool, "k_scale_buffer", None) is not None:
            raise _other(laid, "nhd or hnd, whose rows are not quantised")
        if laid == "nhd":
            return [list(pool.k_buffer), list(pool.v_buffer)], {"kv": "TWO_X_NL_X_NBBS_NH_HS"}
        # Pages [heads, rows, channels] as rows of heads, which lie where they lie.
        views = [[held.swapaxes(1, 2) for held in buffers] for buffers in (pool.k_buffer, pool.v_buffer)]
        return views, {"kv": "TWO_X_NL_X_NB_BS_NH_HS"}
    if kind == "MLATokenToKVPool":
        return list(pool.kv_buffer), {"entries": "NL_X_NBBS_ONE_HS"}
    if kind == "DSATokenToKVPool":
        keys = _pages(pool.index_k_with_scale_buffer, pool.page_size)
        layout = {"entries": "NL_X_NBBS_ONE_HS", "index_keys": PLANES}
        return [one for pair in zip(pool.kv_buffer, keys, strict=True) for one in pair], layout
    reasons = {
        "SWAKVPool": "rows of sliding layers lie where full_to_swa_index_mapping says, which mapped_from gives too",
        "DeepSeekV4TokenToKVPool": "windows lie where full_to_swa_index_mapping says, which mapped_from gives too",
        "UnifiedMHATokenToKVPool": "pages lie where its allocator's table says, which unified_from gives too",
        "UnifiedMLATokenToKVPool": "pages lie where its allocator's table says, which unified_from gives too",
        "UnifiedSWAKVPool": "pages lie where its allocators' tables say, which unified_from gives too",
        "HybridLinearKVPool": "states belong to slots of the request pool, which hybrid_from takes too",
        "UnifiedHybridLinearKVPool": "states belong to slots of the request pool, which hybrid_from takes too",
    }
    allowed = "MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool, and those with codes in MXFP8, FP4 or NVFP4"
    hint = f"Refused: {reasons[kind]}." if kind in reasons else ""
    raise SpecError(got=kind, where="tensors_from", allowed=allowed, hint=hint)


def mapped_from(pool: Any, spec: CacheSpec) -> Mapped:
    """Tensors, descriptor and maps of a pool with sliding windows, for ``adopt``.

    Args:
        pool: ``SWAKVPool`` of keys and values, or ``DeepSeekV4TokenToKVPool``, with the mapping that an allocator
            registered.
        spec: ``spec_from(pool, ...)``.

    Returns:
        Views; blocks are pages of the full pool, and a request's ``slot`` is SGLang's ``req_pool_idx``.

    Raises:
        SpecError: another pool, one that keeps windows by request, or without a mapping.
    """
    kind = type(pool).__name__
    if kind not in ("SWAKVPool", "DeepSeekV4TokenToKVPool"):
        raise SpecError(got=kind, where="mapped_from", allowed="SWAKVPool, DeepSeekV4TokenToKVPool")
    array = pool.full_to_swa_index_mapping
    if array is None or pool.swa_kv_pool is None:
        got = f"{kind} without {'full_to_swa_index_mapping' if array is None else 'pages of windows'}"
        allowed = "a pool of paged windows whose allocator has registered its mapping"
        raise SpecError(got=got, where="mapped_from", allowed=allowed)
    tensors, layout = _of_heads(pool) if kind == "SWAKVPool" else _of_v4(pool, spec)
    page = pool.page_size if kind == "SWAKVPool" else pool.swa_page_size
    # Slot 0 is nobody's: what is mapped there has no row. Both pools page in step, from rows 0 on.
    said = IndexMap(name=WINDOWS, of="token", count=len(array), page=page, first=page if page > 1 else 1, aligned=True)
    descriptor = describe(spec, tensors, layout, maps=[said])
    return Mapped(tensors, descriptor, {WINDOWS: array})


def unified_from(pool: Any, allocator: Any, spec: CacheSpec | None = None) -> Mapped:
    """Tensors, descriptor and maps of keys and values, or of latent rows, in SGLang's unified memory pool.

    All layers of a slot lie together, and pages where tables of the allocator's say, which change as it moves them to
    make room for others. A request's blocks are pages as the scheduler numbers them; sliding layers have a table of
    their own for the same numbers.

    Args:
        pool: ``UnifiedMHATokenToKVPool``, ``UnifiedMLATokenToKVPool`` or ``UnifiedSWAKVPool``.
        allocator: its ``MultiEndedAllocator``, or the ``UnifiedSWATokenToKVPoolAllocator`` of both.
        spec: ``spec_from(pool, window=...)``; None where the pool says all of it.

    Raises:
        SpecError: another pool or allocator, or slots that several ranks share.
    """
    kind = type(pool).__name__
    if kind not in UNIFIED and kind != "UnifiedSWAKVPool":
        raise SpecError(got=kind, where="unified_from", allowed=", ".join((*UNIFIED, "UnifiedSWAKVPool")))
    page = pool.page_size
    if kind == "UnifiedSWAKVPool":
        both: list[Any] = [getattr(allocator, name, None) for name in ("full_attn_allocator", "swa_attn_allocator")]
        if None in both:
            allowed = f"the UnifiedSWATokenToKVPoolAllocator of a {kind}"
            raise _no_allocator(allocator, "unified_from", allowed)
        full, sliding = (_table(one, page, "unified_from") for one in both)
        spec = spec_from(pool) if spec is None else spec
        said = [
            IndexMap(name=PAGES, of="block", count=len(full), first=both[0].min_page_index),
            IndexMap(
                name=WINDOWS,
                of="page",
                count=len(sliding),
                page=page,
                first=both[1].min_page_index * page,
                aligned=True,
            ),
        ]
        tensors, layout = _of_heads(pool)
        return Mapped(tensors, describe(spec, tensors, layout, maps=said), {PAGES: full, WINDOWS: sliding})
    table = _table(allocator, page, "unified_from")
    spec = spec_from(pool) if spec is None else spec
    role, attributes, name = UNIFIED[kind]
    lists = [list(getattr(pool, attribute)) for attribute in attributes]
    said = [IndexMap(name=PAGES, of="block", count=len(table), first=allocator.min_page_index)]
    tensors = lists if len(lists) > 1 else lists[0]
    return Mapped(tensors, describe(spec, tensors, {role: f"blocks {PAGES} {name}"}, maps=said), {PAGES: table})


def hybrid_from(pool: Any, requests: Any, allocator: Any = None) -> Mapped:
    """Tensors, descriptor and maps of a hybrid linear model's pools: keys and values, states, a convolution's inputs.

    A request's ``slot`` is SGLang's ``req_pool_idx``; in the unified memory pool it is the number that
    ``req_index_to_mamba_index_mapping`` has for that, whose place a table of the allocator's says.

    Args:
        pool: ``HybridLinearKVPool`` or ``UnifiedHybridLinearKVPool``, of keys and values or of latent rows.
        requests: its ``HybridReqToTokenPool``.
        allocator: of the full layers in the unified memory pool.

    Raises:
        SpecError: another pool or allocator, or states with more beside them.
    """
    kind = type(pool).__name__
    if kind not in ("HybridLinearKVPool", "UnifiedHybridLinearKVPool"):
        raise SpecError(got=kind, where="hybrid_from", allowed="HybridLinearKVPool, UnifiedHybridLinearKVPool")
    spec, full, states = spec_from(pool), pool.full_kv_pool, pool.mamba_pool.mamba_cache
    unified = kind.startswith("Unified")
    table = requests.mamba_v2p_table if unified else requests.req_index_to_mamba_index_mapping
    # Slot 0 is nobody's.
    said = [IndexMap(name=STATES, of="slot", count=len(table), first=1)]
    maps = {STATES: table}
    words = ""
    if unified:
        maps[PAGES] = _table(allocator, full.page_size, "hybrid_from")
        said.append(IndexMap(name=PAGES, of="block", count=len(maps[PAGES]), first=allocator.min_page_index))
        words = f"blocks {PAGES} "
    by_heads = hasattr(full, "k_buffer")
    layout = {
        "kv": f"{words}NL_X_TWO_X_NB_BS_NH_HS",
        "entries": f"{words}{INTERLEAVED}",
        "state": f"rings {STATES} NL_X_NB_BS_NH_HS",
        "conv": f"rings {STATES} NL_X_NB_HS_BS",
    }
    tensors: list[Any] = []
    held: list[Any] = [full.k_buffer, full.v_buffer] if by_heads else [full.kv_buffer]
    recurrent = {number: place for place, number in enumerate(pool.mamba_pool.mamba_layer_ids)}
    for number in sorted({*pool.full_attention_layer_id_mapping, *recurrent}):
        if number in recurrent:
            state, inputs = states.temporal[recurrent[number]], states.conv[0][recurrent[number]]
            # Each slot has one state, which is all of a head's side by side.
            tensors += [state.view(*state.shape[:2], -1)[:, None], inputs]
            continue
        place = pool.full_attention_layer_id_mapping[number]
        pages = [buffers[place].unflatten(0, (-1, full.page_size)) for buffers in held]
        tensors.append(pages if by_heads else pages[0][:, :, 0])
    return Mapped(tensors, describe(spec, tensors, layout, maps=said), maps)


def _table(allocator: Any, page: int, where: str) -> Any:
    """An allocator's table of pages to where they lie.

    Raises:
        SpecError: it has none, or its pages are of other slots than the pool's.
    """
    if not hasattr(allocator, "virtual_to_physical"):
        raise _no_allocator(allocator, where, "the MultiEndedAllocator of the pool's keys and values, or latent rows")
    if allocator.page_size != page:
        got = f"pages of {allocator.page_size} tokens in {page} slots"
        raise SpecError(got=got, where=where, allowed="a slot for every token: each rank has all of them")
    return allocator.virtual_to_physical


def _no_allocator(allocator: Any, where: str, allowed: str) -> SpecError:
    got = "no allocator" if allocator is None else type(allocator).__name__
    return SpecError(got=got, where=f"{where}: allocator", allowed=allowed)


def _of_codes(pool: Any) -> tuple[list[Any], Descriptor]:
    """Codes and scales of every layer, by slots, and where fields of rows lie in them."""
    spec, native = spec_from(pool), getattr(pool, "native_k_scale_buffer", None) is not None
    if native and pool.k_scale_buffer is not None:
        allowed = "those of one backend's layout: of a row that is written here both would have to be"
        raise SpecError(got="scales of rows in two places", where="tensors_from", allowed=allowed)
    if native:
        keys, values = pool.native_k_scale_buffer, pool.native_v_scale_buffer
        both = [("key", pool.k_buffer, keys), ("value", pool.v_buffer, values)]
    elif hasattr(pool, "k_buffer"):
        both = [("key", pool.k_buffer, pool.k_scale_buffer), ("value", pool.v_buffer, pool.v_scale_buffer)]
    else:
        both = [("", pool.kv_buffer, pool.kv_scale_buffer)]
    tensors: list[Any] = []
    lines: list[Lines] = []
    for layer, role, component in spec.components():
        for part, (name, codes, scales) in zip(component.parts, both, strict=True):
            for field, held in zip(part.format.fields, (codes[layer], scales[layer]), strict=True):
                place = _chunked if held.ndim > 4 else _by_slots
                if held.ndim == 4:
                    place = _turned if name == "value" else _by_heads
                which = {"layer": layer, "role": role, "part": name, "field": field.name}
                steps = place(held, field, part.heads, pool.page_size)
                lines.append(Lines(**which, tensor=str(len(tensors)), offset=0, **steps))
                tensors.append(held)
    blocks = len(tensors[0]) // pool.page_size
    return tensors, Descriptor(block_tokens=pool.page_size, blocks=blocks, lines=lines)


def _by_slots(held: Any, field: Field, heads: int, page: int) -> dict[str, Any]:
    """Steps of a field of all heads of a slot, one slot after another."""
    slot = held.stride(0) * held.element_size()
    if slot != heads * field.nbytes or not held.is_contiguous():
        got = f"{field.name} of shape {tuple(held.shape)}"
        raise SpecError(got=got, where="tensors_from", allowed=f"{heads * field.nbytes} bytes a slot")
    return {"block": page * slot, "token": slot, "head": field.nbytes}


def _chunked(held: Any, field: Field, heads: int, page: int) -> dict[str, Any]:
    """Steps of MXFP8's scales in pages [heads, rows of a chunk, chunks, scales]: row r is in chunk r div 32."""
    _, _, rows, chunks, scales = held.shape
    # Its kernels move four scales as one word, and know no others.
    if held.shape[1:] != (heads, rows, page // rows, field.nbytes) or scales != WORD or not held.is_contiguous():
        got = f"{field.name} of shape {tuple(held.shape)}"
        allowed = f"pages of [{heads}, rows, chunks, {WORD}]: heads of {WORD * 32} channels"
        raise SpecError(got=got, where="tensors_from", allowed=allowed)
    line = chunks * scales
    return {
        "block": heads * page * scales,
        "token": line,
        "head": page * scales,
        "chunk_rows": rows,
        "chunk": scales,
    }


def _by_heads(held: Any, field: Field, heads: int, page: int) -> dict[str, Any]:
    """Steps of NVFP4's scales of keys in pages [heads, rows, scales], as TensorRT-LLM's kernels read them."""
    if held.shape[1:] != (heads, page, field.nbytes) or field.nbytes % GROUP or not held.is_contiguous():
        got = f"{field.name} of shape {tuple(held.shape)}"
        raise SpecError(got=got, where="tensors_from", allowed=f"pages of [{heads}, {page}, {field.nbytes}]")
    return {"block": heads * page * field.nbytes, "token": field.nbytes, "head": page * field.nbytes}


def _turned(held: Any, field: Field, heads: int, page: int) -> dict[str, Any]:
    """The same of values: the scales of four rows lie scale by scale, each of all four side by side."""
    return {
        **_by_heads(held, field, heads, page),
        "chunk_rows": GROUP,
        "chunk": GROUP * field.nbytes,
        "token": 1,
        "piece_bytes": 1,
        "piece": GROUP,
    }


def _of_heads(pool: Any) -> tuple[list[Any], dict[str, str]]:
    """(keys and values of every layer, layouts) of a ``SWAKVPool``, or of one in the unified memory pool."""
    unified = type(pool).__name__.startswith("Unified")
    words = {False: f"blocks {PAGES} " if unified else "", True: f"pages {WINDOWS} "}
    tensors: list[Any] = []
    layout: dict[str, str] = {}
    for number, (place, sliding) in sorted(pool.layers_mapping.items()):
        held = pool.swa_kv_pool if sliding else pool.full_kv_pool
        (keys, values), _ = ([held.k_buffer, held.v_buffer], None) if unified else tensors_from(held)
        pair = [keys[place], values[place]]
        rows = unified or held.kv_cache_layout == "nhd"
        tensors.append([one.unflatten(0, (-1, held.page_size)) for one in pair] if rows else pair)
        layout[f"{number}.kv"] = f"{words[sliding]}NL_X_TWO_X_NB_BS_NH_HS"
    return tensors, layout


def _of_v4(pool: Any, spec: CacheSpec) -> tuple[list[Any], dict[str, str]]:
    """(tensors of every component, layouts) of a ``DeepSeekV4TokenToKVPool``.

    Raises:
        SpecError: windows in pages of another size than the allocator's.
    """
    if pool.swa_kv_pool.page_size != pool.swa_page_size:
        got = f"pages of windows of {pool.swa_kv_pool.page_size} rows"
        raise SpecError(got=got, where="mapped_from", allowed=f"{pool.swa_page_size}, as the allocator gives out")
    tensors: list[Any] = []
    layout = {
        "window": f"pages {WINDOWS} {_laid(pool.swa_kv_pool)}",
        "state": "rings NL_X_NB_BS_NH_HS",
    }
    windows = pages_of(pool.swa_kv_pool)
    # What compressed pools have more is a page of another size, for nobody.
    blocks = (len(pool.full_to_swa_index_mapping) - 1) // pool.page_size
    for number, layer in enumerate(spec.layers):
        item = pool.layer_mapping[number]
        for role, component in layer.components():
            if component.shared_from is not None:
                continue
            if role == "window":
                tensors.append(windows[number])
            elif role in ("entries", "index_keys"):
                held = (pool.kv_pools if role == "entries" else pool.index_pools)[item.compress_ratio]
                rows = spec.block_tokens // component.tokens_per_row
                chunks, rest = divmod(rows, held.page_size)
                if rest or getattr(held, "index_k_page8", False):
                    got = f"layers[{number}].{role} in pages of {held.page_size} rows"
                    got += "" if rest else ", eight of which lie together"
                    allowed = f"pages that {rows} rows, those of a page of the full pool, fill"
                    raise SpecError(got=got, where="mapped_from", allowed=allowed)
                pages = pages_of(held)[item.compress_layer_id]
                layout[f"{number}.{role}"] = _laid(held)
                if chunks > 1:
                    # DeepSeek-V4.1's index keys: a page of the full pool has a run of theirs.
                    pages = pages[: blocks * chunks].unflatten(0, (-1, chunks))
                    layout[f"{number}.{role}"] = CHUNKS
                tensors.append(pages[:blocks])
            else:
                indexers = role == "index_tail"
                held = pool.indexer_compress_state_pools if indexers else pool.compress_state_pools
                tensors.append(rings_of(held[number]))
                if role != ONLINE:
                    word = "rings" if held[number].request_scoped else f"pages {WINDOWS}"
                    layout[f"{number}.{role}"] = f"{word} NL_X_NB_BS_HS"
    return tensors, layout


def _laid(pool: Any) -> str:
    """The layout of one of DeepSeek-V4's pools: a page's scales behind its values, or each row's behind its own."""
    name = getattr(pool, "kv_layout", None)
    return INTERLEAVED if str(getattr(name, "value", name)).endswith("_new") else PLANES


def pages_of(pool: Any) -> list[Any]:
    """Pages [pages, rows, bytes of a row] of every layer of one of DeepSeek-V4's pools.

    They are ``NL_X_NB_BSV_BSS``, and ``NL_X_NB_BS_HS`` where the pool's layout interleaves (``v41_new``).

    Args:
        pool: ``DeepSeekV4SingleKVPool`` (windows or entries) or ``DeepSeekV4IndexerPool``.

    Raises:
        SpecError: another pool, or index keys in the layout of AMD's kernels.
    """
    kind = type(pool).__name__
    buffers = getattr(pool, VALUES_AND_SCALES.get(kind, ""), None)
    if buffers is None:
        raise _other(kind, " or ".join(VALUES_AND_SCALES))
    return _pages(buffers, pool.page_size, pool.get_bytes_per_token())


def rings_of(pool: Any) -> Any:
    """Rings [rings, rows, width] of a ``CompressStatePool``, for ``"rings NL_X_NB_BS_HS"``.

    Row p of a request's ring is ``req_pool_idx * ring_size + p % ring_size``; where a pool is not of requests, that of
    a page of windows ``page * ring_size + p % ring_size``. Of states that SGLang compresses as they come it is one row
    of the largest score so far, the sum of weights, and the weighted values: [slots, 1, 3, width] for
    ``"rings NL_X_NB_BS_NH_HS"``; those of drafts, behind them, are left out.

    Raises:
        SpecError: another pool.
    """
    if type(pool).__name__ != "CompressStatePool":
        raise _other(type(pool).__name__, "CompressStatePool")
    rows = pool.kv_score_buffer.kv_score
    slots = (pool._logical_size if pool.online else len(rows)) - 1
    slots //= pool.ring_size
    shape = (slots, 1, 3, rows.shape[1] // 3) if pool.online else (slots, pool.ring_size, rows.shape[1])
    return rows[: slots * pool.ring_size].reshape(shape)


def _pages(buffers: Any, rows: int, size: int | None = None) -> list[Any]:
    """Views [pages, rows, bytes of a row] of pages [pages, bytes], which may be longer."""
    found: list[Any] = []
    for held in buffers:
        width = held.shape[1] // rows if size is None else size
        found.append(held[:, : rows * width].unflatten(1, (rows, width)))
    return found


def _other(got: Any, allowed: str) -> SpecError:
    return SpecError(got=got, where="tensors_from", allowed=allowed)
