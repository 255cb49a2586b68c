"""Faults of the kernels in Gluon, which no interpreter runs: ``tests.device.planted_on_device`` judges them on a GPU."""

TABLE = {
    "attend_hopper.py": [
        (
            "    valid = (entry >= 0) & (entry < visible)\n",
            "    valid = entry >= 0\n",
            "entries that lie ahead of the query are attended to",
        ),
        (
            "(tile - windows) * KEYS\n    asked",
            "tile * KEYS\n    asked",
            "the first picks are left out",
        ),
        (
            "(position + 1 - count + tile * KEYS)",
            "(position - count + tile * KEYS)",
            "the window lies one position back",
        ),
        (
            "        valid = (number <= position) & (unit * 0 + slot >= 0)",
            "        valid = (unit * 0 + slot >= 0)",
            "what the ring holds behind the query's position is attended to",
        ),
        (
            "    stored = (words[GROUP // 4] >> (8 * (GROUP % 4))) & 0xFF\n",
            "    stored = (words[GROUP // 4] >> (8 * (GROUP % 3))) & 0xFF\n",
            "a group has another one's scale",
        ),
        (
            '.store(gl.where(valid, 0.0, float("-inf")))',
            ".store(gl.where(valid, 0.0, 0.0))",
            "rows of zeros count as keys where there are none",
        ),
        (
            "            place = place_smem.index((step + (part + 1) // PARTS) & 1)",
            "            place = place_smem.index(step & 1)",
            "half of a tile's rows are those of the tile before",
        ),
        (
            "        mbarrier.wait(full.index(stage), (step // STAGES) & 1)\n",
            "",
            "keys are multiplied before they are there",
        ),
        (
            "most_smem.slice(64, 64).load(LH)",
            "most_smem.slice(0, 64).load(LH)",
            "half of the warps do not hear of the others' largest logit",
        ),
        (
            "        out = out * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None]\n",
            "",
            "sums of earlier tiles are weighted by an old maximum",
        ),
        (
            "    total = total * share[:, None, None] +",
            "    total = total +",
            "weights of earlier tiles are counted by an old maximum",
        ),
        (
            "    new_odd = gl.where(turned, odd * cos - even * sin, odd)\n",
            "    new_odd = gl.where(turned, odd * cos + even * sin, odd)\n",
            "outputs are sheared instead of turned back",
        ),
        (
            "    last = gl.minimum(first + each, tiles)\n",
            "    last = gl.minimum(first + each + 1, tiles)\n",
            "programs that share a query's keys count a tile twice",
        ),
        (
            "            share = 1.0 / (1.0 + gl.exp2(sink * 1.4426950408889634 - lse))\n",
            "            share = 1.0 / (1.0 + gl.exp2(sink - lse))\n",
            "the sink is to another base",
        ),
    ],
    "scores_hopper.py": [
        (
            'gl.where(column < visible, score, float("-inf"))',
            "score",
            "entries that lie ahead of the query have scores",
        ),
        (
            "    found = gl.maximum(found, gl.zeros_like(found), propagate_nan=ALL)\n",
            "",
            "negative products count",
        ),
        (
            "add.u32 e, e, 0x00FD00FD",
            "add.u32 e, e, 0x00FC00FC",
            "keys of four bits are half as large",
        ),
        (
            "        free = gl.where(stage == 0, STAGES - 1, stage - 1)\n",
            "        free = stage\n",
            "keys lie in another one's place in shared memory",
        ),
    ],
    "scores_nibbles.py": [
        (
            'gl.where(column < visible, score, float("-inf"))',
            "score",
            "entries that lie ahead of the query have scores",
        ),
        (
            "    found += gl.abs(found)\n",
            "",
            "negative products count",
        ),
        (
            "lop3.b32 $0, t, 0x80808080, c, 0xEA",
            "and.b32 $0, c, c",
            "every second channel has lost its sign",
        ),
        (
            "(scale[:, None] >> (group * 8)[None, :]) & 0xFF",
            "(scale[:, None] >> (group * 0)[None, :]) & 0xFF",
            "all channels have the first group's scale",
        ),
        (
            "    if furthest >= PART:\n",
            "    if furthest < 0:\n",
            "keys whose scales are far apart have other codes",
        ),
        (
            "put_tile(codes, scale, rooms[1 - half],",
            "put_tile(codes, scale, rooms[half],",
            "keys come to where products are under way",
        ),
    ],
    "topk_hopper.py": [
        (
            "        setp.gt.s64 q, other, mine;\n",
            "        setp.ge.s64 q, other, mine;\n",
            "every rank is one further",
        ),
        (
            '    bits = gl.where(score != score, float("-inf"), score + 0.0).to(gl.int32, bitcast=True)\n',
            "    bits = (score + 0.0).to(gl.int32, bitcast=True)\n",
            "NaN is the best of all",
        ),
        (
            "        base, indices_ptr + token * k, pairs_ptr,",
            "        base, indices_ptr + token * (k - 1), pairs_ptr,",
            "rows of picks overlap",
        ),
    ],
}
