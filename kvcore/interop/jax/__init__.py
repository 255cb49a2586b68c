"""JAX: caches over a mesh, caches inside a model's own state, and proofs that pools are written in place."""

from kvcore.interop.jax.in_place import InPlace, absent_mesh, assert_in_place, inspect_in_place, read_first

__all__ = ["InPlace", "absent_mesh", "assert_in_place", "inspect_in_place", "read_first"]
