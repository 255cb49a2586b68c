"""Layer views over a mesh: what views on one device show and hold, and pure forms that fit any mesh."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("view_meshes.py")


def test_views_on_eight_devices_hold_and_show_what_views_on_one_do() -> None:
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parents[2]), *filter(None, sys.path)])
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), axes], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for axes in ("auto", "explicit")
    ]
    for one in running:
        try:
            out, errors = one.communicate(timeout=400)
        finally:
            one.kill()
        assert one.returncode == 0, errors[-3000:]
        assert out.splitlines() == [
            "appended: 60 arrays",
            "pure form: 14 arrays",
            "inserted one: 36 arrays",
            "what they were inserted into: 14 arrays",
            "inserted all, other starts and lengths: 36 arrays",
            "pure form of no mesh: 14 arrays",
            "pure form of another mesh: 14 arrays",
            "pure form of the batch over all: 14 arrays",
        ]
