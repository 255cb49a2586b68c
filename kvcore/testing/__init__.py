"""What tests of caches are written with: the kit as a pytest plugin, and rows that say who wrote them.

``plugin`` runs the checks of ``kvcore.conformance`` and the tests in ``kit``, over requests. ``tagged_rows``
and ``isolated`` fill caches with rows of known writers, ``misuse`` is the table of wrong calls. ``lives`` has a cache
beside the independent ``model`` of its requests, ``operations`` random ones of a seed, and a failing list made short.
Only ``plugin``, ``records`` and ``kit`` import pytest.
"""
