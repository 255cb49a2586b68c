"""Faults of what is above the backends: requests over time, steps, prefixes, checks."""

TABLE = {
    "requests/manager.py": [
        (
            "place.seen_from if place.length < place.stored else 0 for",
            "0 for",
            "an approximate replay sees rows that nobody wrote",
        ),
        (
            "        place.seen_from, place.exact = source.seen_from, source.exact\n",
            "        place.exact = source.exact\n",
            "a fork of an approximate replay sees rows that nobody wrote",
        ),
        (
            "                first = max(start, end - self.states) if every else end - 1\n",
            "                first = max(start, end - self.states)\n",
            "a recurrent state counts as kept for every length of a prompt",
        ),
        (
            "        place.states = tuple(kept for kept in place.states if kept <= length)\n",
            "",
            "recurrent states beyond a rollback count as kept",
        ),
        ("        self._free_slots.append(place.slot)\n", "", "a released slot is lost"),
        ("generation + 1, id + 1\n", "generation, id + 1\n", "a slot's generation stays"),
        (
            "opening.more[len(counts)] = -(-end // size) - held\n",
            "opening.more[len(counts)] = -(-end // size) - held + 1\n",
            "a step takes a block too many",
        ),
        (
            "        for grant in reversed(list(grants.values())):\n            self.blocks.drop(grant.taken)\n",
            "        pass\n",
            "blocks of a step that failed are lost",
        ),
        (
            "        return [block for grant in grants.values() for _, old in grant.replaced for block in self.blocks.drop([old])]\n",
            "        return []\n",
            "shared blocks that were replaced are lost",
        ),
        (
            "            place.high_water = max(place.high_water, lengths[request])\n",
            "            pass\n",
            "rows of a failed step are taken for unwritten",
        ),
        ("        if length < deepest:\n", "        if length < deepest - 1:\n", "a rollback goes one token too deep"),
        (
            "        place.stored, place.given = min(place.stored, length), min(place.given, length)\n",
            "        place.given = min(place.given, length)\n",
            "a truncated request does not write what it took over again",
        ),
        ("        if places[request].lost and not lost:\n", "        if False:\n", "a lost request is read"),
        ("        if not request._of(self):\n", "        if False:\n", "a request of another cache is taken"),
    ],
    "requests/table.py": [
        (
            "    if end > place.high_water:\n        place.high_water = end\n",
            "",
            "what was written is forgotten, and a rollback goes too deep",
        ),
        (
            "        count = ahead.ahead + 1\n",
            "        count = ahead.ahead\n",
            "the last of repeated steps is forgotten",
        ),
        (" or last.shares != blocks.shares:\n", ":\n", "a repeated step writes into a block that a fork reads"),
        (
            "            places, tokens = self._left, 0\n",
            "            places, tokens = self._left, 1\n",
            "a step that repeats one that was looked at is a token too far",
        ),
    ],
    "requests/blocks.py": [
        ("            generations[block] += 1\n", "", "a block's generation stays"),
        (
            "        self._idle.pop(block, None)\n        self._holders[block] += 1\n",
            "        self._holders[block] += 1\n",
            "a block that is held can be evicted",
        ),
        (
            "            left = holders[block] - 1\n",
            "            left = holders[block] - (holders[block] > 1)\n",
            "a block's last holder never goes",
        ),
        (
            "                self._idle.move_to_end(self._found[key])\n",
            "                pass\n",
            "a block that was used is evicted first",
        ),
        (
            "        self._found[key] = heir\n        return True\n",
            "        return True\n",
            "a twin does not take the place of what goes",
        ),
        ("            del found[key]\n", "", "an evicted block is still found"),
        (
            "            block, key = oldest(last=False)\n",
            "            block, key = oldest(last=True)\n",
            "the newest idle block is evicted first",
        ),
        ("                told(key)\n", "                pass\n", "what depends on an evicted block stays"),
    ],
    "step.py": [
        (
            "    ends = accumulate((-(-sizes[number] // 4) * 4 for number in order), initial=0)\n",
            "    ends = accumulate((sizes[number] for number in order), initial=0)\n",
            "arrays begin at odd addresses",
            "addresses matter to a GPU's wide loads alone, and the CPU has none",
        ),
        (
            "        if filled > count:\n            row[count:filled] = -1\n",
            "",
            "blocks of a longer request stay in a shorter one's table",
        ),
        (
            "        known = len(before) if before == numbers[: len(before)] else 0\n",
            "        known = min(len(before), count)\n",
            "the blocks of a slot's last owner stay in the table",
        ),
        (
            "            table[requests:] = -1\n",
            "            table[requests:] = 0\n",
            "padding has blocks",
        ),
    ],
    "requests/prefix.py": [
        (
            "        if any(component.recurrent for _, component in layer.components()):\n            return None\n",
            "",
            "a recurrent state is replayed from its last token",
        ),
        (
            "cbor([salt] if salt else None)\n",
            "cbor(None)\n",
            "salts do not separate prefixes",
        ),
        (
            "(head, parent, inner, block, extra)",
            "(head, bytes(32), inner, block, extra)",
            "a block's key does not follow from those before it",
        ),
        (
            'sha256(cbor([parent, list(rest), ["point"',
            'sha256(cbor([parent, [], ["point"',
            "checkpoints beyond a block are one",
        ),
        ('cbor(["kvcore", spec.digest,', 'cbor(["kvcore", "",', "caches of other specs have the same keys"),
        ("        total += max((span", "        total = max((span", "a replay is as long as one layer's"),
        (
            "        if value < 1 << 8 * size:\n",
            "        if value < 1 << 8 * size - 1:\n",
            "integers are not written in the fewest bytes",
        ),
    ],
    "cache/reuse.py": [
        (
            '        exact = self.policy != "approximate" or self._replay == 0\n',
            "        exact = True\n",
            "an approximate hit is told as an exact one",
        ),
        (
            "list(range((start // size + 1) * size, length + 1, size))",
            "list(range((start // size + 1) * size, length, size))",
            "a boundary at the end of a step is not kept",
        ),
        (
            "and length % self.policy.tokens == 0:",
            "and length >= self.policy.tokens:",
            "checkpoints are kept off the period",
        ),
        (
            "        if key in self._states and (self._states[key].exact or not place.exact):\n",
            "        if key in self._states and self._states[key].exact and not place.exact:\n",
            "a checkpoint is kept twice",
            "the second has the same key and the same rows, and takes the first one's place",
        ),
        (
            "                if 0 < length <= limit and key in self._states:\n",
            "                if 0 < length and key in self._states:\n",
            "a hit is longer than was asked",
        ),
        (
            "            if block is None:\n                break\n",
            "            if block is None:\n                continue\n",
            "a hit skips a block that is not there",
            "what follows from a block is forgotten with it, so no later block of a chain is found without it",
        ),
        (
            "            length = min(stored - self._replay, limit)\n",
            "            length = min(stored, limit)\n",
            "nothing is replayed under zero",
        ),
        (
            "        for key in list(self._beyond.get(parent, ())):\n            self._forget(key)\n",
            "        pass\n",
            "checkpoints outlive their blocks",
        ),
        ("        self._manager.hide()\n", "", "live requests publish what was forgotten"),
    ],
    "cache/cache.py": [
        (
            "            self._state.pools = self._state.ops.copy_slots(self._state.pools, *slots)\n",
            "            pass\n",
            "a fork has empty rings",
        ),
    ],
    "cache/state.py": [
        (
            "len(blocks) + self.manager.blocks.idle_among(blocks)\n",
            "len(blocks)\n",
            "blocks that are taken over count as free",
        ),
        (
            "        return self.plan.blocks_for(length) - len(blocks) + ",
            "        return self.plan.blocks_for(length) + ",
            "blocks that are taken over are needed once more",
        ),
        (
            "        return 0 if all(component.live(length).start == 0 for component in rings) else length\n",
            "        return 0\n",
            "a restored request goes back to rows that it never had",
        ),
        (
            "            self.pools = write_rows(self.ops, self.pools, self.row_of(place), hit.state)\n",
            "            pass\n",
            "a hit's rings are empty",
        ),
        ("        place.cached_tokens = hit.length\n", "", "a hit says that nothing was cached"),
    ],
    "cache/step.py": [
        (
            "        return not states or at == length or (self._every and at > length - states)\n",
            "        return True\n",
            "a checkpoint is kept of a length that has no recurrent state",
        ),
        (
            "                writes.store_waiting()\n",
            "                pass\n",
            "rows that waited are never stored",
        ),
        (
            "            first = sum(self._numbers.counts[:number])\n",
            "            first = 0\n",
            "checkpoints are of the first request's rows",
        ),
        (
            "        freed = manager.release_replaced(grants)\n",
            "        freed = []\n",
            "shared blocks that were replaced are lost",
        ),
        ("        self.cache.manager.shrink(self.grants)\n", "", "blocks of a step that failed are lost"),
        (
            "        self.cache.pools = self.context.undo.apply(self.cache.pools)\n",
            "        pass\n",
            "ring rows are not put back",
        ),
        (
            "            missing = writes.missing()\n",
            "            missing = []\n",
            "a layer that was left out is committed",
        ),
        (
            "fill_unwritten(self._writes(number))",
            "pass",
            "a block's last owner's bytes are read as entries",
        ),
        (
            "                if length <= places[request].complete:\n                    prefix.keep",
            "                if True:\n                    prefix.keep",
            "checkpoints are kept of layers that got nothing",
        ),
    ],
    "cache/canary.py": [
        (
            "        return np.maximum(rows.starts, _least(watched, rows)), ends\n",
            "        return np.maximum(rows.starts, _least(watched, rows)), ends - 1\n",
            "a step's last row gets no word",
        ),
        (
            "    return first, np.minimum(rows.starts, _least(watched, rows))\n",
            "    return first, first\n",
            "rows that an abort put back have the words of those that took their places",
        ),
        (
            "    return first, np.minimum(end, _least(watched, rows))\n",
            "    return first, first\n",
            "rows that a step takes the place of are not looked at",
        ),
        (
            "                if place is known.place and (",
            "                if False and (",
            "a place is believed whatever it says",
        ),
    ],
    "ops/canary.py": [
        (
            "            wrong |= words[at] != made\n",
            "            wrong = words[at] != made\n",
            "of several copies the last counts",
        ),
        (
            "        for number, got in enumerate((slots, starts, lengths, hashes.view(np.int32)))\n",
            "        for number, got in enumerate((slots, starts, lengths))\n",
            "a block table is believed",
        ),
    ],
    "check_words.py": [
        (
            "    sums = mixed(words ^ keys(words.shape[1])).sum(axis=1, dtype=np.uint32)\n",
            "    sums = (words ^ keys(words.shape[1])).sum(axis=1, dtype=np.uint32)\n",
            "bits of two words make up for each other",
        ),
    ],
    "cache/undo.py": [
        (
            "            return before\n",
            "            return pools\n",
            "functional verbs of arrays are not undone",
        ),
        (
            "            pools = self._ops.restore_ring(pools, layer, role, index, saved)\n",
            "            pass\n",
            "what was written in place is not undone",
        ),
        (
            "starts = [max(row.start, row.length - rows) if row.start else row.length for row in self._numbers.rows]",
            "starts = [row.length for row in self._numbers.rows]",
            "what a commit overwrites is not kept for a failure in the commit itself",
        ),
        (
            "        first, _ = component.live_bounds(self._deepest, np.maximum)\n",
            "        first, _ = component.live_bounds(self._numbers.arrays[1], np.maximum)\n",
            "rows that a rollback needs are not put back",
        ),
        (
            "        if length - rows > component.live_bounds(deepest)[0]:",
            "        if length - rows > component.live_bounds(length)[0]:",
            "spare rows are taken for free that a rollback needs",
        ),
        (
            "        self.whole = True\n",
            "        self.whole = False\n",
            "after functional verbs that were undone rows count as written",
        ),
    ],
    "cache/attending.py": [
        (
            "index._replace(lengths=index.starts) if owner(layers, writes, role).awaits_entries(role) else index\n",
            "index\n",
            "entries are read before they are stored",
        ),
    ],
    "cache/ring_writes.py": [
        (
            "        self.keep_overwritten(role)\n        write = getattr",
            "        write = getattr",
            "a recurrent state that a step overwrites is not kept for an abort",
        ),
        (
            "            self.own[role] = context.copied(arrays)\n",
            "            self.own[role] = arrays\n",
            "the caller's buffer is read at commit",
        ),
        (
            "        at_once = rows - component.reach\n",
            "        at_once = rows\n",
            "rows are overwritten that the step's own queries need",
        ),
        (
            "        if self.writing(role).undone:\n",
            "        if False:\n",
            "nothing is kept for an abort",
        ),
        (
            "            if undone:\n",
            "            if False:\n",
            "nothing is kept of rows that are written at once",
        ),
        (
            "            for role in tails:\n                self.keep_overwritten(role)\n",
            "",
            "nothing is kept of tails that are written with their flush",
        ),
        (
            "        if role in self.unflushed:\n            self.settle()\n",
            "",
            "tails are read without the rows that wait for the flush",
        ),
        (
            "        if context.unflushed is not None and context.unflushed is not self:\n            context.settle()\n",
            "",
            "a layer's tails are forgotten when the next one's wait",
        ),
        (
            "        return self.own[role] if role in self.waiting else None\n",
            "        return None\n",
            "a long step's own rows are read from the ring",
        ),
    ],
    "ops/arguments.py": [
        (
            "                found += value.shape, value.dtype, value.device, value.layout, value.requires_grad, value.is_neg()\n",
            "                found += value.shape, value.device, value.layout, value.requires_grad, value.is_neg()\n",
            "any dtype passes once one of them did",
        ),
        (
            "value.layout, value.requires_grad, value.is_neg()\n",
            "value.layout, value.is_neg()\n",
            "gradients are lost in silence once a tensor without passed",
        ),
        (
            "value.requires_grad, value.is_neg()\n",
            "value.requires_grad\n",
            "a tensor that stands for its negative is stored as what it is not",
        ),
        (
            "            if kind in NUMBERS:\n                found.append(value)\n",
            "            if kind in NUMBERS:\n                pass\n",
            "any number passes once one did",
        ),
    ],
    "ops/functional.py": [
        (
            "    if index.paging is not door.paging or any(",
            "    if any(",
            "another cache's index passes",
        ),
        (
            "        name not in pools or pools[name].shape != shape for name, shape in door.shapes(layer)\n",
            "        name not in pools for name, _ in door.shapes(layer)\n",
            "another cache's pools pass",
        ),
        ("        name not in pools or pools[name]", "        pools[name]", "pools of other names raise KeyError"),
        (
            "    return name, layer, index.positions.shape[0], index.slots.shape[0], len(given), *options, like\n",
            "    return name, layer, index.slots.shape[0], len(given), *options, like\n",
            "rows for other tokens pass",
        ),
        (' and "taken" not in checks', "", "how many tokens are taken is looked at once"),
    ],
    "cache/far.py": [
        ("    far.present[layer][numbers] = True\n", "", "rows come again and again"),
        (
            "self if length >= self.length else Far(self.rows, self.present, self.ratios, length)",
            "self",
            "rows that were left behind take the place of newer ones",
        ),
        (
            "given is None or coming is None or not coming.is_of(given)",
            "coming is None",
            "others than were fetched are read",
        ),
        ("indices = np.array(to_numpy(selected))\n", "indices = np.asarray(selected)\n", "picks change behind"),
        ("    coming.wait()\n    return", "    return", "rows are read before they are there"),
    ],
    "ops/host.py": [
        ("        offset = strip.start\n", "        offset = 0\n", "strips of pages lie on one another"),
        ("            offset += region.heads * region.format.row\n", "", "values lie where keys do"),
        ("range(region.copies if store else 1)", "range(1)", "one copy of a ring is stored"),
        (
            "        if unit < 0:\n            if not store:\n",
            "        if False:\n            if not store:\n",
            "a block that is not there is read from the pool's end",
        ),
        ("base = line.base + head * head_step * line.stride", "base = line.base", "every head is the first"),
        ("((1, 0), (0, half))", "((0, 0), (1, half))", "high and low bytes are exchanged"),
    ],
}
