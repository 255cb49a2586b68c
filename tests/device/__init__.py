"""Checks on a CUDA device, each a command; `on_device.sh` runs them all. `tests/kernels` interprets some of them."""
