"""Entries that stay in the host's memory until a step picks them, on JAX."""

from tests.support import far


def test_steps_give_what_they_give_where_all_rows_are_there():
    far.check("jax_pallas", (1, 2))
