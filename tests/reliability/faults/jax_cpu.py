"""Faults of the JAX backend's jax.numpy operations."""

TABLE = {
    "buckets.py": [
        (
            '        nothing = 0 if name in ("starts", "lengths", "stored", "left_padding") else -1\n',
            "        nothing = 0\n",
            "tokens that pad an eager step belong to its first request",
        ),
    ],
    "rows.py": [
        (
            "    return jnp.where(exists, unit, -1), rest(number, region.rows)\n",
            "    return unit, rest(number, region.rows)\n",
            "rows that do not exist have a unit",
        ),
        (
            "        exists &= column < index.block_table.shape[1]\n",
            "",
            "entries beyond the table lie in some block",
            "no verb asks for a row beyond a request's end, and the table has a block for every row before it",
        ),
        ("        stored = split_bytes(stored) if run.split else stored\n", "", "rope bytes are not split for tiles"),
        (
            "jnp.where(exists, join_bytes(stored) if run.split else stored, ",
            "jnp.where(exists, stored, ",
            "split bytes are not joined",
        ),
        (
            "        for copy in range(region.copies):\n",
            "        for copy in range(1):\n",
            "a ring's second copy is stale",
        ),
        ("    return jnp.cumsum(new) - new\n", "    return jnp.cumsum(new)\n", "own rows begin at the next request's"),
        (
            "(request >= 0) & (number >= start), of(first_token",
            "(request >= 0) & (number > start), of(first_token",
            "the step's first row is read from the pool",
        ),
        (
            "    return jnp.where(new, own[jnp.clip(token, 0, len(own) - 1)], stored)\n",
            "    return jnp.where(new, own[jnp.clip(token, 0, len(own) - 2)], stored)\n",
            "the last own row is the one before",
        ),
        (
            "        first = of(index.lengths, index.request_index) - region.rows\n",
            "        first = of(index.starts, index.request_index)\n",
            "rows that the step overwrites are written, in any order",
            "XLA scatters in order on a CPU, so that the newest row stays; only an accelerator gives no order",
        ),
        (
            "        first = of(index.stored, index.request_index)\n",
            "        first = of(index.starts, index.request_index)\n",
            "what was taken over is written again",
        ),
        ("    return jnp.where(request >= 0, found, -1)\n", "    return found\n", "padding has request 0's numbers"),
        (
            "    numbers = first[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]\n    return jnp.where(numbers < end",
            "    numbers = first[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]\n    return jnp.where(numbers <= end",
            "one row too many is listed",
        ),
        (
            "    left = 0 if index.left_padding is None else index.left_padding\n",
            "    left = 0\n",
            "left padding counts as tokens in gathers",
        ),
        (
            "    if run.stride == run.nbytes and not run.split and head_step == 1:\n",
            "    if not run.split and head_step == 1:\n",
            "heads that lie apart are taken for neighbours",
        ),
    ],
    "window.py": [
        (
            "        rows = rows if region.format.is_fp32 else to_bf16(rows)\n",
            "",
            "no rounding between norm and rotation",
        ),
        (
            "    rows = rotate(rows, index.positions, rope)\n",
            "    rows = rotate(rows, index.positions + 1, rope)\n",
            "rows are rotated by the next position",
        ),
        ("jnp.where((positions >= 0)[:, :, None], values, 0)", "values", "rows that are not there are not zero"),
        (
            "    own = None if rows is None else place.encode_rows(region, rows)\n",
            "    own = None\n",
            "a long step's own rows are read from the ring",
        ),
    ],
    "tail.py": [
        (
            "        keys = jnp.concatenate([keys[:, :m, :d], keys[:, m:, d:]], axis=1)\n",
            "        keys = jnp.concatenate([keys[:, :m, d:], keys[:, m:, :d]], axis=1)\n",
            "carry and cur are swapped in kv",
        ),
        (
            "    scores = jnp.where((positions >= 0)[:, :, None], scores, -jnp.inf)\n",
            "",
            "rows before the first window take part",
        ),
        (
            "    latents = latents if exact else to_bf16(latents)\n    if norm_weight",
            "    if norm_weight",
            "no rounding after pooling",
        ),
        (
            "        latents = rms_norm(latents, norm_weight, eps)\n        latents = latents if exact else to_bf16(latents)\n",
            "        latents = rms_norm(latents, norm_weight, eps)\n",
            "no rounding after the norm",
        ),
        (
            "rotate(latents, entries * component.ratio, rope)",
            "rotate(latents, entries, rope)",
            "entries are rotated by their number",
        ),
        (
            "    first = (entry - 1 if overlap else entry) * ratio\n",
            "    first = entry * ratio\n",
            "the window before an entry's own is the one after",
        ),
        ("jnp.sqrt(mean + np.float32(eps))", "jnp.sqrt(mean)", "eps is forgotten"),
        (
            "even * cos - odd * sin, even * sin + odd * cos",
            "even * cos + odd * sin, even * sin - odd * cos",
            "pairs are rotated the wrong way",
        ),
        (
            "    return jnp.where((request >= 0)[:, None], latents, 0)\n",
            "    return latents\n",
            "entries that do not close are no zeros",
            "no row is in the window of an entry that does not close: pooled it is zeros, and the norm leaves zeros",
        ),
    ],
    "entries.py": [
        (
            "values, layer.global_scale(role))\n\n\ndef closed",
            "values)\n\n\ndef closed",
            "the global scale is forgotten in a store",
        ),
        ("(entry + 1) * ratio <= place", "entry * ratio <= place", "the first entry of a step counts as taken over"),
        ("row[:, None] >= ends[None]", "row[:, None] > ends[None]", "the next request's first entry is the last one's"),
        (
            "    request = jnp.where(request < len(ends), request, -1)\n",
            "",
            "rows beyond the last entry name a request",
        ),
        (
            "(indices >= 0) & (indices < count[:, None])",
            "(indices >= 0) & (indices <= count[:, None])",
            "an entry that does not exist yet is read",
        ),
        ("index, entry, layer.global_scale(role))", "index, entry)", "the global scale is forgotten in a gather"),
        (
            "jnp.where(entry >= 0, entry * component.ratio, -1)",
            "jnp.where(entry >= 0, entry, -1)",
            "entries say their number for a position",
        ),
    ],
    "blocks.py": [
        (
            "table = lax.dynamic_slice_in_dim(index.block_table, number, 1)",
            "table = lax.dynamic_slice_in_dim(index.block_table, 0 * number, 1)",
            "every request attends to the first one's rows",
        ),
        (
            "index.block_table[safe], q[:, :, None]",
            "index.block_table[0 * safe], q[:, :, None]",
            "every token attends to the first request's rows",
        ),
        (
            "newest - age, -1)",
            "held, -1)",
            "a ring's rows are taken for the first positions",
        ),
        (
            "        bounds = place.divided(least, count), place.divided(most_seen + count - 1, count)\n",
            "        bounds = place.divided(least, count), place.divided(most_seen, count)\n",
            "the last piece is not read unless it is whole",
        ),
        (
            "rows[:, None] >= seen.first[:, :, None]",
            "rows[:, None] > seen.first[:, :, None]",
            "a window's first row is not seen",
        ),
        (
            "(rows.position[None] <= position[:, None])",
            "(rows.position[None] < position[:, None])",
            "a query does not see its own row among the step's",
        ),
    ],
    "kv.py": [
        ("(rows <= query)\n", "(rows < query)\n", "a query does not see its own row"),
        ("    return seen & (index.request_index >= 0)[:, None]\n", "    return seen\n", "padding tokens see rows"),
        (
            "    left = 0 if index.left_padding is None else place.of(index.left_padding, index.request_index)[:, None]\n",
            "    left = 0\n",
            "left padding is seen",
        ),
        (
            "    column = jnp.clip(index.positions - place.of(index.starts, request), 0",
            "    column = jnp.clip(index.positions, 0",
            "a batch's columns are taken for positions",
        ),
        (
            "(jnp.cumsum(new) - new)[:, None] + column, 0)",
            "jnp.cumsum(new)[:, None] + column - new[0], 0)",
            "rows go to another request's batch row",
        ),
        (
            "        gathered.append(jnp.where((positions >= 0)[:, :, None, None], dense, 0))\n",
            "        gathered.append(dense)\n",
            "rows that are not there are no zeros",
        ),
        (
            "factor = jnp.float32(dim**-0.5 if scale is None else scale)",
            "factor = jnp.float32(dim**-0.5)",
            "a scale that is given is ignored",
        ),
    ],
    "lifecycle.py": [
        ("    return jnp.where(units >= 0, units, pool.shape[0])\n", "    return units\n", "unit -1 is the last one"),
        ("    if fresh is None:\n        fresh", "    if True:\n        fresh", "a fresh tail's score is 0, not -inf"),
        ('np.frombuffer(b"\\xff"', 'np.frombuffer(b"\\x00"', "freed rows are zeros, not poison"),
        (
            "jnp.where(numbers >= 0, numbers * component.tokens_per_row, -1))",
            "numbers)",
            "raw entries say their number for a position",
        ),
        (
            "jnp.where(raw.positions >= 0, raw.positions // step, -1)",
            "raw.positions",
            "raw entries are stored at their position's number",
        ),
        ("        first = last\n", "        first = 0\n", "values are stored from the keys' bytes"),
        (
            "        mixed = jnp.where(valid, mix(words ^ key), np.uint32(0))\n",
            "        mixed = mix(words ^ key)\n",
            "rows that are not live count in a digest",
        ),
        ("(salt + np.uint32(seed))", "np.uint32(seed)", "a digest does not say which pool it is of"),
    ],
    "indexer.py": [
        ("jnp.maximum(products, 0)", "products", "scores without relu"),
        (
            "place.divided(position + 1, component.ratio), 0)",
            "place.divided(position, component.ratio), 0)",
            "a query does not see the entry it completes",
        ),
        (
            "    return hadamard(q.reshape(-1, component.dim)).reshape(q.shape) if component.parts[0].format.hadamard else q\n",
            "    return q\n",
            "queries are not rotated for rotated keys",
        ),
        ("    scores = jnp.where(scores == 0, 0, scores)\n", "", "-0 and 0 do not tie"),
        ("    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)\n", "", "NaN is picked"),
        (
            "jnp.where(best > -jnp.inf, indices.astype(jnp.int32), -1)",
            "indices.astype(jnp.int32)",
            "invisible entries are picked",
        ),
        ("constant_values=-1)", "constant_values=0)", "entry 0 fills the end"),
    ],
    "attention.py": [
        (
            "numbers = position[:, None] - window.window + 1 +",
            "numbers = position[:, None] - window.window +",
            "the window ends before the query",
        ),
        (
            "(selected >= 0) & (selected < count[:, None])",
            "(selected >= 0) & (selected <= count[:, None])",
            "a query sees an entry of the future",
        ),
        (
            "rotate(rows, jnp.repeat(-positions, out.shape[1]), rope)",
            "rotate(rows, jnp.repeat(positions, out.shape[1]), rope)",
            "outputs are turned forward",
        ),
        ("    values = jnp.where(valid[:, :, None, None], values, 0)\n", "", "a NaN row that no query sees spreads"),
        (
            "    base = jnp.where(jnp.isneginf(higher), 0, higher)\n",
            "    base = higher\n",
            "a query without keys gives NaN",
        ),
        (
            "state[1] * kept + total, state[2]",
            "state[1] + total, state[2]",
            "earlier keys are weighted by an old maximum",
        ),
        ("largest + jnp.log(", "jnp.log(", "lse lacks the maximum"),
        ("    if sink is not None:\n", "    if False:\n", "the sink is ignored"),
        (
            "place.divided(jnp.max(count, initial=0) + size - 1, size)",
            "place.divided(jnp.max(count, initial=0), size)",
            "the last round of entries is left out",
        ),
    ],
    "encoding.py": [
        ("    if format.hadamard:\n        values = hadamard(values)\n", "", "keys are not rotated"),
        (
            "                values = times_layer(values, global_scale) if format.global_scaled else values\n",
            "",
            "the global scale is forgotten in decoding",
        ),
        (
            "    amax = from_bits(jnp.max(bits_of(groups) & ~SIGN, axis=2))\n",
            "    amax = jnp.max(jnp.abs(jnp.nan_to_num(groups)), axis=2)\n",
            "a group with NaN looks finite",
        ),
        (
            "jnp.where(finite, amax, 0), np.float32(format.amax_floor))",
            "jnp.where(finite, amax, 0), np.float32(0))",
            "a group of zeros has scale 0",
        ),
        (
            "        return divide(groups, scales)\n",
            "        return groups * (np.float32(1) / scales)\n",
            "codes come from a product with the reciprocal",
        ),
        (
            "jnp.where(finite[:, :, None], ratios_of(groups, scales[:, :, None], field), 0)",
            "ratios_of(groups, scales[:, :, None], field)",
            "a faulty group keeps codes",
        ),
        (
            "    scale_bits = jnp.where(finite, scale_bits, scale.nan or 0)",
            "    scale_bits = jnp.where(finite, scale_bits, 0)",
            "a faulty group has scale 0, not NaN",
        ),
        (
            "values[:, :, None] > NF4_MIDPOINTS[None, None]",
            "values[:, :, None] >= NF4_MIDPOINTS[None, None]",
            "an NF4 midpoint takes the upper level",
        ),
        (
            "        return bytes_of(jnp.where(bits & ~SIGN > INFINITY, np.uint32(CODES[code].nan or 0), bits))\n",
            "        return bytes_of(bits)\n",
            "fp32 keeps the payload of a NaN",
        ),
        (
            "    return bytes_of(jnp.where(jnp.isnan(values), CODES[code].nan or 0, bits).astype(bits.dtype))\n",
            "    return bytes_of(bits)\n",
            "bf16 keeps the sign of a NaN",
        ),
        ("codes[:, 0::2] | codes[:, 1::2] << 4", "codes[:, 1::2] | codes[:, 0::2] << 4", "nibbles are swapped"),
        (
            "    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)\n",
            "    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=8)\n",
            "bf16 has a bit too many",
        ),
    ],
}
