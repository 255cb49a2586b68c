"""Faults of what is above the backends: requests over time, steps, files, the hand-off, shards."""

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
            "self._writes(number).fill_unwritten()",
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
    "cache/layer.py": [
        (
            "            return self._index._replace(lengths=self._index.starts)\n",
            "            return self._index\n",
            "entries are read before they are stored",
        ),
    ],
    "cache/ring_writes.py": [
        (
            "        self._keep_overwritten(role)\n        write = getattr",
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
            "            for role in tails:\n                self._keep_overwritten(role)\n",
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
    "portable/rows.py": [
        (
            "    return 0 if component.in_checkpoint else aligned, len(component.live(length))\n",
            "    return 0, len(component.live(length))\n",
            "a checkpoint holds whole blocks again",
        ),
        (
            "            first = sum(position < row.length - region.rows for position in positions)\n",
            "            first = 0\n",
            "older rows of a ring are written over later ones",
        ),
        (
            "    older = component.live(floor)\n",
            "    older = component.live(length)\n",
            "rows that a rollback needs are left behind",
        ),
        ("        first = first[found >= 0]\n", "        first = first[found >= -1]\n", "a row that is none is read"),
    ],
    "portable/record.py": [
        (
            "    if not 0 <= record.floor <= record.length <= LONGEST or",
            "    if",
            "lengths that do not fit together are taken",
        ),
        ("        len(tokens) == record.length and", "", "ids of another length are taken"),
        (
            "    if not all(before < after <= record.length for before, after in pairwise(lengths)):\n",
            "    if not all(before < after for before, after in pairwise(lengths)):\n",
            "checkpoints beyond the request are taken",
        ),
    ],
    "portable/snapshot.py": [
        (
            "    requests = [_request(spec, entry, rest[entry.offset :]) for entry in directory.requests]\n",
            "    requests = [_request(spec, entry, rest) for entry in directory.requests]\n",
            "every saved request is the first one",
        ),
        (
            "        if root.hex() != entry.root or any(padding):\n",
            "        if any(padding):\n",
            "a request that another one was put in the place of is taken",
        ),
        (
            ".result(pages)\n        return [Damage",
            ".result(pages)\n        return [][:0] and [Damage",
            "pages of a snapshot are not verified",
        ),
        ("        check_spec(spec, blob.described.spec)\n", "", "a request of another spec is taken"),
        ("    if end != len(rest):\n", "    if False:\n", "bytes after the last request are taken"),
    ],
    "adoption/descriptor.py": [
        ("        if not used <= step <= LARGEST:\n", "        if step < 0:\n", "rows may lie on one another"),
        ("lines.offset + used > sizes[lines.tensor]", "False", "rows may lie beyond the tensor"),
        ("    apart = other.lines.block == step\n", "    return\n", "two fields may have the same bytes"),
        ("    if len(told) != len(found):\n", "    if False:\n", "places of what is not there are taken"),
        ("        if key in told:\n", "        if False:\n", "the second place of a field is taken"),
    ],
    "adoption/tables.py": [
        ("        if axis in counts and counts[axis] != count:\n", "        if False:\n", "any shape is taken"),
        ("in found.values()}) > 1:", "in found.values()}) > 9:", "the first of several layouts is taken"),
        ("if steps[axes[-1]] != element:", "if False:", "channels may have gaps"),
        ('if "NL" in steps else 0', "if False else 0", "all layers lie in the first one's place"),
    ],
    "adoption/given.py": [
        ("self.blocks.holders(place.blocks[column]) > 1", "False", "a block of two is written"),
        ("if self.blocks.holders(block) or block in taken:", "if False:", "another's block is taken"),
        ("        if len(taken) < count:\n", "        if False:\n", "nobody says that blocks are missing"),
        ("        self.given.pop(request, None)\n", "", "what was given is kept"),
        ("        if self.sealed:\n", "        if False:\n", "arrays of JAX are written to"),
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
    "store/blocks.py": [
        ("len(page) != self.page_bytes:", "False:", "pages of any size fill a block"),
        (
            "                break\n            pages.append",
            "                continue\n            pages.append",
            "blocks get the next one's rows",
        ),
    ],
    "store/pages.py": [
        (
            "            first += rows * size\n        return tuple(found)",
            "        return tuple(found)",
            "all are the first one's rows",
        ),
        (
            "            first += rows * size\n        return content",
            "        return content",
            "all get the first one's rows",
        ),
        (
            "np.array(row.blocks[first : first + step], np.int32)\n            if not ops.move_strips(pools, held",
            "np.array(row.blocks[:step], np.int32)[: len(some)]\n            if not ops.move_strips(pools, held",
            "pages beyond the first ones are written over those",
        ),
        ("rows[number * rows : (number + 1) * rows]", "rows[:rows]", "every page is the first block's"),
    ],
    "store/requests.py": [
        ("            if not store.has(key):\n", "            if False:\n", "states are never stored"),
        ("tuple(row.blocks[number] for number in new)", "row.blocks", "blocks that are there are read for new ones"),
        (
            "            count -= 1\n    return count",
            "            break\n    return count",
            "windows of another length are taken",
        ),
        ("if page is not None and len(page) == size else None", "", "pages of any size are taken"),
    ],
    "store/seal.py": [
        ("        plain = xxhash.xxh3_128(key)\n", "        plain = xxhash.xxh3_128()\n", "another's page is taken"),
        ("hmac.compare_digest(expected, bytes(data[: HEAD.size]))", "True", "nothing is verified"),
        ("        if self._secret is not None:\n", "        if False:\n", "nobody needs the secret"),
    ],
    "store/store.py": [
        ("tier.remove(key)\n                self.damaged", "self.damaged", "damaged pages stay"),
        (
            "                    events += self._put(number + 1, lost, held)\n",
            "                    pass\n",
            "what goes is lost",
        ),
        (
            "                        events += self._put(0, key, bytes(data))\n",
            "                        pass\n",
            "pages stay far away",
        ),
    ],
    "store/tiers.py": [
        ("            self._disk.sweep_folder(path.parent)\n", "", "what killed writers left stays"),
        ("            return [*gone, (key, None)]\n", "            raise\n", "a full disk ends a step"),
        ("                self._pages.move_to_end(key)\n", "                pass\n", "use does not count"),
        ("                self._drop(oldest)\n", "                break\n", "a tier grows beyond its capacity"),
        (
            "            write_whole(self._disk, path, (data,), sweep=False)\n",
            "            path.write_bytes(data)\n",
            "files are written in place",
        ),
    ],
    "adoption/maps.py": [
        ("        wrong = places >= self.limit\n", "        wrong = places < 0\n", "places beyond the pool are taken"),
        ("        if said.aligned:\n", "        if False:\n", "tokens may lie at another row of their page"),
        (
            "        if others.any():\n            # Places",
            "        if False:\n            # Places",
            "a place of two is taken",
        ),
        (
            "        wrong = self._owners[places] != numbers\n",
            "        wrong = places < 0\n",
            "one place twice is taken",
        ),
        ("found < self.said.first", "found < 0", "a place that is none is taken"),
    ],
    "adoption/pages.py": [
        (
            "            kind.write(places[kept],",
            "            (lambda *_: None)(places[kept],",
            "rows of a step never reach the pages",
        ),
        ("table[column] < 0:", "False:", "rows go into pages that are gone"),
        (
            "                if other != request and (both :=",
            "                if False and (both :=",
            "a page of two is written",
        ),
        ("            self._holders[key].update(table)\n", "", "nobody knows which pages others have"),
        ("begin = field.first + head * field.row", "begin = field.first", "all heads get the first one's rows"),
    ],
    "adoption/regions.py": [
        ("            array[second] = array[first]\n", "            pass\n", "a fork's rings are not copied"),
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
    "digest.py": [
        ("np.right_shift(words, _FIRST", "np.right_shift(words, _SECOND", "a word is mixed otherwise"),
        (
            "np.array(salts[some], np.uint32)",
            "np.array(salts[:step], np.uint32)[: len(rows[some])]",
            "salts are others'",
        ),
        (
            "                value.reshape(-1, self.words)[missing] = 0\n",
            "                pass\n",
            "rows that are not there count",
        ),
        ("(positions[1:] - positions[:-1] != step).any()", "False", "positions with gaps count as neighbours"),
    ],
    "native/__init__.py": [
        ("self._right(found)", "True", "what was compiled is believed"),
        ("            if self._seen >= WORTH:\n", "            if False:\n", "nothing is ever compiled"),
    ],
    "portable/pages.py": [
        (
            "    pages[max(0, layout.blocks - 1) : layout.blocks] = 0\n",
            "    pages[layout.blocks :] = 0\n",
            "what memory held before is exported behind the last rows",
        ),
    ],
    "portable/manifest.py": [
        ("        cache.manager.check_whole(request, where)\n", "", "a request in the middle of a replay is exported"),
        (
            "    if declared is None or declared == (text := _layout_text(spec, layout)):\n",
            "    if True:\n",
            "a manifest's own account of its pages is not looked at",
        ),
        ("    if len(described.digests) != layout.digests:\n", "    if False:\n", "digests are not counted"),
    ],
    "portable/convert.py": [
        (
            "        self.floor = max([record.floor, *(record.length // ratio * ratio for ratio in sides if ratio > 1)])\n",
            "        self.floor = record.floor\n",
            "what was converted over tokens goes back beyond its open group",
        ),
        ("    if bad:\n", "    if False:\n", "rows that were changed are converted"),
        (
            "        self._checkpoints = [] if self.grouped else record.checkpoints\n",
            "        self._checkpoints = []\n",
            "checkpoints stay behind though they can be converted",
        ),
    ],
    "portable/recode.py": [
        (
            "        stays = before.hadamard and after.hadamard\n",
            "        stays = False\n",
            "rows that are rotated are rotated again",
        ),
        (
            "            self.exact = np.array_equal(",
            "            np.array_equal(",
            "rows that were rounded are called exact",
        ),
    ],
    "portable/blob.py": [
        ('    if root_of(cast("bytes", text)) != root:\n', "    if False:\n", "a manifest that was changed is taken"),
        (
            '    if bad:\n        raise SnapshotError(got=f"other bytes',
            '    if False:\n        raise SnapshotError(got=f"other bytes',
            "rows that were changed are taken",
        ),
        ("    check_spec(cache.spec, described.spec, HINT)\n", "", "a blob of another spec is taken"),
    ],
    "portable/version1.py": [
        (
            "    if root != snapshot_root(header.replace(root.encode(), NO_ROOT.encode()), arrays):\n",
            "    if False:\n",
            "a header that was changed is taken",
        ),
        (
            "            bad = np.flatnonzero((lanes != stored).any(axis=1))\n",
            "            bad = np.flatnonzero((lanes != stored).all(axis=1))\n",
            "a page counts as damaged only if both lanes say so",
        ),
        (
            '        if name.endswith(".digest"):\n',
            '        if name.endswith(".digests"):\n',
            "digests are not covered by the root",
        ),
        ("    if others:\n", "    if False:\n", "components that the spec does not have are taken"),
        ("    check_spec(cache.spec, found.spec)\n", "", "a blob of another spec is taken"),
    ],
    "portable/importer.py": [
        ("    if bad:\n", "    if False:\n", "pages are not verified"),
        ("    check_spec(cache.spec, described.spec)\n", "", "an export of another spec is taken"),
        (
            "        here = first\n",
            "        here = 0\n",
            "pages are digested twice",
            "pages that were added before are not added again",
        ),
        (
            "        there = first if first < rest else first + skipped\n",
            "        there = first\n",
            "other checkpoints than are kept are asked for",
        ),
        (
            "    return Received(described.record, layout, pages)\n",
            "    return Received(described.record, layout, pages * 0)\n",
            "other pages than were verified are stored",
        ),
    ],
    "portable/exporter.py": [
        (
            "    if not 0 <= generation <= current:\n",
            "    if not 0 <= generation:\n",
            "a reference of the future is taken",
        ),
        ("    elif generation < current:\n", "    elif False:\n", "a stale reference gives another export"),
        (
            "    if first < 0 or count < 0 or first + count > pages:\n",
            "    if first < 0 or first + count > pages + 1:\n",
            "pages beyond the last are asked for",
        ),
    ],
    "sharding/regroup.py": [
        ("owner = theirs.owner(head)", "owner = 0", "all heads are the first shard's"),
        ("                starts = [start + theirs.per_shard * size for start in starts]\n", "", "values are keys"),
        (
            "        if any((one.record.length,",
            "        if False and any((one.record.length,",
            "parts of two requests are one",
        ),
        ("    if bad:\n", "    if False:\n", "damaged parts are taken"),
    ],
    "sharding/pages.py": [
        (
            "        return row // self.rows % self.shards\n",
            "        return row % self.shards\n",
            "rows go round the shards one by one",
        ),
        ("* self.rows + row % self.rows\n", "* self.rows\n", "a page has one row"),
        (
            "_clip(count % whole - shard * self.rows, self.rows)",
            "_clip(count % whole, self.rows)",
            "every shard holds the last page",
        ),
    ],
    "sharding/heads.py": [
        (
            "        first = head // self.per_shard * self.replicas\n",
            "        first = head // self.per_shard\n",
            "a head's owner is another shard",
        ),
        ("        return head % self.per_shard\n", "        return head\n", "heads keep their number on a shard"),
    ],
    "sharding/index.py": [
        (
            "    pages = (table[:, :, None] + 1) * mine[None, None] - 1\n",
            "    pages = table[:, :, None] * mine[None, None]\n",
            "pages of others are block 0",
        ),
        (
            "        positions=pages.held(shard, (index.positions + 1) // ratio) * ratio - 1,\n",
            "        positions=pages.held(shard, index.positions // ratio) * ratio - 1,\n",
            "a query does not see the last row here",
        ),
    ],
    "sharding/plan.py": [
        (
            "        owner = at.request % self.requests,",
            "        owner = at.request // self.requests,",
            "requests are not dealt out in turn",
        ),
        (
            "            rank = rank * size + place\n",
            "            rank = rank * size + place % 1\n",
            "every rank is the first",
        ),
    ],
    "sharding/assemble.py": [
        (
            "        starts = [start + heads.per_shard * size for start in starts]\n",
            "",
            "values are taken from the keys' bytes",
        ),
    ],
}
