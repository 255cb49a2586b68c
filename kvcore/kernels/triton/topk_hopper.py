"""The best k of every row of scores on Hopper, in Gluon: histograms in shared memory instead of searches and sorts.

1. A program goes through tiles of a row, or of its part of one, and holds a tile in its registers. Of the first tile
   the best of every hand are counted in bins between the least and the largest of them: the bin that the k-th falls
   into is a bound that k scores reach, and mostly a close one. What reaches it is listed in shared memory. Of later
   tiles what is above the bound is added: what is equal to it comes after k others.
2. When the list is full, its scores and the tile's are counted in bins above the bound, and the bound is raised until
   little more than k reach it; of equal scores the lowest columns stay.
3. In the end the list's scores are counted in bins once more. A score's place is the number of those in bins above,
   and of those above it in its own bin, which are few.

Few long rows are shared out among many programs first: one launch finds the best of every 32 columns, the next lists
what of the row reaches the k-th of those, and step 3 takes that list.

Scores, columns, pairs of them and lists of pairs are what they are in ``topk``, whose kernels are the twins of these.
Shared memory that threads address one by one is not in Gluon: a few instructions of PTX reach it.

Map: ``room_text`` .. ``ranked`` are the instructions; then orders, bins and tiles; the kernels are last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvcore.kernels.triton.topk import LOWEST

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Of all threads of a program; Triton 3.6 has another name for it."""


@gluon.constexpr_function
def room_text(size):
    """PTX that gives the address of ``size`` bytes of shared memory."""
    return f"{{ .shared .align 16 .b8 kv_room[{size}]; .reg .u32 t; mov.u32 t, kv_room; add.u32 $0, $1, t; }}"


@gluon.jit
def shared_room(size: gl.constexpr):
    """Address of ``size`` bytes of shared memory."""
    zero = gl.to_tensor(0)
    return gl.inline_asm_elementwise(room_text(size), "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def shared_count(address, some):
    """Add one to the number at ``address`` where ``some`` is not 0; returns what was there."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0; @p atom.shared.add.u32 $0, [$1], 1; }",
        "=&r,r,r",
        [address, some],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def shared_put(address, value):
    """Store a number."""
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def shared_get(address):
    """Load a number."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def shared_put_pair(address, low, high, some):
    """Store the halves of a pair where ``some`` is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, 0; }",
        "=r,r,r,r,r",
        [address, low, high, some],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def shared_get_pair(address):
    """(low, high half) of a pair."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];",
        "=r,=r,r",
        [address],
        dtype=[gl.int32, gl.int32],
        is_pure=False,
        pack=1,
    )


@gluon.jit
def ranked(low, high, first, last):
    """How many pairs at addresses from ``first`` to before ``last`` are above (high, low)."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p, q;
        .reg .b32 at;
        .reg .b64 mine, other;
        mov.b64 mine, {$1, $2};
        mov.u32 at, $3;
        mov.u32 $0, 0;
        NEXT:
        setp.ge.u32 p, at, $4;
        @p bra DONE;
        ld.shared.b64 other, [at];
        setp.gt.s64 q, other, mine;
        @q add.u32 $0, $0, 1;
        add.u32 at, at, 8;
        bra NEXT;
        DONE:
        }
        """,
        "=&r,r,r,r,r",
        [low, high, first, last],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def unsigned(x):
    """int32 as uint32."""
    return x.to(gl.uint32, bitcast=True)


@gluon.jit
def order_of(score):
    """fp32 -> int32 of the same order; NaN counts as -inf, -0 as 0."""
    bits = gl.where(score != score, float("-inf"), score + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def added(a, b):
    """What a running sum adds."""
    return a + b


@gluon.jit
def extent(top, least, count, other_top, other_least, other_count):
    """Largest, least and number of both."""
    return gl.maximum(top, other_top), gl.minimum(least, other_least), count + other_count


@gluon.jit
def shift_of(span, BINS: gl.constexpr):
    """The least shift that brings ``span``, of 32 bits, below BINS."""
    bits: gl.constexpr = 21 if BINS == 2048 else 22
    return gl.inline_asm_elementwise(
        f"{{ .reg .u32 t; clz.b32 t, $1; sub.s32 t, {bits}, t; max.s32 $0, t, 0; }}",
        "=r,r",
        [span],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def bin_of(order, high, shift, BINS: gl.constexpr):
    """Bins of orders up to ``high``, counted from there, 2^shift each; the last takes what is beyond."""
    return gl.minimum((unsigned(high - order) >> unsigned(shift)).to(gl.int32, bitcast=True), BINS - 1)


@gluon.jit
def edge_of(high, low, number, shift):
    """The least order of a bin, ``low`` at the least."""
    deep = unsigned(((number + 1) << shift) - 1)
    return gl.where(deep >= unsigned(high - low), low, high - deep.to(gl.int32, bitcast=True))


@gluon.jit
def cleared(base, BINS: gl.constexpr, B: gl.constexpr):
    """Zeros in all bins."""
    shared_put(base + 4 * gl.arange(0, BINS, B), gl.zeros([BINS], gl.int32, B))


@gluon.jit
def bin_of_rank(base, k, BINS: gl.constexpr, B: gl.constexpr):
    """(the bin that the k-th falls into, how many are in those before it)."""
    count = shared_get(base + 4 * gl.arange(0, BINS, B))
    before = gl.associative_scan(count, 0, added) < k
    return gl.sum(before.to(gl.int32), axis=0), gl.sum(gl.where(before, count, 0), axis=0)


@gluon.jit
def bound_of(bound, base, hands, real, top, least, reals, k, BINS: gl.constexpr, B: gl.constexpr):
    """A bound that k of the hands reach, or ``bound`` where there are not as many; all bins are zeros before it.

    ``reals`` hands are ``real``, from ``least`` to ``top``.
    """
    barrier()
    if reals >= k:
        shift = shift_of(top - least, BINS)
        shared_count(base + 4 * bin_of(hands, top, shift, BINS), real)
        barrier()
        number, _ = bin_of_rank(base, k, BINS, B)
        bound = edge_of(top, least, number, shift)
    return bound


@gluon.jit
def by_thread(x, T: gl.constexpr, DEEP: gl.constexpr, WIDE: gl.constexpr):
    """A tile [T · DEEP] as [T, DEEP]: what a thread has, in a line; nothing moves."""
    x = gl.reshape(gl.permute(gl.reshape(x, [DEEP // WIDE, T, WIDE]), [1, 0, 2]), [T, DEEP])
    return gl.convert_layout(x, gl.BlockedLayout([1, DEEP], [32, 1], [T // 32, 1], [1, 0]), assert_trivial=True)


@gluon.jit
def load_tile(
    given_ptr, given_counts_ptr, first, n, end, line, T: gl.constexpr, DEEP: gl.constexpr, LIST: gl.constexpr
):
    """(orders, or of scores their bits; low halves of pairs, of scores 0) of a tile [T, DEEP] from ``first`` on."""
    wide: gl.constexpr = 2 if LIST else 4
    at = first + gl.arange(0, T * DEEP, gl.BlockedLayout([wide], [32], [T // 32], [0]))
    if LIST:
        number, slot = at // LIST, at % LIST
        held = slot < gl.load(given_counts_ptr + number, mask=number < n, other=0)
        pair = gl.load(given_ptr + number * line + slot, mask=held, other=0)
        order = gl.where(held, (pair >> 32).to(gl.int32), LOWEST)
        found = by_thread(order, T, DEEP, wide), by_thread(pair.to(gl.int32), T, DEEP, wide)
    else:
        score = gl.load(given_ptr + at, mask=at < end, other=float("-inf"))
        found = by_thread(score.to(gl.int32, bitcast=True), T, DEEP, wide), 0
    return found


@gluon.jit
def lows_of(low, first, T: gl.constexpr, DEEP: gl.constexpr, LIST: gl.constexpr):
    """Low halves of a tile's pairs: of scores they are made of columns when they are needed."""
    if not LIST:
        at = first + gl.arange(0, T * DEEP, gl.BlockedLayout([4], [32], [T // 32], [0]))
        low = by_thread(0x7FFFFFFF - at, T, DEEP, 4)
    return low


@gluon.jit
def sum_of(x):
    """Sum of a tile."""
    return gl.sum(gl.sum(x, axis=1), axis=0)


@gluon.jit
def count_up(kept, WARPS: gl.constexpr):
    """(of every thread how many it keeps, and how many it and those before it keep)."""
    some = gl.convert_layout(gl.sum(kept, axis=1), gl.BlockedLayout([1], [32], [WARPS], [0]))
    return some, gl.associative_scan(some, 0, added)


@gluon.jit
def best_of(
    base, indices_ptr, pairs_ptr, counts_ptr, given_ptr, given_counts_ptr, begin, end, n, line, k, most,
    WARPS: gl.constexpr, DEEP: gl.constexpr, HANDS: gl.constexpr, BINS: gl.constexpr, ROOM: gl.constexpr,
    LIST: gl.constexpr, LAST: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """The best k from ``begin`` to before ``end`` of a row of scores, or of its lists; see ``hopper_top_kernel``.

    ``base`` is the address of the program's shared room.
    """
    T: gl.constexpr = 32 * WARPS
    B: gl.constexpr = gl.BlockedLayout([BINS // T], [32], [WARPS], [0])
    raw, low = load_tile(given_ptr, given_counts_ptr, begin, n, end, line, T, DEEP, LIST)
    last_bins, list_at = base + 4 * BINS, base + 8 * BINS + 16
    cleared(base, BINS, B)
    cleared(last_bins, BINS, B)
    slot = gl.arange(0, ROOM, gl.BlockedLayout([1], [32], [WARPS], [0]))
    held = gl.to_tensor(0)
    bound = gl.full([], LOWEST + 1, gl.int32)
    for tile in range(1 if ONE else gl.maximum(gl.cdiv(end - begin, T * DEEP), 1)):
        first = begin + tile * (T * DEEP)
        order = raw if LIST else order_of(raw.to(gl.float32, bitcast=True))
        this_low = low
        if not ONE:
            raw, low = load_tile(given_ptr, given_counts_ptr, first + T * DEEP, n, end, line, T, DEEP, LIST)
        if tile == 0:
            hands = gl.max(gl.reshape(order, [T, HANDS, DEEP // HANDS]), axis=2)
            real = (hands > LOWEST).to(gl.int32)
            some = gl.where(hands > LOWEST, hands, 0x7FFFFFFF)
            top, least, reals = gl.reduce(
                (gl.max(hands, axis=1), gl.min(some, axis=1), gl.sum(real, axis=1)), 0, extent
            )
            bound = bound_of(bound, base, hands, real, top, least, reals, k, BINS, B)
        kept = (order >= bound + gl.where(held >= k, 1, 0)).to(gl.int32)
        some, upto = count_up(kept, WARPS)
        total = held + gl.max(upto, axis=0)
        if total > ROOM:
            lows = lows_of(this_low, first, T, DEEP, LIST)
            list_low, list_order = shared_get_pair(list_at + 8 * slot)
            list_order = gl.where(slot < held, list_order, LOWEST)
            high = gl.maximum(gl.max(gl.max(order, axis=1), axis=0), gl.max(list_order, axis=0))
            above = gl.to_tensor(0)
            while (bound < high) & (total > most):
                barrier()
                cleared(base, BINS, B)
                barrier()
                shift = shift_of(high - bound, BINS)
                within = ((order >= bound) & (order <= high)).to(gl.int32)
                shared_count(base + 4 * bin_of(order, high, shift, BINS), within)
                within = ((list_order >= bound) & (list_order <= high)).to(gl.int32)
                shared_count(base + 4 * bin_of(list_order, high, shift, BINS), within)
                barrier()
                number, before = bin_of_rank(base, k - above, BINS, B)
                above += before
                bound = edge_of(high, bound, number, shift)
                high -= number << shift
                total = sum_of((order >= bound).to(gl.int32)) + gl.sum((list_order >= bound).to(gl.int32), axis=0)
            # Of those that are equal to the bound, too many then, the ones whose low halves reach this one.
            reach = gl.to_tensor(0)
            if total > most:
                end_of_reach = gl.to_tensor(0x7FFFFFFF)
                while reach < end_of_reach:
                    middle = (reach | end_of_reach) - ((reach ^ end_of_reach) >> 1)
                    equal = sum_of(((order == bound) & (lows >= middle)).to(gl.int32))
                    equal += gl.sum(((list_order == bound) & (list_low >= middle)).to(gl.int32), axis=0)
                    enough = above + equal >= k
                    reach, end_of_reach = gl.where(enough, middle, reach), gl.where(enough, end_of_reach, middle - 1)
            kept = ((order > bound) | ((order == bound) & (lows >= reach))).to(gl.int32)
            list_kept = ((list_order > bound) | ((list_order == bound) & (list_low >= reach))).to(gl.int32)
            # All was read of the list before any of it is written.
            place = gl.associative_scan(list_kept, 0, added)
            barrier()
            shared_put_pair(list_at + 8 * (place - list_kept), list_low, list_order, list_kept)
            held = gl.max(place, axis=0)
            some, upto = count_up(kept, WARPS)
            total = held + gl.max(upto, axis=0)
        place = gl.convert_layout(upto - some, gl.SliceLayout(1, kept.type.layout))
        place = held + gl.expand_dims(place, 1) + gl.associative_scan(kept, 1, added) - kept
        shared_put_pair(list_at + 8 * place, lows_of(this_low, first, T, DEEP, LIST), order, kept)
        held = total
        barrier()
    low, order = shared_get_pair(list_at + 8 * slot)
    valid = slot < held
    if LAST:
        top = gl.max(gl.where(valid, order, LOWEST), axis=0)
        order = gl.where(valid, order, top)
        shift = shift_of(top - bound, BINS)
        number = bin_of(order, top, shift, BINS)
        within = shared_count(last_bins + 4 * number, valid.to(gl.int32))
        barrier()
        every = gl.arange(0, BINS, B)
        upto = gl.associative_scan(shared_get(last_bins + 4 * every), 0, added)
        barrier()
        # Where a bin begins in the list; the next one's begin is its end.
        shared_put(last_bins + 4 * every + 4, upto)
        shared_put(last_bins, gl.to_tensor(0))
        barrier()
        first, end = shared_get(last_bins + 4 * number), shared_get(last_bins + 4 * number + 4)
        shared_put_pair(list_at + 8 * (first + within), low, order, valid.to(gl.int32))
        barrier()
        rank = first + ranked(low, order, list_at + 8 * first, list_at + 8 * gl.where(valid, end, first))
        gl.store(indices_ptr + rank, 0x7FFFFFFF - low, mask=valid & (rank < k))
        gl.store(indices_ptr + slot, gl.full_like(slot, -1), mask=(slot >= held) & (slot < k))
    else:
        pair = (order.to(gl.int64) << 32) | low.to(gl.int64)
        gl.store(pairs_ptr + slot, pair, mask=valid)
        gl.store(counts_ptr, held)


@gluon.jit(do_not_specialize=["n", "line", "k", "most", "parts", "run"])
def hopper_top_kernel(
    indices_ptr, pairs_ptr, counts_ptr, given_ptr, given_counts_ptr, n, line, k, most, parts, run,
    WARPS: gl.constexpr, DEEP: gl.constexpr, HANDS: gl.constexpr, BINS: gl.constexpr, ROOM: gl.constexpr,
    LIST: gl.constexpr, LAST: gl.constexpr, ONE: gl.constexpr, WHOLE: gl.constexpr, SEEN: gl.constexpr,
):  # fmt: skip
    """The best k of rows -> indices [rows, k], -1 beyond the last; else the best k or somewhat more of their parts.

    LIST 0: given are scores, n columns of [rows, line]; a part is ``run`` of them. Else n lists of pairs a row,
    ``line`` apart, with at most LIST pairs each and as many as their counts [rows, n] say; a row is one part.
    LAST: the best are ranked. Else they are listed: pairs [rows, parts, ROOM], their numbers counts [rows, parts].
    ONE: a part is one tile. WHOLE: n, line and run are multiples of 4. ``most`` pairs stay of a list that was full.
    SEEN: of scores those before counts [rows], which parts share; as far as the next multiple of 4 they are -inf. A
    row whose count is -1 stays as it is, of which the counts of its parts' lists, -1, tell.
    """
    part, token = gl.program_id(0) % parts, (gl.program_id(0) // parts).to(gl.int64)
    taken = True
    if LIST:
        given_ptr += token * n * line
        given_counts_ptr += token * n
        begin, end = 0, n * LIST
        if SEEN:
            taken = gl.load(given_counts_ptr) >= 0
    else:
        if WHOLE:
            n, line, run = n // 4 * 4, line // 4 * 4, run // 4 * 4
        given_ptr += token * line
        if SEEN:
            n = gl.load(given_counts_ptr + token)
            taken = n >= 0
            n = gl.cdiv(gl.maximum(n, 0), 4) * 4
            run = gl.cdiv(gl.cdiv(n, parts), 4) * 4
        begin = part * run
        end = gl.minimum(n, begin + run)
    base = shared_room(8 * BINS + 16 + 8 * ROOM)
    pairs_ptr += gl.program_id(0).to(gl.int64) * ROOM
    if taken:
        best_of(
            base, indices_ptr + token * k, pairs_ptr, counts_ptr + gl.program_id(0), given_ptr, given_counts_ptr,
            begin, end, n, line, k, most, WARPS, DEEP, HANDS, BINS, ROOM, LIST, LAST, ONE,
        )  # fmt: skip
    elif not LAST:
        gl.store(counts_ptr + gl.program_id(0), -1)


@gluon.jit(do_not_specialize=["n", "parts"])
def hopper_hands_kernel(
    hands_ptr, counts_ptr, scores_ptr, n, parts, WARPS: gl.constexpr, DEEP: gl.constexpr, WHOLE: gl.constexpr
):
    """The best of every eight threads' scores -> hands [rows, parts, 4 WARPS], orders; zeros -> counts [rows].

    A program takes 32 · WARPS · DEEP scores of a row. WHOLE: n is a multiple of 4.
    """
    T: gl.constexpr = 32 * WARPS
    part, token = gl.program_id(0) % parts, (gl.program_id(0) // parts).to(gl.int64)
    if WHOLE:
        n = n // 4 * 4
    raw, _ = load_tile(scores_ptr + token * n, counts_ptr, part * (T * DEEP), n, n, n, T, DEEP, 0)
    order = order_of(raw.to(gl.float32, bitcast=True))
    best = gl.max(gl.reshape(gl.max(order, axis=1), [T // 8, 8]), axis=1)
    hand = gl.arange(0, T // 8, best.type.layout)
    gl.store(hands_ptr + gl.program_id(0) * (T // 8) + hand, best)
    if part == 0:
        gl.store(counts_ptr + token, 0)


@gluon.jit(do_not_specialize=["n", "k", "parts"])
def hopper_list_kernel(
    pairs_ptr, counts_ptr, hands_ptr, scores_ptr, n, k, parts,
    WARPS: gl.constexpr, DEEP: gl.constexpr, HELD: gl.constexpr, BINS: gl.constexpr, ROOM: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Pairs of a row's scores that reach the bound of its hands -> pairs [rows, ROOM] in any order, as room lasts.

    Their numbers are added to counts [rows], with those that found no room. Programs are those of
    ``hopper_hands_kernel``, which wrote hands [rows, parts, 4 WARPS]; HELD of them are a thread's here.
    """
    T: gl.constexpr = 32 * WARPS
    B: gl.constexpr = gl.BlockedLayout([BINS // T], [32], [WARPS], [0])
    part, token = gl.program_id(0) % parts, (gl.program_id(0) // parts).to(gl.int64)
    if WHOLE:
        n = n // 4 * 4
    first = part * (T * DEEP)
    raw, _ = load_tile(scores_ptr + token * n, counts_ptr, first, n, n, n, T, DEEP, 0)
    every = parts * (T // 8)
    at = gl.arange(0, T * HELD, gl.BlockedLayout([4], [32], [WARPS], [0]))
    hands = gl.load(hands_ptr + token * every + at, mask=at < every, other=LOWEST)
    base = shared_room(4 * BINS)
    cleared(base, BINS, B)
    some = gl.where(hands > LOWEST, hands, 0x7FFFFFFF)
    real = (hands > LOWEST).to(gl.int32)
    top, least, reals = gl.reduce((hands, some, real), 0, extent)
    bound = bound_of(gl.full([], LOWEST + 1, gl.int32), base, hands, real, top, least, reals, k, BINS, B)
    order = order_of(raw.to(gl.float32, bitcast=True))
    kept = (order >= bound).to(gl.int32)
    some, upto = count_up(kept, WARPS)
    total = gl.max(upto, axis=0)
    if total > 0:
        begin = gl.atomic_add(counts_ptr + token, total, sem="relaxed")
        place = gl.convert_layout(upto - some, gl.SliceLayout(1, kept.type.layout))
        place = begin + gl.expand_dims(place, 1) + gl.associative_scan(kept, 1, added) - kept
        pair = (order.to(gl.int64) << 32) | lows_of(0, first, T, DEEP, 0).to(gl.int64)
        gl.store(pairs_ptr + token * ROOM + place, pair, mask=(kept != 0) & (place < ROOM))


@gluon.jit(do_not_specialize=["n", "k", "most"])
def hopper_last_kernel(
    indices_ptr, pairs_ptr, counts_ptr, scores_ptr, n, k, most,
    WARPS: gl.constexpr, BINS: gl.constexpr, GIVEN: gl.constexpr, ROOM: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """The best k of what ``hopper_list_kernel`` listed, in room for GIVEN pairs -> indices [rows, k].

    Of a row whose list had not room enough, as of thousands of equal scores, the best of its scores.
    """
    token = gl.program_id(0).to(gl.int64)
    if WHOLE:
        n = n // 4 * 4
    count = gl.load(counts_ptr + token)
    base = shared_room(8 * BINS + 16 + 8 * ROOM)
    indices_ptr += token * k
    given_ptr = pairs_ptr + token * GIVEN
    # A list is in no order, so it is one tile: of equal scores those of later tiles are taken to come after.
    if count <= 128 * WARPS:
        best_of(
            base, indices_ptr, pairs_ptr, counts_ptr, given_ptr, counts_ptr + token, 0, GIVEN, 1, GIVEN, k, most,
            WARPS, 4, 4, BINS, ROOM, GIVEN, True, True,
        )  # fmt: skip
    elif count <= GIVEN:
        best_of(
            base, indices_ptr, pairs_ptr, counts_ptr, given_ptr, counts_ptr + token, 0, GIVEN, 1, GIVEN, k, most,
            WARPS, GIVEN // (32 * WARPS), 4, BINS, ROOM, GIVEN, True, True,
        )  # fmt: skip
    else:
        best_of(
            base, indices_ptr, pairs_ptr, counts_ptr, scores_ptr + token * n, counts_ptr, 0, n, n, n, k, most,
            WARPS, 16, 4, BINS, ROOM, 0, True, False,
        )  # fmt: skip
