"""Bridges from kvcore to other libraries. Each is optional and thin; none is imported unless it is asked for."""
