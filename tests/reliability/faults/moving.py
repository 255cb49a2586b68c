"""Faults of what leaves a cache or lies elsewhere: files, the hand-off, stores, memory of somebody else's, shards."""

TABLE = {
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
        (
            "                place.blocks, moved = units, True\n",
            "                moved = True\n",
            "moved blocks are not followed",
        ),
        ("        if moved:\n            self.mend({})\n", "", "who has a block is known by where it was"),
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
            "                        events += self._put(0, key, bytes(data), about)\n",
            "                        pass\n",
            "pages stay far away",
        ),
        (
            "                    if page is None:\n                        self.damaged",
            "                    page = memoryview(sealed)\n                    if False:\n                        self.damaged",
            "pages of peers are not verified",
        ),
        (
            "                asked = [key for key in asked if key not in coming]\n",
            "                break\n",
            "one export only",
        ),
        ("not in found and not self.has(key)]", "not in found]", "peers are asked for what is here"),
    ],
    "store/peers.py": [
        (
            "            self._again = time.monotonic() + self._pause\n",
            "            pass\n",
            "who is silent is waited for again",
        ),
        ("        if root_of(manifest) != handle.root:\n", "        if False:\n", "any manifest is taken"),
        ("len(set(listed)) != len(listed) or ", "", "a key may be there twice"),
        ("        if answer.number != self._number:\n", "        if False:\n", "answers to other questions are taken"),
        (
            "                self._transport.finish(handle, timeout=_left(end))\n",
            "                pass\n",
            "exports are held until their leases end",
        ),
        (
            "        if handle.pages * handle.page_bytes > self._most_bytes:\n",
            "        if False:\n",
            "memory is taken for whatever a peer says",
        ),
    ],
    "store/exports.py": [
        (
            "            page = self._store.peek(key)\n",
            "            page = next((one for tier in self._store.tiers if (one := tier.get(key))), None)\n",
            "what others read is used here",
        ),
        ("            if found and len(page) > left:\n", "            if False:\n", "an export has no end"),
        ("        place[len(block) :] = 0\n", "", "what was in memory goes with a page"),
        ("        self.expire()\n", "", "leases that ended hold memory"),
    ],
    "store/tiers.py": [
        ("            self._disk.sweep_folder(path.parent)\n", "", "what killed writers left stays"),
        (
            "            self.error = error\n            return [*gone, (key, None)]\n",
            "            raise\n",
            "a full disk ends a step",
        ),
        ("                continue\n", "                pass\n", "a page that the disk keeps counts as gone"),
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
        ("found < said.first", "found < 0", "a place that is none is taken"),
    ],
    "adoption/pages.py": [
        (
            "        for one in copies:\n            one.kind.write(one.places, one.rows)",
            "        for one in copies:\n            pass",
            "rows of a step never reach the pages",
        ),
        ("table[column] < 0:", "False:", "rows go into pages that are gone"),
        (
            "                if other != request and (both :=",
            "                if False and (both :=",
            "a page of two is written",
        ),
        ("            self._holders[key].update(table)\n", "", "nobody knows which pages others have"),
        (
            "            _check_mapped(index, held, spare, where, what, needed=False)\n",
            "",
            "rows that a rollback needs never reach the pages",
        ),
        (
            "                        field.view[second] = field.view[first]\n",
            "                        pass\n",
            "a fork has no rings",
        ),
        ("begin = field.first + head * field.row", "begin = field.first", "all heads get the first one's rows"),
    ],
    "adoption/regions.py": [
        ("            array[second] = array[first]\n", "            pass\n", "a fork's rings are not copied"),
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
        ("        if right(found):\n", "        if True:\n", "what was compiled is believed"),
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
