"""The runnable examples run, without a warning, and say what they promise."""

from pathlib import Path

import pytest

from tests.support.examples import printed

BLOB = Path(__file__).parent / "portable" / "golden_v2" / "blob"


@pytest.mark.parametrize(
    ("script", "promise"),
    [
        pytest.param("decode_step.py", "lengths 39 and 15", id="a decode step in torch"),
        pytest.param("plan_a_cache.py", "3514.25 bytes", id="planning a cache"),
        pytest.param(f"read_portable.py {BLOB}", "21 tokens (ids: 0 1 2", id="reading a blob without kvcore"),
        pytest.param(
            "store_blocks.py", "then 6\nwith a flipped bit in the third block 38\nrows equal: True", id="a store"
        ),
        pytest.param("move_a_request.py", "both went on to 28 tokens; digests equal: True", id="moving a request"),
        # JAX is in another environment's tests; here the reference prefills.
        pytest.param("hand_off.py --backend reference --shards 2", "on 2 shards: digests equal: True", id="to shards"),
    ],
)
def test_example_runs(script: str, promise: str) -> None:
    assert promise in printed(script)
