"""Verbs on CUDA as one launch of a Triton kernel each: the kernels of the torch backend, on arrays of JAX.

Everything is traced: a launch is part of the caller's program, and updates pools in place where XLA may, which is where
they are donated. What the kernels don't cover (a layout that splits bytes, a third party's format) is computed by
jax.numpy. All launches are cut into programs as torch's are.
"""

from kvcore.backends.jax_pallas.cuda.arguments import covers, keeps_tail
from kvcore.backends.jax_pallas.cuda.attend import attend, attends
from kvcore.backends.jax_pallas.cuda.flush import flush, flushes
from kvcore.backends.jax_pallas.cuda.gather import gather_all, gather_entries, gather_kv, gather_window
from kvcore.backends.jax_pallas.cuda.indexer import index_scores, scores, select, selects
from kvcore.backends.jax_pallas.cuda.write import append, append_rotated, append_tail, store_entries

__all__ = [
    "append",
    "append_rotated",
    "append_tail",
    "attend",
    "attends",
    "covers",
    "flush",
    "flushes",
    "gather_all",
    "gather_entries",
    "gather_kv",
    "gather_window",
    "index_scores",
    "keeps_tail",
    "scores",
    "select",
    "selects",
    "store_entries",
]
