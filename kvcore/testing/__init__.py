"""What tests of caches are written with: the kit as a pytest plugin, and rows that say who wrote them.

``plugin`` runs the checks of ``kvcore.conformance`` and the tests in ``kit``, over requests of a backend. ``feeding``
and ``tenants`` fill caches with rows of known writers, ``misuse`` is the table of wrong calls. Only ``plugin``,
``records`` and ``kit`` import pytest.
"""
