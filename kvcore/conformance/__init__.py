"""The conformance kit: the checks that any backend must pass against the reference.

``checks`` is one table, verb by verb; ``suite`` crosses it with the roles, formats, layouts and shape classes of a spec.
``kvcore parity run`` and the pytest plugin both run these checks; nothing here imports pytest or a framework.
"""
