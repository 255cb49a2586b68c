"""All checks on a CUDA device that are not of one format: compression, life cycle, exports, large pools, captures."""

import traceback

import numpy as np
import torch

from tests.device.capture_on_device import check_ahead, check_captured, check_compiled, check_waiting
from tests.device.check_flush import check_flush
from tests.device.checks_on_device import check_large, check_life, check_merge, check_pages, check_rotated


def check_rest(seed, device):
    """Yield (what, problem) for compression, large pools and captured steps."""
    rng = np.random.default_rng(seed)
    yield from check_rotated(rng, device)
    yield from check_flush(rng, device)
    yield from check_life(rng, device)
    yield from check_pages(rng, device)
    yield from check_merge(rng, device)
    if torch.device(device).type == "cuda":
        yield from check_large(rng, device)
        for check in (check_captured, check_waiting, check_ahead, check_compiled):
            try:
                yield from check(device)
            except Exception as error:  # noqa: BLE001
                yield check.__name__, "".join(traceback.format_exception(error))[-1500:]
