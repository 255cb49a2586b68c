"""Faults of the torch backend's plain operations."""

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
    "indexer.py": [
        (
            "        q = hadamard(q.reshape(-1, component.dim)).reshape(q.shape)\n",
            "        pass\n",
            "queries are not rotated for rotated keys",
        ),
        (
            "(index.positions + 1) // component.ratio, 0)",
            "index.positions // component.ratio, 0)",
            "a query does not see the entry it completes",
        ),
        ("        products = torch.relu(q[some]", "        products = (q[some]", "scores without relu"),
        (
            "torch.where(index.request_index >= 0, (index",
            "torch.where(index.request_index >= -1, (index",
            "padding tokens have scores",
            "a padding token's position is -1, before which there is no entry",
        ),
        (
            "torch.where(scores.isnan(), -torch.inf, scores.to(torch.float32)) + 0.0",
            "scores.to(torch.float32) + 0.0",
            "NaN is the highest score",
        ),
        (
            "torch.where(scores.isnan(), -torch.inf, scores.to(torch.float32)) + 0.0",
            "torch.where(scores.isnan(), -torch.inf, scores.to(torch.float32))",
            "-0 and 0 do not tie",
            "sort compares -0 and 0 as equal on the CPU, and stays stable; devices that order by bits need the sum",
        ),
        (
            "scores.sort(dim=1, descending=True, stable=True)",
            "scores.flip(1).sort(dim=1, descending=True, stable=True)",
            "columns are counted from the end",
        ),
        ("torch.where(best > -torch.inf, order, -1)", "order", "invisible entries are picked"),
        ("    found = min(k, scores.shape[1])\n", "    found = min(k, scores.shape[1]) - 1\n", "one pick too few"),
    ],
    "attention.py": [
        (
            "number = position - torch.arange(component.window - 1, -1, -1",
            "number = position - torch.arange(component.window, 0, -1",
            "the window ends before the query",
        ),
        (
            "        line = request * region.rows + number % region.rows\n",
            "        line = request * region.rows + number % component.window\n",
            "a ring with spare rows is read at the wrong place",
        ),
        (
            "            new, token = place.own_token(index, request, number, len(rows))\n            line = torch.where(new, ring + token, line)\n",
            "            pass\n",
            "a long step's queries read overwritten rows",
        ),
        (
            "(number < (position + 1) // component.ratio)",
            "(number <= (position + 1) // component.ratio)",
            "a query sees an entry of the future",
        ),
        (
            "table[torch.where(seen, request * most + number, 0)]",
            "table[torch.where(seen, number, 0)]",
            "entries are always request 0's",
        ),
        (
            "place.blank(torch.cat(keys, dim=1), torch.cat(seen, dim=1))",
            "torch.cat(keys, dim=1)",
            "a NaN row that no query sees spreads",
        ),
        (
            "rotate(rows, -positions.repeat_interleave(out.shape[1]), rope)",
            "rotate(rows, positions.repeat_interleave(out.shape[1]), rope)",
            "outputs are turned forward",
        ),
        (
            "rotate(rows, -positions.repeat_interleave(out.shape[1]), rope)",
            "rotate(rows, -positions.repeat(out.shape[1]), rope)",
            "outputs are turned by another token's position",
        ),
        (
            "    logits = torch.where(seen, q @ keys.transpose(-1, -2) * scale, -torch.inf)\n",
            "    logits = torch.where(seen, q @ keys.transpose(-1, -2), -torch.inf)\n",
            "the scale is forgotten",
        ),
        ("    lse = largest + torch.log(total)\n", "    lse = torch.log(total)\n", "lse lacks the maximum"),
        (
            "    out = weights @ values / torch.where(total == 0, 1, total)[..., None]\n",
            "    out = weights @ values / total[..., None]\n",
            "a query without keys gives NaN",
        ),
        (
            "torch.where(total == 0, 0, 1 / (1 + torch.exp(sink.to(torch.float32) - lse)))[..., None] * out",
            "out",
            "the sink is ignored",
        ),
        (
            "torch.exp(sink.to(torch.float32) - lse)",
            "torch.exp(sink.to(torch.float32) * 0.5 - lse)",
            "the sink is scaled",
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
    "cpu_views.py": [
        (
            "kept[1]() is not None or",
            "False or",
            "an output is handed out again while somebody holds it",
        ),
        ("        if kept is not index:", "        if kept is None:", "any index gets the last one's numbers"),
        (
            "    if kept is not None and (pools is kept.pools or pools[kept.name] is kept.pool):\n",
            "    if kept is not None:\n",
            "rows of pools that were replaced are read",
        ),
        (
            "    begin, step = pool.storage_offset() + first.base, pool.stride(0)\n",
            "    begin, step = pool.storage_offset(), pool.stride(0)\n",
            "a field's offset in its unit is forgotten",
            "a plain format has one field, which begins its unit in every layout",
        ),
        (
            "        row = first % region.rows\n        some",
            "        row = (first + 1) % region.rows\n        some",
            "runs begin one row further",
        ),
        (
            "        some = min(last - first, rows - row)\n",
            "        some = last - first\n",
            "a run goes on beyond its unit",
        ),
        (
            "        if count and start == line + count:\n",
            "        if count:\n",
            "blocks that are no neighbours make one run",
        ),
        (
            "    if not all(complete(region, host) for region in regions):\n        return None\n    requests",
            "    requests",
            "a context shard reads blocks that are elsewhere",
        ),
        (
            "            out[request, :, column:].zero_()\n",
            "            pass\n",
            "columns beyond a request's rows hold what memory held",
        ),
        ("copy_(within(mine, PLAIN[rows.dtype]))", "copy_(mine)", "a finite value becomes infinite in fp16"),
        (
            ".nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)\n            continue",
            "\n            continue",
            "the payload of a NaN is kept where it is rounded",
        ),
        (
            "        torch.nan_to_num(mine, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf, out=there)\n",
            "        there.copy_(mine)\n",
            "the payload of a NaN is kept",
        ),
        (
            '        least = length - region.rows if region.growth == "slot" else host.stored[request]\n',
            "        least = length - region.rows\n",
            "what was taken over is written again",
        ),
        (
            "        first = start if every else max(start, least)\n",
            "        first = start\n",
            "rows that the step overwrites are written first",
        ),
        (
            "        source = token + first - start\n",
            "        source = token\n",
            "the surviving rows of a long step are its first ones",
        ),
        (
            "    key = row_indices, stored.kind, every\n",
            "    key = spots, every\n",
            "places of one layer are used for layers that lie otherwise",
        ),
        (
            "    key = seen_place, stored.kind, component, columns\n",
            "    key = seen_place, stored.kind, columns\n",
            "what one layer's queries see is lent for another's",
        ),
        (
            "    apart = (region.rows * row,) if region.copies > 1 else ()\n",
            "    apart = ()\n",
            "a ring's second copy is stale",
        ),
        (
            "    if step < 0 or any(begin != begins[0] + step * number for number, begin in enumerate(begins)):\n",
            "    if step < 0:\n",
            "another request's rows are lent where requests lie unevenly",
        ),
        (
            "    if not seen or any(len(rows) != columns for rows in seen):\n",
            "    if not seen:\n",
            "rows beyond a short request are lent",
        ),
        ("        if more:\n            return None\n", "", "the first run is lent for all"),
        (
            "    alike = (keys.heads, keys.format.dim) == (values.heads, values.format.dim)\n",
            "    alike = keys.format.dim == values.format.dim\n",
            "keys and values of different heads share one group",
        ),
    ],
    "cpu_attention.py": [
        (
            "    if length <= max(start, left):\n",
            "    if length <= start:\n",
            "a request of padding alone attends",
            "all its rows are masked then, and what is not finite among them is left to the other way",
        ),
        (
            "        total = total * torch.sigmoid(logs - sink.to(torch.float32))[..., None]\n",
            "        pass\n",
            "the sink is ignored",
        ),
        (
            "    first = component.first_visible(max(start, left), left)\n",
            "    first = component.first_visible(start, 0)\n",
            "left padding is attended to",
        ),
        (
            "        if not causal and (high > start + 1 or component.first_visible(length - 1, left) > low):\n",
            "        if not causal and high > start + 1:\n",
            "a window that begins inside a piece is not masked",
        ),
        (
            "        if not causal and (high > start + 1 or component.first_visible(length - 1, left) > low):\n",
            "        if component.first_visible(length - 1, left) > low:\n",
            "tokens of one step see later ones",
        ),
        (
            "    if (seen is not None or product.causal) and not math.isfinite(v.sum().item()):\n        return None\n",
            "",
            "a row that no query sees spreads its NaN",
        ),
        (
            "        logs = logs.masked_fill(product.blind.repeat(group), -torch.inf)\n",
            "        pass\n",
            "a piece that a query sees nothing of counts",
        ),
        (
            "                yield first + done, first + done + some, run.line + done\n",
            "                yield first + done, first + done + some, run.line\n",
            "every piece of a long run is its first",
        ),
        ("            first += run.count\n", "", "positions of the second run are the first one's"),
        ("torch.full_like(numbers, request)", "torch.full_like(numbers, 0)", "decoded rows are always request 0's"),
        (
            "    share = torch.exp(more_logs - total).nan_to_num(0)",
            "    share = torch.exp(logs - total).nan_to_num(0)",
            "pieces are weighted the wrong way round",
        ),
        (
            "    total = torch.logaddexp(logs, more_logs)\n",
            "    total = torch.maximum(logs, more_logs)\n",
            "pieces are weighted by the larger one alone",
        ),
        (
            "    middle = max(first, start) if new * (start - first) > MASKED else first if new > 1 else length\n",
            "    middle = length\n",
            "what was there before is masked, and looked at by one request at a time",
            "the same numbers by more work",
        ),
        (
            "        if order is None:\n",
            "        if True:\n",
            "outputs of tokens that lie apart are taken in the order of products",
        ),
        (
            "    return slice(begin, end) if numbers == list(range(begin, end)) else torch.tensor(numbers)\n",
            "    return slice(begin, end)\n",
            "tokens between those of requests that share rows look in their place",
        ),
        (
            "    return min(steps) >= 0 and (len(group) == 1 or steps_of(first, group[1]) == steps)\n",
            "    return min(steps) >= 0\n",
            "rows that are not evenly spaced are one batch",
        ),
        (
            "        q = q.reshape(batch, count, key_heads, group, dim).permute(0, 2, 3, 1, 4)\n",
            "        q = q.reshape(count, batch, key_heads, group, dim).permute(1, 2, 3, 0, 4)\n",
            "queries of a batch look at other requests' rows",
        ),
        (
            "                mine = not product.places or product.seen is not None or product.causal\n",
            "                mine = not product.places or product.causal\n",
            "requests of other masks look through one",
        ),
        (
            "(low, high) == (start, length) and new > 1 and component.first_visible(length - 1, left) <= low\n",
            "(low, high) == (start, length) and new > 1\n",
            "a window that begins among the new tokens is not masked",
        ),
        (
            "is_causal=product.causal, attn_mask=mask",
            "attn_mask=mask",
            "tokens of one step see later ones of it",
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
