"""The JAX backend: jax.numpy everywhere, Pallas kernels on TPU; functional, for use inside the caller's own jit."""

from kvcore.backends.jax_pallas.backend import JaxBackend, JaxOps

__all__ = ["JaxBackend", "JaxOps"]
