"""Arrays of any framework as NumPy arrays, without importing a framework that is not there."""

import sys
from typing import Any

import numpy as np


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array of any backend to the host as NumPy; bf16 comes as ml_dtypes' bfloat16."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            import ml_dtypes

            return array.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
        return array.numpy().copy()
    return np.array(array)
