"""Launches of the Triton kernels, said once for every framework of arrays; ``launching`` tells what one is made of.

``LAUNCHES`` has all by name, family by family: the write path (``write``), gathers (``read``), the flush (``flush``),
attention (``attention``, ``kv_attention``), groups of tokens (``kv_groups``), the indexer (``indexer``, ``topk``),
bytes that move (``units``), what is made of others' answers (``answers``), rows beside their check words (``canary``),
and recurrent layers (``states``).
"""

from kvcore.kernels.triton.launches import (
    answers,
    attention,
    canary,
    flush,
    indexer,
    kv_attention,
    kv_groups,
    read,
    states,
    topk,
    units,
    write,
)
from kvcore.kernels.triton.launches.launching import LAUNCHES

FAMILIES = write, read, flush, attention, kv_attention, kv_groups, indexer, topk, units, answers, canary, states

__all__ = ["FAMILIES", "LAUNCHES"]
