"""Keys and values by hand: a cache filled without running a model, and what it then holds."""

import torch


def update(cache, first, new, rows=1, heads=2, dim=8, layers=None):
    """One forward of ``new`` tokens whose keys are first, first + 1, …, values their negatives; the last layer's."""
    found = None
    for layer in range(len(cache)) if layers is None else layers:
        found = update_layer(cache, layer, first, new, rows, heads, dim)
    return found


def update_layer(cache, layer, first, new, rows=1, heads=2, dim=8):
    """One layer's part in it."""
    keys = torch.arange(first, first + new, dtype=torch.float32).view(1, 1, new, 1).expand(rows, heads, new, dim)
    keys = keys + 100 * torch.arange(rows, dtype=torch.float32).view(rows, 1, 1, 1)
    return cache.update(keys.contiguous(), -keys, layer)


def held(states):
    """The first row's, first head's, first channel's numbers."""
    return states[0, 0, :, 0].tolist()
