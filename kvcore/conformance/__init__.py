"""The conformance kit: the checks that any backend must pass against the reference.

``checks`` is one table, verb by verb; ``suite`` crosses it with a spec's roles and formats, the layouts and the shape
classes. ``kvcore parity run`` and the pytest plugin both run these checks; nothing here imports pytest or a framework.
"""
