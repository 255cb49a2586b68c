"""Context shards under shard_map on forced host devices: what the reference stores and answers, on any number."""

from tests.jax_pallas.processes import finished, start


def test_a_mesh_of_any_size_answers_what_one_device_does() -> None:
    out = finished(start("shards_on_devices", 4))
    assert out.splitlines() == [
        "4 shards: 1.entries.page: True",
        "4 shards: 0.window.page: True",
        "4 shards: 25 answers compared",
        "refused: mesh",
    ]
