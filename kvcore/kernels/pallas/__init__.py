"""Pallas kernels for TPU. Each moves whole tiles between HBM and VMEM and is checked interpreted and compiled."""
