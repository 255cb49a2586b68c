"""The cache's Triton kernels: one set for every format, role and layout, specialised by compile-time records."""
