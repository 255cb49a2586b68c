"""Indexer scores on Hopper, in Gluon: keys go from memory to registers, and from there to the tensor cores.

A program takes one query, or some in a row of one request, and a run of keys, 64 at a time. The channels of a product
may come in any order, so a thread takes 16 bytes of a key at a time as the product wants them: four threads a key, no
exchange, no shared memory but for the queries, which are put there once, their channels in the same order. Keys of
the next tiles are read while those of this one are multiplied; before that the L2 cache is asked for them.

Nibbles become bf16 numbers, e4m3 codes fp16 numbers: both hold all of a key's. With these queries in bf16 or e4m3 are
fp16 numbers too, each head's times a power of two of its own that its weight takes back.

Which keys and calls it takes is said in ``scores``. Map: ``word_layout`` and the decoders tell the order of channels;
the kernels are last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvcore.kernels.triton.attend_codes import barrier, copy

ALL = gl.constexpr(PropagateNan.ALL)
LARGEST = gl.constexpr("""{ .reg .b32 a, b, m; and.b32 a, $1, 0x00FF00FF; prmt.b32 b, $1, 0, 0x4341;
    max.u16x2 m, a, b; prmt.b32 a, m, m, 0x1032; max.u16x2 $0, m, a; }""")
"""A word of four scales to the largest of them, in both halves of a word."""
OVER_LARGEST = gl.constexpr("""{ .reg .b32 e, z; mov.b32 z, 0; prmt.b32 e, $1, z, $3; add.u32 e, e, 0x00FD00FD;
    sub.u32 e, e, $2; max.s16x2 e, e, z; shl.b32 $0, e, 7; }""")
"""Of the scale that the last operand takes twice: 2^126 times it over the largest, a bf16 number, twice; else zero."""
PREFETCH = gl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }")
"""Have the L2 cache fetch a line, where the last operand is not zero."""


@gluon.constexpr_function
def word_layout(words):
    """Words of 64 keys: a thread has the four words of 16 bytes, of two keys 8 apart."""
    more = [[0, 16]] if words > 16 else []
    registers = [[0, 1], [0, 2], *more, [8, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, words])


@gluon.jit
def spread_nibbles(word, factor, low, high):
    """Words of eight e2m1 codes -> codes 0, 4, 1, 5, 2, 6, 3, 7 times ``factor`` (a bf16 number, twice) / 2^126, bf16.

    A code's magnitude bits, placed in a bf16 number, are its value times 2^-126. Its sign, three bits above them,
    comes to its place by a carry: what is added fills all bits between. ``low`` and ``high`` are 2^6 and 2^2, known
    when the kernel runs: then they are multiplied by, in another unit than the one that shifts and masks, the busiest.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, w;
        and.b32 a, $8, 0x000F000F;
        mad.lo.u32 a, a, $10, 0x7E007E00;
        and.b32 a, a, 0x81C081C0;
        mul.rn.bf16x2 a, a, $9;
        mov.b32 {$0, $1}, a;
        and.b32 b, $8, 0x00F000F0;
        mad.lo.u32 b, b, $11, 0x7E007E00;
        and.b32 b, b, 0x81C081C0;
        mul.rn.bf16x2 b, b, $9;
        mov.b32 {$2, $3}, b;
        shr.b32 w, $8, 8;
        and.b32 c, w, 0x000F000F;
        mad.lo.u32 c, c, $10, 0x7E007E00;
        and.b32 c, c, 0x81C081C0;
        mul.rn.bf16x2 c, c, $9;
        mov.b32 {$4, $5}, c;
        and.b32 d, w, 0x00F000F0;
        mad.lo.u32 d, d, $11, 0x7E007E00;
        and.b32 d, d, 0x81C081C0;
        mul.rn.bf16x2 d, d, $9;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
        [word, factor, low, high],
        dtype=[gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16],
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves_of(word):
    """Words of four e4m3 codes -> each as fp16."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        .reg .b32 x, y;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 x, low;
        cvt.rn.f16x2.e4m3x2 y, high;
        mov.b32 {$0, $1}, x;
        mov.b32 {$2, $3}, y;
        }
        """,
        "=h,=h,=h,=h,r",
        [word],
        dtype=[gl.float16, gl.float16, gl.float16, gl.float16],
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decoded(word, scale, low, high, M: gl.constexpr, TAKEN: gl.constexpr):
    """Keys' words and scales -> (what the product takes [64, 128], factors of their sums [64] fp32)."""
    if TAKEN == "nibbles":
        # A key's four scales are one word; its codes are taken over the largest.
        largest = gl.inline_asm_elementwise(LARGEST, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)
        group = gl.arange(0, 16, gl.SliceLayout(0, word_layout(16)))[None, :] // 4
        factor = gl.inline_asm_elementwise(
            OVER_LARGEST, "=r,r,r,r", [scale[:, None], largest[:, None], 0x4040 + group * 0x0101], dtype=gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        a, e, b, f, c, g, d, h = spread_nibbles(word, factor, low, high)
        keys = gl.join(gl.join(gl.join(a, e), gl.join(b, f)), gl.join(gl.join(c, g), gl.join(d, h)))
        keys = gl.permute(gl.reshape(keys, [64, 4, 4, 2, 2, 2]), [0, 2, 5, 4, 1, 3])
        keys = gl.convert_layout(gl.reshape(keys, [64, 128]), gl.DotOperandLayout(0, M, 2), assert_trivial=True)
        # Infinity where it is NaN: what ``store_scores`` adds makes NaN of it.
        factor = gl.maximum(largest << 23, 0x00400000).to(gl.float32, bitcast=True)
    else:
        a, b, c, d = halves_of(word)
        keys = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [64, 2, 4, 4, 2, 2])
        keys = gl.reshape(gl.permute(keys, [0, 1, 3, 4, 2, 5]), [64, 128])
        keys = gl.convert_layout(keys, gl.DotOperandLayout(0, M, 2), assert_trivial=True)
        factor = scale.to(gl.float32, bitcast=True)
    return keys, factor


@gluon.jit
def load_queries(token, q_ptr, weights_ptr, heads, M: gl.constexpr, HEADS: gl.constexpr):
    """(queries of a token [HEADS, 128], weights of its heads [HEADS])."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, L))
    at = (token.to(gl.int64) * heads + head)[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    q = gl.load(q_ptr + at, mask=(head < heads)[:, None], other=0.0)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, M))
    return q, gl.load(weights_ptr + token.to(gl.int64) * heads + head, mask=head < heads, other=0.0)


@gluon.jit
def held_queries(q, weight, M: gl.constexpr, HEADS: gl.constexpr, TAKEN: gl.constexpr):
    """(queries in shared memory, their channels in the order of keys'; the weights that go with them)."""
    if TAKEN == "nibbles":
        q = gl.permute(gl.reshape(q, [HEADS, 4, 4, 2, 2, 2]), [0, 2, 4, 5, 1, 3])
    else:
        # The largest finite magnitude of a head comes to between 2^8 and 2^9.
        x = q.to(gl.float32)
        size = gl.abs(x)
        size = gl.max(gl.where(size < float("inf"), size, 0.0), axis=1)
        power = gl.minimum(262 - (size.to(gl.int32, bitcast=True) >> 23), 253)
        x *= (power << 23).to(gl.float32, bitcast=True)[:, None]
        back = gl.convert_layout((254 - power) << 23, gl.SliceLayout(0, M))
        weight *= back.to(gl.float32, bitcast=True)
        q = gl.permute(gl.reshape(x.to(gl.float16), [HEADS, 2, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    q = gl.reshape(q, [HEADS, 128])
    held = gl.allocate_shared_memory(q.dtype, [HEADS, 128], gl.NVMMASharedLayout(128, 16, 2), q)
    return held, weight


@gluon.jit
def unit_of(request, column, last, table_ptr, table_columns, R: gl.constexpr):
    """Units of a request's entries ``column``, -1 where there is none or it is not before ``last``."""
    place = column // R.rows
    known = (column < last) & (place < table_columns)
    return gl.load(table_ptr + request.to(gl.int64) * table_columns + place, mask=known, other=-1)


@gluon.jit
def keys_of(unit, first, n, codes_ptr, scales_ptr, R: gl.constexpr, TAKEN: gl.constexpr, WHOLE: gl.constexpr):
    """Words of codes and of scales of entries ``first`` + n in ``unit``; some bytes where that is -1.

    WHOLE: a tile lies in one unit, a scalar.
    """
    words: gl.constexpr = 16 if TAKEN == "nibbles" else 32
    unit = gl.maximum(unit, 0).to(gl.int64)
    row = first % R.rows + n if WHOLE else (first + n) % R.rows
    at = unit * (R.codes_unit // 4) + R.codes_base // 4 + row * (R.codes_stride // 4)
    word = gl.arange(0, words, gl.SliceLayout(0, word_layout(words)))
    code = gl.load(codes_ptr.to(gl.pointer_type(gl.int32)) + at[:, None] + word[None, :])
    at = unit * (R.scales_unit // 4) + R.scales_base // 4 + row * (R.scales_stride // 4)
    return code, gl.load(scales_ptr.to(gl.pointer_type(gl.int32)) + at)


@gluon.jit
def ask_for_keys(unit, first, codes_ptr, scales_ptr, R: gl.constexpr):
    """Have the L2 cache fetch the tile from ``first`` on in a unit, a line a thread; nothing where that is -1."""
    lines: gl.constexpr = 64 * R.codes_stride // 128
    of_scales: gl.constexpr = (64 * R.scales_stride + 127) // 128
    line = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    place, row = gl.maximum(unit, 0).to(gl.int64), first % R.rows
    codes_at = (codes_ptr + place * R.codes_unit + (R.codes_base + row * R.codes_stride)).to(gl.int64)
    scales_at = (scales_ptr + place * R.scales_unit + (R.scales_base + row * R.scales_stride)).to(gl.int64)
    at = gl.where(line < lines, codes_at + line * 128, scales_at + (line - lines) * 128)
    asked = ((line < lines + of_scales) & (unit >= 0)).to(gl.int32)
    gl.inline_asm_elementwise(PREFETCH, "=r,l,r", [at, asked], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_scores(
    found, weight, factor, unit, first, n, visible, columns, out_at, TAKEN: gl.constexpr, MASKED: gl.constexpr
):
    """Negative products dropped, the others summed with the heads' weights; MASKED: -inf from ``visible`` on."""
    found = gl.maximum(found, gl.zeros_like(found), propagate_nan=ALL)
    score = gl.convert_layout(gl.sum(found * weight[None, :], axis=1), factor.type.layout, assert_trivial=True) * factor
    if TAKEN == "nibbles":
        score += factor - factor
    score = gl.where(unit >= 0, score, 0.0)
    if MASKED:
        column = first + n
        gl.store(out_at + column, gl.where(column < visible, score, float("-inf")), mask=column < columns)
    else:
        gl.store(out_at + first + n, score)


@gluon.jit
def score_tile(
    word, scale, unit, first, n, low, high, queries, seen, ends, M: gl.constexpr, HEADS: gl.constexpr,
    TAKEN: gl.constexpr, LEAN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of a tile's keys by every query, as ``score_run`` has them."""
    count: gl.constexpr = len(seen)
    keys, factor = decoded(word, scale, low, high, M, TAKEN)
    for each in gl.static_range(count):
        held, weight, out_at = queries[each]
        zero = gl.zeros([64, HEADS], gl.float32, M)
        found = warpgroup_mma(keys, held.permute((1, 0)), zero, use_acc=False)
        if LEAN:
            weight = weight.load(gl.SliceLayout(0, M))
        store_scores(found, weight, factor, unit, first, n, seen[each], ends[each], out_at, TAKEN, MASKED)


@gluon.jit
def begin_run(
    request, last, run, codes_ptr, scales_ptr, table_ptr, table_columns,
    R: gl.constexpr, TAKEN: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """(units of a run's first tile, of its second; words of codes and of scales of the first)."""
    n = gl.arange(0, 64, gl.SliceLayout(1, word_layout(16 if TAKEN == "nibbles" else 32)))
    step = gl.full([], 0, gl.int32) if WHOLE else n
    unit = unit_of(request, run + step, last, table_ptr, table_columns, R)
    following = unit_of(request, run + 64 + step, last, table_ptr, table_columns, R)
    word, scale = keys_of(unit, run, n, codes_ptr, scales_ptr, R, TAKEN, WHOLE)
    return unit, following, word, scale


@gluon.jit
def score_run(
    begun, request, last, seen, ends, queries, codes_ptr, scales_ptr, table_ptr, table_columns, run, tiles, low, high,
    R: gl.constexpr, M: gl.constexpr, HEADS: gl.constexpr, TAKEN: gl.constexpr, WHOLE: gl.constexpr,
    LEAN: gl.constexpr,
):  # fmt: skip
    """Scores of ``tiles`` tiles of a request's entries from ``run`` on, of which those before ``last`` are looked at.

    Args:
        begun: what ``begin_run`` said.
        seen: by query, entries that it sees.
        ends: by query, columns that it has: 0 where it is another request's.
        queries: what ``held_queries`` said of each, and where its scores go.
    """
    row: gl.constexpr = gl.SliceLayout(1, word_layout(16 if TAKEN == "nibbles" else 32))
    count: gl.constexpr = len(seen)
    n = gl.arange(0, 64, row)
    step = gl.full([], 0, gl.int32) if WHOLE else n
    some = gl.maximum(gl.cdiv(last - run, 64), 0)
    # Units are looked up two tiles ahead, keys are read one tile ahead: loads wait for nothing.
    unit, following, word, scale = begun
    begin = run * 0
    if WHOLE and count == 1:
        # Of tiles that are seen whole nothing is masked, and the L2 cache fetches them a tile before they are read.
        third = unit_of(request, run + 128, last, table_ptr, table_columns, R)
        begin = gl.maximum(gl.minimum(last, gl.minimum(seen[0], ends[0])) - run, 0) // 64
        for tile in range(begin):
            first = run + tile * 64
            next_word, next_scale = keys_of(following, first + 64, n, codes_ptr, scales_ptr, R, TAKEN, WHOLE)
            ask_for_keys(third, first + 128, codes_ptr, scales_ptr, R)
            after = unit_of(request, first + 192, last, table_ptr, table_columns, R)
            score_tile(word, scale, unit, first, n, low, high, queries, seen, ends, M, HEADS, TAKEN, LEAN, False)
            word, scale = next_word, next_scale
            unit, following, third = following, third, after
    for tile in range(begin, some):
        first = run + tile * 64
        next_word, next_scale = keys_of(following, first + 64, n, codes_ptr, scales_ptr, R, TAKEN, WHOLE)
        after = unit_of(request, first + 128 + step, last, table_ptr, table_columns, R)
        score_tile(word, scale, unit, first, n, low, high, queries, seen, ends, M, HEADS, TAKEN, LEAN, True)
        word, scale = next_word, next_scale
        unit, following = following, after
    # The rest of the run is not visible.
    for tile in range(some, tiles):
        column = run + tile * 64 + n
        for each in gl.static_range(count):
            gl.store(queries[each][2] + column, gl.full([64], float("-inf"), gl.float32, row), mask=column < ends[each])


@gluon.jit
def seen_by(token, request_ptr, positions_ptr, columns, RATIO: gl.constexpr):
    """(a token's request, and how many of the first ``columns`` entries it sees); 0 and none where it is nobody's."""
    request = gl.load(request_ptr + token)
    position = gl.where(request >= 0, gl.load(positions_ptr + token), -1)
    return gl.maximum(request, 0), gl.minimum((position + 1) // RATIO, columns)


@gluon.jit(do_not_specialize=["tokens", "columns", "table_columns", "tiles", "low", "high"])
def hopper_scores_kernel(
    out_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, positions_ptr, request_ptr, table_ptr,
    tokens, heads, columns, table_columns, tiles, low, high,
    R: gl.constexpr, RATIO: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, TAKEN: gl.constexpr,
    WHOLE: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    """Scores of the first ``columns`` entries -> out [tokens, columns], -inf where not visible.

    A program takes QUERIES tokens in a row, 1 or 2: both in one go where they are of one request. ``low`` and ``high``
    are 64 and 4; see ``spread_nibbles``. LEAN: heads' weights wait in shared memory, so that five programs share a
    multiprocessor's registers instead of four.
    """
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    groups = gl.cdiv(tokens, QUERIES)
    group = gl.program_id(0) % groups
    run = gl.program_id(0) // groups * (64 * tiles)
    end = gl.minimum(run + 64 * tiles, columns)
    requests, seen, ends, loaded = (), (), (), ()
    for each in gl.static_range(QUERIES):
        token = gl.minimum(group * QUERIES + each, tokens - 1)
        request = gl.load(request_ptr + token)
        position = gl.where(request >= 0, gl.load(positions_ptr + token), -1)
        q, weight = load_queries(token, q_ptr, weights_ptr, heads, M, HEADS)
        requests = requests + (gl.maximum(request, 0),)
        seen = seen + (gl.minimum((position + 1) // RATIO, columns),)
        ends = ends + (gl.where(group * QUERIES + each < tokens, columns, 0),)
        loaded = loaded + ((q, weight, out_ptr + token.to(gl.int64) * columns),)
    last, mine = gl.minimum(seen[0], end), ends
    if QUERIES == 2:
        alike = requests[0] == requests[1]
        last = gl.where(alike, gl.minimum(gl.maximum(seen[0], seen[1]), end), last)
        mine = (ends[0], gl.where(alike, ends[1], 0))
    begun = begin_run(requests[0], last, run, codes_ptr, scales_ptr, table_ptr, table_columns, R, TAKEN, WHOLE)
    queries = ()
    for each in gl.static_range(QUERIES):
        held, weight = held_queries(loaded[each][0], loaded[each][1], M, HEADS, TAKEN)
        if LEAN:
            weight = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]), weight)
        queries = queries + ((held, weight, loaded[each][2]),)
    fence_async_shared()
    if LEAN:
        # Once here, not in every tile, where it makes loads of codes of a byte come early, which is worth more there.
        barrier()
    score_run(
        begun, requests[0], last, seen, mine, queries, codes_ptr, scales_ptr, table_ptr, table_columns, run, tiles,
        low, high, R, M, HEADS, TAKEN, WHOLE, LEAN,
    )  # fmt: skip
    if QUERIES == 2:  # noqa: SIM102 - what is known when compiling is asked alone
        if requests[0] != requests[1]:
            last = gl.minimum(seen[1], end)
            begun = begin_run(requests[1], last, run, codes_ptr, scales_ptr, table_ptr, table_columns, R, TAKEN, WHOLE)
            score_run(
                begun, requests[1], last, (seen[1],), (ends[1],), (queries[1],), codes_ptr, scales_ptr, table_ptr,
                table_columns, run, tiles, low, high, R, M, HEADS, TAKEN, WHOLE, LEAN,
            )  # fmt: skip


@gluon.jit
def copy_tile(codes, scales, unit, first, codes_ptr, scales_ptr, R: gl.constexpr):
    """Have the tile from ``first`` on in a unit copied to shared memory; some bytes where that is -1."""
    C: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    S: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place, row = gl.maximum(unit, 0).to(gl.int64), first % R.rows
    codes_at = codes_ptr + place * R.codes_unit + (R.codes_base + row * R.codes_stride)
    n, byte = gl.arange(0, 64, gl.SliceLayout(1, C)), gl.arange(0, 128, gl.SliceLayout(0, C))
    at = codes_at.to(gl.pointer_type(gl.float8e4nv))
    copy(codes, at + (n[:, None] * R.codes_stride + byte[None, :]))
    scales_at = scales_ptr + place * R.scales_unit + (R.scales_base + row * R.scales_stride)
    at = scales_at.to(gl.pointer_type(gl.float32))
    copy(scales, at + gl.arange(0, 64, S) * (R.scales_stride // 4))


@gluon.jit(do_not_specialize=["tokens", "columns", "table_columns", "tiles"])
def hopper_codes_kernel(
    out_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, positions_ptr, request_ptr, table_ptr,
    tokens, heads, columns, table_columns, tiles,
    R: gl.constexpr, RATIO: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What ``hopper_scores_kernel`` does, of one query in e4m3 a program, on FP8 tensor cores; blocks are whole tiles.

    Keys come to a ring of STAGES tiles in shared memory as they are stored. Sums of 64 channels are the tensor cores',
    which keep about 14 bits; they are added in fp32. AHEAD: see ``address.begin``.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, M)
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    token = gl.program_id(0) % tokens
    run = gl.program_id(0) // tokens * (64 * tiles)
    request, visible = seen_by(token, request_ptr, positions_ptr, columns, RATIO)
    last = gl.minimum(visible, run + 64 * tiles)
    some = gl.maximum(gl.cdiv(last - run, 64), 0)
    codes = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], gl.NVMMASharedLayout(128, 8, 2))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for stage in gl.static_range(STAGES - 1):
        if stage < some:
            first = run + 64 * stage
            unit = unit_of(request, first, last, table_ptr, table_columns, R)
            copy_tile(codes.index(stage), scales.index(stage), unit, first, codes_ptr, scales_ptr, R)
        async_copy.commit_group()
    following = unit_of(request, run + 64 * (STAGES - 1), last, table_ptr, table_columns, R)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, L))
    at = (token.to(gl.int64) * heads + head)[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    q = gl.load(q_ptr + at, mask=(head < heads)[:, None], other=0.0)
    held = gl.allocate_shared_memory(gl.float8e4nv, [HEADS, 128], gl.NVMMASharedLayout(128, 8, 2), q)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, M))
    weight = gl.load(weights_ptr + token.to(gl.int64) * heads + head, mask=head < heads, other=0.0)
    n, out_at = gl.arange(0, 64, ROW), out_ptr + token.to(gl.int64) * columns
    stage = run * 0
    for tile in range(some):
        first = run + tile * 64
        unit = unit_of(request, first, last, table_ptr, table_columns, R)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        factor = scales.index(stage).load(ROW)
        zero = gl.zeros([64, HEADS], gl.float32, M)
        found = warpgroup_mma(codes.index(stage), held.permute((1, 0)), zero, use_acc=False, max_num_imprecise_acc=64)
        # All warps are done with the tile before this one: its place is for the one that is furthest ahead.
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        if tile + (STAGES - 1) < some:
            ahead = first + 64 * (STAGES - 1)
            copy_tile(codes.index(free), scales.index(free), following, ahead, codes_ptr, scales_ptr, R)
        async_copy.commit_group()
        following = unit_of(request, first + 64 * STAGES, last, table_ptr, table_columns, R)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if first + 64 <= last:
            store_scores(found, weight, factor, unit, first, n, visible, columns, out_at, "codes", False)
        else:
            store_scores(found, weight, factor, unit, first, n, visible, columns, out_at, "codes", True)
    # The rest of the run is not visible.
    for tile in range(some, tiles):
        column = run + tile * 64 + n
        gl.store(out_at + column, gl.full([64], float("-inf"), gl.float32, ROW), mask=column < columns)


@gluon.jit(do_not_specialize=["tokens", "columns", "table_columns", "line", "fewest", "low", "high"])
def hopper_seen_scores_kernel(
    out_ptr, counts_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, positions_ptr, request_ptr, table_ptr,
    tokens, heads, columns, table_columns, line, fewest, low, high,
    R: gl.constexpr, RATIO: gl.constexpr, HEADS: gl.constexpr, TAKEN: gl.constexpr, WHOLE: gl.constexpr,
    LEAN: gl.constexpr,
):  # fmt: skip
    """Scores of what a query sees of the first ``columns`` entries -> out [tokens, line]; how many -> counts [tokens].

    Tables may be far wider than what is seen, which a query's programs share, ``fewest`` tiles each or more. Behind it
    the rest of a tile is -inf, and nothing else is written. Where ``line``, a multiple of 64, is less there are no
    scores, and the count is -1. ``low``, ``high`` and LEAN are those of ``hopper_scores_kernel``.
    """
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    token = gl.program_id(0) % tokens
    part, parts = gl.program_id(0) // tokens, gl.num_programs(0) // tokens
    request, seen = seen_by(token, request_ptr, positions_ptr, columns, RATIO)
    seen = gl.where(seen <= line, seen, -1)
    if part == 0:
        gl.store(counts_ptr + token, seen)
    tiles = gl.cdiv(gl.maximum(seen, 0), 64)
    tiles = gl.cdiv(tiles, gl.maximum(gl.minimum(parts, tiles // fewest), 1))
    run = part * (64 * tiles)
    if run < seen:
        last = gl.minimum(seen, run + 64 * tiles)
        q, weight = load_queries(token, q_ptr, weights_ptr, heads, M, HEADS)
        begun = begin_run(request, last, run, codes_ptr, scales_ptr, table_ptr, table_columns, R, TAKEN, WHOLE)
        held, weight = held_queries(q, weight, M, HEADS, TAKEN)
        if LEAN:
            weight = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]), weight)
        fence_async_shared()
        if LEAN:
            barrier()
        queries = ((held, weight, out_ptr + token.to(gl.int64) * line),)
        score_run(
            begun, request, last, (seen,), (line,), queries, codes_ptr, scales_ptr, table_ptr, table_columns, run,
            0, low, high, R, M, HEADS, TAKEN, WHOLE, LEAN,
        )  # fmt: skip
