"""The project's Triton kernels as operations of JAX, through jax-triton."""
