"""What functional verbs take and refuse, alike on every backend; JAX's part is in ``jax_pallas``."""

from tests.support import functional_checks


def test_zero_sizes_answer_as_the_reference(backend):
    functional_checks.zero_sizes(backend)


def test_floats_of_any_kind_are_taken(backend):
    functional_checks.kinds_of_floats(backend)


def test_integers_of_any_kind_are_taken(backend):
    functional_checks.kinds_of_integers(backend)


def test_what_is_no_integer_is_refused(backend):
    functional_checks.no_integers(backend)


def test_units_that_the_plan_lacks_are_refused(backend):
    functional_checks.units_out_of_range(backend)


def test_more_tokens_than_there_are_cannot_be_taken(backend):
    functional_checks.taken_out_of_range(backend)


def test_an_index_of_another_cache_is_refused_by_every_verb(backend):
    functional_checks.index_of_another_cache(backend)


def test_an_index_put_together_by_hand_is_looked_at(backend):
    functional_checks.index_by_hand(backend)


def test_pools_of_another_cache_are_refused(backend):
    functional_checks.pools_of_another_cache(backend)


def test_formats_without_a_size_take_it_from_rows_or_ask(backend):
    functional_checks.unsized_formats(backend)


def test_layers_and_roles_that_are_not_there(backend):
    functional_checks.absent_layers(backend)


def test_arrays_that_mean_more_than_their_values_are_refused(backend):
    functional_checks.meaningful_numpy(backend)
