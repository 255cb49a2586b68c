"""Kernels that several backends launch: Triton's for torch and JAX alike, and Pallas' for JAX."""
