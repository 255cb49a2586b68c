"""The reference: every verb in plain NumPy, written to be read. What it stores and returns is what kvcore means."""

from kvcore.backends.reference.backend import ReferenceBackend, ReferenceOps

__all__ = ["ReferenceBackend", "ReferenceOps"]
