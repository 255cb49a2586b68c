"""Faults of attention and its indexer in the torch backend's plain operations."""

TABLE = {
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
}
