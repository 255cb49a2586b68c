"""Every kernel once on small data: what ``compute-sanitizer`` is run on.

compute-sanitizer --tool memcheck python benchmarks/small_run.py
"""

import check_attention
import check_classic
import check_indexer
import numpy as np
import torch
from check_cuda import reference_rows
from checks_on_device import check_flush, check_format, check_life, check_rotated

problems = []
for name, count in (
    ("v4_584", 17),
    ("v32_656", 5),
    ("v41_fp4_288", 5),
    ("index_fp4_68_h", 33),
    ("int8_row", 9),
    ("nf4_b64", 3),
):
    problems += [
        found
        for found in check_format(name, count, "bf16", *reference_rows(name, count, "bf16", 1), "cuda")
        if found[1]
    ]
rng = np.random.default_rng(0)
problems += [found for found in check_rotated(rng, "cuda") if found[1]]
problems += [found for check in (check_flush, check_life) for found in check(rng, "cuda") if found[1]]
problems += [
    found for module in (check_attention, check_classic, check_indexer) for found in module.small("cuda") if found[1]
]
torch.cuda.synchronize()
print("small run:", problems or "ok")
