"""The tests that ``pytest --pyargs kvcore.conformance`` runs on each backend."""
