"""Kernels that several backends launch: they know no framework of arrays."""
