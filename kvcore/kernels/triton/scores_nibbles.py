"""Indexer scores of FP4 keys by queries in e4m3 on Hopper, in Gluon: nibbles become e5m2 codes in shared memory.

Numbers of e2m1 times a power of two are numbers of e5m2, as long as the power is no less than 2^-26 of the largest. So
the scale of every 32 channels, over the largest of its key's four, is in the codes, and the largest comes last. Which
codes the eight magnitudes have under a scale are eight bytes, two registers, that ``prmt`` takes four codes from at a
time; signs are put in after it.

FP8 tensor cores take tiles of 64 keys from shared memory while the next tile's nibbles are spread into a second one.
Runs in which a scale is further below the largest of its key are scored once more, in parts of 27 powers of two.

Which keys and calls it takes is said in ``launches.indexer``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvcore.kernels.triton.attend_codes import barrier
from kvcore.kernels.triton.scores_hopper import LARGEST, seen_by, unit_of

PART = gl.constexpr(27)
"""Powers of two, from the largest scale of a key down, under which all of e2m1 is in e5m2."""
NEXT_PART = gl.constexpr(2.0**-27)
ONE = gl.constexpr(2.0**-14)
"""What half of one is under the largest scale: products are added to their magnitudes, which counts them twice."""
SPREAD = gl.constexpr("""{ .reg .b32 t, a, b, c, d; and.b32 t, $2, 0x77777777; prmt.b32 a, $3, $4, t;
    shr.b32 t, t, 16; prmt.b32 b, $3, $4, t; prmt.b32 c, a, b, 0x6420; prmt.b32 d, a, b, 0x7531;
    shl.b32 t, $2, 4; lop3.b32 $1, $2, 0x80808080, d, 0xEA; lop3.b32 $0, t, 0x80808080, c, 0xEA; }""")
"""Eight e2m1 codes, and e5m2 codes of magnitudes 0 to 3 and 4 to 7 -> e5m2 codes 0, 2, 4, 6 and 1, 3, 5, 7."""
NAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Triton 3.6 has it by another name."""


@gluon.jit
def as_words(room):
    """A tile of codes in shared memory as words of four."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    if NAMED:
        words = room.reinterpret(gl.int32, [64, 32], layout)
    else:
        words = room._reinterpret(gl.int32, [64, 32], layout)
    return words


@gluon.constexpr_function
def words_layout():
    """[keys, groups, words]: a thread has the four words of a group, of two keys 8 apart."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])


@gluon.jit
def load_tile(unit, first, codes_ptr, scales_ptr, R: gl.constexpr):
    """(words of codes [64, 4, 4], of scales [64]) of a unit's tile from ``first`` on; some bytes if it is -1."""
    L: gl.constexpr = words_layout()
    G: gl.constexpr = gl.SliceLayout(2, L)
    n = gl.arange(0, 64, gl.SliceLayout(1, G))
    group = gl.arange(0, 4, gl.SliceLayout(0, G))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L)))
    unit, row = gl.maximum(unit, 0).to(gl.int64), first % R.rows
    at = codes_ptr + unit * R.codes_unit + (R.codes_base + row * R.codes_stride)
    within = (n[:, None] * (R.codes_stride // 4) + group[None, :] * 4)[:, :, None] + word[None, :][None, :, :]
    codes = gl.load(at.to(gl.pointer_type(gl.int32)) + within)
    at = scales_ptr + unit * R.scales_unit + (R.scales_base + row * R.scales_stride)
    return codes, gl.load(at.to(gl.pointer_type(gl.int32)) + n * (R.scales_stride // 4))


@gluon.jit
def largest_of(scale):
    """Words of four scales -> the largest of each."""
    found = gl.inline_asm_elementwise(LARGEST, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)
    return found & 0xFF


@gluon.jit
def put_tile(codes, scale, room, magnitudes, part, FAR: gl.constexpr):
    """Spread a tile's codes into ``room`` -> how far scales are below the largest of their keys [64, 4].

    FAR: only of scales in ``part``; other codes are zero.
    """
    G: gl.constexpr = gl.SliceLayout(2, words_layout())
    group = gl.arange(0, 4, gl.SliceLayout(0, G))
    below = largest_of(scale)[:, None] - ((scale[:, None] >> (group * 8)[None, :]) & 0xFF)
    step = below - part * PART if FAR else below
    low = magnitudes.index(0).load(gl.SliceLayout(0, G))[None, :] - step * 0x04040400
    high = magnitudes.index(1).load(gl.SliceLayout(0, G))[None, :] - step * 0x04040404
    if FAR:
        inside = (step >= 0) & (step < PART)
        low, high = gl.where(inside, low, 0), gl.where(inside, high, 0)
    even, odd = gl.inline_asm_elementwise(
        SPREAD, "=r,=r,r,r,r", [codes, low[:, :, None], high[:, :, None]], dtype=[gl.int32, gl.int32], is_pure=True,
        pack=1,
    )  # fmt: skip
    as_words(room).store(gl.reshape(gl.join(even, odd), [64, 32]))
    return below


@gluon.jit
def factor_of(scale, M: gl.constexpr):
    """The largest scale of each key; infinity where it is NaN: what ``store_sums`` adds makes NaN of it."""
    factor = gl.maximum(largest_of(scale) << 23, 0x00400000).to(gl.float32, bitcast=True)
    return gl.convert_layout(factor, gl.SliceLayout(1, M), assert_trivial=True)


@gluon.jit
def store_sums(found, weight, factor, unit, first, visible, columns, out_at, MASKED: gl.constexpr):
    """Negative products dropped, the others summed with the heads' weights, to ``out_at`` [64] from ``first`` on.

    MASKED: -inf from ``visible`` on.
    """
    # Twice what is not negative, by another unit than the one that compares, the busiest.
    found += gl.abs(found)
    score = gl.sum(found * weight[None, :], axis=1) * factor
    score += factor - factor
    score = gl.where(unit >= 0, score, 0.0)
    if MASKED:
        column = first + gl.arange(0, 64, score.type.layout)
        gl.store(out_at + first, gl.where(column < visible, score, float("-inf")), mask=column < columns)
    else:
        gl.store(out_at + first, score)


@gluon.jit(do_not_specialize=["tokens", "columns", "table_columns", "tiles"])
def hopper_nibbles_kernel(
    out_ptr, q_ptr, weights_ptr, codes_ptr, scales_ptr, positions_ptr, request_ptr, table_ptr,
    tokens, heads, columns, table_columns, tiles,
    R: gl.constexpr, RATIO: gl.constexpr, HEADS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What ``hopper_codes_kernel`` does, of FP4 keys: one query in e4m3 a program, blocks are whole tiles."""
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    G: gl.constexpr = gl.SliceLayout(2, words_layout())
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token = gl.program_id(0) % tokens
    run = gl.program_id(0) // tokens * (64 * tiles)
    request, visible = seen_by(token, request_ptr, positions_ptr, columns, RATIO)
    last = gl.minimum(visible, run + 64 * tiles)
    some = gl.maximum(gl.cdiv(last - run, 64), 0)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, L))
    at = (token.to(gl.int64) * heads + head)[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    q = gl.load(q_ptr + at, mask=(head < heads)[:, None], other=0.0)
    # Channels in the order that ``SPREAD`` gives keys': of eight the even ones, then the odd ones.
    q = gl.reshape(gl.permute(gl.reshape(q, [HEADS, 16, 4, 2]), [0, 1, 3, 2]), [HEADS, 128])
    queries = gl.allocate_shared_memory(gl.float8e4nv, [HEADS, 128], S, q)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, M))
    weight = gl.load(weights_ptr + token.to(gl.int64) * heads + head, mask=head < heads, other=0.0) * ONE
    # Looked up there in every tile, so that products, which wait for no register, are under way first.
    magnitudes = gl.allocate_shared_memory(gl.int32, [2, 4], FLAT)
    group = gl.arange(0, 4, gl.SliceLayout(0, G))
    magnitudes.index(0).store(group * 0 + 0x72706C00)
    magnitudes.index(1).store(group * 0 + 0x7A787674)
    rooms = (
        gl.allocate_shared_memory(gl.float8e5, [64, 128], S),
        gl.allocate_shared_memory(gl.float8e5, [64, 128], S),
    )
    out_at = out_ptr + token.to(gl.int64) * columns + gl.arange(0, 64, gl.SliceLayout(1, M))
    zero = gl.zeros([64, HEADS], gl.float32, M)
    far = gl.zeros([64, 4], gl.int32, G)
    unit = unit_of(request, run, last, table_ptr, table_columns, R)
    following = unit_of(request, run + 64, last, table_ptr, table_columns, R)
    third = unit_of(request, run + 128, last, table_ptr, table_columns, R)
    codes, scale = load_tile(unit, run, codes_ptr, scales_ptr, R)
    far = gl.maximum(far, put_tile(codes, scale, rooms[0], magnitudes, 0, False))
    factor = factor_of(scale, M)
    codes, scale = load_tile(following, run + 64, codes_ptr, scales_ptr, R)
    fence_async_shared()
    barrier()
    for pair in range(0, some, 2):
        for half in gl.static_range(2):
            first = run + (pair + half) * 64
            found = warpgroup_mma(rooms[half], queries.permute((1, 0)), zero, use_acc=False, is_async=True)
            # The next tile is spread while products are under way, and the one after it is read.
            far = gl.maximum(far, put_tile(codes, scale, rooms[1 - half], magnitudes, 0, False))
            next_factor = factor_of(scale, M)
            fence_async_shared()
            codes, scale = load_tile(third, first + 128, codes_ptr, scales_ptr, R)
            after = unit_of(request, first + 192, last, table_ptr, table_columns, R)
            found = warpgroup_mma_wait(0, [found])
            if first + 64 <= last:
                store_sums(found, weight, factor, unit, first, visible, columns, out_at, False)
            else:
                if first < last:
                    store_sums(found, weight, factor, unit, first, visible, columns, out_at, True)
            factor = next_factor
            unit, following, third = following, third, after
    furthest = gl.max(gl.max(far, axis=1), axis=0)
    if furthest >= PART:
        for tile in range(some):
            first = run + tile * 64
            unit = unit_of(request, first, last, table_ptr, table_columns, R)
            codes, scale = load_tile(unit, first, codes_ptr, scales_ptr, R)
            found = zero
            for part in range(furthest // PART, -1, -1):
                put_tile(codes, scale, rooms[0], magnitudes, part, True)
                fence_async_shared()
                barrier()
                found = warpgroup_mma(rooms[0], queries.permute((1, 0)), found * NEXT_PART)
                barrier()
            store_sums(found, weight, factor_of(scale, M), unit, first, visible, columns, out_at, True)
    # The rest of the run is not visible.
    for tile in range(some, tiles):
        column = run + tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, M))
        rest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, M))
        gl.store(out_at + (run + tile * 64), rest, mask=column < columns)
