"""The public cases of classic caches, rings, batches and positions on JAX: the tests that the other backends run.

Sweeps over every size are left out, each size compiles anew: RING-02's is in ``test_known_faults`` at one padded shape.
"""

import pytest
from cases.test_batch import (
    test_bat_01_a_wrapped_request_beside_one_that_is_not,
    test_bat_04_filler_is_neither_stored_nor_counted,
    test_spc_01_a_rollback_is_one_transaction_over_all_layers,
)
from cases.test_classic import (
    test_cls_02_a_reused_slot_is_a_fresh_one,
    test_cls_03_positions_belong_to_requests,
    test_cls_04_past_the_end_is_refused_not_clamped,
    test_cls_06_as_many_rows_as_the_mask_announces,
)
from cases.test_ring import (
    test_ring_01_the_first_eviction_belongs_to_the_row_after_the_window_is_full,
    test_ring_02_content_depends_on_positions_not_on_calls,
    test_ring_03_three_tokens_a_call_never_outgrow_the_ring,
    test_ring_05_a_prompt_longer_than_the_window,
    test_ring_06_the_window_counts_the_query_itself,
    test_ring_07_one_token_more_than_the_spare_rows_is_refused,
    test_ring_07_spare_rows_undo_as_many_tokens,
    test_ring_07_without_spare_rows_a_rollback_after_wrapping_is_refused,
    test_ring_09_a_window_beyond_the_maximum_length,
    test_ring_10_spare_rows_are_not_shown,
    test_ring_13_a_wrapped_ring_is_read_by_position,
)

__all__ = [name for name in list(globals()) if name.startswith("test_")]


@pytest.fixture
def backend():
    return "jax_pallas"
