"""Launches of the Triton kernels, from torch tensors and the numbers of bound records."""
