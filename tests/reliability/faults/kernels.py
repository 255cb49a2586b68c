"""Faults of the Triton kernels and their launches, interpreted, and of the Pallas TPU kernels, in their interpreter."""

TRITON = {
    "address.py": [
        ("    row = number % R.rows\n", "    row = (number + 1) % R.rows\n", "every row lies one further"),
        (
            "        known = known & (column < table_columns)\n",
            "",
            "entries beyond the table lie in another request's block",
            "what is asked for beyond a request's rows is -1 before it comes here, or is blanked by what is valid",
        ),
        (
            "        unit = tl.load(slots_ptr + request, mask=known, other=-1)\n",
            "        unit = tl.load(slots_ptr + request, mask=known, other=0)\n",
            "padding writes to slot 0",
        ),
        (
            "passed = (end[None, :] <= number[:, None]) & real[None, :]",
            "passed = (end[None, :] < number[:, None]) & real[None, :]",
            "the next request's first entry is the last one's",
        ),
        (
            "    return tl.where(found, request, -1), tl.where(found, entry, -1)\n",
            "    return request, entry\n",
            "rows beyond the last entry name a request",
        ),
    ],
    "append.py": [
        (
            "    least = bound if R.paged else bound - R.rows\n",
            "    least = bound - R.rows\n",
            "what was taken over is written again",
        ),
        (
            "    valid = (unit >= 0) & (position >= bound - R.rows)\n",
            "    valid = unit >= 0\n",
            "rows that the step overwrites are written, in any order",
            "interpreted programs run one after another in token order, so the last one stays; on a GPU they race, which the"
            " byte checks on the device see",
        ),
        (
            "    place = place * R.heads + head_of(row, R)\n",
            "    place = place * R.heads\n",
            "every head writes to the first one's place",
        ),
        (
            "    valid = (unit >= 0) & ((entry + 1) * RATIO > stored)\n",
            "    valid = (unit >= 0) & (entry * RATIO > stored)\n",
            "the first entry of a step is not stored",
        ),
        (
            "        x = x * scale[:, None, None] * weight\n",
            "        x = x * scale[:, None, None]\n",
            "the norm's weight is forgotten",
        ),
    ],
    "tail.py": [
        (
            "(position % T.rows).to(tl.int64) * T.row\n",
            "((position + 1) % T.rows).to(tl.int64) * T.row\n",
            "a tail's rows lie one further",
        ),
        (
            "    save_rows(score, column + T.score, mask, slot, position, score_tail, T)\n",
            "    save_rows(score, column + T.kv, mask, slot, position, score_tail, T)\n",
            "scores are written over kv",
        ),
        (
            "    bits = tl.where(x != x, 0x7FC00000, float_bits(x))\n",
            "    bits = float_bits(x)\n",
            "a tail keeps the payload of a NaN",
        ),
    ],
    "flush.py": [
        (
            "    return r // T.ratio * T.dim if T.overlap else tl.zeros_like(r)\n",
            "    return (1 - r // T.ratio) * T.dim if T.overlap else tl.zeros_like(r)\n",
            "carry and cur are swapped",
        ),
        (
            "    inside = ((r < window) & (p >= 0))[:, None]",
            "    inside = (r < window)[:, None]",
            "rows before the first window take part",
        ),
        (
            "    pooled = tl.where(kept == 0.0, 0.0, pooled * kept) + tl.where(weight == 0.0, 0.0, weight * kv)\n",
            "    pooled = pooled * kept + weight * kv\n",
            "a NaN row of weight 0 spreads",
        ),
        (
            "    total = total * kept + weight\n",
            "    total = total + weight\n",
            "earlier rows are weighted by an old maximum",
        ),
        (
            "turns(entry * T.ratio, frequencies_ptr, size, R.dim, PAIRS)\n        score = widened(score)",
            "turns(entry, frequencies_ptr, size, R.dim, PAIRS)\n        score = widened(score)",
            "entries are rotated by their number in a prefill",
        ),
        (
            "    valid = (unit >= 0) & (one + position >= one + stored)\n",
            "    valid = unit >= 0\n",
            "entries that were taken over are written again",
        ),
        (
            "    if R.rounded:\n        x = round_bf16(x, NATIVE)\n    if WHOLE",
            "    if WHOLE",
            "no rounding after pooling",
        ),
    ],
    "latent.py": [
        (
            "        x = x * inverse_rms(tl.sum(x * x, axis=1), eps, R.dim)[:, None] * weight[None, :]\n        if R.rounded:\n            x = round_bf16(x, NATIVE)\n",
            "        x = x * inverse_rms(tl.sum(x * x, axis=1), eps, R.dim)[:, None] * weight[None, :]\n",
            "no rounding after the norm",
        ),
        ("tl.sqrt_rn(mean + eps)", "tl.sqrt_rn(mean)", "eps is forgotten"),
        (
            "    new_odd = tl.where(turned, even * sin + odd * cos, odd)\n",
            "    new_odd = tl.where(turned, odd * cos - even * sin, odd)\n",
            "pairs are sheared",
        ),
    ],
    "rows.py": [
        (
            "        exponent = (float_bits(product) + 0x7FFFFF) >> 23\n",
            "        exponent = (float_bits(product) + 0x3FFFFF) >> 23\n",
            "power-of-two scales round to nearest",
        ),
        (
            "    finite = largest < 0x7F800000\n",
            "    finite = largest <= 0x7F800000\n",
            "an infinite group counts as finite",
        ),
        (
            "    return ratio, tl.where(finite, stored, bad), finite\n",
            "    return ratio, stored, finite\n",
            "a faulty group's scale is not NaN",
        ),
        (
            "tl.where(finite[:, :, None], low | (high << 4), 0)",
            "tl.where(finite[:, :, None], high | (low << 4), 0)",
            "nibbles are swapped",
        ),
        (
            "        word = tl.where(finite[:, :, None], words(code_of(ratio, R, NARROW, NATIVE), 4), 0)\n",
            "        word = words(code_of(ratio, R, NARROW, NATIVE), 4)\n",
            "a faulty group keeps codes",
        ),
        (
            "        tl.store(target, scale, mask=valid[:, None] & (group < R.groups))\n",
            "        tl.store(target, scale, mask=group < R.groups)\n",
            "scales of rows that are not written are written",
        ),
        (
            "        bits = tl.where(x != x, 0x7E00, bits.to(tl.int32)).to(tl.int16)\n",
            "",
            "fp16 keeps the payload of a NaN",
        ),
        (
            "        value = value * scale[:, :, None] * R.global_scale\n",
            "        value = value * scale[:, :, None]\n",
            "the global scale is forgotten",
        ),
        (
            "        value = ((code << 24) >> 24).to(tl.float32)\n",
            "        value = code.to(tl.float32)\n",
            "int8 codes are read without a sign",
        ),
        (
            "    return round_pairs(x * (R.dim**-0.5), NATIVE)\n",
            "    return x * (R.dim**-0.5)\n",
            "rotated rows are not rounded to bf16",
        ),
        (
            "    up = (magnitude - whole >= 0.5) | (bits == 0x3EFFFFFF)\n",
            "    up = magnitude - whole > 0.5\n",
            "halves are rounded towards zero",
        ),
        (
            "        stored = tl.maximum(float_bits(quotient), R.scale_floor_bits)\n",
            "        stored = float_bits(quotient)\n",
            "a scale by the quotient is not floored",
        ),
        (
            "        ratio = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, :, None]\n",
            "        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape))\n",
            "values are divided where their scale's reciprocal multiplies them",
        ),
    ],
    "codes.py": [
        (
            "        code += (x > MIDPOINTS[k]).to(tl.int32)\n",
            "        code += (x >= MIDPOINTS[k]).to(tl.int32)\n",
            "an NF4 midpoint takes the upper level",
        ),
        ("    return tl.where(x != x, 0x7FC0, bits)\n", "    return bits\n", "bf16 keeps the payload of a NaN"),
        ("((raw >> 16) & 1)) >> 16) & 0xFFFF", "1) >> 16) & 0xFFFF", "bf16 ties go up"),
    ],
    "gather.py": [
        (
            "    position = tl.maximum(length - WINDOW, 0) + row % R.rows\n",
            "    position = tl.maximum(length - R.rows, 0) + row % R.rows\n",
            "a window's rows begin with its spare ones",
        ),
        (
            "    tl.store(valid_out_ptr + row, valid.to(tl.int8), mask=inside)\n",
            "    tl.store(valid_out_ptr + row, (entry >= -1).to(tl.int8), mask=inside)\n",
            "every pick counts as valid",
        ),
        ("tl.where(valid, entry * RATIO, -1)", "tl.where(valid, entry, -1)", "entries say their number for a position"),
        (
            "            first = query // CHUNK * CHUNK\n",
            "            first = query // CHUNK\n",
            "a chunk begins at its number",
        ),
        (
            "    start = length if LAST else tl.load",
            "    start = tl.load",
            "own rows of a window lie by the first query",
        ),
    ],
    "topk.py": [
        ('tl.where(score != score, float("-inf"), score + 0.0)', "score + 0.0", "NaN is picked"),
        ("(0x7FFFFFFF - column).to(tl.int64)", "column.to(tl.int64)", "ties go to the highest entry"),
        (
            "        rank = tl.sum(above, axis=0)\n",
            "        rank = tl.sum(above, axis=0) // 2 * 2\n",
            "two picks share a rank",
        ),
    ],
    "scores.py": [
        (
            "    return tl.maximum(request, 0), (position + 1) // RATIO, weight, q\n",
            "    return tl.maximum(request, 0), position // RATIO, weight, q\n",
            "a query does not see the entry it completes",
        ),
    ],
    "attend.py": [
        (
            "        valid = number <= position\n",
            "        valid = number < position\n",
            "a query does not see its own row",
        ),
        (
            "        valid = asked & (entry >= 0) & (entry < visible)\n",
            "        valid = asked & (entry >= 0) & (entry <= visible)\n",
            "a query sees an entry of the future",
        ),
        (
            "        out *= beside_sink(sink_ptr, head, True, lse)\n",
            "        out *= 1.0\n",
            "the sink is ignored where keys are split",
        ),
        (
            "    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))\n    out = out",
            "    lse = tl.log2(tl.where(total == 0.0, 1.0, total))\n    out = out",
            "lse of split keys lacks the maximum",
        ),
    ],
    "softmax.py": [
        (
            "    return above, total * kept + tl.sum(weight, axis=1), weight, kept\n",
            "    return above, total + tl.sum(weight, axis=1), weight, kept\n",
            "earlier keys are weighted by an old maximum",
        ),
    ],
    "states.py": [
        (
            " - BEFORE + cell % BEFORE\n",
            " - 1 - cell % BEFORE\n",
            "inputs of before a step come last one first",
        ),
        (
            "    new = inside & (position >= tl.load(starts_ptr + request, mask=inside, other=0))\n",
            "    new = inside\n",
            "states of before the step are written over",
        ),
        (
            "tl.where(new, position, -1), inside & (back == 0),",
            "tl.where(new, position, -1), inside & (back >= 0),",
            "every length has the state of the last one",
        ),
        (
            "    taken = tl.minimum(tl.load(taken_ptr + request), new)\n",
            "    taken = new\n",
            "what was not taken is written",
        ),
        (
            "inside & (back == 0), head,\n",
            "inside & (back >= 0), head,\n",
            "every token that is taken leaves its state",
        ),
        (
            '    x = tl.where(given[:, None, None], x, float("nan"))\n',
            "",
            "a length without a state has one of zeros",
        ),
        (
            "    at = (source * R.heads + head)[:, None, None] * R.dim + channel\n",
            "    at = (source * R.heads)[:, None, None] * R.dim + channel\n",
            "every head is given the first one's state",
        ),
    ],
    "units.py": [
        ("    mask = at < tl.where(unit >= 0, size, 0)\n", "    mask = at < size\n", "unit -1 is filled"),
        (
            "    row = (tl.maximum(position, 0) % ROWS).to(tl.int64)\n",
            "    row = ((tl.maximum(position, 0) + 1) % ROWS).to(tl.int64)\n",
            "an abort puts back the rows beside those that were overwritten",
        ),
        (
            "inside + copy * ROWS * FIELDS[n][3]",
            "inside + copy * FIELDS[n][3]",
            "the second copy of a ring keeps what an aborted step wrote",
        ),
    ],
}

LAUNCHES = {
    "units.py": [
        (
            "((sources, targets, False), (targets, sources, True))",
            "((targets, sources, False), (sources, targets, True))",
            "sources and targets are swapped",
        ),
    ],
}

PALLAS = {
    "states.py": [
        (
            "lax.rem(places[i] - back + rows, jnp.int32(rows))",
            "lax.rem(places[i] + back, jnp.int32(rows))",
            "states after the one that is written become NaN, not those before it",
        ),
        (
            "            values = jnp.where(values != values, jnp.float32(jnp.nan), values)\n",
            "",
            "NaN of states are stored as they come",
        ),
        (
            "] * heads + lax.rem(number, jnp.int32(parts)) * some",
            "] * heads",
            "every piece of a state is its first one",
        ),
        (
            "piece[:, pl.ds(line, states.shape[2], stride=lines), :]",
            "piece[:, pl.ds(line * states.shape[2], states.shape[2]), :]",
            "halves of a state's rows come one after the other",
        ),
    ],
    "arithmetic.py": [
        ("((bits & MANTISSA) != 0)", "((bits & MANTISSA) > 0x400000)", "power-of-two scales round to nearest"),
        ("(1.25, 0), (1.75, 1)", "(1.25, 1), (1.75, 0)", "e2m1 ties go to the odd code"),
        (
            "    return jnp.where(special, values, clamped) if keep",
            "    return clamped if keep",
            "plain fields lose their infinities",
        ),
        (
            "    scaled = jnp.where(raised > 0, jnp.where(raised >= 255, INFINITY, normal), subnormal)\n",
            "    scaled = jnp.where(raised > 0, normal, 0)\n",
            "subnormal products are zero",
        ),
        ("    invalid = (exponent == 255) |", "    invalid = (exponent == 254) |", "a NaN scale reads as a number"),
    ],
    "store_rows.py": [
        (
            "        kept = words_of(old[...][None], buffer)[0] & ~mine\n",
            "        kept = words_of(old[...][None], buffer)[0]\n",
            "a row's old bits stay",
        ),
        (
            "            pl.when(unit >= 0)(lambda i=i, unit=unit, row=row: copy(i, unit, row).start())\n",
            "            pl.when(unit >= -1)(lambda i=i, unit=unit, row=row: copy(i, jnp.maximum(unit, 0), row).start())\n",
            "padding is written to unit 0",
        ),
    ],
    "compact.py": [
        (
            "        power = jnp.where(power == jnp.bfloat16(jnp.inf), jnp.bfloat16(-1), power)\n",
            "        pass\n",
            "a scale that is no number spoils the whole row",
        ),
        (
            "    return jnp.where(unit >= 0, 8 * buffer.line(row), -1)\n",
            "    return 8 * buffer.line(row)\n",
            "rows that do not exist are no zeros",
        ),
    ],
    "rings.py": [
        (
            "    low, high = jnp.where(around < 0, end - places, first), jnp.where(around < 0, first, end)\n",
            "    low, high = jnp.where(around < 0, end - places, first), jnp.where(around < 0, first + 1, end)\n",
            "the first row of a ring that goes around its end is zeros",
        ),
        (
            "    return jnp.minimum(first, places) - more, places, moved, more\n",
            "    return jnp.minimum(first, places), places, moved, more\n",
            "rows of a ring that change places take those of rows that are seen",
        ),
    ],
    "gather_rows.py": [
        (
            "        kept = jnp.where(jnp.broadcast_to(exists, line.shape), line, 0.0)\n",
            "        kept = line\n",
            "rows that do not exist are no zeros",
        ),
    ],
    "gather_blocks.py": [
        (
            "np.uint32(0xFF << 8 * line)",
            "np.uint32(0xFF)",
            "the last channels of each row are the first one's",
        ),
        (
            "        tile, line = block * size + buffer.first(row), buffer.line(row)\n",
            "        tile, line = block * size + number, buffer.line(row)\n",
            "rows of a second block are read out of the first",
        ),
    ],
    "flush.py": [
        (">= skipped[step]", ">= skipped[step] + 1", "the first row of a window is left out"),
        (
            "    return jnp.where(lax.broadcasted_iota(jnp.int32, first.shape, 0) < len(first) // 2, first, second)\n",
            "    return jnp.where(lax.broadcasted_iota(jnp.int32, first.shape, 0) < len(first) // 2, second, first)\n",
            "carry and cur are swapped",
        ),
        (
            "    return jnp.where(odd, other * sin + line * cos, line * cos - other * sin)\n",
            "    return jnp.where(odd, line * cos - other * sin, line * cos + other * sin)\n",
            "pairs are rotated the wrong way",
        ),
        (
            "        lines.append(line if exact else codes.to_bf16(line))\n    if weight",
            "        lines.append(line)\n    if weight",
            "no rounding after pooling",
        ),
    ],
    "top_k.py": [
        ("    score = jnp.where(score != score, -jnp.inf, score)\n", "", "NaN is picked"),
        ("(index < other_index))", "(index > other_index))", "ties go to the highest entry"),
    ],
    "softmax.py": [
        (
            "    total[...] = total[...] * kept + ",
            "    total[...] = total[...] + ",
            "earlier keys are weighted by an old maximum",
        ),
        (
            "    lse = jnp.where(sums == 0, -jnp.inf, largest[...] * np.float32(1 / LOG2E) + jnp.log(sums))\n",
            "    lse = largest[...] * np.float32(1 / LOG2E) + jnp.log(sums + 1)\n",
            "lse counts one key too many",
        ),
    ],
}

REPLAY = {
    "replay.py": [
        (
            "                key.append(value.dtype)\n",
            "",
            "bf16 is read by the kernel that was compiled for fp32",
        ),
        (
            "                if address % ALIGNED or not value.is_contiguous():\n",
            "                if not value.is_contiguous():\n",
            "an address off 16 bytes is given to a kernel that was compiled for one on them",
        ),
        (
            "                if address % ALIGNED or not value.is_contiguous():\n",
            "                if address % ALIGNED:\n",
            "a tensor with gaps is read as if it had none",
        ),
        (
            "                key.append(value)\n            else:\n",
            "            else:\n",
            "the first call's scale stays",
        ),
        (
            "        if indexed.index is not index:\n",
            "        if indexed.index is None:\n",
            "the first step's index is everybody's",
        ),
        (
            "        key = (indexed.kind, *key)\n",
            "        key = (0, *key)\n",
            "a step of other shapes is launched like the first",
        ),
        (
            "        if known is not token:\n",
            "        if known is None:\n",
            "rows go to pools that were replaced",
        ),
    ],
    "program.py": [
        (
            "in new])\n        for place, offset in self._offsets:\n            places += (places[place] + offset,)\n",
            "in new])\n        for place, offset in self._offsets:\n            places += (places[place],)\n",
            "a part of an array is taken from its start",
        ),
        (
            "two.data_ptr())\n        for place, offset in self._offsets:\n            places += (places[place] + offset,)\n",
            "two.data_ptr())\n        for place, offset in self._offsets:\n            places += (places[place],)\n",
            "a part of an array is taken from its start by layers that take turns",
        ),
        (
            "            if array.offset % ALIGNED:\n",
            "            if False:\n",
            "a part off 16 bytes is given to a kernel that was compiled for one on them",
        ),
        (
            "        if ready is None or ready[0] != device:\n            ready = ",
            "        if ready is None:\n            ready = ",
            "another device is given the first one's kernels",
        ),
        (
            "        if ready is None or ready[0] != device:\n            return",
            "        if ready is None:\n            return",
            "another device is given the first one's kernels by layers that take turns",
        ),
    ],
}
