"""Faults of the torch backend's plain operations, but for its attention."""

TABLE = {
    "rows.py": [
        ("    row = number % region.rows\n", "    row = (number + 1) % region.rows\n", "every row lies one further"),
        ("    known = (request >= 0) & (number >= 0)\n", "    known = number >= 0\n", "padding writes to request 0"),
        (
            "torch.where(known, index.slots[request], -1).long(), row",
            "torch.where(known, index.slots[request], 0).long(), row",
            "padding writes to slot 0",
        ),
        ("column.clamp(max=columns - 1)]", "column.clamp(max=columns - 2)]", "the last block is the one before it"),
        (
            "torch.where(known & (column < columns), unit, -1)",
            "torch.where(known, unit, -1)",
            "entries beyond the table lie in the last block",
            "what is asked for beyond a request's rows is -1 before it comes here, or is blanked by what is valid",
        ),
        ("        stored = join_bytes(stored) if place.split else stored\n", "", "split bytes are not joined"),
        ("rows.masked_fill_(~known[:, None, None], 0)", "rows", "rows of no unit read what unit 0 holds"),
        (
            "        stored = split_bytes(rows[:, :, first:last]) if place.split else rows[:, :, first:last]\n",
            "        stored = rows[:, :, first:last]\n",
            "rope bytes are not split for tiles",
        ),
        (
            "        for copy in range(region.copies):\n",
            "        for copy in range(1):\n",
            "a ring's second copy is stale",
        ),
        (
            "torch.cat([stored[..., 1::2], stored[..., 0::2]], dim=-1)",
            "torch.cat([stored[..., 0::2], stored[..., 1::2]], dim=-1)",
            "low bytes come first in split planes",
        ),
        (
            "    return of_request(new.cumsum(0) - new, request)\n",
            "    return of_request(new.cumsum(0), request)\n",
            "a request's own rows begin at the next request's",
        ),
        (
            "    return torch.where(new[..., None, None], own[token], stored)\n",
            "    return torch.where(new[..., None, None], stored, own[token])\n",
            "own and stored rows are swapped",
        ),
        (
            "& (number >= 0) & (since >= 0)\n",
            "& (number >= 0) & (since > 0)\n",
            "the step's first row is read from the pool",
        ),
        (
            'index.lengths - region.rows if region.growth == "slot" else index.stored',
            "index.lengths - region.rows",
            "what was taken over is written again",
        ),
        ("torch.where(left_out, -1, unit)", "unit", "rows that the step itself overwrites are written, in any order"),
        (
            "torch.where(column < count[:, None], first[:, None].long() + column, -1)",
            "torch.where(column <= count[:, None], first[:, None].long() + column, -1)",
            "one row too many is listed",
        ),
        (
            "    return values.masked_fill_(~valid.reshape(*valid.shape, *[1] * (values.ndim - valid.ndim)), 0)\n",
            "    return values.mul_(valid.reshape(*valid.shape, *[1] * (values.ndim - valid.ndim)))\n",
            "what is not valid is blanked by a product: 0 times NaN",
        ),
    ],
    "window.py": [
        (
            "    rows = rotate(rows, index.positions, rope)\n",
            "    rows = rotate(rows, index.positions + 1, rope)\n",
            "rows are rotated by the next position",
        ),
        (
            "        rows = rows if region.format.is_fp32 else to_bf16(rows)\n",
            "",
            "no rounding between norm and rotation",
        ),
        ("place.blank(values[:, :, 0], positions >= 0)", "values[:, :, 0]", "rows that are not there are not zero"),
        (
            "    own = None if rows is None else place.encode_rows(region, rows)\n",
            "    own = None\n",
            "a long step's own rows are read from the ring",
        ),
    ],
    "tail.py": [
        (
            "            keys = torch.cat([keys[:, :m, :d], keys[:, m:, d:]], dim=1)\n",
            "            keys = torch.cat([keys[:, :m, d:], keys[:, m:, :d]], dim=1)\n",
            "carry and cur are swapped in kv",
        ),
        (
            "            scores = torch.cat([scores[:, :m, :d], scores[:, m:, d:]], dim=1)\n",
            "            scores = torch.cat([scores[:, :m, d:], scores[:, m:, :d]], dim=1)\n",
            "carry and cur are swapped in the scores",
        ),
        (
            "torch.where((positions >= 0)[:, :, None], scores, -torch.inf)",
            "scores",
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
            "rotate(latents, entries * component.ratio, compression.rope)",
            "rotate(latents, entries, compression.rope)",
            "entries are rotated by their number, not their position",
        ),
        (
            "    before = ratio if overlap else 0\n",
            "    before = ratio - 1 if overlap else 0\n",
            "the window before an entry is one row short",
        ),
        (
            "    largest = torch.where(largest.isneginf(), 0, largest)\n    weights = torch.exp(scores - largest)\n",
            "    weights = torch.exp(scores - largest)\n",
            "a window without weight gives NaN",
        ),
        (
            "    products = torch.where(weights == 0, 0, weights * keys).sum(dim=1)\n",
            "    products = (weights * keys).sum(dim=1)\n",
            "a NaN row of weight 0 spreads",
        ),
        (
            "    return values * (mean + eps).sqrt().reciprocal() * weight.to(torch.float32)\n",
            "    return values * mean.sqrt().reciprocal() * weight.to(torch.float32)\n",
            "eps is forgotten",
        ),
        (
            "even * cos - odd * sin, even * sin + odd * cos",
            "even * cos + odd * sin, even * sin - odd * cos",
            "pairs are rotated the wrong way",
        ),
    ],
    "entries.py": [
        (
            "    rows = place.encode_rows(region, values, layer.global_scale(role))\n",
            "    rows = place.encode_rows(region, values)\n",
            "the global scale is forgotten in a store",
        ),
        (
            "(entry + 1) * layer.component(role).ratio <= ",
            "entry * layer.component(role).ratio <= ",
            "the first entry of a step counts as taken over",
        ),
        (
            "    first = index.starts // ratio\n",
            "    first = (index.starts + ratio - 1) // ratio\n",
            "the entry that was begun before the step does not close",
        ),
        (
            "torch.searchsorted(ends, row, right=True, out_int32=True)",
            "torch.searchsorted(ends, row, out_int32=True)",
            "the next request's first entry is the last one's",
        ),
        (
            "    request = torch.where(request < len(ends), request, -1)\n    begins",
            "    begins",
            "rows beyond the last entry name a request",
        ),
        (
            "& (indices >= 0) & (indices < counts)",
            "& (indices >= 0) & (indices <= counts)",
            "an entry that does not exist yet is read",
        ),
        ("    valid = (request >= 0) & (indices", "    valid = (indices", "padding tokens read entries"),
        (
            "SelectedEntries(place.blank(place.decode_rows(region, stored)[:, :, 0], valid), valid)",
            "SelectedEntries(place.decode_rows(region, stored)[:, :, 0], valid)",
            "invalid picks read what a zero row decodes to",
        ),
        (
            "place.decode_rows(region, stored, layer.global_scale(role))[:, :, 0]",
            "place.decode_rows(region, stored)[:, :, 0]",
            "the global scale is forgotten in a gather",
        ),
        (
            "torch.where(entries >= 0, entries * component.ratio, -1)",
            "torch.where(entries >= 0, entries, -1)",
            "entries say their number for a position",
        ),
    ],
    "lifecycle.py": [
        ("        if slot >= 0:\n", "        if slot > 0:\n", "slot 0 is not reset"),
        (
            "pool[slot].zero_() if unit is None else pool[slot].copy_(unit)",
            "pool[slot].zero_()",
            "a fresh tail's score is 0, not -inf",
        ),
        (
            "pool.index_fill_(0, units.long(), 0xFF)",
            "pool.index_fill_(0, units.long(), 0)",
            "freed rows are zeros, not poison",
        ),
        (
            "    return pool.index_copy_(0, targets.long(), pool.index_select(0, sources.long()))\n",
            "    for a, b in zip(sources.tolist(), targets.tolist(), strict=True):\n        pool[b] = pool[a]\n    return pool\n",
            "sources are read after targets were written",
        ),
        (
            "pool.index_copy_(0, targets.long(), pool.index_select(0, sources.long()))",
            "pool.index_copy_(0, sources.long(), pool.index_select(0, targets.long()))",
            "sources and targets are swapped",
        ),
        (
            "    positions = torch.where(numbers >= 0, numbers * component.tokens_per_row, -1)\n",
            "    positions = numbers\n",
            "raw entries say their number for a position",
        ),
        (
            "torch.where(positions >= 0, positions // layer.component(role).tokens_per_row, -1)",
            "positions",
            "raw entries are stored at their position's number",
        ),
        (
            "            lanes[:, lane] += mixed.sum(dim=(1, 2))\n",
            "            lanes[:, lane] = mixed.sum(dim=(1, 2))\n",
            "a digest has only the last portion of a long request",
        ),
        (
            "            mixed.masked_fill_(missing, 0)\n",
            "",
            "rows that are not live count in a digest",
        ),
    ],
    "kv.py": [
        (
            "    position = place.of_request(_positions_of(component, index, columns), request)\n",
            "    position = _positions_of(component, index, columns)[:1]\n",
            "masks are the first request's",
        ),
        (
            "seen = (position >= first) & (position <= query) & (position >= 0)",
            "seen = (position >= first) & (position < query) & (position >= 0)",
            "a query does not see its own row",
        ),
        (
            "seen = (position >= first) & (position <= query) & (position >= 0)",
            "seen = (position <= query) & (position >= 0)",
            "a sliding layer sees what is beyond its window",
        ),
        (
            "    return seen & (request >= 0)[:, None]\n",
            "    return seen\n",
            "padding tokens see rows",
            "a padding token's position is -1, before every row",
        ),
        (
            "    left = 0 if index.left_padding is None else index.left_padding\n",
            "    left = 0\n",
            "left padding counts as tokens in gathers",
        ),
        (
            "    left = 0 if index.left_padding is None else place.of_request(index.left_padding, request)[:, None]\n",
            "    left = 0\n",
            "left padding is seen",
        ),
        (
            "clamp(min=0, max=batch.shape[1] - 1)",
            "clamp(min=1, max=batch.shape[1] - 1)",
            "the first column of a batch is lost",
        ),
        (
            "    column = (index.positions - place.of_request(index.starts, request))",
            "    column = index.positions",
            "a batch's columns are taken for positions",
        ),
        (
            "place.blank(batch[request.clamp(min=0).long(), column.long()], request >= 0)",
            "batch[request.clamp(min=0).long(), column.long()]",
            "padding rows of a batch are request 0's",
        ),
        (
            "    token = torch.where(valid, (new.cumsum(0) - new)[:, None] + column, 0)\n",
            "    token = torch.where(valid, new.cumsum(0)[:, None] + column - new[0], 0)\n",
            "rows go to another request's batch row",
        ),
        (
            "    if tokens > len(keys) and bool(values.isfinite().all()):\n",
            "    if tokens > len(keys):\n",
            "a row that no query sees spreads its NaN in a long step",
        ),
        ("            place.blank(block[2], seen[some])\n", "", "a row that the query does not see spreads its NaN"),
        (
            "            block = q[None, some], keys[request], values[request], seen[None, some]\n",
            "            block = q[None, some], keys[:1], values[:1], seen[None, some]\n",
            "every request attends to the first one's rows",
        ),
        (
            "        keys = keys[:, :, shared * keys.shape[2] // heads]\n",
            "        keys = keys[:, :, shared % keys.shape[2]]\n",
            "query heads share the wrong key head",
        ),
        (
            "        values = values[:, :, shared * values.shape[2] // heads]\n",
            "        values = values[:, :, shared % values.shape[2]]\n",
            "query heads share the wrong value head",
        ),
        (
            "    scale = dim**-0.5 if scale is None else scale\n    out",
            "    scale = dim**-0.5\n    out",
            "a scale that is given is ignored",
        ),
    ],
    "encoding.py": [
        (
            "    if last != 1 or any(step % dtype.itemsize for step in steps):\n",
            "    if last != 1:\n",
            "bytes at odd addresses are viewed as wider elements",
        ),
        ("        values = hadamard(values)\n    rows", "        pass\n    rows", "keys are not rotated"),
        (
            "            values = values * global_scale if format.global_scaled else values\n",
            "",
            "the global scale is forgotten in decoding",
        ),
        (
            "    groups = groups.clamp(-limit, limit)\n",
            "",
            "values beyond the code's range are not clamped",
        ),
        ("clamp(format.amax_floor, limit)", "clamp(0, limit)", "a group of zeros has scale 0"),
        (".clamp(min=format.scale_floor)", "", "a small tile's scale is not floored"),
        (
            "torch.where(finite[:, :, None], ratios_of(groups, scales[:, :, None], field), 0)",
            "ratios_of(groups, scales[:, :, None], field)",
            "a faulty group keeps codes",
        ),
        (
            "        codes.masked_fill_(~finite.repeat_interleave(field.width // 2, dim=1)[:, : codes.shape[1]], 0)\n",
            "        pass\n",
            "a faulty NF4 group stores code 7",
        ),
        (
            "    scale_bits = torch.where(finite, scale_bits, scale.nan or 0)",
            "    scale_bits = torch.where(finite, scale_bits, 0)",
            "a faulty group has scale 0, not NaN",
        ),
        ("+ ((bits & 0x7FFFFF) != 0)\n", "+ ((bits & 0x7FFFFF) > 0x400000)\n", "power-of-two scales round to nearest"),
        (
            "torch.where(exponent == 0, 0x00400000, exponent << 23)",
            "exponent << 23",
            "the smallest power-of-two scale reads as 0",
        ),
        ("torch.where(exponent == 0xFF, 0x7FC00000, bits)", "bits", "a NaN scale reads as infinite"),
        ('E4M3_SCALE_SMALLEST, CODES["e4m3"].largest)', '0, CODES["e4m3"].largest)', "a tiny group has scale 0"),
        (
            '    scales = amax if field.rule == "absmax" else product\n',
            "    scales = product\n",
            "NF4 scales are products",
            "the largest of the NF4 levels is 1, so the product is the maximum itself",
        ),
        (
            "torch.bucketize(values.contiguous(), edges, out_int32=True)",
            "torch.bucketize(values.contiguous(), edges, out_int32=True, right=True)",
            "an NF4 midpoint takes the upper level",
        ),
        (
            "torch.bucketize(values.abs(), e2m1_edges(values.device), out_int32=True)",
            "torch.bucketize(values.abs(), e2m1_edges(values.device), out_int32=True, right=True)",
            "an e2m1 tie goes to the odd code",
        ),
        (
            "    upward = torch.arange(len(middle)) % 2 == 1\n",
            "    upward = torch.arange(len(middle)) % 2 == 0\n",
            "e2m1 ties go to the odd code",
        ),
        (
            "        magnitude = torch.where(values.isnan(), 0, magnitude)\n",
            "",
            "NaN in an unscaled e2m1 field is the largest",
        ),
        (
            "        return values.nan_to_num(nan=0.0).round()",
            "        return values.nan_to_num(nan=0.0).trunc()",
            "int8 codes are cut, not rounded",
        ),
        (
            "        bits = torch.where(values.isinf(), bits | 0x7F, bits)\n",
            "        pass\n",
            "an infinity in unscaled e4m3 becomes 448",
        ),
        (
            '    return clamped if code in ("int8", "e2m1") else torch.where(values.isinf(), values, clamped)\n',
            "    return clamped\n",
            "plain fields lose their infinities",
        ),
        (
            "    return torch.where(values.isnan(), CODES[code].nan or 0, bits)",
            "    return bits",
            "the payload of a NaN is kept",
        ),
        ("codes[:, 0::2] | codes[:, 1::2] << 4", "codes[:, 1::2] | codes[:, 0::2] << 4", "nibbles are swapped"),
        (
            "[pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]]",
            "[pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 1] - pairs[:, :, 0]]",
            "the rotation's differences have the other sign",
        ),
        (
            "    return to_bf16(values.reshape(rows, dim) * dim**-0.5)\n",
            "    return values.reshape(rows, dim) * dim**-0.5\n",
            "rotated rows are not rounded to bf16",
        ),
    ],
    "device_index.py": [
        (
            "            changed = np.flatnonzero(versions != self._versions)\n",
            "            changed = np.flatnonzero(versions > self._versions)\n",
            "padding keeps the block table of the request that was there",
        ),
        (
            "                width = int(np.maximum(filled, self._filled)[changed].max())\n",
            "                width = int(filled[changed].max())\n",
            "blocks of a longer request stay in a shorter one's table",
        ),
    ],
}
