"""Layer views over a mesh: what views on one device show and hold, and pure forms that fit any mesh."""

from processes import finished, start


def test_views_on_eight_devices_hold_and_show_what_views_on_one_do() -> None:
    running = [start("view_meshes.py", axes) for axes in ("auto", "explicit")]
    for one in running:
        assert finished(one).splitlines() == [
            "appended: 60 arrays",
            "pure form: 14 arrays",
            "inserted one: 36 arrays",
            "what they were inserted into: 14 arrays",
            "inserted all, other starts and lengths: 36 arrays",
            "pure form of no mesh: 14 arrays",
            "pure form of another mesh: 14 arrays",
            "pure form of the batch over all: 14 arrays",
        ]
