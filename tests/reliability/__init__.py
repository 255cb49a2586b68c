"""What can go wrong over time, provoked on purpose and counted: figures R1 to R15, each a command.

``python -m tests.reliability.<name>`` from the repository's root runs the short form, ``--full`` the full one, and
``--out FILE`` writes the record. A failure prints its seed and a shrunk trace.
"""
