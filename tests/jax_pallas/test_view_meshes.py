"""Layer views over a mesh: what views on one device show and hold, and pure forms that fit any mesh."""

from tests.jax_pallas.processes import finished, start


def test_views_on_eight_devices_hold_and_show_what_views_on_one_do() -> None:
    running = [start("view_meshes", axes) for axes in ("auto", "explicit")]
    for one in running:
        assert finished(one).splitlines() == [
            "appended: 60 arrays",
            "pure form: 13 arrays",
            "donated: 13 of 13 arrays",
            "inserted one: 35 arrays",
            "what they were inserted into: 13 arrays",
            "inserted all, other starts and lengths: 35 arrays",
            "pure form of no mesh: 13 arrays",
            "pure form of another mesh: 13 arrays",
            "pure form of the batch over all: 13 arrays",
        ]
