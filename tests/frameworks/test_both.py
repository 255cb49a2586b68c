"""torch and JAX in one environment: requests move between them in mid-generation. ``nox -s frameworks`` has both."""

import pytest

import kvcore
from kvcore.handoff import import_shards
from kvcore.portable.convert import with_formats
from tests.sharding import test_regroup as regroup
from tests.support.examples import printed


@pytest.mark.parametrize(
    ("script", "promise"),
    [
        pytest.param(
            "move_a_request.py jax_pallas",
            "both went on to 28 tokens; digests equal: True",
            id="a request moves from torch to JAX",
        ),
        pytest.param(
            "hand_off.py --shards 4",
            "on 4 shards: digests equal: True",
            id="JAX prefills, torch decodes, on one process and on four",
        ),
    ],
)
def test_example_runs(script: str, promise: str) -> None:
    told = printed(script)
    assert promise in told
    assert "False" not in told


@pytest.mark.parametrize(
    ("source", "target", "shards", "others"),
    [("torch_triton", "jax_pallas", 2, 4), ("jax_pallas", "torch_triton", 4, 1), ("jax_pallas", "torch_triton", 2, 4)],
)
def test_a_request_moves_between_sides_that_are_unlike_in_everything(source, target, shards, others, tmp_path):
    """Frameworks, tensor-parallel degrees, block sizes and layouts at once, as blobs in files."""
    caches = [regroup.cache_of(shards, backend=source) for _ in range(shards)]
    for rank, cache in enumerate(caches):
        (tmp_path / str(rank)).write_bytes(cache.export_request(regroup.told(cache, shards, rank)))
    blobs = [(tmp_path / str(rank)).read_bytes() for rank in range(shards)]
    for rank in range(others):
        cache = regroup.cache_of(others, 8, target, layout="planar")
        request = import_shards(cache, blobs, whole=regroup.WHOLE, rank=rank, ranks=others)
        own = regroup.cache_of(others, 8)
        assert cache.digest([request]) == own.digest([regroup.told(own, others, rank)])
        # In other formats, too, from there.
        small = kvcore.create_cache(
            with_formats(cache.spec, {"key": "int8_row"}), backend=target, max_requests=1, max_tokens=64
        )
        assert small.import_request(cache.export_request(request), convert=True).length == regroup.TOKENS
